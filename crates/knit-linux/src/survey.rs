//! Comparing all that this runtime made with what it should be, without changing anything and without holding
//! up anybody.
//!
//! Links, addresses, routes, neighbours, forwarding entries and settings are read each time: one listing of
//! each kind per namespace. Rules are read only where somebody else changed them since they were last
//! compared: every transaction is heard of, with who made it (`senses`). What calls of our own were changing
//! meanwhile (`moves`) is not known, and is not called damage; nor is what cannot be read.

use std::path::PathBuf;

use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{IfName, NetNs};
use knit_nft::Family;
use knit_runtime::{Attachment, Damage, InterfaceName, NotKnown, Result, SandboxId, Survey};

use crate::core::Core;
use crate::links::WantedLink;
use crate::mark::Mark;
use crate::moves::{Comparing, InMotion};
use crate::networks::Net;
use crate::router::{links_with_entries, router_end, router_entries, uplink_entries};
use crate::rules;
use crate::settings::{self, Setting};
use crate::setup::default_entries;
use crate::shape::{Facts, RouterHome, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::tunnel::{self, ROUTER_TUNNEL};
use crate::uplink::{End, UplinkSlot, node_end};
use crate::wanted::Difference;

/// Damage that follows from the node's own link having changed; what else there is of the kind says nothing
/// then.
const FOLLOWS_NODE: [&str; 2] = ["links", "routes"];

/// A Network that is looked at: what it was set up as, and for what node.
#[derive(Clone, Copy)]
pub(crate) struct Looked<'a> {
    pub net: &'a Net,
    pub shape: &'a Shape,
    pub facts: &'a Facts,
}

/// What is found by looking.
pub(crate) struct Found<'a> {
    /// The node's own namespace.
    pub node: &'a mut NamespaceSight,
    /// What is wrong with the Network.
    pub wrong: &'a mut NetworkDamage,
    /// Attachments that are to be made again.
    pub survey: &'a mut Survey,
}

/// A Network that is looked at, without what was being changed.
struct Subject<'a> {
    net: &'a Net,
    shape: &'a Shape,
    facts: &'a Facts,
    motion: InMotion,
}

impl Core {
    /// Says what is not as it was made, and what is not known; and what was seen on the way.
    pub fn survey(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        let (survey, listed) = self.look()?;
        if survey.networks.is_empty() && survey.attachments.is_empty() {
            return Ok((survey, listed));
        }
        // A pod's namespace may have gone in the middle of it, with its link: that is seen as what it is by
        // now.
        self.look()
    }

