//! Health over real HTTP on loopback. Rules 54 to 56.

use std::sync::mpsc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::backend::{Backend, Outcome};
use crate::engine::{Clock, Engine, EngineConfig, SystemClock};
use crate::model::{Conditions, Endpoint, EndpointGroup, NodeInfo, Protocol, Service};
use crate::source::Event;
use crate::view::{ListKind, NodePortMatch, NodeView};

struct Answering(Outcome);

impl Backend for Answering {
    fn sync(&mut self, _: &NodeView) -> Outcome {
        self.0.clone()
    }
}

/// An engine whose node has a loopback address, with a service that has a health check on `port`.
fn engine(health: &Health, port: u16) -> Engine<Answering> {
    let node = NodeInfo { addresses: vec![own_loopback().into()], ..NodeInfo::new("here") };
    let config = EngineConfig {
        pace: crate::engine::Pace {
            min_interval: Duration::ZERO,
            retry_first: Duration::ZERO,
            ..Default::default()
        },
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(config, node, Answering(Outcome::Done)).observed_by(health.observer());
    let mut service = Service::new("ns/svc").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80);
    service.health_check_port = std::num::NonZeroU16::new(port);
    send(&mut engine, Event::SetService(Box::new(service)));
    send(&mut engine, Event::ListDone(ListKind::Services));
    send(&mut engine, Event::ListDone(ListKind::Groups));
    engine
}

fn send(engine: &mut Engine<Answering>, event: Event) {
    engine.handle(event, SystemClock.now());
    engine.poll(&SystemClock);
}

fn endpoints(states: &[Conditions]) -> Event {
    let mut group = EndpointGroup::of_addresses("ns/svc-1", "ns/svc", Protocol::Tcp, 8080, &[]);
    group.endpoints = (states.iter().zip(1u8..))
        .map(|(state, n)| Endpoint::new([10, 1, 0, n].into()).on("here").state(*state))
        .collect();
    Event::SetGroup(Box::new(group))
}

/// Status code, headers as they came, body.
async fn get(port: u16, path: &str) -> (u16, String, serde_json::Value) {
    let mut stream = TcpStream::connect((own_loopback(), port)).await.expect("a server");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, head.to_lowercase(), serde_json::from_str(body).unwrap_or_default())
}

/// A loopback address of this process's own, so that a port that was free just now still is when it is
/// wanted.
fn own_loopback() -> std::net::Ipv4Addr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    [127, 54, high, low.clamp(1, 254)].into()
}

