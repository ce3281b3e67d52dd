//! A small HTTP server for health and numbers: answers GET, changes nothing, and lets no client keep it from others.
//!
//! One connection is one request and lasts a few seconds at most. A client has a few at once, all together have some more,
//! and the node itself (kubelet's probes) has some of its own that nobody else can take.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::counter::Counter;
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::core::Core;

/// How often it is looked whether an interface has the address.
const LOOK_FOR_ADDRESS: Duration = Duration::from_secs(5);
/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may last.
const LIFETIME: Duration = Duration::from_secs(10);
/// How long the same numbers are shown again: to make them is work that grows with the node, to show them is not.
const FRESH: Duration = Duration::from_secs(1);
/// How many connections one client has at once.
const EACH: usize = 8;
/// How many all clients have at once.
const ALL: usize = 64;
/// How many the node itself has besides.
const OWN: usize = 32;

/// The open port.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
}

/// What is said about one path.
#[derive(Clone, Debug)]
pub struct Answer {
    code: StatusCode,
    kind: &'static str,
    body: Bytes,
}

/// Who is connected.
#[derive(Debug, Default)]
pub struct Guests {
    connections: Mutex<Connections>,
    refused: Counter,
}

#[derive(Debug, Default)]
struct Connections {
    own: usize,
    others: usize,
    by_client: BTreeMap<IpAddr, usize>,
}

/// One connection, while it lasts.
#[derive(Debug)]
struct Guest {
    guests: Arc<Guests>,
    client: IpAddr,
    own: bool,
}

/// A text that is made again only when it is no longer fresh.
#[derive(Debug, Default)]
pub struct Cached {
    text: Mutex<Option<(Instant, Bytes)>>,
}

// === impl HttpServer ===

impl HttpServer {
    /// Opens the port.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub async fn open(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await? })
    }

    /// Opens the port as soon as an interface has the address, and serves as [`serve`](Self::serve) does.
    pub async fn serve_once_there(address: SocketAddr, core: Core) {
        loop {
            match Self::open(address).await {
                Ok(server) => return server.serve(core).await,
                Err(error) => {
                    tracing::debug!(%address, %error, "the port for health and numbers is not open yet");
                }
            }
            tokio::time::sleep(LOOK_FOR_ADDRESS).await;
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves what an agent says of itself, for ever.
    pub async fn serve(self, core: Core) {
        let guests = Arc::new(Guests::counting(core.metrics().refused_connections()));
        let numbers = Cached::default();
        serve(self.listener, guests, move |path| match path {
            "/healthz" => Answer::ok("ok\n"),
            "/readyz" => match core.readiness().now() {
                Ok(()) => Answer::ok(ready(&core)),
                Err(problem) => Answer::unavailable(format!("{problem}\n")),
            },
            "/metrics" => Answer::metrics(numbers.get(|| core.metrics_text())),
            _ => Answer::not_found("there are /healthz, /readyz and /metrics\n"),
        })
        .await;
    }
}

/// Serves for ever.
pub async fn serve(
    listener: TcpListener,
    guests: Arc<Guests>,
    answer: impl Fn(&str) -> Answer + Send + Sync + 'static,
) {
    let answer = Arc::new(answer);
    loop {
        let (stream, client) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "a client cannot be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(local) = stream.local_addr() else { continue };
        // Who is too many finds the connection closed.
        let Some(guest) = guests.admit(client.ip(), local.ip()) else { continue };
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let answer = match *request.method() {
                    Method::GET | Method::HEAD => answer(request.uri().path()),
                    _ => Answer { code: StatusCode::METHOD_NOT_ALLOWED, ..Answer::ok("only GET\n") },
                };
                async move { Ok::<_, Infallible>(answer.response()) }
            });
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(16 << 10);
            server.keep_alive(false);
            let served = server.serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(LIFETIME, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a client was not served"),
                Err(_) => tracing::debug!(%client, "a client took too long"),
            }
            drop(guest);
        });
    }
}

/// "ok", and what people should know of the Services of each Network.
fn ready(core: &Core) -> String {
    let states = core.networks().states().into_iter();
    let notes = states.filter_map(|s| Some(format!("Network {}: {}\n", s.name, s.services?.message()?)));
    std::iter::once("ok\n".to_owned()).chain(notes).collect()
}

