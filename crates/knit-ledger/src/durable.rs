//! One value that outlives a reboot: synced, checked, with the one before it kept.
//!
//! The first line is `knit-durable 1 <crc32c of the rest>`, the rest is JSON. A new value is written beside
//! the old one, synced, and then takes its name; the old one keeps a second name, `<path>.previous`.

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::DurableError;
use crate::fs::{Fs, FsFile, RealFs, parent, with_suffix, write_all};

const MAGIC: &str = "knit-durable 1 ";

/// One value on disk.
#[derive(Clone, Debug)]
pub struct DurableFile<T, F: Fs = RealFs> {
    fs: F,
    path: PathBuf,
    value: PhantomData<fn(&T) -> T>,
}

/// A value with where it came from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Loaded<T> {
    /// The value, if there is one.
    pub value: Option<T>,
    /// Where it came from.
    pub source: Source,
}

/// Where a value came from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// Nothing was stored.
    Nothing,
    /// What was stored last.
    Current,
    /// What was stored last cannot be read: this is the value before it, or none.
    Previous {
        /// What is wrong with the last one.
        why: String,
    },
}

impl<T: Serialize + DeserializeOwned> DurableFile<T> {
    /// The value of this path. Nothing is read yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::with_fs(RealFs, path)
    }
}

impl<T: Serialize + DeserializeOwned, F: Fs> DurableFile<T, F> {
    /// As [`DurableFile::new`], on another file system.
    pub fn with_fs(fs: F, path: impl Into<PathBuf>) -> Self {
        Self { fs, path: path.into(), value: PhantomData }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was stored last, or else what was stored before it.
    pub fn load(&self) -> Result<Loaded<T>, DurableError> {
        let previous = with_suffix(&self.path, ".previous");
        let why = match self.read(&self.path)? {
            Some(Ok(value)) => return Ok(Loaded { value: Some(value), source: Source::Current }),
            Some(Err(why)) => why,
            None => match self.read(&previous)? {
                None => return Ok(Loaded { value: None, source: Source::Nothing }),
                Some(_) => "the file is missing".to_owned(),
            },
        };
        match self.read(&previous)? {
            Some(Ok(value)) => Ok(Loaded { value: Some(value), source: Source::Previous { why } }),
            Some(Err(also)) => Ok(Loaded {
                value: None,
                source: Source::Previous { why: format!("{why}; the one before it: {also}") },
            }),
            None => Ok(Loaded { value: None, source: Source::Previous { why } }),
        }
    }

    /// Stores a value; once this returns it outlives a power loss. If it fails, what was stored before is
    /// still there.
    pub fn store(&self, value: &T) -> Result<(), DurableError> {
        let json = serde_json::to_vec_pretty(value)
            .map_err(|source| DurableError::Encode { path: self.path.clone(), source })?;
        let mut bytes = format!("{MAGIC}{:08x}\n", crc32c::crc32c(&json)).into_bytes();
        bytes.extend_from_slice(&json);

        let new = with_suffix(&self.path, ".new");
        let previous = with_suffix(&self.path, ".previous");
        self.fs.create_dir(parent(&self.path)).map_err(|e| self.failed("creating its directory", e))?;
        let written = self.fs.create(&new).and_then(|mut file| {
            write_all(&mut file, &bytes)?;
            file.sync()
        });
        if let Err(error) = written {
            // The first error is what counts; the rest of it is overwritten the next time.
            let _ = self.fs.remove(&new);
            return Err(self.failed("writing the new value", error));
        }
        // A value that cannot be read must not push out the last one that can.
        if let Some(Ok(_)) = self.read(&self.path)? {
            ignore_missing(self.fs.remove(&previous))
                .and_then(|()| self.fs.link(&self.path, &previous))
                .map_err(|e| self.failed("keeping the previous value", e))?;
        }
        self.fs.rename(&new, &self.path).map_err(|e| self.failed("putting the new value in its place", e))?;
        self.fs.sync_dir(parent(&self.path)).map_err(|e| self.failed("syncing its directory", e))
    }

    /// The value of a file, or what is wrong with it; nothing if it is not there.
    fn read(&self, path: &Path) -> Result<Option<Result<T, String>>, DurableError> {
        match self.fs.read(path) {
            Ok(bytes) => Ok(Some(decode(&bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed("reading it", error)),
        }
    }

    fn failed(&self, doing: &'static str, source: io::Error) -> DurableError {
        DurableError::Io { path: self.path.clone(), doing, source }
    }
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let split = bytes.iter().position(|b| *b == b'\n').ok_or("it has no first line")?;
    let (line, json) = (&bytes[..split], &bytes[split + 1..]);
    let crc = std::str::from_utf8(line)
        .ok()
        .and_then(|line| line.strip_prefix(MAGIC))
        .and_then(|hex| u32::from_str_radix(hex, 16).ok())
        .ok_or("it does not have the first line of a durable file of format 1")?;
    if crc32c::crc32c(json) != crc {
        return Err("its content does not match its checksum".to_owned());
    }
    serde_json::from_slice(json).map_err(|error| format!("its content cannot be read: {error}"))
}
