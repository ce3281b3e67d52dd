//! What clients notice: restarts, stale flows, addresses of the node, other programs' rules.

use std::cell::Cell;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::backends::Cleaned;
use knit_proxy::model::{Affinity, Family, NetworkName, Protocol, Service, ServicePort};
use knit_proxy::start::{Options, start};
use knit_proxy::view::View;
use knit_proxy_nft::NftBackend;
use knit_proxy_testkit::World;

use crate::support::*;

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
            // The same again changes nothing, unless steps left it elsewhere.
            let (mut once, mut again) = (case.clone(), case.clone());
            once.then.clear();
            again.then.clear();
            knit_proxy_testkit::run(&world, &[once], backend).expect("it runs");
            let committed = Rc::new(Cell::new(None));
            let open = |node: &NetNs| Counting { inner: backend(node), committed: Rc::clone(&committed) };
            let wrong = knit_proxy_testkit::run(&world, &[again], open).expect("it runs");
            assert_eq!(wrong, [""; 0]);
            assert_eq!(committed.get(), Some(0), "{}: a restart changes nothing", case.name);
            if tool {
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
        let (tell, told) = std::sync::mpsc::channel();
        let mut backend =
            backend(world.node()).on_clean(Box::new(move |look| tell.send(look).expect("somebody counts")));
        sync(&mut backend, &mut view);

        let socket = |host: &str, to: &str| {
            let socket = world.host(host).unwrap().run(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
            socket.connect(to).unwrap();
            socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
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
        // The first is gone: its flows start again.
        view.set_group(udp(5353, &["10.1.1.1"]));
        apply(&mut backend, &mut view);
        assert_eq!(backend.cleaned(), 2);
        // Who counts is told so, by family (rule 61).
        let counted: Vec<_> = told.try_iter().filter(|look: &Cleaned| look.deleted > 0).collect();
        assert_eq!(
            counted.iter().map(|l| (l.family, l.deleted, l.complete)).collect::<Vec<_>>(),
            [(Family::V4, 2, true)]
        );
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
        let error = sockets[0].recv(&mut [0; 8]).expect_err("no answer");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_proxy_of_its_own_serves_one_network_of_one_namespace() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        echo(&world, "pod-a", "10.1.0.1:8080");
        let mut options = Options::default();
        options.engine.view.network = NetworkName::from("red");
        let running = start(backend(world.node()), World::node_info(), options).expect("it starts");
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
        // What is counted is in force: the engine answers between two rounds of work.
        eventually("the service is served", TEST_TIMEOUT, || running.status().expect("it runs").ports == 1);
        let mut stream = connect(&world, "pod-b", "10.96.0.1:80");
        ping(&mut stream, b"one.");
        let status = running.status().expect("it runs");
        assert_eq!((status.ports, status.failed.len(), status.broken), (1, 0, None));
        assert!(running.stop());
        ping(&mut stream, b"two.");
        let mut other = connect(&world, "pod-b", "10.96.0.1:80");
        ping(&mut other, b"thre");
    });
}

/// What somebody else's rules gave a packet is still there behind ours.
#[test]
fn marks_and_priorities_of_others_stay() {
    use knit_kernel::nft::Kernel;
    use knit_nft::expr::{CmpOp, MetaKey};
    use knit_nft::{
        Chain, ChainKind, Expr, Family as Tables, Hook, L4Proto, Mark, Nftables, Port, Reg, Rule, Scalar,
        Table, TableId, TableState, diff, field,
    };
    const PRIORITY: MetaKey = MetaKey(2);
    in_namespaces(|| {
        let world = World::new().expect("a world");
        echo(&world, "pod-a", "10.1.0.1:8080");
        let mut view = view();
        view.set_service(web());
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1"]));
        let mut sticky =
            Service::new("shop/sticky").cluster_ip("10.96.0.2".parse().unwrap()).port(Protocol::Tcp, 80);
        sticky.affinity = Some(Affinity::default());
        view.set_service(sticky);
        view.set_group(group("shop/sticky", Protocol::Tcp, 8080, &["10.1.0.1"]));
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);

        let to = |port| Rule::new().eq(field::l4proto(), &L4Proto::TCP).eq(field::th_dport(), &Port(port));
        let set = |rule: Rule, key, value| {
            rule.expr(Expr::Immediate { dreg: Reg::FIRST, data: Mark(value).bytes() })
                .expr(Expr::MetaSet { sreg: Reg::FIRST, key })
        };
        let other = |rule: Rule, key, value| {
            let rule = rule.expr(Expr::Meta { dreg: Reg::FIRST, key });
            rule.expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ne, data: Mark(value).bytes() }).drop()
        };
        let table = |value| {
            let before = Chain::base("before", ChainKind::Filter, Hook::Prerouting, -300);
            let after = Chain::base("after", ChainKind::Filter, Hook::Prerouting, -50);
            TableState::new(Table::new(TableId::new(Tables::Ip, "somebody")))
                .chain(before, [set(set(to(80), MetaKey::MARK, 0x77), PRIORITY, 5)])
                .chain(after, [other(to(8080), MetaKey::MARK, value), other(to(8080), PRIORITY, 5)])
        };
        let mut nft = Kernel::open_in(world.node()).expect("nftables");
        nft.commit(&diff(None, &table(0x77))).expect("somebody's table");
        // Twice: the second time, the one with affinity is remembered.
        for address in ["10.96.0.1:80", "10.96.0.2:80", "10.96.0.2:80"] {
            ping(&mut connect(&world, "pod-b", address), b"here");
        }
        // Were the mark another one, nothing would come through: the check above can fail.
        let found = nft.table(table(0).id()).expect("a listing");
        nft.commit(&diff(found.as_ref(), &table(0x78))).expect("somebody's table");
        let refused = world
            .host("pod-b")
            .expect("a host")
            .run(|| TcpStream::connect_timeout(&"10.96.0.1:80".parse().unwrap(), Duration::from_millis(300)));
        refused.expect("entered").expect_err("dropped");
    });
}

