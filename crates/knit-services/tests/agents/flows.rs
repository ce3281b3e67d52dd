//! Services as objects, servers that say who they are and whom they see, and clients that ask.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;

pub use Kind::{Tcp, Udp};
use knit_kernel::route::Route;
use knit_kernel::{Handle, IfName, NetNs, Op};
use serde_json::{Value, json};

use crate::support::{Pod, SOON, wait_until, write};

/// How long a client waits before it calls it silence.
const WAIT: Duration = Duration::from_millis(700);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    Udp,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum No {
    Silence,
    Refused,
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A Service, dual-stack.
pub struct ServiceSpec {
    space: String,
    name: String,
    spec: Value,
    status: Value,
}

impl ServiceSpec {
    pub fn new(space: &str, name: &str) -> Self {
        let spec = json!({"type": "ClusterIP", "ipFamilies": ["IPv4", "IPv6"]});
        Self { space: space.into(), name: name.into(), spec, status: json!({}) }
    }

    /// Name, protocol, port, node port (0: none).
    pub fn ports(mut self, ports: &[(&str, &str, u16, u16)]) -> Self {
        let port = |(name, protocol, port, node_port): &(&str, &str, u16, u16)| {
            let mut port = json!({"name": name, "protocol": protocol, "port": port});
            if *node_port > 0 {
                port["nodePort"] = json!(node_port);
            }
            port
        };
        self.spec["ports"] = ports.iter().map(port).collect();
        self
    }

    pub fn kind(mut self, kind: &str) -> Self {
        self.spec["type"] = json!(kind);
        self
    }

    pub fn local(mut self) -> Self {
        self.spec["externalTrafficPolicy"] = json!("Local");
        self
    }

    pub fn health_check(mut self, port: u16) -> Self {
        self.spec["healthCheckNodePort"] = json!(port);
        self
    }

    pub fn load_balancer(mut self, addresses: &[IpAddr], sources: &[&str]) -> Self {
        let ingress: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip, "ipMode": "VIP"})).collect();
        self.status = json!({"loadBalancer": {"ingress": ingress}});
        self.spec["loadBalancerSourceRanges"] = json!(sources);
        self.spec["allocateLoadBalancerNodePorts"] = json!(false);
        self
    }

    pub fn external(mut self, addresses: &[IpAddr]) -> Self {
        self.spec["externalIPs"] = json!(addresses);
        self
    }

    /// Its cluster IPs are 10.96.0.NUMBER and fd96::NUMBER.
    pub fn ip(mut self, number: u16) -> Self {
        let (v4, v6) = (format!("10.96.0.{number}"), format!("fd96::{number}"));
        self.spec["clusterIPs"] = json!([v4, v6]);
        self.spec["clusterIP"] = json!(v4);
        self
    }

    pub fn write(self, folder: &Path) {
        let Self { space, name, spec, status } = self;
        let object = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": space, "name": name}, "spec": spec, "status": status});
        write(folder, &format!("service-{space}-{name}"), &object);
    }
}

/// The endpoints of a Service: these pods, each on a node, with these ports.
pub fn slices(folder: &Path, of: (&str, &str), ports: &[(&str, &str, u16)], pods: &[(&Pod, &str)]) {
    let endpoints: Vec<(&[IpAddr], &str)> =
        pods.iter().map(|(pod, node)| (&pod.addresses[..], *node)).collect();
    slices_of(folder, of, ports, &endpoints);
}

pub fn slices_of<T: AsRef<[IpAddr]>>(
    folder: &Path,
    (space, name): (&str, &str),
    ports: &[(&str, &str, u16)],
    endpoints: &[(T, &str)],
) {
    let ports: Vec<Value> = ports
        .iter()
        .map(|(name, protocol, port)| json!({"name": name, "protocol": protocol, "port": port}))
        .collect();
    for (family, v4) in [("IPv4", true), ("IPv6", false)] {
        let of_family = |(addresses, node): &(T, &str)| {
            let address = addresses.as_ref().iter().find(|address| address.is_ipv4() == v4)?;
            Some(json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}}))
        };
        let endpoints: Vec<Value> = endpoints.iter().filter_map(of_family).collect();
        let slice = format!("{name}-{}", family.to_lowercase());
        let object = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "addressType": family,
            "metadata": {"namespace": space, "name": slice, "labels": {"kubernetes.io/service-name": name}},
            "ports": ports, "endpoints": endpoints});
        write(folder, &format!("slice-{space}-{slice}"), &object);
    }
}

/// A server that says who it is and whom it sees, and echoes.
pub fn serve_tcp(space: &NetNs, port: u16, name: &'static str) {
    let listener = space.run(|| TcpListener::bind(("::", port))).expect("in").expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let Ok(peer) = stream.peer_addr() else { return };
                if stream.write_all(format!("{name} {}\n", peer.ip().to_canonical()).as_bytes()).is_err() {
                    return;
                }
                let mut buffer = [0; 64];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

pub fn serve_udp(space: &NetNs, port: u16, name: &'static str) {
    let socket = space.run(|| UdpSocket::bind(("::", port))).expect("in").expect("bound");
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let text = format!("{name} {}\n", from.ip().to_canonical());
            if socket.send_to(text.as_bytes(), from).is_err() {
                println!("{name} cannot answer {from}");
            }
        }
    });
}

