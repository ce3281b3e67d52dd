//! A file system for the kernel to start with: an archive in the `newc` form of cpio, which it unpacks into
//! memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result};

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive in the making. Folders above an entry are made as they are needed.
pub struct Archive<W: Write> {
    to: W,
    written: u64,
    inode: u32,
    known: BTreeSet<PathBuf>,
}

impl Archive<BufWriter<File>> {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self::new(BufWriter::new(file)))
    }
}

impl<W: Write> Archive<W> {
    pub fn new(to: W) -> Self {
        Self { to, written: 0, inode: 0, known: BTreeSet::new() }
    }

    /// An empty folder.
    pub fn folder(&mut self, path: &str) -> Result<()> {
        self.above(Path::new(path))?;
        if self.known.insert(normal(Path::new(path))) {
            self.entry(Path::new(path), FOLDER | 0o755, b"", (0, 0))?;
        }
        Ok(())
    }

    /// A file with this content.
    pub fn file(&mut self, path: &Path, mode: u32, content: &[u8]) -> Result<()> {
        if self.is_new(path)? {
            self.entry(path, FILE | mode, content, (0, 0))?;
        }
        Ok(())
    }

    /// A file of this machine.
    pub fn copy(&mut self, from: &Path, to: &Path) -> Result<()> {
        let read = || Ok::<_, io::Error>((std::fs::read(from)?, from.metadata()?.permissions().mode()));
        let (content, mode) = read().with_context(|| format!("cannot read {}", from.display()))?;
        self.file(to, mode & 0o777, &content)
    }

    /// A folder of this machine with all that is below it and wanted.
    pub fn copy_all(&mut self, from: &Path, to: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
        let entries = std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
        for entry in entries {
            let entry = entry?;
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            if !wanted(&from) {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.copy_all(&from, &to, wanted)?;
            } else if kind.is_file() {
                self.copy(&from, &to)?;
            }
        }
        Ok(())
    }

    pub fn link(&mut self, path: &str, target: &str) -> Result<()> {
        if self.is_new(Path::new(path))? {
            self.entry(Path::new(path), LINK | 0o777, target.as_bytes(), (0, 0))?;
        }
        Ok(())
    }

    pub fn character_device(&mut self, path: &str, number: (u32, u32)) -> Result<()> {
        if self.is_new(Path::new(path))? {
            self.entry(Path::new(path), CHARACTER_DEVICE | 0o600, b"", number)?;
        }
        Ok(())
    }

    /// Ends the archive; its size.
    pub fn finish(mut self) -> Result<u64> {
        self.entry(Path::new("TRAILER!!!"), 0, b"", (0, 0))?;
        self.to.flush()?;
        Ok(self.written)
    }

    fn is_new(&mut self, path: &Path) -> Result<bool> {
        self.above(path)?;
        Ok(self.known.insert(normal(path)))
    }

    fn above(&mut self, path: &Path) -> Result<()> {
        let mut folder = PathBuf::new();
        for part in normal(path).parent().into_iter().flat_map(Path::components) {
            folder.push(part);
            if self.known.insert(folder.clone()) {
                self.entry(&folder, FOLDER | 0o755, b"", (0, 0))?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, mode: u32, content: &[u8], device: (u32, u32)) -> Result<()> {
        self.inode += 1;
        let name = normal(path);
        let name = name.as_os_str().as_bytes();
        let size =
            u32::try_from(content.len()).with_context(|| format!("{} is too large", path.display()))?;
        let length = u32::try_from(name.len() + 1)?;
        // Inode, mode, user, group, links, time, size, device of the file system, device of the entry, name,
        // checksum.
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, length, 0]
            .map(|n| format!("{n:08X}"));
        self.put(format!("070701{}", fields.concat()).as_bytes())?;
        self.put(name)?;
        self.put(&[0])?;
        self.pad()?;
        self.put(content)?;
        self.pad()?;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.to.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let rest = usize::try_from(self.written % 4).map_err(io::Error::other)?;
        self.put(&[0; 4][..(4 - rest) % 4])
    }
}

/// Names in an archive do not begin with a slash.
fn normal(path: &Path) -> PathBuf {
    path.components().filter(|part| matches!(part, Component::Normal(_))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_reads() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.file(Path::new("/bin/tool"), 0o755, b"12345").unwrap();
        archive.file(Path::new("/bin/tool"), 0o755, b"twice").unwrap();
        archive.link("/init", "bin/tool").unwrap();
        archive.character_device("/dev/console", (5, 1)).unwrap();
        let size = archive.finish().unwrap();
        assert_eq!(size, bytes.len() as u64);
        let names: Vec<String> = read(&bytes).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["bin", "bin/tool", "init", "dev", "dev/console", "TRAILER!!!"]);
        assert_eq!(read(&bytes)[1], ("bin/tool".into(), 0o100_755, b"12345".to_vec()));
        assert_eq!(read(&bytes)[2], ("init".into(), 0o120_777, b"bin/tool".to_vec()));
    }

    /// Name, mode and content of every entry.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let padded = |length: usize| length.next_multiple_of(4);
        while !bytes.is_empty() {
            assert_eq!(&bytes[..6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * n..14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, length) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[110..110 + length - 1].to_vec()).unwrap();
            let start = padded(110 + length);
            entries.push((name, mode, bytes[start..start + size].to_vec()));
            bytes = &bytes[padded(start + size)..];
        }
        entries
    }
}
