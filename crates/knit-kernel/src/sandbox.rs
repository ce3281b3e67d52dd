//! A program in namespaces of its own: what `knit lab` and the tests run in, with no root and nothing left
//! behind.
//!
//! A process cannot give itself all of this (a new pid namespace is only for its children), so a program
//! starts itself again: [`Sandbox::enter`] does that twice and tells each of the three processes which one it
//! is. The innermost is the init of its pid namespace: when it ends, however it ends, the kernel ends
//! everything it ever started, and mounts, links and namespaces go with them. If an outer one dies, the inner
//! ones die at once.
#![allow(unsafe_code, reason = "unshare and prctl between fork and exec have no safe wrapper")]

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

/// Says to a process that was started again which one it is.
const STAGE: &str = "KNIT_SANDBOX_STAGE";

/// Which of the processes this is.
#[derive(Debug)]
pub enum Sandbox {
    /// The first one, still outside: it waits for its child, and exits as that one did.
    Outside(Child),
    /// The one between: it has entered the namespaces, except the pid namespace, which its child is the init
    /// of.
    Between(Child),
    /// The innermost: root in its own user, mount, network and pid namespaces, with `lo` up and an empty
    /// `/run`.
    Inside,
}

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The system forbids it.
    #[error("new namespaces are forbidden here: {advice}")]
    Forbidden {
        /// Which switch says so, and what to do.
        advice: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// It failed for another reason.
    #[error("the program cannot be started again in its own namespaces")]
    Start(#[source] io::Error),
    /// Something inside was refused.
    #[error("{what} was refused inside the new namespaces: {advice}")]
    Inside {
        /// What was attempted.
        what: &'static str,
        /// Which switch may say so.
        advice: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

// === impl Sandbox ===

impl Sandbox {
    /// Whether this process is one that was started again.
    pub fn is_again() -> bool {
        std::env::var_os(STAGE).is_some()
    }

    /// Starts the program again with the same arguments, in namespaces of its own. Must be called on the main
    /// thread, before there are others: the child dies with the thread that started it. `before_run` is
    /// called in the innermost process while `/run` is still the machine's own.
    pub fn enter<T>(before_run: impl FnOnce() -> T) -> Result<(Self, Option<T>), SandboxError> {
        match std::env::var(STAGE).as_deref() {
            Ok("2") => {
                let early = before_run();
                set_up()?;
                Ok((Self::Inside, Some(early)))
            }
            Ok(_) => {
                let mut command = again("2");
                die_with_parent(&mut command);
                command.spawn().map(|child| (Self::Between(child), None)).map_err(SandboxError::Start)
            }
            Err(_) => {
                let child = spawn_outside().map(|child| (Self::Outside(child), None));
                child.map_err(|source| {
                    if forbidden(&source) {
                        SandboxError::Forbidden { advice: restrictions(), source }
                    } else {
                        SandboxError::Start(source)
                    }
                })
            }
        }
    }
}

fn again(stage: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).env(STAGE, stage);
    command
}

fn spawn_outside() -> io::Result<Child> {
    let ids = ids();
    let start = |map| {
        let mut command = again("1");
        unshare_before_exec(&mut command, map, true);
        command.spawn()
    };
    match start(Some(ids)) {
        // Root needs no user namespace; in a container that forbids them it may still have the others.
        Err(error) if forbidden(&error) && ids.0 == 0 => start(None).map_err(|_| error),
        other => other,
    }
}

/// The effective user and group.
pub(crate) fn ids() -> (u32, u32) {
    // SAFETY: these two calls only read the process's credentials.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Moves the calling process into mount, UTS and IPC namespaces of its own, and its future children into a
/// pid namespace, whose init the first of them is. Mounts are private from then on. For a program of one
/// thread: the kernel refuses others.
pub fn leave_machine() -> io::Result<()> {
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWPID;
    // SAFETY: unshare(2) takes no pointers, and these flags change none of the state that the standard
    // library relies on.
    if unsafe { libc::unshare(spaces) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Makes a command die when the thread that started it ends.
pub fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(move || stay_with(parent));
    }
}

fn stay_with(parent: u32) -> io::Result<()> {
    // SAFETY: prctl with these arguments, getppid and _exit take no pointers.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
            return Err(io::Error::last_os_error());
        }
        // In a new pid namespace the parent has the number 0, and is the one that has just forked.
        let now = libc::getppid() as u32;
        if now != parent && now != 0 {
            libc::_exit(1); // the parent died in the meantime
        }
    }
    Ok(())
}

/// Makes a command start in new mount and network namespaces (with `pids` also in a new pid namespace, which
/// its children will be in), and with `map` (our user and group) in a user namespace in which these are root;
/// and die with the thread that starts it.
pub(crate) fn unshare_before_exec(command: &mut Command, map: Option<(u32, u32)>, pids: bool) {
    let parent = std::process::id();
    let maps = map.map(|(uid, gid)| (format!("0 {uid} 1\n"), format!("0 {gid} 1\n")));
    // SAFETY: between fork and exec only system calls are made, on memory that was allocated before the fork.
    unsafe {
        command.pre_exec(move || {
            let user = if maps.is_some() { libc::CLONE_NEWUSER } else { 0 };
            let pid = if pids { libc::CLONE_NEWPID } else { 0 };
            if libc::unshare(user | pid | libc::CLONE_NEWNS | libc::CLONE_NEWNET) < 0 {
                return Err(io::Error::last_os_error());
            }
            if let Some((uids, gids)) = &maps {
                // An ordinary user may map its group only after it gave up setgroups.
                write_file(c"/proc/self/setgroups", b"deny")?;
                write_file(c"/proc/self/uid_map", uids.as_bytes())?;
                write_file(c"/proc/self/gid_map", gids.as_bytes())?;
            }
            // After unshare, because a change of credentials forgets it.
            stay_with(parent)
        });
    }
}

/// Writes a small file with nothing but system calls.
fn write_file(path: &std::ffi::CStr, content: &[u8]) -> io::Result<()> {
    // SAFETY: the path is NUL-terminated; pointer and length describe `content`; the descriptor is ours.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let written = libc::write(fd, content.as_ptr().cast(), content.len());
        let error = io::Error::last_os_error();
        libc::close(fd);
        if written < 0 { Err(error) } else { Ok(()) }
    }
}

