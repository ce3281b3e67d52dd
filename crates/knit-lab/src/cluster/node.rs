//! A node: a namespace on the wire with the real node agent in it, which lives and dies as a process of its
//! own.

use std::fs::{File, OpenOptions};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use knit_kernel::netns::NetNs;
use knit_kernel::sandbox::loopback_up;
use knit_types::sync::Locked;
use rustix::mount::{UnmountFlags, unmount};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::error::{Error, Result};
use super::wire::{self, Wire};

/// How long an agent that ended by itself is left alone before it is started again.
const RESTART: Duration = Duration::from_millis(200);

/// How long an agent that is asked to end may take for that.
const GRACE: Duration = Duration::from_secs(10);

/// What is to become of an agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wanted {
    Running,
    /// Ended with SIGKILL, as a crash would: pods must not notice.
    Killed,
    /// Asked to end, as for an upgrade.
    Ended,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// The node's name.
    pub name: String,
    /// Its number on the wire, from 0.
    pub index: u16,
    dir: PathBuf,
    state: Mutex<State>,
    /// The program that its agent is, where it is not the lab's own.
    program: Mutex<Option<PathBuf>>,
    wanted: watch::Sender<Wanted>,
    agent_pid: watch::Sender<Option<u32>>,
}

#[derive(Debug, Default)]
struct State {
    namespace: Option<Arc<NetNs>>,
    link_cut: bool,
}

/// How the agent is started.
#[derive(Clone, Debug)]
pub(crate) struct AgentCommand {
    pub(crate) program: PathBuf,
    pub(crate) api: String,
    pub(crate) log: String,
}

