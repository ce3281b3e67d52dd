//! Comparing all that this runtime made with what it should be, without changing anything and without holding up
//! anybody.
//!
//! Links, addresses, routes, neighbours, forwarding entries and settings are read each time: one listing of each kind per
//! namespace. Rules are read only where somebody else changed them since they were last compared: every transaction is
//! heard of, with who made it (`senses`).

use std::collections::HashMap;

use knit_kernel::Handle;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::Link;
use knit_kernel::nft::Family;
use knit_runtime::{Damage, Result, Survey};

use crate::core::{Core, Net};
use crate::fail::internal;
use crate::layer2::BRIDGE;
use crate::links::Like;
use crate::mark::Mark;
use crate::router::{router_end, router_entries, uplink_entries, wrong_bridge_sysctls};
use crate::rules;
use crate::setup::{default_entries, wrong_sysctls};
use crate::shape::{Facts, Home, Shape};
use crate::space::Space;
use crate::tables::{Comparison, Tables};
use crate::tunnel::{self, ROUTER_TUNNEL};
use crate::uplink::{End, Place, ROUTER_END, node_end};
use crate::wanted::{Difference, Links, Reading};

/// How often it is looked again because something was being changed meanwhile.
const ATTEMPTS: usize = 3;
/// How many differences of one kind are put into words.
const WORDS: usize = 3;

/// What is in one namespace.
struct Sight {
    links: HashMap<String, Link>,
    ports: Vec<(Link, Mark)>,
    reading: Reading,
    /// What the rules are compared with; none if nobody else changed them since they were.
    tables: Option<Tables>,
    /// How often others had changed them before they were read.
    changed: u64,
}

/// What is wrong with one Network.
#[derive(Default)]
struct Wrong(Vec<Damage>);

impl Core {
    /// Says what is not as it was made. What is being changed meanwhile may be among it: whoever repairs looks again.
    pub fn survey(&self) -> Result<Survey> {
        let mut survey = Survey::default();
        for _ in 0..ATTEMPTS {
            let before = self.moves.at_rest();
            survey = self.look()?;
            let clean = survey == Survey::default();
            if clean || (before.is_some() && before == self.moves.at_rest()) {
                break;
            }
        }
        Ok(survey)
    }

    fn look(&self) -> Result<Survey> {
        let mut survey = Survey::default();
        let networks = self.set_up();
        if networks.is_empty() {
            return Ok(survey);
        }
        let facts = self.facts()?;
        let mut node = self.sight(&self.node)?;
        for (net, shape) in networks {
            let mut wrong = Wrong::default();
            // What cannot be read of one Network is that one's damage: setting it up says more, and others do not wait.
            if let Err(error) = self.look_at(&net, &shape, &facts, &mut node, &mut wrong, &mut survey) {
                wrong.add("unread", format!("it cannot be compared: {error}"));
            }
            let found = node.take_wrong();
            found.into_iter().for_each(|what| wrong.add("rules", what));
            if !wrong.0.is_empty() {
                survey.networks.insert(net.name.clone(), wrong.0);
            }
        }
        if survey == Survey::default() {
            self.node.rules_seen.compared(node.changed);
        }
        Ok(survey)
    }

    /// Looks at one Network.
    fn look_at(
        &self,
        net: &Net,
        shape: &Shape,
        facts: &Facts,
        node: &mut Sight,
        wrong: &mut Wrong,
        survey: &mut Survey,
    ) -> Result<()> {
        if !net.is_for(facts) {
            // It is set up again for that, rules included.
            wrong.add("node", "the node's own link, MTU or addresses have changed");
            if shape.home == Home::Node {
                self.find_closed_ports_of_node(node, survey)?;
            }
            return Ok(());
        }
        match shape.home {
            Home::Node => {
                self.look_at_default(shape, facts, node, wrong)?;
                self.find_lost(net, node, survey);
                self.find_closed_ports_of_node(node, survey)
            }
            Home::Own => {
                let mut router = self.sight(&net.space)?;
                self.look_at_router(net, shape, facts, &mut router, wrong)?;
                self.look_at_uplink(shape, facts, node, &router, wrong)?;
                self.find_lost(net, &router, survey);
                self.find_closed_ports(&router, node, survey)?;
                router.conclude(&net.space, wrong);
                Ok(())
            }
        }
    }

    /// What is in a namespace now.
    fn sight(&self, space: &Space) -> Result<Sight> {
        let changed = space.rules_seen.now();
        let trusted = space.rules_seen.is_as_compared() && {
            let now = space.rules()?.generation().map_err(internal("ask for the state of the rules"))?;
            self.senses.heard(space) == Some(now)
        };
        let tables = (!trusted).then(|| Tables::Compare(Comparison::default()));
        let handle = space.links()?;
        let reading = Reading::of(&handle).map_err(internal("read addresses, routes and neighbours"))?;
        let links = listed(&handle)?;
        let mut ports: Vec<(Link, Mark)> = links
            .values()
            .filter(|link| link.kind == "veth")
            .filter_map(|link| Some((link.clone(), link.owner().and_then(Mark::parse)?)))
            .collect();
        ports.sort_by_key(|(link, _)| link.index);
        Ok(Sight { links, ports, reading, tables, changed })
    }

