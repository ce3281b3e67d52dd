//! What can be written: one typed, printable description for both places it can go.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::Resource;
use serde::Serialize;
use serde_json::{Value, json};

use crate::error::Attempt;
use crate::key::{Key, Target};

/// One write to one object. [`crate::Objects::write`] carries it out.
#[derive(Clone, Debug, PartialEq)]
pub struct Write {
    pub(crate) target: Target,
    pub(crate) operation: Operation,
}

/// What is done to the object.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operation {
    /// It must not be there yet.
    Create(Value),
    /// It is there, in the version that the body names.
    Replace(Value),
    /// Server-side apply: our fields become these, others' stay. Makes the object unless it is about the
    /// status.
    Apply { body: Value, part: Part, manager: &'static str },
    /// JSON merge patch. With a resourceVersion in it, only that version is patched.
    Merge { patch: Value, part: Part },
    /// Delete it; it may be gone already. With a uid, only that very object, and with a version only that
    /// one.
    Delete { uid: Option<String>, version: Option<String> },
}

/// Which part of an object a write is about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Part {
    Whole,
    Status,
}

// === impl Write ===

impl Write {
    /// Makes the object; fails if it is there.
    #[must_use]
    pub fn create<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Self {
        Self::whole(object, Operation::Create)
    }

    /// Puts the object in place of the version that its `resourceVersion` names; fails if another is there.
    #[must_use]
    pub fn replace<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Self {
        Self::whole(object, Operation::Replace)
    }

    /// Makes the object, or changes the fields that this manager has set before or sets now. Its status is
    /// left alone.
    #[must_use]
    pub fn apply<K: Resource<DynamicType = ()> + Serialize>(object: &K, manager: &'static str) -> Self {
        Self::whole(object, |mut body| {
            if let Some(map) = body.as_object_mut() {
                map.remove("status");
            }
            Operation::Apply { body, part: Part::Whole, manager }
        })
    }

    /// Sets the status of an object that is there. Fields of it that this manager has set before and leaves
    /// out now go away.
    #[must_use]
    pub fn status<K: Resource<DynamicType = ()>>(
        key: Key,
        status: &impl Serialize,
        manager: &'static str,
    ) -> Self {
        let target = Target::of::<K>(key);
        let mut body = json!({
            "apiVersion": target.resource.api_version,
            "kind": target.resource.kind,
            "metadata": { "name": target.key.name() },
            "status": to_value(status),
        });
        if let Some(namespace) = target.key.namespace() {
            body["metadata"]["namespace"] = namespace.into();
        }
        Self { target, operation: Operation::Apply { body, part: Part::Status, manager } }
    }

    /// Changes single fields (JSON merge patch). With `metadata.resourceVersion` in the patch, only that
    /// version.
    #[must_use]
    pub fn merge<K: Resource<DynamicType = ()>>(key: Key, patch: Value) -> Self {
        Self { target: Target::of::<K>(key), operation: Operation::Merge { patch, part: Part::Whole } }
    }

    /// Changes single fields of the status (JSON merge patch); the patch has `status` in it.
    #[must_use]
    pub fn merge_status<K: Resource<DynamicType = ()>>(key: Key, patch: Value) -> Self {
        Self { target: Target::of::<K>(key), operation: Operation::Merge { patch, part: Part::Status } }
    }

    /// Deletes the object. That it is gone already is no failure.
    #[must_use]
    pub fn delete<K: Resource<DynamicType = ()>>(key: Key) -> Self {
        Self { target: Target::of::<K>(key), operation: Operation::Delete { uid: None, version: None } }
    }

    /// Deletes the object, but not another one that has the same name by now.
    #[must_use]
    pub fn delete_uid<K: Resource<DynamicType = ()>>(key: Key, uid: impl Into<String>) -> Self {
        let operation = Operation::Delete { uid: Some(uid.into()), version: None };
        Self { target: Target::of::<K>(key), operation }
    }

