//! Nodes that join a running cluster, and how long it takes until every agent knows the way to them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use knit_api::names::DEFAULT_NETWORK;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::pods::{Nodes, REACH_TIMEOUT};
use crate::report::{Phase, Quantiles};

/// How often it is looked who knows the way: each look goes through all blocks of all whole nodes.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// What was found about nodes that joined.
#[derive(Debug, Default)]
pub struct Joined {
    followed: Vec<f64>,
    unfollowed: u32,
    refused: u32,
}

/// A node, and when it began to join.
type Joining = (u32, Instant);

// === impl Joined ===

impl Joined {
    /// Puts what was found into a phase's report.
    pub fn fill(self, phase: &mut Phase) {
        (phase.refused, phase.unfollowed) = (self.refused, self.unfollowed);
        phase.followed = Quantiles::of(self.followed);
    }
}

/// Nodes that only write join within this time, evenly spread. Ends when every whole agent knows the way to
/// each of them, or has had the time to.
pub async fn join(nodes: &Nodes, numbers: std::ops::Range<u32>, time: Duration) -> Joined {
    let (sender, receiver) = mpsc::unbounded_channel();
    let joining = async move {
        let (start, first, count) = (Instant::now(), numbers.start, numbers.len() as u32);
        let mut refused = 0;
        for number in numbers {
            tokio::time::sleep_until(start + time * (number - first) / count.max(1)).await;
            let asked = Instant::now();
            match nodes.cluster.join(number, false, 0).await {
                // Who follows is there until this sender is gone.
                Ok(()) => _ = sender.send((number, asked)),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, number, "a node did not join");
                    refused += 1;
                }
            }
        }
        drop(sender);
        refused
    };
    let (refused, mut joined) = tokio::join!(joining, follow(nodes, receiver));
    joined.refused = refused;
    joined
}

async fn follow(nodes: &Nodes, mut joining: mpsc::UnboundedReceiver<Joining>) -> Joined {
    let (mut waiting, mut joined) = (BTreeMap::new(), Joined::default());
    loop {
        if waiting.is_empty() {
            match joining.recv().await {
                Some((number, asked)) => _ = waiting.insert(number, asked),
                None => return joined,
            }
        }
        while let Ok((number, asked)) = joining.try_recv() {
            waiting.insert(number, asked);
        }
        let mut unknown = BTreeSet::new();
        // A node that has not set the Network up asks for its blocks when it does.
        for node in nodes.whole.iter().filter(|node| node.has(DEFAULT_NETWORK)) {
            let mut missing: BTreeSet<u32> = waiting.keys().copied().collect();
            node.strike_reached(DEFAULT_NETWORK, &mut missing);
            unknown.extend(missing);
        }
        waiting.retain(|number, asked: &mut Instant| {
            let seconds = asked.elapsed();
            if !unknown.contains(number) {
                joined.followed.push(seconds.as_secs_f64());
            } else if seconds > REACH_TIMEOUT {
                joined.unfollowed += 1;
            } else {
                return true;
            }
            false
        });
        if !waiting.is_empty() {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}
