//! Plugging a Network into a running pod, and out of it, by NetworkAttachments that users make.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use knit_api::{NetworkAttachment, conditions, names};
use knit_ledger::{AttachmentState, SandboxRecord};
use knit_objects::{Key, Objects, Write};
use knit_runtime::{Attachment, InterfaceName, SandboxId};
use serde_json::json;
use tokio::time::Instant;

use crate::core::Core;
use crate::error::{Error, Reason, Result};
use crate::metrics::Operation;
use crate::netns;
use crate::record::{Details, details, made, pod_of};
use crate::report::attachments;
use crate::request::{Door, pod_name};
use crate::resolve::annotation::{Asked, parse_address};
use crate::resolve::{Missing, Plug, resolve_plug};

/// How often what failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// How long one plug may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Follows users' NetworkAttachments.
#[derive(Debug)]
pub struct HotPlug {
    core: Core,
    objects: Objects,
    /// What was said last in the status of each object, by its key and uid.
    told: BTreeMap<(ObjectKey, String), Told>,
    /// Whether there may be interfaces of objects: while there are none, a pod's coming and going costs nothing here.
    any: bool,
}

type ObjectKey = (String, String);

#[derive(Clone, Debug, PartialEq)]
enum Told {
    Attached(Box<Attachment>),
    Failed(&'static str, String),
}

// === impl HotPlug ===

impl HotPlug {
    /// Ready to follow.
    #[must_use]
    pub fn new(core: Core, objects: Objects) -> Self {
        Self { core, objects, told: BTreeMap::new(), any: true }
    }

    /// Follows for ever.
    pub async fn run(mut self) {
        let mut changes = self.core.world().subscribe();
        let mut sandboxes = self.core.shown();
        loop {
            changes.borrow_and_update();
            sandboxes.borrow_and_update();
            let complete = self.pass().await;
            let again = tokio::time::sleep(if complete { Duration::from_secs(60) } else { AGAIN });
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                // A pod that comes later may be the one that is waited for.
                changed = sandboxes.changed() => if changed.is_err() { return },
                () = again => {}
            }
        }
    }

    /// One pass over all objects; false if something is to be tried again.
    pub async fn pass(&mut self) -> bool {
        let world = self.core.world().get();
        if world.attachments.is_empty() && !self.any {
            return true;
        }
        let mut complete = true;
        for (key, object) in &*world.attachments {
            complete &= self.one(key, object).await;
        }
        if world.synced.attachments {
            complete &= self.unplug_vanished(&world.attachments).await;
            let attachments = &world.attachments;
            self.told.retain(|(key, uid), _| attachments.get(key).is_some_and(|o| uid_of(o) == *uid));
            self.any = !complete || !attachments.is_empty();
        }
        complete
    }

    async fn one(&mut self, key: &ObjectKey, object: &Arc<NetworkAttachment>) -> bool {
        let record = self.record_of(&key.0, &object.spec.pod);
        let deleting = object.metadata.deletion_timestamp.is_some();
        let Some(record) = record else {
            return self.without_pod(key, object, deleting).await;
        };
        let door = door(key);
        let plugged = record.attachments().iter().find(|a| details(a).is_some_and(|d| d.door == door));
        if deleting {
            if plugged.is_some() && !self.unplug(&record, &door).await {
                return false;
            }
            return self.let_go(key, object).await;
        }
        if let Some(attachment) = plugged.and_then(made) {
            return self.tell(key, object, Told::Attached(Box::new(attachment))).await;
        }
        if !self.hold(key, object).await {
            return false;
        }
        match self.plug(key, object, &record).await {
            Ok(attachment) => {
                tracing::info!(namespace = key.0, pod = object.spec.pod, network = object.spec.network, interface = %attachment.interface, "plugged in");
                self.tell(key, object, Told::Attached(Box::new(attachment))).await
            }
            Err(error) => {
                tracing::warn!(
                    namespace = key.0,
                    pod = object.spec.pod,
                    network = object.spec.network,
                    "plugging in failed: {}",
                    error.chain()
                );
                let reason = match error.reason {
                    Reason::NotAllowed => conditions::network_attachment::REASON_NOT_ALLOWED,
                    Reason::AddressesExhausted => conditions::network_attachment::REASON_NO_ADDRESS,
                    Reason::Refused | Reason::Invalid => conditions::network_attachment::REASON_REFUSED,
                    Reason::UnknownSandbox => conditions::network_attachment::REASON_NO_POD,
                    _ if !self.core.world().get().networks.contains_key(&object.spec.network) => {
                        conditions::network_attachment::REASON_NO_NETWORK
                    }
                    _ => conditions::network_attachment::REASON_FAILED,
                };
                self.tell(key, object, Told::Failed(reason, error.chain())).await;
                false
            }
        }
    }

