//! The log itself: opened, appended to, compacted, and set aside when it is damaged.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Corruption, LedgerError, is_full};
use crate::frame::{self, Change, Found, HEADER_LEN, MAX_CONTENT, Scan, VERSION};
use crate::fs::{Fs, FsFile, RealFs, parent, with_suffix, write_all};
use crate::unreadable::Unreadable;

/// What a ledger keeps.
pub trait Record: Clone + Serialize + DeserializeOwned {
    /// The newest form of a record that can be read. A record says which it has in a field `format`, where
    /// that is not the first.
    const FORMAT: u32 = 1;

    /// What it is found by. It never changes for a record.
    fn key(&self) -> &str;

    /// What a record is found by that cannot be read, from what is left of it.
    #[must_use]
    fn key_in(_record: &Value) -> Option<String> {
        None
    }
}

/// Changes that are written at once, and hold together or not at all.
#[derive(Clone, Debug)]
pub struct Batch<R> {
    changes: Vec<Change<R>>,
}

/// When a ledger is written again.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Not before it has this many bytes.
    pub compact_at: u64,
    /// And not before it has this many times the bytes that its records need.
    pub compact_factor: u64,
    /// Whether what is acknowledged outlives a power loss, and not only a kill.
    pub sync: bool,
}

/// A crash-safe set of records by key. See the crate's page.
#[derive(Debug)]
pub struct Ledger<R, F: Fs = RealFs> {
    fs: F,
    path: PathBuf,
    options: Options,
    content: Content<R>,
    file: F::File,
    /// The bytes that are sound: behind them there may be the rest of a failed write.
    len: u64,
    /// A failed write left bytes behind, and they could not be cut off yet.
    dirty_tail: bool,
    /// The file's name may not outlive a power loss yet.
    dirty_name: bool,
    /// Compaction is tried from this length on.
    compact_from: u64,
    compaction_error: Option<io::Error>,
    buffer: Vec<u8>,
    _lock: F::Lock,
}

/// What is in a ledger.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Content<R> {
    /// The records, by their keys.
    pub records: BTreeMap<String, R>,
    /// Those that cannot be read. No key is in both.
    pub unreadable: BTreeMap<String, Unreadable>,
}

/// A ledger with what was found when it was opened.
#[derive(Debug)]
pub struct Opened<R, F: Fs = RealFs> {
    /// The ledger.
    pub ledger: Ledger<R, F>,
    /// What was found.
    pub recovery: Recovery,
}

/// What was found when a ledger was opened. Records that cannot be read are none of this:
/// [`Ledger::unreadable`] has them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Recovery {
    /// There was none.
    Fresh,
    /// All of it is sound.
    Clean,
    /// A write was cut off, as by a kill; that change was never acknowledged.
    TornTailCut {
        /// How many bytes of it there were.
        bytes: u64,
    },
    /// It was damaged. What is known now is only what stood before the damage: compare it with the kernel,
    /// and record what is there.
    SetAside {
        /// Where the damaged file is now.
        to: PathBuf,
        /// What is wrong with it.
        why: Corruption,
        /// How many records were saved.
        saved: usize,
    },
}

// === impl Batch ===

impl<R: Record> Batch<R> {
    /// No change.
    #[must_use]
    pub fn new() -> Self {
        Self { changes: Vec::new() }
    }

    /// The changes, in their order.
    #[must_use]
    pub fn changes(&self) -> &[Change<R>] {
        &self.changes
    }

    /// Puts a record, in place of one with the same key.
    #[must_use]
    pub fn put(mut self, record: R) -> Self {
        self.changes.push(Change::Put(record));
        self
    }

    /// Removes a record; one that is not there is no error.
    #[must_use]
    pub fn remove(mut self, key: impl Into<String>) -> Self {
        self.changes.push(Change::Remove(key.into()));
        self
    }
}

impl<R: Record> Default for Batch<R> {
    fn default() -> Self {
        Self::new()
    }
}

// === impl Options ===

impl Default for Options {
    /// From 32 KiB on, when three quarters are old: a run-time directory may be a small tmpfs.
    fn default() -> Self {
        Self { compact_at: 32 << 10, compact_factor: 4, sync: false }
    }
}

// === impl Ledger ===

impl<R: Record> Ledger<R> {
    /// Opens the ledger of this path, and makes it (and its directory) if it is not there.
    pub fn open(path: impl Into<PathBuf>) -> Result<Opened<R>, LedgerError> {
        Self::open_with(RealFs, path, Options::default())
    }
}

