//! The tables inside a router, which are its Network's alone.

use std::sync::Arc;

use knit_kernel::link::Link;
use knit_nft::{Element, Family, TableState};
use knit_runtime::Result;
use knit_types::sync::Locked;

use crate::mark::Mark;
use crate::moves::InMotion;
use crate::networks::Net;
use crate::node_tables::source_elements;
use crate::rules::{self, Elements, SetElement};
use crate::shape::Shape;
use crate::tables::{Comparison, apply, exchange};

/// Brings the tables inside a router to what is wanted. They are read only if somebody else touched them.
pub(crate) fn settle(net: &Net, shape: &Arc<Shape>, ports: &[(Link, Mark)]) -> Result<()> {
    let mut known = net.rules.locked();
    if let Some((at, before)) = known.take()
        && before.network.topology == shape.network.topology
        && net.node.senses.is_untouched(&net.space, Some(at))?
        && exchange_rules(net, &before, shape)?
    {
        *known = Some((at, Arc::clone(shape)));
        return Ok(());
    }
    let at = net.space.rules_seen.now();
    let mut are_new = true;
    for (layout, elements) in router_tables(net, shape, ports, &InMotion::default()) {
        let elements = Elements { wanted: elements, owns: &|_, _| true };
        are_new &= apply(&net.space, &layout, &elements)?.is_new;
    }
    if are_new {
        net.space.rules_seen.compared(at);
    }
    *known = Some((at, Arc::clone(shape)));
    Ok(())
}

/// Exchanges what a Network has in its router's tables, besides its pods' sources, without reading them.
fn exchange_rules(net: &Net, before: &Shape, shape: &Shape) -> Result<bool> {
    let (before, wanted) = (router_elements(before), router_elements(shape));
    let own = rules::table(Family::Inet);
    let tables = shape.driver().tables(net.node.config.vxlan_port);
    let layout = tables.iter().find(|layout| *layout.id() == own);
    layout.map_or(Ok(false), |layout| exchange(&net.space, layout, &before, &wanted))
}

/// Lays the rules inside a router down of which nothing else is known, with the elements that are there.
pub(crate) fn close(net: &Net, tables: Vec<TableState>) -> Result<()> {
    for layout in tables {
        apply(&net.space, &layout, &Elements::none())?;
    }
    Ok(())
}

/// Compares the tables inside a router.
pub(crate) fn compare(
    net: &Net,
    comparison: &mut Comparison,
    shape: &Shape,
    ports: &[(Link, Mark)],
    motion: &InMotion,
) {
    let owns = |set: &knit_nft::Name, e: &Element| !motion.is_source_in_motion(set, e);
    for (layout, wanted) in router_tables(net, shape, ports, motion) {
        comparison.compare(&layout, &Elements { wanted, owns: &owns });
    }
}

/// The tables inside a router, with all that is wanted in each.
fn router_tables(
    net: &Net,
    shape: &Shape,
    ports: &[(Link, Mark)],
    motion: &InMotion,
) -> Vec<(TableState, Vec<SetElement>)> {
    let driver = shape.driver();
    let sources = source_elements(ports.iter().filter(|(link, _)| motion.has_settled(link)));
    let parts = [(driver.sources(), sources), (rules::table(Family::Inet), router_elements(shape))];
    let wanted = |table: TableState| {
        let own = parts.iter().filter(|(id, _)| id == table.id());
        let puts = own.flat_map(|(_, puts)| puts.iter().cloned()).collect();
        (table, puts)
    };
    driver.tables(net.node.config.vxlan_port).into_iter().map(wanted).collect()
}

/// What a Network has in its router's own table.
fn router_elements(shape: &Shape) -> Vec<SetElement> {
    let mut puts = rules::router::elements(shape);
    puts.extend(shape.driver().router_elements());
    puts
}