impl Node {
    pub(crate) fn new(index: u16, lab: &Path) -> Self {
        let name = format!("node-{}", index + 1);
        let dir = lab.join(&name);
        Self {
            name,
            index,
            dir,
            state: Mutex::default(),
            program: Mutex::default(),
            wanted: watch::Sender::new(Wanted::Killed),
            agent_pid: watch::Sender::new(None),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Its addresses on the wire.
    pub fn addresses(&self) -> Vec<IpAddr> {
        wire::addresses(self.index).iter().map(ipnet::IpNet::addr).collect()
    }

    /// Its namespace; none while the node is lost.
    pub fn namespace(&self) -> Option<Arc<NetNs>> {
        self.state().namespace.clone()
    }

    /// Whether it is there and on the wire.
    pub fn is_joined(&self) -> bool {
        let state = self.state();
        state.namespace.is_some() && !state.link_cut
    }

    /// The process of its agent, while there is one.
    pub fn agent_pid(&self) -> Option<u32> {
        *self.agent_pid.borrow()
    }

    /// The program that its agent runs, as the kernel names it.
    pub fn agent_program(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/{}/exe", self.agent_pid()?)).ok()
    }

    /// Has its agent be this program from its next start on.
    pub(crate) fn set_program(&self, program: PathBuf) {
        *self.program.locked() = Some(program);
    }

    /// The agent's run-time directory.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("knit")
    }

    /// Where the namespaces of its pods are.
    pub fn pod_namespaces(&self) -> PathBuf {
        self.dir.join("netns")
    }

    /// The agent's log.
    pub fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    /// Makes the namespace and plugs it in. Blocks.
    pub(crate) fn boot(&self, wire: &Wire) -> Result<()> {
        for dir in [self.run_dir(), self.pod_namespaces(), self.dir.join("state")] {
            let what = || format!("cannot create directory {}", dir.display());
            std::fs::create_dir_all(&dir).map_err(Error::io(what()))?;
        }
        let what = || format!("the namespace of {}", self.name);
        let namespace = NetNs::unnamed().map_err(Error::kernel(what()))?;
        let up = namespace.run(loopback_up).map_err(Error::kernel(what()))?;
        up.map_err(Error::io(format!("cannot bring up lo of {}", self.name)))?;
        wire.plug(&self.name, self.index, &namespace)?;
        *self.state() = State { namespace: Some(Arc::new(namespace)), link_cut: false };
        Ok(())
    }

    /// The power is cut: from here on nothing is started on it.
    pub(crate) fn cut(&self) {
        self.state().namespace = None;
    }

    /// Takes away its link, its namespaces, and what a reboot empties. Its agent and pods must have ended.
    /// Blocks.
    pub(crate) fn lose(&self, wire: &Wire) -> Result<()> {
        wire.unplug(&self.name, self.index)?;
        for dir in [self.run_dir().join("netns"), self.pod_namespaces()] {
            let what = || format!("the namespaces in {}", dir.display());
            for (name, _) in NetNs::list(&dir).map_err(Error::kernel(what()))? {
                NetNs::delete(dir.join(name)).map_err(Error::kernel(what()))?;
            }
            // The agent makes the directory of its routers a mount of its own; with none on top this is
            // refused.
            while unmount(&dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
        }
        for dir in [self.run_dir(), self.pod_namespaces()] {
            match std::fs::remove_dir_all(&dir) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("cannot empty {}", dir.display()))(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes its link down, or brings it up again.
    pub(crate) fn set_link(&self, wire: &Wire, up: bool) -> Result<()> {
        if self.namespace().is_none() {
            return Ok(());
        }
        wire.set(&self.name, self.index, up)?;
        self.state().link_cut = !up;
        Ok(())
    }

    /// Keeps the agent running until it is stopped; runs as long as the lab.
    pub(crate) async fn supervise(self: Arc<Self>, command: AgentCommand) {
        let mut wanted = self.wanted.subscribe();
        loop {
            if wanted.wait_for(|wanted| *wanted == Wanted::Running).await.is_err() {
                return;
            }
            let Some(namespace) = self.namespace() else {
                let _ = wanted.changed().await;
                continue;
            };
            match self.spawn_agent(&namespace, &command) {
                Ok(mut child) => {
                    drop(namespace);
                    self.agent_pid.send_replace(child.id());
                    let how = tokio::select! {
                        _ = child.wait() => None,
                        how = wanted.wait_for(|wanted| *wanted != Wanted::Running) => how.ok().map(|how|
                            *how),
                    };
                    if let Some(how) = how {
                        end(&mut child, how).await;
                    }
                    self.agent_pid.send_replace(None);
                    if how.is_some() {
                        continue;
                    }
                }
                Err(error) => tracing::warn!(node = self.name, %error, "the agent did not start"),
            }
            tokio::time::sleep(RESTART).await;
        }
    }

    /// Starts the agent, or ends it and waits for that.
    pub(crate) async fn set_agent(&self, wanted: Wanted) {
        let mut pid = self.agent_pid.subscribe();
        self.wanted.send_replace(wanted);
        if wanted != Wanted::Running {
            let _ = pid.wait_for(Option::is_none).await;
        }
    }

    fn spawn_agent(&self, namespace: &NetNs, how: &AgentCommand) -> Result<Child> {
        let addresses: Vec<String> = self.addresses().iter().map(IpAddr::to_string).collect();
        let other = self.program.locked().clone();
        let mut command = Command::new(other.as_ref().unwrap_or(&how.program));
        command
            .arg("node")
            .args(["--node-name", &self.name, "--node-ip", &addresses.join(","), "--api-url", &how.api])
            .arg("--run-dir")
            .arg(self.run_dir())
            .arg("--state-dir")
            .arg(self.dir.join("state"))
            .arg("--netns-dirs")
            .arg(self.pod_namespaces())
            .args(["--log", &how.log])
            .stdin(Stdio::null())
            .stdout(append(&self.log())?)
            .stderr(append(&self.log())?)
            .process_group(0)
            .kill_on_drop(true);
        spawn_in(namespace, command, &format!("the agent of {}", self.name))
    }
}

/// Ends an agent, and waits for that.
async fn end(child: &mut Child, how: Wanted) {
    let pid = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
    if how == Wanted::Ended
        && let Some(pid) = pid
        && rustix::process::kill_process(pid, rustix::process::Signal::TERM).is_ok()
        && tokio::time::timeout(GRACE, child.wait()).await.is_ok()
    {
        return;
    }
    let _ = child.kill().await;
}

/// A file to add lines to.
pub(crate) fn append(path: &Path) -> Result<File> {
    let what = || format!("cannot write log {}", path.display());
    OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(what()))
}

/// Starts a process in a network namespace: a child has the namespace of the thread that made it.
pub(crate) fn spawn_in(namespace: &NetNs, mut command: Command, what: &str) -> Result<Child> {
    let runtime = tokio::runtime::Handle::current();
    let spawned = namespace.run(move || {
        let _runtime = runtime.enter();
        command.spawn()
    });
    spawned.map_err(Error::kernel(what))?.map_err(Error::io(format!("cannot start {what}")))
}
