//! The stream, with a real client over loopback.

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use super::Stream;
use super::proto::node_views_client::NodeViewsClient;
use super::proto::watch_response::Op;
use super::proto::{WatchRequest, WatchResponse, delete, frontend, route, set};
use crate::backend::{Backend, Outcome};
use crate::model::{EndpointGroup, NodeInfo, Protocol, Service};
use crate::view::{View, ViewConfig};

type Client = tonic::Streaming<WatchResponse>;

async fn serve(stream: &Stream) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let server = Server::builder().add_service(stream.service());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

async fn watch(address: &str) -> Client {
    let mut client = NodeViewsClient::connect(address.to_owned()).await.unwrap();
    client.watch(WatchRequest::default()).await.unwrap().into_inner()
}

/// All messages up to a Sync, as short texts.
async fn batch(client: &mut Client) -> Vec<String> {
    let mut found = Vec::new();
    loop {
        match client.message().await.unwrap().unwrap().op.unwrap() {
            Op::Set(set) => found.push(match set.object.unwrap() {
                set::Object::Node(node) => format!("node {}", node.name),
                set::Object::Port(port) => {
                    let key = port.key.unwrap();
                    let targets: Vec<_> =
                        port.cluster.iter().map(|e| format!("{}:{}", e.address, e.port)).collect();
                    let frontend = &port.frontends[0];
                    assert_eq!(frontend.kind(), frontend::Kind::ClusterIp);
                    let action = frontend.route.unwrap().action();
                    assert_eq!(action == route::Action::Reject, targets.is_empty());
                    format!(
                        "{}/{} {}:{} -> {targets:?}",
                        key.namespace, key.service, frontend.address, frontend.port
                    )
                }
                set::Object::HealthCheck(check) => format!("health {} {}", check.service, check.port),
            }),
            Op::Delete(delete) => found.push(match delete.object.unwrap() {
                delete::Object::Port(key) => format!("delete {}/{}", key.namespace, key.service),
                delete::Object::HealthCheck(name) => format!("delete health {name}"),
            }),
            Op::Sync(sync) => {
                found.push(format!("sync {}", sync.revision));
                return found;
            }
        }
    }
}

#[tokio::test]
async fn watchers_get_everything_and_then_changes() {
    let mut stream = Stream::new();
    let address = serve(&stream).await;
    let mut early = watch(&address).await;

    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    let mut service = Service::new("shop/web").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80);
    service.health_check_port = std::num::NonZeroU16::new(32000);
    view.set_service(service);
    view.take_changes();
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    let all = ["node here", "shop/web 10.0.0.1:80 -> []", "health shop/web 32000", "sync 1"];
    assert_eq!(batch(&mut early).await, all);

    // One who comes later gets the same.
    let mut late = watch(&address).await;
    assert_eq!(batch(&mut late).await, all);

    // The same again is nothing to tell; a change is.
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    let addresses = [[10, 1, 0, 1].into()];
    view.set_group(EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &addresses));
    let changes = view.take_changes();
    assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    for client in [&mut early, &mut late] {
        assert_eq!(batch(client).await, ["shop/web 10.0.0.1:80 -> [\"10.1.0.1:8080\"]", "sync 2"]);
    }

    view.delete_service(&"shop/web".into());
    let changes = view.take_changes();
    assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    assert_eq!(batch(&mut early).await, ["delete shop/web", "delete health shop/web", "sync 3"]);

    // After a full sync too, what is gone is deleted.
    view.set_service(Service::new("shop/one").cluster_ip([10, 0, 0, 2].into()).port(Protocol::Tcp, 80));
    view.take_changes();
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    view.delete_service(&"shop/one".into());
    view.take_changes();
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    assert_eq!(batch(&mut early).await, ["shop/one 10.0.0.2:80 -> []", "sync 4"]);
    assert_eq!(batch(&mut early).await, ["delete shop/one", "sync 5"]);
}

