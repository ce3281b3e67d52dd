//! Which network namespace a path means now. Inode and device tell whether it is still the one that was meant.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

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

/// Whether a namespace is certainly gone: its path is free, or means another one.
#[must_use]
pub fn is_gone(known: &NetnsRef) -> bool {
    match identify(&known.path) {
        Ok(found) => found.as_ref() != Some(known),
        // What cannot be looked at may be there.
        Err(_) => false,
    }
}

/// Whether a process that we can see is in a namespace. What cannot be seen is not there: an agent in a container sees
/// all processes of its node only with `hostPID`.
#[must_use]
pub fn is_inhabited(known: &NetnsRef) -> bool {
    let wanted = PathBuf::from(format!("net:[{}]", known.inode));
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    processes
        .flatten()
        .filter(|entry| is_process(&entry.file_name()))
        .any(|entry| std::fs::read_link(entry.path().join("ns/net")).is_ok_and(|link| link == wanted))
}
