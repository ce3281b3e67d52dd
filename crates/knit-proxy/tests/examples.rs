//! The examples work: the very files are compiled in here and run.

#[allow(dead_code, reason = "the example's main is for people")]
#[path = "../examples/print.rs"]
mod print;

#[allow(dead_code, reason = "the example's main is for people")]
#[path = "../examples/userspace.rs"]
mod userspace;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::view::{View, ViewConfig};

#[test]
fn the_printing_backend_prints() {
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    view.set_service(Service::new("shop/web").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80));
    view.take_changes();
    let mut backend = print::Print(Vec::new());
    assert_eq!(backend.sync(view.current()), Outcome::Done);
    let addresses = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
    view.set_group(EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &addresses));
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
    view.delete_service(&"shop/web".into());
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
    let expected = "\
set shop/web TCP IPv4
  cluster IP 10.0.0.1:80 -> reject
set shop/web TCP IPv4
  cluster IP 10.0.0.1:80 -> cluster endpoints 192.0.2.1:8080 192.0.2.2:8080
delete shop/web TCP IPv4
";
    assert_eq!(String::from_utf8(backend.0).unwrap(), expected);
}

/// Answers every connection with its name and what it was sent.
fn echo(name: &'static str) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        for client in socket.incoming() {
            let mut client = client.unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            write!(client, "{name}: {text}").unwrap();
        }
    });
    address
}

fn ask(place: SocketAddr) -> std::io::Result<String> {
    let mut client = TcpStream::connect(place)?;
    client.write_all(b"hello")?;
    client.shutdown(std::net::Shutdown::Write)?;
    let mut answer = String::new();
    client.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn the_user_space_backend_forwards() {
    let endpoints = [echo("one"), echo("two")];
    // A loopback address of this process's own, so that a port that was free just now still is when it is
    // wanted.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let own = std::net::Ipv4Addr::from([127, 55, high, low.clamp(1, 254)]);
    let place = TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    view.set_service(Service::new("demo/web").cluster_ip(place.ip()).port(Protocol::Tcp, place.port()));
    let group = |i: usize| {
        let name = format!("demo/web-{i}");
        let addresses = [endpoints[i].ip()];
        EndpointGroup::of_addresses(&*name, "demo/web", Protocol::Tcp, endpoints[i].port(), &addresses)
    };
    let mut backend = userspace::UserSpace::default();

    // No endpoints: refused.
    view.take_changes();
    assert_eq!(backend.sync(view.current()), Outcome::Done);
    assert_eq!(ask(place).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);

    view.set_group(group(0));
    view.set_group(group(1));
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
    let mut answers: Vec<String> = (0..4).map(|_| ask(place).unwrap()).collect();
    answers.sort();
    assert_eq!(answers, ["one: hello", "one: hello", "two: hello", "two: hello"]);

    view.delete_group(&"demo/web-0".into());
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
    assert_eq!(ask(place).unwrap(), "two: hello");

    // Gone again: the listener is closed once its thread has seen it.
    view.delete_service(&"demo/web".into());
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
}

/// A backend that ignores who may come in, and from where, is a hole in everybody's cluster who copies it.
#[test]
fn the_user_space_backend_honours_sources_local_routes_and_affinity() {
    use knit_proxy::model::{Affinity, Endpoint, TrafficPolicy};

    let endpoints = [echo("one"), echo("two")];
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let own = std::net::Ipv4Addr::from([127, 56, high, low.clamp(1, 254)]);
    let place = TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    for (i, (endpoint, node)) in endpoints.iter().zip(["here", "there"]).enumerate() {
        let name = format!("demo/web-{i}");
        let mut group = EndpointGroup::of_addresses(&*name, "demo/web", Protocol::Tcp, endpoint.port(), &[]);
        group.endpoints = Box::new([Endpoint::new(endpoint.ip()).on(node)]);
        view.set_group(group);
    }
    let mut backend = userspace::UserSpace::default();
    let service = || Service::new("demo/web").cluster_ip(place.ip()).port(Protocol::Tcp, place.port());
    let mut serve = |service: Service| {
        view.set_service(service);
        let changes = view.take_changes();
        assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
    };

    // Only this node's endpoint.
    let mut local = service();
    local.internal_policy = TrafficPolicy::Local;
    serve(local);
    for _ in 0..4 {
        assert_eq!(ask(place).unwrap(), "one: hello");
    }

    // A client stays where it was.
    let mut sticky = service();
    sticky.affinity = Some(Affinity::default());
    serve(sticky);
    let first = ask(place).unwrap();
    for _ in 0..4 {
        assert_eq!(ask(place).unwrap(), first);
    }

    // A load balancer's address, for one range that is not ours.
    let lb = TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    let mut closed = Service::new("demo/web").cluster_ip([127, 57, high, low].into());
    closed = closed.port(Protocol::Tcp, lb.port());
    closed.load_balancer_ips = Box::new([lb.ip()]);
    closed.source_ranges = Some(Box::new(["192.0.2.0/24".parse().unwrap()]));
    serve(closed.clone());
    // Nobody answers: the connection is closed before anything came.
    assert!(ask(lb).map_or(true, |answer| answer.is_empty()), "a client that may not come in was served");
    closed.source_ranges = Some(Box::new(["127.0.0.0/8".parse().unwrap()]));
    serve(closed);
    assert!(ask(lb).unwrap().ends_with(": hello"));
}

#[test]
fn the_user_space_backend_says_what_it_cannot_do() {
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    view.set_service(Service::new("demo/dns").cluster_ip([127, 0, 0, 1].into()).port(Protocol::Udp, 53));
    view.take_changes();
    let Outcome::Partly(failures) = userspace::UserSpace::default().sync(view.current()) else {
        panic!("it does not serve UDP")
    };
    assert_eq!(failures[0].to_string(), "demo/dns UDP IPv4: this backend forwards TCP only, not UDP");
}
