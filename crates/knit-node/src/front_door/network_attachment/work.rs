//! What a worker does for one object: plugs it in, says how it went, takes it out again and lets the object
//! go.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use knit_api::{NetworkAttachment, NetworkAttachmentStatus, conditions, names};
use knit_ledger::SandboxRecord;
use knit_objects::{Key, Objects, Write};
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use serde_json::json;
use tokio::time::Instant;

use super::objects::{belongs, by_objects, find, has_finalizer, is_forgotten, uid_of};
use super::pace::AttemptPace;
use super::state::{State, WrittenStatus, lock};
use super::{Item, Job, ObjectKey, PER_POD, Task};
use crate::core::Core;
use crate::error::{Error, Reason, Result};
use crate::front_door::annotation::{network_name, parse_address};
use crate::metrics::Operation;
use crate::report::attachments;
use crate::request::{Asked, Door, ObjectDoor, PodRequest, Wishes, pod_name};
use crate::sandboxes::books::ledger_error;
use crate::world::{World, announced};

/// What the status of an object says.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ReportedStatus {
    /// Attached, and whether other nodes are to be told of it.
    Attached(Box<Attachment>, bool),
    Failed(&'static str, String),
}

// === impl ReportedStatus ===

impl ReportedStatus {
    pub(super) fn attached(world: &World, node: &str, attachment: &Attachment) -> Self {
        let addresses: Vec<IpAddr> = attachment.addresses.iter().map(|a| a.net.addr()).collect();
        let announced = announced::is_needed(world, &attachment.network, node, &addresses, attachment.mac);
        Self::Attached(Box::new(attachment.clone()), announced)
    }

    pub(super) fn status(&self, node: &str) -> NetworkAttachmentStatus {
        match self {
            Self::Attached(attachment, announced) => attachments::status(node, attachment, *announced),
            Self::Failed(reason, message) => attachments::failure(node, reason, message),
        }
    }
}

/// Does what is to be done for the objects of one pod, one after the other.
#[derive(Debug)]
pub(super) struct Worker {
    core: Core,
    objects: Objects,
    state: Arc<Mutex<State>>,
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(core: Core, objects: Objects, state: Arc<Mutex<State>>) -> Self {
        Self { core, objects, state }
    }

    /// Does one thing, and notes when it may be tried again if it failed.
    pub(super) async fn work(&self, job: Job) {
        let Job { item, object, task, facts } = job;
        let leaving = matches!(task, Task::Leave(_) | Task::LeaveUnseen(_));
        let failed = match (task, object) {
            (Task::Leave(sandbox), object) => self.leave(&item, object, sandbox).await,
            (Task::LeaveUnseen(sandbox), _) => match self.is_gone(&item).await {
                Ok(true) => self.leave(&item, None, Some(sandbox)).await,
                Ok(false) => Err(Again { hopeless: false }),
                Err(again) => Err(again),
            },
            (Task::Plug(pod), Some(object)) => self.plug(&item, &object, pod).await,
            (Task::Tell(told), Some(object)) => self.tell(&item, &object, told).await,
            (Task::Plug(_) | Task::Tell(_), None) => Ok(()),
        };
        let place = (leaving, item);
        let mut state = lock(&self.state);
        match failed {
            Ok(()) => drop(state.pace.remove(&place)),
            Err(Again { hopeless }) => {
                let pace = AttemptPace::failed(state.pace.get(&place), facts, hopeless, Instant::now());
                state.pace.insert(place, pace);
            }
        }
    }

