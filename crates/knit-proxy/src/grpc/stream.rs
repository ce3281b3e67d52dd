//! The backend that hands on what it gets, and the server for those who watch.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream as Items, StreamExt};
use tonic::{Request, Response, Status};

use super::convert;
use super::proto::node_views_server::{NodeViews, NodeViewsServer};
use super::proto::watch_response::Op;
use super::proto::{Delete, Set, Sync, WatchRequest, WatchResponse, delete, set};
use crate::backend::{Backend, Outcome};
use crate::view::{Changes, NodeView};

/// How many batches a watcher may be behind before it has to start again.
const BEHIND: usize = 256;

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
        Self { shared: Arc::new(Mutex::new(Shared { state: NodeView::default(), revision: 0, batches })) }
    }

    /// The gRPC service, for tonic's server.
    #[must_use]
    pub fn service(&self) -> NodeViewsServer<Self> {
        NodeViewsServer::new(self.clone())
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
            shared.publish(batch);
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
            shared.publish(batch);
        }
        Outcome::Done
    }
}

impl Shared {
    fn publish(&mut self, mut batch: Vec<WatchResponse>) {
        self.revision += 1;
        batch.push(self.synced());
        // Without watchers there is nobody to tell; who comes later gets the state.
        let _ = self.batches.send(batch.into());
    }

    fn synced(&self) -> WatchResponse {
        WatchResponse { op: Some(Op::Sync(Sync { revision: self.revision })) }
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
        std::iter::once(set_node(&self.state)).chain(ports).chain(checks).chain([self.synced()]).collect()
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

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
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
        let messages = Flat { batches, batch: Arc::default(), next: 0, over: false };
        Ok(Response::new(Box::pin(messages)))
    }
}

/// Turns a stream of batches into one of messages, which ends at the first error.
struct Flat<S> {
    batches: Pin<Box<S>>,
    batch: Arc<[WatchResponse]>,
    next: usize,
    over: bool,
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
