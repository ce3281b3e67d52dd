//! Pod set-up: one interface, all of it or nothing.
//!
//! Order: rules first, so that the port is never without them; then the pair of links in one message, the
//! pod's end directly in its namespace; then the pod's side and the router's side, each in one batch; then a
//! packet there and back for each address. If anything fails, all of it is taken away again.

use knit_kernel::link::Link;
use knit_kernel::netns::NetNs;
use knit_runtime::{AttachRequest, Attachment, Change, Error, Reason, Result};
use knit_types::sync::ReadWrite;

use crate::attachments::Known;
use crate::fail::chain;
use crate::host_ports;
use crate::listeners;
use crate::mark::Mark;
use crate::moves::MovingSubject;
use crate::networks::{Net, Networks};
use crate::plan::Plan;
use crate::watchers::Watchers;

/// Makes one interface, or finds it there as asked for.
pub(crate) fn attach(
    networks: &Networks,
    watchers: &Watchers,
    request: &AttachRequest,
) -> Result<Attachment> {
    let about = |error: Error| error.on(&request.network).at(request.interface.as_str());
    let (net, shape) = networks.ready(&request.network).map_err(about)?;
    let pod = open_pod(request).map_err(about)?;
    host_ports::check(request, net.node.config.vxlan_port).map_err(about)?;
    let plan = Plan::of(&shape, request, pod.id().ino).map_err(about)?;
    // Until all of it is known: what is compared meanwhile is half made.
    let _moving = net.moves.begin(MovingSubject::port(&net.name, &plan.mark));
    let had_ipv6_on = has_ipv6_on(&net, &plan);
    // Asked first: replacing a damaged one forgets it.
    let before = known_as(&net, &plan);
    // What was there and cannot be made again is lost, and stays known as that.
    let failed = |error: Error| {
        let still = before.clone().map(|known| (plan.host.to_string(), known));
        net.attachments.known().extend(still);
        about(error)
    };
    let (link, new) = {
        let _together = net.gate.reading();
        match existing(&net, &plan, request).map_err(about)? {
            Some(link) => {
                host_ports::open_again(&net.node, &net.attachments, &plan, request).map_err(about)?;
                (link, false)
            }
            None => {
                // A pod keeps the ports that it was given: a program that came later is no reason to refuse
                // the repair.
                if before.is_none() && !net.attachments.has_lost(&plan.host, &request.ports) {
                    listeners::check(request, net.node.space.namespace()).map_err(about)?;
                }
                (make(&net, &plan, request, &pod).map_err(failed)?, true)
            }
        }
    };
    let attachment = answer(&net, &plan, request, &link);
    if new {
        // Without the gate: a pod that does not answer must not hold up the Network.
        shape.driver().verify(&net, &plan).map_err(|error| {
            let _together = net.gate.reading();
            undo(&net, &plan);
            failed(error)
        })?;
        watchers.tell(Change::Added(attachment.clone()));
    }
    let known = Known {
        network: net.name.clone(),
        mark: plan.mark.clone(),
        ports: request.ports.clone(),
        answer: Some(attachment.clone()),
        netns: Some(request.netns.clone()),
        mtu: link.mtu,
        ipv6_on: net.attachments.take_switched_on(&plan.host) || (!new && had_ipv6_on),
    };
    net.attachments.known().insert(plan.host.to_string(), known);
    net.attachments.forget_lost(&plan.host);
    Ok(attachment)
}

/// What is known of this attachment, if it was made here before, with the same ports of the node.
fn known_as(net: &Net, plan: &Plan) -> Option<Known> {
    let known = net.attachments.known();
    known.get(plan.host.as_str()).filter(|known| known.mark.digest == plan.mark.digest).cloned()
}

/// Whether IPv6 was switched on for this attachment when it was made.
fn has_ipv6_on(net: &Net, plan: &Plan) -> bool {
    net.attachments.known().get(plan.host.as_str()).is_some_and(|known| known.ipv6_on)
}

/// What is there under this attachment's name: as asked for, or in the way, or of a sandbox that is no more.
fn existing(net: &Net, plan: &Plan, request: &AttachRequest) -> Result<Option<Link>> {
    let conflict = |message: String| Err(Error::new(Reason::Conflict, message));
    let driver = plan.shape.driver();
    let Some((link, there)) = driver.find(net, plan)? else { return Ok(None) };
    let whole = link.up && there.inode == plan.mark.inode;
    if whole && there.digest != plan.mark.digest {
        return conflict(format!(
            "sandbox {} already has interface {}, with other properties: detach it first",
            there.sandbox, there.interface
        ));
    }
    if whole && driver.inspect(net, &link, &there).is_ok() {
        return Ok(Some(link));
    }
    let interface = &request.interface;
    tracing::info!(sandbox = %there.sandbox, %interface, "replacing a damaged attachment");
    unmake(net, Some(&link), &there)?;
    Ok(None)
}

/// Makes it, and takes everything away again if it does not work.
fn make(net: &Net, plan: &Plan, request: &AttachRequest, pod: &NetNs) -> Result<Link> {
    net.attachments.making().insert(plan.host.to_string());
    let opened = host_ports::open(&net.node, plan, request);
    let made = opened.and_then(|()| plan.shape.driver().make(net, plan, pod));
    net.attachments.making().remove(plan.host.as_str());
    if made.is_err() {
        net.attachments.take_switched_on(&plan.host);
        undo(net, plan);
    }
    made
}

/// Takes away what was made for a request that failed.
fn undo(net: &Net, plan: &Plan) {
    let left = plan.shape.driver().leftover(net, plan);
    let undone = left.and_then(|link| unmake(net, link.as_ref(), &plan.mark));
    if let Err(error) = undone {
        tracing::error!(error = chain(&error), host = %plan.host, "a failed attachment could not be undone");
    }
}

/// Takes away all that an attachment has: its link first, so that nothing more is sent, then what allowed it
/// to.
pub(crate) fn unmake(net: &Net, link: Option<&Link>, mark: &Mark) -> Result<()> {
    let _moving = net.moves.begin(MovingSubject::port(&net.name, mark));
    let host = mark.host();
    mark.driver().unmake(net, link, mark)?;
    if mark.ports {
        host_ports::close_of(&net.node, &host)?;
    }
    net.attachments.known().remove(host.as_str());
    Ok(())
}

/// The answer.
fn answer(net: &Net, plan: &Plan, request: &AttachRequest, link: &Link) -> Attachment {
    Attachment {
        pod: request.pod.clone(),
        network: request.network.clone(),
        interface: request.interface.clone(),
        addresses: plan.addresses.clone(),
        mac: plan.mark.mac,
        // That which it was made with, if the Network's has changed since.
        mtu: link.mtu,
        routes: plan.routes.clone(),
        dns: request.dns.clone(),
        host: plan.mark.driver().host_end(net, link),
        pod_netns_inode: plan.mark.inode,
        ports: request.ports.clone(),
    }
}

fn open_pod(request: &AttachRequest) -> Result<NetNs> {
    NetNs::open(&request.netns).map_err(|error| {
        let message = format!(
            "cannot use the network namespace {} of sandbox {}",
            request.netns.display(),
            request.pod.sandbox
        );
        Error::new(Reason::NamespaceGone, message).because(error)
    })
}
