//! A bed that is up: what tests and commands do with it. [`super::up`] makes one.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use knit_kernel::NetNs;
use serde::Deserialize as _;
use serde_json::Value;

use super::machine::control::{Control, Status, Stop};
use super::machine::{self, CONTROL_PLANE};
use super::paths::{Cache, State};
use super::wait::until;
use super::{Options, cgroups, node};

/// A cluster that runs.
#[derive(Debug)]
pub struct Bed {
    cache: Cache,
    state: State,
    options: Options,
}

/// How long the API server may take to come back.
const API_LIMIT: Duration = Duration::from_secs(60);

impl Bed {
    pub(super) fn new(cache: Cache, state: State, options: Options) -> Self {
        Self { cache, state, options }
    }

    /// The bed that is up on this machine.
    pub fn open() -> Result<Self> {
        let Some(holder) = machine::holder()? else {
            bail!("no bed is up; `cargo xtask kube up` makes one");
        };
        let state = State::at(holder.state);
        let text = fs::read(state.description())
            .with_context(|| format!("the bed in {} is not complete", state.path().display()))?;
        let options =
            serde_json::from_slice(&text).context("the bed was made by another version of this program")?;
        Ok(Self { cache: Cache::find()?, state, options })
    }

    /// Where its files are.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Where built programs and images are.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What it was made with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Its nodes' names: `n1`, `n2`.
    pub fn nodes(&self) -> Vec<String> {
        node::names(&self.options)
    }

    // --- the API ---