// === impl Answer ===

impl Answer {
    /// All is well.
    pub fn ok(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::OK, kind: "text/plain; charset=utf-8", body: body.into() }
    }

    /// Not now.
    pub fn unavailable(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::SERVICE_UNAVAILABLE, ..Self::ok(body) }
    }

    /// No such path.
    pub fn not_found(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::NOT_FOUND, ..Self::ok(body) }
    }

    /// Metrics, as OpenMetrics text.
    pub fn metrics(body: impl Into<Bytes>) -> Self {
        Self { kind: "application/openmetrics-text; version=1.0.0; charset=utf-8", ..Self::ok(body) }
    }

    /// What is said.
    #[must_use]
    pub fn body(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// Whether all is well.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.code == StatusCode::OK
    }

    fn response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body));
        *response.status_mut() = self.code;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(self.kind));
        response
    }
}

// === impl Guests ===

impl Guests {
    /// Nobody yet; those who are refused are counted there.
    #[must_use]
    pub fn counting(refused: Counter) -> Self {
        Self { refused, ..Self::default() }
    }

    /// Lets a client in, unless there are too many of it or of all.
    fn admit(self: &Arc<Self>, client: IpAddr, local: IpAddr) -> Option<Guest> {
        let (client, local) = (client.to_canonical(), local.to_canonical());
        let own = client == local || client.is_loopback();
        let mut connections = self.connections();
        let of_client = connections.by_client.get(&client).copied().unwrap_or_default();
        let room = if own { connections.own < OWN } else { connections.others < ALL && of_client < EACH };
        if !room {
            self.refused.inc();
            return None;
        }
        if own {
            connections.own += 1;
        } else {
            connections.others += 1;
            connections.by_client.insert(client, of_client + 1);
        }
        Some(Guest { guests: Arc::clone(self), client, own })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut connections = self.guests.connections();
        if self.own {
            connections.own -= 1;
            return;
        }
        connections.others -= 1;
        if let Some(of_client) = connections.by_client.get_mut(&self.client) {
            *of_client -= 1;
            if *of_client == 0 {
                connections.by_client.remove(&self.client);
            }
        }
    }
}

// === impl Cached ===

impl Cached {
    /// The text, as fresh as it must be.
    pub fn get(&self, make: impl FnOnce() -> String) -> Bytes {
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        match &*text {
            Some((made, known)) if made.elapsed() < FRESH => known.clone(),
            _ => {
                let new = Bytes::from(make());
                *text = Some((Instant::now(), new.clone()));
                new
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn no_client_takes_the_places_of_others_nor_all_together_those_of_the_node() {
        let guests = Arc::new(Guests::default());
        let node = ip("192.0.2.1");
        let hold = |client: &str, n: usize| -> Vec<Guest> {
            (0..n).filter_map(|_| guests.admit(ip(client), node)).collect()
        };
        let greedy = hold("10.244.0.7", 500);
        assert_eq!((greedy.len(), guests.refused.get()), (EACH, 500 - EACH as u64));
        let other = hold("10.244.0.8", 1);
        assert_eq!(other.len(), 1, "another client is let in");
        assert_eq!(hold("::ffff:10.244.0.7", 1).len(), 0, "the same client by another name");
        let crowd: Vec<Guest> = (0..200).flat_map(|n| hold(&format!("10.244.1.{n}"), EACH)).collect();
        assert_eq!(crowd.len() + greedy.len() + other.len(), ALL);
        assert_eq!((hold("10.244.0.9", 1).len(), hold("192.0.2.1", 1).len()), (0, 1), "kubelet is the node");
        assert_eq!(hold("127.0.0.1", 500).len(), OWN);
        drop(greedy);
        assert_eq!(hold("10.244.0.9", 1).len(), 1, "who goes makes room");
        drop((other, crowd));
        let connections = guests.connections();
        assert!(connections.by_client.is_empty() && connections.own == 0 && connections.others == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_are_made_once_a_second_however_often_they_are_asked_for() {
        let (cached, mut made) = (Cached::default(), 0);
        for _ in 0..1000 {
            cached.get(|| {
                made += 1;
                made.to_string()
            });
        }
        assert_eq!(made, 1);
        tokio::time::advance(FRESH).await;
        assert_eq!(cached.get(|| "new".to_owned()), "new");
    }
}
