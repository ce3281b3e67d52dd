//! Choosing addresses for a request without changing anything: what makes it all or nothing.

use std::net::IpAddr;

use super::block_state::Role;
use super::{NetworkState, NodeAllocator};
use knit_types::{AddressList, Addresses, Family, Mac, PodRef};

use crate::error::{LeaseError, NotLeasable};
use crate::lease::{Lease, LeaseKey, LeaseKind, Millis, Request, Want};
use crate::mac::{gateway_mac, is_derived};
use crate::pool::Standing;

/// One want, with what is needed to choose for it.
struct Choice<'a> {
    allocator: &'a NodeAllocator,
    state: &'a NetworkState,
    key: LeaseKey,
    pod: Option<&'a PodRef>,
    want: &'a Want,
    now: Millis,
    /// What the same request has been promised so far.
    staged: &'a [Lease],
}

impl NodeAllocator {
    /// What [`NodeAllocator::lease`] would give, with nothing changed.
    pub fn plan(&self, request: &Request, now: Millis) -> Result<Vec<Lease>, LeaseError> {
        let mut planned: Vec<Lease> = Vec::with_capacity(request.wants.len());
        for want in &request.wants {
            let key = LeaseKey::new(request.owner.clone(), want.interface.clone());
            if planned.iter().any(|lease| lease.key == key) {
                return Err(LeaseError::DuplicateRequest { key });
            }
            if let Some(known) = self.get(&key) {
                let mut lease = known.clone();
                let same_pod = match (&lease.pod, &request.pod) {
                    (Some(known), Some(asks)) => known.same_name(asks),
                    _ => true,
                };
                if !want.is_met_by(&lease) || !same_pod {
                    let (network, has) = (lease.network, lease.addresses.to_string());
                    return Err(LeaseError::Conflict { key, network, has });
                }
                lease.pod = lease.pod.or_else(|| request.pod.clone());
                planned.push(lease);
                continue;
            }
            let Some(state) = self.networks.get(&want.network) else {
                return Err(LeaseError::UnknownNetwork { key, network: want.network.clone() });
            };
            let pod = request.pod.as_ref();
            let choice = Choice { allocator: self, state, key, pod, want, now, staged: &planned };
            let lease = choice.lease()?;
            planned.push(lease);
        }
        Ok(planned)
    }
}

