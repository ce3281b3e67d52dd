//! A small HTTP server for health and numbers: answers GET, changes nothing, and lets no client keep it from
//! others.
//!
//! One connection is one request and lasts a few seconds at most. A client has a few at once, all together
//! have some more, and the node itself (kubelet's probes) has some of its own that nobody else can take. When
//! there is no room for somebody new, the oldest connection of whoever has most is closed.

use std::borrow::Cow;
use std::cmp::Reverse;
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
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::core::Core;

/// How often it is looked whether an interface has the address.
const LOOK_FOR_ADDRESS: Duration = Duration::from_secs(5);
/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may last.
const LIFETIME: Duration = Duration::from_secs(10);
/// How long the same numbers are shown again: to make them is work that grows with the node, to show them is
/// not.
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
    /// Of others, by their numbers: the oldest has the lowest.
    by_client: BTreeMap<IpAddr, BTreeMap<u64, oneshot::Sender<Infallible>>>,
    next: u64,
}

/// One connection, while it lasts.
#[derive(Debug)]
struct Guest {
    guests: Arc<Guests>,
    client: IpAddr,
    /// Its number; the node's own have none.
    number: Option<u64>,
    /// Ends when somebody else needs the place.
    sent_away: oneshot::Receiver<Infallible>,
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
        let Some(mut guest) = guests.admit(client.ip(), local.ip()) else { continue };
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
            tokio::select! {
                served = tokio::time::timeout(LIFETIME, served) => match served {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a client was not served"),
                    Err(_) => tracing::debug!(%client, "a client took too long"),
                },
                () = guest.sent_away() => tracing::debug!(%client, "a client with many connections makes \
                    room"),
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

    /// Lets a client in, unless there are too many of it. If there are too many of all, whoever has most
    /// makes room.
    fn admit(self: &Arc<Self>, client: IpAddr, local: IpAddr) -> Option<Guest> {
        let (client, local) = (client.to_canonical(), local.to_canonical());
        let own = client == local || client.is_loopback();
        let mut connections = self.connections();
        let of_client = connections.by_client.get(&client).map_or(0, BTreeMap::len);
        let room =
            if own { connections.own < OWN } else { of_client < EACH && connections.make_room(of_client) };
        if !room {
            self.refused.inc();
            return None;
        }
        let (stay, sent_away) = oneshot::channel();
        let mut number = None;
        if own {
            connections.own += 1;
        } else {
            let next = connections.next;
            connections.next += 1;
            connections.by_client.entry(client).or_default().insert(next, stay);
            number = Some(next);
        }
        Some(Guest { guests: Arc::clone(self), client, number, sent_away })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Connections ===

impl Connections {
    /// Sees that there is room for one more of a client that has so many; false if nobody has more than it
    /// would have.
    fn make_room(&mut self, of_client: usize) -> bool {
        if self.by_client.values().map(BTreeMap::len).sum::<usize>() < ALL {
            return true;
        }
        // Of those that have most, whose oldest is the oldest of all.
        let oldest = |numbers: &BTreeMap<u64, _>| numbers.keys().next().copied();
        let most = self.by_client.iter().max_by_key(|(_, numbers)| (numbers.len(), Reverse(oldest(numbers))));
        let Some((client, numbers)) = most.filter(|(_, numbers)| numbers.len() > of_client) else {
            return false;
        };
        let (client, Some(number)) = (*client, oldest(numbers)) else { return false };
        self.remove(client, number);
        true
    }

    /// Forgets a connection; if it is still there, it ends.
    fn remove(&mut self, client: IpAddr, number: u64) {
        if let Some(numbers) = self.by_client.get_mut(&client) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_client.remove(&client);
            }
        }
    }
}

// === impl Guest ===

impl Guest {
    /// Waits until somebody else needs the place. The node's own are never sent away.
    async fn sent_away(&mut self) {
        if self.number.is_none() {
            std::future::pending::<()>().await;
        }
        // Nothing is ever sent: it ends when the other end is dropped.
        let _ = (&mut self.sent_away).await;
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut connections = self.guests.connections();
        match self.number {
            Some(number) => connections.remove(self.client, number),
            None => connections.own -= 1,
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
        let stays =
            |guest: &mut Guest| guest.sent_away.try_recv() == Err(oneshot::error::TryRecvError::Empty);
        let mut crowd = crowd;
        let staying = crowd.iter_mut().filter_map(|guest| stays(guest).then_some(())).count();
        assert!(staying <= ALL, "{staying}");
        // As many pods as it takes to fill all places: whoever is new is let in, and whoever has most makes
        // room.
        let mut new = hold("10.244.0.9", 1);
        assert!(new.len() == 1 && stays(&mut new[0]), "a few pods shut everybody out");
        assert_eq!(hold("192.0.2.1", 1).len(), 1, "kubelet is the node");
        assert_eq!(hold("127.0.0.1", 500).len(), OWN);
        let places = guests.connections().by_client.values().map(BTreeMap::len).sum::<usize>();
        assert_eq!(places, ALL);
        drop((greedy, other, crowd, new));
        let connections = guests.connections();
        assert!(connections.by_client.is_empty() && connections.own == 0);
    }

    #[test]
    fn eight_pods_that_hold_all_places_shut_no_ninth_out() {
        let guests = Arc::new(Guests::default());
        let node = ip("192.0.2.1");
        let admit = |client: String| guests.admit(ip(&client), node);
        let mut held: Vec<Guest> = Vec::new();
        for n in 0..ALL / EACH {
            held.extend((0..EACH).filter_map(|_| admit(format!("10.244.1.{n}"))));
        }
        assert_eq!(held.len(), ALL);
        for n in 0..3 {
            let mut prometheus = admit(format!("10.244.2.{n}")).expect("somebody new is let in");
            let closed = Err(oneshot::error::TryRecvError::Closed);
            let gone =
                held.iter_mut().filter_map(|guest| (guest.sent_away.try_recv() == closed).then_some(()));
            assert_eq!(gone.count(), n + 1, "one makes room for each");
            assert_eq!(prometheus.sent_away.try_recv(), Err(oneshot::error::TryRecvError::Empty));
            held.push(prometheus);
        }
        // Asking again costs those that have many, and nobody who has one.
        let again: Vec<Guest> = (0..80).filter_map(|n| admit(format!("10.244.1.{}", n % 8))).collect();
        for prometheus in &mut held[ALL..] {
            assert_eq!(prometheus.sent_away.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
        drop(again);
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
