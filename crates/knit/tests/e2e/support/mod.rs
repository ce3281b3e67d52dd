//! A small cluster out of namespaces: nodes on one wire, each with an agent of its own, and pods.

mod audit;
mod shim;

pub use shim::{Caller, Ran, build_shim, run_shim, shim, shim_command};

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ipnet::IpNet;
use knit_cni::protocol::{self, PROTOCOL_VERSION, Request, Response};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_testbed::objects;
use knit_testbed::wire::Wire;
pub use knit_testbed::{NEVER, SOON, ip, name};
use serde_json::{Value, json};

/// Where namespaces of pods are mounted, as a container runtime does.
pub const PODS: &str = "/run/netns";

/// Runs a test in namespaces of its own, with the shim built.
pub fn e2e<F: FnOnce()>(test: F) {
    build_shim();
    in_namespaces(test);
}

/// Nodes `a` (192.168.7.1) and `b` (192.168.7.2) on one segment, and the folder that their agents read.
pub struct Cluster {
    pub a: Node,
    pub b: Node,
    pub objects: PathBuf,
    _wire: Wire,
}

pub struct Node {
    pub name: &'static str,
    pub space: NetNs,
    pub run: PathBuf,
    pub state: PathBuf,
    pub objects: PathBuf,
    /// The objects are away: an API server that nobody listens for.
    pub away: bool,
    /// The agent runs in a mount namespace of its own, as in a container, with this propagation.
    pub container: Option<&'static str>,
    agent: Option<Child>,
}

/// A command that runs in a node's namespace.
pub struct NodeCommand<'a> {
    node: &'a Node,
    knit: Command,
}

/// A pod's namespace.
pub struct Pod {
    pub sandbox: String,
    pub space: NetNs,
    pub path: PathBuf,
}

impl Cluster {
    /// Both nodes with the same objects; agents are not started.
    pub fn new() -> Self {
        let wire = Wire::new();
        let objects = PathBuf::from("/run/objects");
        std::fs::create_dir_all(&objects).expect("a folder");
        std::fs::create_dir_all(PODS).expect("a folder");
        let cluster = Self {
            a: Node::new("a", 1, &wire, &objects),
            b: Node::new("b", 2, &wire, &objects),
            objects,
            _wire: wire,
        };
        for object in objects_of_cluster() {
            cluster.put(&object);
        }
        cluster
    }

    /// Both agents run.
    pub fn started() -> Self {
        let mut cluster = Self::new();
        cluster.a.start();
        cluster.b.start();
        cluster
    }

    pub fn put(&self, object: &Value) {
        let text = |field: &Value| field.as_str().expect("text").to_lowercase();
        let file = format!("{}-{}", text(&object["kind"]), text(&object["metadata"]["name"]));
        objects::write(&self.objects, &file, object);
    }
}

/// A default Network, and two that overlap: blue is switched, green is routed, and what is blue's block on
/// one node is green's on the other.
fn objects_of_cluster() -> Vec<Value> {
    let network = |name: &str, id: u32, topology: &str, subnets: [&str; 2], more: Value| {
        let subnets: Vec<Value> = subnets.iter().map(|cidr| json!({"cidr": cidr})).collect();
        let mut spec = json!({"class": "knit", "topology": topology, "subnets": subnets});
        if let (Some(spec), Value::Object(more)) = (spec.as_object_mut(), more) {
            spec.extend(more);
        }
        objects::network(name, id, spec)
    };
    let all = || json!({"allowedNamespaces": {"from": "All"}});
    let tenant = ["10.77.0.0/16", "fd77::/64"];
    let mut objects = vec![
        network("default", 1, "Layer3", ["10.244.0.0/16", "fd44::/64"], json!({})),
        network("blue", 2, "Layer2", tenant, all()),
        network("green", 3, "Layer3", tenant, all()),
        network("tiny", 4, "Layer3", ["10.99.0.0/24", "fd99::/64"], all()),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
    ];
    for (node, host) in [("a", 1), ("b", 2)] {
        let addresses = [format!("192.168.7.{host}"), format!("fd07::{host}")];
        objects.push(objects::node(node, &addresses.each_ref().map(String::as_str)));
    }
    objects.extend([
        block("default", "a", "10.244.1.0/24", "fd44::100/120"),
        block("default", "b", "10.244.2.0/24", "fd44::200/120"),
        block("blue", "a", "10.77.1.0/24", "fd77::100/120"),
        block("blue", "b", "10.77.2.0/24", "fd77::200/120"),
        block("green", "a", "10.77.2.0/24", "fd77::200/120"),
        block("green", "b", "10.77.1.0/24", "fd77::100/120"),
        block("tiny", "a", "10.99.0.8/29", "fd99::8/125"),
    ]);
    // Room for a thousand pods within the quarantine of freed addresses.
    objects.extend((3..6).map(|n| {
        let mut more = block("default", "a", &format!("10.244.{n}.0/24"), &format!("fd44::{n}00/120"));
        more["metadata"]["name"] = format!("default-a-{n}").into();
        more
    }));
    objects
}

