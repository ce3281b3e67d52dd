//! Networks' numbers: unique, and never changed once given.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{Cluster, Memory};

/// The largest VNI.
const LAST: u32 = (1 << 24) - 1;

/// Each Network's number. Those that have none get the next one above all that are known, so that the number of a
/// Network that was deleted a moment ago, and may still be set up somewhere, is not given again at once.
pub(super) fn assign(cluster: &Cluster, memory: &mut Memory) -> BTreeMap<String, u32> {
    let mut ids: BTreeMap<String, u32> = BTreeMap::new();
    for (name, network) in &cluster.networks {
        let uid = network.metadata.uid.clone().unwrap_or_default();
        let known = network.status.as_ref().and_then(|s| s.id).or_else(|| memory.ids.get(&uid).copied());
        if let Some(id) = known {
            ids.insert(name.clone(), id);
            memory.ids.insert(uid, id);
        }
    }
    let mut taken: BTreeSet<u32> = memory.ids.values().copied().chain(ids.values().copied()).collect();
    // The oldest first, so that numbers follow the order in which Networks were made.
    let mut without: Vec<_> = cluster.networks.iter().filter(|(name, _)| !ids.contains_key(*name)).collect();
    without.sort_by_key(|(name, network)| (network.metadata.creation_timestamp.clone(), (*name).clone()));
    for (name, network) in without {
        let Some(id) = next(&taken) else { break };
        taken.insert(id);
        memory.ids.insert(network.metadata.uid.clone().unwrap_or_default(), id);
        ids.insert(name.clone(), id);
    }
    ids
}

fn next(taken: &BTreeSet<u32>) -> Option<u32> {
    let above = taken.last().map_or(1, |last| last.saturating_add(1));
    if above <= LAST { Some(above) } else { (1..=LAST).find(|id| !taken.contains(id)) }
}
