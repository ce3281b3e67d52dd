//! How much of a Network one node may have. What a node says of itself is its own word: whoever has its token
//! could ask until nothing is left for anybody else.

use knit_ipam::Pool;

use crate::cluster::Cluster;

/// Pods of a node whose kubelet does not say how many it runs, and the fewest that are counted: addresses of
/// pods that come and go rest for a while.
const PODS: u32 = 110;
/// Addresses for each of them: several interfaces, and those that rest.
const PER_POD: u32 = 4;
/// A subnet so small that halves of it serve nobody is whose who comes first.
const SMALL: u64 = 16;

/// Whether a node that holds so many addresses of a Network may have a further block; if not, why, in words.
/// The first one is everybody's.
pub(super) fn allows(cluster: &Cluster, pool: Option<&Pool>, node: &str, held: u64) -> Result<(), String> {
    // Without subnets a node's podCIDRs are its blocks, and the cluster gave it those.
    let (Some(pool), true) = (pool, held > 0) else { return Ok(()) };
    let pods = cluster.nodes.get(node).and_then(|view| view.pods).unwrap_or(PODS).max(PODS);
    let network = pool.network();
    if held >= u64::from(pods) * u64::from(PER_POD) {
        return Err(format!(
            "node {node} asks for a further block of Network {network}, though it holds {held} addresses and \
             may run {pods} \
             pods: it gets none. Look there for interfaces that nobody needs (knit get attachments), and for \
             a stolen token"
        ));
    }
    let others = cluster.nodes.len() > 1;
    let half = u64::try_from(pool.room() / 2).unwrap_or(u64::MAX).max(SMALL);
    if others && held >= half {
        return Err(format!(
            "node {node} asks for a further block of Network {network}, though it holds {held} addresses: no \
             node gets more \
             than half of a subnet. Spread the pods over more nodes, or make the Network again with a larger \
             subnet"
        ));
    }
    Ok(())
}
