//! A machine of the bed: the control plane or a node, in namespaces of its own.
//!
//! A pid namespace is only for a process's children, so a machine has two processes of ours: a keeper, and
//! its child, the [`mod@init`] of the pid namespace. When either ends, however it ends, the kernel ends
//! everything that ran in there, and mounts, links and namespaces go with it. Nodes are children of the
//! control plane, so one kill ends the bed.

pub mod control;
pub mod init;
mod mounts;
mod relay;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use knit_kernel::NetNs;
use knit_kernel::sandbox::{die_with_parent, leave_machine};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, pidfd_open, setsid};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use serde::{Deserialize, Serialize};

use super::cgroups;
use super::paths::State;
use super::wait::until;

/// The control plane's name as a machine.
pub const CONTROL_PLANE: &str = "control-plane";

/// Held by the outermost keeper while a bed is up; says where it is. One bed at a time: ports, addresses and
/// control groups have fixed names.
const LOCK: &str = "/run/knit-kube.lock";

/// Which kind of machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    ControlPlane,
    Node,
}

/// Arguments of the processes that the bed starts for itself.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The state's folder
    #[arg(long)]
    state: PathBuf,
    /// The machine's name
    #[arg(long)]
    name: String,
    /// Its kind
    #[arg(long)]
    kind: Kind,
}

/// Where the bed that is up is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub keeper: u32,
    pub state: PathBuf,
}

/// How to start a machine's keeper, as arguments of this program.
pub fn keeper_arguments(state: &State, name: &str, kind: Kind) -> Vec<String> {
    arguments("machine-keeper", state, name, kind)
}

fn arguments(command: &str, state: &State, name: &str, kind: Kind) -> Vec<String> {
    let kind = if kind == Kind::Node { "node" } else { "control-plane" };
    let state = state.path().display().to_string();
    ["kube", command, "--state", &state, "--name", name, "--kind", kind].map(Into::into).to_vec()
}

/// The keeper: takes itself and its child off this machine, and waits for the child.
pub fn keep(args: &Args) -> Result<()> {
    let state = State::at(args.state.clone());
    let outermost = args.kind == Kind::ControlPlane;
    let lock = if outermost { Some(take_lock(&state)?) } else { None };
    let group = format!("{}/system/{}", cgroups::TOP, args.name);
    cgroups::make(&group)?;
    cgroups::join(&group, std::process::id())?;
    if outermost {
        // A process of its own, and before there is a new pid namespace: it stays outside, and needs threads.
        again("machine-relay", &state, args).spawn().context("cannot start the relay")?;
    }
    leave_machine().context("cannot create namespaces")?;
    let mut init = again("machine-init", &state, args).spawn().context("cannot start the init")?;
    let status = init.wait()?;
    drop(lock);
    bail!("the init of {} ended ({status})", args.name)
}

/// This program again, for as long as this process lives.
fn again(command: &str, state: &State, args: &Args) -> Command {
    let mut again = Command::new("/proc/self/exe");
    again.args(arguments(command, state, &args.name, args.kind)).stdin(Stdio::null());
    die_with_parent(&mut again);
    again
}

/// The init, in a child of the keeper.
pub fn init(args: &Args) -> Result<()> {
    init::run(&State::at(args.state.clone()), &args.name, args.kind)
}

/// The relay of the API server's port, in another.
pub fn relay(args: &Args) -> Result<()> {
    let control = control::Control::of(args.state.join(&args.name));
    let limit = std::time::Duration::from_secs(30);
    let process = until("the control plane's init", limit, || Ok(control.process()))?;
    relay::run(&NetNs::of_process(process)?)
}

fn take_lock(state: &State) -> Result<File> {
    setsid().context("cannot leave the session")?;
    let mut file = open_lock()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).context("another bed is up")?;
    let holder = Holder { keeper: std::process::id(), state: state.path().into() };
    file.set_len(0)?;
    file.write_all(&serde_json::to_vec(&holder)?)?;
    Ok(file)
}

fn open_lock() -> Result<File> {
    let opened = File::options().read(true).write(true).create(true).truncate(false).open(LOCK);
    opened.with_context(|| format!("cannot open {LOCK}"))
}

/// Who holds the bed that is up, if one is.
pub fn holder() -> Result<Option<Holder>> {
    let file = open_lock()?;
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return Ok(None);
    }
    // Written right after the lock was taken.
    until("the bed's lock", std::time::Duration::from_secs(5), || {
        Ok(fs::read(LOCK).ok().and_then(|text| serde_json::from_slice(&text).ok()))
    })
    .map(Some)
}

/// Runs a command inside a machine, and ends as it does. For a program of one thread.
pub fn enter(process: u32, path: &std::path::Path, command: &[String]) -> Result<std::convert::Infallible> {
    let pid = Pid::from_raw(process.cast_signed()).context("a process has a number")?;
    let pid = pidfd_open(pid, PidfdFlags::empty()).context("the machine is gone")?;
    let all = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::NETWORK;
    use std::os::fd::AsFd as _;
    move_into_thread_name_spaces(pid.as_fd(), all).context("cannot enter the machine")?;
    let [program, arguments @ ..] = command else { bail!("name a command") };
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/").env("PATH", init::search_path(path));
    die_with_parent(&mut command);
    let status = command.status().with_context(|| format!("cannot run {program} in the machine"))?;
    use std::os::unix::process::ExitStatusExt as _;
    std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}
