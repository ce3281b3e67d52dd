//! Compiles the protocol with a compiler written in Rust: no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    #[cfg(feature = "grpc")]
    {
        let set = protox::compile(["proto/knit/proxy/v1alpha1/proxy.proto"], ["proto"])?;
        tonic_prost_build::configure().compile_fds(set)?;
    }
    Ok(())
}
