//! Taking attachments away, one by one or all whose owner is gone.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::Link;
use knit_kernel::owner;
use knit_nft::{Element, Family};
use knit_runtime::{Attachment, Change, InterfaceName, Pod, PortMapping, Result, SandboxId};
use knit_types::sync::ReadWrite;

use crate::attachments::Known;
use crate::core::Core;
use crate::fail::internal;
use crate::mark::{Mark, host_name};
use crate::moves::MovingSubject;
use crate::networks::Net;
use crate::node::Node;
use crate::port::{Port, take_elements};
use crate::rules::{self, SetElement};

impl Core {
    /// Takes one interface away, or all of a sandbox. What is gone already is fine.
    pub fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        for (net, link, mark) in self.of_sandbox(&pod.sandbox, interface)? {
            let _together = net.gate.reading();
            let attachment = self.describe(&net, &link, &mark);
            self.unmake(&net, Some(&link), &mark)?;
            self.tell(Change::Removed(attachment));
        }
        self.forget_gone(&pod.sandbox, interface)
    }

    /// What is known of a sandbox and has no link any more (it went with the pod's namespace): takes the rest
    /// away.
    fn forget_gone(&self, sandbox: &SandboxId, interface: Option<&InterfaceName>) -> Result<()> {
        let gone: Vec<Known> = {
            let known = self.attachments.known();
            let theirs = known.values().filter(|known| {
                known.mark.sandbox == *sandbox
                    && interface.is_none_or(|interface| known.mark.interface == *interface)
            });
            theirs.cloned().collect()
        };
        for known in gone {
            let _moving = self.moves.begin(MovingSubject::port(&known.network, &known.mark));
            match self.networks.get(&known.network)? {
                Some(net) => {
                    let _together = net.gate.reading();
                    self.unmake(&net, None, &known.mark)?;
                }
                None => {
                    let host = host_name(&known.mark.sandbox, &known.mark.interface);
                    self.node.close_ports(&|owner| owner == host.as_str())?;
                    self.attachments.known().remove(host.as_str());
                }
            }
            if let Some(answer) = known.answer {
                self.tell(Change::Removed(answer));
            }
        }
        Ok(())
    }

    /// Takes the sources away that attachments have whose link is gone without us: a set-up that reads no
    /// rules does not find them.
    pub fn take_sources_of_lost(&self, net: &Net, ports: &[(Link, Mark)]) -> Result<()> {
        let there: HashSet<&str> = ports.iter().map(|(link, _)| link.name.as_str()).collect();
        let lost: Vec<(String, Mark)> = {
            let known = self.attachments.known();
            let ours = known.iter().filter(|(_, known)| known.network == net.name);
            let gone = ours.filter(|(host, _)| !there.contains(host.as_str()));
            gone.map(|(host, known)| (host.clone(), known.mark.clone())).collect()
        };
        for (host, mark) in lost {
            let own = rules::source_elements(&host, mark.mac, mark.ips());
            take_elements(&mut *net.space.rules()?, &own, &mark.driver().sources())?;
        }
        Ok(())
    }

    /// A sandbox's attachments, in whichever Network.
    pub fn of_sandbox(
        &self,
        sandbox: &SandboxId,
        interface: Option<&InterfaceName>,
    ) -> Result<Vec<(Arc<Net>, Link, Mark)>> {
        let mut found = Vec::new();
        // What is known is looked for by name; for a sandbox that is not, everything is looked through.
        let known: Vec<(String, InterfaceName)> = {
            let known = self.attachments.known();
            let theirs = known.values().filter(|known| known.mark.sandbox == *sandbox);
            theirs.map(|known| (known.network.clone(), known.mark.interface.clone())).collect()
        };
        if interface.is_none() && !known.is_empty() {
            for (network, interface) in known {
                let Some(net) = self.networks.get(&network)? else { continue };
                let ours = net.driver().attachment(&net, sandbox, &interface)?;
                found.extend(ours.map(|(link, mark)| (net, link, mark)));
            }
            return Ok(found);
        }
        for net in self.networks.all()? {
            let ours: Vec<(Link, Mark)> = match interface {
                Some(interface) => net.driver().attachment(&net, sandbox, interface)?.into_iter().collect(),
                None => net.attachments()?,
            };
            let ours = ours.into_iter().filter(|(_, mark)| mark.sandbox == *sandbox);
            found.extend(ours.map(|(link, mark)| (Arc::clone(&net), link, mark)));
        }
        Ok(found)
    }

    /// Takes away all that an attachment has: its link first, so that nothing more is sent, then what allowed
    /// it to.
    pub fn unmake(&self, net: &Net, link: Option<&Link>, mark: &Mark) -> Result<()> {
        let _moving = self.moves.begin(MovingSubject::port(&net.name, mark));
        let host = mark.host();
        mark.driver().unmake(net, link, mark)?;
        if mark.ports {
            self.node.close_ports(&|owner| owner == host.as_str())?;
        }
        self.attachments.known().remove(host.as_str());
        Ok(())
    }

    /// Closes the ports of the node whose pod is no more.
    pub fn sweep_ports(&self) -> Result<()> {
        // First what is being made, then what is there: whatever is in neither when its rules are read is
        // gone.
        let found = self.node.port_elements(&|_| true)?;
        let mut owners: BTreeSet<String> =
            found.into_iter().filter_map(|put| put.element.comment).map(String::from).collect();
        if owners.is_empty() {
            return Ok(());
        }
        let making = self.attachments.making().clone();
        for net in self.networks.all()? {
            for (_, mark) in net.attachments()? {
                owners.remove(mark.host().as_str());
            }
        }
        owners.retain(|owner| !making.contains(owner));
        if owners.is_empty() {
            return Ok(());
        }
        // One of them may have come back while this was found out: what is looked at next is read anew.
        self.node.space.rules_seen.touch();
        self.node.close_ports(&|owner| owners.contains(owner))
    }

    /// Removes all attachments whose sandbox is not in the list.
    pub fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        let mut removed = Vec::new();
        for net in self.networks.all()? {
            let _together = net.gate.reading();
            net.driver().collect_half_made(self, &net)?;
            for (link, mark) in net.attachments()? {
                if !keep.contains(&mark.sandbox) {
                    let attachment = self.describe(&net, &link, &mark);
                    self.unmake(&net, Some(&link), &mark)?;
                    self.tell(Change::Removed(attachment.clone()));
                    removed.push(attachment);
                }
            }
        }
        let gone: Vec<SandboxId> = {
            let known = self.attachments.known();
            known.values().map(|known| known.mark.sandbox.clone()).filter(|id| !keep.contains(id)).collect()
        };
        for sandbox in gone {
            self.forget_gone(&sandbox, None)?;
        }
        self.sweep_ports()?;
        Ok(removed)
    }
}

