//! The backend that hands on what it gets, and the server for those who watch.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use knit_types::sync::Locked;
use tokio_stream::Stream as Items;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::proto::node_views_server::{NodeViews, NodeViewsServer};
use super::proto::watch_response::Op;
use super::proto::{
    Delete, ReportRequest, ReportResponse, Set, Sync, WatchRequest, WatchResponse, delete, set,
};
use super::queue::{Batch, Overrun, Queue};
use super::{MAX_MESSAGE, convert, decode};
use crate::backend::{Backend, Failure, Outcome, Retry};
use crate::view::{Changes, NodeView};

/// How far a watcher may fall behind before it has to start again, in bytes of messages.
const BEHIND: usize = 16 << 20;
/// A watcher that sends nothing for this long is asked whether it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// And one that does not answer within this time is gone.
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(20);
/// How long a watcher's name may be, in bytes.
const LONGEST_NAME: usize = 253;

/// A backend that hands on what it gets to everybody who watches; clones share it.
#[derive(Clone)]
pub struct Stream {
    shared: Arc<Mutex<Shared>>,
    behind: usize,
    keep_alive: (Duration, Duration),
}

struct Shared {
    /// What watchers were told, for those who come later.
    state: NodeView,
    revision: u64,
    /// What each stream that is open has yet to send.
    queues: Vec<Weak<Queue>>,
    /// Those who watch under a name, and how often that name is used.
    watchers: BTreeMap<String, (usize, Watcher)>,
}

/// One who watches, and what it reported of its work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Watcher {
    /// The watcher's name.
    pub name: String,
    /// The last state that it worked on; `None` before its first report.
    pub revision: Option<u64>,
    /// Why it could make nothing of it true, if so.
    pub broken: Option<String>,
    /// The service ports that it could not make true; all others are.
    pub failed: Vec<Failure>,
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

impl Stream {
    /// Nothing to tell yet.
    #[must_use]
    pub fn new() -> Self {
        let (state, watchers) = (NodeView::default(), BTreeMap::new());
        let shared = Shared { state, revision: 0, queues: Vec::new(), watchers };
        Self {
            shared: Arc::new(Mutex::new(shared)),
            behind: BEHIND,
            keep_alive: (KEEP_ALIVE, KEEP_ALIVE_ANSWER),
        }
    }

    /// How many bytes of messages a watcher may fall behind before it has to start again; 16 MiB otherwise.
    #[must_use]
    pub fn behind(mut self, bytes: usize) -> Self {
        self.behind = bytes;
        self
    }

    /// After how long without a word a watcher is asked whether it is still there, and how long it has to
    /// answer; 10 and 20 seconds otherwise. A node that vanished without closing its connection is no watcher
    /// any more after that.
    #[must_use]
    pub fn keep_alive(mut self, after: Duration, answer: Duration) -> Self {
        self.keep_alive = (after, answer);
        self
    }

    /// The number of the last state that was sent; a watcher that reported it has done all there is.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Everybody who watches under a name, and how their work went.
    #[must_use]
    pub fn watchers(&self) -> Vec<Watcher> {
        self.lock().watchers.values().map(|(_, watcher)| watcher.clone()).collect()
    }

    /// The gRPC service, for tonic's server.
    #[must_use]
    pub fn service(&self) -> NodeViewsServer<Self> {
        NodeViewsServer::new(self.clone()).max_encoding_message_size(MAX_MESSAGE)
    }

    /// Serves it on a TCP listener, until that fails. There is no encryption and no check of who comes:
    /// listen where only those can reach it that may, or build a server of your own from
    /// [`service`](Self::service).
    ///
    /// # Errors
    /// When the listener fails for good.
    pub async fn serve_tcp(&self, listener: tokio::net::TcpListener) -> Result<(), tonic::transport::Error> {
        let server = self.server().add_service(self.service());
        server.serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)).await
    }

    /// Serves it on a Unix socket, until that fails. Who may open the socket's file may watch.
    ///
    /// # Errors
    /// When the listener fails for good.
    pub async fn serve_unix(
        &self,
        listener: tokio::net::UnixListener,
    ) -> Result<(), tonic::transport::Error> {
        let server = self.server().add_service(self.service());
        server.serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)).await
    }

    fn server(&self) -> Server {
        let (after, answer) = self.keep_alive;
        Server::builder().http2_keepalive_interval(Some(after)).http2_keepalive_timeout(Some(answer))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Nothing panics while it holds the lock half-way through a change.
        self.shared.locked()
    }
}

