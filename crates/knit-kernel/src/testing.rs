//! Re-enters a test in fresh namespaces, so that it can do to the network what it likes and the host never notices.
//!
//! ```no_run
//! # use knit_kernel::testing::in_namespaces;
//! #[test]
//! fn a_test() {
//!     in_namespaces(|| {
//!         // root in a user, mount and network namespace of its own, with `lo` up and an empty /run
//!     });
//! }
//! ```
//!
//! The test's process starts the same test binary once more with `--exact` and this test's name, in new namespaces,
//! and there the closure runs. Output and failure come back to the first process; if that one dies, so does the second.
//! Where the system does not allow it, the test prints that it is skipped and why, and passes.
#![allow(unsafe_code, reason = "fork, unshare and exec have no safe wrapper")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use crate::netns::NetNs;

/// Names the test that runs in namespaces, in the environment of the process that was started for it.
const GUARD: &str = "KNIT_TEST_IN_NAMESPACES";
/// What the guard says in a program that is no test.
const PROGRAM: &str = "(program)";
/// What an inner test prints when the set-up inside was refused; the outer one then reports a skip.
const SKIP_MARK: &str = "knit-test-skipped: ";
/// No test of ours takes this long; one that does hangs.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Runs `test` as root in a user, mount and network namespace of its own. See the module's words.
pub fn in_namespaces<F: FnOnce()>(test: F) {
    enter(test, true);
}

/// Runs `test` in a mount and network namespace of its own, as the real root of the machine. For what the kernel
/// allows only to that one (tap devices, eBPF, buffers beyond the limit). Skipped with a reason for anybody else.
pub fn privileged<F: FnOnce()>(test: F) {
    enter(test, false);
}

/// Polls until `condition` holds; fails the test, naming `what`, if it does not before `deadline` has passed.
#[track_caller]
pub fn eventually(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_micros(200);
    while !condition() {
        assert!(Instant::now() < end, "{what}: not within {deadline:?}");
        #[allow(
            clippy::disallowed_methods,
            reason = "this is the one place that waits for a condition by polling"
        )]
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Says that a test, or a part of it, is skipped, and why. To be followed by a return.
pub fn skip(why: impl std::fmt::Display) {
    println!("skipped: {why}");
}

/// A further network namespace with `lo` up; it is gone when the value is dropped.
#[track_caller]
pub fn namespace() -> NetNs {
    let ns = NetNs::unnamed().expect("a test may make network namespaces");
    ns.run(loopback_up).expect("a new namespace can be entered").expect("lo comes up");
    ns
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

fn enter<F: FnOnce()>(test: F, user_namespace: bool) {
    let name = test_name::<F>();
    if std::env::var(GUARD).is_ok_and(|inner| inner == name) {
        if let Err(why) = set_up_inside() {
            println!("{SKIP_MARK}{why}");
            return;
        }
        return test();
    }
    if !user_namespace && let Some(why) = not_real_root() {
        return skip(format_args!("{name}: {why}"));
    }
    match run_again(&name, user_namespace) {
        Ok((status, output)) => report(&name, status, &output),
        Err(Start::Forbidden(why)) => skip(format_args!("{name}: {why}")),
        Err(Start::Failed(error)) => panic!("cannot start {name} in namespaces: {error}"),
    }
}

/// The test's path as libtest knows it: the thread's name, or, on the main thread, what the closure's type is called.
fn test_name<F>() -> String {
    match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => {
            let path = std::any::type_name::<F>();
            let path = path.split_once("::").map_or(path, |(_, rest)| rest);
            path.split("::{{closure}}").next().unwrap_or(path).to_owned()
        }
    }
}

fn report(name: &str, status: ExitStatus, output: &str) {
    print!("{output}");
    if let Some((_, why)) = output.split_once(SKIP_MARK) {
        return skip(format_args!("{name}: {}", why.lines().next().unwrap_or_default()));
    }
    assert!(status.success(), "{name} failed in its namespaces ({status}); its output is above");
    // A name that matches nothing would pass without having run.
    assert!(output.contains("running 1 test"), "{name} did not run in its namespaces; its output is above");
}

