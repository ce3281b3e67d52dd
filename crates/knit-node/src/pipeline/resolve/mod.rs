//! Which Networks does this pod get, under which interface names? A pure function of the request and one
//! snapshot.

mod access;
mod foreign;
mod lent;
#[cfg(test)]
mod tests;
mod wait;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_ipam::{Addresses, Mac};
use knit_ledger::{Loan, Reservation};
use knit_model::{Network, Refusal, overlap};
use knit_runtime::{Dns, InterfaceName, PortMapping};
use knit_types::NetworkName;

use crate::config::MainInterfaces;
use crate::error::{Error, Reason};
use crate::request::{Asked, ClaimRequest, Door, Main, MainInterface, PodRequest, Wish, Wishes, pod_name};
use crate::world::{Labels, PodView, World};

pub use access::{claims, primary_network};

/// One interface that a pod gets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Wanted {
    /// The Network.
    pub network: NetworkName,
    /// The runtime that serves it.
    pub runtime: String,
    /// The interface's name in the pod.
    pub interface: InterfaceName,
    /// Whether that name was asked for: no other may take its place.
    pub named: bool,
    /// Whether it is the pod's main one.
    pub main: bool,
    /// Whom it has its addresses from, where they are reserved already.
    pub loan: Option<Loan>,
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

/// An interface that a pod has already.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Held {
    /// The interface's name.
    pub interface: String,
    /// Its Network, where it is one of ours.
    pub network: Option<NetworkName>,
}

/// The interfaces that a request is about, the main one first if there is one, besides those that the sandbox
/// `has`; with what is reserved for its claims.
///
/// # Errors
/// When something is missing or refused; never is another Network given instead.
pub fn resolve(
    world: &World,
    request: &PodRequest,
    has: &[Held],
    claimed: &[Reservation],
) -> Result<Vec<Wanted>, Missing> {
    let who = pod_name(&request.pod);
    check_claims(request, &who)?;
    let Some(namespace) = request.pod.namespace.as_deref() else {
        // A plain CNI client: no namespace, so no rights but to the default Network.
        let network = NetworkName::default();
        let main = request.start.iter().filter_map(|start| start.main.ours());
        let main = main.map(|main| main_interface(world, main, network.clone(), &who));
        let wanted: Vec<Wanted> = main.collect::<Result<_, _>>()?;
        check_together(world, &wanted, has, &who)?;
        return Ok(wanted);
    };
    let foreign = request.start.as_ref().is_some_and(|start| matches!(start.main, Main::Foreign(_)));
    if foreign && foreign::asks_for_nothing(world, request, namespace) {
        return Ok(Vec::new());
    }
    let labels = labels_of(world, namespace, &who)?;
    let wish = wish_of(world, request, namespace, &who)?;
    let own_primary = access::primary_of(&claims(world), namespace, labels)?;
    let mut wanted = Vec::with_capacity(1 + wish.further.len());
    match request.start.as_ref().map(|start| &start.main) {
        Some(Main::Ours(main)) => {
            let primary = match &wish.primary {
                None => own_primary.clone(),
                Some(name) => other_primary(world, name, &own_primary, labels, &who)?,
            };
            wanted.push(main_interface(world, main, primary, &who)?);
        }
        Some(Main::Foreign(name)) => foreign::check(name, &wish, claimed, &own_primary, namespace, &who)?,
        None => {}
    }
    let others = wanted.iter().map(|main| &main.network);
    let others = others.chain(wish.further.iter().map(|asked| &asked.network));
    let (mut shared, lent) = lent::split(claimed, others.collect());
    let mut taken: BTreeSet<&str> = has.iter().map(|held| held.interface.as_str()).collect();
    taken.extend(wish.further.iter().filter_map(|asked| asked.interface.as_ref().map(InterfaceName::as_str)));
    taken.extend(request.start.iter().map(|start| start.main.name().as_str()));
    // A name that a claim asks for is that one or none. Any other is the one that its claim has it by, unless
    // that is taken here.
    for (owner, lease) in lent.iter().filter(|(_, lease)| lease.named) {
        if !taken.insert(lease.interface.as_str()) {
            let message = format!(
                "{who}: {owner} requests interface {}, which the pod already has for another request: use \
                 another name",
                lease.interface
            );
            return Err(Missing::Error(Error::new(Reason::Refused, message)));
        }
    }
    let lent: Vec<_> = lent
        .into_iter()
        .map(|(owner, lease)| (owner, lease, lease.named || taken.insert(lease.interface.as_str())))
        .collect();
    let mut free = free_names(taken);
    wanted.iter_mut().try_for_each(|main| lent::give(main, &mut shared, &who))?;
    for asked in &wish.further {
        let network = usable(world, &asked.network, &who)?;
        check_access(network, &asked.network, &own_primary, labels, &who)?;
        let mut own = further(world, network, asked, &mut free, &who)?;
        lent::give(&mut own, &mut shared, &who)?;
        wanted.push(own);
    }
    for (owner, lease, by_its_name) in lent {
        let network = usable(world, &lease.network, &who)?;
        check_access(network, &lease.network, &own_primary, labels, &who)?;
        let asked = Asked {
            network: lease.network.clone(),
            interface: by_its_name.then(|| lease.interface.clone()),
            default_route: lease.default_route,
            ..Asked::default()
        };
        let named = lease.named;
        let loan = Loan { from: owner.clone(), interface: lease.interface.clone(), named };
        wanted.push(Wanted { loan: Some(loan), ..further(world, network, &asked, &mut free, &who)? });
    }
    check_together(world, &wanted, has, &who)?;
    // Where another interface asks for the default route, the main one does without.
    let elsewhere = wanted.iter().any(|w| !w.main && w.default_route);
    wanted.iter_mut().filter(|w| w.main).for_each(|main| main.default_route = !elsewhere);
    Ok(wanted)
}