/// Who answers there, and whom he sees. For what is tried again, and for what must be silent.
pub fn ask(from: &NetNs, kind: Kind, to: (IpAddr, u16)) -> Result<(String, IpAddr), No> {
    ask_within(from, kind, to, WAIT)
}

/// The same where an answer or a refusal must come at the first try, however busy the machine is.
pub fn ask_once(from: &NetNs, kind: Kind, to: (IpAddr, u16)) -> Result<(String, IpAddr), No> {
    ask_within(from, kind, to, SOON)
}

fn ask_within(from: &NetNs, kind: Kind, to: (IpAddr, u16), wait: Duration) -> Result<(String, IpAddr), No> {
    let to = SocketAddr::new(to.0, to.1);
    let text = match kind {
        Udp => flow_within(from, (to.ip(), to.port()), wait).hear()?,
        Tcp => {
            let mut stream = from.run(|| TcpStream::connect_timeout(&to, wait)).expect("in").map_err(no)?;
            stream.set_read_timeout(Some(wait)).expect("a timeout");
            let (mut text, mut byte) = (String::new(), [0]);
            while !text.ends_with('\n') {
                stream.read_exact(&mut byte).map_err(no)?;
                text.push(char::from(byte[0]));
            }
            text
        }
    };
    let (name, seen) = text.trim().split_once(' ').expect("a name and an address");
    Ok((name.to_owned(), ip(seen)))
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn no(error: std::io::Error) -> No {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => No::Refused,
        _ => No::Silence,
    }
}

/// One client that asks again and again from the same port.
pub struct Flow {
    socket: UdpSocket,
    to: SocketAddr,
}

pub fn flow(from: &NetNs, to: (IpAddr, u16)) -> Flow {
    flow_within(from, to, WAIT)
}

fn flow_within(from: &NetNs, to: (IpAddr, u16), wait: Duration) -> Flow {
    let any: IpAddr = if to.0.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let socket = from.run(|| UdpSocket::bind((any, 0))).expect("in").expect("bound");
    socket.set_read_timeout(Some(wait)).expect("a timeout");
    Flow { socket, to: SocketAddr::new(to.0, to.1) }
}

impl Flow {
    fn hear(&self) -> Result<String, No> {
        // Connected, so that a refusal is heard.
        self.socket.connect(self.to).map_err(no)?;
        self.socket.send(b"who").map_err(no)?;
        let mut buffer = [0; 128];
        let length = self.socket.recv(&mut buffer).map_err(no)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    pub fn say(&self) -> Result<String, No> {
        Ok(self.hear()?.split(' ').next().unwrap_or_default().to_owned())
    }
}

/// Whether exactly these answer there, each at least once in many tries.
pub fn names_at(from: &NetNs, kind: Kind, to: (IpAddr, u16), expected: &[&str]) -> Result<(), String> {
    let expected: BTreeSet<String> = expected.iter().map(|&name| name.to_owned()).collect();
    let mut found = BTreeSet::new();
    for _ in 0..20 {
        match ask(from, kind, to) {
            Ok((name, _)) => found.insert(name),
            Err(no) => return Err(format!("{no:?} after {found:?}")),
        };
        if found == expected {
            return Ok(());
        }
    }
    Err(format!("{found:?}"))
}

pub async fn wait(what: &str, look: impl FnMut() -> Result<(), String>) {
    wait_until(what, look).await;
}

/// What a health check port answers.
pub fn http(from: &NetNs, to: (IpAddr, u16), path: &str) -> String {
    let to = SocketAddr::new(to.0, to.1);
    let mut stream = match from.run(|| TcpStream::connect_timeout(&to, WAIT)).expect("in") {
        Ok(stream) => stream,
        Err(error) => return error.to_string(),
    };
    stream.set_read_timeout(Some(WAIT)).expect("a timeout");
    let _ = write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

fn eth0(space: &NetNs) -> (Handle, u32) {
    let handle = Handle::open(space).expect("a handle");
    let index = handle.index_of(&IfName::new("eth0").expect("a name")).expect("eth0");
    (handle, index)
}

/// What is not on the wire goes this way.
pub fn default_route(space: &NetNs, gateway: IpAddr) {
    let (handle, eth0) = eth0(space);
    let route = if gateway.is_ipv4() { Route::default_v4() } else { Route::default_v6() };
    handle.apply(&[Op::create(Route { protocol: 4, ..route.dev(eth0).via(gateway) })]).expect("a route");
}

/// Routes an address by way of a node.
pub fn via(space: &NetNs, to: IpAddr, node: IpAddr) {
    let (handle, route) = route(space, to, node);
    handle.apply(&[Op::create(route)]).expect("a route");
}

/// Takes such a route back.
pub fn unroute(space: &NetNs, to: IpAddr, node: IpAddr) {
    let (handle, route) = route(space, to, node);
    handle.apply(&[Op::delete(route)]).expect("a route less");
}

fn route(space: &NetNs, to: IpAddr, node: IpAddr) -> (Handle, Route) {
    let (handle, eth0) = eth0(space);
    (handle, Route { protocol: 4, ..Route::to(to.into()).dev(eth0).via(node) })
}
