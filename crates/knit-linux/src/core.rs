//! The runtime's parts, and nothing else: what it does with them is in the files of its verbs.
//!
//! Locks: a Network's gate is held shared by calls for pods and alone by calls for the Network, so pods never
//! wait for each other. The node's tables are locked while their shape, or a Network's part of them, may
//! change.

use std::sync::Arc;

use knit_kernel::link::Link;
use knit_runtime::{Change, Result};
use tokio::sync::broadcast;

use crate::attachments::{Attachments, Known};
use crate::config::Config;
use crate::mark::Mark;
use crate::moves::Moves;
use crate::networks::Networks;
use crate::node::Node;

/// How many changes a slow watcher may be behind.
const CHANGES_BACKLOG: usize = 1024;

/// Everything that calls share.
#[derive(Debug)]
pub(crate) struct Core {
    pub node: Arc<Node>,
    pub networks: Networks,
    pub attachments: Attachments,
    /// Calls that change things, while they do: what is compared meanwhile may be half made.
    pub moves: Moves,
    pub changes: broadcast::Sender<Change>,
}

impl Core {
    /// A runtime that knows what the kernel has: it takes over what an earlier one made.
    pub fn new(config: Config) -> Result<Self> {
        let node = Arc::new(Node::new(config)?);
        let core = Self {
            networks: Networks::new(Arc::clone(&node)),
            node,
            attachments: Attachments::default(),
            moves: Moves::default(),
            changes: broadcast::channel(CHANGES_BACKLOG).0,
        };
        core.recall()?;
        Ok(core)
    }

    /// Learns what an earlier runtime made.
    fn recall(&self) -> Result<()> {
        let mut ports = self.node.ports()?;
        for net in self.networks.all()? {
            let attachments = net.attachments()?;
            let known = |(link, mark): (Link, Mark)| {
                let (network, mtu, host) = (net.name.clone(), link.mtu, mark.host().to_string());
                let ports = ports.remove(&host).unwrap_or_default();
                (host, Known { network, mark, ports, answer: None, netns: None, mtu, ipv6_on: false })
            };
            self.attachments.known().extend(attachments.into_iter().map(known));
        }
        // Their links went while no runtime ran; what leads to them is about to be taken away.
        self.attachments.had_ports(ports);
        Ok(())
    }

    /// Tells watchers.
    pub fn tell(&self, change: Change) {
        // Without watchers there is nobody to tell.
        let _ = self.changes.send(change);
    }
}