/// What a claim asks for, with a name for each interface that is free in the claim.
///
/// # Errors
/// When something is missing or refused.
pub fn resolve_claim(
    world: &World,
    request: &ClaimRequest,
    main: MainInterfaces,
) -> Result<Vec<Wanted>, Missing> {
    let (who, namespace) = (format!("claim {}", request.claim), request.claim.namespace.as_str());
    let labels = labels_of(world, namespace, &who)?;
    let own_primary = access::primary_of(&claims(world), namespace, labels)?;
    let named = request.networks.iter().filter_map(|asked| asked.interface.as_ref());
    let mut free = free_names(named.map(InterfaceName::as_str).collect());
    let mut wanted = Vec::with_capacity(request.networks.len());
    for asked in &request.networks {
        let network = usable(world, &asked.network, &who)?;
        check_access(network, &asked.network, &own_primary, labels, &who)?;
        wanted.push(further(world, network, asked, &mut free, &who)?);
    }
    check_together(world, &wanted, &[], &who)?;
    if main == MainInterfaces::Foreign {
        foreign::check_claim(&wanted, &who)?;
    }
    Ok(wanted)
}

/// A claim is its namespace's: no other pod gets what is reserved for it.
fn check_claims(request: &PodRequest, who: &str) -> Result<(), Missing> {
    let namespace = request.pod.namespace.as_deref();
    let Some(foreign) = request.claims.iter().find(|claim| Some(claim.namespace.as_str()) != namespace)
    else {
        return Ok(());
    };
    let message =
        format!("{who}: claim {foreign} is in another namespace: use a claim in the pod's namespace");
    Err(Missing::Error(Error::new(Reason::Refused, message)))
}

fn labels_of<'w>(world: &'w World, namespace: &str, who: &str) -> Result<&'w Labels, Missing> {
    check_known(world, who)?;
    let labels = world.namespaces.get(namespace).map(|labels| &**labels);
    labels.ok_or_else(|| {
        let message =
            format!("{who}: namespace {namespace} is not known to the node agent yet; it will be retried");
        Missing::Wait(Error::new(Reason::NotReady, message))
    })
}