    async fn plug(&self, item: &Item, object: &NetworkAttachment, pod: Pod) -> Result<(), Again> {
        let result = self.try_plug(item, object, pod).await;
        let error = match result {
            Ok(attachment) => {
                tracing::info!(namespace = item.place.0, name = item.place.1, pod = object.spec.pod,
                    network = object.spec.network, interface = %attachment.interface, "plugged in");
                let told = ReportedStatus::attached(&self.core.world().get(), self.core.node(), &attachment);
                return self.tell(item, object, told).await;
            }
            Err(error) => error,
        };
        let reason = match error.reason {
            Reason::NotAllowed => conditions::network_attachment::REASON_NOT_ALLOWED,
            Reason::AddressesExhausted => conditions::network_attachment::REASON_NO_ADDRESS,
            Reason::Refused | Reason::Invalid => conditions::network_attachment::REASON_REFUSED,
            Reason::UnknownSandbox => conditions::network_attachment::REASON_NO_POD,
            _ if !self.core.world().get().networks.contains_key(object.spec.network.as_str()) => {
                conditions::network_attachment::REASON_NO_NETWORK
            }
            _ => conditions::network_attachment::REASON_FAILED,
        };
        let told = ReportedStatus::Failed(reason, error.chain());
        if lock(&self.state).told.get(item).is_none_or(|said| said.told != told) {
            tracing::warn!(
                namespace = item.place.0,
                name = item.place.1,
                pod = object.spec.pod,
                network = object.spec.network,
                "attaching failed: {}",
                error.chain()
            );
        }
        // It is tried again in any case.
        let _ = self.tell(item, object, told).await;
        Err(Again { hopeless: !error.retryable() })
    }

    async fn try_plug(&self, item: &Item, object: &NetworkAttachment, pod: Pod) -> Result<Attachment> {
        let forgotten = {
            let books = self.core.sandboxes().books();
            let own = books.get(&pod.sandbox).and_then(|record| find(record, &item.place, object));
            own.is_some_and(is_forgotten)
        };
        if forgotten {
            return self.claim(item, object, &pod).await;
        }
        let (request, started) = (request(item, object, pod), Instant::now());
        if let Err(error) = self.prepare(item, object, &request).await {
            self.core.metrics().request(Operation::Plug, Err(error.reason), started.elapsed());
            return Err(error);
        }
        let deadline = Instant::now() + self.core.config().request_deadline;
        let attached = self.core.attach(request, deadline).await?;
        let made = attached.attachments.into_iter().next();
        made.ok_or_else(|| Error::new(Reason::Internal, "the record lost an interface"))
    }

    /// Notes again that an interface is an object's: it was found running after the ledger was damaged.
    async fn claim(&self, item: &Item, object: &NetworkAttachment, pod: &Pod) -> Result<Attachment> {
        let who = pod_name(pod);
        self.hold(item, object).await?;
        let _guard = self.core.sandboxes().locks().lock(pod.sandbox.clone()).await;
        let mut books = self.core.sandboxes().books();
        let gone = || Error::new(Reason::NotReady, format!("{who} is being attached or detached"));
        let mut record = books.get(&pod.sandbox).cloned().ok_or_else(gone)?;
        let entry = find(&record, &item.place, object).cloned().ok_or_else(gone)?;
        let made = entry.made().cloned().ok_or_else(gone)?;
        record
            .asked_by(&entry.plan().interface, Door::Object(door(item)))
            .map_err(|error| Error::new(Reason::Internal, format!("cannot record {who}")).because(error))?;
        books.put(record).map_err(|error| ledger_error(&who, error))?;
        Ok(made)
    }

    /// What comes before a sandbox is locked: what is refused needs no finalizer, and no pod waits for a
    /// write to the API.
    async fn prepare(&self, item: &Item, object: &NetworkAttachment, request: &PodRequest) -> Result<()> {
        self.check_limit(&request.pod)?;
        self.core.could_get(request)?;
        self.hold(item, object).await
    }

    /// Whether a pod may have one more interface by an object. Nobody else gives it one: there is one worker
    /// for each pod.
    fn check_limit(&self, pod: &Pod) -> Result<()> {
        let full = |record: &SandboxRecord| by_objects(record) >= PER_POD;
        if self.core.sandboxes().books().get(&pod.sandbox).is_some_and(full) {
            let who = pod_name(pod);
            let message =
                format!("{who} already has {PER_POD} interfaces from NetworkAttachments: delete one of them");
            return Err(Error::new(Reason::Refused, message));
        }
        Ok(())
    }

