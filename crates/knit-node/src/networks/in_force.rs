//! What must be in force in a Network before a pod of it is answered: its Services; policy comes to the same
//! place.

use std::time::Duration;

use knit_api::{conditions, names};
use knit_types::NetworkName;
use tokio::time::Instant;

use super::Networks;
use super::compute::Unready;
use crate::proxy::PROXY_STOPPED;

/// How long pods of the default Network wait for its Services at most.
const DEFAULT_NETWORK_WAIT: Duration = Duration::from_secs(3);

impl Networks {
    /// Waits until a pod of a Network finds in force what it must find: until its proxy says so, or that
    /// there is nothing to wait for
    /// ([`ServicesState::holds_up_pods`](crate::proxy::ServicesState::holds_up_pods)).
    ///
    /// # Errors
    /// When that does not come in time, or nobody is left who could bring it: who asks tries again.
    pub(crate) async fn in_force(&self, network: &NetworkName, deadline: Instant) -> Result<(), Unready> {
        // The API server may itself be a pod of the default Network, or need one: while it is away, or
        // refuses a list, such a pod must start all the same.
        let is_default = network == names::DEFAULT_NETWORK;
        let deadline =
            if is_default { deadline.min(Instant::now() + DEFAULT_NETWORK_WAIT) } else { deadline };
        match self.services_settled(network, deadline).await {
            Err(why) if is_default => {
                tracing::warn!(%network, "attaching a pod although Services are not in force: {why}");
                Ok(())
            }
            settled => settled.map_err(|why| Unready {
                reason: conditions::node_network::REASON_NOT_SET_UP,
                message: format!("its Services are not in force: {why}"),
            }),
        }
    }

    /// Waits until the Services of a Network hold nobody up; an error says why they do.
    async fn services_settled(&self, network: &NetworkName, deadline: Instant) -> Result<(), String> {
        let stopped = || self.proxy.as_ref().and_then(|proxy| proxy.stopped()).map(|stopped| stopped.why);
        let watch = {
            let entries = self.entries();
            let applied = entries.get(network).and_then(|entry| entry.applied.as_ref());
            applied.and_then(|applied| applied.proxy.as_ref()).map(|proxy| proxy.watch())
        };
        // None was started: perhaps because nobody is left who starts any.
        let Some(mut state) = watch else { return stopped().map_or(Ok(()), Err) };
        // What is in force from before does not follow Services any more, and is not for new pods.
        if state.has_changed().is_err() {
            return Err(stopped().unwrap_or_else(|| PROXY_STOPPED.to_owned()));
        }
        let settled = state.wait_for(|state| state.holds_up_pods().is_none());
        match tokio::time::timeout_at(deadline, settled).await {
            Ok(Ok(_)) => return Ok(()),
            // The Network is going, or all of it has stopped.
            Ok(Err(_)) => return Err(stopped().unwrap_or_else(|| PROXY_STOPPED.to_owned())),
            Err(_) => {}
        }
        let why = state.borrow().holds_up_pods();
        why.map_or(Ok(()), |why| Err(why.to_owned()))
    }
}
