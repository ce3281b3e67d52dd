//! The default Network with real packets: two nodes on a segment, pods, the outside.

mod support;

use std::net::{SocketAddr, UdpSocket};

use knit_kernel::handle::{LinkFilter, RouteFilter};
use knit_kernel::route::Route;
use knit_kernel::testing::in_namespaces;
use knit_kernel::{NetNs, Op, owner};
use knit_runtime::{PortMapping, Protocol, Reason, Runtime};
use support::{Cluster, NEVER, SOON, Talk, TestPod, default_network, ip, run, tcp, udp, udp_via};

#[test]
fn pods_reach_each_other_on_one_node_and_across() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let two = cluster.a.pod(&network, "two", &["10.244.1.6", "fd44::1:6"]).await;
            let three = cluster.b.pod(&network, "three", &["10.244.2.5", "fd44::2:5"]).await;
            for (from, to, source, target) in [
                (&one, &two, "10.244.1.5", "10.244.1.6"),
                (&one, &two, "fd44::1:5", "fd44::1:6"),
                (&one, &three, "10.244.1.5", "10.244.2.5"),
                (&three, &one, "fd44::2:5", "fd44::1:5"),
            ] {
                let talk = udp(&from.space, &to.space, ip(target), 5000, SOON);
                assert_eq!(talk, Talk::From(ip(source)), "{source} to {target}");
                let talk = tcp(&from.space, &to.space, SocketAddr::new(ip(target), 5000), 5000);
                assert_eq!(talk, Talk::From(ip(source)), "{source} to {target}");
            }
            // The node and its pods, both ways; a pod and another node.
            assert_eq!(
                udp(&cluster.a.space, &one.space, ip("10.244.1.5"), 5000, SOON),
                Talk::From(ip("192.168.7.1"))
            );
            assert_eq!(
                udp(&one.space, &cluster.a.space, ip("192.168.7.1"), 5001, SOON),
                Talk::From(ip("10.244.1.5"))
            );
            assert_eq!(
                udp(&one.space, &cluster.b.space, ip("fd07::2"), 5001, SOON),
                Talk::From(ip("fd44::1:5"))
            );
        });
    });
}

#[test]
fn a_route_that_somebody_else_made_stays_and_counts_again_without_ours() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let handle = cluster.a.handle();
            let eth0 = handle.index_of(&support::name("eth0")).expect("eth0");
            // To the other node's pods, by a gateway that is nobody's.
            let theirs = Route {
                protocol: 4,
                ..Route::to(support::net("10.244.2.0/24")).dev(eth0).via(ip("192.168.7.99"))
            };
            handle.apply(&[Op::create(theirs)]).expect("a static route");
            let there = || -> Vec<u8> {
                let routes = handle.routes(&RouteFilter::default()).expect("routes").into_iter();
                routes.filter(|r| r.destination == theirs.destination).map(|r| r.protocol).collect()
            };
            let mut network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let two = cluster.b.pod(&network, "two", &["10.244.2.5", "fd44::2:5"]).await;
            let talk = |wait| udp(&one.space, &two.space, ip("10.244.2.5"), 5000, wait);
            assert_eq!(talk(SOON), Talk::From(ip("10.244.1.5")));
            assert_eq!(there(), [owner::PROTOCOL, 4], "ours comes first, and theirs is there");
            // A second pass has nothing to do, and a node that moved is followed.
            cluster.a.setup(&network).await;
            assert_eq!(there(), [owner::PROTOCOL, 4]);
            network.blocks[1].node_addresses[0] = ip("192.168.7.77");
            cluster.a.setup(&network).await;
            assert_eq!(there(), [owner::PROTOCOL, 4]);
            assert_ne!(talk(NEVER), Talk::From(ip("10.244.1.5")), "nobody is there");
            network.blocks.pop();
            cluster.a.setup(&network).await;
            assert_eq!(there(), [4], "the other node is gone, and so is our route");
        });
    });
}

#[test]
fn the_default_network_crosses_nodes_by_tunnel_where_it_must() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let mut network = default_network();
            network.parameters.insert("path".into(), "tunnel".into());
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let two = cluster.b.pod(&network, "two", &["10.244.2.5", "fd44::2:5"]).await;
            assert_eq!(one.attachments[0].mtu, 1450);
            for (source, target) in [("10.244.1.5", "10.244.2.5"), ("fd44::1:5", "fd44::2:5")] {
                assert_eq!(udp(&one.space, &two.space, ip(target), 5000, SOON), Talk::From(ip(source)));
            }
            assert_eq!(
                udp(&one.space, &cluster.outside, ip("203.0.113.9"), 5000, SOON),
                Talk::From(ip("192.168.7.1"))
            );
            // Back to direct routes: the tunnel goes.
            network.parameters.clear();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let links =
                cluster.a.handle().links(&LinkFilter { kind: Some("vxlan"), ..LinkFilter::default() });
            assert_eq!(links.expect("links"), []);
            assert_eq!(
                udp(&one.space, &two.space, ip("10.244.2.5"), 5000, SOON),
                Talk::From(ip("10.244.1.5"))
            );
        });
    });
}

