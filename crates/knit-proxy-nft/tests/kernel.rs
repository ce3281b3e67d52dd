//! Against the kernel: restarts, stale flows, many services, a proxy on a thread of its own.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{Affinity, EndpointGroup, NetworkName, NodeInfo, Protocol, Service, ServicePort};
use knit_proxy::view::{View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend, Options, start};
use knit_proxy_testkit::World;

const PATIENCE: Duration = Duration::from_secs(10);

fn web() -> Service {
    Service::new("shop/web").cluster_ip("10.96.0.1".parse().unwrap()).port(Protocol::Tcp, 80)
}

fn group(service: &str, protocol: Protocol, port: u16, addresses: &[&str]) -> EndpointGroup {
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    EndpointGroup::of_addresses(format!("{service}-1").as_str(), service, protocol, port, &addresses)
}

fn view() -> View {
    View::new(ViewConfig::default(), World::node_info())
}

fn backend(node: &NetNs) -> NftBackend {
    NftBackend::new_in(node, Config::default()).expect("a backend")
}

fn sync(backend: &mut NftBackend, view: &mut View) {
    view.take_changes();
    assert_eq!(backend.sync(view.current()), Outcome::Done);
}

fn apply(backend: &mut NftBackend, view: &mut View) {
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
}

/// A server in somebody's namespace that sends every byte back.
fn echo(world: &World, host: &str, address: &str) {
    let listener = world.host(host).expect("a host").run(|| TcpListener::bind(address));
    let listener = listener.expect("entered").expect("bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn connect(world: &World, host: &str, to: &str) -> TcpStream {
    let to: SocketAddr = to.parse().unwrap();
    let stream = world.host(host).expect("a host").run(|| TcpStream::connect_timeout(&to, PATIENCE));
    let stream = stream.expect("entered").expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

fn ping(stream: &mut TcpStream, word: &[u8; 4]) {
    stream.write_all(word).expect("sent");
    let mut buffer = [0; 4];
    stream.read_exact(&mut buffer).expect("answered");
    assert_eq!(&buffer, word);
}

#[test]
fn rule_58_connections_survive_a_restart() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        echo(&world, "pod-a", "10.1.0.1:8080");
        echo(&world, "remote-a", "10.1.1.1:8080");
        let mut view = view();
        view.set_service(web());
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1", "10.1.1.1"]));
        let mut first = backend(world.node());
        sync(&mut first, &mut view);
        let mut streams: Vec<TcpStream> = (0..4).map(|_| connect(&world, "pod-b", "10.96.0.1:80")).collect();
        streams.iter_mut().for_each(|stream| ping(stream, b"one."));
        drop(first);
        streams.iter_mut().for_each(|stream| ping(stream, b"two."));
        let mut second = backend(world.node());
        sync(&mut second, &mut view);
        assert_eq!(second.committed(), 0, "all was right already");
        streams.iter_mut().for_each(|stream| ping(stream, b"thre"));
        // An endpoint that is taken out keeps its connections (TCP is never cleaned up: rule 52).
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.1.1"]));
        apply(&mut second, &mut view);
        streams.iter_mut().for_each(|stream| ping(stream, b"four"));
    });
}

#[test]
fn rule_58_every_case_is_read_back_as_it_was_written() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        let mut cases = knit_proxy_testkit::ours().expect("the cases are right");
        for case in &mut cases {
            case.start.flows.clear();
            case.then.iter_mut().for_each(|step| step.flows.clear());
        }
        let tool = Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success());
        if !tool {
            skip("`nft` is not installed, so nobody compares what it lists");
        }
        for case in cases {
            let wrong =
                knit_proxy_testkit::run(&world, std::slice::from_ref(&case), backend).expect("it runs");
            assert_eq!(wrong, [""; 0]);
            // The same once more changes nothing, unless steps left it elsewhere.
            let (mut once, mut again) = (case.clone(), case.clone());
            once.then.clear();
            again.then.clear();
            knit_proxy_testkit::run(&world, &[once], backend).expect("it runs");
            let committed = Rc::new(Cell::new(None));
            let open = |node: &NetNs| Counting { inner: backend(node), committed: Rc::clone(&committed) };
            let wrong = knit_proxy_testkit::run(&world, &[again], open).expect("it runs");
            assert_eq!(wrong, [""; 0]);
            assert_eq!(committed.get(), Some(0), "{}: a restart changes nothing", case.name);
            let sticky = case.start.services.iter().flatten().any(|service| {
                service.spec.as_ref().is_some_and(|s| s.session_affinity.as_deref() == Some("ClientIP"))
            });
            // nft 1.0.6 aborts on rules that store a map's value in another map; newer ones were not at hand.
            if tool && !sticky && !case.name.contains("affinity") {
                let listed = world.node().run(|| Command::new("nft").args(["list", "ruleset"]).output());
                let listed = listed.expect("entered").expect("it runs");
                assert!(listed.status.success(), "{}: nft cannot list it: {listed:?}", case.name);
            }
        }
    });
}

/// Says at its end how many changes it took.
struct Counting {
    inner: NftBackend,
    committed: Rc<Cell<Option<u64>>>,
}

