//! What no other node may be given for now.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_types::{Family, NetworkName};

use super::NodeAllocator;
use crate::pool::Standing;

impl NodeAllocator {
    /// The ranges of each Network that no other node may be given while this node has them: its blocks, also
    /// those that were taken back and still have pods, and what its pods have out of blocks that it does not
    /// know. Addresses of a Network's reserved ranges are left out: they are in nobody's block.
    #[must_use]
    pub fn held_ranges(&self) -> BTreeMap<NetworkName, Vec<IpNet>> {
        let mut held: BTreeMap<NetworkName, Vec<IpNet>> = BTreeMap::new();
        for (name, state) in &self.networks {
            let ranges = state.blocks.iter().flat_map(|b| Family::ALL.map(|family| b.block.prefix(family)));
            held.entry(name.clone()).or_default().extend(ranges.flatten());
        }
        let of_leases = self.leases.values().flat_map(|lease| {
            lease.addresses.iter().map(|address| (&lease.network, address)).collect::<Vec<_>>()
        });
        let withheld = self.withheld.iter().flat_map(|(address, entries)| {
            entries.iter().filter_map(|entry| Some((entry.network()?, *address)))
        });
        for (network, address) in of_leases.chain(withheld) {
            if self.is_in_no_block(network, address) {
                held.entry(network.clone()).or_default().push(IpNet::from(address));
            }
        }
        held.retain(|_, ranges| {
            ranges.sort_unstable();
            ranges.dedup();
            !ranges.is_empty()
        });
        held
    }

    /// Whether an address is in no block of this node, although only a block can have given it.
    fn is_in_no_block(&self, network: &str, address: IpAddr) -> bool {
        let Some(state) = self.networks.get(network) else { return true };
        state.slot_of(address).is_none() && state.pool.standing(address) != Standing::Reserved
    }
}
