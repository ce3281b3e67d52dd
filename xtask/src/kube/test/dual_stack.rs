//! A cluster with IPv4 and IPv6: pods have an address of each, and Services answer on both.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use knit_types::{ByFamily as _, Family};

use super::support::{self, Overlay, field, node_reaches, reaches};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;

/// A server and a client on each node, and one Service of both families.
fn workload(namespace: &str) -> String {
    let pod = |name: &str, node: &str, args: &str| {
        format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}-{node}, namespace: {namespace}, labels: {{app: {name}}}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 1
  containers:
  - {{name: agnhost, image: {AGNHOST}, args: {args}}}
---"
        )
    };
    let service = format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: server, namespace: {namespace}}}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  selector: {{app: server}}
  ports: [{{port: 80, targetPort: 8080}}]
"
    );
    let serve = "[netexec, --http-port=8080]";
    let pods = ["n1", "n2"].map(|node| pod("server", node, serve) + &pod("client", node, "[pause]"));
    [pods.concat(), service].concat()
}

/// Addresses of both families, as a list of an object has them.
fn both(bed: &Bed, namespace: &str, object: &str, path: &str) -> Result<[IpAddr; 2]> {
    let text = field(bed, namespace, object, path)?;
    let all: Vec<IpAddr> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let found = || Some([*all.first_of(Family::V4)?, *all.first_of(Family::V6)?]);
    found().with_context(|| format!("{object} has {text:?}, and not an address of each family"))
}

/// An address and a port as people write them.
fn place(address: IpAddr, port: &str) -> String {
    match address {
        IpAddr::V4(address) => format!("{address}:{port}"),
        IpAddr::V6(address) => format!("[{address}]:{port}"),
    }
}

pub fn both_families(bed: &Bed) -> Result<()> {
    const SPACE: &str = "dual";
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, SPACE)?;
    bed.apply(&workload(SPACE))?;
    support::pods_ready(bed, SPACE)?;
    let mut targets = Vec::new();
    for server in ["pod/server-n1", "pod/server-n2"] {
        targets.extend(both(bed, SPACE, server, "{.status.podIPs[*].ip}")?.map(|ip| place(ip, "8080")));
    }
    targets.extend(both(bed, SPACE, "service/server", "{.spec.clusterIPs[*]}")?.map(|ip| place(ip, "80")));
    let port = field(bed, SPACE, "service/server", "{.spec.ports[0].nodePort}")?;
    for node in ["node/n1", "node/n2"] {
        let addresses = "{.status.addresses[?(@.type==\"InternalIP\")].address}";
        targets.extend(both(bed, SPACE, node, addresses)?.map(|ip| place(ip, &port)));
    }
    for target in &targets {
        for client in ["client-n1", "client-n2"] {
            reaches(bed, SPACE, client, target).with_context(|| support::logs(bed))?;
        }
        for node in ["n1", "n2"] {
            node_reaches(bed, node, target)?;
        }
    }
    let taints = bed.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].spec.taints[*].key}"])?;
    ensure!(!taints.contains("knit.dev"), "Nodes are tainted: {taints}");
    bed.kubectl(&["delete", "namespace", SPACE, "--timeout=60s"]).map(drop)
}
