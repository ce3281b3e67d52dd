//! One connection to a runtime: registered, configured, synchronized, and then served until it ends.
//!
//! The runtime may call before it has answered the registration, so nothing here waits for one message only.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::client::Identity;
use crate::mux::{self, Demux, TooLong};
use crate::plugin::{Plugin, Refusal, own_time};
use crate::ttrpc::{Assembler, Body, Garbled, Message, code};
use crate::version::Runtime;
use crate::wire::ttrpc::{Request, Response};
use crate::wire::{
    ConfigureRequest, ConfigureResponse, Container, CreateContainerRequest, CreateContainerResponse, Empty,
    Event, FailurePolicy, PodSandbox, PodSandboxRequest, RegisterPluginRequest, StateChangeEvent,
    SynchronizeRequest, SynchronizeResponse,
};

/// The service of plugins.
pub const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The service of runtimes.
pub const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";

/// The version of NRI whose messages these are.
const NRI_VERSION: &str = "v0.12.4";

/// The events that a network plugin hears of: a sandbox runs, stops, is removed; a container is created.
pub const EVENTS: i32 = 0b1111;

/// How long a caller waits that does not say so.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest that a caller is believed to wait: what it says may be any number.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The stream of the one call to the runtime.
const REGISTRATION: u32 = 1;

/// What a runtime may cost.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How long registration and configuration may take.
    pub registration: Duration,
    /// How long an answer may take to be sent: a runtime that takes none is not there.
    pub write: Duration,
    /// How many requests are worked on side by side.
    pub requests: usize,
    /// How many sandboxes one runtime may have.
    pub sandboxes: usize,
}

/// The end of a session.
#[derive(Debug)]
pub struct Ended {
    /// Whether the runtime had accepted the plugin.
    pub served: bool,
    /// The reason, in words.
    pub why: SessionError,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The runtime closed it.
    #[error("the container runtime closed the connection")]
    Closed,
    /// The socket failed.
    #[error("the connection to the container runtime failed")]
    Io(#[source] io::Error),
    /// What came is not NRI.
    #[error("the container runtime sent something that is not NRI")]
    Mux(#[source] TooLong),
    /// What came is not ttrpc.
    #[error("the container runtime sent something that is not ttrpc")]
    Garbled(#[source] Garbled),
    /// It does not want this plugin.
    #[error("the container runtime refused the plugin: {0}")]
    Refused(String),
    /// It says nothing.
    #[error("the container runtime did not configure the plugin within {} s", .0.as_secs())]
    Silent(Duration),
    /// It takes no answers.
    #[error("the container runtime did not accept an answer within {} s", .0.as_secs())]
    Stuck(Duration),
}

struct Session<'a, P> {
    plugin: &'a Arc<P>,
    limits: &'a Limits,
    /// Set by `Configure`.
    request_timeout: Option<Duration>,
    /// Parts of a list that comes in several.
    pods: Vec<PodSandbox>,
    /// Of the same list: the ids of sandboxes that containers have run in.
    started: BTreeSet<String>,
    /// Requests that are being worked on, each with its stream.
    running: JoinSet<(u32, Response)>,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            registration: Duration::from_secs(10),
            write: Duration::from_secs(5),
            requests: 64,
            sandboxes: 16_384,
        }
    }
}

impl From<TooLong> for SessionError {
    fn from(error: TooLong) -> Self {
        Self::Mux(error)
    }
}

/// Registers on a connection and serves it until it ends.
pub async fn serve<P: Plugin>(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin,
    identity: &Identity,
    plugin: &Arc<P>,
    limits: &Limits,
) -> Ended {
    let mut session = Session {
        plugin,
        limits,
        request_timeout: None,
        pods: Vec::new(),
        started: BTreeSet::new(),
        running: JoinSet::new(),
    };
    let why = session.run(stream, identity).await;
    let served = session.request_timeout.is_some();
    if served {
        plugin.disconnected();
    }
    Ended { served, why }
}

// === impl Session ===

