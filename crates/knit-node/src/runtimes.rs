//! The network runtimes of this node: those inside the agent, and those found by their sockets in one
//! directory.

mod features;

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use knit_api::{NodeRuntime, conditions};
use knit_runtime::wire::RemoteRuntime;
use knit_runtime::{Info, NetworkStatus, Runtime, feature};

use crate::error::{Error, Reason, Result};
use crate::networks::compute::Unready;
use crate::pipeline::resolve::Wanted;
use features::{Announced, has};
use knit_types::NetworkName;
use knit_types::sync::{Locked, ReadWrite};
use tokio::sync::watch;
use tokio::time::Instant;

/// All runtimes that this agent can use, by the names that NetworkClasses use.
#[derive(Default)]
pub struct Runtimes {
    known: RwLock<BTreeMap<String, KnownRuntime>>,
    /// Sockets that are not used, and why: said once each.
    refused: Mutex<BTreeMap<PathBuf, String>>,
    /// When a call of a runtime last took too long, if none has been in time since.
    silent: Mutex<BTreeMap<String, Instant>>,
    /// Counts how often all of them were asked how they are.
    asked: watch::Sender<u64>,
}

#[derive(Clone)]
struct KnownRuntime {
    runtime: Arc<dyn Runtime>,
    info: Info,
    /// Where it listens; none for one inside the agent.
    socket: Option<PathBuf>,
    /// What is wrong with it, if something is.
    problem: Option<String>,
    /// How often something came to be wrong with it.
    absences: u64,
    /// The Networks that it said it has when it was asked last, each with what is wrong with it there.
    networks: BTreeMap<NetworkName, Option<String>>,
}

/// How long a runtime may take to say who it is.
const INFO_TIMEOUT: Duration = Duration::from_secs(2);

// === impl Runtimes ===

impl Runtimes {
    /// Adds a runtime inside the agent.
    ///
    /// # Errors
    /// When it does not say who it is.
    pub async fn add(&self, runtime: Arc<dyn Runtime>) -> knit_runtime::Result<()> {
        let info = runtime.info().await?;
        let runtime: Arc<dyn Runtime> = Arc::new(Announced::new(runtime, info.clone()));
        let name = info.name.clone();
        let entry = KnownRuntime {
            runtime,
            info,
            socket: None,
            problem: None,
            absences: 0,
            networks: BTreeMap::new(),
        };
        self.write().insert(name, entry);
        Ok(())
    }

    /// Whether the runtime of this name has announced a feature.
    #[must_use]
    pub fn has(&self, name: &str, feature: &str) -> bool {
        self.read().get(name).is_some_and(|known| has(&known.info, feature))
    }

    /// Whether a runtime can give an interface what its pod asks for.
    ///
    /// # Errors
    /// When it has not announced something that the pod asks for.
    pub(crate) fn can_have(&self, wanted: &Wanted) -> Result<()> {
        let asked = [
            (feature::HOST_PORTS, !wanted.ports.is_empty(), "ports of the node"),
            (feature::STATIC_ADDRESS, !wanted.addresses.is_empty(), "a specific address"),
            (feature::STATIC_MAC, wanted.mac.is_some(), "a specific MAC"),
        ];
        // A runtime that is away is said to be away, by who asks it.
        let Some(info) = self.read().get(&wanted.runtime).map(|known| known.info.clone()) else {
            return Ok(());
        };
        match asked.into_iter().find(|(feature, asked, _)| *asked && !has(&info, feature)) {
            None => Ok(()),
            Some((feature, _, what)) => Err(Error::new(
                Reason::Refused,
                format!(
                    "interface {} requests {what}, but network runtime {} of Network {} has not announced \
                     {feature}: leave it out",
                    wanted.interface, wanted.runtime, wanted.network
                ),
            )),
        }
    }