    fn look_at_default(
        &self,
        shape: &Shape,
        facts: &Facts,
        node: &mut Sight,
        wrong: &mut Wrong,
    ) -> Result<()> {
        if let Some(tables) = &mut node.tables {
            self.default_rules(shape, &node.ports, tables)?;
        }
        wrong.sysctls(
            wrong_sysctls(&self.node, shape, Some(&facts.uplink))?.into_iter().map(|(name, _)| name),
        );
        self.look_at_ports(shape, node, None, wrong);
        let tunnel = tunnel::node_tunnel(shape.id());
        let there = node.links.get(tunnel.as_str());
        match (tunnel::wanted(shape, facts, tunnel.clone()), there) {
            (Some(wanted), Some(link)) if tunnel::same(&wanted, link) => {
                wrong.link(&Like { group: Some(tunnel::GROUP), ..Like::tunnel(shape, None) }, link);
            }
            (None, None) => {}
            (Some(_), _) => wrong.add("links", format!("the tunnel {tunnel} is missing or is another one")),
            (None, Some(_)) => wrong.add("links", format!("there is a tunnel {tunnel}")),
        }
        let wanted = default_entries(shape, facts, &node.ports, tunnel.as_str());
        let links = node.links_of(&[facts.uplink.as_str(), tunnel.as_str()], true);
        let own = node.links_of(&[tunnel.as_str()], false);
        let mut found = node.reading.found(&links);
        found.extend(node.reading.found_on_own(&own));
        wrong.entries(&Difference::between(&wanted, &found));
        Ok(())
    }

    fn look_at_router(
        &self,
        net: &Net,
        shape: &Shape,
        facts: &Facts,
        router: &mut Sight,
        wrong: &mut Wrong,
    ) -> Result<()> {
        if !self.is_mounted(net) {
            wrong.add("namespace", "the router's namespace is not mounted any more");
        }
        if let Some(tables) = &mut router.tables {
            self.router_rules(&net.space, shape, &router.ports, tables)?;
        }
        wrong.sysctls(wrong_sysctls(&net.space, shape, None)?.into_iter().map(|(name, _)| name));
        let mut bridge = None;
        if shape.switched() {
            // A kernel that does not have them was said to lack them when the Network was set up.
            wrong.sysctls(wrong_bridge_sysctls(&net.space).unwrap_or_default().into_iter());
            match router.links.get(BRIDGE) {
                Some(link) => {
                    bridge = Some(link.index);
                    let asking = crate::neighbours::wrong_sysctls(&net.space, BRIDGE).unwrap_or_default();
                    asking.iter().for_each(|name| wrong.add("sysctls", format!("sysctl {name} is not 0")));
                    let mac = crate::attach::kernel_mac(crate::layer2::bridge_mac(shape));
                    wrong.link(&Like { mtu: Some(shape.mtu), mac: Some(mac), ..Like::default() }, link);
                }
                None => wrong.add("links", "the bridge is missing"),
            }
        }
        self.look_at_ports(shape, router, bridge, wrong);
        if let Some(lo) = router.links.get("lo") {
            wrong.link(&Like::default(), lo);
        }
        let wanted = tunnel::wanted(shape, facts, tunnel::node_tunnel(shape.id()));
        match (router.links.get(ROUTER_TUNNEL), wanted) {
            (Some(link), Some(wanted)) if tunnel::same(&wanted, link) => {
                wrong.link(&Like::tunnel(shape, bridge), link);
            }
            _ => wrong.add("links", "the tunnel is missing or is another one"),
        }
        let inside = router.links.get(router_end().as_str());
        let place = inside.and_then(|link| router.reading.addresses(link.index).find_map(Place::of));
        let (Some(inside), Some(place)) = (inside, place) else {
            wrong.add("links", "the uplink is missing in the router, or its addresses are");
            return Ok(());
        };
        wrong.link(&Like::uplink(shape, facts, place, End::Router), inside);
        let wanted = router_entries(shape, facts, place, &router.ports);
        let links = router.links_of(&[ROUTER_END, ROUTER_TUNNEL, BRIDGE, "lo"], true);
        let mut found = router.reading.found(&links);
        found.extend(router.reading.found_on_own(&links));
        wrong.entries(&Difference::between(&wanted, &found));
        Ok(())
    }

    fn look_at_uplink(
        &self,
        shape: &Shape,
        facts: &Facts,
        node: &mut Sight,
        router: &Sight,
        wrong: &mut Wrong,
    ) -> Result<()> {
        let uplink = node_end(shape.id());
        if let Some(tables) = &mut node.tables {
            self.uplink_rules(shape, &uplink, tables)?;
        }
        let link = node.links.get(uplink.as_str());
        let place = link.and_then(|link| node.reading.addresses(link.index).find_map(Place::of));
        let (Some(link), Some(place)) = (link, place) else {
            wrong.add("links", format!("the uplink {uplink} is missing, or its addresses are"));
            return Ok(());
        };
        wrong.link(&Like::uplink(shape, facts, place, End::Node), link);
        let wanted = uplink_entries(shape, &uplink, place, &router.ports);
        let links = node.links_of(&[uplink.as_str()], false);
        let mut found = node.reading.found(&links);
        found.extend(node.reading.found_on_own(&links));
        wrong.entries(&Difference::between(&wanted, &found));
        Ok(())
    }

