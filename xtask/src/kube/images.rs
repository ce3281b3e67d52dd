//! The images that the bed's nodes have from the start: no registry is asked for any.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use super::build;
use super::paths::Cache;
use crate::oci::{Entry, Image};

/// What the kubelet and containerd name as the sandbox.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
/// The test image of Kubernetes.
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.66.1";
/// The cluster DNS.
pub const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.15.0";
/// Where busybox is on this machine.
pub const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-2";

/// Makes what is missing, and returns the files of all images that every node gets.
pub fn make(cache: &Cache) -> Result<Vec<PathBuf>> {
    let busybox = busybox();
    let shell = |mut entries: Vec<Entry>| -> Result<Vec<Entry>> {
        if let Some(path) = &busybox {
            entries.extend(busybox_entries(path)?);
        }
        Ok(entries)
    };
    let pause = Image {
        entrypoint: vec!["/pause".into()],
        entries: vec![Entry::File { path: "/pause".into(), from: build::program(cache, "pause")? }],
        ..Image::default()
    };
    let agnhost = Image {
        entrypoint: vec!["/agnhost".into()],
        cmd: vec!["pause".into()],
        env: env(),
        entries: shell(base("/agnhost", build::program(cache, "agnhost")?))?,
        ..Image::default()
    };
    let coredns = Image {
        entrypoint: vec!["/coredns".into()],
        entries: base("/coredns", build::program(cache, "coredns")?),
        ..Image::default()
    };
    let mut images = vec![(PAUSE, pause), (AGNHOST, agnhost), (COREDNS, coredns)];
    if busybox.is_some() {
        let entries = shell(users())?;
        images.push((BUSYBOX, Image { cmd: vec!["sh".into()], env: env(), entries, ..Image::default() }));
    }
    images.into_iter().map(|(name, image)| write(cache, name, &image)).collect()
}

/// Writes an image to the cache, unless the same is there.
pub(super) fn write(cache: &Cache, name: &str, image: &Image) -> Result<PathBuf> {
    let folder = cache.images();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let short = name.rsplit('/').next().unwrap_or(name).replace(':', "-");
    let file = folder.join(format!("{short}-{}.tar", key(name, image)?));
    if !file.is_file() {
        image.write(&file, &[name])?;
    }
    Ok(file)
}

/// What an image follows from. Programs of the cache have paths that name their content; others are known by
/// their size and date.
fn key(name: &str, image: &Image) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{name} {image:?}"));
    for entry in &image.entries {
        if let Entry::File { from, .. } = entry {
            let stat = fs::metadata(from).with_context(|| format!("{} is not built", from.display()))?;
            hash.update(format!("{} {:?}", stat.len(), stat.modified()?));
        }
    }
    Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

pub(super) fn env() -> Vec<String> {
    vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()]
}

pub(super) fn base(path: &str, from: PathBuf) -> Vec<Entry> {
    let mut entries = users();
    entries.push(Entry::File { path: path.into(), from });
    entries
}

fn users() -> Vec<Entry> {
    let text = |path: &str, content: &str| Entry::Text { path: path.into(), content: content.into() };
    vec![
        Entry::Folder { path: "/etc".into(), mode: 0o755 },
        text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
        text("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        text("/etc/nsswitch.conf", "hosts: files dns\n"),
        Entry::Folder { path: "/root".into(), mode: 0o700 },
        Entry::Folder { path: "/tmp".into(), mode: 0o1777 },
    ]
}

/// A static busybox, where this machine has one.
fn busybox() -> Option<PathBuf> {
    ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from).into_iter().find(|path| is_static(path))
}

fn is_static(path: &Path) -> bool {
    fs::read(path).is_ok_and(|content| names_loader(&content) == Some(false))
}

/// Whether a 64-bit little-endian ELF program names a loader, as dynamic ones do; `None` for anything else.
fn names_loader(content: &[u8]) -> Option<bool> {
    const INTERPRETER: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(content.get(at..at + 2)?.try_into().ok()?));
    if !content.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let headers = usize::try_from(u64::from_le_bytes(content.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    for number in 0..count {
        let at = headers.checked_add(number * size)?;
        if u32::from_le_bytes(content.get(at..at.checked_add(4)?)?.try_into().ok()?) == INTERPRETER {
            return Some(true);
        }
    }
    Some(false)
}

/// The program, and a link for each of its names.
fn busybox_entries(path: &Path) -> Result<Vec<Entry>> {
    let listed = Command::new(path).arg("--list").output().context("cannot run busybox")?;
    let names = String::from_utf8(listed.stdout).context("busybox --list printed no text")?;
    let mut entries = vec![
        Entry::Folder { path: "/bin".into(), mode: 0o755 },
        Entry::File { path: "/bin/busybox".into(), from: path.into() },
    ];
    let link = |name: &str| Entry::Link { path: format!("/bin/{name}"), target: "/bin/busybox".into() };
    entries.extend(names.lines().filter(|name| *name != "busybox").map(link));
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_loader_is_told_from_one_without() {
        // This test is a program that names one; a file of text is no program.
        let this = fs::read("/proc/self/exe").unwrap();
        assert_eq!(names_loader(&this), Some(cfg!(not(target_feature = "crt-static"))));
        assert_eq!(names_loader(b"#!/bin/sh"), None);
        assert_eq!(names_loader(&this[..40]), None);
    }
}
