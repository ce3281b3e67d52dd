//! The CRDs against the real API server: only there do the limits of what CEL rules may cost exist.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::kube::bed::Bed;

/// What a user may write, and is accepted.
const GOOD: &[(&str, &str)] = &[
    (
        "a NetworkClass",
        "{apiVersion: knit.dev/v1alpha1, kind: NetworkClass, metadata: {name: knit}, spec: \
         {runtime: knit.dev/linux}}",
    ),
    (
        "a Network of one family",
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: blue}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.77.0.0/16}]}}",
    ),
    (
        "a Network of two families with everything",
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: green}, spec: {topology: Layer2, \
         mtu: 1400, \
         outside: Closed, primaryFor: {matchLabels: {team: green}}, \
         subnets: [{cidr: 10.78.0.0/16, gateway: 10.78.0.1, reserved: [10.78.1.0/24]}, {cidr: 'fd78::/64'}], \
         routes: [{destination: 192.0.2.0/24, via: 10.78.0.5}]}}",
    ),
    (
        "the default Network, which takes the Nodes' ranges",
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: default}, spec: {topology: Layer3}}",
    ),
    (
        "a NetworkAttachment",
        "{apiVersion: knit.dev/v1alpha1, kind: NetworkAttachment, metadata: {name: web-net1, namespace: \
         default}, \
         spec: {pod: web, network: blue, interface: net1, addresses: [10.77.0.9]}}",
    ),
    (
        "an AddressBlock",
        "{apiVersion: knit.dev/v1alpha1, kind: AddressBlock, metadata: {name: blue-n1}, \
         spec: {network: blue, node: n1, ipv4: 10.77.0.16/28}}",
    ),
];

/// What is refused, and the words by which a user knows what to write instead.
const BAD: &[(&str, &str)] = &[
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer3}}",
        "a Network needs at least one subnet",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.77.0.5/16}]}}",
        "the CIDR has host bits set",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.77.0.0/30}]}}",
        "the range is too small",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.1.0.0/16}, {cidr: 10.2.0.0/16}]}}",
        "at most one IPv4 subnet",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.1.0.0/16, gateway: 10.2.0.1}]}}",
        "the gateway must be an address inside the subnet",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: bad}, spec: {topology: Layer9, \
         subnets: [{cidr: 10.1.0.0/16}]}}",
        "Unsupported value",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: NetworkAttachment, metadata: {name: bad, namespace: default}, \
         spec: {pod: web, network: blue, interface: eth0}}",
        "lo and eth0 are already used in every pod",
    ),
    // What is there may not become something else.
    (
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: blue}, spec: {topology: Layer3, \
         subnets: [{cidr: 10.99.0.0/16}]}}",
        "a subnet cannot be changed or removed",
    ),
    (
        "{apiVersion: knit.dev/v1alpha1, kind: AddressBlock, metadata: {name: blue-n1}, \
         spec: {network: blue, node: n2, ipv4: 10.77.0.16/28}}",
        "an AddressBlock cannot be changed",
    ),
];

/// Applies the CRDs, then objects that must be accepted and some that must not.
pub fn accepted_and_enforced(bed: &Bed) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/crds");
    let folder = folder.to_str().context("the path of deploy/crds")?;
    bed.kubectl(&["apply", "--server-side", "-k", folder])?;
    bed.kubectl(&["wait", "--for=condition=Established", "crds", "--all", "--timeout=30s"])?;
    let violations = "jsonpath={.items[*].status.conditions[?(@.type==\"NonStructuralSchema\")].message}";
    let structural = bed.kubectl(&["get", "crds", "-o", violations])?;
    ensure!(structural.is_empty(), "a schema is not structural: {structural}");

    for (what, manifest) in GOOD {
        bed.apply(manifest).with_context(|| format!("{what} was refused"))?;
    }
    for (manifest, words) in BAD {
        let output = bed.kubectl_output(&["apply", "-f", "-"], Some(manifest))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "accepted, and should not be: {manifest}");
        ensure!(said.contains(words), "refused without the words {words:?}: {manifest}\n{said}");
    }
    // A generic tool finds our Networks by the category of the multi-network drafts.
    let found = bed.kubectl(&["get", "podnetworks", "-o", "name"])?;
    ensure!(found.contains("network.knit.dev/blue"), "kubectl get podnetworks shows {found:?}");
    bed.kubectl(&["delete", "-k", folder, "--timeout=60s"]).map(drop)
}
