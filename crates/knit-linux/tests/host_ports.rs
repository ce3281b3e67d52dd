//! Ports of the node that lead to pods, beside programs of the node that listen.

mod support;

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

use knit_kernel::link::Change;
use knit_kernel::testing::{as_stranger, in_namespaces};
use knit_runtime::{PortMapping, Protocol, Reason, Runtime};
use support::{Cluster, SOON, Talk, TestPod, default_network, ip, name, run, tcp, udp_via};

#[test]
fn a_pods_host_port_took_what_was_meant_for_the_nodes_own_program() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let listen = |at: &'static str| {
                let bound = cluster.b.space.run(|| (TcpListener::bind(at), UdpSocket::bind(at)));
                let (tcp, udp) = bound.expect("visited");
                (tcp.expect("a listener"), udp.expect("a socket"))
            };
            let (kubelet, kubelet_udp) = listen("[::]:10250");
            let one_address = listen("192.168.7.2:10248");
            let mut request = TestPod::new("thief").request(&default_network(), &["10.244.2.5", "fd44::2:5"]);
            let mapping = |protocol, host_port, host_ip| PortMapping {
                protocol,
                host_port,
                container_port: 80,
                host_ip,
            };
            let before = support::tables(&cluster.b);
            for (protocol, port) in [
                (Protocol::Tcp, 10250),
                (Protocol::Udp, 10250),
                (Protocol::Tcp, 10248),
                (Protocol::Udp, 10248),
            ] {
                request.ports = vec![mapping(protocol, 8080, None), mapping(protocol, port, None)];
                let error = cluster.b.runtime.attach(&request).await.expect_err("the node's program has it");
                assert_eq!(error.reason, Reason::Conflict, "{error}");
                assert!(error.to_string().contains(&format!("host port {port}/")), "{error}");
                assert_eq!(support::tables(&cluster.b), before);
            }
            let to = SocketAddr::new(cluster.b.addresses[0], 10250);
            let asked = cluster.outside.run(|| TcpStream::connect_timeout(&to, SOON));
            let client = asked.expect("visited").expect("connected").local_addr().expect("an address");
            let (_, heard) = kubelet.accept().expect("the node's program answers");
            assert_eq!((heard.ip().to_canonical(), heard.port()), (client.ip(), client.port()));
            // Where the program is not, the port is free; and so it is when the program has ended.
            let at = Some(cluster.b.addresses[1]);
            request.ports = vec![mapping(Protocol::Tcp, 10248, at)];
            cluster.b.runtime.attach(&request).await.expect("attached");
            // The same again finds what is there, whatever listens by now.
            let late = listen("0.0.0.0:10249");
            cluster.b.runtime.attach(&request).await.expect("attached");
            cluster.b.runtime.detach(&request.pod, None).await.expect("detached");
            drop((kubelet, kubelet_udp, one_address, late));
            request.ports = vec![mapping(Protocol::Tcp, 10250, None)];
            cluster.b.runtime.attach(&request).await.expect("attached");
        });
    });
}

#[test]
fn a_udp_client_of_the_node_kept_its_port_from_pods() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.b;
            let client = node.space.run(|| UdpSocket::bind("0.0.0.0:40000")).expect("in").expect("a socket");
            let ask = |sandbox: &'static str| {
                let pod = TestPod::new(sandbox);
                let mut request = pod.request(&default_network(), &["10.244.2.5", "fd44::2:5"]);
                let (host_port, container_port) = (40000, 5353);
                let protocol = Protocol::Udp;
                request.ports = vec![PortMapping { protocol, host_port, container_port, host_ip: None }];
                (pod, request)
            };
            let (_pod, request) = ask("early");
            let error = node.runtime.attach(&request).await.expect_err("somebody may answer there");
            assert!(error.to_string().contains("40000"), "{error}");
            // Connected, it hears one peer only.
            client.connect("192.168.7.1:53").expect("connected");
            let (pod, request) = ask("later");
            let _pod = pod.attached(node, request).await;
        });
    });
}

