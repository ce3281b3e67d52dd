//! The bed's control groups: one tree, in every hierarchy of this machine (version 1, or the one of version
//! 2).
//!
//! Pods of node n1 are below `knit-kube/n1`; the node's own daemons have groups beside it, so that nothing
//! that the kubelet does to its pods' groups touches itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::wait::until;

/// The top of the bed's groups.
pub const TOP: &str = "knit-kube";

const ROOT: &str = "/sys/fs/cgroup";

/// The hierarchies that are mounted. A second name for one (`cpu,cpuacct`) counts once.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let root = Path::new(ROOT);
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.into()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root).with_context(|| format!("no control groups are mounted at {ROOT}"))? {
        let path = entry?.path();
        if !path.is_symlink() && path.join("cgroup.procs").exists() {
            found.push(path);
        }
    }
    Ok(found)
}

/// Makes a group (a path such as `knit-kube/n1`) in every hierarchy.
pub fn make(group: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let mut path = hierarchy.clone();
        for part in group.split('/') {
            let parent = path.clone();
            path.push(part);
            let made = || -> io::Result<()> {
                if !path.exists() {
                    fs::create_dir(&path)?;
                    inherit(&parent, &path)?;
                }
                Ok(())
            };
            made().with_context(|| format!("cannot create the control group {}", path.display()))?;
        }
    }
    Ok(())
}

/// What a new group does not get by itself: version 1's sets of CPUs and memory nodes, version 2's
/// controllers.
fn inherit(parent: &Path, child: &Path) -> io::Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if child.join(file).exists() && !parent.join("cgroup.controllers").exists() {
            fs::write(child.join(file), fs::read(parent.join(file))?)?;
        }
    }
    if let Ok(controllers) = fs::read_to_string(parent.join("cgroup.controllers")) {
        let all: Vec<_> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
        if !all.is_empty() {
            fs::write(parent.join("cgroup.subtree_control"), all.join(" "))?;
        }
    }
    Ok(())
}

/// Moves a process into a group that exists. The process is named as this process sees it.
pub fn join(group: &str, process: u32) -> Result<()> {
    for hierarchy in hierarchies()? {
        let file = hierarchy.join(group).join("cgroup.procs");
        fs::write(&file, process.to_string())
            .with_context(|| format!("cannot move process {process} into {}", file.display()))?;
    }
    Ok(())
}

/// Removes all groups of the bed. The last of their processes may still be on their way out.
pub fn remove_all() -> Result<()> {
    for hierarchy in hierarchies()? {
        let top = hierarchy.join(TOP);
        until(&format!("removing {}", top.display()), Duration::from_secs(15), || match remove(&top) {
            Ok(()) => Ok(Some(())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(())),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot remove {}", top.display())),
        })?;
    }
    Ok(())
}

fn remove(group: &Path) -> io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}
