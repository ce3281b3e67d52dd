//! How many addresses a Network has: used and free on nodes, and what no node has yet.

use knit_api::{AddressCounts, Family};
use knit_model::Network;

use super::index::Index;

/// "That many or more".
const MOST: i64 = (1 << 53) - 1;

/// One entry per family that the Network has.
pub(super) fn addresses(index: &Index<'_>, name: &str, network: &Network) -> Vec<AddressCounts> {
    let pool = network.pool().ok().flatten();
    Family::ALL
        .into_iter()
        .filter_map(|family| {
            let subnet = pool.and_then(|pool| pool.subnet(family));
            let said = index.addresses(name, family);
            let (used, mut free) = said.unwrap_or_default();
            if let Some(subnet) = subnet {
                let unassigned = index.unassigned(name, family).unwrap_or_else(|| subnet.unassigned(&[]));
                free = free.saturating_add(i128::try_from(unassigned).unwrap_or(i128::MAX));
            }
            let most = |number: i128| i64::try_from(number).unwrap_or(MOST).min(MOST);
            let there = subnet.is_some() || said.is_some();
            there.then(|| AddressCounts { family, used: most(used), free: most(free) })
        })
        .collect()
}
