//! DELs that came while the agent was away: the shim leaves a note, the agent takes it when it is back.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use knit_types::IfName;

use crate::call::MAX_CONTAINER_ID;
use crate::protocol::{MAX_FRAME, Request};

const SUFFIX: &str = "del";

/// A note that was found.
#[derive(Debug)]
pub struct Note {
    /// Its file. Remove it once the DEL is done.
    pub file: PathBuf,
    /// The DEL, or why it cannot be read.
    pub request: io::Result<Request>,
}

/// Leaves a note. The same DEL again replaces it.
///
/// # Errors
/// When the folder cannot be written, or the request cannot be named as a file.
pub fn leave(folder: &Path, request: &Request) -> io::Result<()> {
    let name = name(&request.container_id, &request.ifname)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unfinished = folder.join(format!("{name}.{}.tmp", std::process::id()));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    let text = serde_json::to_vec(request)?;
    let written =
        file.write_all(&text).and_then(|()| fs::rename(&unfinished, folder.join(format!("{name}.{SUFFIX}"))));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

/// Takes a note back: the same container gets its networks again, and a DEL from before must not take them
/// away.
///
/// # Errors
/// When there is one and it cannot be removed.
pub fn forget(folder: &Path, container_id: &str, ifname: &str) -> io::Result<()> {
    match fs::remove_file(folder.join(format!("{}.{SUFFIX}", name(container_id, ifname)?))) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// All notes, in the order of their names. A folder that is not there holds none.
///
/// # Errors
/// When the folder cannot be read.
pub fn notes(folder: &Path) -> io::Result<Vec<Note>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut files = Vec::new();
    for entry in entries {
        let file = entry?.path();
        if file.extension().is_some_and(|e| e == SUFFIX) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files.into_iter().map(|file| Note { request: read(&file), file }).collect())
}

/// What the note of a container's interface is called. Interface names may hold signs that file names should
/// not.
fn name(container_id: &str, ifname: &str) -> io::Result<String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if container_id.is_empty()
        || container_id.len() > MAX_CONTAINER_ID
        || !container_id.bytes().all(fits)
        || IfName::new(ifname).is_err()
    {
        let problem = "the container's id or the interface's name is not valid in CNI";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    let mut name = format!("{container_id}@");
    for byte in ifname.bytes() {
        if fits(byte) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02x}"));
        }
    }
    Ok(name)
}

fn read(file: &Path) -> io::Result<Request> {
    let size = fs::metadata(file)?.len();
    if size > MAX_FRAME as u64 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the record is longer than the limit for a \
        request",
        ));
    }
    Ok(serde_json::from_slice(&fs::read(file)?)?)
}
