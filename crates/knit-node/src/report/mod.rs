//! What is told about pods afterwards, off their way: noted here at once, written by a task that may fail and
//! try again.

mod again;
pub mod attachments;
pub mod claims;
pub mod policy;
pub mod published;
pub mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use knit_runtime::{Pod, SandboxId};
use knit_types::ObjectRef;
use knit_types::sync::Locked;
use tokio::sync::Notify;

use crate::error::{Error, Reason};

/// What is to be written.
#[derive(Debug, Default)]
pub struct Report {
    queue: Mutex<Queue>,
    news: Notify,
    /// Whether somebody writes statuses of claims.
    with_claims: AtomicBool,
    claims: Mutex<OfClaims>,
    news_of_claims: Notify,
}

/// What is to be written about claims.
#[derive(Debug, Default)]
pub(crate) struct OfClaims {
    /// Sandboxes that may have claims.
    sandboxes: BTreeSet<SandboxId>,
    /// Claims that could not be attached, with the newest reason.
    failed: BTreeMap<ObjectRef, NotReady>,
    /// Events, the oldest first.
    events: Vec<ClaimEvent>,
}

/// Why what a claim has is not ready.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct NotReady {
    /// In one word.
    pub(crate) reason: &'static str,
    /// In a sentence.
    pub(crate) message: String,
}

/// Something to say on a claim's events.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ClaimEvent {
    /// The claim.
    pub claim: ObjectRef,
    /// Why, in one word.
    pub reason: &'static str,
    /// What happened and what to do.
    pub message: String,
}

#[derive(Debug, Default)]
struct Queue {
    /// Sandboxes whose NetworkAttachments may have to be written or removed.
    sandboxes: BTreeSet<SandboxId>,
    /// Events, the oldest first.
    events: Vec<PodEvent>,
    /// Events of the node itself.
    of_node: Vec<NodeEvent>,
}

/// Something to say on a pod's own events.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PodEvent {
    /// The pod.
    pub pod: Pod,
    /// Why, in one word.
    pub reason: &'static str,
    /// What happened and what to do.
    pub message: String,
}

/// Something to say on the node's events.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeEvent {
    /// Why, in one word.
    pub reason: &'static str,
    /// What happened and what to do.
    pub message: String,
}

/// The most events that wait: more than that say the same.
const MAX_EVENTS: usize = 256;

/// Whether somebody must do something about a failure.
fn needs_telling(reason: Reason) -> bool {
    use Reason::{AddressInUse, AddressesExhausted, NotAllowed, Refused};
    matches!(reason, NotAllowed | Refused | AddressesExhausted | AddressInUse)
}

// === impl Report ===

impl Report {
    /// A pod did not get its Networks.
    pub fn failed(&self, pod: &Pod, error: &Error) {
        tracing::warn!(
            pod = %crate::request::pod_name(pod), sandbox = %pod.sandbox, reason = error.reason.as_str(),
            "attach failed: {}", error.chain()
        );
        // Kubernetes itself shows the message that the container runtime gets; this one is for what a user
        // must do.
        if needs_telling(error.reason) {
            self.say(PodEvent { pod: pod.clone(), reason: error.reason.as_str(), message: error.chain() });
        }
    }

    /// Something about a sandbox's attachments changed.
    pub fn changed(&self, sandbox: &SandboxId) {
        self.queue().sandboxes.insert(sandbox.clone());
        self.news.notify_one();
        if self.with_claims.load(Ordering::Relaxed) {
            self.claims.locked().sandboxes.insert(sandbox.clone());
            self.news_of_claims.notify_one();
        }
    }

    /// From now on somebody writes statuses of claims.
    pub(crate) fn follow_claims(&self) {
        self.with_claims.store(true, Ordering::Relaxed);
    }

    /// A pod with these claims did not get its Networks.
    pub(crate) fn not_attached(&self, claims: &[ObjectRef], error: &Error) {
        if claims.is_empty() || !self.with_claims.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = self.claims.locked();
        for claim in claims {
            if queue.failed.len() < MAX_EVENTS || queue.failed.contains_key(claim) {
                let why = NotReady { reason: error.reason.as_str(), message: error.chain() };
                queue.failed.insert(claim.clone(), why);
            }
        }
        drop(queue);
        self.news_of_claims.notify_one();
    }

    /// A claim was not prepared. Kubelet says so on the pod; who wrote the claim looks at the claim.
    pub(crate) fn not_prepared(&self, claim: &ObjectRef, error: &Error) {
        if !needs_telling(error.reason) {
            return;
        }
        let event =
            ClaimEvent { claim: claim.clone(), reason: error.reason.as_str(), message: error.chain() };
        let mut claims = self.claims.locked();
        if claims.events.len() < MAX_EVENTS && claims.events.last() != Some(&event) {
            claims.events.push(event);
        }
        drop(claims);
        self.news_of_claims.notify_one();
    }

    /// Waits for something to write about claims, and takes it.
    pub(crate) async fn take_of_claims(&self) -> OfClaims {
        loop {
            {
                let mut claims = self.claims.locked();
                if !(claims.sandboxes.is_empty() && claims.failed.is_empty() && claims.events.is_empty()) {
                    return std::mem::take(&mut *claims);
                }
            }
            self.news_of_claims.notified().await;
        }
    }

    /// Says something on a pod's events.
    pub fn say(&self, event: PodEvent) {
        if event.pod.name.is_none() {
            return;
        }
        let mut queue = self.queue();
        if queue.events.len() < MAX_EVENTS && queue.events.last() != Some(&event) {
            queue.events.push(event);
        }
        drop(queue);
        self.news.notify_one();
    }

    /// Says something on the node's own events.
    pub fn say_of_node(&self, reason: &'static str, message: String) {
        let event = NodeEvent { reason, message };
        let mut queue = self.queue();
        if queue.of_node.len() < MAX_EVENTS && !queue.of_node.contains(&event) {
            queue.of_node.push(event);
        }
        drop(queue);
        self.news.notify_one();
    }

    /// Takes what is to be said of the node.
    pub fn take_of_node(&self) -> Vec<NodeEvent> {
        std::mem::take(&mut self.queue().of_node)
    }

    /// Waits for something to write, and takes all of it but what is said of the node.
    pub async fn take(&self) -> (BTreeSet<SandboxId>, Vec<PodEvent>) {
        loop {
            {
                let mut queue = self.queue();
                if !queue.sandboxes.is_empty() || !queue.events.is_empty() || !queue.of_node.is_empty() {
                    return (std::mem::take(&mut queue.sandboxes), std::mem::take(&mut queue.events));
                }
            }
            self.news.notified().await;
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.locked()
    }
}