impl<P: Plugin> Session<'_, P> {
    async fn run(
        &mut self,
        mut stream: impl AsyncRead + AsyncWrite + Send + Unpin,
        identity: &Identity,
    ) -> SessionError {
        match self.talk(&mut stream, identity).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn talk(
        &mut self,
        stream: &mut (impl AsyncRead + AsyncWrite + Send + Unpin),
        identity: &Identity,
    ) -> Result<std::convert::Infallible, SessionError> {
        self.send(stream, mux::RUNTIME, &registration(identity)).await?;
        let silent = tokio::time::sleep(self.limits.registration);
        tokio::pin!(silent);
        let (mut demux, mut calls, mut answers) =
            (Demux::default(), Assembler::default(), Assembler::default());
        let mut buffer = vec![0; 16 << 10];
        loop {
            let read = tokio::select! {
                read = stream.read(&mut buffer) => read.map_err(SessionError::Io)?,
                Some(done) = self.running.join_next() => {
                    let (stream_id, response) = done.map_err(|e| SessionError::Io(io::Error::other(e)))?;
                    let message = Message { stream: stream_id, body: Body::Response(response) };
                    self.send(stream, mux::PLUGIN, &message).await?;
                    continue;
                }
                () = &mut silent, if self.request_timeout.is_none() => {
                    return Err(SessionError::Silent(self.limits.registration));
                }
            };
            if read == 0 {
                return Err(SessionError::Closed);
            }
            let mut messages = Vec::new();
            demux.feed(&buffer[..read], |connection, bytes| {
                let assembler = match connection {
                    mux::PLUGIN => &mut calls,
                    mux::RUNTIME => &mut answers,
                    // Nobody here opened it.
                    _ => return Ok(()),
                };
                let found = assembler.feed(bytes).map_err(SessionError::Garbled)?;
                messages.extend(found.into_iter().map(|message| (connection, message)));
                Ok::<(), SessionError>(())
            })?;
            for (connection, Message { stream: stream_id, body }) in messages {
                match (connection, body) {
                    (mux::PLUGIN, Body::Request(request)) => {
                        if let Some(response) = self.take(stream_id, &request) {
                            let message = Message { stream: stream_id, body: Body::Response(response) };
                            self.send(stream, mux::PLUGIN, &message).await?;
                        }
                    }
                    (mux::RUNTIME, Body::Response(response)) if stream_id == REGISTRATION => {
                        if let Some(error) = response.error() {
                            return Err(SessionError::Refused(error.message.clone()));
                        }
                    }
                    (_, body) => {
                        tracing::debug!(connection, stream_id, ?body, "ignoring an unexpected NRI message");
                    }
                }
            }
        }
    }

    async fn send(
        &self,
        stream: &mut (impl AsyncWrite + Send + Unpin),
        connection: u32,
        message: &Message,
    ) -> Result<(), SessionError> {
        let bytes = message.encode().map_err(SessionError::Garbled)?;
        let bytes = mux::frames(connection, &bytes)?;
        let write = async {
            stream.write_all(&bytes).await?;
            stream.flush().await
        };
        match timeout(self.limits.write, write).await {
            Ok(written) => written.map_err(SessionError::Io),
            Err(_) => Err(SessionError::Stuck(self.limits.write)),
        }
    }

    /// Answers a request, or begins to work on it.
    fn take(&mut self, stream: u32, request: &Request) -> Option<Response> {
        if request.service != PLUGIN_SERVICE {
            return Some(unimplemented(request));
        }
        let patience = self.patience(request);
        let payload = request.payload.as_slice();
        match request.method.as_str() {
            "Configure" => Some(self.configure(payload)),
            "Synchronize" => Some(self.synchronize(payload)),
            "Shutdown" => Some(Response::success(&Empty {})),
            "RunPodSandbox" => self.pod_event(stream, Event::RunPodSandbox, payload, patience),
            "StopPodSandbox" => self.pod_event(stream, Event::StopPodSandbox, payload, patience),
            "RemovePodSandbox" => self.pod_event(stream, Event::RemovePodSandbox, payload, patience),
            "CreateContainer" => match CreateContainerRequest::decode(payload) {
                Ok(CreateContainerRequest { pod: Some(pod), container }) => {
                    let name = container.unwrap_or_default().name;
                    let plugin = Arc::clone(self.plugin);
                    let deadline = Instant::now() + patience;
                    self.start(stream, patience, async move {
                        let adjust = plugin.create_container(pod, name, deadline).await?;
                        Ok(Response::success(&CreateContainerResponse { adjust }))
                    })
                }
                Ok(_) => Some(without_pod()),
                Err(error) => Some(undecodable(&error)),
            },
            "StateChange" => match StateChangeEvent::decode(payload) {
                // Events that were never asked for need nothing.
                Ok(change) => match (change.event(), change.pod) {
                    (Event::Unknown | Event::CreateContainer, _) => Some(Response::success(&Empty {})),
                    (event, Some(pod)) => self.pod(stream, event, pod, patience),
                    (_, None) => Some(without_pod()),
                },
                Err(error) => Some(undecodable(&error)),
            },
            _ => Some(unimplemented(request)),
        }
    }

    /// How long a handler may take.
    fn patience(&self, request: &Request) -> Duration {
        let usual = self.request_timeout.unwrap_or(REQUEST_TIMEOUT);
        let said = u64::try_from(request.timeout_nano).ok().filter(|nanos| *nanos > 0);
        own_time(said.map_or(usual, |nanos| Duration::from_nanos(nanos).min(usual)))
    }

    fn configure(&mut self, payload: &[u8]) -> Response {
        let request = match ConfigureRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return undecodable(&error),
        };
        let said = u64::try_from(request.request_timeout).ok().filter(|ms| *ms > 0);
        let said = said.map_or(REQUEST_TIMEOUT, Duration::from_millis);
        self.request_timeout = Some(said.min(MAX_REQUEST_TIMEOUT));
        self.plugin.connected(&Runtime { name: request.runtime_name, version: request.runtime_version });
        let failure_policy = Some(FailurePolicy { fail_request: true, keep_connected: true });
        Response::success(&ConfigureResponse { events: EVENTS, failure_policy })
    }

    fn synchronize(&mut self, payload: &[u8]) -> Response {
        let request = match SynchronizeRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return undecodable(&error),
        };
        let started = request.containers.into_iter().filter(Container::has_run);
        self.started.extend(started.map(|container| container.pod_sandbox_id));
        let sandboxes = (self.pods.len() + request.pods.len()).max(self.started.len());
        if sandboxes > self.limits.sandboxes {
            (self.pods, self.started) = (Vec::new(), BTreeSet::new());
            let message = format!("more than {} sandboxes on one node", self.limits.sandboxes);
            return Response::failure(code::RESOURCE_EXHAUSTED, message);
        }
        self.pods.extend(request.pods);
        if !request.more {
            self.plugin.synchronize(std::mem::take(&mut self.pods), std::mem::take(&mut self.started));
        }
        Response::success(&SynchronizeResponse { more: request.more })
    }

    fn pod_event(
        &mut self,
        stream: u32,
        event: Event,
        payload: &[u8],
        patience: Duration,
    ) -> Option<Response> {
        match PodSandboxRequest::decode(payload) {
            Ok(PodSandboxRequest { pod: Some(pod) }) => self.pod(stream, event, pod, patience),
            Ok(_) => Some(without_pod()),
            Err(error) => Some(undecodable(&error)),
        }
    }

    fn pod(&mut self, stream: u32, event: Event, pod: PodSandbox, patience: Duration) -> Option<Response> {
        let (plugin, deadline) = (Arc::clone(self.plugin), Instant::now() + patience);
        self.start(stream, patience, async move {
            match event {
                Event::RunPodSandbox => plugin.run_pod_sandbox(pod, deadline).await?,
                Event::StopPodSandbox => plugin.stop_pod_sandbox(pod, deadline).await?,
                Event::RemovePodSandbox => plugin.remove_pod_sandbox(pod, deadline).await?,
                Event::Unknown | Event::CreateContainer => {}
            }
            Ok(Response::success(&Empty {}))
        })
    }

    fn start(
        &mut self,
        stream: u32,
        patience: Duration,
        work: impl Future<Output = Result<Response, Refusal>> + Send + 'static,
    ) -> Option<Response> {
        if self.running.len() >= self.limits.requests {
            let message = format!("{} requests are already in progress: try again", self.running.len());
            return Some(Response::failure(code::RESOURCE_EXHAUSTED, message));
        }
        // In a task of its own: one that panics is an error of its request, and of nothing else.
        let task = tokio::spawn(work);
        let abort = task.abort_handle();
        self.running.spawn(async move {
            let failed = |why: String| Response::failure(code::UNKNOWN, why);
            let response = match timeout(patience, task).await {
                Ok(Ok(Ok(response))) => response,
                Ok(Ok(Err(Refusal(why)))) => failed(why),
                Ok(Err(_)) => failed("an internal error: check the log of the plugin".to_owned()),
                Err(_) => {
                    abort.abort();
                    failed(format!("not done within {} ms: it will be retried", patience.as_millis()))
                }
            };
            (stream, response)
        });
        None
    }
}

fn registration(identity: &Identity) -> Message {
    let payload = RegisterPluginRequest {
        plugin_name: identity.name().to_owned(),
        plugin_idx: identity.index().to_owned(),
        nri_version: NRI_VERSION.to_owned(),
    };
    let request = Request {
        service: RUNTIME_SERVICE.to_owned(),
        method: "RegisterPlugin".to_owned(),
        payload: payload.encode_to_vec(),
        timeout_nano: 0,
    };
    Message { stream: REGISTRATION, body: Body::Request(request) }
}

fn unimplemented(request: &Request) -> Response {
    let shown = |text: &str| text.chars().take(64).collect::<String>();
    let message = format!("{}/{} is not implemented", shown(&request.service), shown(&request.method));
    Response::failure(code::UNIMPLEMENTED, message)
}

fn without_pod() -> Response {
    Response::failure(code::INVALID_ARGUMENT, "the request does not name a pod")
}

fn undecodable(error: &prost::DecodeError) -> Response {
    Response::failure(code::INVALID_ARGUMENT, format!("the request cannot be decoded: {error}"))
}
