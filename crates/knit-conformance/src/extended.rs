//! What a runtime must do that announces a feature.

use std::net::SocketAddr;
use std::time::Duration;

use futures::StreamExt as _;
use knit_ipam::Mac;
use knit_kernel::NetNs;
use knit_runtime::{
    Attachment, Change, Changes, Network, PortMapping, Protocol, Reason, Route, Runtime as _, SandboxId,
    Topology, feature,
};
use knit_types::{ByFamily as _, Family};

use crate::bed::{Bed, ExistingNetwork, address_of};
use crate::case::{Problem, Verdict, cases, ensure};
use crate::core::{carries, refused};
use crate::packets::talk;

/// How long a runtime is to ask whether somebody else has an address.
const DUPLICATE_CHECK: Duration = Duration::from_secs(2);
/// How long a change may take to be told.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

cases! {
    NetworkSetup SetupAgain setup_again "SetupNetwork succeeds when repeated, and pods stay attached"
    NetworkSetup RemoveRefusedInUse remove_refused_in_use "RemoveNetwork is IN_USE while pods are attached, \
        and succeeds afterwards"
    NetworkSetup RemoveLeavesNothing remove_leaves_nothing "RemoveNetwork removes the namespace that held \
        the Network's end of interfaces"
    NetworkSetup RemoveUnknown remove_unknown "RemoveNetwork of an unknown Network succeeds"
    Topology(Underlay) UnderlayIsOnLink underlay_is_on_link "a pod and another host on the link reach each \
        other directly"
    Topology(Underlay) UnderlayAddressInUse underlay_address_in_use "an address that another host on the \
        link has is refused with ADDRESS_IN_USE if duplicates are to be detected"
    Ipv4 Ipv4Packets ipv4_packets "IPv4 packets flow"
    Ipv6 Ipv6Packets ipv6_packets "IPv6 packets flow, and addresses are usable at once"
    StaticAddress WantedAddress wanted_address "a requested address is the one that the interface has"
    StaticMac WantedMac wanted_mac "a requested MAC is the one that the interface has"
    Mtu NetworkMtu network_mtu "interfaces have the Network's MTU"
    Routes ExtraRoutes extra_routes "requested routes are in the pod and in the answer"
    HostPorts NodePorts node_ports "a port of the node leads to the pod while it is attached"
    HostPorts NodePortConflict node_port_conflict "a port of the node that another pod uses is refused with \
        CONFLICT"
    Update UpdateInPlace update_in_place "Update changes routes, and the interface stays the same"
    Watch WatchTells watch_tells "Watch sends existing attachments, SYNCED, then changes"
}

async fn setup_again(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    bed.runtime.setup_network(&network).await?;
    pod.has(&made)?;
    bed.runtime.check(&pod.pod, None, None).await?;
    let (other, second) = bed.attached(&network).await?;
    carries(&pod, &made, &other, &second, any_family(bed)).await
}

async fn remove_refused_in_use(bed: &Bed) -> Verdict {
    let topology = bed.topology();
    let network = bed.network_with("knit-conformance-rm", 34, topology, None).await?;
    let (pod, made) = bed.attached(&network).await?;
    refused(bed.runtime.remove_network(&network.name).await, Reason::InUse)?;
    pod.has(&made)?;
    bed.runtime.detach(&pod.pod, None).await?;
    bed.remove_network(&network.name).await?;
    refused(bed.runtime.attach(&bed.request(&pod, &network)).await, Reason::NetworkNotFound)
}

async fn remove_leaves_nothing(bed: &Bed) -> Verdict {
    let topology = bed.topology();
    let network = bed.network_with("knit-conformance-gone", 36, topology, None).await?;
    let (pod, made) = bed.attached(&network).await?;
    bed.runtime.detach(&pod.pod, None).await?;
    bed.remove_network(&network.name).await?;
    let Some(path) = &made.host.netns_path else {
        return Err(Problem::Skipped("the Network's end was in the node's own namespace".into()));
    };
    let left = NetNs::open(path).is_ok_and(|space| space.id().ino == made.host.netns_inode);
    ensure!(!left, "the Network's namespace {} is still there", path.display());
    Ok(())
}

async fn remove_unknown(bed: &Bed) -> Verdict {
    Ok(bed.runtime.remove_network(&"knit-conformance-nowhere".into()).await?)
}

async fn underlay_is_on_link(bed: &Bed) -> Verdict {
    let network = bed.network_of(Topology::Underlay).await?;
    let (pod, made) = bed.attached(&network).await?;
    let (host, addresses) = bed.neighbour(&network)?;
    for address in addresses {
        let of_host = address.net.addr();
        let Some(of_pod) = address_of(&made, Family::of(of_host)) else { continue };
        for (from, to, at, source) in [(&pod, of_host, &host, of_pod), (&host, of_pod, &pod, of_host)] {
            let seen = talk(&from.space, SocketAddr::new(to, 5556), &at.space, 5556).await?;
            ensure!(seen == source, "packets from {source} to {to} arrive from {seen}");
        }
    }
    Ok(())
}

