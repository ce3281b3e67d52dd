//! A service proxy in user space: listens on the cluster IPs and forwards TCP to the endpoints.
//!
//! It serves addresses that this machine has, so the demonstration uses loopback ones:
//! `cargo run -p knit-proxy --example userspace -- 127.0.0.1:8080 127.0.0.1:9001 127.0.0.1:9002` forwards what comes to
//! the first to one of the others. Real traffic belongs into a kernel; this shows how little a backend needs.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;

use knit_proxy::backend::{Backend, Failure, Outcome, Retry};
use knit_proxy::engine::{Engine, EngineConfig, run};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::source;
use knit_proxy::view::{Action, NodeView, Target};

/// Forwards TCP connections in this process.
#[derive(Default)]
pub struct UserSpace {
    listeners: HashMap<SocketAddr, Arc<Listener>>,
}

/// One address that is listened on, and where its connections go.
struct Listener {
    targets: RwLock<Vec<SocketAddr>>,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl Backend for UserSpace {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let mut wanted: HashMap<SocketAddr, Vec<SocketAddr>> = HashMap::new();
        let mut failures = Vec::new();
        for (key, port) in state.ports.iter().filter(|(key, _)| key.protocol == Protocol::Tcp) {
            for frontend in &port.frontends {
                // No endpoints: nobody listens, and the kernel refuses the connection. Node ports are left out here.
                let (Action::Endpoints(scope), Some(address)) = (frontend.route.action, frontend.address)
                else {
                    continue;
                };
                let place = SocketAddr::new(address, frontend.port);
                let targets: Vec<_> = port.targets(scope).iter().map(Target::socket).collect();
                wanted.insert(place, targets.clone());
                match self.listeners.get(&place) {
                    Some(listener) => *listener.targets.write().expect("no thread panics") = targets,
                    None => match listen(place, targets) {
                        Ok(listener) => {
                            self.listeners.insert(place, listener);
                        }
                        Err(error) => failures.push(Failure {
                            key: key.clone(),
                            reason: format!("listening on {place}: {error}"),
                            retry: Retry::Later,
                        }),
                    },
                }
            }
        }
        self.listeners.retain(|place, listener| {
            let keep = wanted.contains_key(place);
            if !keep {
                listener.stopped.store(true, Ordering::Release);
                // A connection of our own wakes the thread, which sees that it is to stop.
                let _ = TcpStream::connect(place);
            }
            keep
        });
        Outcome::of(failures)
    }
}

/// Accepts connections on its own thread.
fn listen(place: SocketAddr, targets: Vec<SocketAddr>) -> io::Result<Arc<Listener>> {
    let socket = TcpListener::bind(place)?;
    let next = AtomicUsize::new(0);
    let listener =
        Arc::new(Listener { targets: RwLock::new(targets), next, stopped: AtomicBool::new(false) });
    let shared = Arc::clone(&listener);
    thread::spawn(move || {
        for client in socket.incoming() {
            if shared.stopped.load(Ordering::Acquire) {
                return;
            }
            let Ok(client) = client else { continue };
            let targets = shared.targets.read().expect("no thread panics").clone();
            let turn = shared.next.fetch_add(1, Ordering::Relaxed);
            thread::spawn(move || {
                let Some(server) = connect_one(&targets, turn) else { return };
                if let Err(error) = forward(&client, &server) {
                    eprintln!("{place}: {error}");
                }
            });
        }
    });
    Ok(listener)
}

/// Connects to the endpoint whose turn it is, or to the next one that answers.
fn connect_one(targets: &[SocketAddr], turn: usize) -> Option<TcpStream> {
    let in_turn = targets.iter().cycle().skip(turn % targets.len().max(1)).take(targets.len());
    in_turn.filter_map(|target| TcpStream::connect(target).ok()).next()
}

/// Copies both ways until both sides are done.
fn forward(client: &TcpStream, server: &TcpStream) -> io::Result<()> {
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    let back = thread::spawn(move || {
        let copied = io::copy(&mut from_server, &mut to_client);
        let closed = to_client.shutdown(Shutdown::Write);
        copied.and(closed)
    });
    io::copy(&mut &*client, &mut &*server)?;
    server.shutdown(Shutdown::Write)?;
    back.join().expect("no thread panics")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut addresses = std::env::args().skip(1).map(|a| a.parse::<SocketAddr>());
    let place = addresses.next().ok_or("usage: userspace LISTEN ENDPOINT...")??;
    let endpoints: Vec<SocketAddr> = addresses.collect::<Result<_, _>>()?;
    let (handle, inbox) = source::handle();
    handle.set_service(Service::new("demo/web").cluster_ip(place.ip()).port(Protocol::Tcp, place.port()))?;
    for (i, endpoint) in endpoints.iter().enumerate() {
        let name = format!("demo/web-{i}");
        let addresses = [endpoint.ip()];
        handle.set_group(EndpointGroup::of_addresses(
            &*name,
            "demo/web",
            Protocol::Tcp,
            endpoint.port(),
            &addresses,
        ))?;
    }
    handle.all_listed()?;
    println!("forwarding {place} to {endpoints:?}; stop with Ctrl-C");
    run(Engine::new(EngineConfig::default(), NodeInfo::new("here"), UserSpace::default()), &inbox);
    Ok(())
}
