//! Re-enters a test in fresh namespaces, so that it can do to the network what it likes and the host never
//! notices.
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
//! The test's process starts the same test binary again with `--exact` and this test's name, in new
//! namespaces, and there the closure runs. Output and failure come back to the first process; if that one
//! dies, so does the second. Where the system does not allow it, the test prints that it is skipped and why,
//! and passes; unless
//! `KNIT_TEST_STRICT` says that this machine has all that tests need: then a skip is a failure. See [`skip`].
#![allow(unsafe_code, reason = "fork, unshare and exec have no safe wrapper")]

use std::io::{self, Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use knit_nft::{
    Chain, Data, Element, ElementValue, Nftables as _, Rule, SetState, TableId, TableState, Transaction,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::netns::NetNs;
use crate::nft::Kernel;
pub use crate::sandbox::loopback_up;
use crate::sandbox::{self, forbidden, restrictions, unshare_before_exec};

/// Names the test that runs in namespaces, in the environment of the process that was started for it.
const GUARD: &str = "KNIT_TEST_IN_NAMESPACES";
/// Says in that process whether the user namespace is its own, too: root may go on without one.
const OWN_USER_NAMESPACE: &str = "KNIT_TEST_OWN_USER_NAMESPACE";
/// What the guard says in a program that is no test.
const PROGRAM: &str = "(program)";
/// What an inner test prints when the set-up inside was refused; the outer one then reports a skip.
const SKIP_MARK: &str = "knit-test-skipped: ";
/// `1`: a skip fails the test, unless this kernel lacks something. `all`: then, too.
const STRICT: &str = "KNIT_TEST_STRICT";
/// Names a file that gets a line for each skip, because a test that passes shows none of its output.
const SKIPS: &str = "KNIT_TEST_SKIPS";
/// No test of ours takes this long; one that does hangs.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `test` as root in a user, mount and network namespace of its own. See the module's words.
pub fn in_namespaces<F: FnOnce()>(test: F) {
    enter(test, true);
}

/// Whether the test that runs is in a user namespace of its own. Where user namespaces are forbidden,
/// [`in_namespaces`] goes on without one as root: what belongs to the user namespace (`/proc/sys/user`) is
/// then the machine's, and not to be changed.
pub fn has_own_user_namespace() -> bool {
    std::env::var(OWN_USER_NAMESPACE).is_ok_and(|value| value == "1")
}

/// Runs `test` in a mount and network namespace of its own, as the real root of the machine. For what the
/// kernel allows only to that one (tap devices, eBPF, buffers beyond the limit). Skipped with a reason for
/// anybody else.
pub fn privileged<F: FnOnce()>(test: F) {
    enter(test, false);
}

/// Polls until `condition` holds; fails the test, naming `what`, if it does not before `deadline` has passed.
#[track_caller]
pub fn eventually(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    find_eventually(what, deadline, || if condition() { Ok(()) } else { Err("it does not hold") });
}

/// Polls until `look` succeeds, and returns what it found; fails the test, naming `what`, with what it said
/// last if it does not before `deadline` has passed.
#[track_caller]
pub fn find_eventually<T, E: std::fmt::Debug>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Result<T, E>,
) -> T {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_micros(200);
    loop {
        match look() {
            Ok(found) => return found,
            Err(last) => assert!(Instant::now() < end, "{what}: not within {deadline:?}: {last:?}"),
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "this is the one place that waits for a condition by polling"
        )]
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Says that a test, or a part of it, is skipped for want of a program, a file or a privilege, and why. To be
/// followed by a return. Fails the test where `KNIT_TEST_STRICT` is `1` or `all`.
///
/// Where `KNIT_TEST_SKIPS` names a file, it is said there, too: a test that passes shows none of its output.
#[track_caller]
pub fn skip(why: impl std::fmt::Display) {
    skip_unless(&["1", "all"], &why.to_string());
}

/// The same where the kernel lacks something, which nobody can install: fails the test only where
/// `KNIT_TEST_STRICT` is
/// `all`, as `cargo xtask kernel-test` sets it for kernels that have everything.
#[track_caller]
pub fn skip_for_kernel(lacks: impl std::fmt::Display) {
    skip_unless(&["all"], &format!("this kernel has no {lacks}"));
}

#[track_caller]
fn skip_unless(strict: &[&str], why: &str) {
    let value = std::env::var(STRICT).unwrap_or_default();
    let known = ["", "0", "1", "all"].contains(&value.as_str());
    assert!(known, "{STRICT} is {value:?}; it can be 0, 1 or all");
    assert!(!strict.contains(&value.as_str()), "{STRICT} is {value}, and this would be skipped: {why}");
    println!("skipped: {why}");
    if let Some(file) = std::env::var_os(SKIPS) {
        let line = format!("{}: {why}\n", std::thread::current().name().unwrap_or("a test"));
        let written = std::fs::OpenOptions::new().create(true).append(true).open(&file);
        let written = written.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("cannot write to {}: {error}", file.display()));
    }
}

/// A further network namespace with `lo` up; it is gone when the value is dropped.
#[track_caller]
pub fn namespace() -> NetNs {
    let ns = NetNs::unnamed().expect("a test may make network namespaces");
    ns.run(loopback_up).expect("a new namespace can be entered").expect("lo comes up");
    ns
}

/// Runs `work` as another program would: what it changes by sockets that it opens counts as a stranger's
/// change for whoever watches ([`crate::watch`]).
pub fn as_stranger<T>(work: impl FnOnce() -> T) -> T {
    crate::netlink::as_stranger(work)
}

fn enter<F: FnOnce()>(test: F, user_namespace: bool) {
    let name = test_name::<F>();
    if std::env::var(GUARD).is_ok_and(|inner| inner == name) {
        if let Err(error) = sandbox::set_up() {
            let why = words(&error);
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

/// The test's path as libtest knows it: the thread's name, or, on the main thread, what the closure's type is
/// called.
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
    let (uid, gid) = sandbox::ids();
    match spawn(name, user_namespace.then_some((uid, gid))) {
        Err(error) if forbidden(&error) && user_namespace && uid == 0 => {
            // Root needs no user namespace; in a container that forbids them it may still have the other two.
            spawn(name, None).map_err(|_| Start::Forbidden(why_forbidden(&error)))
        }
        Err(error) if forbidden(&error) => Err(Start::Forbidden(why_forbidden(&error))),
        other => other.map_err(Start::Failed),
    }
}

/// Runs the rest of a program (a benchmark) in new user, mount and network namespaces, by starting it again
/// with the same arguments. Returns `None` inside: go on. Returns how the inner one ended outside: stop.
pub fn program_in_namespaces() -> io::Result<Option<ExitStatus>> {
    if std::env::var(GUARD).is_ok_and(|inner| inner == PROGRAM) {
        return sandbox::set_up().map(|()| None).map_err(io::Error::other);
    }
    let ids = sandbox::ids();
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).env(GUARD, PROGRAM);
    unshare_before_exec(&mut command, Some(ids), false);
    let status = command
        .status()
        .map_err(|error| if forbidden(&error) { io::Error::other(why_forbidden(&error)) } else { error })?;
    Ok(Some(status))
}

/// CPU time that another process has used so far, with all its threads, those that have ended included. To
/// the nanosecond, where `/proc` counts in ticks.
pub fn cpu_time_of(pid: u32) -> io::Result<Duration> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the pointer is to `clock`, which outlives the call.
    let result = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to `time`, which outlives the call.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_nanos(time.tv_nsec.unsigned_abs()))
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
    // One that is ignored runs here only if somebody asked for it outside.
    command.args(["--exact", name, "--include-ignored", "--nocapture", "--test-threads=1"]).env(GUARD, name);
    command.env(OWN_USER_NAMESPACE, if map.is_some() { "1" } else { "0" });
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    unshare_before_exec(&mut command, map, false);
    let mut child = command.spawn()?;
    drop(command); // holds our copies of the pipe's writing end
    let group = child.id().cast_signed();
    let (output, timed_out) = read_until_exit(reader, &mut child)?;
    // SAFETY: kill(2) takes no pointers. The group is the child's own; leftovers of the test die with it. The
    // child is not yet waited for if it is still there, and else its group either has members or is gone.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let status = child.wait()?;
    assert!(
        !timed_out,
        "{name} hangs in its namespaces; it was killed after {TIMEOUT:?}. Its output:\n{output}"
    );
    Ok((status, output))
}