/// Private mounts, an empty /run, these namespaces' own /proc and /sys, `lo` up.
pub(crate) fn set_up() -> Result<(), SandboxError> {
    let failed = |what, source: io::Error| SandboxError::Inside { what, advice: restrictions(), source };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|error| failed("making mounts private", error.into()))?;
    mount("tmpfs", "/run", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755")
        .map_err(|error| failed("mounting a tmpfs on /run", error.into()))?;
    // Containers mask parts of /proc and /sys, and then fresh ones are refused. The old ones do as well: only
    // what a process reads about itself is used.
    let plain = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let _ = mount("sysfs", "/sys", "sysfs", plain, None);
    if std::process::id() == 1 {
        let _ = mount("proc", "/proc", "proc", plain, None);
    }
    loopback_up().map_err(|error| failed("bringing lo up", error))
}

/// Brings `lo` up in the calling thread's network namespace.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: socket(2) takes no pointers.
    let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just returned by the kernel and nothing else owns it.
    let socket: std::os::fd::OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(raw) };
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: SIOCSIFFLAGS reads an ifreq, which outlives the call.
    if unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

pub(crate) fn forbidden(error: &io::Error) -> bool {
    let raw = error.raw_os_error();
    matches!(
        raw,
        Some(libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EUSERS | libc::EINVAL | libc::ENOSYS)
    )
}

/// The known switches, as they stand, and what to do about them.
pub(crate) fn restrictions() -> String {
    let closed = [
        ("user.max_user_namespaces", "0", "10000"),
        ("user.max_net_namespaces", "0", "10000"),
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ];
    let found: Vec<_> = closed
        .into_iter()
        .filter(|(name, bad, _)| read(&format!("/proc/sys/{}", name.replacen('.', "/", 1))).trim() == *bad)
        .map(|(name, bad, good)| format!("sysctl {name} is {bad} (sysctl -w {name}={good} opens it)"))
        .collect();
    if found.is_empty() {
        "no sysctl says so, so perhaps a container's seccomp profile does (try --privileged), or run as root"
            .into()
    } else {
        found.join(", ") + ", or run as root"
    }
}

fn read(path: &str) -> String {
    let mut text = String::new();
    // A file that is not there on this kernel says nothing, which is the answer.
    let _ = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    text
}