    fn look_at_ports(&self, shape: &Shape, sight: &Sight, bridge: Option<u32>, wrong: &mut Wrong) {
        for (link, mark) in sight.ports.iter().filter(|(link, _)| !self.is_in_flux(link)) {
            let bridge = bridge.filter(|_| mark.switched);
            wrong.link(&Like::host_end(shape, self.made_with(link), bridge), link);
        }
    }

    /// Attachments whose link is gone.
    fn find_lost(&self, net: &Net, sight: &Sight, survey: &mut Survey) {
        let known = self.known();
        let lost = known
            .iter()
            .filter(|(host, known)| known.network == net.name && !sight.links.contains_key(host.as_str()));
        survey.attachments.extend(lost.map(|(_, k)| (k.mark.sandbox.clone(), k.mark.interface.clone())));
    }

    /// Attachments of the node's own Network that ports of the node no longer lead to.
    fn find_closed_ports_of_node(&self, node: &mut Sight, survey: &mut Survey) -> Result<()> {
        let ports = std::mem::take(&mut node.ports);
        let closed = self.closed_ports(&ports, node);
        node.ports = ports;
        survey.attachments.extend(closed?);
        Ok(())
    }

    fn find_closed_ports(&self, router: &Sight, node: &mut Sight, survey: &mut Survey) -> Result<()> {
        survey.attachments.extend(self.closed_ports(&router.ports, node)?);
        Ok(())
    }

    fn closed_ports(
        &self,
        ports: &[(Link, Mark)],
        node: &mut Sight,
    ) -> Result<Vec<(knit_runtime::SandboxId, knit_runtime::InterfaceName)>> {
        let mut open = ports.iter().filter(|(_, mark)| mark.ports).peekable();
        let Some(Tables::Compare(comparison)) = node.tables.as_mut().filter(|_| open.peek().is_some()) else {
            return Ok(Vec::new());
        };
        let table = comparison.read(&self.node, &rules::table(Family::Inet))?;
        let leads = |host: &str| {
            let sets = rules::port_sets();
            let mut there = sets.iter().filter_map(|set| table?.sets.get(&set.name));
            there.any(|set| set.elements.values().any(|e| e.comment.as_deref() == Some(host)))
        };
        let closed = open.filter(|(link, _)| !leads(link.name.as_str()));
        Ok(closed.map(|(_, mark)| (mark.sandbox.clone(), mark.interface.clone())).collect())
    }
}

impl Sight {
    /// The numbers of links, with those of all ports if wanted.
    fn links_of(&self, names: &[&str], ports: bool) -> Links {
        let number = |name: &&str| self.links.get(*name).map(|link| ((*name).to_owned(), link.index));
        let mut links: Links = names.iter().filter_map(number).collect();
        if ports {
            links.extend(self.ports.iter().map(|(link, _)| (link.name.to_string(), link.index)));
        }
        links
    }

    /// What is wrong with the rules so far.
    fn take_wrong(&mut self) -> Vec<String> {
        match &mut self.tables {
            Some(Tables::Compare(comparison)) => std::mem::take(&mut comparison.wrong),
            _ => Vec::new(),
        }
    }

    /// Says what is wrong with the rules of a router; if nothing is, they need not be read again.
    fn conclude(&mut self, space: &Space, wrong: &mut Wrong) {
        let found = self.take_wrong();
        if found.is_empty() {
            space.rules_seen.compared(self.changed);
        }
        found.into_iter().for_each(|what| wrong.add("rules", what));
    }
}

impl Wrong {
    fn add(&mut self, kind: &'static str, message: impl Into<String>) {
        self.0.push(Damage { kind, message: message.into() });
    }

    fn link(&mut self, like: &Like, link: &Link) {
        if let Some((_, message)) = like.fix(link) {
            self.add("links", message);
        }
    }

    fn sysctls(&mut self, names: impl Iterator<Item = knit_kernel::sysctl::Sysctl>) {
        names.for_each(|name| self.add("sysctls", format!("sysctl {name} is not 1")));
    }

    fn entries(&mut self, difference: &Difference) {
        if difference.is_empty() {
            return;
        }
        let missing = difference.put.iter().map(|entry| format!("missing: {entry}"));
        let foreign = difference.take.iter().map(|entry| format!("not wanted: {entry}"));
        let mut words: Vec<String> = missing.chain(foreign).collect();
        let more = words.len().saturating_sub(WORDS);
        words.truncate(WORDS);
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        self.add("routes", words.join("; "));
    }
}

/// All links of a namespace, by their names.
fn listed(handle: &Handle) -> Result<HashMap<String, Link>> {
    let links = handle.links(&LinkFilter::default()).map_err(internal("list links"))?;
    Ok(links.into_iter().map(|link| (link.name.to_string(), link)).collect())
}
