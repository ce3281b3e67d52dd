//! Which network namespace a path means now. Inode and device tell whether it is still the one that was meant.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

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
