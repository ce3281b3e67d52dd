//! Which sandboxes the container runtime has, asked over its CRI socket, and what its answers say about ours.
//!
//! A network namespace that is gone is proof that its pod is. The list of sandboxes is weaker: a runtime that
//! restarts may answer with nothing or with a part, and a sandbox that is being made has its network before
//! it is listed. So a sandbox counts as gone only when it was missing in every answer for a good while, at
//! least twice, and any failure or empty answer begins the wait again. The other way round, a sandbox that is
//! listed as ready lives, even if its namespace is not to be seen from here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use knit_api::cri::v1 as wire;
use knit_ipam::{Millis, PodRef};
use knit_types::sync::Locked;
use tonic::transport::{Channel, Endpoint};
use wire::runtime_service_client::RuntimeServiceClient;

/// How long the container runtime may take to answer: this is on nobody's way, but a start waits for the
/// first one.
const CRI_TIMEOUT: Duration = Duration::from_secs(2);

/// The most that an answer may be: sandboxes come with all labels and annotations of their pods.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The container runtime, behind its socket.
#[derive(Debug)]
pub struct Cri {
    socket: PathBuf,
    client: RuntimeServiceClient<Channel>,
    sandboxes: Mutex<Sandboxes>,
}

/// The socket's path cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("{path} is not a valid path for the container runtime's socket: use an absolute \
path", path = path.display())]
pub struct WrongSocket {
    /// What was given.
    pub path: PathBuf,
}

/// A sandbox as the container runtime lists it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listed {
    /// Its id, which is CNI's container id.
    pub id: String,
    /// Its pod.
    pub pod: Option<PodRef>,
    /// Whether it runs; if not, its network may be gone already.
    pub ready: bool,
}

/// What the answers say about a sandbox.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The container runtime lists it as ready.
    Lives,
    /// The container runtime does not have it, and has not had it for a good while.
    Gone,
    /// Nothing that one may act upon.
    Unknown,
}

/// What the answers said so far. Pure: time is given.
#[derive(Debug, Default)]
pub struct Sandboxes {
    /// The newest answer; nothing if the last question had none.
    listed: BTreeMap<String, Listed>,
    /// Sandboxes of ours that every answer lacked, with when that was first and how many answers it were.
    missing: BTreeMap<String, (Millis, u32)>,
}

// === impl Cri ===

impl Cri {
    /// The container runtime at this socket; nothing is asked yet. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the path cannot be a socket's.
    pub fn new(socket: &Path) -> Result<Self, WrongSocket> {
        let wrong = || WrongSocket { path: socket.to_owned() };
        let text = socket.to_str().filter(|_| socket.is_absolute()).ok_or_else(wrong)?;
        let endpoint = Endpoint::from_shared(format!("unix://{text}")).map_err(|_| wrong())?;
        let channel = endpoint.connect_timeout(CRI_TIMEOUT).timeout(CRI_TIMEOUT).connect_lazy();
        let client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
        Ok(Self { socket: socket.to_owned(), client, sandboxes: Mutex::default() })
    }

    /// Asks for all sandboxes, and notes which of `known` are there.
    pub async fn ask(&self, known: BTreeSet<String>, now: impl FnOnce() -> Millis) {
        let mut client = self.client.clone();
        let question = client.list_pod_sandbox(wire::ListPodSandboxRequest {});
        // The client's own limit does not hold for a server that accepts and then says nothing at all.
        let answer = match tokio::time::timeout(CRI_TIMEOUT, question).await {
            Ok(Ok(answer)) => Some(answer.into_inner().items.into_iter().map(listed).collect()),
            Ok(Err(status)) => {
                let error = &status as &dyn std::error::Error;
                tracing::warn!(socket = %self.socket.display(), error, "the container runtime does not \
                list its sandboxes: only missing namespaces prove that a pod is gone");
                None
            }
            Err(_) => {
                tracing::warn!(socket = %self.socket.display(), "the container runtime does not answer \
                within {} s: only missing namespaces prove that a pod is gone", CRI_TIMEOUT.as_secs());
                None
            }
        };
        self.sandboxes().note(answer, &known, now());
    }

    /// What its answers say about a sandbox.
    #[must_use]
    pub fn verdict(&self, sandbox: &str, grace: Duration, now: Millis) -> Verdict {
        self.sandboxes().verdict(sandbox, grace, now)
    }

    /// The pod of a sandbox, if the newest answer names it.
    #[must_use]
    pub fn pod(&self, sandbox: &str) -> Option<PodRef> {
        self.sandboxes().listed.get(sandbox)?.pod.clone()
    }

    fn sandboxes(&self) -> MutexGuard<'_, Sandboxes> {
        self.sandboxes.locked()
    }
}

// === impl Sandboxes ===