pub fn block(network: &str, node: &str, v4: &str, v6: &str) -> Value {
    objects::block(network, node, v4, Some(v6))
}

impl Node {
    fn new(name: &'static str, host: u8, wire: &Wire, objects: &Path) -> Self {
        let space = wire.host(name, host);
        let run = PathBuf::from(format!("/run/knit-{name}"));
        let state = PathBuf::from(format!("/run/state-{name}"));
        Self {
            name,
            space,
            run,
            state,
            objects: objects.to_owned(),
            away: false,
            container: None,
            agent: None,
        }
    }

    pub fn socket(&self) -> PathBuf {
        knit_cni::paths::socket(&self.run)
    }

    fn log(&self) -> PathBuf {
        PathBuf::from(format!("/run/log-{}", self.name))
    }

    /// Where the agent writes what it has to say.
    pub fn written(&self) -> PathBuf {
        PathBuf::from(format!("/run/written-{}", self.name))
    }

    /// Starts an agent, which may have to wait for the one before.
    pub fn spawn(&self) -> Child {
        let log = File::options().append(true).create(true).open(self.log()).expect("a log");
        let knit = env!("CARGO_BIN_EXE_knit");
        let mut command = Command::new(if self.container.is_some() { "unshare" } else { knit });
        if let Some(propagation) = self.container {
            // It becomes the agent: who kills that one, ends the mount namespace.
            command.args(["--mount", "--propagation", propagation, knit]);
        }
        command.args(["node", "--node-name", self.name, "--netns-dirs", PODS]);
        if self.away {
            command.args(["--api-url", "http://127.0.0.1:1"]);
        } else {
            command.arg("--objects-from").arg(&self.objects).arg("--objects-to").arg(self.written());
        }
        command.arg("--run-dir").arg(&self.run).arg("--state-dir").arg(&self.state);
        command.env("NO_COLOR", "1").env("KNIT_LOG", "info");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // A child is born in the namespace of the thread that starts it.
        self.space.run(|| command.spawn()).expect("a visit").expect("the agent starts")
    }

    /// Another command of `knit`, on this node.
    pub fn command(&self, command: &str) -> NodeCommand<'_> {
        let mut knit = Command::new(env!("CARGO_BIN_EXE_knit"));
        knit.arg(command).env("NO_COLOR", "1");
        NodeCommand { node: self, knit }
    }

    /// Starts an agent and waits until it serves.
    pub fn start(&mut self) {
        self.agent = Some(self.spawn());
        self.wait_serving();
    }

    pub fn wait_serving(&self) {
        eventually(&format!("agent {} serves", self.name), SOON, || self.serves());
    }

    /// Whether the agent itself says that it is ready. The shim's STATUS would also speak for one that is
    /// away.
    pub fn serves(&self) -> bool {
        let Ok(mut stream) = UnixStream::connect(self.socket()) else { return false };
        let config = json!({"cniVersion": "1.1.0", "name": "knit"}).to_string();
        let request = Request {
            version: PROTOCOL_VERSION,
            command: protocol::Command::Status,
            container_id: String::new(),
            netns: String::new(),
            ifname: String::new(),
            args: knit_cni::Args::default(),
            path: String::new(),
            config: knit_cni::NetworkConfig::parse(config.as_bytes()).expect("a configuration"),
            timeout_ms: None,
        };
        protocol::send(&mut stream, &request).is_ok()
            && matches!(protocol::receive::<Response>(&mut stream), Ok(Response::Ok(_)))
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.kill().expect("killed");
        agent.wait().expect("gone");
    }

    /// SIGTERM, and waits for the end.
    pub fn stop(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        terminate(&agent);
        assert!(agent.wait().expect("gone").success(), "a graceful stop");
    }

    /// A second agent takes over: it is there before the first one stops.
    pub fn replace(&mut self) {
        let next = self.spawn();
        self.stop();
        self.agent = Some(next);
        self.wait_serving();
    }

    /// Runs the shim for a pod, as containerd does.
    pub fn cni(&self, command: &str, pod: &Pod, networks: &str) -> Ran {
        self.caller().cni(command, pod, networks)
    }

    /// The same, with another name of the pod and more in the configuration.
    pub fn cni_as(&self, command: &str, pod: &Pod, pod_name: &str, networks: &str, more: &Value) -> Ran {
        self.caller().cni_as(command, pod, pod_name, networks, more)
    }

    pub fn caller(&self) -> Caller {
        Caller { socket: self.socket() }
    }

    /// Adds a pod that must come to be.
    pub fn add(&self, sandbox: &str, networks: &str) -> (Pod, Value) {
        let pod = Pod::new(sandbox);
        let ran = self.cni("ADD", &pod, networks);
        assert!(ran.ok, "ADD {sandbox}: {}", ran.json);
        (pod, ran.json)
    }

    pub fn del(&self, pod: &Pod) {
        let ran = self.cni("DEL", pod, "");
        assert!(ran.ok, "DEL {}: {}", pod.sandbox, ran.json);
    }
}