impl Backend for Counting {
    fn sync(&mut self, state: &knit_proxy::view::NodeView) -> Outcome {
        let outcome = self.inner.sync(state);
        self.committed.set(Some(self.inner.committed()));
        outcome
    }
}

#[test]
fn rules_51_and_52_udp_flows_to_endpoints_that_are_gone_start_anew() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        for address in ["10.1.0.1:5353", "10.1.1.1:5353", "10.1.1.1:5354"] {
            world.serve(address.parse().unwrap(), Protocol::Udp).expect("served");
        }
        let mut view = view();
        let port = ServicePort::new("", Protocol::Udp, 53).node_port(30053);
        let dns = Service::new("shop/dns").cluster_ip("10.96.0.10".parse().unwrap()).add_port(port);
        view.set_service(dns);
        let udp = |port, addresses: &[&str]| group("shop/dns", Protocol::Udp, port, addresses);
        view.set_group(udp(5353, &["10.1.0.1"]));
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);

        let socket = |host: &str, to: &str| {
            let socket = world.host(host).unwrap().run(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
            socket.connect(to).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket
        };
        let ask = |socket: &UdpSocket| {
            socket.send(b"?").expect("sent");
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).expect("answered");
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            text.split(' ').next().unwrap().to_owned()
        };
        let sockets = [socket("pod-b", "10.96.0.10:53"), socket("outside", "192.0.2.1:30053")];
        for socket in &sockets {
            assert_eq!(ask(socket), "10.1.0.1:5353");
        }
        // One more endpoint: flows stay where they are.
        view.set_group(udp(5353, &["10.1.0.1", "10.1.1.1"]));
        apply(&mut backend, &mut view);
        assert_eq!(backend.cleaned(), 0);
        assert_eq!(ask(&sockets[0]), "10.1.0.1:5353");
        // The first is gone: its flows start anew.
        view.set_group(udp(5353, &["10.1.1.1"]));
        apply(&mut backend, &mut view);
        assert_eq!(backend.cleaned(), 2);
        for socket in &sockets {
            assert_eq!(ask(socket), "10.1.1.1:5353");
        }
        // Only its port is another one.
        view.set_group(udp(5354, &["10.1.1.1"]));
        apply(&mut backend, &mut view);
        assert_eq!(backend.cleaned(), 4);
        for socket in &sockets {
            assert_eq!(ask(socket), "10.1.1.1:5354");
        }
        // Nobody is left: flows to the cluster IP go too, and the client hears of it.
        view.set_group(udp(5354, &[]));
        apply(&mut backend, &mut view);
        assert_eq!(backend.cleaned(), 5);
        sockets[0].send(b"?").expect("sent");
        let error = sockets[0].recv(&mut [0; 8]).expect_err("nobody answers");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn thousands_of_services_go_in_without_privilege() {
    in_namespaces(|| {
        let node = knit_kernel::testing::namespace();
        let mut view = View::new(ViewConfig::default(), NodeInfo::new("node"));
        for n in 0..3000u32 {
            let name = format!("ns/s{n}");
            let ip = Ipv4Addr::from(0x0a60_0000 + n);
            let mut service = Service::new(name.as_str()).cluster_ip(ip.into()).port(Protocol::Tcp, 80);
            service.affinity = (n % 10 == 0).then(Affinity::default);
            view.set_service(service);
            let endpoints: Vec<_> = (0..5).map(|e| Ipv4Addr::from(0x0a01_0000 + n * 5 + e).into()).collect();
            let group = format!("{name}-1");
            view.set_group(EndpointGroup::of_addresses(
                group.as_str(),
                name.as_str(),
                Protocol::Tcp,
                80,
                &endpoints,
            ));
        }
        let mut first = backend(&node);
        sync(&mut first, &mut view);
        assert!(first.committed() > 0);
        let mut second = backend(&node);
        sync(&mut second, &mut view);
        assert_eq!(second.committed(), 0);
    });
}

#[test]
fn a_proxy_of_its_own_serves_one_network_of_one_namespace() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        echo(&world, "pod-a", "10.1.0.1:8080");
        let mut options = Options::default();
        options.engine.view.network = NetworkName::from("red");
        let running = start(Some(world.node()), World::node_info(), options).expect("it starts");
        let mut red = web();
        red.network = NetworkName::from("red");
        let mut blue =
            Service::new("shop/blue").cluster_ip("10.1.1.2".parse().unwrap()).port(Protocol::Tcp, 80);
        blue.network = NetworkName::from("blue");
        let mut endpoints = group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1"]);
        endpoints.network = NetworkName::from("red");
        running.handle().set_service(red).expect("it runs");
        running.handle().set_service(blue).expect("it runs");
        running.handle().set_group(endpoints).expect("it runs");
        assert!(!running.status().expect("it runs").ready);
        running.handle().all_listed().expect("it runs");
        eventually("the service is served", PATIENCE, || running.status().expect("it runs").ready);
        let mut stream = connect(&world, "pod-b", "10.96.0.1:80");
        ping(&mut stream, b"one.");
        let status = running.status().expect("it runs");
        assert_eq!((status.ports, status.failed.len(), status.broken), (1, 0, None));
        running.stop();
        ping(&mut stream, b"two.");
        let mut other = connect(&world, "pod-b", "10.96.0.1:80");
        ping(&mut other, b"thre");
    });
}