#[test]
fn rule_26_nothing_listens_on_ports_of_services() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        let mut view = view();
        let mut service = Service::new("shop/web")
            .cluster_ip("10.96.0.1".parse().unwrap())
            .add_port(ServicePort::new("", Protocol::Tcp, 80).node_port(30080))
            .add_port(ServicePort::new("dns", Protocol::Udp, 53).node_port(30053));
        service.load_balancer_ips = Box::new(["192.0.2.1".parse().unwrap()]);
        view.set_service(service);
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1"]));
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);
        let sockets = || -> usize {
            let tables = ["tcp", "tcp6", "udp", "udp6"].map(|name| format!("/proc/thread-self/net/{name}"));
            let lines = |path| std::fs::read_to_string(path).expect("a table").lines().count() - 1;
            tables.into_iter().map(lines).sum()
        };
        assert_eq!(world.node().run(sockets).expect("entered"), 0);
        let _one = world.node().run(|| TcpListener::bind("127.0.0.1:0")).expect("entered").expect("bound");
        assert_eq!(world.node().run(sockets).expect("entered"), 1, "one that is there would have been seen");
    });
}

#[test]
fn rule_44_what_comes_back_from_the_load_balancers_own_address() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        world.serve("10.1.0.1:5353".parse().unwrap(), Protocol::Udp).expect("served");
        // The load balancer's address is on the node, as some load balancers want it, and a client on the
        // node has it as its own.
        let node = Handle::new(world.node().try_clone().expect("the node")).expect("a handle");
        let lo = node.index_of(&IfName::new("lo").expect("a name")).expect("lo");
        let balancer: ipnet::IpNet = "198.51.100.2/32".parse().unwrap();
        node.apply(&[Op::create(Address::new(lo, balancer))]).expect("an address");
        let mut view = view();
        let set = |view: &mut View, ranges: &[&str]| {
            let mut dns = Service::new("shop/dns")
                .cluster_ip("10.96.0.10".parse().unwrap())
                .add_port(ServicePort::new("", Protocol::Udp, 53));
            dns.load_balancer_ips = Box::new([balancer.addr()]);
            dns.source_ranges = Some(ranges.iter().map(|range| range.parse().unwrap()).collect());
            view.set_service(dns);
        };
        let ask = |wait| -> Option<String> {
            let socket = world.node().run(|| UdpSocket::bind("198.51.100.2:0")).unwrap().unwrap();
            socket.set_read_timeout(Some(wait)).unwrap();
            socket.connect("198.51.100.2:53").unwrap();
            socket.send(b"?").ok()?;
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..length]).split(' ').next()?.to_owned())
        };
        // The node's own address, 192.0.2.1, is not in the range: the load balancer's is not let in.
        set(&mut view, &["203.0.113.0/24"]);
        view.set_group(group("shop/dns", Protocol::Udp, 5353, &["10.1.0.1"]));
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);
        assert_eq!(ask(Duration::from_millis(500)), None);
        // Now it is.
        set(&mut view, &["203.0.113.0/24", "192.0.2.0/24"]);
        apply(&mut backend, &mut view);
        assert_eq!(ask(TEST_TIMEOUT).as_deref(), Some("10.1.0.1:5353"));
    });
}

#[test]
fn rule_27_a_service_address_on_an_interface_of_the_node_keeps_its_other_ports() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        let mut view = view();
        view.set_service(web());
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1"]));
        view.set_service_ranges("kubernetes", vec!["10.96.0.0/16".parse().unwrap()]);
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);
        // As NodeLocal DNSCache does: the address of a Service, and one that no Service has.
        let handle = Handle::open(world.node()).expect("a handle");
        let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
        for address in ["10.96.0.1/32", "10.96.0.99/32"] {
            let address = Address::new(lo, address.parse().expect("a prefix"));
            handle.apply(&[Op::create(address)]).expect("an address");
        }
        for address in ["10.96.0.1:9253", "10.96.0.99:9253"] {
            let listener = world.node().run(|| TcpListener::bind(address)).expect("entered").expect("bound");
            let accepted = std::thread::spawn(move || listener.accept().is_ok());
            connect(&world, "pod-b", address);
            assert!(accepted.join().expect("it ends"));
        }
        // Where nobody has the address, nothing changed: told at once, or silence.
        let at = |to: &str| -> std::io::Result<TcpStream> {
            let to: SocketAddr = to.parse().unwrap();
            let wait = Duration::from_millis(300);
            world
                .host("pod-b")
                .expect("a host")
                .run(|| TcpStream::connect_timeout(&to, wait))
                .expect("entered")
        };
        let service = Service::new("shop/db").cluster_ip("10.96.0.2".parse().unwrap());
        view.set_service(service.port(Protocol::Tcp, 80));
        apply(&mut backend, &mut view);
        assert_eq!(
            at("10.96.0.2:81").map_err(|e| e.kind()).err(),
            Some(std::io::ErrorKind::ConnectionRefused)
        );
        assert_eq!(at("10.96.0.3:81").map_err(|e| e.kind()).err(), Some(std::io::ErrorKind::TimedOut));
    });
}
