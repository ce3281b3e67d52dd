//! Network namespaces: make, open, enter on a thread of their own, list, delete.
//!
//! A namespace lives while something refers to it: a process, an open file, or a bind mount of its nsfs file
//! on a path. Whatever must happen inside another one happens on a thread that is made for it, or, where that
//! is no more than opening a socket or a file, on the calling thread, which is back home before anything else
//! runs on it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{fmt, thread};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::sys;

/// The calling thread's own network namespace.
const SELF: &str = "/proc/thread-self/ns/net";

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An open network namespace. While this value lives, so does the namespace.
pub struct NetNs {
    fd: OwnedFd,
    id: NsId,
    path: Option<PathBuf>,
}

/// Which namespace it is: two files with the same identity are the same namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NsId {
    /// The device of the nsfs file.
    pub dev: u64,
    /// Its inode. A new namespace may get the number of one that is gone.
    pub ino: u64,
}

/// What can go wrong with namespaces.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing is there.
    #[error("network namespace {namespace} does not exist; its pod or Network may be gone")]
    NotFound {
        /// Path or process.
        namespace: String,
    },
    /// There is a file, but it is no network namespace.
    #[error("{namespace} is not a network namespace; remove it or name another path")]
    NotANamespace {
        /// Path or descriptor.
        namespace: String,
    },
    /// A namespace is there already.
    #[error("network namespace {namespace} exists already; open it, or delete it first")]
    Exists {
        /// Path.
        namespace: String,
    },
    /// The system refused.
    #[error("cannot {attempted} network namespace {namespace}{}", hint(.source))]
    Refused {
        /// What was attempted.
        attempted: &'static str,
        /// Path, process or "(unnamed)".
        namespace: String,
        /// What the system said.
        source: io::Error,
    },
    /// No thread could be started to visit the namespace.
    #[error("cannot start a thread to visit network namespace {namespace}; raise the limit of tasks")]
    Thread {
        /// Path, process or "(unnamed)".
        namespace: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// What was named is not there (any more).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// What was to be made is there already.
    pub fn is_exists(&self) -> bool {
        matches!(self, Self::Exists { .. })
    }

    /// The same request may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        let transient = [libc::EAGAIN, libc::EBUSY, libc::EINTR, libc::ENOMEM, libc::ENOSPC, libc::EMFILE];
        match self {
            Self::Refused { source, .. } | Self::Thread { source, .. } => {
                source.raw_os_error().is_some_and(|errno| transient.contains(&errno))
            }
            _ => false,
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM) => "; CAP_SYS_ADMIN is needed in the user namespace that owns it",
        Some(libc::ENOSPC) => "; the limit user.max_net_namespaces is reached",
        _ => "",
    }
}

fn refused(attempted: &'static str, namespace: impl fmt::Display, source: impl Into<io::Error>) -> Error {
    let (namespace, source) = (namespace.to_string(), source.into());
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH | libc::ENOTDIR) => Error::NotFound { namespace },
        _ => Error::Refused { attempted, namespace, source },
    }
}

impl NetNs {
    /// The calling thread's namespace.
    pub fn current() -> Result<Self> {
        Self::open_named(SELF, "(current)").map(|ns| Self { path: None, ..ns })
    }

    /// Which one the calling thread's is.
    pub(crate) fn current_id() -> Result<NsId> {
        let stat = std::fs::metadata(SELF).map_err(|source| refused("identify", SELF, source))?;
        Ok(NsId { dev: stat.dev(), ino: stat.ino() })
    }

