//! Networks on a link of the node: each pod has a macvlan child of that link, or a port of it if it is a
//! bridge, and nothing of ours is in between.
//!
//! Such a Network has no router, no tunnel and no rules. Its namespace on the node is empty: it has numbers
//! for the namespaces of the Network's pods, by which their interfaces are found, compared and deleted, also
//! by a runtime that begins later and is told no paths. A pod's namespace gets its number before anything is
//! made in it, and the pod's end is made in the pod's namespace at once, so that a kill leaves nothing that
//! is not found. With kind `Bridge` the other end of a pair is on the node (`port`); it goes with the pod's
//! end.

mod child;
mod inside;
mod port;

use std::sync::Arc;

use knit_kernel::handle::Created;
use knit_kernel::link::{AddrGenMode, Change, Link, Macvlan, MacvlanMode, NewLink};
use knit_kernel::links::{LinkList, Links};
use knit_kernel::netns::NetNs;
use knit_kernel::{IfName, Mtu, Op, owner};
use knit_runtime::{
    Error, HostEnd, InterfaceName, Network, Reason, Result, SandboxId, Topology, UnderlayKind, UnderlayMode,
};

use self::child::{
    Wanted, children, children_in, find_child, is_half_made, name_of, network_of, number_of, of_mark, taken,
};
use self::inside::Inside;
use super::{Driver, NAMESPACE, lo};
use crate::fail::{chain, damaged, internal};
use crate::mark::Mark;
use crate::moves::{Comparing, InMotion};
use crate::networks::Net;
use crate::node::Node;
use crate::plan::Plan;
use crate::shape::{Facts, RouterHome, Shape};
use crate::space::NamespaceSockets;
use crate::survey::{Found, Looked};

/// Networks on a link of the node.
#[derive(Debug)]
pub(super) struct Underlay;

impl Driver for Underlay {
    fn topology(&self) -> Topology {
        Topology::Underlay
    }

    fn letter(&self) -> Option<char> {
        Some('u')
    }

    fn check(&self, network: &Network, home: RouterHome) -> Result<(), String> {
        let name = &network.name;
        if home == RouterHome::Node {
            return Err(format!("Network {name} uses the node's own namespace and can only be Layer3"));
        }
        if network.primary {
            return Err(format!(
                "Network {name} is on a link of the node, without Services and policies, and cannot be a \
                 primary Network: remove primaryFor"
            ));
        }
        match &network.underlay {
            Some(on) if on.kind == UnderlayKind::Bridge && on.mode == UnderlayMode::Vepa => Err(format!(
                "Network {name} is on a bridge, where there is no mode Vepa: use Bridge or Private"
            )),
            None => Err(format!("Network {name} has no parent link on this node: see spec.underlay.parents")),
            Some(underlay) => IfName::new(underlay.parent.as_str()).map(|_| ()).map_err(|error| {
                format!("parent {:?} of Network {name} is not the name of a link: {error}", underlay.parent)
            }),
        }
    }

