//! A folder of YAML and JSON files as the source of objects.
//!
//! Every file named `*.yaml`, `*.yml` or `*.json` right in the folder is read (not those whose name starts
//! with a dot, not subfolders). Changes are seen as they happen. A broken file does not take anything away:
//! what it held stays, and a [`Problem`] says what is wrong. What Knit writes goes to another folder
//! ([`output`]), and is never read back.

mod kinds;
mod notice;
pub(crate) mod output;
pub(crate) mod parse;
mod table;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_types::sync::Locked;
use kube::core::ApiResource;
use tokio::sync::watch;

pub use kinds::{Kinds, Scope};
pub use parse::check_file;

use crate::error::{Error, Result};
use crate::health::Health;
use crate::problem::Problem;
use crate::selector::Filter;
use crate::source::{Delta, Lean};
use notice::{Happened, Notice};
use output::Output;
use parse::parse_file;
use table::Table;

/// Which folder to read, and where to write.
#[derive(Clone, Debug)]
pub struct FolderOptions {
    /// The folder with the objects.
    pub path: PathBuf,
    /// Where statuses, events and other writes go: one file per object. `status` in the folder if it is left
    /// out.
    pub output: Option<PathBuf>,
    /// The kinds that the files may hold.
    pub kinds: Kinds,
}

/// A folder that is being watched.
#[derive(Debug)]
pub(crate) struct Folder {
    shared: Arc<Shared>,
    pub(crate) output: Output,
    task: tokio::task::AbortHandle,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    kinds: Kinds,
    table: Mutex<Table>,
    /// Counts the changes of the table.
    changes: watch::Sender<u64>,
    problems: watch::Sender<Arc<Vec<Problem>>>,
    health: Arc<Health>,
}

/// What a file looked like when it was read; another look means another read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Look {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// One reader's place in a folder.
#[derive(Debug)]
pub(crate) struct FolderReader {
    shared: Arc<Shared>,
    changes: watch::Receiver<u64>,
    group: String,
    kind: String,
    filter: Filter,
    /// Deltas of the current pass that were not taken yet, last first.
    pending: Vec<Delta>,
    first: bool,
}

/// How long to wait before looking for a folder that went away.
const FOLDER_RETRY: Duration = Duration::from_secs(1);

// === impl FolderOptions ===

impl FolderOptions {
    /// This folder, with `status` in it for what is written.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), output: None, kinds: Kinds::default() }
    }
}

// === impl Folder ===