    /// The namespace that is bind-mounted at `path`, or a `/proc/PID/ns/net` link.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::open_named(path, &path.display().to_string())
    }

    /// The namespace of a process.
    pub fn of_process(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/ns/net");
        Self::open_named(&path, &format!("of process {pid}")).map(|ns| Self { path: None, ..ns })
    }

    /// A namespace that somebody handed over as an open file.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        Self::checked(fd, "(by descriptor)")
    }

    fn open_named(path: impl AsRef<Path>, name: &str) -> Result<Self> {
        let file = File::open(path.as_ref()).map_err(|source| refused("open", name, source))?;
        let mut ns = Self::checked(file.into(), name)?;
        ns.path = Some(path.as_ref().to_path_buf());
        Ok(ns)
    }

    fn checked(fd: OwnedFd, name: &str) -> Result<Self> {
        match sys::namespace_type(fd.as_fd()) {
            Ok(libc::CLONE_NEWNET) => {}
            Ok(_) => return Err(Error::NotANamespace { namespace: name.into() }),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                return Err(Error::NotANamespace { namespace: name.into() });
            }
            Err(source) => return Err(refused("identify", name, source)),
        }
        let stat = rustix::fs::fstat(&fd).map_err(|source| refused("identify", name, source))?;
        Ok(Self { fd, id: NsId { dev: stat.st_dev, ino: stat.st_ino }, path: None })
    }

    /// Makes a namespace that only this value (and what is opened from it) keeps alive.
    pub fn unnamed() -> Result<Self> {
        on_thread("(unnamed)", || {
            sys::unshare_network().map_err(|source| refused("make", "(unnamed)", source))?;
            Self::open_named(SELF, "(unnamed)").map(|ns| Self { path: None, ..ns })
        })?
    }

    /// Makes a namespace and bind-mounts it at `path`, so that it outlives this process. The directory must
    /// exist.
    ///
    /// A plain empty file at `path`, left by a crash between the two steps, is used; a namespace there is
    /// [`Error::Exists`]. On an error nothing is left behind.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = &path.display();
        match Self::open(path) {
            Ok(_) => return Err(Error::Exists { namespace: name.to_string() }),
            Err(Error::NotFound { .. } | Error::NotANamespace { .. }) => {}
            Err(error) => return Err(error),
        }
        let made = OpenOptions::new().write(true).create_new(true).mode(0o444).open(path);
        let ours = match made {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let stat = path.symlink_metadata().map_err(|source| refused("make", name, source))?;
                if !stat.file_type().is_file() || stat.size() != 0 {
                    return Err(Error::NotANamespace { namespace: name.to_string() });
                }
                false
            }
            Err(source) => return Err(refused("make", name, source)),
        };
        let mounted = on_thread(&name.to_string(), || {
            sys::unshare_network().map_err(|source| refused("make", name, source))?;
            let ns = Self::open_named(SELF, &name.to_string())?;
            mount_bind(SELF, path).map_err(|source| refused("mount", name, source))?;
            Ok(Self { path: Some(path.to_path_buf()), ..ns })
        });
        let mounted = mounted.and_then(|ns| ns);
        if mounted.is_err() && ours {
            // The error that matters is the one above; a leftover empty file is taken over by the next
            // attempt.
            let _ = std::fs::remove_file(path);
        }
        mounted
    }

    /// Opens the namespace at `path`, or makes it.
    pub fn ensure(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match Self::open(path) {
            Err(Error::NotFound { .. } | Error::NotANamespace { .. }) => match Self::create(path) {
                Err(Error::Exists { .. }) => Self::open(path), // somebody else was quicker
                other => other,
            },
            other => other,
        }
    }

    /// Mounts this namespace at `path`, in the place of whatever is mounted there: for one that is held open
    /// while somebody took its mount away. The directory must exist.
    pub fn mount_at(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        Self::delete(path)?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o444)
            .open(path)
            .map_err(|source| refused("mount", path.display(), source))?;
        let held = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        mount_bind(held.as_str(), path).map_err(|source| refused("mount", path.display(), source))
    }

    /// Unmounts and unlinks what [`create`](Self::create) made. Nothing there is fine: returns whether there
    /// was. The namespace itself goes when nothing else refers to it.
    pub fn delete(path: impl AsRef<Path>) -> Result<bool> {
        let path = path.as_ref();
        let name = &path.display();
        let mut there = false;
        loop {
            match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => there = true, // and again, in case of a mount on top of a mount
                Err(rustix::io::Errno::INVAL) => break,
                Err(rustix::io::Errno::NOENT) => return Ok(there),
                Err(source) => return Err(refused("unmount", name, source)),
            }
        }
        match path.symlink_metadata() {
            Ok(stat) if stat.file_type().is_file() && stat.size() == 0 => {}
            Ok(_) => return Err(Error::NotANamespace { namespace: name.to_string() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(there),
            Err(source) => return Err(refused("delete", name, source)),
        }
        match std::fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(there),
            Err(source) => Err(refused("delete", name, source)),
        }
    }

    /// The namespaces that are mounted in a directory, by file name. A missing directory holds none, and
    /// files that are no namespaces are left out.
    pub fn list(directory: impl AsRef<Path>) -> Result<Vec<(String, NsId)>> {
        let directory = directory.as_ref();
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(refused("list", directory.display(), source)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| refused("list", directory.display(), source))?;
            match Self::open(entry.path()) {
                Ok(ns) => found.push((entry.file_name().to_string_lossy().into_owned(), ns.id)),
                Err(Error::NotFound { .. } | Error::NotANamespace { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        found.sort();
        Ok(found)
    }

    /// Makes `directory` a mount of its own with shared propagation, so that namespaces mounted in it are
    /// seen where the directory is mounted too, and outlive the mount namespace that they were made in.
    /// Idempotent.
    pub fn share_directory(directory: impl AsRef<Path>) -> Result<()> {
        let path = directory.as_ref();
        let error = |source: rustix::io::Errno| refused("share the directory of", path.display(), source);
        std::fs::create_dir_all(path)
            .map_err(|source| refused("make the directory of", path.display(), source))?;
        match mount_change(path, MountPropagationFlags::SHARED | MountPropagationFlags::REC) {
            Err(rustix::io::Errno::INVAL) => {
                mount_bind(path, path).map_err(error)?;
                mount_change(path, MountPropagationFlags::SHARED | MountPropagationFlags::REC).map_err(error)
            }
            other => other.map_err(error),
        }
    }

    /// Takes back what [`share_directory`](Self::share_directory) did: unmounts the directory and removes it,
    /// empty as it must be. Nothing there is fine.
    pub fn unshare_directory(directory: impl AsRef<Path>) -> Result<()> {
        let path = directory.as_ref();
        loop {
            match unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                Err(rustix::io::Errno::INVAL) => break,
                Err(rustix::io::Errno::NOENT) => return Ok(()),
                Err(source) => return Err(refused("unmount", path.display(), source)),
            }
        }
        match std::fs::remove_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(refused("remove the directory of", path.display(), error))
            }
            _ => Ok(()),
        }
    }

    /// Which namespace it is.
    pub fn id(&self) -> NsId {
        self.id
    }

    /// Where it was opened or made, if it has a path.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Another handle to the same namespace.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = self.fd.try_clone().map_err(|source| refused("open", self, source))?;
        Ok(Self { fd, id: self.id, path: self.path.clone() })
    }

    /// Runs `visit` on a new thread inside the namespace and returns what it returned; a panic goes on here.
    pub fn run<T: Send>(&self, visit: impl FnOnce() -> T + Send) -> Result<T> {
        on_thread(&self.to_string(), || {
            self.enter()?;
            Ok(visit())
        })?
    }

    /// Moves the calling thread into the namespace, for good: for threads that live there.
    pub fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|source| refused("enter", self, source))
    }

    /// Runs a short piece of work inside the namespace on the calling thread, which is back home before this
    /// returns. This is for opening sockets: to go there and back costs a fraction of waking another thread.
    /// A thread that is inside already stays as it is: to enter even one's own namespace takes CAP_SYS_ADMIN,
    /// which a program that stays at home need not have.
    pub(crate) fn visit<T>(&self, visit: impl FnOnce() -> T) -> Result<T> {
        let home = File::open(SELF).map_err(|source| refused("leave", SELF, source))?;
        let stat = home.metadata().map_err(|source| refused("leave", SELF, source))?;
        if (NsId { dev: stat.dev(), ino: stat.ino() }) == self.id {
            return Ok(visit());
        }
        self.enter()?;
        let _way_back = WayBack(home);
        Ok(visit())
    }
}

/// Takes the calling thread home when it is dropped, by a panic too.
struct WayBack(File);

impl Drop for WayBack {
    fn drop(&mut self) {
        if let Err(error) = move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)) {
            // Whatever this thread did next would be done to the wrong network.
            eprintln!(
                "knit: a thread cannot go back to its network namespace ({error}): the program ends here"
            );
            std::process::abort();
        }
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Display for NetNs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}", path.display()),
            None => write!(f, "{}", self.id),
        }
    }
}

impl fmt::Debug for NetNs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetNs").field("id", &self.id).field("path", &self.path).finish_non_exhaustive()
    }
}

impl fmt::Display for NsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}]", self.ino)
    }
}

/// Runs `work` on a thread of its own, which ends with it.
fn on_thread<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, work)
            .map_err(|source| Error::Thread { namespace: namespace.into(), source })?;
        match thread.join() {
            Ok(value) => Ok(value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
