//! What a plugin implements.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::version::Runtime;
use crate::wire::{ContainerAdjustment, PodSandbox};

/// The moment by which a request must be answered: before the runtime stops waiting for it.
pub type Deadline = Instant;

/// Why a pod or container cannot be had. The runtime passes it to kubelet, which shows it in an event.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// A plugin. Requests may arrive side by side, again for the same sandbox, and about sandboxes that are not
/// known; what is gone already is success.
///
/// A handler that is not done by its deadline is left alone, and the runtime is told that it failed: what
/// must not be left halfway belongs into a task of its own.
#[async_trait]
pub trait Plugin: Send + Sync + 'static {
    /// A runtime has accepted the plugin. It is said before anything else of a session.
    fn connected(&self, runtime: &Runtime);

    /// The session is over: no sandbox is announced until the next one.
    fn disconnected(&self);

    /// All sandboxes that there are, at the start of a session, and the ids of those that containers have run
    /// in. It is answered at once; what is to be done about it is done elsewhere.
    fn synchronize(&self, pods: Vec<PodSandbox>, started: BTreeSet<String>);

    /// A sandbox is there, with its namespace and what the CNI plugins made in it; no container is.
    async fn run_pod_sandbox(&self, pod: PodSandbox, deadline: Deadline) -> Result<(), Refusal>;

    /// A sandbox ends. Its namespace may still be there (containerd) or not (CRI-O).
    async fn stop_pod_sandbox(&self, pod: PodSandbox, deadline: Deadline) -> Result<(), Refusal>;

    /// A sandbox has ended.
    async fn remove_pod_sandbox(&self, pod: PodSandbox, deadline: Deadline) -> Result<(), Refusal>;

    /// A container is about to be made in a sandbox. What is given back changes it.
    async fn create_container(
        &self,
        pod: PodSandbox,
        container: String,
        deadline: Deadline,
    ) -> Result<Option<ContainerAdjustment>, Refusal>;
}

/// How long a handler may take when its caller waits for `patience`: there must be time left to say no, since
/// a runtime that hears nothing lets the pod start.
#[must_use]
pub fn own_time(patience: Duration) -> Duration {
    patience - (patience / 5).min(Duration::from_millis(200))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_time_left_to_say_no() {
        for (patience, own) in [(2000, 1800), (10_000, 9800), (100, 80), (0, 0)] {
            assert_eq!(own_time(Duration::from_millis(patience)), Duration::from_millis(own));
        }
    }
}