impl<R: Record, F: Fs> Ledger<R, F> {
    /// As [`Ledger::open`], on another file system or with other options.
    pub fn open_with(fs: F, path: impl Into<PathBuf>, options: Options) -> Result<Opened<R, F>, LedgerError> {
        let path = path.into();
        let failed = |doing, source| io_error(&path, doing, source);
        fs.create_dir(parent(&path)).map_err(|e| failed("creating its directory", e))?;
        let lock = fs
            .lock(&with_suffix(&path, ".lock"))
            .map_err(|e| failed("locking it", e))?
            .map_err(|holder| LedgerError::Locked { path: path.clone(), holder })?;

        let bytes = match fs.read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("reading it", error)),
        };
        let mut content = Content::default();
        let scanned = bytes.as_ref().map(|bytes| (content.scan(bytes), bytes.len() as u64));

        let encoded =
            || content.snapshot().map_err(|source| LedgerError::Encode { path: path.clone(), source });
        let (recovery, file, len) = match scanned {
            Some((Scan::Newer { version }, _)) => {
                return Err(LedgerError::NewerVersion { path, found: version, ours: VERSION });
            }
            Some((Scan::Whole, total)) => {
                let file = fs.open_append(&path).map_err(|e| failed("opening it", e))?;
                (Recovery::Clean, file, total)
            }
            Some((Scan::TornTail { sound }, total)) => {
                let mut file = fs.open_append(&path).map_err(|e| failed("opening it", e))?;
                file.set_len(sound).map_err(|e| failed("cutting off an unfinished write", e))?;
                (Recovery::TornTailCut { bytes: total - sound }, file, sound)
            }
            Some((Scan::Corrupt { why, .. }, _)) => {
                let (file, len, to) =
                    write_anew((&fs, options), &path, &encoded()?, |fs| set_aside(fs, &path))
                        .map_err(|e| failed("setting the damaged file aside", e))?;
                (Recovery::SetAside { to, why, saved: content.records.len() }, file, len)
            }
            None => {
                let (file, len, ()) = write_anew((&fs, options), &path, &encoded()?, |_| Ok(()))
                    .map_err(|e| failed("making it", e))?;
                (Recovery::Fresh, file, len)
            }
        };
        // What a killed compaction left.
        match fs.remove(&with_suffix(&path, ".new")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing an unfinished copy", error));
            }
            _ => {}
        }
        let mut ledger = Self {
            fs,
            path,
            options,
            content,
            file,
            len,
            dirty_tail: false,
            dirty_name: options.sync,
            compact_from: options.compact_at,
            compaction_error: None,
            buffer: Vec::new(),
            _lock: lock,
        };
        // What an earlier run left behind, perhaps because it had no room to write the file again.
        ledger.compact_if_worth_it();
        Ok(Opened { ledger, recovery })
    }

    /// Writes changes; once this returns they outlive a kill. If it fails, nothing has changed.
    pub fn commit(&mut self, batch: Batch<R>) -> Result<(), LedgerError> {
        if batch.changes.is_empty() {
            return Ok(());
        }
        self.buffer.clear();
        let bytes = frame::encode(&mut self.buffer, &batch.changes)
            .map_err(|source| LedgerError::Encode { path: self.path.clone(), source })?;
        if bytes > MAX_CONTENT {
            return Err(LedgerError::TooLarge { path: self.path.clone(), bytes, most: MAX_CONTENT });
        }
        let appended = match self.append() {
            // What is old takes room that this change needs.
            Err(error) if is_full(&error) && self.make_room() => self.append(),
            appended => appended,
        };
        appended.map_err(|source| io_error(&self.path, "adding a record", source))?;
        for change in batch.changes {
            self.content.apply(match change {
                Change::Put(record) => Found::Put(record),
                Change::Remove(key) => Found::Remove(key),
            });
        }
        if self.len >= self.compact_from {
            self.compact_if_worth_it();
        }
        Ok(())
    }

    /// Puts one record.
    pub fn put(&mut self, record: R) -> Result<(), LedgerError> {
        self.commit(Batch::new().put(record))
    }

    /// Removes one record; nothing is written if it is not there.
    pub fn remove(&mut self, key: &str) -> Result<(), LedgerError> {
        if self.content.has(key) { self.commit(Batch::new().remove(key)) } else { Ok(()) }
    }

    /// The record of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&R> {
        self.content.records.get(key)
    }

    /// All records, by their keys.
    pub fn records(&self) -> impl Iterator<Item = &R> {
        self.content.records.values()
    }

    /// The records that cannot be read. One goes when another is put in its place, or it is removed.
    pub fn unreadable(&self) -> impl Iterator<Item = &Unreadable> {
        self.content.unreadable.values()
    }

    /// How many records there are that can be read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.content.records.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.content.records.is_empty()
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How large the file is.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// Why the file could not be written again, if that failed. It grows meanwhile; nothing is lost.
    #[must_use]
    pub fn compaction_error(&self) -> Option<&io::Error> {
        self.compaction_error.as_ref()
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (file, len, ()) = write_anew((&self.fs, self.options), &self.path, bytes, |_| Ok(()))?;
        // Until its name outlives a power loss, what the name stood for before has all that was acknowledged.
        self.dirty_name = self.options.sync;
        self.file = file;
        self.len = len;
        self.dirty_tail = false;
        self.compaction_error = None;
        Ok(())
    }

    /// Adds the buffer to the file, or leaves the file's sound part as it was.
    fn append(&mut self) -> io::Result<()> {
        if self.dirty_tail {
            self.file.set_len(self.len)?;
            self.dirty_tail = false;
        }
        if self.dirty_name {
            self.fs.sync_dir(parent(&self.path))?;
            self.dirty_name = false;
        }
        let written = write_all(&mut self.file, &self.buffer);
        match written.and_then(|()| if self.options.sync { self.file.sync() } else { Ok(()) }) {
            Ok(()) => {
                self.len += self.buffer.len() as u64;
                Ok(())
            }
            Err(error) => {
                // If the rest cannot be cut off now, it is before the next write; a reader takes it for a
                // torn tail.
                self.dirty_tail = self.file.set_len(self.len).is_err();
                Err(error)
            }
        }
    }

    /// Writes the file again if that makes it smaller; whether it did.
    fn make_room(&mut self) -> bool {
        match self.content.snapshot() {
            Ok(bytes) if (bytes.len() as u64) < self.len => {
                self.compaction_error = self.replace(&bytes).err();
                self.compaction_error.is_none()
            }
            _ => false,
        }
    }

    fn compact_if_worth_it(&mut self) {
        // The change is recorded all the same: a ledger that cannot be written again only grows.
        self.compaction_error = match self.content.snapshot() {
            Ok(bytes) if self.len / self.options.compact_factor.max(1) >= bytes.len() as u64 => {
                self.replace(&bytes).err()
            }
            Ok(_) => None,
            Err(error) => Some(error.into()),
        };
        // Whatever came of it, look again only when the file has doubled: the cost per record stays the same.
        self.compact_from = self.options.compact_at.max(self.len.saturating_mul(2));
    }
}

