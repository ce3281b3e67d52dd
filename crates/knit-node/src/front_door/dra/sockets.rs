//! The two sockets of the door, and those that earlier agents left.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use knit_api::names;
use knit_runtime::wire::{Clients, listen};

use super::DraConfig;

/// Both, open.
pub struct Sockets {
    /// Where kubelet has claims prepared.
    pub(super) plugin: Clients,
    /// Where kubelet asks who is there.
    pub(super) registration: Clients,
    /// Where they are; they are gone when this is.
    pub(super) paths: Paths,
}

/// Where the sockets are. They are removed with this.
#[derive(Debug)]
pub(super) struct Paths {
    pub(super) plugin: PathBuf,
    registration: PathBuf,
}

/// Why the door cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DraDoorError {
    /// A socket cannot be made.
    #[error("cannot open the socket {path} for kubelet: check that kubelet's directory is the right one \
        (--kubelet-dir) and is mounted", path = path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A name that cannot be part of a socket's.
    #[error(
        "{instance:?} cannot be part of a socket's name: write a pod's uid, of letters, digits and dashes"
    )]
    Instance {
        /// What was given.
        instance: String,
    },
}

// === impl Sockets ===

impl Sockets {
    pub(super) fn open(config: &DraConfig) -> Result<Self, DraDoorError> {
        let suffix = match &config.instance {
            None => String::new(),
            Some(instance) => {
                let valid = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
                if instance.is_empty() || instance.len() > 40 || !instance.bytes().all(valid) {
                    return Err(DraDoorError::Instance { instance: instance.clone() });
                }
                format!("-{instance}")
            }
        };
        let registry = config.kubelet_dir.join("plugins_registry");
        let own = config.kubelet_dir.join("plugins").join(names::DRIVER);
        let paths = Paths {
            plugin: own.join(format!("dra{suffix}.sock")),
            registration: registry.join(format!("{}{suffix}-reg.sock", names::DRIVER)),
        };
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| DraDoorError::Socket { path, source }
        };
        std::fs::create_dir_all(&own).map_err(failed(&own))?;
        remove_left(&registry, |name| {
            name.strip_prefix(names::DRIVER).is_some_and(|rest| is_instance(rest, "-reg.sock"))
        });
        remove_left(&own, |name| name.strip_prefix("dra").is_some_and(|rest| is_instance(rest, ".sock")));
        // Kubelet dials the second as soon as it sees the first.
        let plugin = listen(&paths.plugin).map_err(failed(&paths.plugin))?;
        let registration = listen(&paths.registration).map_err(failed(&paths.registration))?;
        Ok(Self { plugin, registration, paths })
    }
}

impl std::fmt::Debug for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sockets").field("paths", &self.paths).finish_non_exhaustive()
    }
}

// === impl Paths ===

impl Drop for Paths {
    fn drop(&mut self) {
        // The registration first: kubelet asks nobody then whose socket is about to go.
        for path in [&self.registration, &self.plugin] {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(socket = %path.display(), %error, "a socket is left behind");
            }
        }
    }
}

/// Whether what is left of a name is that of some agent's socket.
fn is_instance(rest: &str, end: &str) -> bool {
    rest.strip_suffix(end).is_some_and(|instance| instance.is_empty() || instance.starts_with('-'))
}

/// Removes sockets that nobody listens on any more: of agents that were killed.
fn remove_left(folder: &Path, is_ours: impl Fn(&str) -> bool) {
    let Ok(found) = std::fs::read_dir(folder) else { return };
    for entry in found.flatten() {
        let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
        if !is_socket || !entry.file_name().to_str().is_some_and(&is_ours) {
            continue;
        }
        let path = entry.path();
        match UnixStream::connect(&path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                tracing::info!(socket = %path.display(), "removing the socket of an agent that is gone");
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(socket = %path.display(), %error, "it cannot be removed");
                }
            }
            // Another agent's, or nobody's business.
            _ => {}
        }
    }
}