#[test]
fn the_outside_is_reached_behind_the_nodes_address() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let mut network = default_network();
            cluster.a.setup(&network).await;
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            for (world, node) in [("203.0.113.9", "192.168.7.1"), ("2001:db8:99::9", "fd07::1")] {
                assert_eq!(udp(&pod.space, &cluster.outside, ip(world), 5000, SOON), Talk::From(ip(node)));
            }
            // A Network that may not reach the outside is not masqueraded; nobody knows the way back.
            network.outside = false;
            cluster.a.setup(&network).await;
            for world in ["203.0.113.9", "2001:db8:99::9"] {
                assert_eq!(udp(&pod.space, &cluster.outside, ip(world), 5001, NEVER), Talk::Silence);
            }
        });
    });
}

#[test]
fn ports_of_the_node_lead_to_a_pod() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let udp_port =
                PortMapping { protocol: Protocol::Udp, host_port: 8053, container_port: 53, host_ip: None };
            let tcp_port = PortMapping {
                protocol: Protocol::Tcp,
                host_port: 8080,
                container_port: 80,
                host_ip: Some(ip("192.168.7.1")),
            };
            request.ports = vec![udp_port, tcp_port];
            let pod = pod.attached(&cluster.a, request.clone()).await;
            let at = |address: &str, port| SocketAddr::new(ip(address), port);
            let outside = ip("192.168.7.99");
            // From the outside, with its own address.
            assert_eq!(
                udp_via(&cluster.outside, &pod.space, at("192.168.7.1", 8053), 53, SOON),
                Talk::From(outside)
            );
            assert_eq!(
                udp_via(&cluster.outside, &pod.space, at("fd07::1", 8053), 53, SOON),
                Talk::From(ip("fd07::99"))
            );
            assert_eq!(tcp(&cluster.outside, &pod.space, at("192.168.7.1", 8080), 80), Talk::From(outside));
            // From the node itself, and from the pod to itself.
            assert_eq!(
                tcp(&cluster.a.space, &pod.space, at("192.168.7.1", 8080), 80),
                Talk::From(ip("192.168.7.1"))
            );
            assert_ne!(udp_via(&pod.space, &pod.space, at("192.168.7.1", 8053), 53, SOON), Talk::Silence);
            assert_ne!(udp_via(&pod.space, &pod.space, at("fd07::1", 8053), 53, SOON), Talk::Silence);
            // On the node's loopback too, for those who do not come from there: nothing leaves a node from
            // 127.0.0.1.
            let bind = |space: &NetNs, address: SocketAddr| {
                let socket = space.run(|| UdpSocket::bind(address)).expect("entered").expect("bound");
                socket.set_read_timeout(Some(SOON)).expect("a time limit");
                socket
            };
            let (server, client) =
                (bind(&pod.space, at("10.244.1.5", 53)), bind(&cluster.a.space, at("192.168.7.1", 0)));
            client.send_to(b"hello", at("127.0.0.1", 8053)).expect("sent");
            let (_, from) = server.recv_from(&mut [0; 16]).expect("received");
            assert_eq!(from.ip(), ip("192.168.7.1"));
            server.send_to(b"hello", from).expect("sent");
            assert_eq!(client.recv_from(&mut [0; 16]).expect("answered").1, at("127.0.0.1", 8053));
            drop((server, client));
            // Nobody else can have them, and nothing of such a request stays.
            let other = TestPod::new("two");
            let mut taken = other.request(&network, &["10.244.1.6", "fd44::1:6"]);
            taken.ports = vec![udp_port];
            let error = cluster.a.runtime.attach(&taken).await.expect_err("a taken port");
            assert_eq!(error.reason, Reason::Conflict, "{error}");
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list").len(), 1);
            // They go with the pod, and then others can have them.
            cluster.a.runtime.detach(&pod.pod, None).await.expect("detached");
            let other = other.attached(&cluster.a, taken).await;
            assert_eq!(
                udp_via(&cluster.outside, &other.space, at("192.168.7.1", 8053), 53, SOON),
                Talk::From(outside)
            );
        });
    });
}
