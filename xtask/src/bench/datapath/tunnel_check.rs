//! What it costs that a node looks at the source inside each frame of another one: the same traffic with that
//! check and without it, in turns.

use anyhow::{Context as _, Result};
use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_nft::{Family, Nftables as _, Rule, TableId, Transaction};

use super::cpu::SoftIrqThreads;
use super::knit::{Cluster, NETWORKS};
use super::traffic::{Ends, Load};
use super::{BENCH, FAMILIES, TARGET};
use crate::bench::{Goal, Row};
use std::net::SocketAddr;

/// Pairs of rounds. A few per cent are to be told from nothing.
const PAIRS: usize = 15;
const LOADS: [(Load, usize, &str); 2] =
    [(Load::Exchange, 5000, "1 byte there and back, TCP"), (Load::Stream, 3000, "one stream")];
/// The chain of the node's table that frames of other nodes come to.
const CHAIN: &str = "tunnel";
/// The most that it may cost.
const LIMIT: f64 = 3.0;

/// For pods of each Network on two nodes.
pub fn rows(cluster: &Cluster, threads: &SoftIrqThreads) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for network in NETWORKS {
        let pods = cluster.pods_of(network);
        for (family, word) in FAMILIES.iter().enumerate() {
            let ends = Ends {
                client: &pods[0].namespace,
                server: &pods[2].namespace,
                to: SocketAddr::new(pods[2].addresses[family], TARGET),
                port: TARGET,
                threads,
            };
            for (load, count, what) in LOADS {
                let case = format!("Knit {network}, across nodes, {word}: {what}");
                rows.push(row(cluster, &ends, (load, count), case)?);
            }
        }
    }
    Ok(rows)
}

fn row(cluster: &Cluster, ends: &Ends<'_>, (load, count): (Load, usize), case: String) -> Result<Row> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // Each of them is first as often as second.
        for checked in [pair % 2 == 0, pair % 2 != 0] {
            let open =
                if checked { Vec::new() } else { cluster.nodes.iter().map(|n| &n.namespace).collect() };
            let open = open.into_iter().map(Open::node).collect::<Result<Vec<_>>>()?;
            let cpu = ends.round(load, count).with_context(|| case.clone())?.cpu;
            if checked { &mut with } else { &mut without }.push(cpu);
            open.into_iter().try_for_each(Open::close)?;
        }
    }
    let mut more: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with / without - 1.0).collect();
    more.sort_by(f64::total_cmp);
    let share = more[more.len() / 2] * 100.0;
    Ok(Row::new(BENCH, case, "cpu of the check of inner sources", share, "%").goal(Goal::AtMost(LIMIT)))
}

/// A node that takes whatever comes to the tunnels' port.
struct Open<'a> {
    node: &'a NetNs,
    rule: u64,
}

impl<'a> Open<'a> {
    fn node(node: &'a NetNs) -> Result<Self> {
        let table = TableId::new(Family::Inet, "knit");
        let mut kernel = Kernel::open_in(node)?;
        let mut transaction = Transaction::new();
        transaction.insert_rule(&table, CHAIN, Rule::new().notrack().accept());
        kernel.commit(&transaction).context("cannot take the check away")?;
        let first = kernel.rules(&table, CHAIN)?.into_iter().next().context("the chain has no rules")?;
        Ok(Self { node, rule: first.handle })
    }

    fn close(self) -> Result<()> {
        let mut transaction = Transaction::new();
        transaction.delete_rule(&TableId::new(Family::Inet, "knit"), CHAIN, self.rule);
        Kernel::open_in(self.node)?.commit(&transaction).context("cannot put the check back")?;
        Ok(())
    }
}