impl NodeCommand<'_> {
    pub fn arg(&mut self, arg: impl AsRef<std::ffi::OsStr>) -> &mut Self {
        self.knit.arg(arg);
        self
    }

    pub fn args(&mut self, args: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>) -> &mut Self {
        self.knit.args(args);
        self
    }

    pub fn output(&mut self) -> std::io::Result<std::process::Output> {
        let Self { node, knit } = self;
        node.space.run(|| knit.output()).expect("a visit")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut text = String::new();
            if File::open(self.log()).and_then(|mut file| file.read_to_string(&mut text)).is_ok() {
                println!("--- the log of agent {}:\n{text}---", self.name);
            }
        }
        if let Some(mut agent) = self.agent.take() {
            // It may have gone by itself.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

impl Pod {
    pub fn new(sandbox: &str) -> Self {
        let path = Path::new(PODS).join(sandbox);
        let space = NetNs::create(&path).expect("a namespace");
        space.run(knit_kernel::testing::loopback_up).expect("a visit").expect("lo comes up");
        Self { sandbox: sandbox.to_owned(), space, path }
    }

    /// The namespace goes, as when a container runtime removes a sandbox.
    pub fn remove(self) {
        let Self { path, space, .. } = self;
        drop(space);
        NetNs::delete(path).expect("deleted");
    }

    /// How many interfaces of a CNI result are in here, and not in a router.
    pub fn interfaces(&self, result: &Value) -> usize {
        let path = self.path.to_str().expect("text");
        result["interfaces"].as_array().expect("interfaces").iter().filter(|i| i["sandbox"] == path).count()
    }

    /// Whether a datagram from here to `to` in `server` is answered.
    pub fn talks(&self, server: &NetNs, to: IpAddr, wait: Duration) -> bool {
        let any = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
        let listener = server.run(|| UdpSocket::bind((any, 7000))).expect("a visit").expect("a listener");
        listener.set_read_timeout(Some(wait)).expect("a timeout");
        let socket = self.space.run(|| UdpSocket::bind((any, 0))).expect("a visit").expect("a socket");
        socket.set_read_timeout(Some(wait)).expect("a timeout");
        if socket.send_to(b"hello", SocketAddr::new(to, 7000)).is_err() {
            return false;
        }
        let mut buffer = [0; 16];
        let Ok((_, from)) = listener.recv_from(&mut buffer) else { return false };
        listener.send_to(b"hello", from).is_ok() && socket.recv_from(&mut buffer).is_ok()
    }
}

/// The addresses of an interface in a CNI result.
pub fn addresses(result: &Value, interface: &str) -> Vec<IpAddr> {
    let names = result["interfaces"].as_array().expect("interfaces");
    let inside = |i: &Value| i["name"] == interface && i["sandbox"].is_string();
    let index = names.iter().position(inside).unwrap_or_else(|| panic!("no {interface} in {result}"));
    let ips = result["ips"].as_array().expect("addresses").iter();
    let of_it = ips.filter(|entry| entry["interface"] == index);
    of_it
        .map(|entry| entry["address"].as_str().expect("text").parse::<IpNet>().expect("a prefix").addr())
        .collect()
}

pub fn terminate(agent: &Child) {
    let pid = rustix::process::Pid::from_raw(agent.id().cast_signed()).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
}

/// Numbers that look random and are the same in every run.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
