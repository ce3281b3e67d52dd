//! Networks' numbers: unique, and never changed once given. A number is a VNI on every node, so that of a
//! Network that is gone is not given again: a node that was cut off may still have it. The highest one is
//! kept in the API.

use std::collections::{BTreeMap, BTreeSet};

use knit_types::NetworkName;

use crate::cluster::{Cluster, Memory};

/// The largest VNI.
const MAX_VNI: u32 = (1 << 24) - 1;

/// Each Network's number. Those that have none get the next one above all that are known or were ever given.
pub(super) fn assign(cluster: &Cluster, memory: &mut Memory) -> BTreeMap<NetworkName, u32> {
    let mut ids: BTreeMap<NetworkName, u32> = BTreeMap::new();
    for (name, network) in &cluster.networks {
        let uid = network.uid().to_owned();
        let known = network.id().or_else(|| memory.ids.get(&uid).copied());
        if let Some(id) = known {
            ids.insert(name.clone(), id);
            memory.ids.insert(uid, id);
        }
    }
    let mut taken: BTreeSet<u32> = memory.ids.values().copied().chain(ids.values().copied()).collect();
    taken.extend((memory.numbers.highest > 0).then_some(memory.numbers.highest));
    // The oldest first, so that numbers follow the order in which Networks were made.
    let mut without: Vec<_> = cluster.networks.iter().filter(|(name, _)| !ids.contains_key(*name)).collect();
    without.sort_by(|(_, a), (_, b)| a.age().cmp(&b.age()));
    for (name, network) in without {
        let Some(id) = next(&taken) else { break };
        taken.insert(id);
        memory.ids.insert(network.uid().to_owned(), id);
        ids.insert(name.clone(), id);
    }
    ids
}

fn next(taken: &BTreeSet<u32>) -> Option<u32> {
    let above = taken.last().map_or(1, |last| last.saturating_add(1));
    if above <= MAX_VNI { Some(above) } else { (1..=MAX_VNI).find(|id| !taken.contains(id)) }
}
