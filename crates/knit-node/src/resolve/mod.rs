//! Which Networks does this pod get, under which interface names? A pure function of the request and one snapshot.

mod access;
pub mod annotation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::{Network, names};
use knit_ipam::{Addresses, Mac};
use knit_runtime::{Dns, InterfaceName, PortMapping};

use crate::error::{Error, Reason};
use crate::request::{Door, PodRequest, pod_name};
use crate::world::{Labels, World};
use annotation::Asked;

pub use access::primary_network;

/// One interface that a pod gets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Wanted {
    /// The Network.
    pub network: String,
    /// The runtime that serves it.
    pub runtime: String,
    /// The interface's name in the pod.
    pub interface: InterfaceName,
    /// Addresses that it must have.
    pub addresses: Vec<IpAddr>,
    /// The MAC that it must have.
    pub mac: Option<Mac>,
    /// Whether the pod's default route goes out here.
    pub default_route: bool,
    /// Ports of the node that lead here.
    pub ports: Vec<PortMapping>,
    /// Name servers, for the answer.
    pub dns: Dns,
}

/// Why a pod's Networks cannot be told.
#[derive(Debug)]
pub enum Missing {
    /// Something is not known yet: wait a little for it. With the error to give if it does not come.
    Wait(Error),
    /// Waiting a few seconds does not help.
    Error(Error),
}

/// An attachment that a user asks for on a running pod.
#[derive(Clone, Debug)]
pub struct Plug<'a> {
    /// The pod's namespace.
    pub namespace: &'a str,
    /// What is asked for.
    pub asked: Asked,
    /// The interfaces that the pod has, with their Networks.
    pub has: Vec<(String, String)>,
}

/// The interfaces of a pod, its main one first.
///
/// # Errors
/// When something is missing or refused; never is another Network given instead.
pub fn resolve(world: &World, request: &PodRequest) -> Result<Vec<Wanted>, Missing> {
    let Some(namespace) = request.pod.namespace.as_deref() else {
        // A plain CNI client: no namespace, so no rights but to the default Network.
        let wanted = vec![main_interface(world, request, names::DEFAULT_NETWORK.to_owned())?];
        check_together(world, &wanted, &pod_name(&request.pod))?;
        return Ok(wanted);
    };
    let who = pod_name(&request.pod);
    check_known(world, &who)?;
    let Some(labels) = world.namespaces.get(namespace) else {
        return Err(Missing::Wait(Error::new(
            Reason::NotReady,
            format!("{who}: namespace {namespace} is not known to the node agent yet: it tries again"),
        )));
    };
    let annotations = annotations_of(world, request, namespace, &who)?;
    let own_primary = access::primary_of(world, namespace, labels)?;
    let primary = match annotations.get(names::PRIMARY_ANNOTATION).map(|name| name.trim()) {
        None | Some("") => own_primary.clone(),
        Some(name) => other_primary(world, name, &own_primary, labels, &who)?,
    };
    let mut wanted = vec![main_interface(world, request, primary)?];

    let asked = match annotations.get(names::NETWORKS_ANNOTATION) {
        Some(text) => annotation::parse(text).map_err(|problem| {
            let message = format!("{who}: annotation {}: {problem}", names::NETWORKS_ANNOTATION);
            Missing::Error(Error::new(Reason::Refused, message))
        })?,
        None => Vec::new(),
    };
    let mut taken: BTreeSet<InterfaceName> = asked.iter().filter_map(|a| a.interface.clone()).collect();
    taken.insert(request.interface.clone());
    for asked in asked {
        let network = usable(world, &asked.network, &who)?;
        check_access(network, &asked.network, &own_primary, labels, &who)?;
        wanted.push(further(world, network, asked, &mut taken, &who)?);
    }
    check_together(world, &wanted, &who)?;
    // Where another interface asks for the default route, the main one does without.
    wanted[0].default_route = !wanted.iter().skip(1).any(|w| w.default_route);
    Ok(wanted)
}

