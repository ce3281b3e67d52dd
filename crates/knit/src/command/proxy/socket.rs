//! How `get` and `explain` ask the proxy that runs on this node: one line of JSON each way through a Unix
//! socket.
//!
//! Only the user the proxy runs as, and root, may ask.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use knit_proxy::grpc::Stream;
use knit_proxy::source::Handle;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

use super::watchers::WatcherRow;
use super::{report, show};

pub const DEFAULT_PATH: &str = "/run/knit/proxy.sock";

/// What can be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// The whole node view.
    State,
    /// Why a Service is served the way it is.
    Explain {
        /// `namespace/name`.
        service: String,
    },
}

/// A request is shorter than this.
const LONGEST_REQUEST: u64 = 4096;
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the proxy that runs here.
pub fn ask<T: DeserializeOwned>(path: &Path, request: &Request) -> Result<T> {
    let name = path.display();
    let stream = StdStream::connect(path).with_context(|| {
        format!(
            "no proxy answers at {name}; start one, or specify where objects come from: \
            --from-files or --kubeconfig"
        )
    })?;
    let asked = || -> std::io::Result<String> {
        stream.set_read_timeout(Some(QUERY_TIMEOUT))?;
        (&stream).write_all(format!("{}\n", serde_json::to_string(request)?).as_bytes())?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        Ok(line)
    };
    let line = asked().with_context(|| format!("the proxy at {name} did not answer"))?;
    serde_json::from_str(&line).with_context(|| format!("the proxy at {name} sent an unexpected answer"))
}

/// Listens, and takes the place of a proxy that is gone.
pub fn listen(path: &Path) -> Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    if StdStream::connect(path).is_ok() {
        bail!("another proxy already answers at {}; give this one another --socket", path.display());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot restrict access to {}", path.display()))?;
    Ok(listener)
}

/// Answers until it is dropped.
pub async fn serve(listener: UnixListener, handle: Handle, watched: Option<Stream>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let (handle, watched) = (handle.clone(), watched.clone());
        tokio::spawn(async move {
            if let Err(error) = answer(stream, handle, watched).await {
                tracing::debug!("a query was not answered: {error:#}");
            }
        });
    }
}

async fn answer(mut stream: UnixStream, handle: Handle, watched: Option<Stream>) -> Result<()> {
    let (asking, own) = (stream.peer_cred()?.uid(), rustix::process::getuid().as_raw());
    if asking != 0 && asking != own {
        bail!("user {asking} may not query this proxy");
    }
    let mut line = String::new();
    let (reading, mut writing) = stream.split();
    tokio::io::BufReader::new(reading.take(LONGEST_REQUEST)).read_line(&mut line).await?;
    let request: Request = serde_json::from_str(&line).context("not a request")?;
    // The engine answers on its own thread, between two rounds of work.
    let reply = tokio::task::spawn_blocking(move || reply(&request, &handle, watched.as_ref())).await??;
    writing.write_all(format!("{reply}\n").as_bytes()).await?;
    Ok(())
}

fn reply(request: &Request, handle: &Handle, watched: Option<&Stream>) -> Result<String> {
    match request {
        Request::State => {
            let mut state = handle.inspect(|engine| {
                let mut state = show::State::of_view(engine.view);
                state.problems.extend(engine.failed().map(|(key, why)| format!("{key}: {why}")));
                state.problems.extend(engine.broken().map(|why| format!("nothing is in force: {why}")));
                let orphans = report::orphans(engine);
                state.problems.extend(orphans.iter().map(|(group, service)| report::orphan(group, service)));
                state
            })?;
            state.watchers = watched.map(WatcherRow::all).unwrap_or_default();
            state.problems.extend(state.watchers.iter().flat_map(WatcherRow::problems));
            Ok(serde_json::to_string(&state)?)
        }
        Request::Explain { service } => {
            let service = service.clone();
            let text = handle.inspect(move |engine| show::explanation(engine.view, &service))?;
            Ok(serde_json::to_string(&text)?)
        }
    }
}