enum Start {
    Forbidden(String),
    Failed(io::Error),
}

fn run_again(name: &str, user_namespace: bool) -> Result<(ExitStatus, String), Start> {
    // SAFETY: these two calls only read the process's credentials.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    match spawn(name, user_namespace.then_some((uid, gid))) {
        Err(error) if forbidden(&error) && user_namespace && uid == 0 => {
            // Root needs no user namespace; in a container that forbids them it may still have the other two.
            spawn(name, None).map_err(|_| Start::Forbidden(why_forbidden(&error)))
        }
        Err(error) if forbidden(&error) => Err(Start::Forbidden(why_forbidden(&error))),
        other => other.map_err(Start::Failed),
    }
}

fn forbidden(error: &io::Error) -> bool {
    let raw = error.raw_os_error();
    matches!(
        raw,
        Some(libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EUSERS | libc::EINVAL | libc::ENOSYS)
    )
}

/// Runs the rest of a program (a benchmark) in new user, mount and network namespaces, by starting it again with the
/// same arguments. Returns `None` inside: go on. Returns how the inner one ended outside: stop.
pub fn program_in_namespaces() -> io::Result<Option<ExitStatus>> {
    if std::env::var(GUARD).is_ok_and(|inner| inner == PROGRAM) {
        return set_up_inside().map(|()| None).map_err(io::Error::other);
    }
    // SAFETY: these two calls only read the process's credentials.
    let ids = unsafe { (libc::geteuid(), libc::getegid()) };
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).env(GUARD, PROGRAM);
    unshare_before_exec(&mut command, Some(ids));
    let status = command
        .status()
        .map_err(|error| if forbidden(&error) { io::Error::other(why_forbidden(&error)) } else { error })?;
    Ok(Some(status))
}

/// CPU time used so far: by this process with all its threads, and by its children that have ended.
pub fn cpu_time() -> (Duration, Duration) {
    let of = |who| {
        // SAFETY: rusage is plain data for which all zeroes is a valid value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to `usage`, which outlives the call.
        let result = unsafe { libc::getrusage(who, &raw mut usage) };
        assert_eq!(result, 0, "getrusage of self and children cannot fail");
        let time = |t: libc::timeval| {
            Duration::from_secs(t.tv_sec.unsigned_abs()) + Duration::from_micros(t.tv_usec.unsigned_abs())
        };
        time(usage.ru_utime) + time(usage.ru_stime)
    };
    (of(libc::RUSAGE_SELF), of(libc::RUSAGE_CHILDREN))
}

/// Starts the test in new namespaces, waits for it, and returns how it ended with all its output.
fn spawn(name: &str, map: Option<(u32, u32)>) -> io::Result<(ExitStatus, String)> {
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(GUARD, name);
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    unshare_before_exec(&mut command, map);
    let mut child = command.spawn()?;
    drop(command); // holds our copies of the pipe's writing end
    let group = child.id().cast_signed();
    let (output, timed_out) = read_until_exit(reader, &mut child)?;
    // SAFETY: kill(2) takes no pointers. The group is the child's own; leftovers of the test die with it. The child is
    // not yet waited for if it is still there, and else its group either has members or is gone.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let status = child.wait()?;
    assert!(
        !timed_out,
        "{name} hangs in its namespaces; it was killed after {TIMEOUT:?}. Its output:\n{output}"
    );
    Ok((status, output))
}