/// Reads all output. Ends when the pipe closes, or when the child is gone and nothing more comes (a
/// grandchild may hold the pipe), or after the time limit.
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

fn words(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error} ({source})"))
}

fn why_forbidden(error: &io::Error) -> String {
    format!("new namespaces are forbidden here ({error}); {}", restrictions())
}

fn read(path: &str) -> String {
    // A file that is not there on this kernel says nothing, which is the answer.
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Another element for the same key.
fn elsewhere(element: &Element) -> Element {
    let ElementValue::Data(value) = &element.value else { panic!("{element:?} has no value") };
    let mut bytes = value.as_slice().to_vec();
    bytes[0] ^= 1;
    Element { value: ElementValue::Data(Data::from_slice(&bytes)), ..element.clone() }
}

/// The first set of a table whose name begins like this and that has something in it.
fn filled<'a>(state: &'a TableState, name: &str) -> &'a SetState {
    let mut sets = state.sets.values().filter(|set| !set.elements.is_empty());
    sets.find(|set| set.set.name.starts_with(name)).unwrap_or_else(|| panic!("elements in {name} of {state}"))
}

/// What others may do to a table: `map` is how a set of it with values begins, `chain` a chain of it with
/// rules.
///
/// # Panics
/// If the table has no such things.
#[must_use]
pub fn table_damages(
    space: &NetNs,
    id: &TableId,
    map: &str,
    chain: &str,
) -> Vec<(&'static str, Transaction)> {
    let state = Kernel::open_in(space).expect("nftables").table(id).expect("read").expect("a table");
    let SetState { set, elements } = filled(&state, map);
    let element = elements.values().next().expect("an element");
    let change = |what: &dyn Fn(&mut Transaction)| {
        let mut tx = Transaction::new();
        what(&mut tx);
        tx
    };
    vec![
        ("an element is deleted", change(&|tx| _ = tx.delete_elements(id, set, vec![element.clone()]))),
        ("an element leads elsewhere", {
            change(&|tx| {
                tx.delete_elements(id, set, vec![element.clone()]);
                tx.create_elements(id, set, vec![elsewhere(element)]);
            })
        }),
        ("a chain is flushed", change(&|tx| _ = tx.flush_chain(id, chain))),
        ("a rule is added", change(&|tx| _ = tx.insert_rule(id, chain, Rule::new().accept()))),
        ("a chain is added", change(&|tx| _ = tx.add_chain(id, Chain::regular("strange")))),
        ("the table is deleted", change(&|tx| _ = tx.delete_table(id))),
    ]
}
