//! A world with a node and pods, and servers and clients in it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{EndpointGroup, Protocol, Service};
use knit_proxy::view::{View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend};
use knit_proxy_testkit::World;

pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub fn web() -> Service {
    Service::new("shop/web").cluster_ip("10.96.0.1".parse().unwrap()).port(Protocol::Tcp, 80)
}

pub fn group(service: &str, protocol: Protocol, port: u16, addresses: &[&str]) -> EndpointGroup {
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    EndpointGroup::of_addresses(format!("{service}-1").as_str(), service, protocol, port, &addresses)
}

pub fn view() -> View {
    View::new(ViewConfig::default(), World::node_info())
}

pub fn backend(node: &NetNs) -> NftBackend {
    NftBackend::new_in(node, Config::default()).expect("a backend")
}

pub fn sync(backend: &mut NftBackend, view: &mut View) {
    view.take_changes();
    assert_eq!(backend.sync(view.current()), Outcome::Done);
}

pub fn apply(backend: &mut NftBackend, view: &mut View) {
    let changes = view.take_changes();
    assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
}

/// A server in somebody's namespace that sends every byte back.
pub fn echo(world: &World, host: &str, address: &str) {
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

pub fn connect(world: &World, host: &str, to: &str) -> TcpStream {
    let to: SocketAddr = to.parse().unwrap();
    let stream = world.host(host).expect("a host").run(|| TcpStream::connect_timeout(&to, TEST_TIMEOUT));
    let stream = stream.expect("entered").expect("connected");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    stream
}

pub fn ping(stream: &mut TcpStream, word: &[u8; 4]) {
    stream.write_all(word).expect("sent");
    let mut buffer = [0; 4];
    stream.read_exact(&mut buffer).expect("answered");
    assert_eq!(&buffer, word);
}