impl Choice<'_> {
    fn lease(self) -> Result<Lease, LeaseError> {
        let addresses = self.addresses()?;
        let derived = self.state.pool.mac(addresses.firsts());
        let mac = self.want.mac.unwrap_or(derived);
        self.check_mac(mac, derived)?;
        let asked = !self.want.addresses.is_empty() || mac != derived;
        Ok(Lease {
            key: self.key,
            pod: self.pod.cloned(),
            network: self.want.network.clone(),
            addresses,
            mac,
            kind: if asked { LeaseKind::Static } else { LeaseKind::Dynamic },
        })
    }

    /// The wanted addresses, and one of each family that was left open.
    fn addresses(&self) -> Result<AddressList, LeaseError> {
        let Some(fixed) = AddressList::from_list(&self.want.addresses) else {
            return self.dynamic().map(AddressList::from);
        };
        for address in fixed.iter() {
            self.check_fixed(address)?;
        }
        let open: Vec<Family> =
            self.state.pool.families().filter(|family| fixed.get(*family).is_none()).collect();
        if open.is_empty() {
            return Ok(fixed);
        }
        let rest = match self.partner(&fixed) {
            Some(pair) => pair,
            None => self.dynamic()?,
        };
        let chosen = open.into_iter().filter_map(|family| rest.get(family));
        let all: Vec<IpAddr> = fixed.iter().chain(chosen).collect();
        Ok(AddressList::from_list(&all).unwrap_or(fixed))
    }

    /// Whether a pod may have an address that it asks for.
    fn check_fixed(&self, address: IpAddr) -> Result<(), LeaseError> {
        let (key, network) = (self.key.clone(), self.want.network.clone());
        let slot = self.state.slot_of(address).map(|(n, index)| (&self.state.blocks[n], index));
        let reserved = match self.state.pool.standing(address) {
            Standing::Outside => return Err(LeaseError::OutsideSubnet { key, network, address }),
            Standing::Never(why) => return Err(LeaseError::Reserved { key, network, address, why }),
            Standing::Reserved => true,
            Standing::Ordinary => false,
        };
        if let Some((address, by)) = self.taken(&address.into()) {
            return Err(LeaseError::AddressInUse { key, network, address, by });
        }
        match slot {
            Some((block, index)) if block.role(index) == Role::Router => {
                Err(LeaseError::Reserved { key, network, address, why: NotLeasable::Router })
            }
            Some((block, index)) if block.is_leased(index) || self.is_staged(block.block.at(index)) => {
                let pair = block.block.at(index).expect("the index is inside the block");
                let by = self.taken(&pair).map_or_else(|| "another interface".to_owned(), |(_, by)| by);
                Err(LeaseError::AddressInUse { key, network, address, by })
            }
            Some((block, _)) if block.is_live() => Ok(()),
            _ if reserved => Ok(()),
            _ => Err(LeaseError::NotOnThisNode { key, network, address }),
        }
    }

    /// The pair of a wanted address in a block of this node, if its other half can be had.
    fn partner(&self, fixed: &AddressList) -> Option<Addresses> {
        let (n, index) = self.state.slot_of(fixed.first())?;
        let block = &self.state.blocks[n];
        let pair = block.block.at(index)?;
        (block.is_live() && block.role(index) == Role::Ordinary && self.taken(&pair).is_none())
            .then_some(pair)
    }

    /// The preferred index if it can be had, else the one that was unused for longest, of the oldest block
    /// that has one.
    fn dynamic(&self) -> Result<Addresses, LeaseError> {
        if let Some(addresses) = self.want.prefer.and_then(|address| self.preferred(address)) {
            return Ok(addresses);
        }
        let live = || self.state.blocks.iter().filter(|b| b.is_live());
        for block in live() {
            let ready = block.idle().take_while(|(at, _)| !self.allocator.is_quarantined(*at, self.now));
            for (_, index) in ready {
                let addresses = block.block.at(index).expect("an idle index is inside its block");
                if self.is_open(&addresses) {
                    return Ok(addresses);
                }
            }
        }
        let next_free_at = live()
            .flat_map(|block| block.idle().filter_map(|(at, _)| at))
            .map(|at| at.plus(self.allocator.config.quarantine))
            .filter(|at| *at > self.now)
            .min();
        let counts = self.allocator.counts(&self.want.network, self.now).unwrap_or_default();
        Err(LeaseError::Exhausted {
            key: self.key.clone(),
            network: self.want.network.clone(),
            counts: Box::new(counts.v4.or(counts.v6).unwrap_or_default()),
            next_free_at,
        })
    }

    /// The index of an address that the pod had before. Its own quarantine does not bar it.
    fn preferred(&self, address: IpAddr) -> Option<Addresses> {
        let (n, index) = self.state.slot_of(address)?;
        let block = &self.state.blocks[n];
        let addresses = block.block.at(index)?;
        let usable = block.is_live() && block.role(index) == Role::Ordinary && !block.is_leased(index);
        if !usable || !self.is_open(&addresses) {
            return None;
        }
        let cooling = self.allocator.cooling.get(&(self.want.network.clone(), addresses.first()));
        let own = cooling.and_then(|c| c.pod.as_ref()).zip(self.pod).is_some_and(|(a, b)| a.same_name(b));
        let barred = self.allocator.is_quarantined(block.freed_at(index), self.now) && !own;
        (!barred).then_some(addresses)
    }

    /// Whether an index can be leased: nobody has one of its addresses, and the pod does not ask for the rest
    /// of it.
    fn is_open(&self, addresses: &Addresses) -> bool {
        let own = self.want.addresses.iter().any(|fixed| addresses.contains(*fixed));
        !own && self.taken(addresses).is_none()
    }

    /// Who has one of these addresses, now or by this very request.
    fn taken(&self, addresses: &Addresses) -> Option<(IpAddr, String)> {
        let network = &self.want.network;
        let primary = self.allocator.is_primary(network);
        let clashes = |lease: &Lease| {
            let meet = lease.network == *network || (primary && self.allocator.is_primary(&lease.network));
            meet.then(|| lease.addresses.iter().find(|a| addresses.contains(*a))).flatten()
        };
        self.allocator.obstacle(network, addresses).or_else(|| {
            let staged = self.staged.iter().filter(|lease| self.allocator.get(&lease.key).is_none());
            staged.filter_map(|lease| Some((clashes(lease)?, lease.holder()))).next()
        })
    }

    /// Whether this very request has an address of an index.
    fn is_staged(&self, pair: Option<Addresses>) -> bool {
        let mut same = self.staged.iter().filter(|lease| lease.network == self.want.network);
        pair.is_some_and(|pair| same.any(|lease| lease.addresses.iter().any(|a| pair.contains(a))))
    }

    fn check_mac(&self, mac: Mac, derived: Mac) -> Result<(), LeaseError> {
        let id = self.state.pool.id();
        let leases = || self.allocator.leases().chain(self.staged).filter(|l| l.network == self.want.network);
        let why = if !mac.is_unicast() {
            "is not a unicast address".to_owned()
        } else if mac == derived {
            return Ok(());
        } else if mac == gateway_mac(id) {
            "belongs to the gateway".to_owned()
        } else if is_derived(id, mac) {
            "is reserved for another address".to_owned()
        } else if let Some(lease) = leases().find(|lease| lease.mac == mac) {
            format!("is in use by {}", lease.holder())
        } else {
            return Ok(());
        };
        Err(LeaseError::Mac { key: self.key.clone(), network: self.want.network.clone(), mac, why })
    }
}
