//! Which network namespace a path means now. Inode and device tell whether it is still the one that was
//! meant.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use knit_kernel::handle::LinkFilter;
use knit_kernel::{Handle, NetNs};
use knit_ledger::NetnsRef;

/// What is at a path; nothing if nothing is.
///
/// # Errors
/// When it cannot be looked at.
pub fn identify(path: &Path) -> io::Result<Option<NetnsRef>> {
    match std::fs::metadata(path) {
        Ok(meta) => Ok(Some(NetnsRef { path: path.to_owned(), inode: meta.ino(), device: meta.dev() })),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Whether two are the same namespace, by whatever paths: `/var/run/netns` and `/run/netns` are one
/// directory. The device of one that was found in the kernel is not known.
#[must_use]
pub fn is_same(one: &NetnsRef, other: &NetnsRef) -> bool {
    let devices = (one.device, other.device);
    one.inode == other.inode && (devices.0 == devices.1 || devices.0 == 0 || devices.1 == 0)
}

/// Whether a namespace is certainly gone: its path is free, or means another one.
#[must_use]
pub fn is_gone(known: &NetnsRef) -> bool {
    match identify(&known.path) {
        Ok(found) => found.as_ref() != Some(known),
        // What cannot be looked at may be there.
        Err(_) => false,
    }
}

/// The names of all interfaces in a namespace that is there.
///
/// # Errors
/// When it cannot be entered.
pub fn interfaces(path: &Path) -> knit_kernel::Result<Vec<String>> {
    let handle = Handle::open(&NetNs::open(path)?)?;
    Ok(handle.links(&LinkFilter::default())?.into_iter().map(|link| link.name.to_string()).collect())
}

/// The processes that we can see, by the network namespaces that they are in.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Processes {
    namespaces: BTreeSet<PathBuf>,
    /// Only our own are to be seen: an agent in a container sees all processes of its node only with
    /// `hostPID`, and without it is the first of its own.
    pub blind: bool,
}

// === impl Processes ===

impl Processes {
    /// What an agent sees that sees nobody but itself.
    #[must_use]
    pub fn unseen() -> Self {
        Self { namespaces: BTreeSet::new(), blind: true }
    }

    /// Looks at all of them.
    #[must_use]
    pub fn look() -> Self {
        let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let processes = entries.filter(|entry| is_process(&entry.file_name()));
        Self {
            namespaces: processes.filter_map(|e| std::fs::read_link(e.path().join("ns/net")).ok()).collect(),
            blind: std::process::id() == 1,
        }
    }

    /// Whether one is in a namespace.
    #[must_use]
    pub fn inhabit(&self, known: &NetnsRef) -> bool {
        self.namespaces.contains(&PathBuf::from(format!("net:[{}]", known.inode)))
    }
}

/// Whether a process that we can see is in a namespace. What cannot be seen is not there.
#[must_use]
pub fn is_inhabited(known: &NetnsRef) -> bool {
    Processes::look().inhabit(known)
}
