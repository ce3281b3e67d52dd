//! The Networks of a pod are set up on this node, and their Services are in force.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;
use tracing::Instrument as _;

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
        let networks: BTreeSet<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
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

    /// Has a Network set up here. A request that is not to wait is refused until it is, and the work goes on
    /// without it: who comes again finds it done.
    async fn set_up(&self, network: &str, patience: WaitLimit, waits: Waits) -> Result<()> {
        let Some(soon) = waits.soon().filter(|_| !self.networks.is_set_up(network)) else {
            return self.networks.ensure(network, patience).await;
        };
        let (networks, name) = (Arc::clone(&self.networks), network.to_owned());
        let work = async move { networks.ensure(&name, patience).await };
        match tokio::time::timeout_at(soon, tokio::spawn(work.in_current_span())).await {
            Ok(Ok(result)) => result,
            Ok(Err(failed)) => {
                let message = format!("Network {network} cannot be set up: check the agent's log");
                Err(Error::new(Reason::Internal, message).because(failed))
            }
            Err(_) => {
                let message = format!("Network {network} is being set up on this node; it will be retried");
                Err(Error::new(Reason::NotReady, message))
            }
        }
    }
}