    fn parent<'a>(&self, network: &'a Network) -> Option<&'a str> {
        network.underlay.as_ref().map(|underlay| underlay.parent.as_str())
    }

    fn check_node(&self, node: &Node, shape: &Shape, facts: &Facts) -> Result<()> {
        match kind(&shape.network) {
            UnderlayKind::Macvlan => Ok(()),
            UnderlayKind::Bridge => a_bridge(node, &facts.uplink).map(|_| ()),
        }
    }

    fn set_up(&self, net: &Net, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        let says = Some(owner::alias(&format!("{NAMESPACE}u {}", shape.id())));
        let handle = net.space.links()?;
        let there = handle.link_by_name(&lo()).map_err(internal("read the Network's namespace"))?;
        if there.is_none_or(|there| there.alias != says) {
            let change = Change { alias: says, ..Change::named(lo()) };
            handle.apply(&[change.into()]).map_err(internal("mark the Network's namespace"))?;
        }
        if kind(&shape.network) == UnderlayKind::Bridge {
            let bridge = a_bridge(&net.node, &facts.uplink)?;
            let node = net.node.space.links()?;
            for (_, mark) in children_in(&net.space)? {
                let port =
                    node.link_by_name(&mark.host()).map_err(internal("look for a port of the bridge"))?;
                if let Some(port) = port.filter(|port| port::is_host_end(port, &mark)) {
                    port::like(&shape.network, bridge.index).settle(&node, &port)?;
                }
            }
        }
        Ok(())
    }

    /// There is nothing that would keep it apart: who is on the wire decides who hears what.
    fn hold_closed(&self, _: &Node, _: Option<&Net>) -> Result<()> {
        Ok(())
    }

    fn take_down(&self, net: &Net) -> Result<()> {
        collect_host_ends(net)?;
        NetNs::delete(&net.path).map(|_| ()).map_err(internal("delete the Network's namespace"))
    }

    fn compare(
        &self,
        Looked { net, shape, .. }: Looked<'_>,
        comparing: &Comparing<'_>,
        found: Found<'_>,
    ) -> Result<InMotion> {
        let room = net.space.links()?;
        let mut children = Vec::new();
        for (link, mark) in children_in(&net.space)? {
            let addresses = room.distant(number_of(&mark.sandbox)).addresses(link.index);
            children.push((link, mark, addresses.map_err(internal("read a pod's addresses"))?));
        }
        // Only now: all is read.
        let motion = comparing.in_motion(&net.name);
        if motion.network {
            return Ok(motion);
        }
        if !net.is_mounted() {
            found.wrong.add("namespace", "the Network's namespace is no longer mounted");
        }
        let parent = self.parent(&shape.network).and_then(|name| found.node.links.get(name));
        let wanted = wanted(&shape.network, parent.map(|parent| parent.index));
        let mut damaged: Vec<Mark> = Vec::new();
        for (link, mark, addresses) in &children {
            let mut wrong = wanted.wrong_with(link, mark, addresses);
            if let (Some(UnderlayKind::Bridge), Some(bridge)) = (wanted.kind, wanted.parent)
                && !motion.hosts.contains(mark.host().as_str())
            {
                let port = found.node.links.get(mark.host().as_str());
                match port.filter(|port| port::is_host_end(port, mark)) {
                    Some(port) => found.wrong.link(&port::like(&shape.network, bridge), port),
                    None => wrong.push(NO_HOST_END.to_owned()),
                }
            }
            if !wrong.is_empty() {
                tracing::debug!(sandbox = %mark.sandbox, wrong = wrong.join("; "), "a damaged interface");
                damaged.push(mark.clone());
            }
        }
        // Those that went with their parent, too, or that somebody deleted inside the pod.
        let is_there = |host: &str| children.iter().any(|(_, mark, _)| mark.host().as_str() == host);
        for (host, known) in net.attachments.known().iter() {
            if known.network == net.name && !is_there(host) {
                damaged.push(known.mark.clone());
            }
        }
        damaged.retain(|mark| !motion.hosts.contains(mark.host().as_str()));
        let again = damaged.into_iter().map(|mark| (mark.sandbox, mark.interface));
        found.survey.attachments.extend(again);
        Ok(motion)
    }

    fn attachments(&self, net: &Net) -> Result<Vec<(Link, Mark)>> {
        children_in(&net.space)
    }

    fn attachment(
        &self,
        net: &Net,
        sandbox: &SandboxId,
        interface: &InterfaceName,
    ) -> Result<Option<(Link, Mark)>> {
        let ours = |(_, mark): &(Link, Mark)| mark.sandbox == *sandbox && mark.interface == *interface;
        Ok(children_in(&net.space)?.into_iter().find(ours))
    }

    fn find(&self, net: &Net, plan: &Plan) -> Result<Option<(Link, Mark)>> {
        let being_made = net.attachments.making().contains(plan.host.as_str());
        let clear = || match kind(&plan.shape.network) {
            UnderlayKind::Macvlan => Ok(()),
            UnderlayKind::Bridge => port::clear(&*net.node.space.links()?, plan.shape.id(), &plan.host),
        };
        find_child(&net.space.links()?.distant(number_of(&plan.mark.sandbox)), &plan.mark, being_made, clear)
    }

    fn make(&self, net: &Net, plan: &Plan, pod: &NetNs) -> Result<Link> {
        let node = net.node.space.links()?;
        let parent = self.parent(&plan.shape.network).unwrap_or_default();
        let parent = net.node.parent(&node, parent)?;
        if plan.shape.mtu > parent.mtu {
            let message = format!(
                "link {} of node {} now has MTU {}, but Network {} was set up with {}: wait until it is set \
                 up again, or check its status",
                parent.name, net.node.config.node, parent.mtu, net.name, plan.shape.mtu
            );
            return Err(Error::new(Reason::NotReady, message));
        }
        let (room, number) = (net.space.links()?, number_of(&plan.mark.sandbox));
        let has = room.number_namespace(pod, number).map_err(internal("remember the pod's namespace"))?;
        if has != number {
            let message = format!(
                "the network namespace of sandbox {} is shared with another sandbox; each sandbox needs its \
                 own",
                plan.mark.sandbox
            );
            return Err(Error::new(Reason::Conflict, message));
        }
        let addr_gen = net.node.addr_gen(&plan.shape);
        let own = || node.addresses(Some(parent.index)).map_err(internal("read the parent's addresses"));
        let fill = |interface| Inside { net, plan, pod, interface, addr_gen }.fill(&parent, &own);
        match kind(&plan.shape.network) {
            UnderlayKind::Macvlan => {
                let new = new_child(plan, parent.index, pod)?;
                make_child(&*node, &room.distant(number), &plan.mark, &new, |created| fill(created.index))?;
            }
            UnderlayKind::Bridge => {
                let bridge = a_bridge(&net.node, &parent.name)?;
                let new = port::new_pair(plan, bridge.index, pod, addr_gen)?;
                make_child(&*node, &*node, &plan.mark, &new, |created| {
                    fill(created.peer.ok_or_else(|| {
                        let message = "the kernel did not report where the pod's end of the pair is";
                        Error::new(Reason::Internal, message)
                    })?)
                })?;
            }
        }
        let name = IfName::new(plan.mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
        let made = room.distant(number).link_by_name(&name).map_err(internal("read the new link"))?;
        made.ok_or_else(|| {
            let message =
                format!("the namespace of sandbox {} disappeared in the meantime", plan.mark.sandbox);
            Error::new(Reason::NamespaceGone, message)
        })
    }

    fn pod_side(&self, plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
        inside::all_at_once(plan, interface, addr_gen)
    }

    /// A node cannot reach its own children, and need not have an address on a bridge, so that no packet can
    /// be sent there and back: it is looked whether the kernel has all of it.
    fn verify(&self, net: &Net, plan: &Plan) -> Result<()> {
        let found = children(&net.space.links()?.distant(number_of(&plan.mark.sandbox)));
        let found = found.map_err(internal("read the new link"))?;
        let made = found.into_iter().find_map(|link| of_mark(&link, &plan.mark).map(|mark| (link, mark)));
        let Some((link, mark)) = made else {
            let message = format!("interface {} has just disappeared", plan.mark.interface);
            return Err(Error::new(Reason::Internal, message));
        };
        self.inspect(net, &link, &mark)
    }

    fn leftover(&self, net: &Net, plan: &Plan) -> Result<Option<Link>> {
        let room = net.space.links()?;
        let found = children(&room.distant(number_of(&plan.mark.sandbox)));
        let found = found.map_err(internal("look for what was created"))?;
        Ok(found.into_iter().find(|link| {
            let half = is_half_made(link, false) && link.name.as_str() == plan.mark.interface.as_str();
            half || of_mark(link, &plan.mark).is_some()
        }))
    }

    fn unmake(&self, net: &Net, link: Option<&Link>, mark: &Mark) -> Result<()> {
        let Some(link) = link else { return Ok(()) };
        let deleted = net.space.links()?.distant(number_of(&mark.sandbox)).delete_link(link.index);
        deleted.map(|_| ()).map_err(internal(format!("delete interface {} of the pod", link.name)))
    }

    fn inspect(&self, net: &Net, link: &Link, mark: &Mark) -> Result<()> {
        let addresses = net.space.links()?.distant(number_of(&mark.sandbox)).addresses(link.index);
        let addresses = addresses.map_err(internal("read the pod's addresses"))?;
        let shape = net.shape();
        let parent = shape.as_ref().and_then(|shape| self.parent(&shape.network));
        let parent = parent.and_then(|name| IfName::new(name).ok());
        let parent = match parent {
            Some(name) => {
                let found = net.node.space.links()?.link_by_name(&name);
                found.map_err(internal("look for the parent link"))?
            }
            None => None,
        };
        let parent = parent.map(|parent| parent.index);
        let unknown = Wanted { kind: None, parent, mode: None };
        let wanted = shape.as_ref().map_or(unknown, |shape| wanted(&shape.network, parent));
        let mut wrong = wanted.wrong_with(link, mark, &addresses);
        if let (Some(shape), Some(UnderlayKind::Bridge), Some(bridge)) = (&shape, wanted.kind, parent) {
            let port = net.node.space.links()?.link_by_name(&mark.host());
            let port = port.map_err(internal("look for a port of the bridge"))?;
            match port.filter(|port| port::is_host_end(port, mark)) {
                Some(port) => {
                    wrong.extend(port::like(&shape.network, bridge).fix(&port).map(|(_, wrong)| wrong));
                }
                None => wrong.push(NO_HOST_END.to_owned()),
            }
        }
        damaged(mark, &wrong)
    }

    fn collect_half_made(&self, net: &Net) -> Result<()> {
        collect_host_ends(net)?;
        // What is half made does not say whose it is: while something is being made, it may be that.
        if !net.attachments.making().is_empty() {
            return Ok(());
        }
        let room = net.space.links()?;
        for number in room.numbered_namespaces().map_err(internal("list the namespaces of pods"))? {
            let pod = room.distant(number);
            let links = children(&pod).map_err(internal("list links of a pod"))?;
            for link in links.into_iter().filter(|link| is_half_made(link, false)) {
                tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
                pod.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
            }
        }
        Ok(())
    }

    fn host_end(&self, net: &Net, link: &Link) -> HostEnd {
        let mark = link.owner().and_then(Mark::parse).filter(|_| link.kind == name_of(UnderlayKind::Bridge));
        let Some(mark) = mark else {
            return HostEnd { name: String::new(), index: 0, netns_path: None, netns_inode: 0 };
        };
        HostEnd {
            name: mark.host().to_string(),
            index: link.link.unwrap_or_default(),
            netns_path: None,
            netns_inode: net.node.space.namespace().id().ino,
        }
    }

    fn purge(&self, space: &NamespaceSockets) -> Result<usize> {
        let children = children_in(space)?;
        let room = space.links()?;
        for (link, mark) in &children {
            let deleted = room.distant(number_of(&mark.sandbox)).delete_link(link.index);
            deleted.map_err(internal("delete an interface of a pod"))?;
        }
        Ok(children.len())
    }
}

