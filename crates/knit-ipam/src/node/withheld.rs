//! Addresses that nobody gets, though no lease has them: what a record holds that cannot be read.

use std::net::IpAddr;

use knit_types::NetworkName;

use super::NodeAllocator;
use crate::lease::{Cooling, Millis};

/// Why one address is given to nobody.
#[derive(Clone, Debug)]
pub(super) struct Withheld {
    /// Whose it is, for a message.
    holder: String,
    /// The Network that it is of; any one, if that is not known.
    network: Option<NetworkName>,
}

impl Withheld {
    /// The Network that it is of, if that is known.
    pub(super) fn network(&self) -> Option<&NetworkName> {
        self.network.as_ref()
    }

    fn concerns(&self, network: &str) -> bool {
        self.network.as_ref().is_none_or(|own| own == network)
    }
}

impl NodeAllocator {
    /// Keeps an address from everybody until [`NodeAllocator::release`]. `holder` says whose it is; without a
    /// Network it is kept back in each of them.
    pub fn withhold(&mut self, holder: &str, network: Option<&NetworkName>, address: IpAddr) {
        let entry = Withheld { holder: holder.to_owned(), network: network.cloned() };
        for (_, state) in self.networks.iter_mut().filter(|(name, _)| entry.concerns(name)) {
            if let Some((n, index)) = state.slot_of(address) {
                state.blocks[n].withhold(index);
            }
        }
        self.withheld.entry(address).or_default().push(entry);
    }

    /// Gives back what was kept for a holder. It rests as freed addresses do; what rests is told.
    pub fn release(&mut self, holder: &str, now: Millis) -> Vec<Cooling> {
        let mut released: Vec<(IpAddr, Withheld)> = Vec::new();
        self.withheld.retain(|address, entries| {
            released.extend(entries.extract_if(.., |e| e.holder == holder).map(|entry| (*address, entry)));
            !entries.is_empty()
        });
        let mut rests = Vec::new();
        for (address, entry) in released {
            let known = self.networks.keys().filter(|name| entry.concerns(name)).cloned();
            // Its Network may become known later.
            let networks: Vec<NetworkName> = entry.network.iter().cloned().chain(known).collect();
            for network in networks {
                rests.push(self.let_rest(network, address, now));
            }
        }
        rests.dedup();
        rests
    }

    fn let_rest(&mut self, network: NetworkName, address: IpAddr, now: Millis) -> Cooling {
        let slot = self.networks.get(&network).and_then(|state| {
            let (n, index) = state.slot_of(address)?;
            Some((n, index, state.blocks[n].block.at(index)?))
        });
        let mut first = address;
        if let Some((n, index, pair)) = slot {
            first = pair.first();
            let held = pair.iter().any(|a| self.is_held(&network, a));
            if let Some(state) = self.networks.get_mut(&network) {
                state.blocks[n].set_freed_at(index, now);
                if !held {
                    state.blocks[n].give_back(index);
                }
                state.blocks.retain(|b| !b.withdrawn || b.leased() > 0);
            }
        }
        let cooling = Cooling { network: network.clone(), address: first, freed_at: now, pod: None };
        self.cooling.insert((network, first), cooling.clone());
        cooling
    }

    /// Whose an address of a Network is that nobody gets.
    pub(super) fn withholder(&self, network: &str, address: IpAddr) -> Option<&str> {
        let entries = self.withheld.get(&address)?;
        // As for leases: primary Networks share the node's routes.
        let is_primary = self.is_primary(network);
        let shared = |entry: &Withheld| {
            is_primary && entry.network.as_deref().is_some_and(|network| self.is_primary(network))
        };
        let keeps = |entry: &&Withheld| entry.concerns(network) || shared(entry);
        entries.iter().find(keeps).map(|entry| entry.holder.as_str())
    }

    /// How many addresses of this very Network nobody gets.
    pub(super) fn withheld_of(&self, network: &str) -> usize {
        let of = |entry: &&Withheld| entry.network.as_deref() == Some(network);
        self.withheld.values().flatten().filter(of).count()
    }
}
