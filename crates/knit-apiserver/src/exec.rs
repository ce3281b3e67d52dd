//! `pods/NAME/exec`: a command in a pod, its streams on the channels of a WebSocket, as `kubectl exec` asks
//! for them.

use std::fmt;
use std::process::Stdio;

use http_body_util::{BodyExt as _, Empty};
use hyper::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;

use super::http::Body;
use super::log::container;
use super::request::Query;
use super::status::{ApiError, Result};
use super::store::Store;
use super::websocket::{self, Incoming};

/// Channels of remote commands.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
/// In version 5 of the protocol: the channel named next ends.
const END: u8 = 255;

/// Starts commands in pods: whoever runs them.
pub trait Exec: fmt::Debug + Send + Sync {
    /// Starts a command in a pod, with all its streams piped; or says why not.
    fn start(&self, namespace: &str, name: &str, container: &str, line: &[String]) -> Result<Child, String>;
}

/// What is asked for, besides the pod.
#[derive(Clone, Copy, Debug)]
struct Streams {
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

/// The standard streams of a command that [`Exec`] starts.
pub fn pipe_all(command: &mut tokio::process::Command) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
}

/// Answers a request for a command: starts it, and serves its streams once the connection is upgraded.
pub(super) fn answer(
    store: &Store,
    exec: Option<&dyn Exec>,
    (namespace, name): (&str, &str),
    query: &Query,
    headers: &HeaderMap,
    upgrade: OnUpgrade,
) -> Result<Response<Body>> {
    let pod = store.get(&*store.kind("v1", "Pod")?, namespace, name)?;
    let container = container(&pod, query.get("container"))?;
    let exec =
        exec.ok_or_else(|| ApiError::bad_request("nobody runs pods here, so no command can be run in one"))?;
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    if !text("upgrade").eq_ignore_ascii_case("websocket") {
        return Err(ApiError::bad_request(
            "this API serves commands over WebSockets only, as kubectl from 1.31 on uses them",
        ));
    }
    let offered = text("sec-websocket-protocol").split(',').map(str::trim);
    let protocol = offered.filter(|name| matches!(*name, "v5.channel.k8s.io" | "v4.channel.k8s.io")).max();
    let protocol = protocol
        .ok_or_else(|| ApiError::bad_request("none of the offered subprotocols is v5.channel.k8s.io"))?;
    let line = query.command();
    if line.is_empty() {
        return Err(ApiError::bad_request("you must specify at least 1 command for the container"));
    }
    // What goes wrong from here on is said over the new connection: after another answer, kubectl would try
    // an older protocol.
    let child = if query.flag("tty") {
        let instead = format!("leave -t out, or use `knit lab exec {namespace}/{name} -- COMMAND`");
        Err(format!("a terminal is not served: {instead}"))
    } else {
        exec.start(namespace, name, &container, line)
    };
    let streams =
        Streams { stdin: query.flag("stdin"), stdout: query.flag("stdout"), stderr: query.flag("stderr") };
    let mut response = Response::new(Empty::new().boxed_unsync());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let own = response.headers_mut();
    own.insert(UPGRADE, HeaderValue::from_static("websocket"));
    own.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    let accept = websocket::accept(text("sec-websocket-key"));
    for (name, value) in [("sec-websocket-accept", accept.as_str()), ("sec-websocket-protocol", protocol)] {
        if let Ok(value) = HeaderValue::from_str(value) {
            own.insert(name, value);
        }
    }
    tokio::spawn(async move {
        let served = match upgrade.await {
            Ok(upgraded) => serve(upgraded, child, streams).await,
            Err(error) => Err(std::io::Error::other(error)),
        };
        if let Err(error) = served {
            tracing::debug!(%error, "a command's connection ended early");
        }
    });
    Ok(response)
}

/// Carries the streams until the command has ended, or until who asked for it goes away; then it is killed.
async fn serve(upgraded: Upgraded, child: Result<Child, String>, streams: Streams) -> std::io::Result<()> {
    let (reader, mut writer) = tokio::io::split(TokioIo::new(upgraded));
    let mut child = match child {
        Ok(child) => child,
        Err(why) => {
            let status = ApiError::new(500, "InternalError", why).to_status();
            websocket::send_on(&mut writer, ERROR, status.to_string().as_bytes()).await?;
            return websocket::send_close(&mut writer).await;
        }
    };
    let (pings, mut pinged) = mpsc::channel(4);
    let stdin = child.stdin.take().filter(|_| streams.stdin);
    // Apart from the output: a command may wait for us to read before it reads on.
    let input = tokio::spawn(feed(reader, stdin, pings));
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (mut out, mut err) = (vec![0; 32 * 1024], vec![0; 32 * 1024]);
    while stdout.is_some() || stderr.is_some() {
        tokio::select! {
            read = read_some(&mut stdout, &mut out) => {
                if read > 0 && streams.stdout {
                    websocket::send_on(&mut writer, STDOUT, &out[..read]).await?;
                }
            }
            read = read_some(&mut stderr, &mut err) => {
                if read > 0 && streams.stderr {
                    websocket::send_on(&mut writer, STDERR, &err[..read]).await?;
                }
            }
            ping = pinged.recv() => match ping {
                Some(data) => websocket::send_pong(&mut writer, &data).await?,
                None => return child.kill().await,
            },
        }
    }
    let ended = child.wait().await?;
    input.abort();
    let status = outcome(ended.code().unwrap_or(137));
    websocket::send_on(&mut writer, ERROR, status.to_string().as_bytes()).await?;
    websocket::send_close(&mut writer).await
}

/// Hands a command its input, and pings on, until the other side is through.
async fn feed(
    mut reader: impl AsyncRead + Unpin,
    mut stdin: Option<ChildStdin>,
    pings: mpsc::Sender<Vec<u8>>,
) {
    loop {
        match websocket::receive(&mut reader).await {
            Ok(Incoming::Message(message)) => match message.split_first() {
                Some((&STDIN, data)) => {
                    // A command that does not read any more ends by itself.
                    if let Some(pipe) = &mut stdin
                        && pipe.write_all(data).await.is_err()
                    {
                        stdin = None;
                    }
                }
                Some((&END, [STDIN])) => stdin = None,
                _ => {}
            },
            Ok(Incoming::Ping(data)) => {
                if pings.send(data).await.is_err() {
                    return;
                }
            }
            Ok(Incoming::Closed) | Err(_) => return,
        }
    }
}

/// Reads what there is; a stream that has ended is gone afterwards.
async fn read_some<R: AsyncRead + Unpin>(stream: &mut Option<R>, buffer: &mut [u8]) -> usize {
    let Some(open) = stream else { return std::future::pending().await };
    match open.read(buffer).await {
        Ok(read) if read > 0 => read,
        _ => {
            *stream = None;
            0
        }
    }
}

/// How a command ended, as a Status object.
fn outcome(code: i32) -> Value {
    if code == 0 {
        return json!({"metadata": {}, "status": "Success"});
    }
    json!({"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": format!("command terminated with exit code {code}"),
        "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]}})
}
