//! The node's tables, which all Networks share: whose part is what, and what of it is known without reading.
//!
//! A Network that changes costs its own part. The tables are read when this runtime begins and after somebody
//! else touched them; from then on what is in force follows from the Networks that were set up.

use std::collections::HashMap;
use std::sync::Arc;

use knit_kernel::link::Link;
use knit_nft::{self as nft, Element, Family, Nftables as _, TableState, Transaction};
use knit_runtime::Result;

use crate::default_router;
use crate::fail::internal;
use crate::mark::Mark;
use crate::moves::InMotion;
use crate::node::Node;
use crate::router::uplink_elements;
use crate::rules::{self, Elements, SetElement};
use crate::shape::{RouterHome, Shape};
use crate::tables::{Applied, Comparison, apply, difference, exchange};
use crate::uplink::node_end;

/// What is known of the node's tables.
#[derive(Debug, Default)]
pub(crate) struct NodeTables {
    /// How often others had changed the rules when they were read and made right; none if they must be read.
    known_at: Option<u64>,
    /// The same, if that was because there were none.
    made_at: Option<u64>,
    /// The Networks whose part is in force, by their numbers.
    in_force: HashMap<u32, Arc<Shape>>,
    /// Parts that were found and follow from no Network that is in force, by the Networks' numbers: an
    /// earlier runtime's, or damaged.
    left: HashMap<u32, Vec<SetElement>>,
}