    fn look(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        let mut survey = Survey::default();
        let networks = self.networks.set_up();
        if networks.is_empty() {
            return Ok((survey, None));
        }
        let comparing = self.moves.compare();
        let own_facts = self.node.facts(None);
        let mut node = self.node.sight(&self.node.space)?;
        let mut all_compared = true;
        let mut lacking = self.node.room.lacking(&self.node.space);
        for (net, shape, set_up_for) in &networks {
            let mut wrong = NetworkDamage::default();
            for family in std::mem::take(&mut lacking) {
                wrong.add("sysctls", format!("net/{family}/neigh/default/gc_thresh1 to 3 are too low"));
            }
            let mut unknown = None;
            let looked = Looked { net, shape, facts: set_up_for };
            let found = Found { node: &mut node, wrong: &mut wrong, survey: &mut survey };
            match shape.driver().compare(self, looked, &comparing, found) {
                Ok(motion) if motion.is_none() => {}
                Ok(_) => unknown = Some(NotKnown::Moving),
                // What cannot be read of one Network is that one's: others do not wait.
                Err(error) => unknown = Some(NotKnown::Failed(error.to_string())),
            }
            let found = node.take_wrong(&self.node.space);
            found.into_iter().for_each(|what| wrong.add("rules", what));
            let parent = shape.driver().parent(&shape.network).map(|parent| self.node.facts(Some(parent)));
            match parent.as_ref().unwrap_or(&own_facts) {
                Ok(facts) if *facts == **set_up_for => {}
                // It is set up again for that.
                Ok(_) => {
                    wrong.0.retain(|damage| !FOLLOWS_NODE.contains(&damage.kind));
                    wrong.add("node", "the node's own link, MTU or addresses have changed");
                }
                // What it is on has gone or is down. Setting it up again fails, and says so.
                Err(error) if parent.is_some() => wrong.add("node", error.to_string()),
                // All was compared with what the node was when it was set up; the node's own routes go with
                // its address.
                Err(error) => {
                    wrong.0.retain(|damage| shape.home == RouterHome::Own || damage.kind != "routes");
                    unknown = Some(NotKnown::Failed(error.to_string()));
                }
            }
            all_compared &= unknown.is_none() && wrong.0.iter().all(|damage| damage.kind != "rules");
            survey.unknown.extend(unknown.map(|unknown| (net.name.clone(), unknown)));
            if !wrong.0.is_empty() {
                survey.networks.insert(net.name.clone(), wrong.0);
            }
        }
        match self.compare_strays(&node, &comparing) {
            Ok(Some(0)) => {}
            Ok(None) => all_compared = false,
            // What was found of Networks counts all the same.
            Err(error) => {
                all_compared = false;
                let error = crate::fail::chain(&error);
                tracing::debug!(error, "cannot tell what in the node's table belongs to nothing");
            }
            Ok(Some(strays)) => {
                all_compared = false;
                // Any of them takes it away when it is set up; the default one shares the table with all.
                let names = networks.iter().map(|(net, _, _)| net);
                if let Some(net) = names.min_by_key(|net| (net.home != RouterHome::Node, &net.name)) {
                    let message = format!(
                        "{strays} elements of table {} belong to no Network and no attachment of this node",
                        rules::table(Family::Inet)
                    );
                    let damage = Damage { kind: "rules", message };
                    survey.networks.entry(net.name.clone()).or_default().push(damage);
                }
            }
        }
        // A port of the node that leads nowhere is found by reading them.
        if all_compared && survey.attachments.is_empty() {
            node.rules_are_right(&self.node.space);
        }
        let listed = self.listed(&mut node)?;
        Ok((survey, Some(listed)))
    }

    /// All attachments: those that were seen, and those of Networks that were not looked at.
    fn listed(&self, node: &mut NamespaceSight) -> Result<Vec<Attachment>> {
        let mut seen = std::mem::take(&mut node.seen);
        let (mut listed, mut of_node) = (Vec::new(), None);
        for net in self.networks.all()? {
            let ports = match seen.remove(&net.name) {
                Some(ports) => ports,
                None => net.attachments()?,
            };
            for (link, mark) in &ports {
                listed.push(self.describe_with_ports(&net, (link, mark), &mut of_node)?);
            }
        }
        Ok(listed)
    }

    /// Looks at a Network with a router; says what of it is not known because it was being changed.
    pub fn compare_router(
        &self,
        Looked { net, shape, facts }: Looked<'_>,
        comparing: &Comparing<'_>,
        Found { node, wrong, survey }: Found<'_>,
    ) -> Result<InMotion> {
        let mut router = match shape.home {
            RouterHome::Node => None,
            RouterHome::Own => Some(self.node.sight(&net.space)?),
        };
        // Only now: all is read.
        let moved = comparing.in_motion(&net.name);
        if moved.network {
            return Ok(moved);
        }
        let mut motion = moved.clone();
        let lost = self.lost(net, router.as_ref().unwrap_or(node), &mut motion);
        let subject = Subject { net, shape, facts, motion };
        let ports = match &mut router {
            None => {
                self.look_at_default(&subject, node, wrong)?;
                node.settled(&subject.motion)
            }
            Some(router) => {
                self.look_at_router(&subject, router, wrong)?;
                self.look_at_uplink(&subject, node, router, wrong);
                router.settled(&subject.motion)
            }
        };
        survey.attachments.extend(lost);
        survey.noticed.extend(self.switched_off(&net.name));
        survey.attachments.extend(self.closed_ports(&ports, node));
        let seen =
            router.as_mut().map_or_else(|| std::mem::take(&mut node.ports), |r| std::mem::take(&mut r.ports));
        node.seen.insert(net.name.clone(), seen);
        if let Some(mut router) = router {
            let found = router.take_wrong(&net.space);
            if found.is_empty() && moved.is_none() {
                router.rules_are_right(&net.space);
            }
            found.into_iter().for_each(|what| wrong.add("rules", what));
        }
        Ok(moved)
    }

