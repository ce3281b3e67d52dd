//! The HTTP servers: /healthz and /livez, metrics, and the health check node ports.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use hyper::{Response, StatusCode};
use knit_http::{Asked, Guests, Reply};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};

use super::listen::{LIMITS, bind, is_no_family};
use super::{Health, ProxyStatus};
use crate::model::{Family, ServiceName};
use crate::view::NodePortMatch;

/// Which of the two a request was for, and what it was told; for the metrics `proxy_healthz_total` and
/// `proxy_livez_total` (rule 61).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// /healthz, with the status code.
    Healthz(u16),
    /// /livez, with the status code.
    Livez(u16),
}

/// Answers /healthz and /livez (rule 55) until it is dropped.
///
/// # Errors
/// When the listener fails for good.
pub async fn serve_proxy(
    listener: TcpListener,
    health: Health,
    count: impl Fn(Probe) + Clone + Send + Sync + 'static,
) -> io::Result<()> {
    let answer = move |asked: Asked<'_>| {
        let status = health.proxy(Instant::now());
        let reply = match asked.path {
            "/healthz" => proxy_reply(status, true, &health),
            "/livez" => proxy_reply(status, false, &health),
            _ => return plain(StatusCode::NOT_FOUND, "not found; available: /healthz and /livez\n"),
        };
        let code = reply.status().as_u16();
        count(if asked.path == "/healthz" { Probe::Healthz(code) } else { Probe::Livez(code) });
        reply
    };
    Err(serve(listener, answer).await)
}

/// Answers /metrics, /healthz and /proxyMode, as kube-proxy does where its metrics are, until it is dropped.
/// `metrics` is their text, `mode` the name of the backend.
///
/// # Errors
/// When the listener fails for good.
pub async fn serve_metrics(
    listener: TcpListener,
    mode: &'static str,
    metrics: impl Fn() -> String + Clone + Send + Sync + 'static,
) -> io::Result<()> {
    let answer = move |asked: Asked<'_>| match asked.path {
        "/metrics" => {
            let mut reply = Response::new(Full::new(Bytes::from(metrics())));
            reply.headers_mut().insert("content-type", OPEN_METRICS);
            reply
        }
        "/healthz" => plain(StatusCode::OK, "ok"),
        "/proxyMode" => plain(StatusCode::OK, mode),
        _ => plain(StatusCode::NOT_FOUND, "not found; available: /metrics\n"),
    };
    Err(serve(listener, answer).await)
}

const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Where health check node ports listen.
pub struct CheckPlaces {
    /// The addresses, if they are other ones than those of node ports.
    pub addresses: Option<Vec<IpAddr>>,
    /// Opens a port for one family, as [`bind`] does, maybe in another network namespace.
    pub bind: Box<dyn Fn(SocketAddr) -> io::Result<std::net::TcpListener> + Send + Sync>,
}

impl Default for CheckPlaces {
    /// Where node ports are, in this thread's network namespace.
    fn default() -> Self {
        Self { addresses: None, bind: Box::new(bind) }
    }
}

impl std::fmt::Debug for CheckPlaces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckPlaces").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

/// How long to wait before a port that could not be opened is tried again.
const OPEN_RETRY_DELAY: Duration = Duration::from_secs(5);
/// The same for an address that this machine does not have: it may come, but need not.
const OPEN_RETRY_MAX_DELAY: Duration = Duration::from_secs(300);

/// A port that could not be opened.
struct Closed {
    tries: u32,
    again: tokio::time::Instant,
}

/// How long to wait after the n-th failure to open a port, counting from one.
fn patience(error: &io::Error, tries: u32) -> Duration {
    if error.kind() == io::ErrorKind::AddrNotAvailable || is_no_family(error) {
        return OPEN_RETRY_DELAY
            .saturating_mul(1 << tries.saturating_sub(1).min(10))
            .min(OPEN_RETRY_MAX_DELAY);
    }
    OPEN_RETRY_DELAY
}

/// Answers on every health check node port (rule 54), and opens and closes them as services come and go,
/// until it is dropped. `failed` is told of ports that cannot be opened, once each; they are tried again.
pub async fn serve_checks(health: Health, failed: impl Fn(&ServiceName, SocketAddr, &io::Error)) {
    serve_checks_at(health, CheckPlaces::default(), failed).await;
}

/// Like [`serve_checks`], somewhere else.
pub async fn serve_checks_at(
    health: Health,
    places: CheckPlaces,
    failed: impl Fn(&ServiceName, SocketAddr, &io::Error),
) {
    let mut changed = health.changed.subscribe();
    // Dropping the set ends its tasks.
    let mut tasks = JoinSet::new();
    let mut open: BTreeMap<(ServiceName, SocketAddr), AbortHandle> = BTreeMap::new();
    let mut closed: BTreeMap<(ServiceName, SocketAddr), Closed> = BTreeMap::new();
    loop {
        let wanted = wanted(&health, places.addresses.as_deref());
        open.retain(|key, task| {
            let keep = wanted.contains(key) && !task.is_finished();
            if !keep {
                task.abort();
            }
            keep
        });
        closed.retain(|key, _| wanted.contains(key));
        while tasks.try_join_next().is_some() {}
        for key in wanted {
            let early = |closed: &Closed| closed.again > tokio::time::Instant::now();
            if open.contains_key(&key) || closed.get(&key).is_some_and(early) {
                continue;
            }
            match listen(&places, key.1) {
                Ok(listener) => {
                    closed.remove(&key);
                    let task = tasks.spawn(serve_check(listener, key.0.clone(), health.clone()));
                    open.insert(key, task);
                }
                Err(error) => {
                    let tries = closed.get(&key).map_or(0, |closed| closed.tries).saturating_add(1);
                    if tries == 1 {
                        failed(&key.0, key.1, &error);
                    }
                    let again = tokio::time::Instant::now() + patience(&error, tries);
                    closed.insert(key, Closed { tries, again });
                }
            }
        }
        let news = async { changed.changed().await.is_ok() };
        let more = match closed.values().map(|closed| closed.again).min() {
            None => news.await,
            Some(again) => tokio::time::timeout_at(again, news).await.unwrap_or(true),
        };
        if !more {
            return;
        }
    }
}

