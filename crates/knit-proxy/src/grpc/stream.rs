//! The backend that hands on what it gets, and the server for those who watch.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream as Items, StreamExt};
use tonic::{Request, Response, Status};

use super::proto::node_views_server::{NodeViews, NodeViewsServer};
use super::proto::watch_response::Op;
use super::proto::{
    Delete, ReportRequest, ReportResponse, Set, Sync, WatchRequest, WatchResponse, delete, set,
};
use super::{MAX_MESSAGE, convert, decode};
use crate::backend::{Backend, Failure, Outcome, Retry};
use crate::view::{Changes, NodeView};

/// How many batches a watcher may be behind before it has to start again.
const BEHIND: usize = 256;
/// How long a watcher's name may be, in bytes.
const LONGEST_NAME: usize = 253;

/// A backend that hands on what it gets to everybody who watches; clones share it.
#[derive(Clone)]
pub struct Stream {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    /// What watchers were told, for those who come later.
    state: NodeView,
    revision: u64,
    batches: broadcast::Sender<Arc<[WatchResponse]>>,
    /// Those who watch under a name, and how often that name is used.
    watchers: BTreeMap<String, (usize, Watcher)>,
}

/// One who watches, and what it reported of its work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Watcher {
    /// Its name.
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
        let batches = broadcast::Sender::new(BEHIND);
        let (state, watchers) = (NodeView::default(), BTreeMap::new());
        Self { shared: Arc::new(Mutex::new(Shared { state, revision: 0, batches, watchers })) }
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

    /// Serves it on a TCP listener, until that fails. There is no encryption and no check of who comes: listen where
    /// only those can reach it that may, or build a server of your own from [`service`](Self::service).
    ///
    /// # Errors
    /// When the listener fails for good.
    pub async fn serve_tcp(&self, listener: tokio::net::TcpListener) -> Result<(), tonic::transport::Error> {
        let server = tonic::transport::Server::builder().add_service(self.service());
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
        let server = tonic::transport::Server::builder().add_service(self.service());
        server.serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)).await
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Nothing panics while it holds the lock half-way through a change.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
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
        batch.push(self.synced(triggered_ms));
        // Without watchers there is nobody to tell; who comes later gets the state.
        let _ = self.batches.send(batch.into());
    }

    fn synced(&self, triggered_ms: Vec<u64>) -> WatchResponse {
        WatchResponse { op: Some(Op::Sync(Sync { revision: self.revision, triggered_ms })) }
    }

    /// Everything, for one who begins to watch. Nothing if there was no sync yet: an empty state would be a lie.
    fn everything(&self) -> Vec<WatchResponse> {
        if self.revision == 0 {
            return Vec::new();
        }
        let ports =
            self.state.ports.iter().map(|(key, view)| now(set::Object::Port(convert::port(key, view))));
        let checks = (self.state.health_checks.iter())
            .map(|(name, check)| now(set::Object::HealthCheck(convert::health_check(name, check))));
        std::iter::once(set_node(&self.state))
            .chain(ports)
            .chain(checks)
            .chain([self.synced(Vec::new())])
            .collect()
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
        let (everything, batches) = {
            let shared = self.lock();
            // Under one lock: nothing is missed between the two, and nothing comes twice.
            (shared.everything(), shared.batches.subscribe())
        };
        let changes = BroadcastStream::new(batches).map(|batch| {
            batch
                .map_err(|_| Status::data_loss("this watcher was too slow and missed changes; connect again"))
        });
        let batches = Box::pin(tokio_stream::once(Ok(Arc::from(everything))).chain(changes));
        let messages = Flat { batches, batch: Arc::default(), next: 0, over: false, _presence: presence };
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
            let message = format!("nobody watches as {:?}; name yourself in Watch first", report.watcher);
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

/// Turns a stream of batches into one of messages, which ends at the first error.
struct Flat<S> {
    batches: Pin<Box<S>>,
    batch: Arc<[WatchResponse]>,
    next: usize,
    over: bool,
    _presence: Presence,
}

impl<S: Items<Item = Result<Arc<[WatchResponse]>, Status>>> Items for Flat<S> {
    type Item = Result<WatchResponse, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        use std::task::{Poll, ready};
        loop {
            if let Some(message) = self.batch.get(self.next).cloned() {
                self.next += 1;
                return Poll::Ready(Some(Ok(message)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            match ready!(self.batches.as_mut().poll_next(cx)) {
                Some(Ok(batch)) => (self.batch, self.next) = (batch, 0),
                Some(Err(status)) => {
                    self.over = true;
                    return Poll::Ready(Some(Err(status)));
                }
                None => return Poll::Ready(None),
            }
        }
    }
}