impl Backend for Stream {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let mut shared = self.lock();
        let known = &shared.state;
        let mut batch = Vec::new();
        if shared.revision == 0 || known.node != state.node {
            batch.push(set_node(state));
        }
        for key in known.ports.keys().filter(|key| !state.ports.contains_key(*key)) {
            batch.push(deleted(delete::Object::Port(convert::key(key))));
        }
        for (key, view) in state.ports.iter().filter(|(key, view)| known.ports.get(*key) != Some(*view)) {
            batch.push(now(set::Object::Port(convert::port(key, view))));
        }
        for name in known.health_checks.keys().filter(|name| !state.health_checks.contains_key(*name)) {
            batch.push(deleted(delete::Object::HealthCheck(name.to_string())));
        }
        for (name, check) in
            state.health_checks.iter().filter(|(n, c)| known.health_checks.get(*n) != Some(*c))
        {
            batch.push(now(set::Object::HealthCheck(convert::health_check(name, check))));
        }
        shared.state = state.clone();
        if !batch.is_empty() {
            shared.publish(batch, Vec::new());
        }
        Outcome::Done
    }

    fn apply(&mut self, changes: &Changes, state: &NodeView) -> Outcome {
        let mut shared = self.lock();
        let mut batch = Vec::new();
        if changes.node {
            shared.state.node = Arc::clone(&state.node);
            batch.push(set_node(state));
        }
        for change in &changes.ports {
            if let Some(view) = &change.new {
                shared.state.ports.insert(change.key.clone(), Arc::clone(view));
                batch.push(now(set::Object::Port(convert::port(&change.key, view))));
            } else {
                shared.state.ports.remove(&change.key);
                batch.push(deleted(delete::Object::Port(convert::key(&change.key))));
            }
        }
        for name in &changes.health_checks {
            if let Some(check) = state.health_checks.get(name) {
                shared.state.health_checks.insert(name.clone(), check.clone());
                batch.push(now(set::Object::HealthCheck(convert::health_check(name, check))));
            } else {
                shared.state.health_checks.remove(name);
                batch.push(deleted(delete::Object::HealthCheck(name.to_string())));
            }
        }
        // Cluster IPs that come and go do so with the ports that have them.
        if !batch.is_empty() {
            shared.publish(batch, changes.triggered_ms.clone());
        }
        Outcome::Done
    }
}

impl Shared {
    fn publish(&mut self, mut batch: Vec<WatchResponse>, triggered_ms: Vec<u64>) {
        self.revision += 1;
        // Streams that have ended are forgotten; who comes later gets the state.
        self.queues.retain(|queue| queue.strong_count() > 0);
        if self.queues.is_empty() {
            return;
        }
        batch.push(self.synced(triggered_ms));
        let batch = Batch::new(batch);
        self.queues.retain(|queue| queue.upgrade().is_some_and(|queue| queue.push(&batch)));
    }

    fn synced(&self, triggered_ms: Vec<u64>) -> WatchResponse {
        WatchResponse { op: Some(Op::Sync(Sync { revision: self.revision, triggered_ms })) }
    }

    /// Everything, for one who begins to watch. Nothing if there was no sync yet: an empty state would be a
    /// lie. Messages are made one by one, as they are sent.
    fn everything(&self) -> Everything {
        if self.revision == 0 {
            return Box::new(std::iter::empty());
        }
        let node = set_node(&self.state);
        let synced = self.synced(Vec::new());
        let NodeView { ports, health_checks, .. } = self.state.clone();
        let ports = ports.into_iter().map(|(key, view)| now(set::Object::Port(convert::port(&key, &view))));
        let checks = (health_checks.into_iter())
            .map(|(name, check)| now(set::Object::HealthCheck(convert::health_check(&name, &check))));
        Box::new(std::iter::once(node).chain(ports).chain(checks).chain([synced]))
    }
}

