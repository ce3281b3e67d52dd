//! The CNI shim's door: a unix socket for root alone, one request and one answer per connection.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use knit_cni::protocol::{self, Command, FrameError, HEADER, PROTOCOL_VERSION, Request, Response};
use knit_cni::{CniError, code};
use knit_runtime::wire::bind_private;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::Instrument as _;

use super::translate;
use crate::core::Core;
use crate::request::Door;

/// How long a client may take to say what it wants, and to take the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// How many clients are served at once; further ones wait in the socket's queue.
const MAX_CLIENTS: usize = 512;

/// The open door.
#[derive(Debug)]
pub struct CniDoor {
    listener: UnixListener,
    path: PathBuf,
}

/// Why the door cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the socket {path} for the CNI shim: check that its directory exists and is writable")]
pub struct DoorError {
    /// The socket.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

// === impl CniDoor ===

impl CniDoor {
    /// Opens the socket, in place of one that an earlier agent left. Needs a tokio runtime.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(path: &Path) -> Result<Self, DoorError> {
        let failed = |source| DoorError { path: path.to_owned(), source };
        let listener = bind_private(path).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves forever.
    pub async fn serve(self, core: Core) {
        let clients = Arc::new(Semaphore::new(MAX_CLIENTS));
        loop {
            let Ok(permit) = Arc::clone(&clients).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let core = core.clone();
                    tokio::spawn(async move {
                        if let Err(error) = serve_one(stream, &core).await {
                            tracing::debug!(
                                error = &error as &dyn std::error::Error,
                                "a client of the CNI socket was not served"
                            );
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    // Out of descriptors, mostly: a pause lets others end.
                    tracing::warn!(%error, "cannot accept a client of the CNI socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

async fn serve_one(mut stream: UnixStream, core: &Core) -> Result<(), FrameError> {
    let peer = stream.peer_cred().map_err(FrameError::Io)?;
    if peer.uid() != 0 && peer.uid() != rustix::process::geteuid().as_raw() {
        tracing::warn!(
            uid = peer.uid(),
            pid = peer.pid(),
            "refused a client of the CNI socket that is not root"
        );
        return Ok(());
    }
    let request = match timeout(CLIENT_TIMEOUT, read(&mut stream)).await {
        Ok(Ok(request)) => request,
        Ok(Err(FrameError::Closed)) => return Ok(()),
        Ok(Err(error)) => {
            let answer = Response::Err(CniError::new(code::DECODE, error.to_string()));
            write(&mut stream, &answer).await?;
            return Err(error);
        }
        // A client that says nothing gets no answer.
        Err(_) => return Ok(()),
    };
    let span = tracing::info_span!(
        "cni",
        command = ?request.command,
        sandbox = %request.container_id,
        namespace = request.args.pod_namespace.as_deref(),
        pod = request.args.pod_name.as_deref()
    );
    let response = match answer(request, core).instrument(span).await {
        Ok(value) => Response::Ok(value),
        Err(error) => Response::Err(error),
    };
    write(&mut stream, &response).await
}

async fn answer(request: Request, core: &Core) -> Result<Value, CniError> {
    if request.version != PROTOCOL_VERSION {
        let msg = format!(
            "the CNI shim speaks version {} of its protocol, the node agent {PROTOCOL_VERSION}: install \
            both from the same release",
            request.version
        );
        return Err(CniError::new(code::INTERNAL, msg));
    }
    let version =
        request.config.version().map_err(|e| CniError::new(code::INCOMPATIBLE_VERSION, e.to_string()))?;
    let deadline = Instant::now() + patience(&request, core);
    match request.command {
        Command::Add => {
            let pod_request = translate::pod_request(request)?;
            let attached = core.attach(pod_request, deadline).await.map_err(|e| translate::cni_error(&e))?;
            Ok(translate::result(&attached).to_json(version))
        }
        Command::Del => {
            let (sandbox, interface) = (translate::sandbox(&request)?, translate::interface(&request)?);
            core.detach(sandbox, Some(interface)).await.map_err(|e| translate::cni_error(&e))?;
            Ok(Value::Null)
        }
        Command::Check => {
            let sandbox = translate::sandbox(&request)?;
            let Some(previous) = &request.config.prev_result else {
                return Err(CniError::new(
                    code::INVALID_CONFIG,
                    "CHECK needs prevResult: pass the result of ADD",
                ));
            };
            let attached = core.check(sandbox).await.map_err(|e| translate::cni_error(&e))?;
            translate::check_previous(&attached, previous)?;
            Ok(Value::Null)
        }
        Command::Gc => {
            let keep = translate::kept(&request.config)?;
            let door = Door::Cni(request.config.name);
            core.gc(door, keep).await.map_err(|e| translate::cni_error(&e))?;
            Ok(Value::Null)
        }
        Command::Status => match core.status() {
            Ok(()) => Ok(Value::Null),
            Err(error) => Err(CniError::new(code::NOT_AVAILABLE, error.chain())),
        },
    }
}

/// How long a request may take: a little less than its client waits, so that the client hears why it failed.
fn patience(request: &Request, core: &Core) -> Duration {
    let most = core.config().request_deadline;
    request.timeout_ms.map_or(most, |ms| Duration::from_millis(ms - ms / 10).min(most))
}

async fn read(stream: &mut UnixStream) -> Result<Request, FrameError> {
    let mut header = [0; HEADER];
    match stream.read_exact(&mut header).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(FrameError::Closed),
        Err(error) => return Err(FrameError::Io(error)),
    }
    let mut content = vec![0; protocol::length(header)?];
    match stream.read_exact(&mut content).await {
        Ok(_) => protocol::decode(&content),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(FrameError::Truncated),
        Err(error) => Err(FrameError::Io(error)),
    }
}

async fn write(stream: &mut UnixStream, response: &Response) -> Result<(), FrameError> {
    let frame = protocol::encode(response)?;
    let send = async {
        stream.write_all(&frame).await?;
        stream.shutdown().await
    };
    match timeout(CLIENT_TIMEOUT, send).await {
        Ok(sent) => sent.map_err(FrameError::Io),
        Err(_) => Err(FrameError::Io(io::ErrorKind::TimedOut.into())),
    }
}
