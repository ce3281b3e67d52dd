//! Looking at what is there: listing, checking, status.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use knit_kernel::link::Link;
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, IfName};
use knit_runtime::{
    Address, Attachment, Error, InterfaceName, NetworkStatus, Pod, PortMapping, Reason, Result, SandboxId,
    Status,
};

use crate::core::Core;
use crate::fail::internal;
use crate::mark::Mark;
use crate::networks::Net;
use crate::rules;
use crate::setup::links_of;
use crate::wanted::{Entry, Links, found, found_on_own};

impl Core {
    /// All attachments, or those of one sandbox.
    pub fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        let (mut attachments, mut ports) = (Vec::new(), None);
        for net in self.networks.all()? {
            for (link, mark) in net.attachments()? {
                if sandbox.is_none_or(|sandbox| mark.sandbox == *sandbox) {
                    attachments.push(self.describe_with_ports(&net, (&link, &mark), &mut ports)?);
                }
            }
        }
        Ok(attachments)
    }

    /// The same as [`Self::describe`], with the ports of the node that lead to it: where another process made
    /// it, the rules tell. They are read for the first that needs them.
    pub fn describe_with_ports(
        &self,
        net: &Net,
        (link, mark): (&Link, &Mark),
        in_rules: &mut Option<BTreeMap<String, Vec<PortMapping>>>,
    ) -> Result<Attachment> {
        let mut attachment = self.describe(net, link, mark);
        if mark.ports && attachment.ports.is_empty() {
            let in_rules = match in_rules {
                Some(ports) => ports,
                None => in_rules.insert(self.node.ports()?),
            };
            attachment.ports = in_rules.remove(mark.host().as_str()).unwrap_or_default();
        }
        Ok(attachment)
    }

    /// An attachment from its mark, with what was answered if this runtime made it.
    pub fn describe(&self, net: &Net, link: &Link, mark: &Mark) -> Attachment {
        let host = mark.driver().host_end(net, link);
        if let Some(answer) =
            self.attachments.known().get(mark.host().as_str()).and_then(|known| known.answer.as_ref())
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
    pub fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let found = self.of_sandbox(&pod.sandbox, interface)?;
        if found.is_empty() {
            let what =
                interface.map_or_else(|| "no interface".to_owned(), |name| format!("no interface {name}"));
            let message = format!("sandbox {} has {what} of Knit: attach it again", pod.sandbox);
            return Err(Error::new(Reason::AttachmentNotFound, message));
        }
        for (net, link, mark) in found {
            let about = |error: Error| error.on(net.name.as_str()).at(mark.interface.as_str());
            mark.driver().inspect(&net, &link, &mark).map_err(about)?;
            self.inspect_pod(&mark, netns).map_err(about)?;
        }
        Ok(())
    }

    /// Looks into the pod's namespace, where this runtime was told its path: whether the interface has its
    /// addresses.
    fn inspect_pod(&self, mark: &Mark, netns: Option<&Path>) -> Result<()> {
        let known =
            || self.attachments.known().get(mark.host().as_str()).and_then(|known| known.netns.clone());
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
    pub fn status(&self) -> Result<Status> {
        let facts = self.node.facts(None);
        let mut networks = Vec::new();
        for net in self.networks.all()? {
            let attachments = net.attachments()?.len();
            let shape = net.shape();
            if shape.is_none() && attachments == 0 && net.home == crate::shape::RouterHome::Node {
                continue; // nobody has asked for the default Network yet
            }
            let parent = shape.as_ref().and_then(|shape| shape.driver().parent(&shape.network));
            let parent = parent.map(|parent| self.node.facts(Some(parent)));
            let (ready, message) = match (&shape, parent) {
                (None, _) => {
                    (false, format!("Network {} exists from an earlier run and is not set up yet", net.name))
                }
                (Some(_), Some(Err(error))) => (false, error.to_string()),
                (Some(shape), _) => (true, shape.complaint().unwrap_or_default()),
            };
            networks.push(NetworkStatus {
                name: net.name.clone(),
                ready,
                message,
                attachments: u32::try_from(attachments).unwrap_or(u32::MAX),
            });
        }
        let message = facts.as_ref().err().map(ToString::to_string).unwrap_or_default();
        Ok(Status { ready: facts.is_ok(), message, networks })
    }
}

impl Net {
    /// Looks whether one attachment's host side is as it was made: its link, its routes and neighbours, its
    /// rules.
    pub fn inspect_port(&self, link: &Link, mark: &Mark) -> Result<()> {
        let host = link.name.as_str();
        let mut wrong: Vec<String> = Vec::new();
        if !link.up {
            wrong.push(format!("{host} is down"));
        } else if !link.running {
            wrong.push(format!("the pod's end of {host} is down or missing"));
        }
        let handle = self.space.links()?;
        let mut links: Links = [(host.to_owned(), link.index)].into();
        let (driver, master) = (mark.driver(), mark.driver().master());
        if let Some(master) = &master {
            links.extend(links_of(&handle, [master.name], &[])?);
        }
        let wanted: BTreeSet<Entry> = driver.pod_entries(host, mark).into_iter().collect();
        let mut there = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
        if let Some(master) = &master {
            let forwarding = found_on_own(&handle, &links).map_err(internal("read forwarding entries"))?;
            there.extend(forwarding);
            if link.master.is_none() || link.port != Some(master.pod_port) {
                wrong.push(format!("{host} is no longer a port of {}", master.name));
            }
        }
        wrong.extend(wanted.difference(&there).map(|entry| format!("missing: {entry}")));
        let table = driver.sources();
        let mut kernel = self.space.rules()?;
        for put in rules::source_elements(host, mark.mac, mark.ips()) {
            let listed = match kernel.elements(&table, &put.set) {
                Ok(listed) => listed,
                Err(error) if error.is_not_found() => Vec::new(),
                Err(error) => return Err(internal("list rules")(error)),
            };
            if !listed.iter().any(|listed| listed.element.key == put.element.key) {
                wrong.push(format!("missing in set {}: an address of {host}", put.set.name));
            }
        }
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
}
