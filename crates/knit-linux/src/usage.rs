//! What each Network uses of what it shares with others, and what it was refused of it: for metrics.
//!
//! It costs two listings of counters in the node's namespace, whatever the number of connections, and for
//! each Network a visit to its router and, where pods share a segment, a listing of two short chains.

use std::collections::HashMap;

use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_nft::{Family, Set};
use knit_runtime::{NetworkUsage, Result};

use crate::fail::{chain, internal};
use crate::networks::{Net, Networks};
use crate::rules::{self, bridge, node};
use crate::shape::{RouterHome, Shape};
use crate::space::NamespaceSockets;
use crate::uplink::node_end;

/// Of each Network with a router of its own: what the default one uses is the node's.
pub(crate) fn usage(networks: &Networks) -> Result<Vec<NetworkUsage>> {
    let refused = counts(&networks.node.space, &node::refused())?;
    let together = counts(&networks.node.space, &node::refused_together())?;
    let mut all = Vec::new();
    for (net, shape, _) in networks.set_up() {
        if net.home == RouterHome::Node || !shape.network.topology.has_router() {
            continue;
        }
        match of_router(&net, &shape) {
            Ok(usage) => {
                let uplink = node_end(shape.id());
                let of = |counts: &HashMap<String, u64>| counts.get(uplink.as_str()).copied().unwrap_or(0);
                all.push(NetworkUsage {
                    refused_connections: of(&refused),
                    refused_connections_together: of(&together),
                    ..usage
                });
            }
            // Its router is going, or was taken away: others' numbers do not wait for that.
            Err(error) => tracing::debug!(network = %net.name, error = chain(&error), "not known"),
        }
    }
    Ok(all)
}

/// What its router says.
fn of_router(net: &Net, shape: &Shape) -> Result<NetworkUsage> {
    let number = |name: &str| Sysctl::new(format!("net/netfilter/nf_conntrack_{name}"));
    let names = [number("count"), number("max")].map(|name| name.map_err(internal("name a sysctl")));
    let names = names.into_iter().collect::<Result<Vec<_>>>()?;
    let sysctls = Sysctls::of(net.space.namespace()).map_err(internal("open the sysctls of a router"))?;
    let read = sysctls.get_all(&names).map_err(internal("open the sysctls of a router"))?;
    // A namespace in which nothing is tracked yet has none.
    let mut read = read.into_iter().map(|text| text.ok().and_then(|text| text.parse().ok()).unwrap_or(0));
    let (connections, connections_limit) = (read.next().unwrap_or_default(), read.next().unwrap_or_default());
    let refused_questions = if shape.driver().master().is_some() { questions(net)? } else { 0 };
    Ok(NetworkUsage {
        network: net.name.clone(),
        connections,
        connections_limit,
        refused_questions,
        ..NetworkUsage::default()
    })
}

/// Questions who has an address, beyond what a pod may ask.
fn questions(net: &Net) -> Result<u64> {
    let table = rules::table(Family::Bridge);
    let mut kernel = net.space.rules()?;
    let mut all = 0;
    for chain in bridge::ASKED_IN {
        let rules = kernel.rules(&table, chain).map_err(internal("list the rules of a bridge"))?;
        let too_many = rules.iter().filter(|rule| rule.rule.comment.as_deref() == Some(bridge::TOO_MANY));
        all += too_many.filter_map(|rule| rule.counter).map(|(packets, _)| packets).sum::<u64>();
    }
    Ok(all)
}

/// What was counted, by interface.
fn counts(space: &NamespaceSockets, set: &Set) -> Result<HashMap<String, u64>> {
    match space.rules()?.elements(&rules::table(Family::Inet), set) {
        Ok(listed) => {
            let count = |listed: knit_nft::ListedElement| {
                Some((rules::interface(&listed.element), listed.counter?.0))
            };
            Ok(listed.into_iter().filter_map(count).collect())
        }
        // Somebody has just deleted the table, or nothing was set up yet.
        Err(error) if error.is_not_found() => Ok(HashMap::new()),
        Err(error) => Err(internal("list refused connections")(error)),
    }
}
