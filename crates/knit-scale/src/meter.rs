//! The API with counters in front of it: who asks for what, how many events and bytes go to them.
//!
//! A client has a port of its own here, or shares one with others of its group. A request goes to the API
//! behind, and its answer is counted as it passes, line by line where it is a watch.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::AddAssign;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HOST, USER_AGENT};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use knit_types::sync::Locked as _;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Who asks.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Group {
    /// Whole nodes' agents.
    Agents,
    /// An agent in a process of its own.
    Probe,
    /// The controller.
    Controller,
    /// What kubelets, the scheduler and users write.
    Others,
    /// What agents of nodes write that only write.
    Writers,
}

/// What went to one group, or of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    /// Objects that were asked for, alone.
    pub gets: u64,
    /// Lists, page by page.
    pub lists: u64,
    /// Watches that were opened.
    pub watches: u64,
    /// Events of watches, bookmarks included.
    pub events: u64,
    /// Bytes of answers.
    pub bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Requests that the API refused.
    pub refused: u64,
}

/// What went where, by group and kind.
pub type Counts = BTreeMap<Group, BTreeMap<String, Count>>;

/// The counters, and the API behind them. Clones are the same one.
#[derive(Clone)]
pub struct Meter {
    shared: Arc<Shared>,
}

struct Shared {
    client: kube::Client,
    counts: Mutex<Counts>,
    away: watch::Sender<bool>,
    tasks: Mutex<JoinSet<()>>,
}

type Answer = Response<UnsyncBoxBody<Bytes, kube::Error>>;

/// A body that is counted as it passes.
struct Counted {
    inner: kube::client::Body,
    watch: bool,
    group: Group,
    kind: String,
    shared: Arc<Shared>,
}

// === impl Count ===

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        let Self { gets, lists, watches, events, bytes, writes, refused } = other;
        self.gets += gets;
        self.lists += lists;
        self.watches += watches;
        self.events += events;
        self.bytes += bytes;
        self.writes += writes;
        self.refused += refused;
    }
}

impl Count {
    /// What came since an earlier count.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            gets: self.gets - before.gets,
            lists: self.lists - before.lists,
            watches: self.watches - before.watches,
            events: self.events - before.events,
            bytes: self.bytes - before.bytes,
            writes: self.writes - before.writes,
            refused: self.refused - before.refused,
        }
    }
}

/// What came since earlier counts.
#[must_use]
pub fn since(now: &Counts, before: &Counts) -> Counts {
    now.iter()
        .map(|(group, kinds)| {
            let old = |kind: &String| before.get(group).and_then(|kinds| kinds.get(kind)).copied();
            let new = kinds.iter().map(|(kind, n)| (kind.clone(), n.since(old(kind).unwrap_or_default())));
            (*group, new.collect())
        })
        .collect()
}

/// All kinds of a group together.
#[must_use]
pub fn sum(counts: &Counts, group: Group) -> Count {
    let mut all = Count::default();
    for count in counts.get(&group).into_iter().flat_map(BTreeMap::values) {
        all += *count;
    }
    all
}

// === impl Meter ===

impl Meter {
    /// Counts what goes to this API.
    #[must_use]
    pub fn new(client: kube::Client) -> Self {
        let (counts, away, tasks) = (Mutex::default(), watch::Sender::new(false), Mutex::default());
        Self { shared: Arc::new(Shared { client, counts, away, tasks }) }
    }

    /// A URL for clients of a group.
    ///
    /// # Errors
    /// When nothing can be listened on.
    pub async fn open(&self, group: Group) -> std::io::Result<String> {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        let address = listener.local_addr()?;
        let serving = serve(Arc::clone(&self.shared), listener, group);
        self.shared.tasks.locked().spawn(serving);
        Ok(format!("http://{address}"))
    }

    /// What was counted so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.counts().clone()
    }

    /// From now on the API does not answer, or does again. What is open is cut off.
    pub fn be_away(&self, away: bool) {
        self.shared.away.send_replace(away);
    }
}

// === impl Shared ===

impl Shared {
    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.locked()
    }

    fn add(&self, group: Group, kind: &str, count: Count) {
        let mut counts = self.counts();
        let kinds = counts.entry(group).or_default();
        match kinds.get_mut(kind) {
            Some(known) => *known += count,
            None => _ = kinds.insert(kind.to_owned(), count),
        }
    }
}

