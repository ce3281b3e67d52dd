//! One ledger, one agent: a lock that goes with the process, however it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A lock that is held until it is dropped or its process ends; a new program in the same process does not
/// inherit it.
#[derive(Debug)]
pub struct LockFile(#[expect(dead_code, reason = "held open, not used")] File);

/// Takes the lock, or says which process has it, if it left its id.
pub(crate) fn take(path: &Path) -> io::Result<Result<LockFile, Option<u32>>> {
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            return Ok(Err(text.trim().parse().ok()));
        }
        Err(TryLockError::Error(error)) => return Err(error),
    }
    // The id only makes the other's message better: with a full disk the agent must still start.
    let told = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(format!("{}\n", std::process::id()).as_bytes()));
    match told {
        Err(error) if error.kind() != io::ErrorKind::StorageFull => Err(error),
        _ => Ok(Ok(LockFile(file))),
    }
}
