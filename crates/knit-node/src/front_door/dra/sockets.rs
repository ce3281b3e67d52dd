//! The two sockets of the door, and those that earlier agents left.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use knit_api::names;
use knit_runtime::wire::{Clients, listen};

use super::DraConfig;

/// The longest path of a socket: `sun_path` without its last byte.
const LONGEST: usize = 107;

/// By how much the path of a socket is longer while it is being made: `.` and `.new`.
const UNFINISHED: usize = 5;

/// Both, open.
pub struct Sockets {
    /// Where kubelet has claims prepared.
    pub(super) plugin: Clients,
    /// Where kubelet asks who is there.
    pub(super) registration: Clients,
    /// Where they are; they are gone when this is.
    pub(super) paths: Paths,
}

/// Where the sockets are. They are removed with this, those that are there by then only if they are the same
/// ones: an agent that replaces this one may have put its own in their place.
#[derive(Debug)]
pub(super) struct Paths {
    pub(super) plugin: PathBuf,
    registration: PathBuf,
    /// Which files these sockets are, once they are made.
    made: Vec<(PathBuf, FileId)>,
}

/// Which file something is: its device and inode.
type FileId = (u64, u64);

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
        if let Some(instance) = &config.instance {
            let valid = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
            if instance.is_empty() || instance.len() > 40 || !instance.bytes().all(valid) {
                return Err(DraDoorError::Instance { instance: instance.clone() });
            }
        }
        let (registry, own) = (registry_in(&config.kubelet_dir), own_in(&config.kubelet_dir));
        let mut paths = Paths::of(&config.kubelet_dir, config.instance.as_deref());
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
        paths.note_made(paths.plugin.clone()).map_err(failed(&paths.plugin))?;
        let registration = listen(&paths.registration).map_err(failed(&paths.registration))?;
        paths.note_made(paths.registration.clone()).map_err(failed(&paths.registration))?;
        Ok(Self { plugin, registration, paths })
    }
}

impl std::fmt::Debug for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sockets").field("paths", &self.paths).finish_non_exhaustive()
    }
}

// === impl Paths ===

impl Paths {
    /// The sockets of an agent in kubelet's directory. Where its uid makes a path longer than a socket's may
    /// be, a hash stands for it.
    fn of(kubelet_dir: &Path, instance: Option<&str>) -> Self {
        let named = |instance: Option<&str>| {
            let suffix = instance.map(|instance| format!("-{instance}")).unwrap_or_default();
            Self {
                plugin: own_in(kubelet_dir).join(format!("dra{suffix}.sock")),
                registration: registry_in(kubelet_dir).join(format!("{}{suffix}-reg.sock", names::DRIVER)),
                made: Vec::new(),
            }
        };
        let fits = |path: &Path| path.as_os_str().len() + UNFINISHED <= LONGEST;
        let paths = named(instance);
        match instance {
            Some(instance) if !(fits(&paths.plugin) && fits(&paths.registration)) => {
                let mut hasher = DefaultHasher::new();
                instance.hash(&mut hasher);
                // What matters is that two agents of one node do not meet.
                named(Some(&format!("{:08x}", hasher.finish() as u32)))
            }
            _ => paths,
        }
    }

    /// Notes that this socket is there.
    fn note_made(&mut self, path: PathBuf) -> io::Result<()> {
        let id = id_of(&path)?;
        self.made.push((path, id));
        Ok(())
    }
}

fn id_of(path: &Path) -> io::Result<FileId> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Where kubelet looks for plugins.
fn registry_in(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins_registry")
}

/// Where this plugin listens.
fn own_in(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins").join(names::DRIVER)
}

impl Drop for Paths {
    fn drop(&mut self) {
        // The registration first: kubelet asks nobody then whose socket is about to go.
        for (path, id) in self.made.iter().rev() {
            let removed = match id_of(path) {
                Ok(found) if found == *id => std::fs::remove_file(path),
                Ok(_) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = removed
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_agent_did_not_start_where_kubelets_directory_has_a_long_path() {
        let dir = tempfile::tempdir_in("/tmp").expect("a directory");
        let uid = "0b0fbc0e-5d0c-4a63-9df5-5b5c0f5f3c7d";
        for len in [58, 31, 30] {
            let kubelet_dir = dir.path().join("k".repeat(len - dir.path().as_os_str().len() - 1));
            std::fs::create_dir_all(registry_in(&kubelet_dir)).expect("a folder");
            let (instance, serve) = (Some(uid.to_owned()), super::super::ServeClaims::All);
            let config = DraConfig { kubelet_dir, instance, serve, cdi_dir: None };
            let sockets = Sockets::open(&config).unwrap_or_else(|error| panic!("{len}: {error}"));
            let registration = sockets.paths.registration.display().to_string();
            assert_eq!(registration.contains(uid), len <= 30, "{registration}");
            assert!(sockets.paths.registration.exists() && sockets.paths.plugin.exists());
        }
        // Two agents on one node still have sockets of their own.
        let long = Path::new("/").join("k".repeat(57));
        let (one, other) = (Paths::of(&long, Some(uid)), Paths::of(&long, Some(&uid.replace('0', "1"))));
        assert_ne!(one.registration, other.registration);
    }
    #[tokio::test]
    async fn an_agent_without_a_uid_removed_the_sockets_of_the_one_that_replaced_it() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(registry_in(dir.path())).expect("a folder");
        let serve = super::super::ServeClaims::All;
        let config = DraConfig { kubelet_dir: dir.path().to_owned(), instance: None, serve, cdi_dir: None };
        let first = Sockets::open(&config).expect("sockets");
        let second = Sockets::open(&config).expect("sockets of the same names");
        drop(first);
        let (plugin, registration) = (second.paths.plugin.clone(), second.paths.registration.clone());
        assert!(plugin.exists() && registration.exists(), "kubelet was told that the driver is gone");
        drop(second);
        assert!(!plugin.exists() && !registration.exists());
    }
}
