//! The KNI door: pods are attached by gRPC, without CNI. Both protocols share one unix socket, for root
//! alone.
//!
//! Here the client names the pod, and the agent decides Networks and addresses by the same rules as for CNI.

mod beta;
mod pods;
mod same;
mod v1alpha1;

use std::io;
use std::path::{Path, PathBuf};

use knit_api::kni::beta::kni_server::KniServer;
use knit_api::kni::v1alpha1::network_runtime_server::NetworkRuntimeServer;
use knit_runtime::wire::{Clients, listen, status_from_error};
use tonic::Status;
use tonic::transport::Server;

use crate::core::Core;
use crate::error::{Error, Reason};

/// The socket's name in the run-time directory.
pub const SOCKET: &str = "kni.sock";

/// Where namespaces are mounted that a client asks for without saying where.
const NAMESPACES: &str = "/run/netns";

/// The open door.
pub struct KniDoor {
    clients: Clients,
    path: PathBuf,
}

/// Why the door cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the socket {path} for KNI clients: check that its directory exists and is writable",
    path = path.display())]
pub struct KniDoorError {
    /// The socket.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

// === impl KniDoor ===

impl KniDoor {
    /// Opens the socket, in place of one that an earlier agent left. Needs a tokio runtime.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(path: &Path) -> Result<Self, KniDoorError> {
        let clients = listen(path).map_err(|source| KniDoorError { path: path.to_owned(), source })?;
        Ok(Self { clients, path: path.to_owned() })
    }

    /// Serves forever.
    pub async fn serve(self, core: Core) {
        let namespaces = pods::Pods::new(core.config().run_dir.join("kni"), NAMESPACES.into());
        let server = Server::builder()
            .add_service(NetworkRuntimeServer::new(v1alpha1::Door::new(core.clone())))
            .add_service(KniServer::new(beta::Door::new(core, namespaces)));
        if let Err(error) = server.serve_with_incoming(self.clients).await {
            let error = &error as &dyn std::error::Error;
            tracing::error!(socket = %self.path.display(), error, "KNI clients are no longer served");
        }
    }
}

impl std::fmt::Debug for KniDoor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KniDoor").field("path", &self.path).finish_non_exhaustive()
    }
}

/// A port as a client gives it; the protocols have other types for it.
fn port_number<N: TryInto<u16> + std::fmt::Display + Copy>(what: &str, n: N) -> Result<u16, Status> {
    let number: Option<u16> = n.try_into().ok();
    number.filter(|n| *n > 0).ok_or_else(|| invalid(format!("{what} {n} is not a valid port")))
}

/// An error of the core in KNI's words.
fn to_runtime_error(error: &Error) -> knit_runtime::Error {
    use knit_runtime::Reason as R;
    let reason = match error.reason {
        Reason::Invalid | Reason::Refused => R::Invalid,
        Reason::NotAllowed => R::NotAllowed,
        Reason::NotReady => R::NotReady,
        Reason::AddressesExhausted => R::AddressesExhausted,
        Reason::AddressInUse => R::AddressInUse,
        Reason::UnknownSandbox => R::AttachmentNotFound,
        Reason::Damaged => R::Damaged,
        Reason::AttachFailed | Reason::Internal => R::Internal,
    };
    knit_runtime::Error::new(reason, error.chain())
}

fn to_status(error: &Error) -> Status {
    status_from_error(&to_runtime_error(error))
}

fn invalid(message: impl Into<String>) -> Status {
    status_from_error(&knit_runtime::Error::new(knit_runtime::Reason::Invalid, message))
}

fn unsupported(message: &str) -> Status {
    status_from_error(&knit_runtime::Error::new(knit_runtime::Reason::Unsupported, message))
}
