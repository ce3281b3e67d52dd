//! Whether containers can be added, as CNI STATUS and the health endpoints tell it.
//!
//! A node must not become NotReady, and its pods be evicted, because an agent restarts: once ready since
//! boot, STATUS never fails again. A file in the run-time directory, which a reboot empties, remembers it.

use std::io;
use std::path::{Path, PathBuf};

use knit_types::NetworkName;
use tokio::sync::watch;

use crate::networks::Networks;
use crate::world::World;

/// Whether the agent was ready since boot, and is now.
#[derive(Debug)]
pub struct Readiness {
    marker: PathBuf,
    state: watch::Sender<State>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
struct State {
    since_boot: bool,
    /// Why it is not ready now; nothing if it is.
    problem: Option<String>,
}

/// What is not known yet beside another CNI plugin, where nobody makes main interfaces; nothing if all is.
pub(crate) fn missing_beside_another_plugin(world: &World) -> Option<String> {
    (!world.knows_primaries())
        .then(|| "not all Networks and namespaces have arrived from the Kubernetes API yet".to_owned())
}

/// Why pods cannot be attached to the default Network; nothing if they can.
pub(crate) fn problem_of_default(world: &World, networks: &Networks) -> Option<String> {
    if networks.is_set_up(&NetworkName::default()) {
        return None;
    }
    if !world.networks.contains_key(NetworkName::DEFAULT) {
        return Some(if world.synced.networks {
            "there is no Network named default: create it, or check that the controller is running".to_owned()
        } else {
            "the Kubernetes API does not answer, and no Network was stored earlier".to_owned()
        });
    }
    let states = networks.states();
    let default = states.iter().find(|state| state.name.is_default());
    let problem = default.and_then(|state| state.problem.as_ref()).map(|problem| problem.message.clone());
    Some(problem.unwrap_or_else(|| "setup of Network default is in progress".to_owned()))
}

// === impl Readiness ===

impl Readiness {
    /// Not ready yet in this run; ready since boot if the marker is there.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        let marker = knit_cni::paths::ready_marker(run_dir);
        let since_boot = marker.exists();
        let problem = Some("the node agent is starting".to_owned());
        Self { marker, state: watch::Sender::new(State { since_boot, problem }) }
    }

    /// Whether pods can be added, for CNI STATUS.
    ///
    /// # Errors
    /// When the agent was not ready since boot: with the reason.
    pub fn since_boot(&self) -> Result<(), String> {
        let state = self.state.borrow();
        if state.since_boot { Ok(()) } else { Err(state.problem.clone().unwrap_or_default()) }
    }

    /// Whether the agent is ready now.
    ///
    /// # Errors
    /// With what is missing.
    pub fn now(&self) -> Result<(), String> {
        self.state.borrow().problem.clone().map_or(Ok(()), Err)
    }

    /// Notes how it is now.
    pub fn set(&self, problem: Option<String>) {
        let ready = problem.is_none();
        let changed = self.state.send_if_modified(|state| {
            let new = State { since_boot: state.since_boot || ready, problem };
            let changed = *state != new;
            *state = new;
            changed
        });
        if changed && ready {
            tracing::info!("ready");
            if let Err(error) = self.mark() {
                tracing::warn!(path = %self.marker.display(), %error, "cannot write the readiness marker: \
                STATUS will fail while the agent is down");
            }
        }
    }

    /// Waits until it is ready.
    pub async fn wait(&self) {
        let mut state = self.state.subscribe();
        // The sender lives as long as we do.
        let _ = state.wait_for(|s| s.problem.is_none()).await;
    }

    fn mark(&self) -> io::Result<()> {
        std::fs::write(&self.marker, b"")
    }
}