fn listen(places: &CheckPlaces, at: SocketAddr) -> io::Result<TcpListener> {
    let listener = (places.bind)(at)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Every address to listen on, for every service.
fn wanted(health: &Health, given: Option<&[IpAddr]>) -> BTreeSet<(ServiceName, SocketAddr)> {
    let state = health.lock();
    let node = &state.node;
    let mut addresses: Vec<IpAddr> = Vec::new();
    for family in Family::ALL.into_iter().filter(|f| *node.families.get(*f)) {
        match node.node_ports.get(family) {
            _ if given.is_some() => {
                addresses.extend(given.into_iter().flatten().filter(|a| Family::of(**a) == family));
            }
            NodePortMatch::Only(list) => addresses.extend(list),
            NodePortMatch::AnyLocal if family == Family::V4 => addresses.push(Ipv4Addr::UNSPECIFIED.into()),
            NodePortMatch::AnyLocal => addresses.push(Ipv6Addr::UNSPECIFIED.into()),
        }
    }
    (state.checks.iter())
        .flat_map(|(name, check)| {
            addresses.iter().map(|a| (name.clone(), SocketAddr::new(*a, check.port.get())))
        })
        .collect()
}

async fn serve_check(listener: TcpListener, service: ServiceName, health: Health) {
    let answer = move |asked: Asked<'_>| {
        let family = Family::of(asked.to.ip().to_canonical());
        check_reply(&service, family, &health)
    };
    // A port whose listener has failed is opened again.
    serve(listener, answer).await;
}

/// Serves until the listener fails for good.
async fn serve(
    listener: TcpListener,
    answer: impl Fn(Asked<'_>) -> Reply + Send + Sync + 'static,
) -> io::Error {
    // Without a limit for each, nobody is refused.
    let answer = move |asked: Asked<'_>| std::future::ready(answer(asked));
    knit_http::serve(listener, Arc::new(Guests::new(LIMITS, || {})), answer).await
}

fn plain(code: StatusCode, text: &'static str) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *reply.status_mut() = code;
    reply
}

fn json(ok: bool, body: &serde_json::Value) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from(body.to_string())));
    *reply.status_mut() = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let headers = reply.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    reply
}

fn check_reply(service: &ServiceName, family: Family, health: &Health) -> Reply {
    let Some(status) = health.check(service.as_str(), family, Instant::now()) else {
        return plain(StatusCode::NOT_FOUND, "this service no longer has a health check\n");
    };
    let mut reply = json(
        status.ok(),
        &serde_json::json!({
            "service": { "namespace": service.namespace(), "name": service.name() },
            "localEndpoints": status.local_endpoints,
            "serviceProxyHealthy": status.proxy_healthy,
        }),
    );
    reply.headers_mut().insert("x-load-balancing-endpoint-weight", status.local_endpoints.into());
    reply
}

/// Go's zero time, where there is none.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// What kube-proxy 1.37 answers: `healthy` is about the proxy alone, whatever the node is; `lastUpdated` is
/// now as long as the answer is 200, whether or not there was anything to do; each family has the time of its
/// last sync.
fn proxy_reply(status: ProxyStatus, with_node: bool, health: &Health) -> Reply {
    let ok = status.healthy && (status.node_eligible || !with_node);
    let now = SystemTime::now();
    let families = health.lock().node.families;
    let clock = Instant::now();
    let wall = |at: Instant| time(now.checked_sub(clock.saturating_duration_since(at)).unwrap_or(now));
    let by_family: serde_json::Map<String, serde_json::Value> = (Family::ALL.into_iter())
        .filter(|family| *families.get(*family))
        .map(|family| (family, status.families.get(family)))
        .filter(|(_, one)| one.updated.is_some() || !one.healthy)
        .map(|(family, one)| {
            let updated = one.updated.map_or_else(|| NEVER.to_owned(), wall);
            (family.to_string(), serde_json::json!({ "lastUpdated": updated, "healthy": one.healthy }))
        })
        .collect();
    let mut body = serde_json::json!({
        "lastUpdated": if ok { time(now) } else { status.updated.map_or_else(|| NEVER.to_owned(), wall) },
        "currentTime": time(now),
        "healthy": status.healthy,
    });
    if !by_family.is_empty() {
        body["status"] = by_family.into();
    }
    if with_node {
        body["nodeEligible"] = status.node_eligible.into();
    }
    json(ok, &body)
}

fn time(at: SystemTime) -> String {
    jiff::Timestamp::try_from(at).map_or_else(|_| String::new(), |t| t.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_nobody_has_is_asked_for_ever_less_often() {
        let absent = io::Error::from_raw_os_error(99);
        assert_eq!(absent.kind(), io::ErrorKind::AddrNotAvailable);
        let seconds = |error: &io::Error, tries| patience(error, tries).as_secs();
        assert_eq!([1, 2, 3, 7, 100].map(|tries| seconds(&absent, tries)), [5, 10, 20, 300, 300]);
        let no_family = io::Error::from_raw_os_error(97);
        assert_eq!(seconds(&no_family, 100), 300);
        // Somebody else has the port, and may let go of it at any time.
        let taken = io::Error::from(io::ErrorKind::AddrInUse);
        assert_eq!(seconds(&taken, 100), 5);
    }
}
