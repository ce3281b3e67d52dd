//! The node view as a gRPC stream, so that a backend can be written in Go or any other language.
//!
//! [`Stream`] is a [`Backend`](crate::backend::Backend) whose work is done elsewhere: it hands on what it
//! gets to everybody who watches, and knows what they report of their work, service port by service port. The
//! protocol is `proto/knit/proxy/v1alpha1/proxy.proto`, with its rules in its comments; [`proto`] has the
//! Rust code for it, client included. [`Source`] is the other end in Rust: it feeds an engine with what a
//! [`Stream`] in another process says, so that a node needs no watch of its own on the Kubernetes API.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use knit_proxy::engine::{Engine, EngineConfig, run};
//! use knit_proxy::grpc::Stream;
//! use knit_proxy::model::NodeInfo;
//!
//! let stream = Stream::new();
//! let (handle, inbox) = knit_proxy::source::handle();
//! let engine = Engine::new(EngineConfig::default(), NodeInfo::new("node-a"), stream.clone());
//! std::thread::spawn(move || run(engine, &inbox));
//! // ... send objects through `handle` ...
//! stream.serve_tcp(tokio::net::TcpListener::bind("127.0.0.1:9090").await?).await?;
//! # Ok(()) }
//! ```
//!
//! And in the process that does the work, with any backend:
//!
//! ```no_run
//! # use knit_proxy::backend::Backend;
//! # async fn f(backend: impl Backend + Send + 'static) -> Result<(), Box<dyn std::error::Error>> {
//! use knit_proxy::engine::{Engine, EngineConfig, run};
//! use knit_proxy::grpc::Source;
//! use knit_proxy::model::NodeInfo;
//!
//! let source = Source::new("http://127.0.0.1:9090", "node-a")?;
//! let (handle, inbox) = knit_proxy::source::handle();
//! let engine = Engine::new(EngineConfig::default(), NodeInfo::new("node-a"), backend)
//!     .observed_by(source.observer());
//! std::thread::spawn(move || run(engine, &inbox));
//! source.run(handle, |link| eprintln!("{link:?}")).await?;
//! # Ok(()) }
//! ```

mod convert;
pub mod decode;
mod queue;
mod source;
mod stream;
#[cfg(test)]
mod tests;

pub use source::{BadAddress, Link, Source};
pub use stream::{Stream, Watcher};

/// How large a message may be: one service port with some hundred thousand endpoints.
const MAX_MESSAGE: usize = 64 << 20;

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
