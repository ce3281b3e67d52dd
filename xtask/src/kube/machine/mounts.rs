//! What a node sees of the file system: this machine's programs, and places of its own wherever something is
//! written.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    unmount,
};

use crate::kube::paths::OVERLAID;

/// Folders of the node that are its own alone.
const OWN: [(&str, &str); 3] =
    [("run", "/run"), ("kubelet", "/var/lib/kubelet"), ("containerd", "/var/lib/containerd")];

/// Where a node must not see what this machine has.
const EMPTY: [&str; 5] = ["/etc/cni/net.d", "/opt/cni/bin", "/etc/cdi", "/etc/nri", "/opt/nri"];

/// What the kubelet insists on writing, with the values that it writes. They belong to the whole machine's
/// kernel, so the node has files of its own in their places.
const SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Makes the mounts of a node out of its folder. In a mount namespace that is private already.
pub fn make(folder: &Path) -> Result<()> {
    let plain = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", plain, None).context("cannot mount /proc")?;
    system(folder, plain).context("cannot mount /sys")?;
    for path in OVERLAID {
        let own = folder.join("overlay").join(path.trim_start_matches('/'));
        overlay(Path::new(path), &own).with_context(|| {
            format!("cannot mount an overlay on {path}: the state must be on a file system that can hold one")
        })?;
    }
    for path in EMPTY {
        let emptied = if Path::new(path).exists() { fs::remove_dir_all(path) } else { Ok(()) };
        emptied.and_then(|()| fs::create_dir_all(path)).with_context(|| format!("cannot empty {path}"))?;
    }
    for (name, path) in OWN {
        let own = folder.join(name);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(path)?;
        mount_bind(&own, path).with_context(|| format!("cannot mount {path}"))?;
    }
    for name in ["netns", "lock"] {
        fs::create_dir_all(Path::new("/run").join(name))?;
    }
    // What the kubelet and the runtime mount must be seen in containers; of other nodes it is apart.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .context("cannot share mounts")?;
    let sysctls = folder.join("sysctl");
    fs::create_dir_all(&sysctls)?;
    for (name, value) in SYSCTLS {
        let own = sysctls.join(name.replace('/', "."));
        fs::write(&own, format!("{value}\n"))?;
        let real = Path::new("/proc/sys").join(name);
        if real.exists() {
            mount_bind(&own, &real).with_context(|| format!("cannot cover {}", real.display()))?;
        }
    }
    Ok(())
}

/// A fresh sysfs shows the links of this network namespace; the control groups are those of the machine.
fn system(folder: &Path, plain: MountFlags) -> Result<()> {
    let aside = folder.join("cgroup");
    fs::create_dir_all(&aside)?;
    mount_bind_recursive("/sys/fs/cgroup", &aside)?;
    mount("sysfs", "/sys", "sysfs", plain, None)?;
    mount_bind_recursive(&aside, "/sys/fs/cgroup")?;
    unmount(&aside, UnmountFlags::DETACH)?;
    // Only needed by pods that pin eBPF maps; some kernels have none.
    if let Err(error) = mount("bpf", "/sys/fs/bpf", "bpf", plain, None) {
        eprintln!("no eBPF file system on this node: {error}");
    }
    Ok(())
}

fn overlay(path: &Path, own: &Path) -> Result<()> {
    let (upper, work) = (own.join("upper"), own.join("work"));
    fs::create_dir_all(&upper)?;
    fs::create_dir_all(&work)?;
    fs::create_dir_all(path)?;
    // Volatile: what is written need not reach the disk, and ending the bed does not wait for it.
    let options = format!(
        "lowerdir={},upperdir={},workdir={},volatile",
        path.display(),
        upper.display(),
        work.display()
    );
    let options = std::ffi::CString::new(options)?;
    Ok(mount("overlay", path, "overlay", MountFlags::empty(), options.as_c_str())?)
}
