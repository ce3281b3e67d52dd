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
    client.watch(WatchRequest {}).await.unwrap().into_inner()
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
    let mut stream = Stream::new();
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
