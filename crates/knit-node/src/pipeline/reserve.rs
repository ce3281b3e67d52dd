//! Addresses for all interfaces and both families, or for none.

use knit_ipam::Lease;

use super::{Pipeline, Resolved};
use crate::clock;
use crate::error::{Error, Result};
use crate::networks::Patience;
use crate::sandboxes::books::NotReserved;

/// What a sandbox is to get, with the addresses of each interface. They are nobody else's as long as this
/// exists: it is recorded, or they are given back.
#[derive(Debug)]
#[must_use = "addresses that are not recorded are lost until the agent starts again"]
pub(super) struct Reserved {
    pub(super) resolved: Resolved,
    /// One for each that is wanted, in their order.
    pub(super) leases: Vec<Lease>,
}

impl Pipeline {
    /// Reserves, and waits for a further block if there is no address and there is time.
    pub(super) async fn reserve(&self, resolved: Resolved, patience: Patience) -> Result<Reserved> {
        loop {
            let freed = self.sandboxes.freed();
            tokio::pin!(freed);
            freed.as_mut().enable();
            let leased = self.sandboxes.books().lease(&resolved.pod, &resolved.wanted, clock::now());
            let error: Error = match leased {
                Ok(leases) => return Ok(Reserved { resolved, leases }),
                Err(NotReserved::Error(error)) => return Err(error),
                Err(NotReserved::Exhausted { network, error }) => {
                    self.networks.starved(&network);
                    self.networks.changed();
                    error
                }
            };
            let Patience::Until(deadline) = patience else { return Err(error) };
            tracing::info!(sandbox = %resolved.pod.sandbox, "no free address; waiting for a further block");
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                return Err(error);
            }
        }
    }
}
