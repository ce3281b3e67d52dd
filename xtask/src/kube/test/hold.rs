//! What hostile or unlucky tenants did to a real cluster once, and must not do again: addresses and ports
//! that are not theirs, tables that somebody flushed, objects that keep others from going.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_nft::{Nftables as _, Transaction};

use super::support::{self, Overlay, field};
use super::talk::{self, none_lost};
use super::talkers::Talkers;
use super::{install, pods};
use crate::kube::bed::Bed;
use crate::kube::wait::until;

const LIMIT: Duration = Duration::from_secs(60);
/// Somewhere outside.
const OUTSIDE: &str = "198.51.100.7";

/// A tenant with a primary Network, whose pods are on both nodes.
fn tenant(bed: &Bed, name: &str) -> Result<()> {
    support::namespace(bed, name)?;
    bed.kubectl(&["label", "namespace", name, &format!("hold={name}")])?;
    bed.apply(&format!(
        "{{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {{name: {name}}}, spec: {{topology: \
         Layer2, \
         subnets: [{{cidr: 10.95.0.0/24}}], primaryFor: {{matchLabels: {{hold: {name}}}}}}}}}"
    ))?;
    bed.kubectl(&["wait", "--for=condition=Accepted", &format!("network/{name}"), "--timeout=30s"])?;
    bed.apply(&install::workload(name).replace(", hostPort: 18080", ""))?;
    support::pods_ready(bed, name)
}

fn remove(bed: &Bed, name: &str) -> Result<()> {
    pods::delete_namespace(bed, name)?;
    bed.kubectl(&["delete", "network", name, "--timeout=60s"]).map(drop)
}

/// Exchanges between the tenant's pods of two nodes: what the tunnel carries.
fn crosses(bed: &Bed, name: &str) -> Result<()> {
    let from = pods::pod(bed, name, "client-n1")?.space()?;
    let to = (pods::pod(bed, name, "server-n2")?.address()?, 8080).into();
    until(&format!("pods of {name} reach each other between nodes"), LIMIT, || {
        Ok((talk::http(&from, to, "/hostname")?.as_deref() == Some("server-n2")).then_some(()))
    })
}

/// A tenant's Services name addresses of nodes with the kubelet's port and the tunnel's, and an address
/// outside.
pub fn external_ips(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    tenant(bed, "grabby")?;
    let talkers = Talkers::start(bed, "bystander")?;
    crosses(bed, "grabby")?;
    let node = |node: &str| field(bed, "default", &format!("node/{node}"), "{.status.addresses[0].address}");
    let (one, two) = (node("n1")?, node("n2")?);
    let service = |name: &str, protocol: &str, port: u16| {
        format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: grabby}}, spec: \
             {{selector: {{app: server}}, \
             externalIPs: ['{one}', '{two}', '{OUTSIDE}'], ports: [{{port: {port}, targetPort: 8080, \
             protocol: {protocol}}}]}}}}\n---\n"
        )
    };
    let all = [service("kubelet", "TCP", 10250), service("tunnel", "UDP", 4789), service("world", "TCP", 80)];
    none_lost(&talkers.client, &talkers.flows(), || {
        bed.apply(&all.concat())?;
        // Their ClusterIPs are served: the agents of both nodes have heard of these Services.
        for (pod, name) in [("client-n1", "kubelet"), ("client-n2", "world")] {
            let port = if name == "kubelet" { 10250 } else { 80 };
            let to = (pods::cluster_ip(bed, "grabby", name)?, port).into();
            let from = pods::pod(bed, "grabby", pod)?.space()?;
            until(&format!("{pod} reaches {name}"), LIMIT, || {
                Ok(talk::http(&from, to, "/hostname")?.is_some().then_some(()))
            })?;
        }
        // The kubelets answer, and not somebody in their place.
        for pod in ["client-n1", "client-n2"] {
            let exec = ["exec", "-n", "bystander", pod, "--", "/agnhost", "help"];
            bed.kubectl(&exec)
                .map_err(|error| error.context("a tenant's Service took the kubelet's port"))?;
        }
        crosses(bed, "grabby")?;
        // What another tenant and the nodes send there is not the grabby tenant's.
        let outside: IpAddr = OUTSIDE.parse()?;
        let from = [pods::pod(bed, "bystander", "client-n2")?.space()?, bed.node_ns("n1")?];
        for from in &from {
            let got = talk::http(from, (outside, 80).into(), "/hostname")?;
            ensure!(got.is_none(), "{OUTSIDE} was taken by a tenant's Service: {got:?} answered");
        }
        Ok(())
    })?;
    talkers.not_hurt(bed)?;
    pods::delete_namespace(bed, "bystander")?;
    remove(bed, "grabby")
}

