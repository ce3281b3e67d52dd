//! Interfaces on a segment of others, as they are found again: by the number of the pod's namespace, and by
//! the mark on the pod's end. Nothing else tells whose one is.

use knit_kernel::IfName;
use knit_kernel::addr::Address;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Details, Link, MacvlanMode};
use knit_kernel::links::LinkList;
use knit_kernel::owner;
use knit_runtime::{Error, Reason, Result, SandboxId, UnderlayKind};
use knit_types::fnv1a;

use crate::fail::internal;
use crate::mark::Mark;
use crate::space::NamespaceSockets;
use crate::topology::{NAMESPACE, lo};

/// What an interface is to be besides what its mark says; what is not known is not compared.
#[derive(Debug)]
pub(super) struct Wanted {
    pub kind: Option<UnderlayKind>,
    pub parent: Option<u32>,
    /// With [`UnderlayKind::Macvlan`].
    pub mode: Option<MacvlanMode>,
}

impl Wanted {
    /// What is wrong with the pod's end, in words.
    pub fn wrong_with(&self, link: &Link, mark: &Mark, addresses: &[Address]) -> Vec<String> {
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
        if let Some(kind) = self.kind.map(name_of).filter(|kind| *kind != link.kind) {
            wrong.push(format!("it is a {} and not a {kind}", link.kind));
        }
        if link.kind == name_of(UnderlayKind::Macvlan) {
            if self.parent.is_some() && link.link != self.parent {
                wrong.push("it is a child of another link".to_owned());
            }
            if let (Some(wanted), Details::Macvlan(found)) = (self.mode, &link.details)
                && wanted != *found
            {
                wrong.push(format!("its mode is {found} and not {wanted}"));
            }
        }
        let lost = mark.addresses.iter().filter(|net| !addresses.iter().any(|there| there.address == **net));
        wrong.extend(lost.map(|net| format!("it has lost {net}")));
        wrong
    }
}

/// The kernel's word for the pod's end.
pub(super) fn name_of(kind: UnderlayKind) -> &'static str {
    match kind {
        UnderlayKind::Macvlan => "macvlan",
        UnderlayKind::Bridge => "veth",
    }
}

/// The number that a pod's namespace has in the namespace of its Network. It follows from the sandbox, so
/// that what a mark says about whose it is can be believed: the mark is the pod's to change, the number is
/// not.
pub(super) fn number_of(sandbox: &SandboxId) -> i32 {
    i32::try_from(fnv1a(sandbox.as_str().bytes()) & 0x7fff_ffff).expect("31 bits fit")
}

/// All links of a namespace that can be ours, in whichever state.
pub(super) fn children(pod: &dyn LinkList) -> knit_kernel::Result<Vec<Link>> {
    let mut all = Vec::new();
    for kind in UnderlayKind::ALL {
        all.extend(pod.links(&LinkFilter { kind: Some(name_of(kind)), ..LinkFilter::default() })?);
    }
    Ok(all)
}

/// The number of the Network whose namespace this is.
pub(super) fn network_of(space: &NamespaceSockets) -> Result<Option<u32>> {
    let says = space.links()?.link_by_name(&lo()).map_err(internal("read the Network's namespace"))?;
    let network = says.as_ref().and_then(|lo| lo.owner()?.strip_prefix(NAMESPACE)?.split(' ').nth(1));
    Ok(network.and_then(|id| id.parse().ok()))
}

/// The attachments of the Network whose namespace this is.
pub(super) fn children_in(space: &NamespaceSockets) -> Result<Vec<(Link, Mark)>> {
    let Some(network) = network_of(space)? else { return Ok(Vec::new()) };
    let room = space.links()?;
    let mut all = Vec::new();
    for number in room.numbered_namespaces().map_err(internal("list the namespaces of pods"))? {
        for link in children(&room.distant(number)).map_err(internal("list links of a pod"))? {
            let mark = link.owner().and_then(Mark::parse);
            let ours = |mark: &Mark| mark.network == Some(network) && number_of(&mark.sandbox) == number;
            all.extend(mark.filter(ours).map(|mark| (link, mark)));
        }
    }
    Ok(all)
}

/// The mark of a link that is this attachment's.
pub(super) fn of_mark(link: &Link, mark: &Mark) -> Option<Mark> {
    let same = |there: &Mark| {
        (&there.sandbox, &there.interface, there.network) == (&mark.sandbox, &mark.interface, mark.network)
    };
    link.owner().and_then(Mark::parse).filter(same)
}

/// Whether a link is a macvlan child that a killed runtime did not finish: the kernel takes a link's group
/// when it makes it, and its mark only afterwards. Of a pair, the host end tells (`port`).
pub(super) fn is_half_made(link: &Link, being_made: bool) -> bool {
    let is_child = link.kind == name_of(UnderlayKind::Macvlan);
    is_child && link.alias.is_none() && link.group == owner::GROUP && !being_made
}

/// Looks what is there in a pod's namespace in the place of an attachment. What is half made goes, and
/// `clear` takes away what is left of it elsewhere; what is another's is a conflict, and stays.
pub(super) fn find_child(
    pod: &dyn LinkList,
    mark: &Mark,
    being_made: bool,
    clear: impl FnOnce() -> Result<()>,
) -> Result<Option<(Link, Mark)>> {
    let failed = || internal::<knit_kernel::Error>("look for the attachment");
    // By its mark, since the pod may have renamed it.
    let there = children(pod).map_err(failed())?;
    let ours = there.into_iter().find_map(|link| of_mark(&link, mark).map(|mark| (link, mark)));
    if ours.is_some() {
        return Ok(ours);
    }
    if !being_made {
        clear()?;
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

pub(super) fn taken(mark: &Mark) -> Error {
    let message = format!(
        "sandbox {} already has an interface {} that Knit did not create: use another name",
        mark.sandbox, mark.interface
    );
    Error::new(Reason::Conflict, message)
}
