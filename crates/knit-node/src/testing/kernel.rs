//! What stands in for the kernel, and what is to go wrong in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use knit_runtime::{Attachment, Change, InterfaceName, Network, NetworkUsage, Pod, Reason, SandboxId};
use knit_types::NetworkName;
use knit_types::sync::Locked;
use tokio::sync::{Notify, mpsc};

/// What stands in for the kernel: it outlives the runtimes that change it. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct FakeKernel {
    state: Arc<Mutex<KernelState>>,
    pub(super) disturbed: Arc<Notify>,
    /// Whether attaches of `Faults::hold_on` go on.
    pub(super) released: Arc<(Mutex<bool>, Condvar)>,
    /// Who watches the runtime of this kernel; none while nobody does.
    pub(super) watchers: Arc<Mutex<Vec<mpsc::UnboundedSender<Change>>>>,
}

#[derive(Debug, Default)]
pub(super) struct KernelState {
    /// Networks of which something is damaged; none if nobody compares.
    pub(super) damaged: Option<BTreeSet<NetworkName>>,
    /// Attachments of which something is damaged.
    pub(super) broken: BTreeSet<(SandboxId, InterfaceName)>,
    pub(super) networks: BTreeMap<NetworkName, Network>,
    pub(super) attachments: BTreeMap<(SandboxId, InterfaceName), Attachment>,
    /// Made, but not whole: only garbage collection finds them.
    pub(super) halves: BTreeSet<(SandboxId, InterfaceName)>,
    pub(super) attaches: usize,
    pub(super) begun: usize,
    pub(super) set_ups: usize,
    pub(super) garbage_calls: usize,
    pub(super) usage: BTreeMap<NetworkName, NetworkUsage>,
    pub(super) faults: Faults,
}

/// What is to go wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The attach with this number, counted from 0 since the last change, fails for this reason.
    pub attach: Option<(usize, Reason)>,
    /// This many detaches fail.
    pub detaches: usize,
    /// This many comparisons fail.
    pub surveys: usize,
    /// This many set-ups fail.
    pub set_ups: usize,
    /// This many removals of Networks fail.
    pub removals: usize,
    /// Set-up fails with this.
    pub set_up: Option<Reason>,
    /// No call about Networks, or that compares them, ever answers.
    pub hang_networks: bool,
    /// An attach of this interface keeps its thread until `FakeKernel::release`, as a runtime inside the
    /// agent does that works where it is awaited. For tests on several threads.
    pub hold_on: Option<String>,
    /// An attach of this interface never answers.
    pub hang_on: Option<String>,
    /// An attach of this interface takes so long, and goes on whoever waits for it.
    pub slow_on: Option<(String, Duration)>,
    /// No detach ever answers.
    pub hang_detaches: bool,
    /// No removal of leftovers ever ends.
    pub hang_garbage: bool,
    /// Answers leave the addresses out.
    pub forget_addresses: bool,
    /// The path of the pod's namespace means another one when it is opened.
    pub other_namespace: bool,
    /// It says that it is not ready, and this is why.
    pub unwell: Option<String>,
    /// It says of this Network that it is not ready, and why.
    pub network_unwell: Option<(String, String)>,
    /// It never says how it is.
    pub hang_status: bool,
    /// It does not say which Networks it has.
    pub unlisted: bool,
}

// === impl FakeKernel ===

impl FakeKernel {
    /// All attachments that are whole.
    #[must_use]
    pub fn attachments(&self) -> Vec<Attachment> {
        self.state().attachments.values().cloned().collect()
    }

    /// Whether nothing of any attachment is there.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        let state = self.state();
        state.attachments.is_empty() && state.halves.is_empty()
    }

    /// The Networks that are set up.
    #[must_use]
    pub fn networks(&self) -> BTreeMap<NetworkName, Network> {
        self.state().networks.clone()
    }

    /// Looks at one Network, which is set up or not, without a copy of it.
    pub fn look_at<T>(&self, network: &str, look: impl FnOnce(Option<&Network>) -> T) -> T {
        look(self.state().networks.get(network))
    }

    /// How often a Network was set up.
    #[must_use]
    pub fn set_ups(&self) -> usize {
        self.state().set_ups
    }

    /// How often it was to collect garbage since what goes wrong was changed.
    #[must_use]
    pub fn garbage_calls(&self) -> usize {
        self.state().garbage_calls
    }

    /// How often something was attached.
    #[must_use]
    pub fn attaches(&self) -> usize {
        self.state().attaches
    }

    /// How often a runtime began to attach something since what goes wrong was changed.
    #[must_use]
    pub fn attaches_begun(&self) -> usize {
        self.state().begun
    }

    /// Says what is to go wrong from now on.
    pub fn fail(&self, faults: Faults) {
        let mut state = self.state();
        state.faults = faults;
        state.attaches = 0;
        state.begun = 0;
        state.garbage_calls = 0;
    }

    /// Damages a Network as a stranger would, and tells so. From now on what is there is compared.
    pub fn damage(&self, network: &'static str) {
        self.state().damaged.get_or_insert_default().insert(network.into());
        self.disturbed.notify_one();
    }

    /// Lets attaches go on that are held.
    pub fn release(&self) {
        *self.released.0.locked() = true;
        self.released.1.notify_all();
    }

    /// Damages all attachments as a stranger would, and tells so. From now on what is there is compared.
    pub fn break_all(&self) {
        let mut state = self.state();
        state.damaged.get_or_insert_default();
        state.broken = state.attachments.keys().cloned().collect();
        drop(state);
        self.disturbed.notify_one();
    }

    /// How many attachments are damaged.
    #[must_use]
    pub fn broken(&self) -> usize {
        self.state().broken.len()
    }

    /// From now on a Network uses this.
    pub fn uses(&self, usage: NetworkUsage) {
        self.state().usage.insert(usage.network.clone(), usage);
    }

    /// Loses an interface, as if somebody had deleted it, and tells those who watch.
    pub fn lose(&self, sandbox: &str, interface: &str) {
        let lost = |(s, i): &(SandboxId, InterfaceName)| s.as_str() == sandbox && i.as_str() == interface;
        let gone: Vec<_> = self.state().attachments.extract_if(.., |key, _| lost(key)).collect();
        for (_, attachment) in gone {
            self.tell(&Change::Removed(attachment));
        }
    }

    /// Begins with nothing, as a runtime does that keeps what it has in memory: all streams end, and Networks
    /// and interfaces are gone.
    pub fn restart(&self) {
        let mut state = self.state();
        state.networks.clear();
        state.attachments.clear();
        state.halves.clear();
        drop(state);
        self.watchers.locked().clear();
    }

    /// Whether somebody watches.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.watchers.locked().iter().any(|watcher| !watcher.is_closed())
    }

    pub(super) fn tell(&self, change: &Change) {
        self.watchers.locked().retain(|watcher| watcher.send(change.clone()).is_ok());
    }

    /// Forgets which pods its attachments are for, as a kernel does that keeps only sandboxes.
    pub fn forget_pods(&self) {
        for attachment in self.state().attachments.values_mut() {
            let sandbox = attachment.pod.sandbox.clone();
            attachment.pod = Pod { sandbox, namespace: None, name: None, uid: None };
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, KernelState> {
        self.state.locked()
    }
}