impl Net {
    /// Takes an attachment's host side away: its link first, so that nothing more is sent, then what allowed
    /// it to.
    pub fn unmake_port(&self, link: Option<&Link>, mark: &Mark) -> Result<()> {
        let host = mark.host();
        let port = Port { host: &host, mark };
        port.unmake(&*self.space.links()?, &mut *self.space.rules()?, link.map(|link| link.index))?;
        self.take_node_side(mark)
    }

    /// The host end of an attachment, found by its name.
    pub fn port_of(&self, sandbox: &SandboxId, interface: &InterfaceName) -> Result<Option<(Link, Mark)>> {
        let looked = self.space.links()?.link_by_name(&host_name(sandbox, interface));
        let link = looked.map_err(internal("look for the attachment"))?;
        let mark = link.as_ref().and_then(|link| link.owner().and_then(Mark::parse));
        let ours = |(_, mark): &(Link, Mark)| mark.sandbox == *sandbox && mark.interface == *interface;
        Ok(link.zip(mark).filter(ours))
    }

    /// Removes host ends whose making was cut off.
    pub fn collect_half_made(&self, is_half_made: &dyn Fn(&Link) -> bool) -> Result<()> {
        let handle = self.space.links()?;
        let filter = LinkFilter { kind: Some("veth"), group: Some(owner::GROUP), ..LinkFilter::default() };
        for link in handle.links(&filter).map_err(internal("list links"))? {
            if is_half_made(&link) {
                tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
                handle.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
            }
        }
        Ok(())
    }
}

impl Node {
    /// The ports of the node that lead to pods, by their host ends.
    pub fn ports(&self) -> Result<BTreeMap<String, Vec<PortMapping>>> {
        Ok(rules::ports_of(&self.port_elements(&|_| true)?))
    }

    /// Closes the ports of the node that lead to these host ends.
    pub fn close_ports(&self, whose: &dyn Fn(&str) -> bool) -> Result<()> {
        let gone = self.port_elements(&|element| element.comment.as_deref().is_some_and(whose))?;
        take_elements(&mut *self.space.rules()?, &gone, &rules::table(Family::Inet))
    }

    /// What the kernel has of ports of the node.
    pub fn port_elements(&self, is_wanted: &dyn Fn(&Element) -> bool) -> Result<Vec<SetElement>> {
        let mut kernel = self.space.rules()?;
        let table = rules::table(Family::Inet);
        let mut found = Vec::new();
        for set in rules::port_sets() {
            let listed = match kernel.elements(&table, &set) {
                Ok(listed) => listed,
                Err(error) if error.is_not_found() => continue,
                Err(error) => return Err(internal("list ports of the node")(error)),
            };
            let wanted = listed.into_iter().map(|listed| listed.element).filter(is_wanted);
            found.extend(wanted.map(|element| SetElement::new(set.clone(), element)));
        }
        Ok(found)
    }
}
