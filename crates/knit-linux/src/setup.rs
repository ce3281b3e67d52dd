//! Node set-up: brings this node's side of a Network to what is described, whatever is there.
//!
//! The same pass makes, changes, repairs and upgrades: it lays down what is wanted, reads what is there and
//! is ours, and applies the difference. Rules come first, so that nothing is ever reachable that should not
//! be.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::Link;
use knit_kernel::{Handle, IfName};
use knit_runtime::{Error, Network, Result};
use knit_types::Family as IpFamily;
use knit_types::sync::ReadWrite;

use crate::core::Core;
use crate::fail::internal;
use crate::mark::Mark;
use crate::moves::MovingSubject;
use crate::networks::Net;
use crate::rules::{self, SetElement};
use crate::settings;
use crate::shape::{Facts, RouterHome, Shape};
use crate::topology::{self, Driver};
use crate::wanted::{Difference, Entry, Links, found};

/// A pod's namespace may go at any time, and its link with it: then what there is is listed again.
const LIST_ATTEMPTS: usize = 5;

impl Core {
    /// Makes this node ready for a Network's pods, or brings it to what has changed.
    pub fn setup_network(&self, network: &Network) -> Result<()> {
        let _moving = self.moves.begin(MovingSubject::Network(network.name.clone()));
        let about = |error: Error| error.on(network.name.as_str());
        self.node.room.make(&self.node.space);
        self.sweep_strays();
        let home = self.networks.home(&network.name);
        let driver = topology::of(network.topology);
        self.take_other_kind_down(network, driver).map_err(about)?;
        let facts = self.node.facts(driver.parent(network));
        let worked_out = facts.and_then(|facts| Ok((Shape::of(network, &facts, home)?, facts)));
        let (shape, facts) = worked_out.map_err(|error| {
            if let Err(error) = driver.hold_closed(self, network, home) {
                let error = crate::fail::chain(&error);
                tracing::error!(network = network.name, error, "cannot keep the rules of a Network in force");
            }
            about(error)
        })?;
        let shape = Arc::new(shape);
        let set_up = || shape.driver().set_up(self, &shape, &facts);
        let mut done = set_up();
        for _ in 1..LIST_ATTEMPTS {
            match &done {
                Err(error) if is_of_gone_link(error) => done = set_up(),
                _ => break,
            }
        }
        done.map_err(about)?;
        if let Err(error) = self.sweep_left() {
            let error = crate::fail::chain(&error);
            tracing::error!(error, "cannot remove what Networks left that are gone");
        }
        Ok(())
    }

    /// Takes the namespace away that a Network of another kind had under this name before this runtime began.
    fn take_other_kind_down(&self, network: &Network, driver: &dyn Driver) -> Result<()> {
        let there = self.networks.get(&network.name)?;
        let other = |net: &Net| net.driver().topology().has_router() != driver.topology().has_router();
        match there {
            Some(net) if other(&net) => self.remove_network(&network.name),
            _ => Ok(()),
        }
    }

    /// A Network that cannot be set up as it should be now keeps the rules that it has, and gets those back
    /// that somebody took away: its pods run on, and what keeps Networks apart does not depend on why it
    /// cannot be set up.
    pub fn hold_router_closed(&self, network: &Network, home: RouterHome) -> Result<()> {
        let net = self.networks.get(&network.name)?;
        let Some(net) = net.filter(|net| home == RouterHome::Own || net.shape().is_some()) else {
            return self.node.close_tables(&mut self.node.tables());
        };
        let _alone = net.gate.writing();
        let Some(shape) = net.shape() else {
            self.node.close_tables(&mut self.node.tables())?;
            return net.close_rules(topology::of(network.topology));
        };
        let ports = ports(&*net.space.links()?)?;
        if home == RouterHome::Own {
            net.settle_rules(&shape, &ports)?;
        }
        self.node.settle_part(&mut self.node.tables(), &shape, &ports)?;
        self.attachments.settle_ports(&*net.space.links()?, &shape, &ports, None)
    }

    /// Makes or repairs a Network's router, wherever it is.
    pub fn set_router_up(&self, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        match shape.home {
            RouterHome::Node => self.setup_default(shape, facts),
            RouterHome::Own => self.setup_router(shape, facts),
        }
    }