    /// Whether an object that this node does not see any more is gone, or another node's. One that does not
    /// name any node may be this one's still: no agent of an earlier version waited for that.
    async fn is_gone(&self, item: &Item) -> Result<bool, Again> {
        match self.objects.get::<NetworkAttachment>(&key_of(&item.place)).await {
            Ok(None) => Ok(true),
            Ok(Some(object)) => {
                let labels = object.metadata.labels.unwrap_or_default();
                // Its user gave it a label by which it is an agent's: nobody follows it any more.
                let by = labels.get(names::MANAGED_BY_LABEL).is_some_and(|by| by == names::MANAGED_BY);
                let other = by || (item.uid.is_some() && item.uid != object.metadata.uid);
                let node = object.status.and_then(|status| status.node);
                Ok(other || node.is_some_and(|node| node != self.core.node()))
            }
            Err(error) => {
                tracing::warn!(
                    namespace = item.place.0,
                    name = item.place.1,
                    error = &error as &dyn std::error::Error,
                    "cannot ask what became of a NetworkAttachment; retrying"
                );
                Err(Again { hopeless: false })
            }
        }
    }

    async fn leave(
        &self,
        item: &Item,
        object: Option<Arc<NetworkAttachment>>,
        sandbox: Option<SandboxId>,
    ) -> Result<(), Again> {
        if let Some(sandbox) = sandbox {
            if object.is_none() {
                tracing::info!(
                    namespace = item.place.0,
                    name = item.place.1,
                    %sandbox,
                    "its NetworkAttachment is gone: detaching"
                );
            }
            self.unplug(sandbox, item, object.clone()).await?;
        }
        match object {
            Some(object) => self.let_go(item, &object).await,
            None => self.forget_file(item).await,
        }
    }

    async fn unplug(
        &self,
        sandbox: SandboxId,
        item: &Item,
        object: Option<Arc<NetworkAttachment>>,
    ) -> Result<(), Again> {
        let (wanted, place) = (door(item), item.place.clone());
        let own = move |record: &SandboxRecord, a: &knit_ledger::Attachment| match &object {
            Some(object) => belongs(record, a, &place, object),
            None => a.details().door == Door::Object(wanted.clone()),
        };
        // Why it could not be detached is in the log.
        self.core.unplug(sandbox, own).await.map_err(|_| Again { hopeless: false })
    }

    /// Puts our finalizer on an object, so that it stays until it is unplugged. It is all that an agent may
    /// change of it.
    async fn hold(&self, item: &Item, object: &NetworkAttachment) -> Result<()> {
        // A file does not wait for anybody.
        if has_finalizer(object)
            || lock(&self.state).held.contains(item)
            || self.objects.output_folder().is_some()
        {
            return Ok(());
        }
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        finalizers.push(names::ATTACHMENT_FINALIZER.to_owned());
        self.patch(item, object, json!({ "finalizers": finalizers })).await.map_err(|error| {
            let message = "cannot write the finalizer of the NetworkAttachment yet";
            Error::new(Reason::NotReady, message).because(error)
        })?;
        lock(&self.state).held.insert(item.clone());
        Ok(())
    }

    /// Takes our finalizer off an object.
    async fn let_go(&self, item: &Item, object: &NetworkAttachment) -> Result<(), Again> {
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        let before = finalizers.len();
        finalizers.retain(|f| f != names::ATTACHMENT_FINALIZER);
        if before == finalizers.len() {
            return Ok(());
        }
        match self.patch(item, object, json!({ "finalizers": finalizers })).await {
            Ok(()) | Err(knit_objects::Error::NotFound { .. }) => {
                let version = object.metadata.resource_version.clone();
                lock(&self.state).let_go.insert(item.clone(), version);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(
                    namespace = item.place.0,
                    name = item.place.1,
                    error = &error as &dyn std::error::Error,
                    "cannot remove the finalizer of a NetworkAttachment yet"
                );
                Err(Again { hopeless: false })
            }
        }
    }

