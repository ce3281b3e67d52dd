//! Networks on a link of the node: each pod has a macvlan child of that link, and nothing of ours is in
//! between.
//!
//! Such a Network has no router, no tunnel and no rules. Its namespace on the node is empty: it has numbers
//! for the namespaces of the Network's pods, by which their interfaces are found, compared and deleted, also
//! by a runtime that begins later and is told no paths. A pod's namespace gets its number before anything is
//! made in it, and a child is made in the pod's namespace at once, so that a kill leaves nothing on the node
//! and nothing that is not found.

mod inside;

use std::sync::Arc;

use knit_kernel::addr::Address;
use knit_kernel::handle::{Created, LinkFilter};
use knit_kernel::link::{AddrGenMode, Change, Details, Link, Macvlan, MacvlanMode, NewLink};
use knit_kernel::links::{LinkList, Links};
use knit_kernel::netns::NetNs;
use knit_kernel::{IfName, Mtu, Op, owner};
use knit_runtime::{
    AttachRequest, Error, HostEnd, InterfaceName, Network, Reason, Result, SandboxId, Topology, UnderlayMode,
};
use knit_types::fnv1a;
use knit_types::sync::ReadWrite;

use self::inside::Inside;
use super::{Driver, NAMESPACE, lo};
use crate::attach::Plan;
use crate::core::Core;
use crate::fail::{chain, internal};
use crate::mark::Mark;
use crate::moves::{Comparing, InMotion};
use crate::networks::Net;
use crate::shape::{Facts, Home, Shape};
use crate::space::Space;
use crate::survey::{Found, Looked};

/// Networks on a link of the node.
#[derive(Debug)]
pub(super) struct Underlay;

/// The kernel's word for a child.
const KIND: &str = "macvlan";

impl Driver for Underlay {
    fn topology(&self) -> Topology {
        Topology::Underlay
    }

    fn letter(&self) -> Option<char> {
        Some('u')
    }

    fn check(&self, network: &Network, home: Home) -> Result<(), String> {
        let name = &network.name;
        if home == Home::Node {
            return Err(format!("Network {name} uses the node's own namespace and can only be Layer3"));
        }
        if network.primary {
            return Err(format!(
                "Network {name} is on a link of the node, without Services and policies, and cannot be a \
                 primary Network: remove primaryFor"
            ));
        }
        match &network.underlay {
            None => Err(format!("Network {name} has no parent link on this node: see spec.underlay.parents")),
            Some(underlay) => IfName::new(underlay.parent.as_str()).map(|_| ()).map_err(|error| {
                format!("parent {:?} of Network {name} is not the name of a link: {error}", underlay.parent)
            }),
        }
    }