    /// The pod has no sandbox here: it is another node's, or gone, or has no network of its own.
    async fn without_pod(&mut self, key: &ObjectKey, object: &NetworkAttachment, deleting: bool) -> bool {
        let status_node = object.status.as_ref().and_then(|s| s.node.as_deref());
        let ours = status_node == Some(self.core.node());
        let here = self.core.world().get().pods.get(&(key.0.clone(), object.spec.pod.clone())).cloned();
        if deleting {
            return if ours || here.is_some() { self.let_go(key, object).await } else { true };
        }
        let message = match here {
            Some(pod) if pod.host_network => {
                "the pod uses its node's network: only a pod with a network of its own can have another"
            }
            Some(_) => return true,
            None if ours => "the pod is gone",
            None => return true,
        };
        let told = Told::Failed(conditions::network_attachment::REASON_NO_POD, message.to_owned());
        self.tell(key, object, told).await
    }

    async fn plug(
        &self,
        key: &ObjectKey,
        object: &NetworkAttachment,
        record: &SandboxRecord,
    ) -> Result<Attachment> {
        let started = Instant::now();
        let result = self.try_plug(key, object, record).await;
        let outcome = result.as_ref().map(|_| ()).map_err(|e| e.reason);
        self.core.metrics().request(Operation::Plug, outcome, started.elapsed());
        result
    }

    async fn try_plug(
        &self,
        key: &ObjectKey,
        object: &NetworkAttachment,
        record: &SandboxRecord,
    ) -> Result<Attachment> {
        let deadline = Instant::now() + PATIENCE;
        let pod = pod_of(record)?;
        let who = pod_name(&pod);
        let _guard = self.core.locks().lock(&pod.sandbox).await;
        // It may have changed while we waited.
        let Some(record) = self.core.books().get(&pod.sandbox).cloned().filter(SandboxRecord::is_attached)
        else {
            return Err(Error::new(Reason::NotReady, format!("{who} is being attached or detached")));
        };
        let asked =
            asked(object).map_err(|problem| Error::new(Reason::Refused, format!("{who}: {problem}")))?;
        let has = record.attachments().iter().map(|a| (a.plan().interface.clone(), a.plan().network.clone()));
        let plug = Plug { namespace: &key.0, asked, has: has.collect() };
        let wanted = match resolve_plug(&self.core.world().get(), &plug, &who) {
            Ok(wanted) => wanted,
            Err(Missing::Wait(error) | Missing::Error(error)) => return Err(error),
        };
        self.core.ensure_network(&wanted.network, deadline).await?;
        let interface = wanted.interface.to_string();
        let details = Details {
            door: door(key),
            main: false,
            default_route: false,
            ports: Vec::new(),
            dns: wanted.dns.clone(),
        };
        let record = self.core.reserve(&pod, record.netns(), &[(wanted, details)], deadline).await?;
        let record = self.core.attach_planned(record, self.core.config().runtime_deadline).await?;
        self.core.books_changed();
        let attachment = record.attachment(&interface).and_then(made);
        attachment.ok_or_else(|| Error::new(Reason::Internal, "the record lost an interface"))
    }

    async fn unplug(&self, record: &SandboxRecord, door: &Door) -> bool {
        let started = Instant::now();
        let Ok(sandbox) = SandboxId::new(record.sandbox()) else { return true };
        let _guard = self.core.locks().lock(&sandbox).await;
        let Some(record) = self.core.books().get(&sandbox).cloned() else { return true };
        let plugged = record.attachments().iter().filter(|a| details(a).is_some_and(|d| d.door == *door));
        let plugged: Vec<String> = plugged.map(|a| a.plan().interface.clone()).collect();
        let done = plugged.is_empty() || self.core.take_back(&record, &plugged).await;
        let outcome = if done { Ok(()) } else { Err(Reason::AttachFailed) };
        self.core.metrics().request(Operation::Unplug, outcome, started.elapsed());
        done
    }

