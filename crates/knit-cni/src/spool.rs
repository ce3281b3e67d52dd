//! DELs that came while the agent was away: the shim leaves a note, the agent takes it when it is back.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

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
    let named = |text: &str| {
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        !text.is_empty() && text.len() <= 64 && text.bytes().all(fits)
    };
    if !named(&request.container_id) || !named(&request.ifname) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "CNI_CONTAINERID and CNI_IFNAME must be letters, digits and ._- to be noted for later",
        ));
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let name = format!("{}@{}", request.container_id, request.ifname);
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

fn read(file: &Path) -> io::Result<Request> {
    let size = fs::metadata(file)?.len();
    if size > MAX_FRAME as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the note is longer than a request can be"));
    }
    Ok(serde_json::from_slice(&fs::read(file)?)?)
}
