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
use crate::topology::Driver;

impl Net {
    /// Brings the tables inside a router to what is wanted. They are read only if somebody else touched them.
    pub fn settle_rules(&self, shape: &Arc<Shape>, ports: &[(Link, Mark)]) -> Result<()> {
        let mut known = self.rules.locked();
        if let Some((at, before)) = known.take()
            && before.network.topology == shape.network.topology
            && self.node.senses.is_untouched(&self.space, Some(at))?
            && self.exchange_rules(&before, shape)?
        {
            *known = Some((at, Arc::clone(shape)));
            return Ok(());
        }
        let at = self.space.rules_seen.now();
        let mut are_new = true;
        for (layout, elements) in self.router_tables(shape, ports, &InMotion::default()) {
            let elements = Elements { wanted: elements, owns: &|_, _| true };
            are_new &= apply(&self.space, &layout, &elements)?.is_new;
        }
        if are_new {
            self.space.rules_seen.compared(at);
        }
        *known = Some((at, Arc::clone(shape)));
        Ok(())
    }

    /// Exchanges what a Network has in its router's tables, besides its pods' sources, without reading them.
    fn exchange_rules(&self, before: &Shape, shape: &Shape) -> Result<bool> {
        let (before, wanted) = (router_elements(before), router_elements(shape));
        let own = rules::table(Family::Inet);
        let tables = shape.driver().tables(self.node.config.vxlan_port);
        let layout = tables.iter().find(|layout| *layout.id() == own);
        layout.map_or(Ok(false), |layout| exchange(&self.space, layout, &before, &wanted))
    }

    /// Lays the rules inside a router down of which nothing else is known, with the elements that are there.
    pub fn close_rules(&self, driver: &dyn Driver) -> Result<()> {
        for layout in driver.tables(self.node.config.vxlan_port) {
            apply(&self.space, &layout, &Elements::none())?;
        }
        Ok(())
    }

    /// Compares the tables inside a router.
    pub fn compare_rules(
        &self,
        comparison: &mut Comparison,
        shape: &Shape,
        ports: &[(Link, Mark)],
        motion: &InMotion,
    ) {
        let owns = |set: &knit_nft::Name, e: &Element| !motion.is_source_in_motion(set, e);
        for (layout, wanted) in self.router_tables(shape, ports, motion) {
            comparison.compare(&layout, &Elements { wanted, owns: &owns });
        }
    }

    /// The tables inside a router, with all that is wanted in each.
    fn router_tables(
        &self,
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
        driver.tables(self.node.config.vxlan_port).into_iter().map(wanted).collect()
    }
}

/// What a Network has in its router's own table.
fn router_elements(shape: &Shape) -> Vec<SetElement> {
    let mut puts = rules::router::elements(shape);
    puts.extend(shape.driver().router_elements());
    puts
}