async fn underlay_address_in_use(bed: &Bed) -> Verdict {
    let topology = Topology::Underlay;
    let mut network = bed.describe("knit-conformance-in-use", 37, topology, None)?;
    if let Some(underlay) = &mut network.underlay {
        underlay.duplicate_check = DUPLICATE_CHECK;
    }
    let network = bed.set_up(network).await?;
    let (_host, addresses) = bed.neighbour(&network)?;
    let pod = bed.pod()?;
    for taken in addresses {
        let mut request = bed.request(&pod, &network);
        for address in &mut request.addresses {
            if address.net.addr().is_ipv4() == taken.net.addr().is_ipv4() {
                *address = taken;
            }
        }
        refused(bed.runtime.attach(&request).await, Reason::AddressInUse)?;
        ensure!(pod.link(&request.interface)?.is_none(), "the pod has an interface all the same");
    }
    let made = bed.runtime.attach(&bed.request(&pod, &network)).await?;
    pod.has(&made)
}

async fn ipv4_packets(bed: &Bed) -> Verdict {
    packets_in(bed, Family::V4).await
}

async fn ipv6_packets(bed: &Bed) -> Verdict {
    packets_in(bed, Family::V6).await
}

/// A family that the runtime has.
fn any_family(bed: &Bed) -> Family {
    if bed.has(feature::IPV4) { Family::V4 } else { Family::V6 }
}

async fn packets_in(bed: &Bed, family: Family) -> Verdict {
    let network = bed.network().await?;
    let has_family = |existing: &ExistingNetwork| existing.addresses.has_family(family);
    if bed.options.network.as_ref().is_some_and(|existing| !has_family(existing)) {
        return Err(Problem::Skipped(format!(
            "no address of the family is given for Network {}",
            network.name
        )));
    }
    let (one, first) = bed.attached(&network).await?;
    let (two, second) = bed.attached(&network).await?;
    ensure!(address_of(&first, family).is_some(), "the interface has no address of the family");
    one.has(&first)?;
    carries(&one, &first, &two, &second, family).await
}

async fn wanted_address(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    request.addresses = bed.other_addresses(&network);
    let made = bed.runtime.attach(&request).await?;
    let (wanted, got) = (request.addresses, &made.addresses);
    let same = wanted.len() == got.len() && wanted.iter().all(|w| got.iter().any(|g| g.net == w.net));
    ensure!(same, "{wanted:?} were requested, but the answer has {got:?}");
    pod.has(&made)
}

async fn wanted_mac(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    let mac = Mac([0x02, 0x6b, 0x6e, 0x69, 0x74, 0x01]);
    request.mac = Some(mac);
    let made = bed.runtime.attach(&request).await?;
    ensure!(made.mac == mac, "{mac} was requested, but the answer has {}", made.mac);
    pod.has(&made)?;
    let (other, second) = bed.attached(&network).await?;
    carries(&pod, &made, &other, &second, any_family(bed)).await
}

async fn network_mtu(bed: &Bed) -> Verdict {
    if bed.options.network.is_some() {
        return Err(Problem::Skipped(
            "the suite cannot set the MTU of a Network that it did not create".into(),
        ));
    }
    let topology = bed.topology();
    let network = bed.network_with("knit-conformance-mtu", 33, topology, Some(1340)).await?;
    let (pod, made) = bed.attached(&network).await?;
    ensure!(made.mtu == 1340, "the Network's MTU is 1340, but the answer has {}", made.mtu);
    pod.has(&made)
}

async fn extra_routes(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    let destinations = [(Family::V4, "203.0.113.0/24"), (Family::V6, "2001:db8:77::/64")];
    for (family, destination) in destinations {
        if request.addresses.has_family(family) {
            let destination = destination.parse().map_err(|e| Problem::Failed(format!("{e}")))?;
            request.routes.push(Route { destination, via: None });
        }
    }
    let made = bed.runtime.attach(&request).await?;
    for route in &request.routes {
        ensure!(pod.has_route(route)?, "the pod has no route to {}", route.destination);
        ensure!(
            made.routes.iter().any(|r| r.destination == route.destination),
            "the answer has no route to {}",
            route.destination
        );
    }
    Ok(())
}

const NODE_PORT: u16 = 48_231;
const POD_PORT: u16 = 8080;

fn port() -> PortMapping {
    PortMapping { protocol: Protocol::Udp, host_port: NODE_PORT, container_port: POD_PORT, host_ip: None }
}

/// Ports of the node are for pods on their primary Network.
async fn primary(bed: &Bed) -> Result<Network, Problem> {
    if bed.options.network.is_some() {
        return bed.network().await;
    }
    let topology = bed.topology();
    let network = bed.describe("knit-conformance-hp", 35, topology, None)?;
    bed.set_up(Network { primary: true, ..network }).await
}