/// Makes a command start in new mount and network namespaces, and with `map` (our user and group) in a user namespace
/// in which these are root; and die with the thread that starts it.
fn unshare_before_exec(command: &mut Command, map: Option<(u32, u32)>) {
    let parent = std::process::id();
    let maps = map.map(|(uid, gid)| (format!("0 {uid} 1\n"), format!("0 {gid} 1\n")));
    // SAFETY: between fork and exec only system calls are made, on memory that was allocated before the fork.
    unsafe {
        command.pre_exec(move || {
            let user = if maps.is_some() { libc::CLONE_NEWUSER } else { 0 };
            if libc::unshare(user | libc::CLONE_NEWNS | libc::CLONE_NEWNET) < 0 {
                return Err(io::Error::last_os_error());
            }
            if let Some((uids, gids)) = &maps {
                // An ordinary user may map its group only after it gave up setgroups.
                write_file(c"/proc/self/setgroups", b"deny")?;
                write_file(c"/proc/self/uid_map", uids.as_bytes())?;
                write_file(c"/proc/self/gid_map", gids.as_bytes())?;
            }
            // After unshare, because a change of credentials forgets it.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                return Err(io::Error::last_os_error());
            }
            if libc::getppid() as u32 != parent {
                libc::_exit(1); // the parent died in the meantime
            }
            Ok(())
        });
    }
}

/// Reads all output. Ends when the pipe closes, or when the child is gone and nothing more comes (a grandchild may
/// hold the pipe), or after the time limit.
fn read_until_exit(mut pipe: io::PipeReader, child: &mut std::process::Child) -> io::Result<(String, bool)> {
    let end = Instant::now() + TIMEOUT;
    let mut output = Vec::new();
    let mut buffer = [0; 4096];
    let timed_out = loop {
        let tick = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let ready = match poll(&mut [PollFd::new(&pipe.as_fd(), PollFlags::IN)], Some(&tick)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if ready > 0 {
            match pipe.read(&mut buffer)? {
                0 => break false,
                got => output.extend_from_slice(&buffer[..got]),
            }
        } else if child.try_wait()?.is_some() {
            break false;
        }
        if Instant::now() > end {
            break true;
        }
    };
    Ok((String::from_utf8_lossy(&output).into_owned(), timed_out))
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

/// Private mounts, an empty /run, this namespace's own /sys, `lo` up.
fn set_up_inside() -> Result<(), String> {
    let failed = |what: &str, error: io::Error| {
        format!("{what} was refused in a new user namespace ({error}); {}", restrictions())
    };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|error| failed("making mounts private", error.into()))?;
    mount("tmpfs", "/run", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755")
        .map_err(|error| failed("mounting a tmpfs on /run", error.into()))?;
    // Containers mask parts of /sys, and then a fresh one is refused; few tests look there.
    let _ =
        mount("sysfs", "/sys", "sysfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None);
    loopback_up().map_err(|error| failed("bringing lo up", error))
}

/// Why this process is not the machine's own root, if it is not.
fn not_real_root() -> Option<String> {
    // SAFETY: this call only reads the process's credentials.
    if unsafe { libc::geteuid() } != 0 {
        return Some("it needs root, and this is an ordinary user".into());
    }
    let map = read("/proc/self/uid_map");
    let real = map.split_whitespace().eq(["0", "0", "4294967295"]);
    (!real).then(|| "it needs the machine's own root, and this is root in a user namespace".into())
}

fn why_forbidden(error: &io::Error) -> String {
    format!("new namespaces are forbidden here ({error}); {}", restrictions())
}

/// The known switches, as they stand.
fn restrictions() -> String {
    let closed = [
        ("user.max_user_namespaces", "0"),
        ("user.max_net_namespaces", "0"),
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ];
    let found: Vec<_> = closed
        .into_iter()
        .filter(|(name, bad)| read(&format!("/proc/sys/{}", name.replacen('.', "/", 1))).trim() == *bad)
        .map(|(name, bad)| format!("sysctl {name} is {bad}"))
        .collect();
    if found.is_empty() {
        "no sysctl says so, so perhaps a container's seccomp profile does (try --privileged)".into()
    } else {
        found.join(", ")
    }
}

fn read(path: &str) -> String {
    let mut text = String::new();
    // A file that is not there on this kernel says nothing, which is the answer.
    let _ = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    text
}
