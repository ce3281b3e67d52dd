//! Compiles the messages with a compiler written in Rust: no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile(["proto/nri/v1alpha1/nri.proto", "proto/ttrpc/ttrpc.proto"], ["proto"])?;
    // The services are spoken over ttrpc: what gRPC needs is not generated.
    tonic_prost_build::configure().build_client(false).build_server(false).compile_fds(set)?;
    Ok(())
}