    /// The runtime of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<dyn Runtime>> {
        self.read().get(name).map(|known| Arc::clone(&known.runtime))
    }

    /// All runtimes with their names.
    #[must_use]
    pub fn all(&self) -> Vec<(String, Arc<dyn Runtime>)> {
        self.read().iter().map(|(name, known)| (name.clone(), Arc::clone(&known.runtime))).collect()
    }

    /// Whether a runtime said that it is well when it was asked last.
    #[must_use]
    pub fn is_well(&self, name: &str) -> bool {
        self.read().get(name).is_some_and(|known| known.problem.is_none())
    }

    /// Notes whether a runtime has answered in time.
    pub(crate) fn has_answered(&self, name: &str, answered: bool) {
        let mut silent = self.silent.locked();
        if answered {
            silent.remove(name);
        } else {
            silent.insert(name.to_owned(), Instant::now());
        }
    }

    /// Whether a runtime has not answered in time since then, and not at all after that.
    pub(crate) fn is_silent_since(&self, name: &str, since: Instant) -> bool {
        self.silent.locked().get(name).is_some_and(|at| *at > since)
    }

    /// Those behind a socket. One inside the agent changes only what it is told to, and compares what it made
    /// by itself.
    #[must_use]
    pub fn foreign(&self) -> BTreeMap<String, Arc<dyn Runtime>> {
        let known = self.read();
        let foreign = known.values().filter(|known| known.socket.is_some());
        foreign.map(|known| (known.info.name.clone(), Arc::clone(&known.runtime))).collect()
    }

    /// What a runtime says is wrong with one of its Networks, or with itself. Other Networks are not
    /// concerned.
    pub(crate) fn problem_with(&self, name: &str, network: &NetworkName) -> Option<Unready> {
        let known = self.read();
        let Some(entry) = known.get(name) else {
            let message = format!("network runtime {name} does not answer on this node: start it");
            return Some(Unready { reason: conditions::node_network::REASON_RUNTIME_DOWN, message });
        };
        // One inside the agent is asked for more than that (`Runtime::survey`).
        entry.socket.as_ref()?;
        if let Some(problem) = &entry.problem {
            let message = format!("network runtime {name} is not ready: {problem}");
            return Some(Unready { reason: conditions::node_network::REASON_RUNTIME_DOWN, message });
        }
        let problem = entry.networks.get(network)?.as_ref()?;
        Some(Unready::not_set_up(format!("network runtime {name} says that it is not ready: {problem}")))
    }

    /// Whether a runtime that sets up Networks said, when it was asked last, that it does not have one of
    /// these: it was started again since they were set up.
    #[must_use]
    pub fn lacks(&self, name: &str, networks: &[NetworkName]) -> bool {
        let known = self.read();
        let Some(entry) = known.get(name).filter(|known| has(&known.info, feature::NETWORK_SETUP)) else {
            return false;
        };
        entry.problem.is_none() && networks.iter().any(|network| !entry.networks.contains_key(network))
    }

    /// How often a runtime was away, or not ready, since it was found.
    #[must_use]
    pub(crate) fn absences(&self, name: &str) -> u64 {
        self.read().get(name).map_or(0, |known| known.absences)
    }

    /// Tells each time that all of them were asked how they are.
    #[must_use]
    pub fn asked(&self) -> watch::Receiver<u64> {
        self.asked.subscribe()
    }

    /// What NodeNetwork shows of them.
    #[must_use]
    pub fn describe(&self) -> Vec<NodeRuntime> {
        self.read().values().map(KnownRuntime::describe).collect()
    }

    /// Looks for sockets in a directory, and asks all runtimes how they are. True if something changed.
    pub async fn refresh(&self, directory: &Path, call_deadline: Duration) -> bool {
        let before = self.health();
        let sockets = sockets(directory);
        self.refused().retain(|socket, _| sockets.contains(socket));
        for socket in sockets {
            if let Err(problem) = closed_to_others(&socket) {
                self.refuse(&socket, &problem);
                continue;
            }
            self.refused().remove(&socket);
            let known = self.read().values().any(|k| k.socket.as_deref() == Some(&socket));
            if !known {
                self.introduce(&socket, call_deadline).await;
            }
        }
        let all: Vec<(String, Arc<dyn Runtime>)> = self.all();
        futures::future::join_all(all.iter().map(|(name, runtime)| self.ask(name, runtime))).await;
        self.asked.send_modify(|n| *n += 1);
        before != self.health()
    }

    /// Asks one runtime how it is.
    pub(crate) async fn ask_again(&self, name: &str) {
        if let Some(runtime) = self.get(name) {
            self.ask(name, &runtime).await;
        }
    }

    /// Asks a runtime how it is, and keeps that.
    async fn ask(&self, name: &str, runtime: &Arc<dyn Runtime>) {
        let status = tokio::time::timeout(INFO_TIMEOUT, runtime.status()).await;
        let mut known = self.write();
        let Some(entry) = known.get_mut(name).filter(|entry| Arc::ptr_eq(&entry.runtime, runtime)) else {
            return;
        };
        let refused = entry.socket.as_ref().and_then(|socket| self.refused().get(socket).cloned());
        let was_well = entry.problem.is_none();
        entry.problem = refused.or(match status {
            Ok(Ok(status)) => {
                let problem = |n: NetworkStatus| (n.name, (!n.ready).then_some(n.message));
                if entry.socket.is_some() {
                    entry.networks = status.networks.into_iter().map(problem).collect();
                }
                (!status.ready).then_some(status.message)
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("it does not answer: check its log".to_owned()),
        });
        entry.absences += u64::from(was_well && entry.problem.is_some());
        let gone = entry.problem.is_some() && entry.socket.as_ref().is_some_and(|socket| !socket.exists());
        if gone {
            tracing::warn!(runtime = %name, "a network runtime's socket is gone");
            known.remove(name);
        }
    }

    /// How all of them are, with what they say of their Networks.
    fn health(&self) -> Vec<(NodeRuntime, BTreeMap<NetworkName, Option<String>>)> {
        self.read().values().map(|known| (known.describe(), known.networks.clone())).collect()
    }

    async fn introduce(&self, socket: &Path, call_deadline: Duration) {
        let runtime = match RemoteRuntime::new(socket, call_deadline) {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::warn!(
                    socket = %socket.display(),
                    error = &error as &dyn std::error::Error,
                    "cannot use a socket"
                );
                return;
            }
        };
        let info = match tokio::time::timeout(INFO_TIMEOUT, runtime.info()).await {
            Ok(Ok(info)) => info,
            Ok(Err(error)) => {
                tracing::debug!(socket = %socket.display(), error = &error as &dyn std::error::Error, "no \
                    runtime answers there yet");
                return;
            }
            Err(_) => return,
        };
        let mut known = self.write();
        if known.contains_key(&info.name) {
            tracing::warn!(socket = %socket.display(), runtime = %info.name, "a second network runtime \
            with the same name is ignored: stop one of them");
            return;
        }
        tracing::info!(socket = %socket.display(), runtime = %info.name, version = %info.version, "found a \
            network runtime");
        let entry = KnownRuntime {
            runtime: Arc::new(Announced::new(Arc::new(runtime), info.clone())),
            info: info.clone(),
            socket: Some(socket.to_owned()),
            problem: None,
            absences: 0,
            networks: BTreeMap::new(),
        };
        known.insert(info.name, entry);
    }

    fn refuse(&self, socket: &Path, problem: &str) {
        let before = self.refused().insert(socket.to_owned(), problem.to_owned());
        if before.as_deref() != Some(problem) {
            tracing::error!(socket = %socket.display(), "ignoring a socket in the directory of network \
                runtimes: {problem}");
        }
    }

    fn refused(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, String>> {
        self.refused.locked()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, KnownRuntime>> {
        self.known.reading()
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<String, KnownRuntime>> {
        self.known.writing()
    }
}

impl KnownRuntime {
    fn describe(&self) -> NodeRuntime {
        NodeRuntime {
            name: self.info.name.clone(),
            version: self.info.version.clone(),
            features: self.info.features.clone(),
            healthy: self.problem.is_none(),
            message: self.problem.clone(),
        }
    }
}

impl std::fmt::Debug for Runtimes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.read().keys()).finish()
    }
}

fn sockets(directory: &Path) -> Vec<PathBuf> {
    // A directory that is not there, or not yet, holds none.
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut sockets: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "sock")).collect();
    sockets.sort();
    sockets
}

/// Whether a socket is one that nobody but root, and the agent's own user, can have made or can reach:
/// whoever answers there decides what pods get.
///
/// # Errors
/// When it is not, with what to do.
pub fn closed_to_others(socket: &Path) -> Result<(), String> {
    let shown = socket.display();
    let meta = std::fs::metadata(socket).map_err(|error| format!("cannot inspect {shown}: {error}"))?;
    if !meta.file_type().is_socket() {
        return Err(format!("{shown} is not a socket: remove it"));
    }
    if meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(format!("{shown} belongs to user {}: the runtime must run as root", meta.uid()));
    }
    let mode = meta.mode() & 0o777;
    // Whoever may write to it may connect; reading alone, which servers leave to others by default, opens
    // nothing.
    if mode & 0o022 != 0 {
        return Err(format!(
            "{shown} is accessible to other users (mode {mode:04o}): the runtime must set its mode to 0600"
        ));
    }
    Ok(())
}