    fn look_at_default(
        &self,
        subject: &Subject<'_>,
        node: &mut NamespaceSight,
        wrong: &mut NetworkDamage,
    ) -> Result<()> {
        let Subject { shape, facts, motion, .. } = subject;
        if let Some(rules) = &mut node.rules {
            self.node.compare_part(rules, shape, &node.ports, motion);
        }
        wrong.settings(&self.node.space, &settings::forwarding(shape, Some(&facts.uplink)))?;
        self.look_at_ports(subject, node, None, wrong);
        let tunnel = tunnel::node_tunnel(shape.id());
        let there = node.links.get(tunnel.as_str());
        match (tunnel::wanted(shape, facts, tunnel.clone()), there) {
            (Some(wanted), Some(link)) if tunnel::same(&wanted, link) => {
                wrong.link(&WantedLink::tunnel(shape, None), link);
            }
            (None, None) => {}
            (Some(_), _) => wrong.add("links", format!("the tunnel {tunnel} is missing or was replaced")),
            (None, Some(_)) => wrong.add("links", format!("the tunnel {tunnel} should not exist")),
        }
        let wanted = default_entries(shape, facts, &node.ports, tunnel.as_str());
        let links = node.links_of(&[facts.uplink.as_str(), tunnel.as_str()], true);
        let own = node.links_of(&[tunnel.as_str()], false);
        let mut found = node.reading.found(&links);
        found.extend(node.reading.found_on_own(&own));
        wrong.entries(&Difference::between(&wanted, &found), motion);
        Ok(())
    }

    fn look_at_router(
        &self,
        subject: &Subject<'_>,
        router: &mut NamespaceSight,
        wrong: &mut NetworkDamage,
    ) -> Result<()> {
        let Subject { net, shape, facts, motion } = subject;
        if !net.is_mounted() {
            wrong.add("namespace", "the router's namespace is no longer mounted");
        }
        if let Some(rules) = &mut router.rules {
            net.compare_rules(rules, shape, &router.ports, motion);
        }
        let driver = shape.driver();
        let mut wanted = settings::forwarding(shape, None);
        // A kernel that does not have them was said to lack them when the Network was set up.
        let more = driver.settings().into_iter().flat_map(|(settings, _)| settings);
        wanted.extend(more.map(Setting::if_there));
        wrong.settings(&net.space, &wanted)?;
        let master = driver.compare_links(router, shape, wrong);
        self.look_at_ports(subject, router, master, wrong);
        if let Some(lo) = router.links.get("lo") {
            wrong.link(&WantedLink::default(), lo);
        }
        let wanted = tunnel::wanted(shape, facts, tunnel::node_tunnel(shape.id()));
        match (router.links.get(ROUTER_TUNNEL), wanted) {
            (Some(link), Some(wanted)) if tunnel::same(&wanted, link) => {
                wrong.link(&WantedLink::tunnel(shape, master), link);
            }
            _ => wrong.add("links", "the tunnel is missing or was replaced"),
        }
        let inside = router.links.get(router_end().as_str());
        let place = inside.and_then(|link| router.reading.addresses(link.index).find_map(UplinkSlot::of));
        let (Some(inside), Some(place)) = (inside, place) else {
            wrong.add("links", "the uplink is missing in the router, or its addresses are");
            return Ok(());
        };
        wrong.link(&WantedLink::uplink(shape, facts, place, End::Router), inside);
        let wanted = router_entries(shape, facts, place, &router.ports);
        let links = router.links_of(&links_with_entries(shape).collect::<Vec<_>>(), true);
        let mut found = router.reading.found(&links);
        found.extend(router.reading.found_on_own(&links));
        wrong.entries(&Difference::between(&wanted, &found), motion);
        Ok(())
    }

    fn look_at_uplink(
        &self,
        subject: &Subject<'_>,
        node: &mut NamespaceSight,
        router: &NamespaceSight,
        wrong: &mut NetworkDamage,
    ) {
        let Subject { shape, facts, motion, .. } = subject;
        let uplink = node_end(shape.id());
        if let Some(rules) = &mut node.rules {
            self.node.compare_part(rules, shape, &[], motion);
        }
        let link = node.links.get(uplink.as_str());
        let place = link.and_then(|link| node.reading.addresses(link.index).find_map(UplinkSlot::of));
        let (Some(link), Some(place)) = (link, place) else {
            wrong.add("links", format!("the uplink {uplink} is missing, or its addresses are"));
            return;
        };
        wrong.link(&WantedLink::uplink(shape, facts, place, End::Node), link);
        let wanted = uplink_entries(shape, &uplink, place, &router.ports);
        let links = node.links_of(&[uplink.as_str()], false);
        let mut found = node.reading.found(&links);
        found.extend(node.reading.found_on_own(&links));
        wrong.entries(&Difference::between(&wanted, &found), motion);
    }

