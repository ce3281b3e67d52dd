//! The port for health and numbers while a pod does its worst to it: over real sockets, in a namespace of its
//! own.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use common::Node;
use knit_kernel::addr::Address;
use knit_kernel::link::Change;
use knit_kernel::testing::in_namespaces;
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_node::http::HttpServer;
use knit_runtime::NetworkUsage;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// A connection from one of our addresses.
fn connection(from: &str, to: SocketAddr) -> TcpStream {
    let from = SocketAddr::new(from.parse().expect("an address"), 0);
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&fd, &from).expect("bound");
    connect(&fd, &to).expect("connected");
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    stream
}

/// What a client at this address is told; nothing if it is refused.
fn get(from: &str, to: SocketAddr, path: &str) -> String {
    let mut stream = connection(from, to);
    let mut answer = String::new();
    let asked = write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    // Refused: the connection is closed, or reset.
    let _ = asked.and_then(|()| stream.read_to_string(&mut answer));
    answer
}

#[test]
fn idle_connections_of_one_client_keep_nobody_else_out() {
    in_namespaces(|| {
        let kernel = Handle::open(&NetNs::current().expect("a namespace")).expect("netlink");
        let name = IfName::new("lo").expect("a name");
        let lo = kernel.link_by_name(&name).expect("asked").expect("lo").index;
        let addresses = (1..=9).map(|host| {
            let net: ipnet::IpNet = format!("10.0.0.{host}/32").parse().expect("an address");
            Op::create(Address::new(lo, net))
        });
        let up = Op::Change(Change::of(lo).up());
        kernel.apply(&std::iter::once(up).chain(addresses).collect::<Vec<_>>()).expect("addresses");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(serve_and_ask());
    });
}

async fn serve_and_ask() {
    let node = Node::new();
    let agent = node.start().await;
    let address: IpAddr = "10.0.0.9".parse().expect("an address");
    let server = HttpServer::open(SocketAddr::new(address, 0)).await.expect("a port");
    let to = server.address().expect("an address");
    // What one tenant does, as its runtime counts it.
    node.kernel.uses(NetworkUsage {
        network: "blue".into(),
        connections: 300,
        connections_limit: 4096,
        refused_connections: 7,
        refused_connections_together: 5,
        refused_questions: 9,
    });
    let serving = tokio::spawn(server.serve(agent.core.clone()));
    let asked = tokio::task::spawn_blocking(move || {
        // One that says nothing, half a request, and the same again and again.
        let mut held = Vec::new();
        for n in 0..300 {
            let mut stream = connection("10.0.0.1", to);
            if n % 2 == 0 {
                let _ = stream.write_all(b"GET /metrics HT");
            }
            held.push(stream);
        }
        assert!(get("10.0.0.2", to, "/healthz").starts_with("HTTP/1.1 200"), "another client");
        assert!(get("10.0.0.9", to, "/healthz").starts_with("HTTP/1.1 200"), "the node itself");
        let metrics = get("10.0.0.3", to, "/metrics");
        let refused = metrics.lines().find(|l| l.starts_with("knit_node_http_refused_connections_total "));
        let refused: u64 = refused.and_then(|l| l.rsplit(' ').next()?.parse().ok()).expect("a number");
        assert!(refused >= 250, "{refused} of 300");
        for line in [
            r#"knit_node_network_connections{network="blue"} 300"#,
            r#"knit_node_network_connections_limit{network="blue"} 4096"#,
            r#"knit_node_network_refused_connections_total{network="blue",limit="network"} 7"#,
            r#"knit_node_network_refused_connections_total{network="blue",limit="all"} 5"#,
            r#"knit_node_network_refused_neighbour_requests_total{network="blue"} 9"#,
        ] {
            assert!(metrics.lines().any(|found| found.trim_end() == line), "{line}: {metrics}");
        }
        assert_eq!(get("10.0.0.1", to, "/healthz"), "", "the client itself has too many");
        held
    });
    let held = asked.await.expect("asked");
    agent.add(node.request("a", "shop", "blue")).await.expect("pods are served as ever");
    // Who says nothing is not waited for.
    let gone = tokio::task::spawn_blocking(move || {
        let mut first = &held[1];
        let mut answer = Vec::new();
        let _ = first.read_to_end(&mut answer);
        get("10.0.0.1", to, "/healthz")
    });
    assert!(gone.await.expect("asked").starts_with("HTTP/1.1 200"), "its places are free again");
    serving.abort();
}
