//! The Networks of a pod are set up on this node, and their Services are in force.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;
use tracing::Instrument as _;

use knit_types::NetworkName;

use super::resolve::Wanted;
use super::{Pipeline, Waits};
use crate::error::{Error, Reason, Result};
use crate::networks::WaitLimit;

impl Pipeline {
    /// Has the Networks of what is wanted set up here, all at the same time, and waits until `ready_by` for
    /// the Services of each.
    pub(super) async fn set_up_all(
        &self,
        wanted: &[Wanted],
        patience: WaitLimit,
        waits: Waits,
        ready_by: Instant,
        who: &str,
    ) -> Result<()> {
        let networks: BTreeSet<&NetworkName> = wanted.iter().map(|w| &w.network).collect();
        let ready = networks.iter().map(|network| async move {
            self.set_up(network, patience, waits).await?;
            let in_force = self.networks.in_force(network, ready_by).await;
            in_force.map_err(|problem| problem.into_error(network))
        });
        for result in join_all(ready).await {
            result.map_err(|error| Error { message: format!("{who}: {}", error.message), ..error })?;
        }
        Ok(())
    }

    /// Has a Network set up here. Work that takes longer than a request by NRI may wait goes on without it:
    /// who comes again finds it done.
    async fn set_up(&self, network: &NetworkName, patience: WaitLimit, waits: Waits) -> Result<()> {
        // Nothing is waited for where it is set up and its runtime is well.
        let is_well = || self.networks.is_set_up(network) && self.networks.unwell(network).is_none();
        let Some(soon) = waits.soon().filter(|_| !is_well()) else {
            return self.networks.ensure(network, patience).await;
        };
        let mut changes = self.world.subscribe();
        loop {
            changes.borrow_and_update();
            let (networks, name) = (Arc::clone(&self.networks), network.clone());
            let work = async move { networks.ensure(&name, WaitLimit::Once).await };
            let error = match tokio::time::timeout_at(soon, tokio::spawn(work.in_current_span())).await {
                Ok(Ok(Ok(()))) => return Ok(()),
                Ok(Ok(Err(error))) => error,
                Ok(Err(failed)) => {
                    let message = format!("Network {network} cannot be set up: check the agent's log");
                    return Err(Error::new(Reason::Internal, message).because(failed));
                }
                Err(_) => {
                    // A runtime that does not answer must not hold up the pods of others.
                    if let Some((_, problem)) = self.networks.unwell(network) {
                        return Err(problem.into_error(network));
                    }
                    let message =
                        format!("Network {network} is being set up on this node; it will be retried");
                    return Err(Error::new(Reason::NotReady, message));
                }
            };
            // What is missing may come with the next object: a block, for one.
            if !error.retryable()
                || !matches!(tokio::time::timeout_at(soon, changes.changed()).await, Ok(Ok(())))
            {
                return Err(error);
            }
        }
    }
}
