//! The first process of a machine: it makes the machine's mounts, then starts, stops and reaps what it is
//! told to.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use knit_kernel::NetNs;
use knit_kernel::sandbox::loopback_up;
use knit_types::sync::Locked;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, wait, waitid};

use super::control::{Control, Daemon, Reply, Request, Status, Stop};
use super::{Kind, mounts};
use crate::kube::cgroups;
use crate::kube::paths::State;

/// How long a daemon may take to end before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// What runs, or ran.
#[derive(Debug)]
struct Entry {
    daemon: Daemon,
    process: Pid,
    ended: Option<String>,
    stopped: bool,
}

#[derive(Debug, Default)]
struct Init {
    entries: Mutex<Vec<Entry>>,
    /// Something was started, or has ended.
    changed: Condvar,
}

/// Runs the init of machine `name`; returns only on an error.
pub fn run(state: &State, name: &str, kind: Kind) -> Result<()> {
    ensure!(std::process::id() == 1, "this is for the first process of a pid namespace");
    // /proc is still the real machine's, so this is our number there.
    let number = fs::read_link("/proc/self").context("cannot read /proc/self")?;
    let space = NetNs::unnamed()?;
    space.enter()?;
    loopback_up().context("cannot bring lo up")?;
    fs::write("/proc/sys/kernel/hostname", name).context("cannot set the host name")?;
    let folder = state.machine(name);
    if kind == Kind::Node {
        mounts::make(&folder)?;
    }
    let socket = Control::socket(&folder);
    let listener =
        UnixListener::bind(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    let partial = folder.join("pid.partial");
    fs::write(&partial, number.as_os_str().as_encoded_bytes())?;
    fs::rename(&partial, folder.join("pid"))?;

    let init = Init::default();
    std::thread::scope(|scope| {
        scope.spawn(|| init.reap());
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => {
                    let init = &init;
                    scope.spawn(move || init.serve(&stream));
                }
                Err(error) => eprintln!("a caller was lost: {error}"),
            }
        }
    });
    bail!("the control socket is closed")
}

impl Init {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.locked()
    }

    fn serve(&self, mut stream: &UnixStream) {
        let mut line = String::new();
        if let Err(error) = BufReader::new(stream).read_line(&mut line) {
            return eprintln!("a request could not be read: {error}");
        }
        let answer = serde_json::from_str(&line).context("the request is not understood");
        let reply = match answer.and_then(|request| self.answer(request)) {
            Ok(list) => Reply::Done(list),
            Err(error) => Reply::Failed(format!("{error:#}")),
        };
        let sent =
            serde_json::to_string(&reply).map_err(Into::into).and_then(|text| writeln!(stream, "{text}"));
        if let Err(error) = sent {
            eprintln!("a reply could not be sent: {error}");
        }
    }

    fn answer(&self, request: Request) -> Result<Vec<Status>> {
        match request {
            Request::Start(daemon) => self.start(daemon)?,
            Request::Again(name) => {
                let known =
                    self.lock().iter().find(|entry| entry.daemon.name == name).map(|e| e.daemon.clone());
                self.start(known.with_context(|| format!("{name} was never started"))?)?;
            }
            Request::Stop { name, how } => self.stop(&name, how)?,
            Request::List => {}
        }
        let status = |entry: &Entry| Status {
            name: entry.daemon.name.clone(),
            ended: entry.ended.clone(),
            stopped: entry.stopped,
            log: entry.daemon.log.clone(),
        };
        Ok(self.lock().iter().map(status).collect())
    }

    fn start(&self, daemon: Daemon) -> Result<()> {
        // Held until the process is known: else it could end unseen.
        let mut entries = self.lock();
        let before = entries.iter().position(|entry| entry.daemon.name == daemon.name);
        if let Some(before) = before {
            ensure!(entries[before].ended.is_some(), "{} runs already", daemon.name);
        }
        let process = spawn(&daemon)?;
        let entry = Entry { daemon, process, ended: None, stopped: false };
        match before {
            Some(before) => entries[before] = entry,
            None => entries.push(entry),
        }
        self.changed.notify_all();
        Ok(())
    }

    fn stop(&self, name: &str, how: Stop) -> Result<()> {
        let mut entries = self.lock();
        let entry = entries.iter_mut().find(|entry| entry.daemon.name == name);
        let entry = entry.with_context(|| format!("{name} was never started"))?;
        if entry.ended.is_some() {
            return Ok(());
        }
        entry.stopped = true;
        let process = entry.process;
        let signal = if how == Stop::Kill { Signal::KILL } else { Signal::TERM };
        kill_process(process, signal).with_context(|| format!("cannot stop {name}"))?;
        let runs =
            |entries: &mut Vec<Entry>| entries.iter().any(|e| e.process == process && e.ended.is_none());
        let (entries, late) = self
            .changed
            .wait_timeout_while(entries, STOP_TIMEOUT, runs)
            .unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            kill_process(process, Signal::KILL).with_context(|| format!("cannot kill {name}"))?;
            drop(self.changed.wait_while(entries, runs));
        }
        Ok(())
    }

    /// Takes note of what has ended: daemons, and orphans that nobody else waits for.
    fn reap(&self) {
        loop {
            // Only looks: with the lock held, nothing is being started that waits for its own child.
            let looked = waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            let mut entries = self.lock();
            if looked.is_err() {
                // No children: there will be none before something is started.
                let nothing = |entries: &mut Vec<Entry>| entries.iter().all(|entry| entry.ended.is_some());
                drop(self.changed.wait_while(entries, nothing));
                continue;
            }
            while let Ok(Some((process, status))) = wait(WaitOptions::NOHANG) {
                let how = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => format!("exit code {code}"),
                    (_, Some(signal)) => format!("signal {signal}"),
                    _ => "unknown".into(),
                };
                if let Some(entry) = entries.iter_mut().find(|e| e.process == process && e.ended.is_none()) {
                    entry.ended = Some(how);
                }
            }
            self.changed.notify_all();
        }
    }
}

fn spawn(daemon: &Daemon) -> Result<Pid> {
    let open = || -> Result<(File, File)> {
        if let Some(folder) = daemon.log.parent() {
            fs::create_dir_all(folder)?;
        }
        let log = File::options().append(true).create(true).open(&daemon.log)?;
        Ok((log.try_clone()?, log))
    };
    let (out, err) = open().with_context(|| format!("cannot write the log {}", daemon.log.display()))?;
    let mut command = Command::new(&daemon.program);
    command.args(&daemon.args).env("PATH", search_path(&daemon.path)).env("HOME", "/root").current_dir("/");
    command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
    let child = command.spawn().with_context(|| format!("cannot start {}", daemon.program.display()))?;
    if let Some(group) = &daemon.group {
        cgroups::join(group, child.id())?;
    }
    Pid::from_raw(child.id().cast_signed()).context("a child has a number")
}

/// The bed's programs, then the system's.
pub fn search_path(first: &Path) -> String {
    format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", first.display())
}
