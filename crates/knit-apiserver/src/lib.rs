//! An embedded Kubernetes API: an HTTP server over an in-memory store, and the store itself for use in
//! process.
//!
//! One generic path stores every kind as JSON; what is particular to a kind is in small tables ([`kinds`],
//! [`shape`], [`table`]) and files ([`builtin`], [`service`]). It is a stand-in for tests and first steps,
//! not a product: no authentication, no admission webhooks, nothing on disk. `docs/lab-api.md` lists the
//! differences to a real server.

pub mod admission;
pub mod apply;
pub mod builtin;
pub mod cel;
pub mod discovery;
pub mod event;
pub mod exec;
pub mod fields;
pub mod http;
pub mod jsonpath;
pub mod kinds;
pub mod log;
pub mod names;
pub mod object;
pub mod openapi;
pub mod patch;
pub mod proto;
pub mod request;
pub mod schema;
pub mod selector;
pub mod server;
pub mod service;
pub mod shape;
pub mod state;
pub mod status;
pub mod store;
pub mod stream;
pub mod table;
pub mod validate;
pub mod watch;
pub mod websocket;
pub mod write;

pub use server::{Config, Handle, Server, StartError};
pub use status::ApiError;
pub use store::{ListParams, Store, StoreOptions};
pub use write::{DeleteOptions, WriteOptions, Written};

/// The Kubernetes version whose behaviour is imitated.
pub const VERSION: &str = "v1.35.0";

/// What `/version` answers.
pub fn version() -> serde_json::Value {
    serde_json::json!({
        "major": "1", "minor": "35", "gitVersion": format!("{VERSION}+knit-lab"), "gitCommit": "",
            "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "rustc", "platform": "linux/amd64",
    })
}
