//! A Service in front of a pod: by Knit's proxy in the namespace of a node, and by rules in the shape of
//! kube-proxy's.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use knit_kernel::NetNs;
use serde_json::json;

use super::super::services::{Proxy, decode, objects};
use super::knit::Node;

/// The port of the pod behind the Service.
pub const TARGET: u16 = 8080;
const NODE_PORT: u16 = 30_080;

/// What clients use.
pub struct Fronts {
    /// The cluster IP.
    pub cluster: SocketAddr,
    /// The port that every node has for it.
    pub node_port: u16,
    /// The proxy, which takes nothing away when it goes.
    _proxy: Option<Proxy>,
}

/// Knit's own.
pub fn knit(node: &Node, server: IpAddr) -> Result<Fronts> {
    let IpAddr::V4(server) = server else { anyhow::bail!("the Service of this benchmark has IPv4 only") };
    let mut proxy = Proxy::with_addresses(&node.namespace, &node.addresses)?;
    for protocol in ["TCP", "UDP"] {
        let number = u32::from(protocol == "UDP");
        let mut service = objects::service(number, protocol);
        service["spec"]["type"] = json!("NodePort");
        service["spec"]["externalTrafficPolicy"] = json!("Cluster");
        service["spec"]["ports"][0]["nodePort"] = json!(NODE_PORT);
        proxy.service(&decode(&service)?)?;
        proxy.slice(&decode(&objects::slice(number, protocol, &[server]))?)?;
    }
    proxy.sync()?;
    let cluster = SocketAddr::new(objects::cluster_ip(0).into(), 80);
    Ok(Fronts { cluster, node_port: NODE_PORT, _proxy: Some(proxy) })
}

/// Whether kube-proxy's shape can be loaded.
pub fn has_nft() -> bool {
    Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success())
}

/// One service as kube-proxy writes it: a map to a chain, and an endpoint picked in there.
pub fn kube_proxy(node: &NetNs, server: IpAddr) -> Result<Fronts> {
    let cluster = SocketAddr::new(objects::cluster_ip(0).into(), 80);
    let table = format!(
        "table ip kube-proxy {{
        chain endpoint {{ meta l4proto tcp dnat to {server}:{TARGET}; }}
        chain service {{
            ip saddr != 10.0.0.0/8 meta mark set meta mark or 0x4000
            numgen random mod 1 vmap {{ 0 : goto endpoint }}
        }}
        map service-ips {{
            type ipv4_addr . inet_proto . inet_service : verdict
            elements = {{ {} . tcp . 80 : goto service }}
        }}
        map service-nodeports {{
            type inet_proto . inet_service : verdict
            elements = {{ tcp . {NODE_PORT} : goto service }}
        }}
        chain services {{
            ip daddr . meta l4proto . th dport vmap @service-ips
            fib daddr type local meta l4proto . th dport vmap @service-nodeports
        }}
        chain prerouting {{ type nat hook prerouting priority -100; jump services; }}
        chain output {{ type nat hook output priority -100; jump services; }}
        chain postrouting {{
            type nat hook postrouting priority 100;
            meta mark and 0x4000 != 0 meta mark set meta mark xor 0x4000 masquerade fully-random
        }}
        }}\n",
        cluster.ip()
    );
    let status = node.run(move || -> std::io::Result<_> {
        let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(table.as_bytes())?;
        }
        child.wait()
    })??;
    ensure!(status.success(), "nft did not load kube-proxy's rule set");
    Ok(Fronts { cluster, node_port: NODE_PORT, _proxy: None })
}