impl Folder {
    /// Reads the folder once, and keeps watching it. Needs a tokio runtime.
    pub(crate) async fn open(
        options: FolderOptions,
        problems: watch::Sender<Arc<Vec<Problem>>>,
    ) -> Result<Self> {
        let FolderOptions { path, output, kinds } = options;
        // Absolute, so that a later change of the working directory changes nothing.
        let path =
            std::path::absolute(&path).map_err(|source| Error::Folder { path: path.clone(), source })?;
        fs::read_dir(&path).map_err(|source| Error::Folder { path: path.clone(), source })?;
        let output = Output::new(output.unwrap_or_else(|| path.join("status")));
        let shared = Arc::new(Shared {
            health: Arc::new(Health::new(format!("folder {}", path.display()))),
            path,
            kinds,
            table: Mutex::default(),
            changes: watch::Sender::new(0),
            problems,
        });
        // The watch comes before the first read: what changes in between is seen.
        let notice = shared.watch()?;
        let mut looks = HashMap::new();
        let at_work = Arc::clone(&shared);
        let read = tokio::task::spawn_blocking(move || at_work.read(&mut looks).map(|()| looks)).await;
        let looks = match read {
            Ok(Ok(looks)) => looks,
            Ok(Err(source)) => return Err(Error::Folder { path: shared.path.clone(), source }),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        shared.health.connected();
        let task = tokio::spawn(Arc::clone(&shared).run(notice, looks)).abort_handle();
        Ok(Self { shared, output, task })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.shared.path
    }

    pub(crate) fn reader(&self, resource: &ApiResource, filter: Filter) -> FolderReader {
        FolderReader {
            shared: Arc::clone(&self.shared),
            changes: self.shared.changes.subscribe(),
            group: resource.group.clone(),
            kind: resource.kind.clone(),
            filter,
            pending: Vec::new(),
            first: true,
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Shared ===

impl Shared {
    fn watch(&self) -> Result<Notice> {
        Notice::new(&self.path).map_err(|source| Error::FolderWatch { path: self.path.clone(), source })
    }

    async fn run(self: Arc<Self>, mut notice: Notice, mut looks: HashMap<PathBuf, Look>) {
        loop {
            match notice.next().await {
                // Clocks of file systems are coarse: a file that an event names is read whatever it looks
                // like.
                Ok(Happened::Changed { names }) => {
                    looks.retain(|path, _| path.file_name().is_none_or(|name| !names.contains(name)));
                }
                Ok(Happened::Lost) => looks.clear(),
                Ok(Happened::FolderGone) => {
                    notice = self.reopen("the folder is gone: create it again").await;
                    looks.clear();
                }
                Err(error) => {
                    notice = self.reopen(&format!("cannot watch the folder: {error}")).await;
                    looks.clear();
                }
            }
            let at_work = Arc::clone(&self);
            let read = tokio::task::spawn_blocking(move || {
                let result = at_work.read(&mut looks);
                (result, looks)
            });
            let Ok((result, back)) = read.await else { return };
            looks = back;
            match result {
                Ok(()) => self.health.connected(),
                Err(error) => self.health.failed(&format!("cannot read the folder: {error}")),
            }
        }
    }

    /// Waits until the folder is there again. What it held stays in force meanwhile.
    async fn reopen(&self, why: &str) -> Notice {
        self.health.failed(why);
        loop {
            match self.watch() {
                Ok(notice) => return notice,
                Err(_) => tokio::time::sleep(FOLDER_RETRY).await,
            }
        }
    }

    /// Reads every file that looks different from the last time.
    fn read(&self, looks: &mut HashMap<PathBuf, Look>) -> io::Result<()> {
        let mut now = HashMap::new();
        let mut present = HashSet::new();
        let mut news: Vec<(PathBuf, io::Result<Vec<u8>>)> = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if !is_object_file(&path) {
                continue;
            }
            // Through links: a ConfigMap's files are links whose target is swapped.
            let meta = match fs::metadata(&path) {
                Ok(meta) if meta.is_file() => meta,
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    present.insert(path.clone());
                    news.push((path, Err(error)));
                    continue;
                }
            };
            present.insert(path.clone());
            let look = Look::of(&meta);
            if looks.get(&path) != Some(&look) {
                news.push((path.clone(), fs::read(&path)));
            }
            now.insert(path, look);
        }
        let mut table = self.table.locked();
        for (path, content) in news {
            let name = path.strip_prefix(&self.path).unwrap_or(&path);
            match content {
                Ok(bytes) => table.set_file(name, parse_file(name, &bytes, &self.kinds)),
                // It went away between the two looks, and an event about that is on its way.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    now.remove(&path);
                    present.remove(&path);
                }
                Err(error) => {
                    now.remove(&path);
                    table.set_unreadable(name, Problem::error(format!("cannot read the file: {error}")));
                }
            }
        }
        table.retain_files(|name| present.contains(&self.path.join(name)));
        *looks = now;
        let changed = table.settle();
        self.report(table.problems());
        let objects = table.len();
        drop(table);
        if changed {
            tracing::debug!(folder = %self.path.display(), objects, "objects read");
            self.changes.send_modify(|n| *n += 1);
        }
        Ok(())
    }

    fn report(&self, problems: &[Problem]) {
        self.problems.send_if_modified(|known| {
            if known.as_slice() == problems {
                return false;
            }
            for problem in problems.iter().filter(|p| !known.contains(p)) {
                problem.log();
            }
            *known = Arc::new(problems.to_vec());
            true
        });
    }
}

// === impl FolderReader ===

impl FolderReader {
    /// The next step of the current pass over the folder; waits for a change when the pass is over.
    pub(crate) async fn next(&mut self) -> Delta {
        loop {
            if let Some(delta) = self.pending.pop() {
                return delta;
            }
            if self.first {
                self.first = false;
                self.changes.mark_unchanged();
            } else if self.changes.changed().await.is_err() {
                // The folder was closed: nothing will ever change again.
                std::future::pending::<()>().await;
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        let table = self.shared.table.locked();
        self.pending.push(Delta::Complete);
        for (key, entry) in table.of_kind(&self.group, &self.kind) {
            if self.filter.matches(&entry.value) {
                let object = Lean::shared(Arc::clone(&entry.value));
                self.pending.push(Delta::Object {
                    key: key.clone(),
                    version: entry.version.to_string().into(),
                    object,
                });
            }
        }
        self.pending.push(Delta::Begin);
    }

    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.shared.health)
    }
}

// === impl Look ===

impl Look {
    fn of(meta: &fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

fn is_object_file(path: &Path) -> bool {
    let hidden = path.file_name().is_none_or(|n| n.as_encoded_bytes().starts_with(b"."));
    let kind = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    !hidden && matches!(kind.as_str(), "yaml" | "yml" | "json")
}