/// Nothing is decided on half a list: a Network that is still to come may be the one that this namespace must
/// have.
fn check_known(world: &World, who: &str) -> Result<(), Missing> {
    if world.knows_primaries() {
        return Ok(());
    }
    let message = format!(
        "{who}: not all Networks and namespaces have arrived from the Kubernetes API yet, so the primary \
         Network of its namespace is not known yet; it will be retried"
    );
    Err(Missing::Wait(Error::new(Reason::NotReady, message)))
}

fn wish_of(world: &World, request: &PodRequest, namespace: &str, who: &str) -> Result<Wish, Missing> {
    let said = |wishes: &Wishes| match wishes {
        Wishes::Said(wish) => Some(Ok(wish.clone())),
        Wishes::Wrong(problem) => {
            let message = format!("{who}: {problem}");
            Some(Err(Missing::Error(Error::new(Reason::Refused, message))))
        }
        Wishes::AsThePodSays => None,
    };
    let name = request.pod.name.clone().unwrap_or_default();
    let pod = || world.pods.get(&(namespace.to_owned(), name));
    // Another pod of that name may be the one that was deleted and is still shown, or one that comes next. A
    // static pod's uid is not its mirror pod's.
    let asked = request.pod.uid.as_ref();
    let same = |uid: Option<&String>| uid.zip(asked).is_none_or(|(uid, asked)| uid == asked);
    let is_it = |pod: &&Arc<PodView>| !pod.ending && (pod.mirror || same(pod.uid.as_ref()));
    let found = said(&request.wishes).or_else(|| said(&pod().filter(is_it)?.wishes));
    found.unwrap_or_else(|| {
        let advice = match &request.door {
            Door::Cni(_) => {
                "it will be retried; with the capability io.kubernetes.cri.pod-annotations in the CNI \
                configuration there is no need to wait"
            }
            Door::Kni | Door::Nri | Door::Object(_) => {
                "send its annotations with the request (an empty one is enough), or make sure that its Pod \
                object exists with this node in spec.nodeName, and try again"
            }
        };
        let message = format!("{who} is not known to the node agent yet: {advice}");
        Err(Missing::Wait(Error::new(Reason::NotReady, message)))
    })
}

fn other_primary(
    world: &World,
    name: &NetworkName,
    own_primary: &NetworkName,
    labels: &Labels,
    who: &str,
) -> Result<NetworkName, Missing> {
    let network = usable(world, name, who)?;
    check_access(network, name, own_primary, labels, who)?;
    if !network.is_primary() {
        let message = format!(
            "{who}: Network {name} is not a primary Network: set its primaryFor, or request another Network"
        );
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    Ok(name.to_owned())
}

/// A Network that is there, accepted, and not on its way out.
fn usable<'w>(world: &'w World, name: &NetworkName, who: &str) -> Result<&'w Network, Missing> {
    let Some(network) = world.networks.get(name) else {
        let message = format!("{who}: Network {name} does not exist: create it, or request another Network");
        return Err(Missing::Wait(Error::new(Reason::NotReady, message)));
    };
    if network.is_being_deleted() {
        let message = format!("{who}: Network {name} is being deleted: request another Network");
        return Err(Missing::Error(Error::new(Reason::NotReady, message)));
    }
    if let Some(Refusal { reason, message: why }) = network.refusal() {
        let message = format!("{who}: Network {name} is not accepted ({reason}): {why}");
        return Err(Missing::Error(Error::new(Reason::NotReady, message)));
    }
    Ok(network)
}

