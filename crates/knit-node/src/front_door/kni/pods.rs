//! Network namespaces that clients of the old protocol have made for them. They are named by the pod's uid,
//! so that a pod that is created again under the same name never gets the namespace of the one before.
//!
//! Which namespace is whose is noted in a small file before it is made: those clients delete by name.

use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use knit_kernel::link::Change;
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, IfName};
use serde::{Deserialize, Serialize};

/// What the names of our namespaces start with.
const PREFIX: &str = "kni-";

/// The namespaces.
#[derive(Clone, Debug)]
pub(super) struct Pods {
    notes: PathBuf,
    usual: PathBuf,
}

/// Whose namespace it is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Note {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub path: PathBuf,
    /// The sandbox that was attached there last; it is known also when that is detached again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
}

/// Whose namespace a call is about.
#[derive(Clone, Debug)]
pub(super) struct CalledPod {
    pub namespace: String,
    pub name: String,
    pub uid: Option<String>,
    pub path: Option<String>,
}

// === impl Pods ===

impl Pods {
    /// Notes in `notes`, namespaces in `usual` unless a client says otherwise.
    pub fn new(notes: PathBuf, usual: PathBuf) -> Self {
        Self { notes, usual }
    }

    /// Makes a pod's namespace, or finds it if it is there. Blocking.
    pub fn create(&self, namespace: &str, name: &str, uid: &str, folder: &str) -> io::Result<PathBuf> {
        check_uid(uid)?;
        let folder = if folder.is_empty() { self.usual.clone() } else { PathBuf::from(folder) };
        if !folder.is_absolute() {
            return Err(invalid("netns_path_prefix is not an absolute path"));
        }
        let path = folder.join(format!("{PREFIX}{uid}"));
        let sandbox =
            self.notes()?.into_iter().find(|n| n.uid == uid && n.path == path).and_then(|n| n.sandbox);
        let note = Note { namespace: namespace.into(), name: name.into(), uid: uid.into(), path, sandbox };
        self.write(&note)?;
        std::fs::create_dir_all(&folder)?;
        let space = NetNs::ensure(&note.path).map_err(io::Error::other)?;
        let lo = IfName::new("lo").map_err(io::Error::other)?;
        let up = Handle::open(&space).and_then(|handle| handle.apply(&[Change::named(lo).up().into()]));
        up.map_err(io::Error::other)?;
        Ok(note.path)
    }

    /// Notes whose sandbox a namespace is. Blocking.
    pub fn claim(&self, note: &Note, sandbox: &str) -> io::Result<()> {
        if note.sandbox.as_deref() == Some(sandbox) {
            return Ok(());
        }
        self.write(&Note { sandbox: Some(sandbox.to_owned()), ..note.clone() })
    }

    /// Removes a namespace and its note. What is gone already is fine. Blocking.
    pub fn delete(&self, note: &Note) -> io::Result<()> {
        NetNs::delete(&note.path).map_err(io::Error::other)?;
        match std::fs::remove_file(self.file(&note.uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The notes of the namespaces that a call may be about: the one at its path if it says one, else those
    /// that were made under the pod's name. What is not ours is not among them. Blocking.
    pub fn matching(&self, which: &CalledPod) -> io::Result<Vec<Note>> {
        let mut notes = self.notes()?;
        notes.retain(|note| match &which.path {
            Some(path) => note.path == Path::new(path),
            None => note.namespace == which.namespace && note.name == which.name,
        });
        if let Some(uid) = &which.uid {
            notes.retain(|note| note.uid == *uid);
        }
        Ok(notes)
    }

    fn notes(&self) -> io::Result<Vec<Note>> {
        let entries = match std::fs::read_dir(&self.notes) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut notes = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json") {
                notes.push(serde_json::from_slice(&std::fs::read(path)?)?);
            }
        }
        Ok(notes)
    }

    fn file(&self, uid: &str) -> PathBuf {
        self.notes.join(format!("{uid}.json"))
    }

    fn write(&self, note: &Note) -> io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.notes)?;
        let unfinished = self.notes.join(format!("{}.new", note.uid));
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&unfinished)?;
        file.write_all(&serde_json::to_vec(note)?)?;
        std::fs::rename(&unfinished, self.file(&note.uid))
    }
}

fn check_uid(uid: &str) -> io::Result<()> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if uid.is_empty() || uid.len() > 64 || !uid.bytes().all(fits) {
        return Err(invalid("the pod's uid is missing or not valid: its namespace is named after it"));
    }
    Ok(())
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}