/// One more interface for a running pod.
///
/// # Errors
/// When something is missing or refused.
pub fn resolve_plug(world: &World, plug: &Plug<'_>, who: &str) -> Result<Wanted, Missing> {
    check_known(world, who)?;
    let Some(labels) = world.namespaces.get(plug.namespace) else {
        let message = format!("{who}: namespace {} is not known to the node agent yet", plug.namespace);
        return Err(Missing::Wait(Error::new(Reason::NotReady, message)));
    };
    let own_primary = access::primary_of(world, plug.namespace, labels)?;
    let network = usable(world, &plug.asked.network, who)?;
    check_access(network, &plug.asked.network, &own_primary, labels, who)?;
    let mut taken = BTreeSet::new();
    for (interface, _) in &plug.has {
        if let Ok(name) = InterfaceName::new(interface.as_str()) {
            taken.insert(name);
        }
    }
    if let Some(interface) = plug.asked.interface.as_ref().filter(|interface| taken.contains(*interface)) {
        let message = format!("{who} has an interface {interface} already: ask for another name");
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let wanted = further(world, network, plug.asked.clone(), &mut taken, who)?;
    check_together(world, std::slice::from_ref(&wanted), who)?;
    let mut networks: Vec<&str> = plug.has.iter().map(|(_, network)| network.as_str()).collect();
    networks.push(&wanted.network);
    check_disjoint(world, &networks, who)?;
    Ok(wanted)
}

/// Nothing is decided on half a list: a Network that is still to come may be the one that this namespace must have.
fn check_known(world: &World, who: &str) -> Result<(), Missing> {
    if world.knows_primaries() {
        return Ok(());
    }
    let message = format!(
        "{who}: not all Networks and namespaces have arrived from the Kubernetes API yet, so it is not known which \
         Network its namespace has: it tries again"
    );
    Err(Missing::Wait(Error::new(Reason::NotReady, message)))
}

fn annotations_of(
    world: &World,
    request: &PodRequest,
    namespace: &str,
    who: &str,
) -> Result<BTreeMap<String, String>, Missing> {
    if let Some(annotations) = &request.annotations {
        return Ok(annotations.clone());
    }
    let name = request.pod.name.clone().unwrap_or_default();
    let pod = world.pods.get(&(namespace.to_owned(), name));
    // A static pod's uid is not its mirror pod's, so a uid that differs says nothing about those; but the API never
    // shows an older pod of that name longer than it exists.
    match pod.filter(|pod| !pod.ending) {
        Some(pod) => Ok(pod.annotations.clone()),
        None => {
            let advice = match &request.door {
                Door::Cni(_) => {
                    "it tries again; with the capability io.kubernetes.cri.pod-annotations in the CNI \
                     configuration it need not wait"
                }
                Door::Kni | Door::Object(_) => {
                    "send its annotations with the request (an empty one will do), or see that its Pod object is \
                     there, has this node in spec.nodeName, and try again"
                }
            };
            let message = format!("{who} is not known to the node agent yet: {advice}");
            Err(Missing::Wait(Error::new(Reason::NotReady, message)))
        }
    }
}

fn other_primary(
    world: &World,
    name: &str,
    own_primary: &str,
    labels: &Labels,
    who: &str,
) -> Result<String, Missing> {
    let refused = |problem: String| {
        let message = format!("{who}: annotation {}: {problem}", names::PRIMARY_ANNOTATION);
        Missing::Error(Error::new(Reason::Refused, message))
    };
    annotation::check_name(name).map_err(refused)?;
    let network = usable(world, name, who)?;
    check_access(network, name, own_primary, labels, who)?;
    if name != names::DEFAULT_NETWORK && network.spec.primary_for.is_none() {
        return Err(refused(format!("Network {name} is no primary Network: give it primaryFor")));
    }
    Ok(name.to_owned())
}

/// A Network that is there, accepted, and not on its way out.
fn usable<'w>(world: &'w World, name: &str, who: &str) -> Result<&'w Network, Missing> {
    let Some(network) = world.networks.get(name) else {
        let message = format!("{who}: Network {name} does not exist: create it, or ask for another");
        return Err(Missing::Wait(Error::new(Reason::NotReady, message)));
    };
    if network.metadata.deletion_timestamp.is_some() {
        let message = format!("{who}: Network {name} is being deleted: ask for another");
        return Err(Missing::Error(Error::new(Reason::NotReady, message)));
    }
    if let Some((reason, why)) = access::refusal(network) {
        let message = format!("{who}: Network {name} is not accepted ({reason}): {why}");
        return Err(Missing::Error(Error::new(Reason::NotReady, message)));
    }
    Ok(network)
}