fn check_access(
    network: &Network,
    name: &NetworkName,
    own_primary: &NetworkName,
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

fn main_interface(
    world: &World,
    start: &MainInterface,
    name: NetworkName,
    who: &str,
) -> Result<Wanted, Missing> {
    let network = usable(world, &name, who)?;
    Ok(Wanted {
        runtime: runtime_of(world, network, &name, who)?,
        network: name,
        interface: start.interface.clone(),
        named: true,
        main: true,
        loan: None,
        addresses: start.addresses.clone(),
        mac: start.mac,
        default_route: true,
        ports: start.ports.clone(),
        dns: start.dns.clone(),
    })
}

fn further(
    world: &World,
    network: &Network,
    asked: &Asked,
    free: &mut impl Iterator<Item = InterfaceName>,
    who: &str,
) -> Result<Wanted, Missing> {
    let next = || free.next().expect("a pod has fewer interfaces than there are numbers");
    Ok(Wanted {
        runtime: runtime_of(world, network, &asked.network, who)?,
        network: asked.network.clone(),
        named: asked.interface.is_some(),
        interface: asked.interface.clone().unwrap_or_else(next),
        main: false,
        loan: None,
        addresses: asked.addresses.clone(),
        mac: asked.mac,
        default_route: asked.default_route,
        ports: Vec::new(),
        dns: Dns::default(),
    })
}

/// Those of net1, net2, ... that are free.
fn free_names(taken: BTreeSet<&str>) -> impl Iterator<Item = InterfaceName> {
    let names = (1..=u32::MAX).filter_map(|n| InterfaceName::new(format!("net{n}")).ok());
    names.filter(move |name| !taken.contains(name.as_str()))
}

fn runtime_of(world: &World, network: &Network, name: &str, who: &str) -> Result<String, Missing> {
    world.runtime_of(network).ok_or_else(|| {
        let class = network.class();
        let message = format!("{who}: NetworkClass {class} of Network {name} does not exist: create it");
        Missing::Wait(Error::new(Reason::NotReady, message))
    })
}

/// Checks what only all interfaces together can get wrong.
fn check_together(world: &World, wanted: &[Wanted], has: &[Held], who: &str) -> Result<(), Missing> {
    let mut interfaces = BTreeSet::new();
    if let Some(twice) = wanted.iter().find(|w| !interfaces.insert(&w.interface)) {
        let message =
            format!("{who} requests interface {} twice: give each a different name", twice.interface);
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let there = |w: &&Wanted| has.iter().any(|held| held.interface == w.interface.as_str());
    if let Some(twice) = wanted.iter().find(there) {
        let message = format!("{who} already has an interface {}: use another name", twice.interface);
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let per_family = |w: &&Wanted| !w.addresses.is_empty() && Addresses::from_list(&w.addresses).is_none();
    if let Some(wrong) = wanted.iter().find(per_family) {
        let message = format!(
            "{who} requests two addresses of one family on {}: request one per family",
            wrong.interface
        );
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    if wanted.iter().filter(|w| !w.main && w.default_route).count() > 1 {
        let message = format!("{who} requests two default routes: set default-route for one Network only");
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    let held = has.iter().filter_map(|held| held.network.as_ref());
    let networks: Vec<&NetworkName> = held.chain(wanted.iter().map(|w| &w.network)).collect();
    check_disjoint(world, &networks, who)
}

/// In one pod, addresses must mean one place.
fn check_disjoint(world: &World, names: &[&NetworkName], who: &str) -> Result<(), Missing> {
    let mut seen: Vec<(&NetworkName, IpNet)> = Vec::new();
    for name in names {
        let Some(network) = world.networks.get(*name) else { continue };
        for range in network.ranges() {
            if let Some((other, _)) = seen.iter().find(|(_, known)| overlap(known, range)) {
                let problem = if other == name {
                    format!("requests Network {name} twice: request each Network once")
                } else {
                    format!(
                        "requests Networks {other} and {name}, whose addresses overlap: use only one of them"
                    )
                };
                return Err(Missing::Error(Error::new(Reason::Refused, format!("{who} {problem}"))));
            }
            seen.push((name, *range));
        }
    }
    Ok(())
}
