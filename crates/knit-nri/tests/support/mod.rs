//! The other side: a container runtime that does what a test says.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use knit_nri::mux::{self, Demux, TooLong};
use knit_nri::plugin::{Deadline, Plugin, Refusal};
use knit_nri::session::PLUGIN_SERVICE;
use knit_nri::ttrpc::{Assembler, Body, Message};
use knit_nri::version::Runtime;
use knit_nri::wire::ttrpc::{Request, Response};
use knit_nri::wire::{ConfigureRequest, ContainerAdjustment, PodSandbox, SynchronizeRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Notify;

/// A plugin that writes down what it hears.
#[derive(Debug, Default)]
pub struct Recorder {
    heard: Mutex<Vec<String>>,
    pub changed: Notify,
}

impl Recorder {
    pub fn note(&self, what: impl Into<String>) {
        self.heard.lock().expect("a lock").push(what.into());
        self.changed.notify_waiters();
    }

    pub fn heard(&self) -> Vec<String> {
        self.heard.lock().expect("a lock").clone()
    }

    /// Waits until it has heard something so often.
    pub async fn hears(&self, what: &str, times: usize) {
        loop {
            let changed = self.changed.notified();
            if self.heard().iter().filter(|h| *h == what).count() >= times {
                return;
            }
            changed.await;
        }
    }
}

#[async_trait]
impl Plugin for Recorder {
    fn connected(&self, runtime: &Runtime) {
        self.note(format!("connected {runtime}"));
    }

    fn disconnected(&self) {
        self.note("disconnected");
    }

    fn synchronize(&self, pods: Vec<PodSandbox>, started: BTreeSet<String>) {
        self.note(format!("synchronize {} {started:?}", pods.len()));
    }

    async fn run_pod_sandbox(&self, pod: PodSandbox, _: Deadline) -> Result<(), Refusal> {
        self.note(format!("run {}", pod.id));
        match pod.id.as_str() {
            "refused" => Err(Refusal("no".into())),
            "hangs" => std::future::pending().await,
            "panics" => panic!("as asked"),
            _ => Ok(()),
        }
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox, _: Deadline) -> Result<(), Refusal> {
        self.note(format!("stop {}", pod.id));
        Ok(())
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox, _: Deadline) -> Result<(), Refusal> {
        self.note(format!("remove {}", pod.id));
        Ok(())
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: String,
        _: Deadline,
    ) -> Result<Option<ContainerAdjustment>, Refusal> {
        self.note(format!("create {}/{container}", pod.id));
        if pod.id == "refused" { Err(Refusal("no".into())) } else { Ok(None) }
    }
}

/// The runtime's end of a connection.
pub struct FakeRuntime {
    pub stream: UnixStream,
    demux: Demux,
    assemblers: [Assembler; 2],
    inbox: VecDeque<(u32, Message)>,
    next: u32,
}

#[derive(Debug)]
struct Wrong;

impl From<TooLong> for Wrong {
    fn from(_: TooLong) -> Self {
        Self
    }
}

impl FakeRuntime {
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            demux: Demux::default(),
            assemblers: Default::default(),
            inbox: VecDeque::new(),
            next: 1,
        }
    }

    /// The next message, with its connection. None at the end.
    pub async fn receive(&mut self) -> Option<(u32, Message)> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.inbox.pop_front() {
                return Some(message);
            }
            let read = self.stream.read(&mut buffer).await.ok().filter(|n| *n > 0)?;
            let (assemblers, inbox) = (&mut self.assemblers, &mut self.inbox);
            self.demux
                .feed::<Wrong>(&buffer[..read], |connection, bytes| {
                    let at = usize::try_from(connection).expect("a number") - 1;
                    let messages = assemblers[at].feed(bytes).expect("ttrpc");
                    inbox.extend(messages.into_iter().map(|m| (connection, m)));
                    Ok(())
                })
                .expect("frames");
        }
    }

    /// The request to register.
    pub async fn registration(&mut self) -> (u32, Request) {
        let (connection, message) = self.receive().await.expect("a message");
        let Body::Request(request) = message.body else { panic!("{message:?}") };
        assert_eq!((connection, request.method.as_str()), (mux::RUNTIME, "RegisterPlugin"));
        (message.stream, request)
    }

    pub async fn answer(&mut self, stream: u32, response: Response) {
        let message = Message { stream, body: Body::Response(response) };
        let bytes = mux::frames(mux::RUNTIME, &message.encode().expect("bytes")).expect("frames");
        self.stream.write_all(&bytes).await.expect("written");
    }

    /// Sends a call, and does not wait.
    pub async fn send(&mut self, method: &str, payload: &impl prost::Message) -> u32 {
        let request = Request {
            service: PLUGIN_SERVICE.into(),
            method: method.into(),
            payload: payload.encode_to_vec(),
            timeout_nano: 2_000_000_000,
        };
        self.send_request(request).await
    }

    pub async fn send_request(&mut self, request: Request) -> u32 {
        let stream = self.next;
        self.next += 2;
        let message = Message { stream, body: Body::Request(request) };
        let bytes = mux::frames(mux::PLUGIN, &message.encode().expect("bytes")).expect("frames");
        self.stream.write_all(&bytes).await.expect("written");
        stream
    }

    /// The response of one stream.
    pub async fn response(&mut self, stream: u32) -> Response {
        loop {
            let (connection, message) = self.receive().await.expect("a message");
            if let (mux::PLUGIN, Body::Response(response)) = (connection, message.body)
                && message.stream == stream
            {
                return response;
            }
        }
    }

    pub async fn call(&mut self, method: &str, payload: &impl prost::Message) -> Response {
        let stream = self.send(method, payload).await;
        self.response(stream).await
    }

    /// Takes the plugin in, as containerd does.
    pub async fn accept(&mut self, timeout: Duration) {
        let (stream, _) = self.registration().await;
        self.answer(stream, Response::success(&knit_nri::wire::Empty {})).await;
        assert_eq!(self.call("Configure", &configure(timeout)).await.error(), None);
        assert_eq!(self.call("Synchronize", &SynchronizeRequest::default()).await.error(), None);
    }
}

pub fn configure(timeout: Duration) -> ConfigureRequest {
    ConfigureRequest {
        runtime_name: "containerd".into(),
        runtime_version: "v2.4.2".into(),
        request_timeout: i64::try_from(timeout.as_millis()).expect("a number"),
        ..ConfigureRequest::default()
    }
}

pub fn pod(id: &str) -> PodSandbox {
    PodSandbox { id: id.into(), name: "web".into(), namespace: "plain".into(), ..PodSandbox::default() }
}
