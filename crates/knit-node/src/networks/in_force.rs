//! What must be in force in a Network before a pod of it is answered: its Services; policy comes to the same
//! place.

use std::time::Duration;

use knit_api::{conditions, names};
use tokio::time::Instant;

use super::Networks;
use super::compute::Unready;

/// How long pods of the default Network wait for its Services at most.
const DEFAULT_NETWORK_WAIT: Duration = Duration::from_secs(3);

impl Networks {
    /// Waits until a pod of a Network finds in force what it must find: until its proxy says so, or that
    /// there is nothing to wait for
    /// ([`ServicesState::holds_up_pods`](crate::proxy::ServicesState::holds_up_pods)).
    ///
    /// # Errors
    /// When that does not come in time: who asks tries again.
    pub(crate) async fn in_force(&self, network: &str, deadline: Instant) -> Result<(), Unready> {
        let watch = {
            let entries = self.entries();
            let applied = entries.get(network).and_then(|entry| entry.applied.as_ref());
            applied.and_then(|applied| applied.proxy.as_ref()).map(|proxy| proxy.watch())
        };
        let Some(mut state) = watch else { return Ok(()) };
        // The API server may itself be a pod of the default Network, or need one: while it is away, or
        // refuses a list, such a pod must start all the same.
        let is_default = network == names::DEFAULT_NETWORK;
        let deadline =
            if is_default { deadline.min(Instant::now() + DEFAULT_NETWORK_WAIT) } else { deadline };
        let settled = state.wait_for(|state| state.holds_up_pods().is_none());
        // Without anybody who could say more, the agent is stopping or the Network is going.
        if tokio::time::timeout_at(deadline, settled).await.is_ok() {
            return Ok(());
        }
        let why = state.borrow().holds_up_pods();
        match why {
            None => Ok(()),
            Some(why) if is_default => {
                tracing::warn!(network, "a pod is answered although Services are not in force yet: {why}");
                Ok(())
            }
            Some(why) => {
                let reason = conditions::node_network::REASON_NOT_SET_UP;
                Err(Unready { reason, message: format!("its Services are not in force yet: {why}") })
            }
        }
    }
}
