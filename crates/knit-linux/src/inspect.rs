//! Looking at what is there: listing, checking, status.

use std::collections::BTreeMap;
use std::path::Path;

use knit_kernel::link::Link;
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, IfName};
use knit_runtime::{
    Address, Attachment, Error, InterfaceName, NetworkStatus, Pod, PortMapping, Reason, Result, SandboxId,
    Status,
};

use crate::detach::of_sandbox;
use crate::fail::internal;
use crate::host_ports;
use crate::mark::Mark;
use crate::networks::{Net, Networks};
use crate::shape::RouterHome;

/// All attachments, or those of one sandbox.
pub(crate) fn list(networks: &Networks, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
    let (mut attachments, mut ports) = (Vec::new(), None);
    for net in networks.all()? {
        for (link, mark) in net.list()? {
            if sandbox.is_none_or(|sandbox| mark.sandbox == *sandbox) {
                attachments.push(describe_with_ports(&net, (&link, &mark), &mut ports)?);
            }
        }
    }
    Ok(attachments)
}

/// The same as [`describe`], with the ports of the node that lead to it: where another process made
/// it, the rules tell. They are read for the first that needs them.
pub(crate) fn describe_with_ports(
    net: &Net,
    (link, mark): (&Link, &Mark),
    in_rules: &mut Option<BTreeMap<String, Vec<PortMapping>>>,
) -> Result<Attachment> {
    let mut attachment = describe(net, link, mark);
    if mark.ports && attachment.ports.is_empty() {
        let in_rules = match in_rules {
            Some(ports) => ports,
            None => in_rules.insert(host_ports::by_host(&net.node)?),
        };
        attachment.ports = in_rules.remove(mark.host().as_str()).unwrap_or_default();
    }
    Ok(attachment)
}

/// An attachment from its mark, with what was answered if this runtime made it.
pub(crate) fn describe(net: &Net, link: &Link, mark: &Mark) -> Attachment {
    let host = mark.driver().host_end(net, link);
    if let Some(answer) =
        net.attachments.known().get(mark.host().as_str()).and_then(|known| known.answer.as_ref())
        && answer.pod.sandbox == mark.sandbox
        && answer.interface == mark.interface
        && answer.pod_netns_inode == mark.inode
    {
        return Attachment { host, ..answer.clone() };
    }
    let shape = net.shape();
    let gateway = |ip| shape.as_ref().and_then(|shape| shape.network.gateway_for(ip));
    let routes = shape.as_ref().map(|shape| shape.pod_routes(mark.default_route, &[]));
    let addresses = mark.addresses.iter().map(|net| Address { net: *net, gateway: gateway(net.addr()) });
    Attachment {
        pod: Pod { sandbox: mark.sandbox.clone(), namespace: None, name: None, uid: None },
        network: net.name.clone(),
        interface: mark.interface.clone(),
        addresses: addresses.collect(),
        mac: mark.mac,
        mtu: link.mtu,
        routes: routes.unwrap_or_default(),
        dns: knit_runtime::Dns::default(),
        host,
        pod_netns_inode: mark.inode,
        ports: Vec::new(),
    }
}

/// Looks whether attachments are as they were made.
pub(crate) fn check(
    networks: &Networks,
    pod: &Pod,
    netns: Option<&Path>,
    interface: Option<&InterfaceName>,
) -> Result<()> {
    let found = of_sandbox(networks, &pod.sandbox, interface)?;
    if found.is_empty() {
        let what = interface.map_or_else(|| "no interface".to_owned(), |name| format!("no interface {name}"));
        let message = format!("sandbox {} has {what} of Knit: attach it again", pod.sandbox);
        return Err(Error::new(Reason::AttachmentNotFound, message));
    }
    for (net, link, mark) in found {
        let about = |error: Error| error.on(&net.name).at(mark.interface.as_str());
        mark.driver().inspect(&net, &link, &mark).map_err(about)?;
        inspect_pod(&net, &mark, netns).map_err(about)?;
    }
    Ok(())
}

/// Looks into the pod's namespace, where this runtime was told its path: whether the interface has its
/// addresses.
fn inspect_pod(net: &Net, mark: &Mark, netns: Option<&Path>) -> Result<()> {
    let known = || net.attachments.known().get(mark.host().as_str()).and_then(|known| known.netns.clone());
    let path = netns.map(Path::to_owned).or_else(known);
    let Some(path) = path else { return Ok(()) };
    let damaged = |what: String| {
        let message = format!(
            "interface {} of sandbox {} differs from what was created ({what}): detach and attach it \
             again",
            mark.interface, mark.sandbox
        );
        Error::new(Reason::Damaged, message)
    };
    let pod = match NetNs::open(&path) {
        Ok(pod) if pod.id().ino == mark.inode => pod,
        Ok(_) if netns.is_some() => {
            let message = format!(
                "the network namespace at {} is not the one in which interface {} of sandbox {} \
                was created",
                path.display(),
                mark.interface,
                mark.sandbox
            );
            return Err(Error::new(Reason::NamespaceGone, message));
        }
        // The pod ends, or its path is another's now: the host's end says what there is to say.
        Ok(_) => return Ok(()),
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(internal("open the pod's namespace")(error)),
    };
    let handle = Handle::open(&pod).map_err(internal("open a socket in the pod's namespace"))?;
    let name = IfName::new(mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
    let inside = handle.link_by_name(&name).map_err(internal("look for the pod's interface"))?;
    let Some(inside) = inside.filter(|inside| inside.up) else {
        return Err(damaged("it is down or has another name".to_owned()));
    };
    let there = handle.addresses(Some(inside.index)).map_err(internal("read the pod's addresses"))?;
    match mark.ips().find(|ip| !there.iter().any(|address| address.address.addr() == *ip)) {
        Some(lost) => Err(damaged(format!("it has lost {lost}"))),
        None => Ok(()),
    }
}

/// Whether it can serve, and each Network.
pub(crate) fn status(networks: &Networks) -> Result<Status> {
    let facts = networks.node.facts(None);
    let mut statuses = Vec::new();
    for net in networks.all()? {
        let attachments = net.list()?.len();
        let shape = net.shape();
        if shape.is_none() && attachments == 0 && net.home == RouterHome::Node {
            continue; // nobody has asked for the default Network yet
        }
        let parent = shape.as_ref().and_then(|shape| shape.driver().parent(&shape.network));
        let parent = parent.map(|parent| networks.node.facts(Some(parent)));
        let (ready, message) = match (&shape, parent) {
            (None, _) => {
                (false, format!("Network {} exists from an earlier run and is not set up yet", net.name))
            }
            (Some(_), Some(Err(error))) => (false, error.to_string()),
            (Some(shape), _) => (true, shape.complaint().unwrap_or_default()),
        };
        statuses.push(NetworkStatus {
            name: net.name.clone(),
            ready,
            message,
            attachments: u32::try_from(attachments).unwrap_or(u32::MAX),
        });
    }
    let message = facts.as_ref().err().map(ToString::to_string).unwrap_or_default();
    Ok(Status { ready: facts.is_ok(), message, networks: statuses })
}