fn check_access(
    network: &Network,
    name: &str,
    own_primary: &str,
    labels: &Labels,
    who: &str,
) -> Result<(), Missing> {
    if name == own_primary || access::may_attach(network, labels)? {
        return Ok(());
    }
    let message = format!(
        "{who}: its namespace may not use Network {name}: allow it in the Network's allowedNamespaces"
    );
    Err(Missing::Error(Error::new(Reason::NotAllowed, message)))
}

fn main_interface(world: &World, request: &PodRequest, name: String) -> Result<Wanted, Missing> {
    let who = pod_name(&request.pod);
    let network = usable(world, &name, &who)?;
    Ok(Wanted {
        runtime: runtime_of(world, network, &name, &who)?,
        network: name,
        interface: request.interface.clone(),
        addresses: request.addresses.clone(),
        mac: request.mac,
        default_route: true,
        ports: request.ports.clone(),
        dns: request.dns.clone(),
    })
}

fn further(
    world: &World,
    network: &Network,
    asked: Asked,
    taken: &mut BTreeSet<InterfaceName>,
    who: &str,
) -> Result<Wanted, Missing> {
    let interface = match asked.interface {
        Some(interface) => interface,
        None => next_free(taken),
    };
    taken.insert(interface.clone());
    Ok(Wanted {
        runtime: runtime_of(world, network, &asked.network, who)?,
        network: asked.network,
        interface,
        addresses: asked.addresses,
        mac: asked.mac,
        default_route: asked.default_route,
        ports: Vec::new(),
        dns: Dns::default(),
    })
}

/// The next of net1, net2, ... that is free.
fn next_free(taken: &BTreeSet<InterfaceName>) -> InterfaceName {
    let names = (1..=u32::MAX).filter_map(|n| InterfaceName::new(format!("net{n}")).ok());
    let mut free = names.filter(|name| !taken.contains(name));
    free.next().expect("a pod has fewer interfaces than there are numbers")
}

fn runtime_of(world: &World, network: &Network, name: &str, who: &str) -> Result<String, Missing> {
    world.runtime_of(network).ok_or_else(|| {
        let class = &network.spec.class;
        let message = format!("{who}: NetworkClass {class} of Network {name} does not exist: create it");
        Missing::Wait(Error::new(Reason::NotReady, message))
    })
}

/// Checks what only all interfaces together can get wrong.
fn check_together(world: &World, wanted: &[Wanted], who: &str) -> Result<(), Missing> {
    let mut interfaces = BTreeSet::new();
    if let Some(twice) = wanted.iter().find(|w| !interfaces.insert(&w.interface)) {
        let message =
            format!("{who} asks for interface {} twice: give each a name of its own", twice.interface);
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let per_family = |w: &&Wanted| !w.addresses.is_empty() && Addresses::from_list(&w.addresses).is_none();
    if let Some(wrong) = wanted.iter().find(per_family) {
        let message = format!(
            "{who} asks for two addresses of one family on {}: write one per family",
            wrong.interface
        );
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    if wanted.iter().skip(1).filter(|w| w.default_route).count() > 1 {
        let message = format!("{who} asks for two default routes: write default-route for one Network only");
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let networks: Vec<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
    check_disjoint(world, &networks, who)
}

/// In one pod, addresses must mean one place.
fn check_disjoint(world: &World, names: &[&str], who: &str) -> Result<(), Missing> {
    let mut seen: Vec<(&str, IpNet)> = Vec::new();
    for name in names {
        let Some(network) = world.networks.get(*name) else { continue };
        let ranges = network.spec.subnets.iter().filter_map(|s| s.cidr.parse::<IpNet>().ok());
        for range in ranges {
            let overlaps = |other: &IpNet| other.contains(&range) || range.contains(other);
            if let Some((other, _)) = seen.iter().find(|(_, known)| overlaps(known)) {
                let problem = if other == name {
                    format!("asks for Network {name} twice: one interface on each is enough")
                } else {
                    format!("asks for Networks {other} and {name}, whose addresses overlap: take one of them")
                };
                return Err(Missing::Error(Error::new(Reason::Refused, format!("{who} {problem}"))));
            }
            seen.push((name, range));
        }
    }
    Ok(())
}
