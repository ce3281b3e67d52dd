//! The node view as a gRPC stream, so that a backend can be written in Go or any other language.
//!
//! [`Stream`] is a [`Backend`](crate::backend::Backend) whose work is done elsewhere: it hands on what it gets to
//! everybody who watches. The protocol is `proto/knit/proxy/v1alpha1/proxy.proto`, with its rules in its comments;
//! [`proto`] has the Rust code for it, client included.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use knit_proxy::engine::{Engine, EngineConfig, run};
//! use knit_proxy::grpc::Stream;
//! use knit_proxy::model::NodeInfo;
//!
//! let stream = Stream::new();
//! let server = tonic::transport::Server::builder().add_service(stream.service());
//! let (handle, inbox) = knit_proxy::source::handle();
//! let engine = Engine::new(EngineConfig::default(), NodeInfo::new("node-a"), stream);
//! std::thread::spawn(move || run(engine, &inbox));
//! // ... send objects through `handle` ...
//! server.serve("127.0.0.1:9090".parse()?).await?;
//! # Ok(()) }
//! ```

mod convert;
mod stream;
#[cfg(test)]
mod tests;

pub use stream::Stream;

/// The messages, the client and the server of the protocol.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    reason = "made by tonic from the .proto file, which has the words"
)]
pub mod proto {
    tonic::include_proto!("knit.proxy.v1alpha1");
}
