//! A file system in memory that stops, fails or writes short at the step it is told to.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use knit_types::sync::Locked;

use crate::fs::{Fs, FsFile};

/// What happens at a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The process is killed: of a write this many bytes arrive (at most), of anything else nothing; and
    /// every later step fails until [`FaultFs::restart`].
    Kill(usize),
    /// The disk is full from here on, until [`FaultFs::free_space`]: of a write this many bytes arrive (at
    /// most).
    NoSpace(usize),
    /// A write writes this many bytes (at least one), and says so.
    Short(usize),
}

/// A file system in memory. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct FaultFs {
    state: Arc<Mutex<State>>,
}

/// A file of a [`FaultFs`].
#[derive(Debug)]
pub struct FaultFile {
    fs: FaultFs,
    inode: usize,
}

#[derive(Debug, Default)]
struct State {
    names: BTreeMap<PathBuf, usize>,
    synced_names: BTreeMap<PathBuf, usize>,
    inodes: Vec<Inode>,
    /// Steps taken since the start.
    steps: usize,
    fault: Option<(usize, Fault)>,
    killed: bool,
    full: bool,
    /// How many bytes all files together may have.
    room: Option<usize>,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    content: Vec<u8>,
    synced: Vec<u8>,
}

impl FaultFs {
    /// An empty file system in which nothing fails.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the step with this number fail, counted from now on with 0.
    pub fn fail_at(&self, step: usize, fault: Fault) {
        let mut state = self.state();
        state.fault = Some((state.steps + step, fault));
    }

    /// How many steps were taken so far.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.state().steps
    }

    /// A new process: what was killed is over, nothing fails any more.
    pub fn restart(&self) {
        let mut state = self.state();
        state.killed = false;
        state.fault = None;
    }

    /// Room on the disk again.
    pub fn free_space(&self) {
        let mut state = self.state();
        state.full = false;
        state.fault = None;
    }

    /// A disk of this size.
    pub fn limit(&self, bytes: usize) {
        self.state().room = Some(bytes);
    }

    /// The power fails: content that was not synced is lost; names that were not synced are lost too, unless
    /// the disk happened to write them.
    pub fn lose_power(&self, names_arrived: bool) {
        let mut state = self.state();
        for inode in &mut state.inodes {
            inode.content.clone_from(&inode.synced);
        }
        if names_arrived {
            state.synced_names = state.names.clone();
        } else {
            state.names = state.synced_names.clone();
        }
        state.killed = false;
        state.fault = None;
    }

    /// The content of a file, past all faults.
    #[must_use]
    pub fn content(&self, path: &Path) -> Option<Vec<u8>> {
        let state = self.state();
        state.names.get(path).map(|inode| state.inodes[*inode].content.clone())
    }

    /// Puts a file there, past all faults.
    pub fn set_content(&self, path: &Path, content: Vec<u8>) {
        let mut state = self.state();
        state.inodes.push(Inode { synced: content.clone(), content });
        let inode = state.inodes.len() - 1;
        state.names.insert(path.to_owned(), inode);
        state.synced_names.insert(path.to_owned(), inode);
    }

    /// The names of all files.
    #[must_use]
    pub fn names(&self) -> Vec<PathBuf> {
        self.state().names.keys().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Takes one step. Gives the fault that only a write can half survive.
    fn step(&self, needs_space: bool) -> io::Result<(MutexGuard<'_, State>, Option<Fault>)> {
        let mut state = self.state();
        if state.killed {
            return Err(killed());
        }
        let step = state.steps;
        state.steps += 1;
        let fault = state.fault.filter(|(at, _)| *at == step).map(|(_, fault)| fault);
        match fault {
            Some(Fault::Kill(_)) => state.killed = true,
            Some(Fault::NoSpace(_)) => state.full = true,
            _ => {}
        }
        let fault = match fault {
            None if state.full && needs_space => Some(Fault::NoSpace(0)),
            fault => fault,
        };
        Ok((state, fault))
    }

    /// Takes one step that happens or does not.
    fn whole_step(&self, needs_space: bool) -> io::Result<MutexGuard<'_, State>> {
        let (state, fault) = self.step(needs_space)?;
        match fault {
            Some(Fault::Kill(_)) => Err(killed()),
            Some(Fault::NoSpace(_)) if needs_space => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(state),
        }
    }
}

fn killed() -> io::Error {
    io::Error::other("the process was killed")
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Fs for FaultFs {
    type File = FaultFile;
    type Lock = ();

    fn create_dir(&self, _path: &Path) -> io::Result<()> {
        self.whole_step(true).map(drop)
    }

    fn lock(&self, _path: &Path) -> io::Result<Result<(), Option<u32>>> {
        self.whole_step(false).map(|_| Ok(()))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let state = self.whole_step(false)?;
        let inode = state.names.get(path).ok_or_else(missing)?;
        Ok(state.inodes[*inode].content.clone())
    }

    fn open_append(&self, path: &Path) -> io::Result<FaultFile> {
        let state = self.whole_step(false)?;
        let inode = *state.names.get(path).ok_or_else(missing)?;
        Ok(FaultFile { fs: self.clone(), inode })
    }

    fn create(&self, path: &Path) -> io::Result<FaultFile> {
        let mut state = self.whole_step(true)?;
        let inode = match state.names.get(path) {
            Some(inode) => *inode,
            None => {
                state.inodes.push(Inode::default());
                state.inodes.len() - 1
            }
        };
        state.inodes[inode].content.clear();
        state.names.insert(path.to_owned(), inode);
        drop(state);
        Ok(FaultFile { fs: self.clone(), inode })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.whole_step(false)?;
        let inode = state.names.remove(from).ok_or_else(missing)?;
        state.names.insert(to.to_owned(), inode);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.whole_step(true)?;
        let inode = *state.names.get(from).ok_or_else(missing)?;
        if state.names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.names.insert(to.to_owned(), inode);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.whole_step(false)?;
        state.names.remove(path).map(drop).ok_or_else(missing)
    }

    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        let mut state = self.whole_step(false)?;
        state.synced_names = state.names.clone();
        Ok(())
    }
}

impl FsFile for FaultFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (mut state, fault) = self.fs.step(true)?;
        let used: usize = state.names.values().map(|inode| state.inodes[*inode].content.len()).sum();
        let fault = match state.room.map(|room| room.saturating_sub(used)) {
            Some(left) if fault.is_none() && left < bytes.len() => Some(Fault::NoSpace(left)),
            _ => fault,
        };
        let content = &mut state.inodes[self.inode].content;
        let part = |n: usize| &bytes[..n.min(bytes.len())];
        match fault {
            None => {
                content.extend_from_slice(bytes);
                Ok(bytes.len())
            }
            Some(Fault::Short(n)) => {
                let part = part(n.max(1));
                content.extend_from_slice(part);
                Ok(part.len())
            }
            Some(Fault::Kill(n)) => {
                content.extend_from_slice(part(n));
                Err(killed())
            }
            Some(Fault::NoSpace(0)) => Err(io::ErrorKind::StorageFull.into()),
            Some(Fault::NoSpace(n)) => {
                // As the kernel does it: what fits is written, and only the next write fails.
                let part = part(n.min(bytes.len().saturating_sub(1)));
                if part.is_empty() {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                content.extend_from_slice(part);
                Ok(part.len())
            }
        }
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        let mut state = self.fs.whole_step(false)?;
        state.inodes[self.inode].content.resize(len as usize, 0);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.fs.whole_step(false)?;
        let inode = &mut state.inodes[self.inode];
        inode.synced.clone_from(&inode.content);
        Ok(())
    }
}
