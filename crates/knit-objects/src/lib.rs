//! Where API objects come from and where statuses and events go: the Kubernetes API, or a folder of files.
//!
//! [`Objects`] is one handle over both. Reading: [`Objects::watch`] gives a [`Subscription`] (a stream of
//! events) or a [`Cache`] (for many readers) of any kind, with what is kept of each object decided at the
//! edge. Writing: [`Write`] describes one write; [`Objects::write`] carries it out; [`EventRecorder`] tells
//! people what happened.
//!
//! While the source is away, everything known stays in force and [`Connection`] says since when and why; when
//! it is back, what changed meanwhile arrives, deletions included.
//!
//! ```no_run
//! use k8s_openapi::api::core::v1::Pod;
//! use knit_objects::{Objects, Source};
//!
//! # async fn run() -> Result<(), knit_objects::Error> {
//! let objects = Objects::open(Source::folder("/etc/knit/objects")).await?;
//! let pods = objects
//!     .watch::<Pod>()
//!     .fields("spec.nodeName=node-1")
//!     .map(|pod| pod.status?.pod_ip)
//!     .cache()?;
//! pods.wait_synced(tokio::time::Instant::now() + std::time::Duration::from_secs(5)).await?;
//! for (key, address) in pods.list() {
//!     println!("{key} {address}");
//! }
//! # Ok(())
//! # }
//! ```

mod api;
mod backoff;
mod cache;
mod error;
mod events;
mod folder;
mod health;
mod key;
mod objects;
mod problem;
mod selector;
mod source;
mod watch;
mod write;

pub use backoff::{Backoff, jitter};
pub use cache::{Cache, Progress};
pub use error::{Attempt, Error, Result};
pub use events::{EventLimits, EventNote, EventRecorder, Reporter};
pub use folder::{FolderOptions, Kinds, Scope, check_file};
pub use health::Connection;
pub use key::{Key, Object, Target};
pub use objects::{Objects, Source};
pub use problem::{Problem, Severity};
pub use selector::Selection;
pub use watch::{BatchSubscription, Event, Subscription, Watch};
pub use write::Write;