async fn node_ports(bed: &Bed) -> Verdict {
    let network = primary(bed).await?;
    let node = NetNs::current()?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    request.ports = vec![port()];
    let made = bed.runtime.attach(&request).await?;
    let reachable = |a: &&std::net::IpAddr| address_of(&made, Family::of(**a)).is_some();
    let Some(address) = bed.options.node_addresses.iter().find(reachable) else {
        return Err(Problem::Skipped("give the node's address: a packet is sent to its port".into()));
    };
    talk(&node, SocketAddr::new(*address, NODE_PORT), &pod.space, POD_PORT).await?;
    bed.runtime.detach(&pod.pod, None).await?;
    // Another pod can have it now.
    let next = bed.pod()?;
    let mut request = bed.request(&next, &network);
    request.ports = vec![port()];
    bed.runtime.attach(&request).await?;
    talk(&node, SocketAddr::new(*address, NODE_PORT), &next.space, POD_PORT).await?;
    Ok(())
}

async fn node_port_conflict(bed: &Bed) -> Verdict {
    let network = primary(bed).await?;
    let (one, two) = (bed.pod()?, bed.pod()?);
    let mut first = bed.request(&one, &network);
    first.ports = vec![port()];
    bed.runtime.attach(&first).await?;
    let mut second = bed.request(&two, &network);
    second.ports = vec![port()];
    refused(bed.runtime.attach(&second).await, Reason::Conflict)
}

async fn update_in_place(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, before) = bed.attached(&network).await?;
    let index = pod.link(&before.interface)?.map(|l| l.index);
    let mut request = bed.request(&pod, &network);
    let v4 = address_of(&before, Family::V4).is_some();
    let destination = if v4 { "203.0.113.0/24" } else { "2001:db8:77::/64" };
    let destination = destination.parse().map_err(|e| Problem::Failed(format!("{e}")))?;
    request.routes.push(Route { destination, via: None });
    let after = bed.runtime.update(&request).await?;
    ensure!(pod.link(&after.interface)?.map(|l| l.index) == index, "the interface was recreated");
    ensure!(after.addresses == before.addresses, "its addresses became {:?}", after.addresses);
    for route in &request.routes {
        ensure!(pod.has_route(route)?, "the pod has no route to {}", route.destination);
    }
    pod.has(&after)?;
    bed.runtime.check(&pod.pod, None, None).await?;
    Ok(())
}

async fn watch_tells(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (_before, there) = bed.attached(&network).await?;
    let mut changes = bed.runtime.watch().await?;
    let mut seen = false;
    loop {
        match next(&mut changes, "SYNCED").await? {
            Change::Synced => break,
            Change::Added(attachment) => seen |= attachment == there,
            other => return Err(Problem::Failed(format!("before SYNCED, Watch sent {other:?}"))),
        }
    }
    ensure!(seen, "Watch did not send the attachment that existed before");
    let (pod, made) = bed.attached(&network).await?;
    match next_of(&mut changes, &pod.pod.sandbox, "the attached pod").await? {
        Change::Added(told) => ensure!(told == made, "Attach answered {made:?}, Watch sent {told:?}"),
        other => return Err(Problem::Failed(format!("after an attach, Watch sent {other:?}"))),
    }
    bed.runtime.detach(&pod.pod, None).await?;
    match next_of(&mut changes, &pod.pod.sandbox, "the detached pod").await? {
        Change::Removed(told) => {
            ensure!(same(&told, &made), "{made:?} was detached, and Watch sent {told:?}");
        }
        other => return Err(Problem::Failed(format!("after a detach, Watch sent {other:?}"))),
    }
    Ok(())
}

fn same(told: &Attachment, made: &Attachment) -> bool {
    told.pod.sandbox == made.pod.sandbox
        && told.interface == made.interface
        && told.addresses == made.addresses
}

/// The next change of a sandbox; others may be attached at the same time.
async fn next_of(changes: &mut Changes, sandbox: &SandboxId, what: &str) -> Result<Change, Problem> {
    loop {
        match next(changes, what).await? {
            Change::Added(a) | Change::Modified(a) | Change::Removed(a) if a.pod.sandbox != *sandbox => {}
            change => return Ok(change),
        }
    }
}

async fn next(changes: &mut Changes, what: &str) -> Result<Change, Problem> {
    match tokio::time::timeout(TOLD_WITHIN, changes.next()).await {
        Ok(Some(Ok(change))) => Ok(change),
        Ok(Some(Err(error))) => Err(error.into()),
        Ok(None) => Err(Problem::Failed(format!("the stream ended before {what} was sent"))),
        Err(_) => Err(Problem::Failed(format!("{what} was not sent within {TOLD_WITHIN:?}"))),
    }
}