/// What is wrong with a pod's end whose other end is not found.
const NO_HOST_END: &str = "its other end on the node has lost its name or its mark";

/// The link that a Network is on, which must be a bridge.
fn a_bridge(node: &Node, name: impl std::fmt::Display) -> Result<Link> {
    let name = IfName::new(name.to_string()).map_err(internal("name the parent link"))?;
    let link = node.space.links()?.link_by_name(&name).map_err(internal(format!("look for link {name}")))?;
    link.filter(|link| link.kind == "bridge").ok_or_else(|| {
        let message = format!(
            "link {name} of node {} is not a bridge: name one, or use kind: Macvlan",
            node.config.node
        );
        Error::new(Reason::Invalid, message)
    })
}

/// Takes host ends away whose making was cut off before the pod's end got its mark, or whose mark is gone.
fn collect_host_ends(net: &Net) -> Result<()> {
    let Some(network) = network_of(&net.space)? else { return Ok(()) };
    let node = net.node.space.links()?;
    // In this order: what is there and whole afterwards was being made, or had its mark, when it was listed.
    let there = port::host_ends(&*node, network)?;
    if there.is_empty() {
        return Ok(());
    }
    let mut keep = net.attachments.making().clone();
    keep.extend(children_in(&net.space)?.into_iter().map(|(_, mark)| mark.host().to_string()));
    port::collect(&*node, &there, &keep)
}

