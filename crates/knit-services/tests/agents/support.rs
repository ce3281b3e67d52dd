//! Two nodes with real agents in namespaces, pods that answer with their names, and a folder of objects.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_cni::protocol::Command;
use knit_kernel::netns::NetNs;
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_node::proxy::ServicesState;
use knit_objects::{FolderOptions, Source};
use knit_proxy::backends::Backends;
use knit_services::{Config, Mode, Services};
use knit_testbed::cni;
pub use knit_testbed::echo::{connect, echo, serve};
use knit_testbed::objects;
pub use knit_testbed::objects::write;
use knit_testbed::wait::eventually;
use knit_testbed::wire::Wire;
pub use knit_testbed::{NEVER, SOON};
use serde_json::{Value, json};

pub struct Node {
    pub name: &'static str,
    pub space: NetNs,
    pub dir: PathBuf,
    pub objects: PathBuf,
}

pub struct Pod {
    pub space: NetNs,
    pub name: &'static str,
    /// One per family.
    pub addresses: Vec<IpAddr>,
    path: PathBuf,
}

impl Node {
    pub async fn start(&self) -> Agent {
        self.start_with(Arc::new(knit_proxy_nft::NftBackends)).await
    }

    /// The same with other backends of its proxies.
    pub async fn start_with(&self, backends: Arc<dyn Backends>) -> Agent {
        let clone = || self.space.try_clone().expect("a clone");
        let (space, name, routers) = (clone(), self.name, self.dir.join("run").join("netns"));
        let folder = FolderOptions {
            output: Some(self.dir.join("status")),
            ..FolderOptions::new(self.objects.clone())
        };
        let services = Config {
            node: self.name.to_owned(),
            namespace: clone(),
            mode: Mode::Auto,
            healthz: Some(knit_services::HEALTHZ),
            metrics: Some(knit_services::METRICS),
            backends,
        };
        let config = AgentConfig {
            core: CoreConfig::new(self.name, self.dir.join("run"), self.dir.join("state")),
            socket: self.socket(),
            source: Source::Folder(folder),
            node_addresses: Vec::new(),
            http: None,
            lock_wait: SOON,
            netns_dirs: vec![PathBuf::from("/run/pods")],
            runtime: Box::new(move |addresses| {
                std::fs::create_dir_all(&routers).expect("a directory");
                let mut config = knit_linux::Config::new(name, addresses, space);
                config.router_directory = routers;
                Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
            }),
            proxy: Some(Arc::new(Services::new(services))),
            nri: None,
            policies: None,
            dra: None,
        };
        Agent::start(config).await.expect("started")
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("run").join("cni.sock")
    }

    /// Makes a pod, and a server in it that says the pod's name; returns its address too.
    pub async fn pod(&self, name: &'static str, namespace: &'static str) -> (Pod, IpAddr) {
        self.pod_with_port(name, namespace, None).await
    }

    /// The same, with a TCP port of the node that leads to one of its own.
    pub async fn pod_with_port(
        &self,
        name: &'static str,
        namespace: &'static str,
        port: Option<(u16, u16)>,
    ) -> (Pod, IpAddr) {
        std::fs::create_dir_all("/run/pods").expect("a directory");
        let path = PathBuf::from(format!("/run/pods/{name}"));
        let space = NetNs::create(&path).expect("a namespace");
        let mut pod = Pod { space, path, name, addresses: Vec::new() };
        let ports: Vec<Value> = port
            .iter()
            .map(|(host, own)| json!({"hostPort": host, "containerPort": own, "protocol": "tcp"}))
            .collect();
        let config = json!({"io.kubernetes.cri.pod-annotations": {}, "portMappings": ports});
        let about = cni::Pod { sandbox: name, namespace, netns: &pod.path };
        let result = cni::call(&self.socket(), Command::Add, about, &config).await;
        let ips = result["ips"].as_array().unwrap_or_else(|| panic!("addresses in {result}"));
        let address =
            |ip: &Value| ip["address"].as_str().expect("text").parse::<IpNet>().expect("an address");
        pod.addresses = ips.iter().map(|ip| address(ip).addr()).collect();
        pod.addresses.sort_unstable();
        serve(&pod.space, 8080, name);
        let first = pod.addresses[0];
        (pod, first)
    }
}

/// How the Services of a Network are.
pub fn services(agent: &Agent, network: &str) -> Option<ServicesState> {
    agent.core().networks().states().into_iter().find(|s| s.name == network)?.services
}

/// Who answers there, over many connections.
pub fn answers(from: &NetNs, to: (&str, u16), wait: Duration) -> Result<BTreeSet<String>, String> {
    (0..24).map(|_| connect(from, to, wait).map(|(_, name)| name).map_err(|e| e.to_string())).collect()
}