/// A pod that wants the tunnel's port of its node.
pub fn tunnel_port(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    tenant(bed, "hold")?;
    crosses(bed, "hold")?;
    support::namespace(bed, "porter")?;
    let image = crate::kube::images::AGNHOST;
    for node in bed.nodes() {
        bed.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: porter-{node}, namespace: porter}}, spec: \
             {{nodeName: {node}, \
             terminationGracePeriodSeconds: 1, containers: [{{name: agnhost, image: '{image}', args: \
             [netexec, --udp-port=4789], \
             ports: [{{containerPort: 4789, hostPort: 4789, protocol: UDP}}]}}]}}}}"
        ))?;
    }
    let from = pods::pod(bed, "hold", "client-n1")?.space()?;
    let to = (pods::pod(bed, "hold", "server-n2")?.address()?, 8080).into();
    none_lost(&from, &talk::all_ways(to), || {
        until("the pods with the tunnel's port are told", LIMIT, || {
            let events =
                bed.kubectl(&["get", "events", "-n", "porter", "-o", "jsonpath={.items[*].message}"])?;
            let started = pods::pods(bed, "porter")?.iter().any(|pod| pod.ready);
            ensure!(!started, "a pod has the tunnel's port of its node: {events}");
            Ok((events.matches("4789").count() >= bed.nodes().len()).then_some(()))
        })?;
        talk::for_a_while(&from, to)
    })?;
    pods::delete_namespace(bed, "porter")?;
    remove(bed, "hold")
}

/// Everything of nftables is flushed on a node, in its own namespace and in every router.
pub fn flushed(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    tenant(bed, "hold")?;
    let talkers = Talkers::start(bed, "bystander")?;
    let inside = (pods::pod(bed, "hold", "server-n1")?.address()?, 8080).into();
    crosses(bed, "hold")?;
    flush(&bed.node_ns("n1")?)?;
    let routers = bed.node_path("n1", "/run/knit/netns")?;
    for entry in std::fs::read_dir(&routers).into_iter().flatten() {
        flush(&NetNs::open(entry?.path())?)?;
    }
    // Networks are kept apart again as soon as the agent has heard of it (docs/agent.md says that it is not
    // sooner), and nobody gets in from then on; Services are back by themselves, too.
    until("Networks are kept apart again on n1", LIMIT, || {
        Ok(talk::http(&talkers.client, inside, "/hostname")?.is_none().then_some(()))
    })
    .map_err(|error| error.context(support::logs(bed)))?;
    until("Services answer again on n1", LIMIT, || {
        let crossed = talk::http(&talkers.client, inside, "/hostname")?;
        ensure!(crossed.is_none(), "a pod of the default Network reached the tenant's: {crossed:?}");
        Ok(talk::http(&talkers.client, talkers.service, "/hostname")?.is_some().then_some(()))
    })
    .map_err(|error| error.context(support::logs(bed)))?;
    crosses(bed, "hold")?;
    let tenants = pods::pod(bed, "hold", "client-n1")?.space()?;
    let service = (pods::cluster_ip(bed, "hold", "server")?, 80).into();
    until("the tenant's Service answers again", LIMIT, || {
        Ok(talk::http(&tenants, service, "/hostname")?.is_some().then_some(()))
    })?;
    none_lost(&talkers.client, &talkers.flows(), || {
        let crossed = talk::http(&talkers.client, inside, "/hostname")?;
        ensure!(crossed.is_none(), "a pod of the default Network reached the tenant's: {crossed:?}");
        talk::for_a_while(&talkers.client, talkers.service)
    })?;
    talkers.not_hurt(bed)?;
    pods::delete_namespace(bed, "bystander")?;
    remove(bed, "hold")
}

/// What `nft flush ruleset` does.
fn flush(space: &NetNs) -> Result<()> {
    let mut kernel = Kernel::open_in(space)?;
    let mut all = Transaction::new();
    for table in kernel.tables()? {
        all.delete_table(&table);
    }
    kernel.commit(&all)?;
    Ok(())
}

/// A NetworkAttachment of somebody else's namespace, for a pod that nobody has, names a Network.
pub fn pinned(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    tenant(bed, "hold")?;
    support::namespace(bed, "stranger")?;
    bed.apply(
        "{apiVersion: knit.dev/v1alpha1, kind: NetworkAttachment, metadata: {name: pin, namespace: \
         stranger}, \
         spec: {pod: nobody, network: hold}}",
    )?;
    let told = "{.status.conditions[?(@.type==\"Ready\")].status}";
    until("the attachment is told that it cannot be", LIMIT, || {
        let path = format!("jsonpath={told}");
        let status = bed.kubectl(&["get", "-n", "stranger", "networkattachment/pin", "-o", &path])?;
        Ok((status == "False").then_some(()))
    })?;
    remove(bed, "hold")
        .map_err(|error| error.context("an attachment of another namespace pins the Network"))?;
    pods::delete_namespace(bed, "stranger")
}
