//! A kernel and its modules, out of Debian packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

/// What is looked for where nobody names packages: small, with all that the tests need, and old.
const PACKAGE: &str = "linux-image-6.1.0-";
const FLAVOUR: &str = "-cloud-amd64";

/// A kernel that can be started.
#[derive(Debug)]
pub struct Kernel {
    /// `6.1.0-54-cloud-amd64`.
    pub version: String,
    /// The kernel itself.
    pub image: PathBuf,
    /// `lib/modules/VERSION`.
    pub modules: PathBuf,
}

impl Kernel {
    /// The newest of Debian's 6.1 kernels that apt can fetch. It is kept.
    pub fn of_apt() -> Result<Self> {
        let list = Command::new("apt-cache").args(["pkgnames", PACKAGE]).output();
        let list = list.context("cannot run apt-cache: name a kernel's packages with --deb")?;
        let names = String::from_utf8(list.stdout).context("apt-cache printed no text")?;
        let Some((number, name)) = newest(&names) else {
            bail!(
                "apt knows no {PACKAGE}*{FLAVOUR}, which Debian 12 has: fetch one from \
                 https://deb.debian.org/debian/pool/main/l/linux-signed-amd64/ and name it with --deb"
            );
        };
        let folder = cache()?.join(format!("debian-6.1.0-{number}"));
        if !folder.is_dir() {
            let partial = folder.with_extension("partial");
            clear(&partial)?;
            let status = Command::new("apt-get").args(["download", name]).current_dir(&partial).status();
            ensure!(status.context("cannot run apt-get")?.success(), "apt-get could not download {name}");
            fs::rename(&partial, &folder)?;
        }
        let files = fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        Self::of_debs(&files)
    }

    /// The kernel that is in these packages together: some distributions ship modules apart.
    pub fn of_debs(files: &[PathBuf]) -> Result<Self> {
        let names: Vec<_> = files.iter().filter_map(|file| file.file_stem()?.to_str()).collect();
        let folder = cache()?.join(names.join("+"));
        if !folder.is_dir() {
            let partial = folder.with_extension("partial");
            clear(&partial)?;
            for file in files {
                let status = Command::new("dpkg-deb").arg("-x").arg(file).arg(&partial).status();
                let unpacked = status.context("cannot run dpkg-deb")?.success();
                ensure!(unpacked, "{} could not be unpacked", file.display());
            }
            fs::rename(&partial, &folder)?;
        }
        let found = |place: &str, prefix: &str| -> Result<PathBuf> {
            let place = folder.join(place);
            let entries = fs::read_dir(&place)
                .with_context(|| format!("these packages have no {}", place.display()))?;
            let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            paths
                .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
                .with_context(|| format!("these packages have no {prefix}* in {}", place.display()))
        };
        let image = found("boot", "vmlinuz-")?;
        let modules = found("lib/modules", "").or_else(|_| found("usr/lib/modules", ""))?;
        let version = modules.file_name().unwrap_or_default().display().to_string();
        Ok(Self { version, image, modules })
    }
}

/// The package with the highest number, and that number.
fn newest(names: &str) -> Option<(u32, &str)> {
    let number = |name: &str| name.strip_prefix(PACKAGE)?.strip_suffix(FLAVOUR)?.parse::<u32>().ok();
    names.lines().filter_map(|name| Some((number(name)?, name))).max()
}

fn clear(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn cache() -> Result<PathBuf> {
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Ok(xdg.or(home).context("HOME is not set")?.join("knit/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_package_is_taken() {
        let names = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-54-cloud-amd64\n\
                     linux-image-6.1.0-54-cloud-amd64-dbg\nlinux-image-6.1.0-60-rt-amd64\n";
        assert_eq!(newest(names), Some((54, "linux-image-6.1.0-54-cloud-amd64")));
        assert_eq!(newest("linux-image-6.12.0-1-cloud-amd64\n"), None);
    }
}