fn now(object: set::Object) -> WatchResponse {
    WatchResponse { op: Some(Op::Set(Set { object: Some(object) })) }
}

fn deleted(object: delete::Object) -> WatchResponse {
    WatchResponse { op: Some(Op::Delete(Delete { object: Some(object) })) }
}

fn set_node(state: &NodeView) -> WatchResponse {
    now(set::Object::Node(convert::node(&state.node)))
}

#[tonic::async_trait]
impl NodeViews for Stream {
    type WatchStream = Pin<Box<dyn Items<Item = Result<WatchResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let presence = Presence::new(self, request.into_inner().watcher)?;
        let queue = Arc::new(Queue::new(self.behind));
        let everything = {
            let mut shared = self.lock();
            // Under one lock: nothing is missed between the two, and nothing comes twice.
            shared.queues.push(Arc::downgrade(&queue));
            shared.everything()
        };
        let messages = Messages { everything, queue, batch: None, over: false, _presence: presence };
        Ok(Response::new(Box::pin(messages)))
    }

    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportResponse>, Status> {
        let report = request.into_inner();
        let mut failed = Vec::with_capacity(report.failed.len());
        for failure in report.failed {
            let key = failure.key.ok_or_else(|| Status::invalid_argument("failed.key: it is missing"))?;
            let key =
                decode::key(&key).map_err(|error| Status::invalid_argument(format!("failed.{error}")))?;
            let retry = if failure.retrying { Retry::Later } else { Retry::OnChange };
            failed.push(Failure { key, reason: failure.reason, retry });
        }
        let mut shared = self.lock();
        let Some((_, watcher)) = shared.watchers.get_mut(&report.watcher) else {
            let message = format!("no watcher is named {:?}; set the name in Watch first", report.watcher);
            return Err(Status::failed_precondition(message));
        };
        watcher.revision = Some(report.revision);
        watcher.broken = (!report.broken.is_empty()).then_some(report.broken);
        watcher.failed = failed;
        Ok(Response::new(ReportResponse {}))
    }
}

/// A watcher's name is known for as long as its stream is there.
struct Presence {
    stream: Stream,
    name: String,
}

impl Presence {
    fn new(stream: &Stream, name: String) -> Result<Self, Status> {
        if name.len() > LONGEST_NAME {
            return Err(Status::invalid_argument(format!("watcher: more than {LONGEST_NAME} bytes")));
        }
        if !name.is_empty() {
            let mut shared = stream.lock();
            let (count, watcher) = shared.watchers.entry(name.clone()).or_default();
            *count += 1;
            watcher.name.clone_from(&name);
        }
        Ok(Self { stream: stream.clone(), name })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let mut shared = self.stream.lock();
        if let Some((count, _)) = shared.watchers.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                shared.watchers.remove(&self.name);
            }
        }
    }
}

/// What is there, message by message.
type Everything = Box<dyn Iterator<Item = WatchResponse> + Send>;

/// What one watcher is sent: everything, then each batch of changes, until it falls too far behind.
struct Messages {
    everything: Everything,
    queue: Arc<Queue>,
    /// The batch that is being sent, and its next message.
    batch: Option<(Batch, usize)>,
    over: bool,
    _presence: Presence,
}

impl Items for Messages {
    type Item = Result<WatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Some(message) = self.everything.next() {
            return Poll::Ready(Some(Ok(message)));
        }
        loop {
            if let Some((batch, next)) = &mut self.batch
                && let Some(message) = batch.get(*next)
            {
                *next += 1;
                return Poll::Ready(Some(Ok(message.clone())));
            }
            self.batch = None;
            match ready!(self.queue.poll(cx)) {
                Ok(batch) => self.batch = Some((batch, 0)),
                Err(Overrun) => {
                    self.over = true;
                    let status =
                        Status::data_loss("this watcher was too slow and missed changes; connect again");
                    return Poll::Ready(Some(Err(status)));
                }
            }
        }
    }
}
