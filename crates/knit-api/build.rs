//! Compiles the gRPC protocols with a compiler written in Rust: no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    #[cfg(feature = "kni")]
    {
        let files = ["proto/kni/v1alpha1/kni.proto", "proto/kni/beta/kni.proto", "proto/cri/v1/cri.proto"];
        let set = protox::compile(files, ["proto"])?;
        tonic_prost_build::configure().compile_fds(set)?;
    }
    Ok(())
}
