//! Where shim and agent meet on the host's file system, below one run-time directory that a reboot empties.

use std::path::{Path, PathBuf};

/// The run-time directory when nothing else is configured.
pub const RUN_DIR: &str = "/run/knit";

/// The agent's socket for the shim, in the run-time directory.
pub const SOCKET: &str = "cni.sock";

/// A file in the run-time directory that is there once the agent was ready for the first time since boot.
pub const READY_MARKER: &str = "ready";

/// The folder of DELs that came while the agent was away, in the run-time directory.
pub const SPOOL: &str = "spool";

/// The socket of a run-time directory.
#[must_use]
pub fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join(SOCKET)
}

/// The readiness marker of a run-time directory.
#[must_use]
pub fn ready_marker(run_dir: &Path) -> PathBuf {
    run_dir.join(READY_MARKER)
}

/// The spool of a run-time directory.
#[must_use]
pub fn spool(run_dir: &Path) -> PathBuf {
    run_dir.join(SPOOL)
}
