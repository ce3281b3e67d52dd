//! The few file operations that the ledger needs: the seam at which tests stop or fail it.

use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::lock::{self, LockFile};

/// A file system, as far as the ledger needs one.
pub trait Fs {
    /// An open file.
    type File: FsFile + Debug;
    /// Held as long as nobody else may open the same ledger.
    type Lock: Debug;

    /// Makes a directory and those above it, for their owner alone.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Takes a lock, or says who has it.
    fn lock(&self, path: &Path) -> io::Result<Result<Self::Lock, Option<u32>>>;
    /// The whole content.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Opens a file that is there; writes go to its end.
    fn open_append(&self, path: &Path) -> io::Result<Self::File>;
    /// Makes an empty file, for its owner alone, in place of what was there.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Gives a file another name in place of what was there, at once.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a further name; fails if that is taken.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a name.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes names in a directory outlive a power loss.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// An open file.
pub trait FsFile {
    /// Writes at the end; may write less than it was given.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Cuts the file.
    fn set_len(&mut self, len: u64) -> io::Result<()>;
    /// Makes the content outlive a power loss.
    fn sync(&mut self) -> io::Result<()>;
}

/// The machine's own file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealFs;

impl Fs for RealFs {
    type File = File;
    type Lock = LockFile;

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Result<LockFile, Option<u32>>> {
        lock::take(path)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn open_append(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).open(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        // Appending, so that a cut file goes on at its new end.
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        file.set_len(0)?;
        Ok(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

impl FsFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Write::write(self, bytes)
    }

    fn set_len(&mut self, len: u64) -> io::Result<()> {
        Self::set_len(self, len)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Writes all of it, however short each write is.
pub(crate) fn write_all(file: &mut impl FsFile, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The same path with something behind its name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The directory of a path.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