async fn serve(shared: Arc<Shared>, listener: TcpListener, group: Group) {
    let mut away = shared.away.subscribe();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            changed = away.changed() => {
                if changed.is_err() {
                    return;
                }
                if *away.borrow_and_update() {
                    connections.shutdown().await;
                }
            }
            accepted = listener.accept() => match accepted {
                // While the API is away, connections are closed at once.
                Ok((stream, _)) if !*away.borrow() => {
                    connections.spawn(connection(Arc::clone(&shared), stream, group));
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "a connection was not accepted"),
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream, group: Group) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(forward(shared, group, request).await) }
    });
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = serving.await {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn forward(shared: Arc<Shared>, group: Group, request: Request<Incoming>) -> Answer {
    let (mut parts, body) = request.into_parts();
    let (kind, named) = kind_of(parts.uri.path());
    let query = parts.uri.query().unwrap_or_default();
    let watch = query.split('&').any(|part| part == "watch=true" || part == "watch=1");
    let first = match (&parts.method, watch) {
        (&Method::GET, true) => Count { watches: 1, ..Count::default() },
        (&Method::GET, false) if named => Count { gets: 1, ..Count::default() },
        (&Method::GET, false) => Count { lists: 1, ..Count::default() },
        _ => Count { writes: 1, ..Count::default() },
    };
    shared.add(group, &kind, first);
    // Bytes are counted as the API writes them: not compressed.
    parts.headers.remove(ACCEPT_ENCODING);
    parts.headers.remove(HOST);
    let mut onward = Request::builder().method(parts.method).uri(parts.uri);
    for name in [ACCEPT, CONTENT_TYPE, USER_AGENT] {
        if let Some(value) = parts.headers.get(&name) {
            onward = onward.header(name, value);
        }
    }
    let body = match body.collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return failed(&error),
    };
    let onward = match onward.body(kube::client::Body::from(body)) {
        Ok(onward) => onward,
        Err(error) => return failed(&error),
    };
    match shared.client.send(onward).await {
        Ok(response) => {
            let refused =
                u64::from(response.status().is_client_error() || response.status().is_server_error());
            shared.add(group, &kind, Count { refused, ..Count::default() });
            response.map(|inner| Counted { inner, watch, group, kind, shared }.boxed_unsync())
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> Answer {
    let text = Full::new(Bytes::from(error.to_string())).map_err(|never| match never {});
    let mut answer = Response::new(text.boxed_unsync());
    *answer.status_mut() = StatusCode::BAD_GATEWAY;
    answer
}

/// The plural of what a path is about, with its subresource, and whether one object is named.
fn kind_of(path: &str) -> (String, bool) {
    let mut words = path.split('/').filter(|word| !word.is_empty());
    match words.next() {
        Some("api") => _ = words.next(),
        Some("apis") => _ = (words.next(), words.next()),
        _ => return ("other".into(), false),
    }
    let mut rest: Vec<&str> = words.collect();
    if rest.first() == Some(&"namespaces") && rest.len() > 2 {
        rest.drain(..2);
    }
    let kind = match (rest.first(), rest.get(2)) {
        (Some(kind), Some(sub)) => format!("{kind}/{sub}"),
        (Some(kind), None) => (*kind).to_owned(),
        _ => "discovery".to_owned(),
    };
    (kind, rest.len() > 1)
}

// === impl Counted ===

impl Body for Counted {
    type Data = Bytes;
    type Error = kube::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, kube::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let lines = if self.watch { data.iter().filter(|byte| **byte == b'\n').count() } else { 0 };
            let count = Count { bytes: data.len() as u64, events: lines as u64, ..Count::default() };
            self.shared.add(self.group, &self.kind, count);
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_its_kind() {
        for (path, kind, named) in [
            ("/api/v1/nodes", "nodes", false),
            ("/api/v1/nodes/n1/status", "nodes/status", true),
            ("/api/v1/namespaces/shop", "namespaces", true),
            ("/api/v1/namespaces/shop/pods", "pods", false),
            ("/apis/knit.dev/v1alpha1/networks/blue/status", "networks/status", true),
            ("/apis/coordination.k8s.io/v1/namespaces/knit-system/leases/n1", "leases", true),
            ("/version", "other", false),
        ] {
            assert_eq!(kind_of(path), (kind.to_owned(), named), "{path}");
        }
    }

    #[test]
    fn counts_are_what_came_since() {
        let of = |events| {
            Counts::from([(
                Group::Agents,
                BTreeMap::from([("nodes".to_owned(), Count { events, ..Count::default() })]),
            )])
        };
        assert_eq!(sum(&since(&of(7), &of(3)), Group::Agents).events, 4);
        assert_eq!(sum(&since(&of(7), &Counts::default()), Group::Agents).events, 7);
        assert_eq!(sum(&of(7), Group::Controller), Count::default());
    }
}
