//! Pods of every kind: static, with init containers, with ephemeral containers, on the node's own network.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use knit_kernel::NetNs;

use super::support::{self, Overlay, field};
use super::{pods, talk};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;

const LIMIT: Duration = Duration::from_secs(60);
/// Where the kubelet looks for static pods.
const STATIC: &str = "/etc/kubernetes/manifests/static.json";

/// Waits until a pod's `netexec` says its name to a client there.
fn says(from: &NetNs, to: SocketAddr, name: &str) -> Result<()> {
    let mut last = None;
    let heard = until(&format!("{name} answers at {to}"), LIMIT, || {
        last = talk::http(from, to, "/hostname")?;
        Ok((last.as_deref() == Some(name)).then_some(()))
    });
    heard.with_context(|| format!("last heard: {last:?}"))
}

fn netexec(port: u16) -> String {
    format!("[netexec, --http-port={port}, --udp-port=-1]")
}

pub fn every_kind(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, "kinds")?;
    let pod = |name: &str, node: &str, port: u16, more: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: kinds}}, spec: {{nodeName: \
             {node}, \
             terminationGracePeriodSeconds: 1, {more} containers: [{{name: agnhost, image: '{AGNHOST}', \
             args: {}}}]}}}}\n---\n",
            netexec(port)
        )
    };
    bed.apply(&pod("plain", "n1", 8080, ""))?;
    support::pods_ready(bed, "kinds")?;
    let plain = pods::pod(bed, "kinds", "plain")?;
    // One of n2 whose first container must reach a pod of n1 before any other is started, one on the node's
    // own network, and one that only the kubelet of n2 knows of.
    let first = format!(
        "initContainers: [{{name: first, image: '{AGNHOST}', args: [connect, --timeout=10s, '{}:8080']}}],",
        plain.address()?
    );
    bed.apply(&[pod("init", "n2", 8080, &first), pod("host", "n2", 8081, "hostNetwork: true,")].concat())?;
    let manifest = bed.node_path("n2", STATIC)?;
    std::fs::create_dir_all(manifest.parent().context("a folder")?)?;
    let content = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "static", "namespace": "kinds" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{ "name": "agnhost", "image": AGNHOST, "args": ["netexec", "--http-port=8080"] }],
        },
    });
    std::fs::write(&manifest, content.to_string())?;
    bed.kubectl(&["wait", "--for=create", "-n", "kinds", "pod/static-n2", "--timeout=60s"])?;
    support::pods_ready(bed, "kinds")?;

    let node: IpAddr = field(bed, "default", "node/n2", "{.status.addresses[0].address}")?.parse()?;
    let ranges = bed.pod_ranges("n2")?;
    let from = plain.space()?;
    for name in ["init", "static-n2"] {
        let there = pods::pod(bed, "kinds", name)?;
        let address = there.address()?;
        ensure!(
            ranges.iter().any(|range| range.contains(&address)),
            "{name} has {address}, outside of {ranges:?}"
        );
        ensure!(there.space()?.id() != bed.node_ns("n2")?.id(), "{name} is on the node's own network");
        says(&from, (address, 8080).into(), name)?;
    }
    let host = pods::pod(bed, "kinds", "host")?;
    ensure!(host.address()? == node, "a pod on the node's network has {:?}, and n2 is {node}", host.address);
    ensure!(host.space()?.id() == bed.node_ns("n2")?.id(), "a pod on the node's network is not there");
    says(&from, (node, 8081).into(), "n2")?;

    // A container that comes later is in the pod's network: it is heard at the pod's address.
    let image = format!("--image={AGNHOST}");
    let debug =
        ["debug", "-n", "kinds", "pod/init", "-c", "later", "--quiet", "--attach=false", "--arguments-only"];
    bed.kubectl(&[&debug[..], &[&image, "--", "netexec", "--http-port=8090", "--udp-port=-1"]].concat())?;
    says(&from, (pods::pod(bed, "kinds", "init")?.address()?, 8090).into(), "init")?;

    std::fs::remove_file(&manifest)?;
    bed.kubectl(&["wait", "--for=delete", "-n", "kinds", "pod/static-n2", "--timeout=60s"])?;
    pods::delete_namespace(bed, "kinds")
}
