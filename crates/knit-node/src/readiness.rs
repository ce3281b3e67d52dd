//! Whether containers can be added, as CNI STATUS and the health endpoints tell it.
//!
//! A node must not become NotReady, and its pods be evicted, because an agent restarts: once ready since
//! boot, STATUS never fails again. A file in the run-time directory, which a reboot empties, remembers it.

use std::io;
use std::path::{Path, PathBuf};

use tokio::sync::watch;

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
