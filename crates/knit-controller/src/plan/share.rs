//! How much of a Network one node may have. What a node says of itself is its own word: whoever has its token
//! could ask until nothing is left for anybody else.

use knit_ipam::{Block, Growth, Pool};

use crate::cluster::Cluster;

/// Pods of a node whose kubelet does not say how many it runs, and the fewest that are counted: addresses of
/// pods that come and go rest for a while.
const PODS: u32 = 110;
/// The most that are counted, whatever a kubelet says: it writes its Node itself.
const MOST_PODS: u32 = 1024;
/// Addresses for each of them: several interfaces, and those that rest.
const PER_POD: u32 = 4;

/// A subnet's own address, its gateway and its broadcast address: no pod's, but a block with one of them is
/// as good as another.
const SINGLE: u128 = 3;

/// What is left of a Network, and for whom.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Left {
    /// Addresses that are in no block.
    pub(super) addresses: u128,
    /// Addresses of the whole Network.
    pub(super) all: u128,
    /// Nodes that have no block yet, each of which may need its first one.
    pub(super) without: usize,
}

impl Left {
    /// What these blocks leave of a pool.
    pub(super) fn of(pool: &Pool, blocks: &[Block], without: usize) -> Self {
        let outside = |blocks: &[Block]| {
            let subnets = pool.families().filter_map(|family| pool.subnet(family));
            subnets.map(|subnet| subnet.unassigned(blocks)).min().unwrap_or(0).saturating_add(SINGLE)
        };
        Self { addresses: outside(blocks), all: outside(&[]), without }
    }

    /// How blocks of a node that has some already may grow, so that the others find their first one; none if
    /// there is only room for those.
    pub(super) fn growth(self) -> Option<Growth> {
        let mut growth = Growth::default();
        let spare = self.addresses.saturating_sub(self.kept(growth.first.addresses().into()));
        while u128::from(growth.largest.addresses()) > spare && growth.largest > growth.first {
            growth.largest = growth.largest.half()?;
        }
        // Where nobody waits, whatever is left is the asking node's.
        (self.without == 0 || u128::from(growth.largest.addresses()) <= spare).then_some(growth)
    }

    /// How many addresses are kept for first blocks of this size.
    fn kept(self, first: u128) -> u128 {
        let wanted = first.saturating_mul(self.without as u128);
        if wanted <= self.addresses {
            return wanted;
        }
        // There are more nodes than the Network has room for. Most of them may never run a pod of it: half of
        // it is for those that do.
        wanted.min(self.all / 2)
    }
}

/// How many addresses of a Network a node may have before it gets no further block.
pub(super) fn most(cluster: &Cluster, node: &str) -> u64 {
    u64::from(pods(cluster, node)) * u64::from(PER_POD)
}

/// How many pods of a node are counted.
fn pods(cluster: &Cluster, node: &str) -> u32 {
    cluster.nodes.get(node).and_then(|view| view.pods).unwrap_or(PODS).clamp(PODS, MOST_PODS)
}

/// Whether a node that holds so many addresses of a Network may have a further block, and how large; if not,
/// why, in words. The first one is everybody's.
pub(super) fn allows(
    cluster: &Cluster,
    pool: Option<&Pool>,
    node: &str,
    held: u64,
    left: impl FnOnce(&Pool) -> Left,
) -> Result<Growth, String> {
    // Without subnets a node's podCIDRs are its blocks, and the cluster gave it those.
    let (Some(pool), true) = (pool, held > 0) else { return Ok(Growth::default()) };
    let (pods, network) = (pods(cluster, node), pool.network());
    if held >= most(cluster, node) {
        return Err(format!(
            "node {node} requests another block of Network {network}, although it holds {held} addresses \
             and may run {pods} pods: the request is refused. Check that node for unneeded interfaces (knit \
             get attachments), and for a stolen token"
        ));
    }
    left(pool).growth().ok_or_else(|| {
        format!(
            "node {node} requests another block of Network {network}, although it holds {held} addresses: \
             the remaining addresses are kept for the first blocks of other nodes. Spread the pods over more \
             nodes, or recreate the Network with a larger subnet"
        )
    })
}
