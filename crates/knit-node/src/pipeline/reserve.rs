//! Addresses for all interfaces and both families, or for none; for a sandbox, or for a claim that has none
//! yet.

use knit_ipam::{Lease, PodRef};
use knit_ledger::NetnsRef;
use knit_runtime::Pod;
use knit_types::{ObjectRef, Owner};

use super::Pipeline;
use super::prepare::Resolved;
use crate::clock;
use crate::error::{Error, Result};
use crate::networks::WaitLimit;
use crate::request::Door;
use crate::sandboxes::books::{NotReserved, pod_ref};

/// Whom a request is for. What is reserved is its owner's from the beginning.
pub(super) trait Target {
    /// The owner.
    fn owner(&self) -> Owner;
    /// The pod that uses it, where that is known.
    fn pod(&self) -> Option<PodRef>;
}

/// A sandbox, and where it is.
#[derive(Debug)]
pub(super) struct ForSandbox {
    pub(super) pod: Pod,
    pub(super) netns: NetnsRef,
    pub(super) door: Door,
}

/// A claim that has no sandbox yet.
#[derive(Debug)]
pub(super) struct ForClaim {
    pub(super) claim: ObjectRef,
    /// The pod that it is for, where that is known.
    pub(super) pod: Option<PodRef>,
}

/// What somebody is to get, with the addresses of each interface. They are nobody else's as long as this
/// exists: it is recorded, or they are given back.
#[derive(Debug)]
#[must_use = "unrecorded addresses are unavailable until the agent restarts"]
pub(super) struct Reserved<T> {
    pub(super) resolved: Resolved<T>,
    /// One for each that is wanted, in their order.
    pub(super) leases: Vec<Lease>,
}

impl Pipeline {
    /// Reserves, and waits for a further block if there is no address and there is time.
    pub(super) async fn reserve<T: Target>(
        &self,
        resolved: Resolved<T>,
        patience: WaitLimit,
    ) -> Result<Reserved<T>> {
        let owner = resolved.target.owner();
        loop {
            let freed = self.sandboxes.freed();
            tokio::pin!(freed);
            freed.as_mut().enable();
            let pod = resolved.target.pod();
            let leased = self.sandboxes.books().lease(&owner, pod, &resolved.wanted, clock::now());
            let error: Error = match leased {
                Ok(leases) => return Ok(Reserved { resolved, leases }),
                Err(NotReserved::Error(error)) => return Err(error),
                Err(NotReserved::Exhausted { network, error }) => {
                    self.networks.starved(&network);
                    self.networks.changed();
                    error
                }
            };
            let WaitLimit::Until(deadline) = patience else { return Err(error) };
            tracing::info!(%owner, "no free address; waiting for another block");
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                return Err(error);
            }
        }
    }
}

// === impl Target ===

impl Target for ForSandbox {
    fn owner(&self) -> Owner {
        Owner::Sandbox(self.pod.sandbox.clone())
    }

    fn pod(&self) -> Option<PodRef> {
        pod_ref(&self.pod)
    }
}

impl Target for ForClaim {
    fn owner(&self) -> Owner {
        Owner::claim(self.claim.clone())
    }

    fn pod(&self) -> Option<PodRef> {
        None
    }
}