impl NodeTables {
    /// The Networks whose part is in force, by their numbers.
    pub fn in_force(&self) -> impl Iterator<Item = u32> + '_ {
        self.in_force.keys().copied()
    }

    /// How often others had changed the rules when all of the tables were made, if they were made anew; to be
    /// asked once.
    pub fn take_made(&mut self) -> Option<u64> {
        self.made_at.take()
    }

    /// The Networks that have a part which follows from none that is in force, by their numbers.
    pub fn left(&self) -> impl Iterator<Item = u32> + '_ {
        self.left.keys().copied()
    }

    /// Forgets parts that were taken away.
    pub fn forget_left(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.left.retain(|id, _| !is_gone(*id));
    }

    /// Brings one Network's part of the node's tables to what is wanted.
    pub fn settle_part(&mut self, node: &Node, shape: &Arc<Shape>, ports: &[(Link, Mark)]) -> Result<()> {
        let (id, wanted) = (shape.id(), part(shape));
        if self.exchange_part(node, shape.home, id, &wanted)? {
            self.in_force.insert(id, Arc::clone(shape));
            return Ok(());
        }
        let mut all = wanted;
        if shape.home == RouterHome::Node {
            all.extend(source_elements(ports));
        }
        let owned = |set: &knit_nft::Name, e: &Element| owns(set, e, shape.home, id);
        self.read_and_settle(node, &Elements { wanted: all, owns: &owned }, id)?;
        self.in_force.insert(id, Arc::clone(shape));
        Ok(())
    }

    /// Takes a Network's part out of the node's tables.
    pub fn clear_part(&mut self, node: &Node, home: RouterHome, id: u32) -> Result<()> {
        if !self.exchange_part(node, home, id, &[])? {
            let owned = |set: &knit_nft::Name, e: &Element| owns(set, e, home, id);
            self.read_and_settle(node, &Elements { wanted: Vec::new(), owns: &owned }, id)?;
        }
        self.in_force.remove(&id);
        Ok(())
    }

    /// Lays the rules of the node's tables down, with the elements that are there: whoever they are of,
    /// nothing is open that was not.
    pub fn close(&mut self, node: &Node) -> Result<()> {
        *self = Self::default();
        let layout = layout(node);
        apply(&node.space, &layout, &Elements::none())?;
        apply(&node.space, &rules::port::no_arp(), &Elements::none())?;
        Ok(())
    }

    /// Deletes the tables.
    pub fn delete(&mut self, node: &Node) -> Result<()> {
        *self = Self::default();
        let mut kernel = node.space.rules()?;
        for family in [Family::Inet, Family::Arp] {
            let mut transaction = Transaction::new();
            transaction.delete_table(&rules::table(family));
            match kernel.commit(&transaction) {
                Err(error) if !error.is_not_found() => {
                    return Err(internal::<nft::Error>("delete the node's rules")(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Exchanges a Network's part without reading the tables; false if they must be read.
    fn exchange_part(
        &mut self,
        node: &Node,
        home: RouterHome,
        id: u32,
        wanted: &[SetElement],
    ) -> Result<bool> {
        if !node.senses.is_untouched(&node.space, self.known_at)? {
            return Ok(false);
        }
        let before = match (self.in_force.get(&id), home) {
            (Some(shape), _) => part(shape),
            // Its pods' sources, too, may be from before.
            (None, RouterHome::Node) => return Ok(false),
            (None, RouterHome::Own) => self.left.remove(&id).unwrap_or_default(),
        };
        let done = exchange(&node.space, &layout(node), &before, wanted)?;
        if !done {
            self.in_force.remove(&id);
        }
        Ok(done)
    }

    /// Reads the tables and makes them right for one Network; what is there of others is remembered.
    fn read_and_settle(&mut self, node: &Node, elements: &Elements<'_>, id: u32) -> Result<()> {
        let mut before = std::mem::take(self);
        let at = node.space.rules_seen.now();
        let Applied { state, is_new } = apply(&node.space, &layout(node), elements)?;
        let arp = apply(&node.space, &rules::port::no_arp(), &Elements::none())?;
        let mut found = parts_of(&state);
        found.remove(&id);
        before.in_force.retain(|other, shape| {
            let found = found.get(other).map_or(&[][..], Vec::as_slice);
            // The default Network's pods were not compared: the tables are read again when it is set up.
            *other != id
                && shape.home == RouterHome::Own
                && difference(&state, found, &part(shape)).is_empty()
        });
        found.retain(|id, _| !before.in_force.contains_key(id));
        let made_at = (is_new && arp.is_new).then_some(at);
        *self = Self { known_at: Some(at), made_at, in_force: before.in_force, left: found };
        Ok(())
    }
}

/// A Network's part, without its pods' sources: these come and go with attachments.
fn part(shape: &Shape) -> Vec<SetElement> {
    let mut puts = match shape.home {
        RouterHome::Node => default_router::elements(shape),
        RouterHome::Own => uplink_elements(shape, &node_end(shape.id())),
    };
    puts.extend(rules::tunnel::elements(shape));
    puts
}

/// Whether an element is a Network's, its pods' sources included.
fn owns(set: &str, element: &Element, home: RouterHome, id: u32) -> bool {
    match home {
        RouterHome::Node => rules::node::is_default(set, element, id),
        RouterHome::Own => rules::node::network_of(set, element) == Some(id),
    }
}

/// Compares a Network's part of the node's tables.
pub(crate) fn compare_part(
    node: &Node,
    comparison: &mut Comparison,
    shape: &Shape,
    ports: &[(Link, Mark)],
    motion: &InMotion,
) {
    let mut wanted = part(shape);
    if shape.home == RouterHome::Node {
        wanted.extend(source_elements(ports.iter().filter(|(link, _)| motion.has_settled(link))));
    }
    let owned = |set: &knit_nft::Name, e: &Element| {
        owns(set, e, shape.home, shape.id()) && !motion.is_source_in_motion(set, e)
    };
    comparison.compare(&layout(node), &Elements { wanted, owns: &owned });
    comparison.compare(&rules::port::no_arp(), &Elements::none());
}

fn layout(node: &Node) -> TableState {
    let (each, together) = (node.config.uplink_connections, node.config.uplinks_together);
    rules::node::layout(node.config.vxlan_port, rules::node::Flows { each, together })
}

/// The sources of pods.
pub(crate) fn source_elements<'a>(ports: impl IntoIterator<Item = &'a (Link, Mark)>) -> Vec<SetElement> {
    let sources =
        |(link, mark): &(Link, Mark)| rules::source_elements(link.name.as_str(), mark.mac, mark.ips());
    ports.into_iter().flat_map(sources).collect()
}

/// What there is of each Network with an uplink, by its number.
fn parts_of(state: &TableState) -> HashMap<u32, Vec<SetElement>> {
    let mut parts: HashMap<u32, Vec<SetElement>> = HashMap::new();
    for (name, set) in &state.sets {
        for element in set.elements.values() {
            if let Some(id) = rules::node::network_of(name, element) {
                parts.entry(id).or_default().push(SetElement::new(set.set.clone(), element.clone()));
            }
        }
    }
    parts
}
