//! Taking attachments away, one by one or all whose owner is gone.

use std::sync::Arc;

use knit_kernel::link::Link;
use knit_runtime::{Attachment, Change, InterfaceName, NetworkName, Pod, Result, SandboxId};
use knit_types::sync::ReadWrite;

use crate::attach::unmake;
use crate::attachments::Known;
use crate::host_ports;
use crate::inspect::describe;
use crate::mark::{Mark, host_name};
use crate::moves::MovingSubject;
use crate::networks::{Net, Networks};
use crate::watchers::Watchers;

/// Takes one interface away, or all of a sandbox. What is gone already is fine.
pub(crate) fn detach(
    networks: &Networks,
    watchers: &Watchers,
    pod: &Pod,
    interface: Option<&InterfaceName>,
) -> Result<()> {
    for (net, link, mark) in of_sandbox(networks, &pod.sandbox, interface)? {
        let _together = net.gate.reading();
        let attachment = describe(&net, &link, &mark);
        unmake(&net, Some(&link), &mark)?;
        watchers.tell(Change::Removed(attachment));
    }
    forget_gone(networks, watchers, &pod.sandbox, interface)
}

/// What is known of a sandbox and has no link any more (it went with the pod's namespace): takes the rest
/// away.
fn forget_gone(
    networks: &Networks,
    watchers: &Watchers,
    sandbox: &SandboxId,
    interface: Option<&InterfaceName>,
) -> Result<()> {
    let gone: Vec<Known> = {
        let known = networks.attachments.known();
        let theirs = known.values().filter(|known| {
            known.mark.sandbox == *sandbox
                && interface.is_none_or(|interface| known.mark.interface == *interface)
        });
        theirs.cloned().collect()
    };
    for known in gone {
        let _moving = networks.moves.begin(MovingSubject::port(&known.network, &known.mark));
        match networks.get(&known.network)? {
            Some(net) => {
                let _together = net.gate.reading();
                unmake(&net, None, &known.mark)?;
            }
            None => {
                let host = host_name(&known.mark.sandbox, &known.mark.interface);
                host_ports::close_of(&networks.node, &host)?;
                networks.attachments.known().remove(host.as_str());
            }
        }
        if let Some(answer) = known.answer {
            watchers.tell(Change::Removed(answer));
        }
    }
    Ok(())
}

/// A sandbox's attachments, in whichever Network.
pub(crate) fn of_sandbox(
    networks: &Networks,
    sandbox: &SandboxId,
    interface: Option<&InterfaceName>,
) -> Result<Vec<(Arc<Net>, Link, Mark)>> {
    let mut found = Vec::new();
    // What is known is looked for by name; for a sandbox that is not, everything is looked through.
    let known: Vec<(NetworkName, InterfaceName)> = {
        let known = networks.attachments.known();
        let theirs = known.values().filter(|known| known.mark.sandbox == *sandbox);
        theirs.map(|known| (known.network.clone(), known.mark.interface.clone())).collect()
    };
    if interface.is_none() && !known.is_empty() {
        for (network, interface) in known {
            let Some(net) = networks.get(&network)? else { continue };
            let ours = net.driver().attachment(&net, sandbox, &interface)?;
            found.extend(ours.map(|(link, mark)| (net, link, mark)));
        }
        return Ok(found);
    }
    for net in networks.all()? {
        let ours: Vec<(Link, Mark)> = match interface {
            Some(interface) => net.driver().attachment(&net, sandbox, interface)?.into_iter().collect(),
            None => net.list()?,
        };
        let ours = ours.into_iter().filter(|(_, mark)| mark.sandbox == *sandbox);
        found.extend(ours.map(|(link, mark)| (Arc::clone(&net), link, mark)));
    }
    Ok(found)
}

/// Removes all attachments whose sandbox is not in the list.
pub(crate) fn collect_garbage(
    networks: &Networks,
    watchers: &Watchers,
    keep: &[SandboxId],
) -> Result<Vec<Attachment>> {
    let mut removed = Vec::new();
    for net in networks.all()? {
        let _together = net.gate.reading();
        net.driver().collect_half_made(&net)?;
        for (link, mark) in net.list()? {
            if !keep.contains(&mark.sandbox) {
                let attachment = describe(&net, &link, &mark);
                unmake(&net, Some(&link), &mark)?;
                watchers.tell(Change::Removed(attachment.clone()));
                removed.push(attachment);
            }
        }
    }
    let gone: Vec<SandboxId> = {
        let known = networks.attachments.known();
        known.values().map(|known| known.mark.sandbox.clone()).filter(|id| !keep.contains(id)).collect()
    };
    for sandbox in gone {
        forget_gone(networks, watchers, &sandbox, None)?;
    }
    host_ports::sweep(networks)?;
    Ok(removed)
}