    fn parent<'a>(&self, network: &'a Network) -> Option<&'a str> {
        network.underlay.as_ref().map(|underlay| underlay.parent.as_str())
    }

    fn set_up(&self, core: &Core, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        let name = &shape.network.name;
        let net = match core.networks.get(name)? {
            Some(net) => net,
            None => core.networks.adopt(name, core.make_namespace(name)?, shape.driver()),
        };
        let _alone = net.gate.writing();
        net.keep_mounted()?;
        let says = Some(owner::alias(&format!("{NAMESPACE}u {}", shape.id())));
        let handle = net.space.links()?;
        let there = handle.link_by_name(&lo()).map_err(internal("read the Network's namespace"))?;
        if there.is_none_or(|there| there.alias != says) {
            let change = Change { alias: says, ..Change::named(lo()) };
            handle.apply(&[change.into()]).map_err(internal("mark the Network's namespace"))?;
        }
        net.set_shape(Arc::clone(shape), facts);
        Ok(())
    }

    /// There is nothing that would keep it apart: who is on the wire decides who hears what.
    fn hold_closed(&self, _: &Core, _: &Network, _: Home) -> Result<()> {
        Ok(())
    }

    fn take_down(&self, _: &Core, net: &Net) -> Result<()> {
        NetNs::delete(&net.path).map(|_| ()).map_err(internal("delete the Network's namespace"))
    }

    fn compare(
        &self,
        core: &Core,
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
        let wanted = Wanted { parent: parent.map(|parent| parent.index), mode: mode(&shape.network) };
        let mut damaged: Vec<Mark> = Vec::new();
        for (link, mark, addresses) in &children {
            let wrong = wanted.wrong_with(link, mark, addresses);
            if !wrong.is_empty() {
                tracing::debug!(sandbox = %mark.sandbox, wrong = wrong.join("; "), "a damaged interface");
                damaged.push(mark.clone());
            }
        }
        // Those that went with their parent, too, or that somebody deleted inside the pod.
        let is_there = |host: &str| children.iter().any(|(_, mark, _)| mark.host().as_str() == host);
        for (host, known) in core.attachments.known().iter() {
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

    fn find(&self, core: &Core, net: &Net, plan: &Plan) -> Result<Option<(Link, Mark)>> {
        let being_made = core.attachments.making().contains(plan.host.as_str());
        find_child(&net.space.links()?.distant(number_of(&plan.mark.sandbox)), &plan.mark, being_made)
    }

    fn make(&self, core: &Core, net: &Net, plan: &Plan, _: &AttachRequest, pod: &NetNs) -> Result<Link> {
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
        let new = new_child(plan, parent.index, pod)?;
        let inside = room.distant(number);
        let addr_gen = net.node.addr_gen(&plan.shape);
        make_child(&*node, &inside, &plan.mark, &new, |created| {
            let own = || node.addresses(Some(parent.index)).map_err(internal("read the parent's addresses"));
            Inside { core, plan, pod, interface: created.index, addr_gen }.fill(&parent, &own)
        })?;
        let made = inside.link_by_name(&new.name).map_err(internal("read the new link"))?;
        made.ok_or_else(|| {
            let message =
                format!("the namespace of sandbox {} disappeared in the meantime", plan.mark.sandbox);
            Error::new(Reason::NamespaceGone, message)
        })
    }

    fn pod_side(&self, plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
        inside::all_at_once(plan, interface, addr_gen)
    }

    /// A node cannot reach its own children, so that no packet can be sent there and back: it is looked
    /// whether the kernel has all of it.
    fn verify(&self, net: &Net, plan: &Plan) -> Result<()> {
        let found = net.space.links()?.distant(number_of(&plan.mark.sandbox)).links(&children());
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
        let found = room.distant(number_of(&plan.mark.sandbox)).links(&children());
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
        let mode = shape.as_ref().and_then(|shape| mode(&shape.network));
        let wrong =
            Wanted { parent: parent.map(|parent| parent.index), mode }.wrong_with(link, mark, &addresses);
        if wrong.is_empty() {
            return Ok(());
        }
        let message = format!(
            "interface {} of sandbox {} differs from what was created ({}): detach and attach it again",
            mark.interface,
            mark.sandbox,
            wrong.join("; ")
        );
        Err(Error::new(Reason::Damaged, message))
    }

    fn collect_half_made(&self, core: &Core, net: &Net) -> Result<()> {
        // What is half made does not say whose it is: while something is being made, it may be that.
        if !core.attachments.making().is_empty() {
            return Ok(());
        }
        let room = net.space.links()?;
        for number in room.numbered_namespaces().map_err(internal("list the namespaces of pods"))? {
            let pod = room.distant(number);
            let links = pod.links(&children()).map_err(internal("list links of a pod"))?;
            for link in links.into_iter().filter(|link| is_half_made(link, false)) {
                tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
                pod.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
            }
        }
        Ok(())
    }

    fn host_end(&self, _: &Net, _: &Link) -> HostEnd {
        HostEnd { name: String::new(), index: 0, netns_path: None, netns_inode: 0 }
    }

    fn purge(&self, space: &Space) -> Result<usize> {
        let children = children_in(space)?;
        let room = space.links()?;
        for (link, mark) in &children {
            let deleted = room.distant(number_of(&mark.sandbox)).delete_link(link.index);
            deleted.map_err(internal("delete an interface of a pod"))?;
        }
        Ok(children.len())
    }
}

/// What a child is to be besides what its mark says; what is not known is not compared.
#[derive(Debug)]
struct Wanted {
    parent: Option<u32>,
    mode: Option<MacvlanMode>,
}

impl Wanted {
    /// What is wrong with a child, in words.
    fn wrong_with(&self, link: &Link, mark: &Mark, addresses: &[Address]) -> Vec<String> {
        let mut wrong = Vec::new();
        if link.name.as_str() != mark.interface.as_str() {
            wrong.push(format!("it is named {}", link.name));
        }
        if !link.up {
            wrong.push("it is down".to_owned());
        }
        if link.mac != Some(mark.mac) {
            wrong.push("it has another MAC".to_owned());
        }
        if self.parent.is_some() && link.link != self.parent {
            wrong.push("it is a child of another link".to_owned());
        }
        if let (Some(wanted), Details::Macvlan(found)) = (self.mode, &link.details)
            && wanted != *found
        {
            wrong.push(format!("its mode is {found} and not {wanted}"));
        }
        let lost = mark.addresses.iter().filter(|net| !addresses.iter().any(|there| there.address == **net));
        wrong.extend(lost.map(|net| format!("it has lost {net}")));
        wrong
    }
}

/// The number that a pod's namespace has in the namespace of its Network. It follows from the sandbox, so
/// that what a mark says about whose it is can be believed: the mark is the pod's to change, the number is
/// not.
fn number_of(sandbox: &SandboxId) -> i32 {
    i32::try_from(fnv1a(sandbox.as_str().bytes()) & 0x7fff_ffff).expect("31 bits fit")
}

/// All children, in whichever state.
fn children() -> LinkFilter<'static> {
    LinkFilter { kind: Some(KIND), ..LinkFilter::default() }
}