#[tokio::test]
async fn a_watcher_that_is_too_slow_is_told_to_start_again() {
    let mut stream = Stream::new().behind(64 << 10);
    let address = serve(&stream).await;
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    view.take_changes();
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    let mut client = watch(&address).await;
    // More than the queue holds, without a pause in which the server's task could send anything on.
    for n in 0..2000u16 {
        let name = format!("shop/s{}", n % 2);
        view.set_service(Service::new(&*name).cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, n + 1));
        let changes = view.take_changes();
        assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    }
    let status = loop {
        match client.message().await {
            Ok(message) => assert!(message.is_some(), "the stream ended without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), tonic::Code::DataLoss);
    // And then it has the state again.
    assert_eq!(batch(&mut watch(&address).await).await.len(), 4);
}

/// A node that vanished does not close its connection: it says nothing any more.
#[test]
fn a_watcher_that_vanished_is_forgotten() {
    use std::time::Duration;

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let moment = Duration::from_millis(100);
    let stream = Stream::new().keep_alive(moment, moment);
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let server = stream.clone();
    runtime.spawn(async move { server.serve_tcp(listener).await });

    // This runtime is not driven between the two calls of block_on, so that nothing answers there.
    let vanished = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let watching = vanished.block_on(async {
        let mut client = NodeViewsClient::connect(address).await.unwrap();
        client.watch(WatchRequest { watcher: "node-a".to_owned() }).await.unwrap()
    });
    assert_eq!(stream.watchers().len(), 1);
    knit_kernel::testing::eventually("it is forgotten", Duration::from_secs(60), || {
        stream.watchers().is_empty()
    });
    drop(watching);
}

/// A view with something of everything.
fn all_kinds() -> View {
    use crate::model::{Affinity, Endpoint, ServicePort, TrafficPolicy};
    use crate::view::{LocalTraffic, NodePorts};

    let config = ViewConfig {
        node_ports: NodePorts::Ranges(vec!["192.0.2.0/24".parse().unwrap()]),
        local_traffic: LocalTraffic::Sources(vec!["10.1.0.0/16".parse().unwrap()]),
        exempt_vips: vec!["10.0.0.10".parse().unwrap()],
        masquerade_all: true,
        ..ViewConfig::default()
    };
    let mut node = NodeInfo::new("here");
    node.addresses = vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
    node.leaving = true;
    let mut view = View::new(config, node);
    view.set_service_ranges(
        "kubernetes",
        vec!["10.0.0.0/16".parse().unwrap(), "fd00::/112".parse().unwrap()],
    );
    let mut service = Service::new("shop/web")
        .cluster_ip([10, 0, 0, 1].into())
        .cluster_ip("fd00::1".parse().unwrap())
        .add_port(ServicePort::new("http", Protocol::Tcp, 80).node_port(30080))
        .add_port(ServicePort::new("dns", Protocol::Udp, 53))
        .add_port(ServicePort::new("tel", Protocol::Sctp, 7));
    service.load_balancer_ips = Box::new(["198.51.100.1".parse().unwrap()]);
    service.external_ips = Box::new(["2001:db8::2".parse().unwrap()]);
    service.source_ranges = Some(Box::new(["192.0.2.0/24".parse().unwrap()]));
    service.external_policy = TrafficPolicy::Local;
    service.affinity = Some(Affinity::default());
    service.health_check_port = std::num::NonZeroU16::new(32000);
    view.set_service(service);
    view.set_service(Service::new("shop/empty").cluster_ip([10, 0, 0, 2].into()).port(Protocol::Tcp, 80));
    for (name, addresses) in [("v4", ["10.1.0.1", "10.1.0.2"]), ("v6", ["fd01::1", "fd01::2"])] {
        let addresses = addresses.map(|a| a.parse().unwrap());
        let mut group = EndpointGroup::of_addresses(
            &*format!("shop/web-{name}"),
            "shop/web",
            Protocol::Tcp,
            8080,
            &addresses,
        );
        group.ports = [("http", Protocol::Tcp), ("dns", Protocol::Udp), ("tel", Protocol::Sctp)]
            .map(|(name, protocol)| crate::model::GroupPort { name: name.into(), protocol, number: 8080 })
            .into();
        group.endpoints[0] = Endpoint::new(addresses[0]).on("here");
        view.set_group(group);
    }
    view
}

/// What a watcher that comes now is sent.
async fn everything(stream: &Stream) -> Vec<WatchResponse> {
    let address = serve(stream).await;
    let mut client = watch(&address).await;
    let mut found = Vec::new();
    while !matches!(found.last(), Some(WatchResponse { op: Some(Op::Sync(_)) })) {
        found.push(client.message().await.unwrap().unwrap());
    }
    found
}

#[tokio::test]
async fn what_is_sent_is_what_the_other_end_has() {
    use crate::engine::{Engine, EngineConfig, SystemClock};

    struct Nothing;
    impl Backend for Nothing {
        fn sync(&mut self, _: &crate::view::NodeView) -> Outcome {
            Outcome::Done
        }
    }

    let mut view = all_kinds();
    view.take_changes();
    let sent = view.current();
    // There is something of everything in it.
    let frontends: Vec<_> = sent.ports.values().flat_map(|port| port.frontends.iter()).collect();
    assert!(frontends.iter().any(|f| f.from_pods.is_some() && f.from_node.is_some()));
    assert!(frontends.iter().any(|f| f.sources != crate::view::Sources::Any));
    assert!(sent.ports.values().any(|port| !port.serving.is_empty() && !port.local.is_empty()));
    assert_eq!(sent.health_checks.len(), 1);

    let mut stream = Stream::new();
    assert_eq!(stream.sync(sent), Outcome::Done);
    let mut batch = super::source::Batch::default();
    let events =
        everything(&stream).await.into_iter().filter_map(|message| batch.take(message)).next().unwrap();
    let mut engine = Engine::new(EngineConfig::default(), NodeInfo::new("other"), Nothing);
    events.into_iter().for_each(|event| engine.handle(event, std::time::Instant::now()));
    engine.poll(&SystemClock);
    let got = engine.inspect().view.current().clone();
    assert_eq!(crate::view::NodeView { revision: 0, ..got }, *sent);
}

#[test]
fn what_another_process_sends_is_not_believed_blindly() {
    use super::proto::{Endpoint, Frontend, HealthCheck, Port, PortKey, Route};
    use super::{decode, proto};

    let key = PortKey {
        namespace: "shop".to_owned(),
        service: "web".to_owned(),
        port: String::new(),
        protocol: proto::Protocol::Tcp.into(),
        family: proto::Family::Ipv4.into(),
    };
    let endpoint = Endpoint { address: "10.1.0.1".to_owned(), port: 8080, local: false };
    let route =
        Route { action: route::Action::ClusterEndpoints.into(), masquerade: route::Masquerade::All.into() };
    let frontend = Frontend {
        kind: frontend::Kind::ClusterIp.into(),
        address: "10.0.0.1".to_owned(),
        port: 80,
        route: Some(route),
        ..Frontend::default()
    };
    let good = Port {
        key: Some(key.clone()),
        frontends: vec![frontend.clone()],
        cluster: vec![endpoint.clone(), endpoint.clone()],
        ..Port::default()
    };
    let (_, view) = decode::port(&good).unwrap();
    assert_eq!(view.cluster.len(), 1, "an endpoint that is there twice counts once");

    let with = |change: &dyn Fn(&mut Port)| {
        let mut port = good.clone();
        change(&mut port);
        decode::port(&port).unwrap_err().to_string()
    };
    let message = |change: &dyn Fn(&mut Port), wanted: &str| assert_eq!(with(change), wanted);
    message(&|p| p.key = None, "key: it is missing");
    message(&|p| p.key.as_mut().unwrap().protocol = 9, "key.protocol: 9 is not a known protocol");
    message(&|p| p.key.as_mut().unwrap().family = 0, "key.family: 0 is not a known address family");
    message(
        &|p| p.key.as_mut().unwrap().namespace = "a/b".to_owned(),
        "key.service: \"a/b\" and \"web\" are not the namespace and name of a service",
    );
    message(&|p| p.cluster[0].address = "10.1".to_owned(), "cluster: \"10.1\" is not a valid IP address");
    message(
        &|p| p.cluster[0].address = "fd00::1".to_owned(),
        "cluster: fd00::1 is not of the key's family IPv4",
    );
    message(&|p| p.cluster[0].port = 65536, "cluster: 65536 is not a valid port; ports are 1 to 65535");
    message(&|p| p.frontends[0].port = 0, "frontends.port: 0 is not a valid port; ports are 1 to 65535");
    message(&|p| p.frontends[0].kind = 0, "frontends.kind: 0 is not a known kind of frontend");
    message(&|p| p.frontends[0].route = None, "frontends.route: it is missing");
    message(&|p| p.cluster.clear(), "frontends.route: it leads to endpoints, but there are none");
    message(
        &|p| {
            p.frontends[0].sources =
                Some(proto::Sources { ranges: vec!["10.0.0.0/33".to_owned()], and_itself: false });
        },
        "frontends.sources: \"10.0.0.0/33\" is not a valid range of addresses",
    );
    let check = HealthCheck { service: "web".to_owned(), port: 1, ..HealthCheck::default() };
    assert!(decode::health_check(&check).is_err());

    // One that cannot be used is named, and the rest counts.
    let set = |port: Port| WatchResponse {
        op: Some(Op::Set(proto::Set { object: Some(set::Object::Port(port)) })),
    };
    let mut batch = super::source::Batch::default();
    let bad = Port { cluster: Vec::new(), ..good.clone() };
    assert!(batch.take(set(bad)).is_none());
    assert!(batch.take(set(good)).is_none());
    let sync = WatchResponse { op: Some(Op::Sync(proto::Sync { revision: 1, triggered_ms: Vec::new() })) };
    let events = batch.take(sync).unwrap();
    let texts: Vec<String> = events
        .iter()
        .filter_map(|event| match event {
            crate::source::Event::Problem(problem) => Some(problem.to_string()),
            crate::source::Event::SetPort(key, _) => Some(key.to_string()),
            _ => None,
        })
        .collect();
    let named = "Service shop/web: frontends.route: it leads to endpoints, but there are none; \
    ignoring this object from the feeder";
    assert_eq!(texts, [named, "shop/web TCP IPv4"]);
}

#[tokio::test]
async fn reports_of_strangers_are_refused() {
    use super::proto::{PortFailure, ReportRequest};
    let stream = Stream::new();
    let address = serve(&stream).await;
    let mut client = NodeViewsClient::connect(address).await.unwrap();
    let report = ReportRequest { watcher: "me".to_owned(), revision: 1, ..ReportRequest::default() };
    let refused = client.report(report.clone()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    let watching = client.watch(WatchRequest { watcher: "me".to_owned() }).await.unwrap();
    client.report(report.clone()).await.unwrap();
    assert_eq!(stream.watchers()[0].revision, Some(1));
    let bad = ReportRequest { failed: vec![PortFailure::default()], ..report };
    let refused = client.report(bad).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (tonic::Code::InvalidArgument, "failed.key: it is missing")
    );
    drop(watching);
    let long = WatchRequest { watcher: "x".repeat(254) };
    assert_eq!(client.watch(long).await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

mod anything {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    /// Good messages.
    fn seeds() -> Vec<Vec<u8>> {
        let mut view = all_kinds();
        view.take_changes();
        let state = view.current();
        let set =
            |object| WatchResponse { op: Some(Op::Set(super::super::proto::Set { object: Some(object) })) };
        let ports = state
            .ports
            .iter()
            .map(|(key, port)| set(set::Object::Port(super::super::convert::port(key, port))));
        let node = set(set::Object::Node(super::super::convert::node(&state.node)));
        ports.chain([node]).map(|message| message.encode_to_vec()).collect()
    }

    proptest! {
        /// Bytes that were changed on the way make no state, or one that makes sense; they never end
        /// anything. (The fuzz target `proxy_stream` does the same for longer.)
        #[test]
        fn damaged_messages_do_no_harm(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(),
                any::<u8>()), 1..8),
        ) {
            let mut seeds = seeds();
            for (which, at, byte) in changes {
                let count = seeds.len();
                let seed = &mut seeds[which.index(count)];
                let length = seed.len();
                seed[at.index(length)] = byte;
            }
            let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
            let mut batch = super::super::source::Batch::default();
            let sync = WatchResponse { op: Some(Op::Sync(super::super::proto::Sync::default())) };
            let messages = seeds.iter().filter_map(|seed| WatchResponse::decode(&**seed).ok()).chain([sync]);
            for event in messages.filter_map(|message| batch.take(message)).flatten() {
                if let crate::source::Event::SetPort(key, port) = event {
                    view.set_port(key, port);
                }
            }
            for change in view.take_changes().ports {
                let port = change.new.unwrap();
                prop_assert!(port.cluster.is_sorted());
                prop_assert!(port.frontends.iter().all(|frontend| frontend.port != 0));
            }
        }
    }
}
