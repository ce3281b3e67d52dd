//! What one policy of a namespace may cost in a packet filter that all namespaces share.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use super::Problems;
use crate::model::{AddressRanges, Direction, Peer, Policy, Rule};
use crate::sets::elements_of;

/// So many elements may a policy become for each pod that it acts on.
const MAX_ELEMENTS: usize = 10_000;

/// A policy, or what is left of one that is too large: it isolates, and lets nobody in or out.
pub(super) fn limited(mut policy: Policy, problems: &mut Problems) -> Policy {
    for (field, direction) in [("spec.ingress", Direction::Ingress), ("spec.egress", Direction::Egress)] {
        let rules = match direction {
            Direction::Ingress => &mut policy.ingress,
            Direction::Egress => &mut policy.egress,
        };
        if rules.as_deref().is_some_and(is_too_large) {
            problems.add(
                field,
                format!(
                    "rules, peers and ports come to more than {MAX_ELEMENTS} elements for each pod: they \
                     allow nothing; use ranges of ports, or fewer rules"
                ),
            );
            *rules = Some(Box::default());
        }
    }
    policy
}

/// Whether it becomes more elements than one policy may: those of each rule for each of its peers, and for
/// each part of the address space that blocks of different rules cut out.
fn is_too_large(rules: &[Rule]) -> bool {
    let mut total = 0;
    let mut blocks: Vec<(AddressRanges, usize)> = Vec::new();
    for rule in rules {
        let names = rule.names().count();
        // Added up by others for each class of peers.
        let ports = if rule.ports.is_some() { elements_of(&rule.numbers()) + names } else { 1 };
        let (mut ranges, mut others) = (Vec::new(), 0);
        for peer in rule.peers.iter().flatten() {
            match peer {
                Peer::Addresses(some) => ranges.push(some.clone()),
                Peer::Pods(_) | Peer::Nodes(_) => others += 1,
            }
        }
        total += ports * if rule.peers.is_none() { 1 } else { others };
        if !ranges.is_empty() {
            blocks.push((AddressRanges::union(&ranges), ports));
        }
        if total > MAX_ELEMENTS {
            return true;
        }
    }
    of_blocks(&blocks, MAX_ELEMENTS - total).is_none()
}

/// How many elements the blocks of rules become, each with its ports; nothing if they are more than `most`.
fn of_blocks(blocks: &[(AddressRanges, usize)], most: usize) -> Option<usize> {
    // Where a range begins, and right behind its end.
    let mut edges: BTreeMap<(bool, u128), Vec<(usize, bool)>> = BTreeMap::new();
    for (rule, (ranges, _)) in blocks.iter().enumerate() {
        for (first, last) in ranges.iter() {
            edges.entry(place(first)).or_default().push((rule, true));
            let (family, last) = place(last);
            if let Some(behind) = last.checked_add(1) {
                edges.entry((family, behind)).or_default().push((rule, false));
            }
        }
    }
    let (mut inside, mut mark, mut ports, mut total) = (HashSet::new(), 0_u64, 0, 0);
    let mut seen: HashSet<u64> = HashSet::new();
    for changes in edges.into_values() {
        for (rule, begins) in changes {
            let changed = if begins { inside.insert(rule) } else { inside.remove(&rule) };
            if changed {
                mark ^= mixed(rule);
                let of_rule = blocks.get(rule).map_or(0, |(_, ports)| *ports);
                ports = if begins { ports + of_rule } else { ports - of_rule };
            }
        }
        // Parts that the same rules are about are one class.
        if !inside.is_empty() && seen.insert(mark) {
            total += ports;
            if total > most {
                return None;
            }
        }
    }
    Some(total)
}

fn place(address: IpAddr) -> (bool, u128) {
    match address {
        IpAddr::V4(address) => (false, u128::from(address.to_bits())),
        IpAddr::V6(address) => (true, address.to_bits()),
    }
}

/// A number that tells a set of rules from others when those of its rules are combined.
fn mixed(rule: usize) -> u64 {
    let mut x = (rule as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