/// A port on that address that was free just now.
async fn free_port() -> u16 {
    TcpListener::bind((own_loopback(), 0)).await.unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn rule_54_health_check_node_port() {
    let health = Health::new(Duration::from_secs(60));
    let port = free_port().await;
    let mut engine = engine(&health, port);
    let (failed, failures) = mpsc::channel();
    let server = tokio::spawn(serve_checks(health.clone(), move |_, at, error| {
        failed.send(format!("{at}: {error}")).unwrap();
    }));
    // The task listens before it waits for anything.
    tokio::task::yield_now().await;

    let expect = |n: u64| {
        serde_json::json!({ "service": { "namespace": "ns", "name": "svc" }, "localEndpoints": n,
                            "serviceProxyHealthy": true })
    };
    let (code, head, body) = get(port, "/").await;
    assert_eq!((code, body), (503, expect(0)));
    assert!(head.contains("content-type: application/json"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    assert!(head.contains("x-load-balancing-endpoint-weight: 0"), "{head}");

    send(&mut engine, endpoints(&[Conditions::READY, Conditions::READY, Conditions::NOT_READY]));
    let (code, head, body) = get(port, "/anything").await;
    assert_eq!((code, body), (200, expect(2)));
    assert!(head.contains("x-load-balancing-endpoint-weight: 2"), "{head}");

    // Only terminating: traffic still flows, but load balancers are told to stop.
    send(&mut engine, endpoints(&[Conditions::SERVING_TERMINATING]));
    assert_eq!(get(port, "/").await.0, 503);

    // Rule 56: a node that goes does not fail it.
    send(&mut engine, endpoints(&[Conditions::READY]));
    let leaving = NodeInfo { leaving: true, ..engine.inspect().view.node().clone() };
    send(&mut engine, Event::SetNode(Box::new(leaving)));
    assert!(!health.proxy(Instant::now()).node_eligible);
    assert_eq!(get(port, "/").await.0, 200);

    assert!(failures.try_recv().is_err());
    server.abort();
}

#[tokio::test]
async fn rule_54_a_proxy_that_is_unwell_fails_it() {
    let health = Health::new(Duration::ZERO);
    let mut engine = engine(&health, 1);
    send(&mut engine, endpoints(&[Conditions::READY]));
    let check = || health.check("ns/svc", Family::V4, Instant::now()).unwrap();
    assert!(check().ok());
    engine.backend().0 = Outcome::Failed("no".into());
    send(&mut engine, endpoints(&[Conditions::READY, Conditions::READY]));
    // What counts is what is in force.
    assert_eq!(check(), CheckStatus { local_endpoints: 1, proxy_healthy: false });
    assert!(!check().ok());
    assert_eq!(health.check("ns/none", Family::V4, Instant::now()), None);
}

#[test]
fn rule_55_late_means_waiting_for_too_long() {
    let mut health = Health::new(Duration::from_secs(60));
    let start = Instant::now();
    let after = |s| start + Duration::from_secs(s);
    // Still waiting for its lists: not late, however long it takes.
    assert!(health.proxy(after(1000)).healthy);
    // There is something to do, and it is not done: that counts from the first time on.
    health.queued(start);
    assert!(health.proxy(after(59)).healthy);
    assert!(!health.proxy(after(60)).healthy);
    let (changes, state) = (crate::view::Changes::default(), NodeView::default());
    let run = |ended| Run {
        full: true,
        changes: &changes,
        state: &state,
        outcome: &Outcome::Done,
        ended,
        took: Duration::ZERO,
    };
    health.ran(&run(after(1)));
    // Nothing to do is fine forever.
    assert!(health.proxy(after(100_000)).healthy);
    health.queued(after(10));
    // A further change does not make the first one younger.
    health.queued(after(60));
    assert!(health.proxy(after(69)).healthy);
    assert!(!health.proxy(after(70)).healthy);
    health.ran(&run(after(71)));
    assert!(health.proxy(after(1000)).healthy);
}

#[tokio::test]
async fn rule_55_a_proxy_whose_first_sync_never_succeeds_is_unwell_and_answers_no_health_check() {
    let health = Health::new(Duration::from_secs(60));
    let node = NodeInfo { addresses: vec![own_loopback().into()], ..NodeInfo::new("here") };
    let mut engine = Engine::new(EngineConfig::default(), node, Answering(Outcome::Failed("x".into())))
        .observed_by(health.observer());
    let mut service = Service::new("ns/svc").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80);
    service.health_check_port = std::num::NonZeroU16::new(30000);
    send(&mut engine, Event::SetService(Box::new(service)));
    send(&mut engine, endpoints(&[Conditions::READY]));
    send(&mut engine, Event::ListDone(ListKind::Services));
    send(&mut engine, Event::ListDone(ListKind::Groups));
    let later = Instant::now() + Duration::from_secs(61);
    assert!(!health.proxy(later).healthy);
    assert_eq!(serve_once(&Health { timeout: Duration::ZERO, ..health.clone() }).await["healthy"], false);
    // Nothing is in force, so nobody is told that it is.
    assert_eq!(health.check("ns/svc", Family::V4, later), None);
}

/// What was asked for was done, but for one family if that is given.
fn told(
    health: &mut Health,
    checks: &[(&str, u16, [usize; 2])],
    failed: Option<Family>,
    retry: Option<Family>,
) {
    let any = NodePortMatch::Only(Box::new([own_loopback().into()]));
    let settings = NodeSettings {
        families: PerFamily { v4: true, v6: true },
        node_ports: PerFamily { v4: any, v6: NodePortMatch::AnyLocal },
        ..NodeSettings::default()
    };
    let check = |(name, port, [v4, v6]): &(&str, u16, [usize; 2])| {
        let port = std::num::NonZeroU16::new(*port).expect("a port");
        (ServiceName::from(*name), HealthCheck { port, local_ready: PerFamily { v4: *v4, v6: *v6 } })
    };
    let state = NodeView {
        node: Arc::new(settings),
        health_checks: checks.iter().map(check).collect(),
        ..NodeView::default()
    };
    let names = checks.iter().map(|(name, ..)| ServiceName::from(*name)).collect();
    let changes = crate::view::Changes { health_checks: names, retry, ..Default::default() };
    let outcome = match failed {
        None => Outcome::Done,
        Some(family) => Outcome::FamilyFailed { family, reason: "no".into(), failures: Vec::new() },
    };
    health.ran(&Run {
        full: false,
        changes: &changes,
        state: &state,
        outcome: &outcome,
        ended: Instant::now(),
        took: Duration::ZERO,
    });
}

#[test]
fn rule_55_one_familys_failure_is_not_the_others() {
    let mut health = Health::new(Duration::from_secs(60));
    told(&mut health, &[("ns/a", 1, [1, 1])], None, None);
    let v6 = Some(Family::V6);
    told(&mut health, &[("ns/a", 1, [2, 2]), ("ns/b", 2, [3, 3])], v6, None);
    let count = |health: &Health, name: &str, family| {
        health.check(name, family, Instant::now()).map(|check| check.local_endpoints)
    };
    // What is known of IPv6 is what was last in force there.
    assert_eq!((count(&health, "ns/a", Family::V4), count(&health, "ns/a", Family::V6)), (Some(2), Some(1)));
    assert_eq!((count(&health, "ns/b", Family::V4), count(&health, "ns/b", Family::V6)), (Some(3), Some(0)));
    let later = Instant::now() + Duration::from_secs(61);
    let status = health.proxy(later);
    assert_eq!(
        (status.healthy, status.families.v4.healthy, status.families.v6.healthy),
        (false, true, false)
    );
    assert!(health.check("ns/a", Family::V4, later).is_some_and(|check| check.ok()));
    assert!(!health.check("ns/a", Family::V6, later).is_some_and(|check| check.ok()));
    // It is whole again: all of it counts, whatever changed in this call.
    let all = [("ns/a", 1, [2, 2]), ("ns/b", 2, [3, 3])];
    told(&mut health, &all, None, v6);
    assert_eq!((count(&health, "ns/a", Family::V6), count(&health, "ns/b", Family::V6)), (Some(2), Some(3)));
    assert!(health.proxy(later).healthy);
}

/// A port that was free just now on every address.
async fn free_everywhere() -> u16 {
    TcpListener::bind("[::]:0").await.unwrap().local_addr().unwrap().port()
}

async fn answers(at: std::net::SocketAddr) -> serde_json::Value {
    let mut stream = TcpStream::connect(at).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[tokio::test]
async fn rule_54_each_family_has_a_socket_of_its_own_beside_the_other() {
    let mut health = Health::new(Duration::from_secs(60));
    let port = free_everywhere().await;
    // IPv4 on given addresses, IPv6 on all of them: with ranges of one family it is so.
    told(&mut health, &[("ns/svc", port, [1, 2])], None, None);
    let (failed, failures) = mpsc::channel();
    let server = tokio::spawn(serve_checks(health.clone(), move |_, at, error| {
        failed.send(format!("{at}: {error}")).unwrap();
    }));
    tokio::task::yield_now().await;
    assert_eq!(failures.try_recv(), Err(mpsc::TryRecvError::Empty));
    assert_eq!(answers((own_loopback(), port).into()).await["localEndpoints"], 1);
    assert_eq!(answers((std::net::Ipv6Addr::LOCALHOST, port).into()).await["localEndpoints"], 2);
    // IPv4 is not served by the socket of IPv6.
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
    server.abort();
}

#[tokio::test]
async fn connections_that_say_nothing_make_room_for_those_that_ask() {
    let health = Health::new(Duration::from_secs(60));
    let listener = TcpListener::bind((own_loopback(), 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(serve_proxy(listener, health, |_| {}));
    let mut silent = Vec::new();
    for _ in 0..listen::LIMITS.all {
        silent.push(TcpStream::connect((own_loopback(), port)).await.unwrap());
    }
    for _ in 0..3 {
        assert_eq!(get(port, "/healthz").await.0, 200);
    }
    // The oldest has gone for that.
    let mut buffer = [0];
    assert!(matches!(silent[0].read(&mut buffer).await, Ok(0) | Err(_)));
    server.abort();
}

/// One answer to /healthz.
async fn serve_once(health: &Health) -> serde_json::Value {
    let listener = TcpListener::bind((own_loopback(), 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(serve_proxy(listener, health.clone(), |_| {}));
    let (_, _, body) = get(port, "/healthz").await;
    server.abort();
    body
}

#[tokio::test]
async fn rule_55_healthz_and_livez() {
    let health = Health::new(Duration::ZERO);
    let starting = serve_once(&Health::new(Duration::ZERO)).await;
    assert_eq!(starting["healthy"], true);
    assert_eq!(starting.get("status"), None, "nothing was synced yet");

    let mut engine = engine(&health, 1);
    let listener = TcpListener::bind((own_loopback(), 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, probes) = mpsc::channel();
    let server =
        tokio::spawn(serve_proxy(listener, health.clone(), move |probe| sender.send(probe).unwrap()));

    let (code, head, body) = get(port, "/healthz").await;
    assert_eq!(code, 200);
    assert!(
        head.contains("content-type: application/json") && head.contains("x-content-type-options: nosniff")
    );
    assert_eq!((&body["healthy"], &body["nodeEligible"]), (&true.into(), &true.into()));
    assert_eq!(body["lastUpdated"], body["currentTime"]);
    assert_eq!(body["status"]["IPv4"]["healthy"], true);
    assert_eq!(body["status"]["IPv6"]["healthy"], true);
    // The family says when it was really synced.
    assert_ne!(body["status"]["IPv4"]["lastUpdated"], body["currentTime"]);
    let (code, _, body) = get(port, "/livez").await;
    assert_eq!((code, &body["nodeEligible"]), (200, &serde_json::Value::Null));

    let leaving = NodeInfo { leaving: true, ..engine.inspect().view.node().clone() };
    send(&mut engine, Event::SetNode(Box::new(leaving)));
    let (code, _, body) = get(port, "/healthz").await;
    assert_eq!((code, &body["nodeEligible"]), (503, &false.into()));
    // The proxy itself is well; only the node is not to be used, and nothing pretends to be newer than it is.
    assert_eq!(body["healthy"], true);
    assert_eq!(body["lastUpdated"], body["status"]["IPv4"]["lastUpdated"]);
    assert_eq!(get(port, "/livez").await.0, 200);

    engine.backend().0 = Outcome::Failed("no".into());
    send(&mut engine, endpoints(&[Conditions::READY]));
    let (code, _, body) = get(port, "/livez").await;
    assert_eq!((code, &body["healthy"]), (503, &false.into()));
    assert_ne!(body["lastUpdated"], body["currentTime"]);
    assert_eq!(get(port, "/other").await.0, 404);

    use Probe::{Healthz, Livez};
    let seen: Vec<Probe> = probes.try_iter().collect();
    assert_eq!(seen, [Healthz(200), Livez(200), Healthz(503), Livez(200), Livez(503)]);
    server.abort();
}
