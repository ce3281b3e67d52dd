//! What the guest starts with: busybox, the kernel's modules for networks, the test programs with their
//! libraries, and a script that runs one after the other.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::Program;
use super::cpio::Archive;
use super::kernel::Kernel;

/// What the guest prints before the name of a program that has ended, and its exit code.
const ENDED: &str = "@@ended";
/// Tests compare with what this prints.
const NFT: &str = "/usr/sbin/nft";
const BUSYBOX: &str = "/bin/busybox";

/// Modules that are loaded before any test: the kernel would load most of them itself, but not for those who
/// are root only in a namespace.
const LOADED: &str = "/lib/modules/*/kernel/net/netfilter/*.ko \
                      /lib/modules/*/kernel/net/ipv[46]/netfilter/*.ko \
    /lib/modules/*/kernel/net/bridge/*.ko /lib/modules/*/kernel/net/bridge/netfilter/*.ko";
const LOADED_BY_NAME: &str = "veth dummy vxlan macvlan ipvlan vrf tun bonding 8021q ifb wireguard";

/// Which modules the guest has: those below these folders.
const MODULES: [&str; 6] = [
    "kernel/net",
    "kernel/drivers/net",
    "kernel/lib",
    "kernel/crypto",
    "kernel/arch/x86/crypto",
    "kernel/arch/x86/lib",
];
/// And of these not, which are large and for hardware.
const NO_MODULES: [&str; 4] = ["ethernet", "wireless", "wwan", "usb"];

/// Writes the file system; its size.
pub fn write(to: &Path, scratch: &Path, kernel: &Kernel, programs: &[Program], only: &str) -> Result<u64> {
    let mut archive = Archive::create(to)?;
    for folder in ["/proc", "/sys", "/dev", "/tmp", "/run", "/etc", "/root", "/var/lib"] {
        archive.folder(folder)?;
    }
    archive.character_device("/dev/console", (5, 1))?;
    ensure!(
        Path::new(BUSYBOX).exists(),
        "there is no {BUSYBOX}, which must be static (apt install busybox-static)"
    );
    archive.copy(Path::new(BUSYBOX), Path::new(BUSYBOX))?;
    archive.link("/sbin/modprobe", BUSYBOX)?;
    archive.file(Path::new("/etc/passwd"), 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    // nft prints numbers where it finds no names.
    for names in ["/etc/protocols", "/etc/services"].map(Path::new) {
        if names.exists() {
            archive.copy(names, names)?;
        }
    }
    let modules = Path::new("/lib/modules").join(&kernel.version);
    let wanted = |path: &Path| !NO_MODULES.iter().any(|name| path.ends_with(name));
    for folder in MODULES.map(Path::new) {
        let from = kernel.modules.join(folder);
        if from.is_dir() {
            archive.copy_all(&from, &modules.join(folder), &wanted)?;
        }
    }
    for list in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
        if kernel.modules.join(list).is_file() {
            archive.copy(&kernel.modules.join(list), &modules.join(list))?;
        }
    }
    if Path::new(NFT).exists() {
        archive.copy(Path::new(NFT), Path::new(NFT))?;
        libraries(&mut archive, Path::new(NFT))?;
    }
    for (number, program) in programs.iter().enumerate() {
        let small = scratch.join("program");
        let stripped = Command::new("strip").arg("-o").arg(&small).arg(&program.file).status();
        ensure!(
            stripped.context("cannot run strip")?.success(),
            "{} cannot be stripped",
            program.file.display()
        );
        archive.copy(&small, Path::new(&format!("/tests/{number}")))?;
        libraries(&mut archive, &program.file)?;
    }
    // Snapshots and cases are read from where they were when the tests were built.
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates").canonicalize()?;
    archive.copy_all(&crates, &crates, &|path| !path.ends_with("target"))?;
    archive.file(
        Path::new("/init"),
        0o755,
        script(programs, only, crates.parent().context("a folder")?).as_bytes(),
    )?;
    archive.finish()
}

/// The shared libraries of a program, where the loader looks for them.
fn libraries<W: std::io::Write>(archive: &mut Archive<W>, program: &Path) -> Result<()> {
    crate::image::libraries(program)?.iter().try_for_each(|path| archive.copy(path, path))
}

/// What the first process does.
fn script(programs: &[Program], only: &str, root: &Path) -> String {
    let root = root.display();
    let mut script = format!(
        "#!{BUSYBOX} sh
export PATH=/sbin:/usr/sbin:/bin HOME=/root TMPDIR=/tmp
{BUSYBOX} --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t cgroup2 cgroup /sys/fs/cgroup
depmod
for module in {LOADED}; do name=${{module##*/}}; modprobe ${{name%.ko}} 2>/dev/null; done
modprobe -a {LOADED_BY_NAME} 2>/dev/null
ip link set lo up
uname -r
export KNIT_TEST_STRICT=all RUST_BACKTRACE=0 INSTA_UPDATE=no INSTA_WORKSPACE_ROOT='{root}'
"
    );
    for (number, program) in programs.iter().enumerate() {
        let (name, folder) = (&program.name, program.folder.display());
        script += &format!(
            "echo; echo '== {name}'; cd '{folder}' && /tests/{number} --test-threads=2 '{only}'; echo \
             \"{ENDED} $? {name}\"\n"
        );
    }
    script + "poweroff -f\n"
}

/// Which program ended with which code, if that is what this line says.
pub fn ended(line: &str) -> Option<(String, i32)> {
    let (code, name) = line.strip_prefix(ENDED)?.trim_start().split_once(' ')?;
    Some((name.to_owned(), code.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_program_is_told() {
        assert_eq!(ended("@@ended 101 knit-kernel links"), Some(("knit-kernel links".into(), 101)));
        assert_eq!(ended("test result: ok"), None);
    }
}