/// The attachments of the Network whose namespace this is.
fn children_in(space: &Space) -> Result<Vec<(Link, Mark)>> {
    let room = space.links()?;
    let says = room.link_by_name(&lo()).map_err(internal("read the Network's namespace"))?;
    let network = says.as_ref().and_then(|lo| lo.owner()?.strip_prefix(NAMESPACE)?.split(' ').nth(1));
    let Some(network) = network.and_then(|id| id.parse().ok()) else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for number in room.numbered_namespaces().map_err(internal("list the namespaces of pods"))? {
        let links = room.distant(number).links(&children()).map_err(internal("list links of a pod"))?;
        for link in links {
            let mark = link.owner().and_then(Mark::parse);
            let ours = |mark: &Mark| mark.network == Some(network) && number_of(&mark.sandbox) == number;
            all.extend(mark.filter(ours).map(|mark| (link, mark)));
        }
    }
    Ok(all)
}

/// The mark of a child that is this attachment's.
fn of_mark(link: &Link, mark: &Mark) -> Option<Mark> {
    let same = |there: &Mark| {
        (&there.sandbox, &there.interface, there.network) == (&mark.sandbox, &mark.interface, mark.network)
    };
    link.owner().and_then(Mark::parse).filter(same)
}

/// Whether a link is a child that a killed runtime did not finish: the kernel takes a link's group when it
/// makes it, and its mark only afterwards.
fn is_half_made(link: &Link, being_made: bool) -> bool {
    link.kind == KIND && link.alias.is_none() && link.group == owner::GROUP && !being_made
}

/// Looks what is there in a pod's namespace in the place of an attachment. What is half made goes; what is
/// another's is a conflict, and stays.
fn find_child(pod: &dyn LinkList, mark: &Mark, being_made: bool) -> Result<Option<(Link, Mark)>> {
    let failed = || internal::<knit_kernel::Error>("look for the attachment");
    // By its mark, since the pod may have renamed it.
    let there = pod.links(&children()).map_err(failed())?;
    let ours = there.into_iter().find_map(|link| of_mark(&link, mark).map(|mark| (link, mark)));
    if ours.is_some() {
        return Ok(ours);
    }
    let name = IfName::new(mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
    let Some(link) = pod.link_by_name(&name).map_err(failed())? else { return Ok(None) };
    if is_half_made(&link, being_made) {
        tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
        pod.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
        return Ok(None);
    }
    Err(taken(mark))
}

/// The child to be made for a plan.
fn new_child<'a>(plan: &Plan, parent: u32, pod: &'a NetNs) -> Result<NewLink<'a>> {
    let name = IfName::new(plan.mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
    let mode = mode(&plan.shape.network).unwrap_or(MacvlanMode::Bridge);
    let mut new = NewLink::macvlan(name, Macvlan { parent, mode, namespace: Some(pod) });
    (new.mac, new.mtu) = (Some(plan.mark.mac), Mtu::new(plan.shape.mtu).ok());
    Ok(new)
}

/// Makes a child in the pod's namespace, and has `fill` give it all that it is to have. If anything fails,
/// nothing of it is left.
fn make_child(
    node: &dyn Links,
    pod: &dyn LinkList,
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
    if let Err(left) = pod.delete_link(created.index) {
        let left = chain(&left);
        tracing::error!(error = left, link = %new.name, "a failed attachment could not be undone");
    }
    Err(error)
}

fn taken(mark: &Mark) -> Error {
    let message = format!(
        "sandbox {} already has an interface {} that Knit did not create: use another name",
        mark.sandbox, mark.interface
    );
    Error::new(Reason::Conflict, message)
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