    fn setup_default(&self, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        let net = self.networks.adopt(&shape.network.name, Arc::clone(&self.node.space), shape.driver());
        let _alone = net.gate.writing();
        let handle = self.node.space.links()?;
        let ports = self.attachments.ports_by_name(&handle)?;
        let made = {
            let mut tables = self.node.tables();
            self.node.settle_part(&mut tables, shape, &ports)?;
            tables.take_made()
        };
        if let Some(at) = made.filter(|_| ports.is_empty())
            && self.has_no_attachments()?
        {
            // The first set-up of this node: what was put there just now need not be read back.
            self.node.space.rules_seen.compared(at);
        }
        self.take_sources_of_lost(&net, &ports)?;
        self.attachments.settle_ports(&handle, shape, &ports, None)?;
        settings::settle(&self.node.space, &settings::forwarding(shape, Some(&facts.uplink)))?;
        let tunnel = crate::tunnel::node_tunnel(shape.id());
        crate::tunnel::ensure_in_node(&handle, shape, facts, &tunnel)?;
        let wanted = default_entries(shape, facts, &ports, tunnel.as_str());
        let links = links_of(&handle, [facts.uplink.as_str(), tunnel.as_str()], &ports)?;
        let found = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
        let found = found.into_iter().chain(crate::tunnel::found(&handle, &links, &tunnel)?).collect();
        let difference = Difference::between(&wanted, &found);
        if !difference.is_empty() {
            tracing::debug!(network = shape.network.name, "\n{difference}");
        }
        difference.apply(&handle, &links).map_err(internal("update routes and neighbors"))?;
        net.set_shape(Arc::clone(shape), facts);
        self.sweep_ports()
    }

    /// Whether no Network has a pod here; what leads from the node's ports to one would have to be there, too.
    fn has_no_attachments(&self) -> Result<bool> {
        for net in self.networks.all()? {
            if !net.attachments()?.is_empty() {
                return Ok(false);
            }
        }
        Ok(self.attachments.making().is_empty())
    }
}

/// Whether something was to be put on a link that has just gone.
fn is_of_gone_link(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(knit_kernel::Error::is_not_found)
}

/// The attachments whose host ends are in a namespace.
pub(crate) fn ports(handle: &Handle) -> Result<Vec<(Link, Mark)>> {
    let filter = LinkFilter { kind: Some("veth"), owned: true, ..LinkFilter::default() };
    let links = handle.links(&filter).map_err(internal("list attachments"))?;
    Ok(links
        .into_iter()
        .filter_map(|link| {
            let mark = link.owner().and_then(Mark::parse)?;
            Some((link, mark))
        })
        .collect())
}

/// What the default Network wants in the node's table, besides what its pods and tunnels have there.
pub(crate) fn default_elements(shape: &Shape) -> Vec<SetElement> {
    let network = &shape.network;
    let subnets: Vec<IpNet> = network.subnets.iter().map(|subnet| subnet.cidr).collect();
    let pods = shape.pods();
    let nodes = network.blocks.iter().flat_map(|block| &block.node_addresses).copied().map(IpNet::from);
    let inside: Vec<IpNet> = network.not_outside.iter().chain(&pods).copied().chain(nodes).collect();
    let outward: &[IpNet] = if network.outside { &subnets } else { &[] };
    let mut wanted = Vec::new();
    let mut put = |set: fn() -> knit_nft::Set, nets: &[IpNet], family| {
        wanted.extend(
            rules::range_elements(nets, family).into_iter().map(|element| SetElement::new(set(), element)),
        );
    };
    put(rules::port::pods4, &pods, IpFamily::V4);
    put(rules::port::pods6, &pods, IpFamily::V6);
    put(rules::node::inside4, &inside, IpFamily::V4);
    put(rules::node::inside6, &inside, IpFamily::V6);
    put(rules::node::outward4, outward, IpFamily::V4);
    put(rules::node::outward6, outward, IpFamily::V6);
    wanted
}

/// What the default Network wants besides: the ways to other nodes, and its pods.
pub(crate) fn default_entries(
    shape: &Shape,
    facts: &Facts,
    ports: &[(Link, Mark)],
    tunnel: &str,
) -> BTreeSet<Entry> {
    let mut entries = topology::routed_remote_entries(shape, &facts.uplink, tunnel);
    for (link, mark) in ports {
        entries.extend(shape.driver().pod_entries(link.name.as_str(), mark));
    }
    entries
}

/// The numbers of links, with those of all ports.
pub(crate) fn links_of<'a>(
    handle: &Handle,
    names: impl IntoIterator<Item = &'a str>,
    ports: &[(Link, Mark)],
) -> Result<Links> {
    let mut links: Links = ports.iter().map(|(link, _)| (link.name.to_string(), link.index)).collect();
    for name in names {
        // A name that the kernel gave, or that we chose.
        let Ok(name) = IfName::new(name) else { continue };
        let link = handle.link_by_name(&name).map_err(internal(format!("look for link {name}")))?;
        links.extend(link.map(|link| (name.to_string(), link.index)));
    }
    Ok(links)
}
