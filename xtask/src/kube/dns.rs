//! The cluster DNS: CoreDNS beside the control plane, behind a Service without a selector.

use std::fs;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::bed::Bed;
use super::control_plane;
use super::net::{DNS_V4, control_plane_v4};

/// Starts it, and tells the cluster.
pub fn start(bed: &Bed) -> Result<()> {
    let state = bed.state();
    let corefile = format!(
        ".:53 {{\n  bind {}\n  errors\n  kubernetes cluster.local in-addr.arpa ip6.arpa {{\n    kubeconfig {} bed\n    pods insecure\n  }}\n  cache 5\n}}\n",
        control_plane_v4(),
        state.kubeconfig().display(),
    );
    fs::write(state.path().join("conf/Corefile"), corefile).context("cannot write the Corefile")?;
    bed.control_plane().start(control_plane::coredns(state))?;
    let ports = json!([
        { "name": "dns", "port": 53, "protocol": "UDP" },
        { "name": "dns-tcp", "port": 53, "protocol": "TCP" },
    ]);
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "kube-dns", "namespace": "kube-system", "labels": { "k8s-app": "kube-dns" } },
            "spec": { "clusterIP": DNS_V4, "ports": ports },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-bed",
                "namespace": "kube-system",
                "labels": { "kubernetes.io/service-name": "kube-dns" },
            },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": [control_plane_v4()], "conditions": { "ready": true } }],
            "ports": ports,
        },
    ]});
    bed.apply(&objects.to_string()).map(drop)
}