#[test]
fn a_program_on_the_nodes_loopback_and_a_pod_with_the_same_host_port_both_answer() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.b;
            let loopback = ["127.0.0.53", "::1"].map(ip);
            let bound = node.space.run(|| loopback.map(|at| UdpSocket::bind((at, 53)).expect("a socket")));
            let resolvers = bound.expect("visited");
            let bound =
                node.space.run(|| loopback.map(|at| TcpListener::bind((at, 53)).expect("a listener")));
            let tcp_resolvers = bound.expect("visited");
            let pod = TestPod::new("dns");
            let mut request = pod.request(&default_network(), &["10.244.2.5", "fd44::2:5"]);
            let mapping =
                |protocol| PortMapping { protocol, host_port: 53, container_port: 5353, host_ip: None };
            request.ports = [Protocol::Udp, Protocol::Tcp].map(mapping).into();
            let pod = pod.attached(node, request).await;
            for (place, at) in loopback.into_iter().enumerate() {
                let (to, any) = (SocketAddr::new(at, 53), if at.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
                let asked = node.space.run(|| (UdpSocket::bind(any), TcpStream::connect_timeout(&to, SOON)));
                let (client, stream) = asked.expect("visited");
                let (client, stream) = (client.expect("a socket"), stream.expect("connected"));
                client.send_to(b"who", to).expect("sent");
                let mut buffer = [0; 8];
                resolvers[place].set_read_timeout(Some(SOON)).expect("a timeout");
                let (_, from) = resolvers[place].recv_from(&mut buffer).expect("the node's program hears it");
                resolvers[place].send_to(b"me", from).expect("answered");
                client.set_read_timeout(Some(SOON)).expect("a timeout");
                assert_eq!(client.recv_from(&mut buffer).expect("an answer"), (2, to));
                let (_, from) = tcp_resolvers[place].accept().expect("the node's program answers");
                assert_eq!(from, stream.local_addr().expect("an address"));
                // From outside it is the pod's.
                let to = SocketAddr::new(node.addresses[place], 53);
                assert_ne!(udp_via(&cluster.outside, &pod.space, to, 5353, SOON), Talk::Silence, "{to}");
                assert_ne!(tcp(&cluster.outside, &pod.space, to, 5353), Talk::Silence, "{to}");
            }
        });
    });
}

#[test]
fn a_damaged_pod_with_a_host_port_is_repaired_although_a_program_listens_there_by_now() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.b;
            let pod = TestPod::new("one");
            let mut request = pod.request(&default_network(), &["10.244.2.5", "fd44::2:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 8080, container_port: 80, host_ip }];
            let pod = pod.attached(node, request.clone()).await;
            let bound = node.space.run(|| UdpSocket::bind("0.0.0.0:8080"));
            let late = bound.expect("visited").expect("a socket");
            let at = SocketAddr::new(node.addresses[0], 8080);
            let host = name(&pod.attachments[0].host.name);
            for damage in ["set down", "deleted"] {
                as_stranger(|| {
                    let theirs = node.handle();
                    let index = theirs.index_of(&host).expect("the pod's link");
                    match damage {
                        "set down" => {
                            let down = Change { up: Some(false), ..Change::of(index) };
                            theirs.apply(&[down.into()]).expect("down");
                        }
                        _ => assert!(theirs.delete_link(index).expect("deleted")),
                    }
                });
                node.runtime.attach(&request).await.unwrap_or_else(|error| panic!("{damage}: {error}"));
                let talk = udp_via(&cluster.outside, &pod.space, at, 80, SOON);
                assert_ne!(talk, Talk::Silence, "{damage}");
            }
            // Once it is gone, the port is the program's.
            node.runtime.detach(&request.pod, None).await.expect("detached");
            let error = node.runtime.attach(&request).await.expect_err("the node's program has it");
            assert_eq!(error.reason, Reason::Conflict, "{error}");
            drop(late);
        });
    });
}

#[test]
fn a_pod_whose_link_went_while_no_agent_ran_lost_its_host_port_to_a_program_that_came_since() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&default_network(), &["10.244.2.5", "fd44::2:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 8080, container_port: 80, host_ip }];
            let pod = pod.attached(&cluster.b, request.clone()).await;
            let theirs = cluster.b.handle();
            let index = theirs.index_of(&name(&pod.attachments[0].host.name)).expect("the pod's link");
            assert!(theirs.delete_link(index).expect("deleted"));
            cluster.b.restart();
            let bound = cluster.b.space.run(|| UdpSocket::bind("0.0.0.0:8080"));
            let late = bound.expect("visited").expect("a socket");
            cluster.b.setup(&default_network()).await;
            cluster.b.runtime.attach(&request).await.expect("it keeps the port that it was given");
            let at = SocketAddr::new(cluster.b.addresses[0], 8080);
            assert_ne!(udp_via(&cluster.outside, &pod.space, at, 80, SOON), Talk::Silence);
            // Nobody else has it by that, nor itself once it is gone.
            let other = TestPod::new("two").request(&default_network(), &["10.244.2.6", "fd44::2:6"]);
            let other = knit_runtime::AttachRequest { ports: request.ports.clone(), ..other };
            cluster.b.runtime.detach(&request.pod, None).await.expect("detached");
            for request in [&other, &request] {
                let error = cluster.b.runtime.attach(request).await.expect_err("the program has it");
                assert_eq!(error.reason, Reason::Conflict, "{error}");
            }
            drop(late);
        });
    });
}