    /// Makes or renews a Lease: `holder` is alive now, and should be taken for gone after `duration`.
    #[must_use]
    pub fn lease(
        namespace: &str,
        name: &str,
        holder: &str,
        duration: Duration,
        now: Timestamp,
        manager: &'static str,
    ) -> Self {
        let target = Target::of::<Lease>(Key::namespaced(namespace, name));
        let body = json!({
            "apiVersion": target.resource.api_version,
            "kind": target.resource.kind,
            "metadata": { "name": name, "namespace": namespace },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": duration.as_secs(),
                "renewTime": format!("{now:.6}"),
            },
        });
        Self { target, operation: Operation::Apply { body, part: Part::Whole, manager } }
    }

    /// Sets a Node's condition NetworkUnavailable. `since` is when it last changed; other conditions are left
    /// alone.
    #[must_use]
    pub fn node_network_unavailable(
        node: &str,
        unavailable: bool,
        reason: &str,
        message: &str,
        since: Timestamp,
        manager: &'static str,
    ) -> Self {
        let condition = json!({
            "type": "NetworkUnavailable",
            "status": if unavailable { "True" } else { "False" },
            "reason": reason,
            "message": message,
            "lastTransitionTime": format!("{since:.0}"),
        });
        Self::status::<Node>(Key::cluster(node), &json!({ "conditions": [condition] }), manager)
    }

    /// Only to this version of the object: if another is there, the write fails with
    /// [`crate::Error::Conflict`]. In a folder, where there are no versions, it changes nothing.
    #[must_use]
    pub fn if_version(mut self, resource_version: &str) -> Self {
        match &mut self.operation {
            Operation::Replace(body)
            | Operation::Apply { body, .. }
            | Operation::Merge { patch: body, .. } => {
                body["metadata"]["resourceVersion"] = resource_version.into();
            }
            Operation::Delete { version, .. } => *version = Some(resource_version.to_owned()),
            // What is to be made has no version yet.
            Operation::Create(_) => {}
        }
        self
    }

    /// Only to the object with this uid: if another one has its name by now, the write fails. In a folder,
    /// where objects have none, it changes nothing.
    #[must_use]
    pub fn if_uid(mut self, uid: &str) -> Self {
        match &mut self.operation {
            Operation::Replace(body)
            | Operation::Apply { body, .. }
            | Operation::Merge { patch: body, .. } => body["metadata"]["uid"] = uid.into(),
            Operation::Delete { uid: only, .. } => *only = Some(uid.to_owned()),
            Operation::Create(_) => {}
        }
        self
    }

    /// The object goes when this Node goes. Says nothing of others' owner references.
    #[must_use]
    pub fn owned_by_node(mut self, name: &str, uid: &str) -> Self {
        if let Operation::Create(body) | Operation::Replace(body) | Operation::Apply { body, .. } =
            &mut self.operation
        {
            body["metadata"]["ownerReferences"] =
                json!([{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": uid }]);
        }
        self
    }

    /// The object that is written.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The verb that a role must allow.
    #[must_use]
    pub fn verb(&self) -> &'static str {
        match self.operation {
            Operation::Create(_) => "create",
            Operation::Replace(_) => "update",
            Operation::Apply { .. } | Operation::Merge { .. } => "patch",
            Operation::Delete { .. } => "delete",
        }
    }

    pub(crate) fn attempt(&self) -> Box<Attempt> {
        let mut attempt = Attempt::new(self.verb(), &self.target.resource, Some(&self.target.key));
        attempt.status = matches!(
            self.operation,
            Operation::Apply { part: Part::Status, .. } | Operation::Merge { part: Part::Status, .. }
        );
        attempt
    }

    fn whole<K>(object: &K, operation: impl FnOnce(Value) -> Operation) -> Self
    where
        K: Resource<DynamicType = ()> + Serialize,
    {
        let target = Target::of::<K>(Key::of(object));
        let mut body = to_value(object);
        if let Some(map) = body.as_object_mut() {
            // Types of k8s-openapi write these themselves; those of others may not.
            map.entry("apiVersion").or_insert_with(|| target.resource.api_version.clone().into());
            map.entry("kind").or_insert_with(|| target.resource.kind.clone().into());
        }
        if let Some(meta) = body.get_mut("metadata").and_then(Value::as_object_mut) {
            // An apply with these is refused, and every other write ignores them.
            meta.remove("managedFields");
        }
        Self { target, operation: operation(body) }
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.attempt())?;
        match &self.operation {
            Operation::Create(body)
            | Operation::Replace(body)
            | Operation::Apply { body, part: Part::Whole, .. } => {
                body.get("spec").map_or(Ok(()), |spec| write!(f, " spec={spec}"))
            }
            Operation::Apply { body, part: Part::Status, .. } => {
                body.get("status").map_or(Ok(()), |status| write!(f, " status={status}"))
            }
            Operation::Merge { patch, .. } => write!(f, " {patch}"),
            Operation::Delete { .. } => Ok(()),
        }
    }
}

/// API types are plain data: they always have a JSON form.
fn to_value(object: &impl Serialize) -> Value {
    serde_json::to_value(object).unwrap_or_else(|error| {
        tracing::error!(%error, "an object has no JSON form");
        Value::Null
    })
}
