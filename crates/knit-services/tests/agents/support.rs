//! Two nodes with real agents in namespaces, pods that answer with their names, and a folder of objects.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use knit_kernel::netns::NetNs;
use knit_node::agent::{Agent, AgentConfig};
use knit_node::proxy::{ServiceProxy, ServicesState};
use knit_proxy::backends::Backends;
use knit_services::{Config, Mode, Services};
pub use knit_testbed::agents::{Node, Pod, two_nodes as nodes};
pub use knit_testbed::echo::{connect, echo, serve};
use knit_testbed::objects;
pub use knit_testbed::objects::write;
use knit_testbed::wait::eventually;
use knit_testbed::wire::Wire;
pub use knit_testbed::{NEVER, SOON};
use serde_json::{Value, json};

/// What the tests of this crate do with a node.
pub trait Serving {
    /// Starts its agent with Services.
    async fn start(&self) -> Agent;

    /// The same with other backends of its proxies.
    async fn start_with(&self, backends: Arc<dyn Backends>) -> Agent;

    /// Makes a pod, and a server in it that says the pod's name; returns its address too.
    async fn pod(&self, name: &'static str, namespace: &'static str) -> (Pod, IpAddr);

    /// The same, with a TCP port of the node that leads to one of its own.
    async fn pod_with_port(
        &self,
        name: &'static str,
        namespace: &'static str,
        port: Option<(u16, u16)>,
    ) -> (Pod, IpAddr);
}

impl Serving for Node {
    async fn start(&self) -> Agent {
        self.start_with(Arc::new(knit_proxy_nft::NftBackends)).await
    }

    async fn start_with(&self, backends: Arc<dyn Backends>) -> Agent {
        let services = Config {
            node: self.name.to_owned(),
            namespace: self.namespace(),
            mode: Mode::Auto,
            healthz: Some(knit_services::HEALTHZ),
            metrics: Some(knit_services::METRICS),
            backends,
        };
        let proxy: Arc<dyn ServiceProxy> = Arc::new(Services::new(services));
        self.start_as(AgentConfig { proxy: Some(proxy), ..self.config() }).await
    }

    async fn pod(&self, name: &'static str, namespace: &'static str) -> (Pod, IpAddr) {
        self.pod_with_port(name, namespace, None).await
    }

    async fn pod_with_port(
        &self,
        name: &'static str,
        namespace: &'static str,
        port: Option<(u16, u16)>,
    ) -> (Pod, IpAddr) {
        let ports: Vec<Value> = port
            .iter()
            .map(|(host, own)| json!({"hostPort": host, "containerPort": own, "protocol": "tcp"}))
            .collect();
        let config = json!({"io.kubernetes.cri.pod-annotations": {}, "portMappings": ports});
        let pod = self.add(Pod::new(namespace, name), &config).await.expect("added");
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
