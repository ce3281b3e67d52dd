//! How `knit drops` asks the agent of its node: a Unix socket, one line of JSON there, one for each entry
//! back.
//!
//! Only root, and the user that the agent runs as, may ask: the list names pods of all namespaces.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use knit_runtime::wire::bind_private;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, broadcast};
use tokio::time::timeout;

use crate::collect::Drops;
use crate::entry::Dropped;

/// The socket's name in the agent's run-time directory.
pub const NAME: &str = "drops.sock";

/// How many may ask at once; others wait.
const CLIENTS: usize = 16;
/// A request is shorter than this.
const LONGEST_REQUEST: u64 = 1024;
/// How long a client may take to ask, and to take a line.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// What is asked for.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Request {
    /// After what was dropped lately, what is dropped from then on.
    #[serde(default)]
    pub follow: bool,
}

/// One line of the answer.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Line {
    /// Something was dropped.
    Dropped(Box<Dropped>),
    /// So many lines were left out, because they were not read in time.
    LeftOut(u64),
}

/// The socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the socket {path} for knit drops: check that its directory exists and is writable")]
pub struct OpenError {
    /// The path of the socket.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

/// Opens the socket, in place of one that an earlier agent left. Needs a tokio runtime.
///
/// # Errors
/// When it cannot be made.
pub fn open(path: &Path) -> Result<UnixListener, OpenError> {
    bind_private(path).map_err(|source| OpenError { path: path.to_owned(), source })
}

/// Answers forever.
pub async fn serve(listener: UnixListener, drops: Drops) {
    let clients = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(permit) = Arc::clone(&clients).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let drops = drops.clone();
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, &drops).await {
                        tracing::debug!(%error, "a client of the drops socket was not served");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client of the drops socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, drops: &Drops) -> io::Result<()> {
    let (asking, own) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if asking != 0 && asking != own {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("user {asking} may not query dropped packets"),
        ));
    }
    let mut text = String::new();
    let (reading, mut writing) = stream.split();
    let mut reading = tokio::io::BufReader::new(reading.take(LONGEST_REQUEST));
    timeout(CLIENT_TIMEOUT, reading.read_line(&mut text)).await??;
    let request: Request = serde_json::from_str(&text)?;
    // Before the list is read: nothing falls in between.
    let mut follow = drops.follow();
    for dropped in drops.recent() {
        write(&mut writing, &Line::Dropped(Box::new(dropped))).await?;
    }
    if !request.follow {
        return Ok(());
    }
    loop {
        let mut nothing = [0; 1];
        let line = tokio::select! {
            // A client that is gone is noticed even if nothing is dropped.
            read = reading.read(&mut nothing) => match read? {
                0 => return Ok(()),
                _ => continue,
            },
            next = follow.recv() => match next {
                Ok(dropped) => Line::Dropped(Box::new(dropped)),
                Err(broadcast::error::RecvError::Lagged(lines)) => Line::LeftOut(lines),
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            },
        };
        write(&mut writing, &line).await?;
    }
}

async fn write(to: &mut (impl tokio::io::AsyncWrite + Unpin), line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    timeout(CLIENT_TIMEOUT, to.write_all(text.as_bytes())).await?
}

/// Asks the agent that serves this socket, and hands out line by line until there are no more, or `each` says
/// that it has enough.
///
/// # Errors
/// When nobody answers, or not in this form.
pub fn ask(path: &Path, request: Request, mut each: impl FnMut(Line) -> io::Result<bool>) -> io::Result<()> {
    let stream = StdStream::connect(path)?;
    (&stream).write_all(format!("{}\n", serde_json::to_string(&request)?).as_bytes())?;
    for line in BufReader::new(&stream).lines() {
        if !each(serde_json::from_str(&line?)?)? {
            break;
        }
    }
    Ok(())
}