/// What interfaces of a Network are to be.
fn wanted(network: &Network, parent: Option<u32>) -> Wanted {
    Wanted { kind: Some(kind(network)), parent, mode: mode(network) }
}

/// The child to be made for a plan.
fn new_child<'a>(plan: &Plan, parent: u32, pod: &'a NetNs) -> Result<NewLink<'a>> {
    let name = IfName::new(plan.mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
    let mode = mode(&plan.shape.network).unwrap_or(MacvlanMode::Bridge);
    let mut new = NewLink::macvlan(name, Macvlan { parent, mode, namespace: Some(pod) });
    (new.mac, new.mtu) = (Some(plan.mark.mac), Mtu::new(plan.shape.mtu).ok());
    Ok(new)
}

/// Makes an interface, and has `fill` give it all that it is to have. If anything fails, nothing of it is
/// left: `place` is where its index is known, the pod's namespace or the node's.
fn make_child(
    node: &dyn Links,
    place: &dyn LinkList,
    mark: &Mark,
    new: &NewLink<'_>,
    fill: impl FnOnce(Created) -> Result<()>,
) -> Result<Created> {
    let created = node.create_link(new).map_err(|error| match error {
        error if error.is_exists() => taken(mark).because(error),
        error if error.is_busy() => {
            let message = "the parent link cannot have macvlan children: remove it from its bridge or bond, \
                remove its ipvlan interfaces, or name another parent";
            Error::new(Reason::Conflict, message).because(error)
        }
        error => internal("create the pod's interface")(error),
    })?;
    let Err(error) = fill(created) else { return Ok(created) };
    if let Err(left) = place.delete_link(created.index) {
        let left = chain(&left);
        tracing::error!(error = left, link = %new.name, "a failed attachment could not be undone");
    }
    Err(error)
}

/// What interfaces of the Network are.
fn kind(network: &Network) -> UnderlayKind {
    network.underlay.as_ref().map(|underlay| underlay.kind).unwrap_or_default()
}

/// How the Network wants children to reach each other.
fn mode(network: &Network) -> Option<MacvlanMode> {
    network.underlay.as_ref().map(|underlay| match underlay.mode {
        UnderlayMode::Bridge => MacvlanMode::Bridge,
        UnderlayMode::Private => MacvlanMode::Private,
        UnderlayMode::Vepa => MacvlanMode::Vepa,
    })
}

#[cfg(test)]
#[path = "underlay_tests.rs"]
mod tests;