/// Waits until exactly these answer there.
pub async fn wait_for(from: &Pod, to: (&str, u16), expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|&name| name.to_owned()).collect();
    let what = format!("{} to {to:?} gives {expected:?}", from.name);
    wait_until(&what, || match answers(&from.space, to, Duration::from_secs(2)) {
        Ok(names) if names == expected => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

/// Waits until something is so.
pub async fn wait_until(what: &str, look: impl FnMut() -> Result<(), String>) {
    eventually(what, SOON, look).await;
}

/// Two nodes on one wire: 192.168.7.1 and 192.168.7.2, fd07::1 and fd07::2.
pub fn nodes(dir: &Path) -> (Wire, [Node; 2]) {
    let wire = Wire::new();
    let node = |node: &'static str, number: u8| {
        let space = wire.host(node, number);
        let node = Node { name: node, space, dir: dir.join(node), objects: dir.join("objects") };
        std::fs::create_dir_all(&node.dir).expect("a directory");
        node
    };
    let nodes = [node("a", 1), node("b", 2)];
    (wire, nodes)
}

/// A namespace on the wire: 192.168.7.NUMBER and fd07::NUMBER.
pub fn plug(wire: &Wire, port: &str, number: u8) -> NetNs {
    wire.host(port, number)
}

/// A Service and its endpoints: address, node.
pub fn write_service(folder: &Path, (space, name): (&str, &str), ip: &str, port: u16) {
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": space, "name": name},
        "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
            "ports": [{"port": port, "protocol": "TCP"}]}});
    write(folder, &format!("service-{space}-{name}"), &object);
}

pub fn write_slice(folder: &Path, (space, name): (&str, &str), port: u16, endpoints: &[(IpAddr, &str)]) {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|(address, node)| {
            json!({"addresses": [address.to_string()], "nodeName": node, "conditions": {"ready": true}})
        })
        .collect();
    let object = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": space, "name": name, "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": "", "port": port, "protocol": "TCP"}], "endpoints": endpoints});
    write(folder, &format!("slice-{space}-{name}"), &object);
}

/// Writes one of the Networks, with what it says about Services.
pub fn write_network(folder: &Path, name: &str, services: &Value) {
    let (id, topology, cidrs) = match name {
        "blue" => (2, "Layer3", ["10.77.0.0/16", "fd77::/64"]),
        "green" => (3, "Layer2", ["10.77.0.0/16", "fd77::/64"]),
        _ => (1, "Layer3", ["10.244.0.0/16", "fd44::/64"]),
    };
    let subnets = cidrs.map(|cidr| json!({"cidr": cidr}));
    let mut spec = json!({"class": "knit", "topology": topology, "subnets": subnets, "services": services});
    if name != "default" {
        spec["primaryFor"] = json!({"matchLabels": {"team": name}});
    }
    write(folder, &format!("network-{name}"), &objects::network(name, id, spec));
}

/// A default Network that is where its blocks are, as where Nodes have podCIDRs.
pub fn without_subnets(folder: &Path) {
    let object = objects::network("default", 1, json!({"class": "knit", "topology": "Layer3"}));
    write(folder, "network-default", &object);
}

/// A Node with these addresses.
pub fn write_node(folder: &Path, name: &str, internal: &[&str], external: &[&str]) {
    let mut object = objects::node(name, internal);
    if let Some(addresses) = object["status"]["addresses"].as_array_mut() {
        addresses.extend(external.iter().map(|address| json!({"type": "ExternalIP", "address": address})));
    }
    write(folder, &format!("node-{name}"), &object);
}

/// Whether an agent wrote an event of this reason.
pub fn told(node: &Node, reason: &str) -> Result<(), String> {
    let mut folders = vec![node.dir.join("status")];
    let mut seen = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(reason)) {
                return Ok(());
            } else {
                seen.push(entry.path());
            }
        }
    }
    Err(format!("{reason} is in none of {seen:?}"))
}

/// Networks default (Layer3), blue (Layer3) and green (Layer2), the last two with the same addresses and each
/// the primary of a namespace: sky and forest.
pub fn write_objects(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    for name in ["default", "blue", "green"] {
        write_network(folder, name, &json!({}));
    }
    // One node never has the same block of two primary Networks; two nodes do.
    let blocks = [
        ("default", "a", "10.244.1.0/28", "fd44::100/124"),
        ("default", "b", "10.244.2.0/28", "fd44::200/124"),
        ("blue", "a", "10.77.0.16/28", "fd77::10/124"),
        ("blue", "b", "10.77.0.32/28", "fd77::20/124"),
        ("green", "a", "10.77.0.32/28", "fd77::20/124"),
        ("green", "b", "10.77.0.16/28", "fd77::10/124"),
    ];
    for (network, node, ipv4, ipv6) in blocks {
        let object = objects::block(network, node, ipv4, Some(ipv6));
        write(folder, &format!("block-{network}-{node}"), &object);
    }
    write_node(folder, "a", &["192.168.7.1", "fd07::1"], &[]);
    write_node(folder, "b", &["192.168.7.2", "fd07::2"], &[]);
    let teams = ["shop", "kube-system", "default"].map(|name| (name, "none"));
    for (name, team) in teams.into_iter().chain([("sky", "blue"), ("forest", "green")]) {
        let object = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {"team": team}}});
        write(folder, &format!("namespace-{name}"), &object);
    }
    let ranges = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "fd96::/112"]}});
    write(folder, "ranges", &ranges);
}