    fn look_at_ports(
        &self,
        subject: &Subject<'_>,
        sight: &NamespaceSight,
        master: Option<u32>,
        wrong: &mut NetworkDamage,
    ) {
        let settled = sight.ports.iter().filter(|(link, _)| subject.motion.has_settled(link));
        for (link, mark) in settled.filter(|(link, _)| !self.attachments.is_in_flux(link)) {
            wrong.link(
                &WantedLink::host_end(subject.shape, mark, self.attachments.made_with(link), master),
                link,
            );
        }
    }

    /// Attachments whose link is gone. What they left is taken away with them, and is not looked at.
    fn lost(
        &self,
        net: &Net,
        sight: &NamespaceSight,
        motion: &mut InMotion,
    ) -> Vec<(SandboxId, InterfaceName)> {
        let (known, there) = (self.attachments.known(), sight.hosts());
        let mut lost = Vec::new();
        for (host, known) in known.iter().filter(|(_, known)| known.network == net.name) {
            if !there.contains(host) && !motion.hosts.contains(host) {
                motion.leave_out(host, &known.mark.ips().collect::<Vec<_>>());
                lost.push((known.mark.sandbox.clone(), known.mark.interface.clone()));
            }
        }
        lost
    }

    /// Attachments for which IPv6 was switched on when they were made, and is off now. That is inside the
    /// pod, and only somebody in there, or root on the node, does it: it is the pod's own affair, and is
    /// told.
    fn switched_off(&self, network: &str) -> Vec<((SandboxId, InterfaceName), String)> {
        let of_network: Vec<(Mark, PathBuf)> = {
            let known = self.attachments.known();
            let on = known.values().filter(|known| known.ipv6_on && known.network == network);
            on.filter_map(|known| Some((known.mark.clone(), known.netns.clone()?))).collect()
        };
        let is_off = |(mark, path): &(Mark, PathBuf)| {
            let name = IfName::new(mark.interface.as_str()).ok()?;
            // A pod that ends takes all of it along.
            let pod = NetNs::open(path).ok().filter(|pod| pod.id().ino == mark.inode)?;
            let off = Sysctl::ipv6_disabled(Scope::Link(&name));
            let value = Sysctls::of(&pod).and_then(|sysctls| sysctls.get(&off)).ok()?;
            (value == "1").then(|| {
                let what = format!(
                    "IPv6 was disabled inside the pod ({off} is 1): interface {name} has no IPv6 address. \
                     Knit does not change settings inside pods; restart the pod to restore the address"
                );
                ((mark.sandbox.clone(), mark.interface.clone()), what)
            })
        };
        of_network.iter().filter_map(is_off).collect()
    }

    /// Attachments whose ports of the node are not led to them as they should be: one is missing, leads
    /// elsewhere, or was added.
    fn closed_ports(
        &self,
        ports: &[(knit_kernel::link::Link, Mark)],
        node: &NamespaceSight,
    ) -> Vec<(SandboxId, InterfaceName)> {
        let Some(rules) = &node.rules else { return Vec::new() };
        let table = rules.found(&rules::table(Family::Inet));
        let there = table.map(rules::ports_in).unwrap_or_default();
        let known = self.attachments.known();
        let as_made = |mark: &Mark| {
            let host = mark.host();
            let there = there.get(host.as_str()).map_or(&[][..], Vec::as_slice);
            match known.get(host.as_str()) {
                Some(known) if known.ports.is_empty() != mark.ports => {
                    let ips: Vec<_> = mark.ips().collect();
                    rules::same_ports(&rules::port_elements(host.as_str(), &known.ports, &ips), there)
                }
                // Which ones there should be is not known.
                _ => !mark.ports,
            }
        };
        let closed = ports.iter().filter(|(_, mark)| !as_made(mark));
        closed.map(|(_, mark)| (mark.sandbox.clone(), mark.interface.clone())).collect()
    }
}