impl Sandboxes {
    /// Notes an answer, or that there was none, for the sandboxes that were known before the question was
    /// asked.
    pub fn note(&mut self, answer: Option<Vec<Listed>>, known: &BTreeSet<String>, now: Millis) {
        self.listed = answer.unwrap_or_default().into_iter().map(|l| (l.id.clone(), l)).collect();
        if self.listed.is_empty() {
            // No answer, or that of a runtime that has not found its sandboxes again: a node is hardly ever
            // without any.
            self.missing.clear();
            return;
        }
        self.missing.retain(|id, _| known.contains(id) && !self.listed.contains_key(id));
        for id in known.iter().filter(|id| !self.listed.contains_key(*id)) {
            self.missing.entry(id.clone()).or_insert((now, 0)).1 += 1;
        }
    }

    /// What the answers say about a sandbox, if one may be missing for as long as `grace`.
    #[must_use]
    pub fn verdict(&self, sandbox: &str, grace: Duration, now: Millis) -> Verdict {
        if let Some(listed) = self.listed.get(sandbox) {
            return if listed.ready { Verdict::Lives } else { Verdict::Unknown };
        }
        let grace = Millis(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        match self.missing.get(sandbox) {
            Some((since, answers)) if *answers >= 2 && now >= since.plus(grace) => Verdict::Gone,
            _ => Verdict::Unknown,
        }
    }
}

fn listed(sandbox: wire::PodSandbox) -> Listed {
    let ready = sandbox.state() == wire::PodSandboxState::SandboxReady;
    let pod = sandbox.metadata.filter(|m| !m.namespace.is_empty() && !m.name.is_empty()).map(|m| PodRef {
        namespace: m.namespace,
        name: m.name,
        uid: Some(m.uid).filter(|uid| !uid.is_empty()),
    });
    Listed { id: sandbox.id, pod, ready }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(600);

    fn some(ids: &[&str]) -> Option<Vec<Listed>> {
        let one = |id: &&str| Listed { id: (*id).to_owned(), pod: None, ready: !id.starts_with("dead") };
        Some(ids.iter().map(one).collect())
    }

    fn at(seconds: u64) -> Millis {
        Millis(seconds * 1000)
    }

    fn known() -> BTreeSet<String> {
        ["a", "dead"].map(str::to_owned).into()
    }

    #[test]
    fn listed_is_alive_and_missing_for_long_is_gone() {
        let mut sandboxes = Sandboxes::default();
        assert_eq!(sandboxes.verdict("a", GRACE, at(0)), Verdict::Unknown);
        sandboxes.note(some(&["a", "dead"]), &known(), at(0));
        assert_eq!(sandboxes.verdict("a", GRACE, at(0)), Verdict::Lives);
        assert_eq!(sandboxes.verdict("dead", GRACE, at(0)), Verdict::Unknown, "its DEL may still come");
        for minute in 1..=10 {
            sandboxes.note(some(&["b"]), &known(), at(60 * minute));
            assert_eq!(sandboxes.verdict("a", GRACE, at(60 * minute)), Verdict::Unknown, "minute {minute}");
        }
        assert_eq!(sandboxes.verdict("a", GRACE, at(660)), Verdict::Gone);
        assert_eq!(sandboxes.verdict("b", GRACE, at(660)), Verdict::Lives);
        assert_eq!(sandboxes.verdict("never-known", GRACE, at(660)), Verdict::Unknown);
    }

    #[test]
    fn one_answer_is_never_enough() {
        let mut sandboxes = Sandboxes::default();
        sandboxes.note(some(&["b"]), &known(), at(0));
        assert_eq!(sandboxes.verdict("a", GRACE, at(10_000)), Verdict::Unknown);
        sandboxes.note(some(&["b"]), &known(), at(10_000));
        assert_eq!(sandboxes.verdict("a", GRACE, at(10_000)), Verdict::Gone);
    }

    #[test]
    fn failures_and_empty_answers_begin_the_wait_anew() {
        for doubtful in [None, some(&[])] {
            let mut sandboxes = Sandboxes::default();
            sandboxes.note(some(&["b"]), &known(), at(0));
            sandboxes.note(some(&["b"]), &known(), at(700));
            assert_eq!(sandboxes.verdict("a", GRACE, at(700)), Verdict::Gone);
            sandboxes.note(doubtful.clone(), &known(), at(760));
            assert_eq!(sandboxes.verdict("a", GRACE, at(760)), Verdict::Unknown);
            sandboxes.note(some(&["b"]), &known(), at(820));
            sandboxes.note(some(&["b"]), &known(), at(880));
            assert_eq!(sandboxes.verdict("a", GRACE, at(880)), Verdict::Unknown);
            // And one that comes back is there.
            sandboxes.note(some(&["a", "b"]), &known(), at(940));
            assert_eq!(sandboxes.verdict("a", GRACE, at(940)), Verdict::Lives);
            sandboxes.note(some(&["b"]), &known(), at(1000));
            assert_eq!(sandboxes.verdict("a", GRACE, at(5000)), Verdict::Unknown);
        }
    }
}
