//! The unix socket that a server of the protocol listens on: closed to everybody but root and its own user.

use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::net::{UnixListener, UnixStream};

use super::authority::Client;
use super::server::service;
use crate::runtime::Runtime;

/// Clients of a socket, as a gRPC server takes them.
pub type Clients = BoxStream<'static, io::Result<Client>>;

/// Listens on a socket, in place of one that an earlier process left. Needs a tokio runtime. Its mode is
/// 0600, and clients that are neither root nor our own user are turned away.
///
/// # Errors
/// When it cannot be made.
pub fn listen(path: &Path) -> io::Result<Clients> {
    let listener = bind_private(path)?;
    Ok(stream::unfold(listener, |listener| async {
        let client = accept(&listener).await;
        Some((Ok(Client::new(client)), listener))
    })
    .boxed())
}

/// Opens a socket for root alone, and the user that this process runs as, in place of one that an earlier
/// process left. Needs a tokio runtime.
///
/// # Errors
/// When it cannot be made.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    // Made under another name and closed to others before it takes its own: nobody gets in through a gap. A
    // hidden one, since kubelet looks at every other socket in its registry.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = path.with_file_name(format!(".{name}.new"));
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

/// Serves a runtime on a socket until `stop` is ready, and then ends what is being worked on.
///
/// # Errors
/// When the socket cannot be made, or the server fails.
pub async fn serve(path: &Path, runtime: Arc<dyn Runtime>, stop: impl Future<Output = ()>) -> io::Result<()> {
    let clients = listen(path)?;
    let server = tonic::transport::Server::builder().add_service(service(runtime));
    server.serve_with_incoming_shutdown(clients, stop).await.map_err(io::Error::other)
}

/// The next client that may come in.
async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await.and_then(|(client, _)| Ok((client.peer_cred()?, client))) {
            Ok((peer, client)) if peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw() => {
                return client;
            }
            Ok((peer, _)) => {
                tracing::warn!(uid = peer.uid(), pid = peer.pid(), "refused a KNI client that is not root");
            }
            Err(error) => {
                // Out of descriptors, mostly: a pause lets others end.
                tracing::warn!(%error, "cannot accept a KNI client");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