    async fn patch(
        &self,
        item: &Item,
        object: &NetworkAttachment,
        mut metadata: serde_json::Value,
    ) -> knit_objects::Result<()> {
        if let Some(version) = &object.metadata.resource_version {
            metadata["resourceVersion"] = version.as_str().into();
        }
        let write = Write::merge::<NetworkAttachment>(key_of(&item.place), json!({ "metadata": metadata }));
        self.objects.write(&write).await.map(drop)
    }

    /// What was written beside a folder of objects goes with the object: nobody else removes it.
    async fn forget_file(&self, item: &Item) -> Result<(), Again> {
        let there = self.core.world().users().has(&item.place.0, &item.place.1);
        if there || self.objects.output_folder().is_none() {
            return Ok(());
        }
        let write = Write::delete::<NetworkAttachment>(key_of(&item.place));
        self.objects.write(&write).await.map(drop).map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "a file cannot be removed yet");
            Again { hopeless: false }
        })
    }

    /// Writes an object's status, if it says something new. Only this very object's: one that has taken its
    /// name meanwhile asked for something else.
    async fn tell(&self, item: &Item, object: &NetworkAttachment, told: ReportedStatus) -> Result<(), Again> {
        let node = self.core.node();
        if lock(&self.state).told.get(item).is_some_and(|said| said.holds(&told, object, node)) {
            return Ok(());
        }
        let status = told.status(node);
        if !object.status.as_ref().is_some_and(|before| says_the_same(before, &status)) {
            let mut write =
                Write::status::<NetworkAttachment>(key_of(&item.place), &status, names::AGENT_MANAGER);
            if let Some(uid) = uid_of(object) {
                write = write.if_uid(&uid);
            }
            if let Err(error) = self.objects.write(&write).await {
                tracing::warn!(
                    namespace = item.place.0,
                    name = item.place.1,
                    error = &error as &dyn std::error::Error,
                    "cannot write the status of a NetworkAttachment yet"
                );
                return Err(Again { hopeless: false });
            }
        }
        let before = object.status.clone();
        lock(&self.state).told.insert(item.clone(), WrittenStatus { told, before });
        Ok(())
    }
}

/// It is to be tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Again {
    /// Only somebody's change helps.
    hopeless: bool,
}

fn door(item: &Item) -> ObjectDoor {
    ObjectDoor { name: format!("{}/{}", item.place.0, item.place.1), uid: item.uid.clone() }
}

fn key_of(place: &ObjectKey) -> Key {
    Key::namespaced(place.0.as_str(), place.1.as_str())
}

/// Whether two statuses differ in the time of their conditions at most.
pub(super) fn says_the_same(before: &NetworkAttachmentStatus, now: &NetworkAttachmentStatus) -> bool {
    let mut before = before.clone();
    for (condition, known) in now.conditions.iter().zip(&mut before.conditions) {
        known.last_transition_time = condition.last_transition_time.clone();
    }
    before == *now
}

/// What an object asks for, as every door says it.
fn request(item: &Item, object: &NetworkAttachment, pod: Pod) -> PodRequest {
    let wishes = asked(object).map_or_else(Wishes::Wrong, |asked| Wishes::further(vec![asked]));
    PodRequest { pod, start: None, wishes, claims: Vec::new(), door: Door::Object(door(item)) }
}

fn asked(object: &NetworkAttachment) -> Result<Asked, String> {
    let spec = &object.spec;
    let interface =
        spec.interface.as_deref().map(InterfaceName::new).transpose().map_err(|e| e.to_string())?;
    Ok(Asked {
        network: network_name(&spec.network)?,
        interface,
        addresses: spec.addresses.iter().map(|a| parse_address(a)).collect::<Result<_, _>>()?,
        mac: spec
            .mac
            .as_deref()
            .map(str::parse)
            .transpose()
            .map_err(|e: knit_ipam::ParseMacError| e.to_string())?,
        default_route: false,
    })
}
