//! A service proxy in user space: listens where clients connect to and forwards TCP to the endpoints.
//!
//! It serves addresses that this machine has, so the demonstration uses loopback ones:
//! `cargo run -p knit-proxy --example userspace -- 127.0.0.1:8080 127.0.0.1:9001 127.0.0.1:9002` forwards
//! what comes to the first to one of the others. Real traffic belongs into a kernel; this shows how little a
//! backend needs.
//!
//! What it cannot do, because it accepts a connection before it knows whose it is: drop in silence (it
//! closes), keep a client's address (endpoints always see this machine's), and UDP and SCTP (it says so for
//! each such port).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use knit_proxy::backend::{Backend, Failure, Outcome, Retry};
use knit_proxy::engine::{Engine, EngineConfig, Level, Log, run};
use knit_proxy::model::{EndpointGroup, Family, NodeInfo, Protocol, Service};
use knit_proxy::source;
use knit_proxy::view::{
    Action, Client, Frontend, NodePortMatch, NodeSettings, NodeView, PodTraffic, PortView, Target,
};

/// Forwards TCP connections in this process.
#[derive(Default)]
pub struct UserSpace {
    listeners: HashMap<SocketAddr, Arc<Listener>>,
}

/// One address that is listened on.
struct Listener {
    served: RwLock<Served>,
    next: AtomicUsize,
    stopped: AtomicBool,
    /// Which endpoint a client had last, and when, for services with affinity.
    last: Mutex<HashMap<IpAddr, (SocketAddr, Instant)>>,
}

/// What its clients get.
#[derive(Clone)]
struct Served {
    frontend: Frontend,
    port: Arc<PortView>,
    node: Arc<NodeSettings>,
}

impl Backend for UserSpace {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let mut wanted: HashMap<SocketAddr, Served> = HashMap::new();
        let mut failures = Vec::new();
        for (key, port) in &state.ports {
            if key.protocol != Protocol::Tcp {
                let reason = format!("this backend forwards TCP only, not {}", key.protocol);
                failures.push(Failure { key: key.clone(), reason, retry: Retry::OnChange });
                continue;
            }
            for frontend in port.frontends.iter().filter(|frontend| leads_somewhere(frontend)) {
                for place in places(frontend, &state.node, key.family) {
                    let (frontend, port, node) =
                        (frontend.clone(), Arc::clone(port), Arc::clone(&state.node));
                    let served = Served { frontend, port, node };
                    wanted.insert(place, served.clone());
                    match self.listeners.get(&place) {
                        Some(listener) => *listener.served.write().expect("no thread panics") = served,
                        None => match listen(place, served) {
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

/// Where no client gets to an endpoint, nothing listens, and the kernel refuses the connection.
fn leads_somewhere(frontend: &Frontend) -> bool {
    let routes = [Client::Pod, Client::Node, Client::Other].map(|client| frontend.route_for(client));
    routes.iter().any(|route| matches!(route.action, Action::Endpoints(_)))
}

/// The addresses to listen on: the frontend's own, or for a node port those of the node.
fn places(frontend: &Frontend, node: &NodeSettings, family: Family) -> Vec<SocketAddr> {
    let addresses = match (frontend.address, node.node_ports.get(family)) {
        (Some(address), _) => vec![address],
        (None, NodePortMatch::Only(addresses)) => addresses.to_vec(),
        (None, NodePortMatch::AnyLocal) => vec![match family {
            Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }],
    };
    addresses.into_iter().map(|address| SocketAddr::new(address, frontend.port)).collect()
}

impl Served {
    /// The endpoints for one client: none if it may not come in.
    fn endpoints(&self, client: IpAddr, reached: IpAddr) -> Vec<SocketAddr> {
        // A node port does not answer on loopback addresses (rule 25).
        let hidden = self.frontend.address.is_none() && reached.is_loopback();
        if hidden || !self.frontend.admits(client) {
            return Vec::new();
        }
        match self.frontend.route_for(self.who(client, reached)).action {
            Action::Endpoints(scope) => self.port.targets(scope).iter().map(Target::socket).collect(),
            Action::Reject | Action::Drop => Vec::new(),
        }
    }

    fn who(&self, client: IpAddr, reached: IpAddr) -> Client {
        let family = Family::of(client);
        match self.node.pods.get(family) {
            PodTraffic::Sources(ranges) if ranges.iter().any(|range| range.contains(&client)) => Client::Pod,
            _ if client == reached || Some(client) == *self.node.primary.get(family) => Client::Node,
            _ => Client::Other,
        }
    }
}

impl Listener {
    /// The endpoints to try for a client, in order: the one that it had last (rule 40), then each in its
    /// turn.
    fn endpoints(&self, client: IpAddr, reached: IpAddr) -> Vec<SocketAddr> {
        let served = self.served.read().expect("no thread panics").clone();
        let mut endpoints = served.endpoints(client, reached);
        if endpoints.is_empty() {
            return endpoints;
        }
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % endpoints.len();
        endpoints.rotate_left(turn);
        if let Some(seconds) = served.port.affinity_seconds {
            let mut last = self.last.lock().expect("no thread panics");
            last.retain(|_, (_, at)| at.elapsed() < Duration::from_secs(seconds.into()));
            let before = last.get(&client).and_then(|(had, _)| endpoints.iter().position(|e| e == had));
            endpoints.swap(0, before.unwrap_or(0));
            last.insert(client, (endpoints[0], Instant::now()));
        }
        endpoints
    }
}

/// Accepts connections on its own thread.
fn listen(place: SocketAddr, served: Served) -> io::Result<Arc<Listener>> {
    let socket = TcpListener::bind(place)?;
    let listener = Arc::new(Listener {
        served: RwLock::new(served),
        next: AtomicUsize::new(0),
        stopped: AtomicBool::new(false),
        last: Mutex::default(),
    });
    let shared = Arc::clone(&listener);
    thread::spawn(move || {
        for client in socket.incoming() {
            if shared.stopped.load(Ordering::Acquire) {
                return;
            }
            let Ok(client) = client else { continue };
            let (Ok(from), Ok(reached)) = (client.peer_addr(), client.local_addr()) else { continue };
            let endpoints = shared.endpoints(from.ip(), reached.ip());
            thread::spawn(move || {
                let Some(server) = endpoints.iter().find_map(|e| TcpStream::connect(e).ok()) else { return };
                if let Err(error) = forward(&client, &server) {
                    eprintln!("{place}: {error}");
                }
            });
        }
    });
    Ok(listener)
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
    let log = Log::new(|level, line| {
        if level >= Level::Info {
            eprintln!("{line}");
        }
    });
    let engine = Engine::new(EngineConfig::default(), NodeInfo::new("here"), UserSpace::default());
    run(engine.observed_by(Box::new(log)), &inbox);
    Ok(())
}