/// What is in a ledger, read without its lock and without changing it: for those who only want to look.
pub fn read<R: Record>(path: &Path) -> Result<(Content<R>, Scan), LedgerError> {
    let bytes = RealFs.read(path).map_err(|e| io_error(path, "reading it", e))?;
    let mut content = Content::default();
    let scan = content.scan(&bytes);
    Ok((content, scan))
}

// === impl Content ===

impl<R: Record> Content<R> {
    fn scan(&mut self, bytes: &[u8]) -> Scan {
        frame::scan(bytes, |found| self.apply(found))
    }

    fn has(&self, key: &str) -> bool {
        self.records.contains_key(key) || self.unreadable.contains_key(key)
    }

    fn apply(&mut self, found: Found<R>) {
        match found {
            Found::Put(record) => {
                self.unreadable.remove(record.key());
                self.records.insert(record.key().to_owned(), record);
            }
            Found::Unreadable(record) => {
                self.records.remove(record.key());
                self.unreadable.insert(record.key().to_owned(), record);
            }
            Found::Remove(key) => {
                self.unreadable.remove(&key);
                self.records.remove(&key);
            }
        }
    }

    /// The bytes of a ledger with this and nothing else.
    fn snapshot(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = frame::header(VERSION).to_vec();
        bytes.reserve(HEADER_LEN + self.records.len() * 512);
        for record in self.unreadable.values() {
            frame::encode(&mut bytes, &[Change::Put(record.text())])?;
        }
        for record in self.records.values() {
            frame::encode(&mut bytes, &[Change::Put(record)])?;
        }
        Ok(bytes)
    }
}

impl<R> Default for Content<R> {
    fn default() -> Self {
        Self { records: BTreeMap::new(), unreadable: BTreeMap::new() }
    }
}

/// Writes a new file beside the ledger and puts it in its place at once. `before` runs between the two.
fn write_anew<F: Fs, T>(
    (fs, options): (&F, Options),
    path: &Path,
    bytes: &[u8],
    before: impl FnOnce(&F) -> io::Result<T>,
) -> io::Result<(F::File, u64, T)> {
    let new = with_suffix(path, ".new");
    let mut file = fs.create(&new)?;
    let synced = |file: &mut F::File| if options.sync { file.sync() } else { Ok(()) };
    let done = write_all(&mut file, bytes)
        .and_then(|()| synced(&mut file))
        .and_then(|()| before(fs))
        .and_then(|extra| fs.rename(&new, path).map(|()| extra));
    match done {
        Ok(extra) => Ok((file, bytes.len() as u64, extra)),
        Err(error) => {
            // It is made empty the next time in any case; what counts is the first error, not this one.
            let _ = fs.remove(&new);
            Err(error)
        }
    }
}

/// Gives a damaged ledger a further name, the first that is free. It keeps its own until the new one takes
/// that.
fn set_aside<F: Fs>(fs: &F, path: &Path) -> io::Result<PathBuf> {
    let mut n = 1_u32;
    loop {
        let to = with_suffix(path, &format!(".corrupt-{n}"));
        match fs.link(path, &to) {
            Ok(()) => return Ok(to),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => n += 1,
            Err(error) => return Err(error),
        }
    }
}

fn io_error(path: &Path, doing: &'static str, source: io::Error) -> LedgerError {
    let path = path.to_owned();
    if is_full(&source) {
        LedgerError::NoSpace { path, doing, source }
    } else {
        LedgerError::Io { path, doing, source }
    }
}