    /// Unplugs what belongs to objects that are gone.
    async fn unplug_vanished(&self, objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>) -> bool {
        let vanished: Vec<(SandboxRecord, Door)> = {
            let books = self.core.books();
            let of_objects = books.records().flat_map(|r| r.attachments().iter().map(move |a| (r, a)));
            of_objects
                .filter(|(_, a)| !matches!(a.state(), AttachmentState::Detaching(_)))
                .filter_map(|(r, a)| match details(a)?.door {
                    Door::Object(name) => {
                        let (namespace, object) = name.split_once('/')?;
                        let there = objects.contains_key(&(namespace.to_owned(), object.to_owned()));
                        (!there).then(|| (r.clone(), Door::Object(name)))
                    }
                    _ => None,
                })
                .collect()
        };
        let mut complete = true;
        for (record, door) in vanished {
            tracing::info!(sandbox = record.sandbox(), ?door, "its NetworkAttachment is gone: unplugging");
            complete &= self.unplug(&record, &door).await;
        }
        complete
    }

    /// The newest sandbox of a pod on this node.
    fn record_of(&self, namespace: &str, pod: &str) -> Option<SandboxRecord> {
        let books = self.core.books();
        let of_pod =
            books.records().filter(|r| r.pod().is_some_and(|p| p.namespace == namespace && p.name == pod));
        of_pod.filter(|r| !netns::is_gone(r.netns())).max_by_key(|r| r.created_at()).cloned()
    }

    /// Puts our finalizer on an object, so that it stays until it is unplugged.
    async fn hold(&self, key: &ObjectKey, object: &NetworkAttachment) -> bool {
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        if finalizers.iter().any(|f| f == names::ATTACHMENT_FINALIZER) {
            return true;
        }
        finalizers.push(names::ATTACHMENT_FINALIZER.to_owned());
        self.set_finalizers(key, object, &finalizers).await
    }

    /// Takes our finalizer off an object.
    async fn let_go(&self, key: &ObjectKey, object: &NetworkAttachment) -> bool {
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        let before = finalizers.len();
        finalizers.retain(|f| f != names::ATTACHMENT_FINALIZER);
        before == finalizers.len() || self.set_finalizers(key, object, &finalizers).await
    }

    async fn set_finalizers(
        &self,
        key: &ObjectKey,
        object: &NetworkAttachment,
        finalizers: &[String],
    ) -> bool {
        let mut patch = json!({ "metadata": { "finalizers": finalizers } });
        if let Some(version) = &object.metadata.resource_version {
            patch["metadata"]["resourceVersion"] = version.as_str().into();
        }
        let write = Write::merge::<NetworkAttachment>(object_key(key), patch);
        match self.objects.write(&write).await {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(
                    namespace = key.0,
                    name = key.1,
                    error = &error as &dyn std::error::Error,
                    "the finalizer of a NetworkAttachment cannot be changed yet"
                );
                false
            }
        }
    }

    /// Writes an object's status, if it says something new.
    async fn tell(&mut self, key: &ObjectKey, object: &NetworkAttachment, told: Told) -> bool {
        let place = (key.clone(), uid_of(object));
        if self.told.get(&place) == Some(&told) {
            return true;
        }
        let status = match &told {
            Told::Attached(attachment) => attachments::status(self.core.node(), attachment),
            Told::Failed(reason, message) => attachments::failure(self.core.node(), reason, message),
        };
        let write = Write::status::<NetworkAttachment>(object_key(key), &status, names::AGENT_MANAGER);
        match self.objects.write(&write).await {
            Ok(_) => {
                self.told.insert(place, told);
                true
            }
            Err(error) => {
                tracing::warn!(
                    namespace = key.0,
                    name = key.1,
                    error = &error as &dyn std::error::Error,
                    "the status of a NetworkAttachment cannot be written yet"
                );
                false
            }
        }
    }
}

fn door(key: &ObjectKey) -> Door {
    Door::Object(format!("{}/{}", key.0, key.1))
}

fn object_key(key: &ObjectKey) -> Key {
    Key::namespaced(key.0.as_str(), key.1.as_str())
}

fn uid_of(object: &NetworkAttachment) -> String {
    object.metadata.uid.clone().unwrap_or_default()
}

fn asked(object: &NetworkAttachment) -> Result<Asked, String> {
    let spec = &object.spec;
    let interface =
        spec.interface.as_deref().map(InterfaceName::new).transpose().map_err(|e| e.to_string())?;
    Ok(Asked {
        network: spec.network.clone(),
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