    /// Runs kubectl as administrator and returns what it printed; an error has its words.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with(args, None)
    }

    /// The same, as JSON.
    pub fn kubectl_json(&self, args: &[&str]) -> Result<Value> {
        let mut args = args.to_vec();
        args.extend(["-o", "json"]);
        Ok(serde_json::from_str(&self.kubectl(&args)?)?)
    }

    /// Applies manifests: YAML or JSON, one or several.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.kubectl_with(&["apply", "-f", "-"], Some(manifests))
    }

    /// The same with a standard input.
    pub fn kubectl_with(&self, args: &[&str], input: Option<&str>) -> Result<String> {
        text(&format!("kubectl {}", args.join(" ")), self.kubectl_output(args, input)?)
    }

    /// Runs kubectl, and returns however it ended.
    pub fn kubectl_output(&self, args: &[&str], input: Option<&str>) -> Result<Output> {
        let mut command = Command::new(self.state.program("kubectl"));
        command.args(args).env("KUBECONFIG", self.state.kubeconfig());
        self.in_control_plane(command, input)
    }

    /// Runs a command in the control plane's network (the API server is at 127.0.0.1:6443 there), with this
    /// machine's file system.
    pub fn in_control_plane(&self, mut command: Command, input: Option<&str>) -> Result<Output> {
        command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let run = || -> std::io::Result<Output> {
            let mut child = command.spawn()?;
            if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
                // One that does not read all of it says why by its exit code.
                if let Err(error) = pipe.write_all(input.as_bytes())
                    && error.kind() != std::io::ErrorKind::BrokenPipe
                {
                    return Err(error);
                }
            }
            child.wait_with_output()
        };
        // Children are born where the thread is.
        let output = self.control_plane_ns()?.run(run)?;
        output.with_context(|| format!("cannot run {}", "a command in the control plane"))
    }

    /// Whether the API server says that it is ready.
    pub fn api_is_ready(&self) -> Result<bool> {
        Ok(self.kubectl_output(&["get", "--raw", "/readyz", "--request-timeout=5s"], None)?.status.success())
    }

    /// Kills the API server, as a crash would.
    pub fn stop_api(&self) -> Result<()> {
        self.control_plane().stop("kube-apiserver", Stop::Kill)
    }

    /// Starts it again, and waits until it is ready.
    pub fn start_api(&self) -> Result<()> {
        self.control_plane().start_again("kube-apiserver")?;
        self.wait_for_api()
    }

    pub(super) fn wait_for_api(&self) -> Result<()> {
        let space = self.control_plane_ns()?;
        let address = (std::net::Ipv4Addr::LOCALHOST, super::net::API_PORT);
        until("the API server is ready", API_LIMIT, || {
            self.alive()?;
            // kubectl is not cheap; a connection is.
            let listens = space.run(|| std::net::TcpStream::connect(address).is_ok())?;
            Ok((listens && self.api_is_ready()?).then_some(()))
        })
    }

    // --- nodes ---

    /// Runs a command on a node (`n1`) and returns what it printed; an error has its words.
    pub fn node_exec(&self, node: &str, command: &[&str]) -> Result<String> {
        text(&format!("on {node}: {}", command.join(" ")), self.node_output(node, command)?)
    }

    /// Runs a command on a node, and returns however it ended.
    pub fn node_output(&self, node: &str, command: &[&str]) -> Result<Output> {
        let process = self.process(node)?.to_string();
        let mut enter = Command::new("/proc/self/exe");
        enter
            .args(["kube", "machine-enter", "--process", &process, "--path"])
            .arg(self.state.bin())
            .arg("--");
        enter.args(command).stdin(Stdio::null());
        enter.output().with_context(|| format!("cannot enter node {node}"))
    }

    /// A path of a node, for reading and writing from here. The node must be up.
    pub fn node_path(&self, node: &str, path: &str) -> Result<PathBuf> {
        Ok(Path::new("/proc")
            .join(self.process(node)?.to_string())
            .join("root")
            .join(path.trim_start_matches('/')))
    }

    /// A node's network namespace.
    pub fn node_ns(&self, node: &str) -> Result<NetNs> {
        Ok(NetNs::of_process(self.process(node)?)?)
    }

    /// The control plane's network namespace.
    pub fn control_plane_ns(&self) -> Result<NetNs> {
        Ok(NetNs::of_process(self.process(CONTROL_PLANE)?)?)
    }

    /// The pod ranges of a node, as the controller manager gave them.
    pub fn pod_ranges(&self, node: &str) -> Result<Vec<IpNet>> {
        let node = self.kubectl_json(&["get", "node", node])?;
        Ok(Vec::deserialize(&node["spec"]["podCIDRs"])?)
    }

    /// Loads an image file on all nodes.
    pub fn load_image(&self, file: &Path) -> Result<()> {
        let nodes = self.nodes();
        let load = |node: &String| self.import(node, file);
        std::thread::scope(|scope| {
            let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(move || load(node))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(loaded) => loaded,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Loads an image file on one node.
    pub(super) fn import(&self, node: &str, file: &Path) -> Result<()> {
        let file = std::path::absolute(file)?;
        ensure!(file.is_file(), "there is no image file {}", file.display());
        // A node has its own /etc, /opt, /run and some more; the file is handed over where both see it.
        let handed = self.state.machine(node).join("image.tar");
        if fs::hard_link(&file, &handed).is_err() {
            fs::copy(&file, &handed).with_context(|| format!("cannot copy {}", file.display()))?;
        }
        let handed_text = handed.display().to_string();
        let command = node::ctr(&self.state, &["images", "import", "--no-unpack=false", &handed_text]);
        let command: Vec<_> = command.iter().map(String::as_str).collect();
        let loaded = self.node_exec(node, &command);
        fs::remove_file(&handed)?;
        loaded.map(drop).with_context(|| format!("cannot load {} on {node}", file.display()))
    }

    /// Stops a node's kubelet and starts it again.
    pub fn restart_kubelet(&self, node: &str) -> Result<()> {
        self.restart(node, "kubelet")
    }

    /// Stops a node's containerd and starts it again; containers go on.
    pub fn restart_containerd(&self, node: &str) -> Result<()> {
        self.restart(node, "containerd")?;
        self.wait_for_containerd(node)
    }

    fn restart(&self, node: &str, daemon: &str) -> Result<()> {
        let control = self.machine(node);
        control.stop(daemon, Stop::Terminate)?;
        control.start_again(daemon)
    }

    pub fn wait_for_containerd(&self, node: &str) -> Result<()> {
        // Its socket is there before it serves, so it is asked.
        let command = node::ctr(&self.state, &["version"]);
        let command: Vec<_> = command.iter().map(String::as_str).collect();
        let socket = self.state.machine(node).join("run/containerd/containerd.sock");
        until(&format!("containerd of {node}"), Duration::from_secs(60), || {
            self.alive()?;
            Ok((socket.exists() && self.node_output(node, &command)?.status.success()).then_some(()))
        })
    }

    /// Waits until all nodes are Ready.
    pub fn wait_for_nodes(&self, limit: Duration) -> Result<()> {
        let limit = format!("--timeout={}s", limit.as_secs());
        self.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", &limit]).map(drop)
    }

    // --- machines ---

    /// The control plane's init: for starting and stopping its daemons by name.
    pub fn control_plane(&self) -> Control {
        self.machine(CONTROL_PLANE)
    }

    /// A node's init.
    pub fn machine(&self, name: &str) -> Control {
        Control::of(self.state.machine(name))
    }

    /// The init's process of a machine.
    pub fn process(&self, machine: &str) -> Result<u32> {
        let known = machine == CONTROL_PLANE || self.nodes().iter().any(|node| node == machine);
        ensure!(known, "there is no node {machine}; there are {}", self.nodes().join(", "));
        self.machine(machine).process().with_context(|| format!("{machine} is not up"))
    }

    /// How all daemons are, by machine.
    pub fn daemons(&self) -> Result<Vec<(String, Status)>> {
        let mut all = Vec::new();
        for machine in [CONTROL_PLANE.to_owned()].into_iter().chain(self.nodes()) {
            if self.machine(&machine).process().is_some() {
                all.extend(
                    self.machine(&machine).list()?.into_iter().map(|status| (machine.clone(), status)),
                );
            }
        }
        Ok(all)
    }

    /// Fails when a daemon has ended that nobody stopped, with the last words of its log.
    pub fn alive(&self) -> Result<()> {
        for (machine, status) in self.daemons()? {
            if let (Some(how), false) = (&status.ended, status.stopped) {
                bail!(
                    "{} of {machine} has ended ({how}). The end of its log:\n{}",
                    status.name,
                    tail(&status.log)
                );
            }
        }
        Ok(())
    }

    /// Keeps the logs in a folder that outlives the bed.
    pub fn keep_logs(&self, label: &str) -> Result<PathBuf> {
        let to = self.cache.failed().join(label);
        if to.exists() {
            fs::remove_dir_all(&to)?;
        }
        copy(&self.state.logs(), &to).with_context(|| format!("cannot keep logs in {}", to.display()))?;
        for node in self.nodes() {
            // The logs of containers are in the node's own /var/log.
            let pods = self.state.machine(&node).join("overlay/var/log/upper/pods");
            if pods.is_dir() {
                copy(&pods, &to.join(format!("{node}-pods")))?;
            }
        }
        Ok(to)
    }

    /// Ends the bed, and removes everything of it.
    pub fn down(self) -> Result<()> {
        down()
    }
}

/// Ends the bed that is up, if one is, and removes what any left behind.
pub fn down() -> Result<()> {
    use rustix::process::{Pid, Signal, kill_process};
    let holder = machine::holder()?;
    if let Some(holder) = &holder {
        let keeper = Pid::from_raw(holder.keeper.cast_signed()).context("a process has a number")?;
        match kill_process(keeper, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error).context("cannot end the bed: is it another user's?"),
        }
        until("the end of the bed", Duration::from_secs(30), || {
            Ok(machine::holder()?.is_none().then_some(()))
        })?;
    }
    // All of its processes are gone when their groups can be removed.
    cgroups::remove_all()?;
    let state = match holder {
        Some(holder) => State::at(holder.state),
        None => State::find(&Cache::find()?)?,
    };
    match fs::remove_dir_all(state.path()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", state.path().display()))
        }
        _ => Ok(()),
    }
}

/// What a command printed, if it ended well.
fn text(what: &str, output: Output) -> Result<String> {
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what} ({}): {}", output.status, words.trim_end());
    String::from_utf8(output.stdout).with_context(|| format!("{what} printed no text"))
}

/// The last lines of a log.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else if entry.file_type()?.is_file() {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
