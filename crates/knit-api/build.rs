//! Compiles the gRPC protocols with a compiler written in Rust: no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    #[cfg(feature = "kni")]
    {
        let files = [
            "proto/kni/v1alpha1/kni.proto",
            "proto/kni/beta/kni.proto",
            "proto/cri/v1/cri.proto",
            "proto/kubelet/registration.proto",
            "proto/kubelet/dra_v1.proto",
            "proto/kubelet/dra_v1beta1.proto",
            "proto/kubelet/dra_health_v1.proto",
            "proto/kubelet/dra_health_v1alpha1.proto",
        ];
        let set = protox::compile(files, ["proto"])?;
        tonic_prost_build::configure().compile_fds(set)?;
    }
    Ok(())
}
