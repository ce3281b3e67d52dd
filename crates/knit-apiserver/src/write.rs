//! Writing to the store: create, update, the four patches, binding, deletion. Each reads the current version,
//! makes the new one outside the lock, and stores it if nobody was faster.

use std::sync::Arc;

use serde_json::{Value, json};

use super::admission::{self, FieldValidation, Part};
use super::apply::{self, Writer};
use super::event::to_core_v1;
use super::kinds::{CrdError, Kind};
use super::object::{Object, finalizers, meta, meta_mut};
use super::patch::{self, PatchType};
use super::service;
use super::state::{Deletion, Key, Propagation, State};
use super::status::{ApiError, Cause, Result};
use super::store::{List, ListParams, Store, from_stored, seconds};

/// How a write is to be done.
#[derive(Debug, Clone, Default)]
pub struct WriteOptions {
    /// The field manager; `knit-lab` where it is empty.
    pub manager: String,
    /// Check everything and store nothing.
    pub dry_run: bool,
    /// What to do about unknown fields.
    pub validation: FieldValidation,
    /// Server-side apply takes fields away from others.
    pub force: bool,
    /// What the write may change.
    pub part: Part,
}

/// What must be true of an object for it to be deleted, and how.
#[derive(Debug, Clone, Default)]
pub struct DeleteOptions {
    /// The grace of a pod.
    pub grace: Option<i64>,
    /// Leave dependents behind.
    pub orphan: bool,
    /// Only this very object.
    pub uid: Option<String>,
    /// Only this version.
    pub resource_version: Option<String>,
    /// Delete nothing.
    pub dry_run: bool,
}

/// A write that was done.
#[derive(Debug, Clone)]
pub struct Written {
    /// The object as it is now.
    pub object: Arc<Object>,
    /// Whether it is new.
    pub created: bool,
    /// What the writer should know.
    pub warnings: Vec<String>,
}

impl Store {
    fn writer(&self, kind: &Kind, options: &WriteOptions) -> Writer {
        let manager = if options.manager.is_empty() { "knit-lab" } else { &options.manager };
        Writer {
            manager: manager.to_owned(),
            api_version: kind.api_version(),
            subresource: options.part.subresource(),
            time: seconds(self.now()),
        }
    }

    /// Creates an object whose kind and namespace it says itself.
    pub fn create_object(&self, value: Value) -> Result<Arc<Object>> {
        let kind = self.kind_of(&value)?;
        let namespace = meta(&value, "namespace").to_owned();
        let options = WriteOptions { validation: FieldValidation::Strict, ..WriteOptions::default() };
        Ok(self.create(&kind, &namespace, value, &options)?.object)
    }

    /// Creates an object.
    pub fn create(
        &self,
        kind: &Kind,
        namespace: &str,
        value: Value,
        options: &WriteOptions,
    ) -> Result<Written> {
        let mut warnings = Vec::new();
        let mut value = value;
        self.check_identity(kind, &mut value, namespace, None)?;
        if !meta(&value, "resourceVersion").is_empty() {
            return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
        }
        admission::drop_unknown(kind, &mut value, options.validation, &mut warnings)
            .map_err(|why| undecodable(kind, &why))?;
        self.create_clean(kind, value, options, false, warnings)
    }

    fn create_clean(
        &self,
        kind: &Kind,
        mut value: Value,
        options: &WriteOptions,
        applied: bool,
        warnings: Vec<String>,
    ) -> Result<Written> {
        let writer = self.writer(kind, options);
        let generated = meta(&value, "name").is_empty() && !meta(&value, "generateName").is_empty();
        if generated {
            let prefix = meta(&value, "generateName").to_owned();
            meta_mut(&mut value).insert("name".into(), format!("{prefix}{}", random_suffix()).into());
        }
        let uid = uuid::Uuid::new_v4().to_string();
        admission::for_create(kind, &mut value, &writer, &uid, applied)?;
        if kind.is("apiextensions.k8s.io", "CustomResourceDefinition") && !options.dry_run {
            let name = meta(&value, "name");
            if self.get(kind, "", name).is_ok() {
                return Err(ApiError::already_exists(kind, name));
            }
            self.register_crd(&value).map_err(|error| crd_refused(&error))?;
        }
        let mut stored = to_stored(kind, value);
        let key = (meta(&stored, "namespace").to_owned(), meta(&stored, "name").to_owned());

        let mut state = self.lock();
        if kind.namespaced {
            check_namespace(&state, kind, &key)?;
        }
        if state.get(kind.table, &key).is_some() {
            return Err(ApiError::already_exists(kind, &key.1));
        }
        if kind.table == state.known.services {
            service::allocate(&mut state, &mut stored, None, options.dry_run)
                .map_err(|causes| ApiError::invalid(kind, &key.1, &causes))?;
        }
        if options.dry_run {
            let object = Arc::new(Object::unversioned(stored));
            return Ok(Written { object, created: true, warnings });
        }
        let object = state.put(kind.table, stored);
        if state.is_ownerless(&object.value) {
            // Its owners are gone already: the garbage collector of a real cluster takes it away as well.
            state.delete(kind.table, &key, Deletion::default(), self.now());
        }
        Ok(Written { object, created: true, warnings })
    }

    /// Replaces an object.
    pub fn update(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        value: Value,
        options: &WriteOptions,
    ) -> Result<Written> {
        let mut value = value;
        self.check_identity(kind, &mut value, namespace, Some(name))?;
        let mut warnings = Vec::new();
        admission::drop_unknown(kind, &mut value, options.validation, &mut warnings)
            .map_err(|why| undecodable(kind, &why))?;
        let mut written = self.modify(kind, namespace, name, options, false, |_| Ok(value.clone()))?;
        written.warnings = warnings;
        Ok(written)
    }

    /// Patches an object, in any of the four ways; server-side apply creates it where it is missing.
    pub fn patch(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        patch: &Value,
        patch_type: PatchType,
        options: &WriteOptions,
    ) -> Result<Written> {
        if patch_type == PatchType::Strategic && kind.custom().is_some() {
            return Err(ApiError::unsupported_media_type(
                "the body of the request was in an unknown format - accepted media types include: \
                 application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
            ));
        }
        if patch_type == PatchType::Apply {
            return self.apply(kind, namespace, name, patch, options);
        }
        let mut warnings = Vec::new();
        let mut written = self.modify(kind, namespace, name, options, false, |current| {
            warnings.clear();
            let mut new = patch::patched(current, patch, patch_type, &kind.shape)?;
            self.check_identity(kind, &mut new, namespace, Some(name))?;
            admission::drop_unknown(kind, &mut new, options.validation, &mut warnings)
                .map_err(|why| ApiError::invalid_patch(&new, &why))?;
            let uid = meta(&new, "uid");
            if !uid.is_empty() && uid != meta(current, "uid") {
                let cause = Cause::invalid("metadata.uid", &json!(uid), "field is immutable");
                return Err(ApiError::invalid(kind, name, &[cause]));
            }
            Ok(new)
        })?;
        written.warnings = warnings;
        Ok(written)
    }

    fn apply(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        config: &Value,
        options: &WriteOptions,
    ) -> Result<Written> {
        if options.manager.is_empty() {
            let cause = Cause::required("fieldManager", "is required for apply patch");
            return Err(ApiError::invalid_options("PatchOptions", &cause));
        }
        let text = |field: &str| config[field].as_str().unwrap_or("");
        if text("kind").is_empty() || text("apiVersion").is_empty() {
            let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
            let why = format!("invalid object type: {group}/{version}, Kind={}", text("kind"));
            return Err(ApiError::bad_request(why));
        }
        let mut config = config.clone();
        self.check_identity(kind, &mut config, namespace, Some(name))?;
        if config["metadata"].get("managedFields").is_some_and(|list| !list.is_null()) {
            return Err(ApiError::bad_request("metadata.managedFields must be nil"));
        }
        // Whatever the request says about unknown fields, an apply cannot own them.
        let unknown = match admission::take_unknown(kind, &mut config) {
            Ok(unknown) => unknown.first().map(|path| format!(".{path}: field not declared in schema")),
            Err(why) => Some(why),
        };
        if let Some(why) = unknown {
            let (group, namespace) = (&kind.group, meta(&config, "namespace"));
            let of = format!("{namespace}/{name}; {group}/{}, Kind={}", kind.version, kind.kind);
            return Err(ApiError::new(500, "", format!("failed to create typed patch object ({of}): {why}")));
        }
        if kind.status
            && let Some(map) = config.as_object_mut()
        {
            if options.part == Part::Status {
                map.retain(|field, _| {
                    matches!(field.as_str(), "apiVersion" | "kind" | "metadata" | "status")
                });
            } else {
                map.remove("status");
            }
        }
        if let Some(number) = config["metadata"].get("resourceVersion").cloned() {
            // A precondition, not a field to own.
            let current = self.get(kind, namespace, name)?;
            if number != json!(current.rv.to_string()) {
                return Err(conflict(kind, name));
            }
            meta_mut(&mut config).remove("resourceVersion");
        }
        let writer = self.writer(kind, options);
        loop {
            let applied = self.modify(kind, namespace, name, options, true, |current| {
                apply::apply(Some(current), &config, &kind.shape, &writer, options.force)
            });
            match applied {
                Err(error) if error.reason == "NotFound" && options.part == Part::Main => {
                    if !meta(&config, "uid").is_empty() {
                        return Err(conflict(kind, name));
                    }
                    let value = apply::apply(None, &config, &kind.shape, &writer, options.force)?;
                    match self.create_clean(kind, value, options, true, Vec::new()) {
                        Err(error) if error.reason == "AlreadyExists" => {}
                        other => return other,
                    }
                }
                other => return other,
            }
        }
    }

    /// Changes an object: reads it, lets `change` make the new version, checks that, and stores it unless
    /// somebody else was faster; then it begins again, so that only a resourceVersion that the writer named
    /// can conflict.
    pub fn modify(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        options: &WriteOptions,
        applied: bool,
        mut change: impl FnMut(&Value) -> Result<Value>,
    ) -> Result<Written> {
        let writer = self.writer(kind, options);
        let key = (namespace.to_owned(), name.to_owned());
        loop {
            let current = self.get(kind, namespace, name)?;
            let before = from_stored(kind, &current.value);
            let mut new = change(&before)?;
            let named = meta(&new, "resourceVersion");
            if !named.is_empty() && named != current.rv.to_string() {
                return Err(conflict(kind, name));
            }
            let uid = meta(&new, "uid");
            if !uid.is_empty() && uid != current.uid() {
                let why = format!(
                    "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                    current.uid()
                );
                return Err(ApiError::conflict(kind, name, &why));
            }
            admission::for_update(kind, &before, &mut new, options.part, &writer, applied)?;
            if new == *before {
                return Ok(Written { object: current, created: false, warnings: Vec::new() });
            }
            let mut stored = to_stored(kind, new);
            let mut state = self.lock();
            if state.get(kind.table, &key).map(|object| object.rv) != Some(current.rv) {
                continue;
            }
            if kind.table == state.known.services {
                service::allocate(&mut state, &mut stored, Some(&current.value), options.dry_run)
                    .map_err(|causes| ApiError::invalid(kind, name, &causes))?;
            }
            if options.dry_run {
                let object = Arc::new(Object::new(stored, current.rv));
                return Ok(Written { object, created: false, warnings: Vec::new() });
            }
            if kind.is("apiextensions.k8s.io", "CustomResourceDefinition") {
                drop(state);
                self.register_crd(&stored).map_err(|error| crd_refused(&error))?;
                state = self.lock();
            }
            let released = current.is_deleting()
                && finalizers(&current.value).next().is_some()
                && finalizers(&stored).next().is_none()
                && stored["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) == 0
                && kind.table != state.known.namespaces;
            let object =
                if released { state.remove(kind.table, &key, stored) } else { state.put(kind.table, stored) };
            return Ok(Written { object, created: false, warnings: Vec::new() });
        }
    }

    /// Gives a pod its node, as a scheduler does through the binding subresource.
    pub fn bind(&self, namespace: &str, name: &str, node: &str, options: &WriteOptions) -> Result<Written> {
        let kind = self.kind("v1", "Pod")?;
        let options = WriteOptions { part: Part::Binding, ..options.clone() };
        let time = seconds(self.now());
        self.modify(&kind, namespace, name, &options, false, |pod| {
            if !pod["spec"]["nodeName"].as_str().unwrap_or("").is_empty() {
                let why = format!("pod {name} is already assigned to node {}", pod["spec"]["nodeName"]);
                return Err(ApiError::conflict(&kind, name, &why));
            }
            let patch = json!({"spec": {"nodeName": node}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "True", "lastProbeTime": null,
                    "lastTransitionTime": time}]}});
            patch::patched(pod, &patch, PatchType::Strategic, &kind.shape)
        })
    }

    /// Deletes an object. The flag says whether it is gone at once.
    pub fn delete(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<(Arc<Object>, bool)> {
        let key = (namespace.to_owned(), name.to_owned());
        let mut state = self.lock();
        let object = state.get(kind.table, &key).cloned().ok_or_else(|| ApiError::not_found(kind, name))?;
        if let Some(uid) = options.uid.as_ref().filter(|uid| *uid != object.uid()) {
            let why = format!(
                "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                object.uid()
            );
            return Err(ApiError::conflict(kind, name, &why));
        }
        if let Some(wanted) = options.resource_version.as_ref().filter(|rv| **rv != object.rv.to_string()) {
            let why = format!(
                "Precondition failed: ResourceVersion in precondition: {wanted}, ResourceVersion in object \
                 meta: {}",
                object.rv
            );
            return Err(ApiError::conflict(kind, name, &why));
        }
        if kind.table == state.known.namespaces && matches!(name, "default" | "kube-system" | "kube-public") {
            return Err(ApiError::forbidden(kind, name, "this namespace may not be deleted"));
        }
        if options.dry_run {
            return Ok((object, true));
        }
        let propagation = if options.orphan { Propagation::Orphan } else { Propagation::Background };
        let deletion = Deletion { grace: options.grace, propagation };
        let done = state.delete(kind.table, &key, deletion, self.now());
        drop(state);
        if kind.is("apiextensions.k8s.io", "CustomResourceDefinition") {
            self.drop_crd(&object.value);
        }
        done.ok_or_else(|| ApiError::not_found(kind, name))
    }

    /// Deletes everything that a list selects.
    pub fn delete_collection(
        &self,
        kind: &Kind,
        params: &ListParams,
        options: &DeleteOptions,
    ) -> Result<List> {
        let list = self.list(kind, params)?;
        for object in &list.items {
            match self.delete(kind, object.namespace(), object.name(), options) {
                Err(error) if error.reason == "NotFound" => {}
                other => {
                    other?;
                }
            }
        }
        Ok(list)
    }

    fn drop_crd(&self, crd: &Value) {
        let Some(kind) = self.unregister_crd(crd) else { return };
        let mut state = self.lock();
        let keys: Vec<Key> = state.range(kind.table, None, None).map(|(key, _)| key.clone()).collect();
        for key in keys {
            state.delete(kind.table, &key, Deletion::default(), self.now());
        }
    }

    /// Makes kind, apiVersion, name and namespace of a body agree with its path.
    fn check_identity(
        &self,
        kind: &Kind,
        value: &mut Value,
        namespace: &str,
        name: Option<&str>,
    ) -> Result<()> {
        if !value.is_object() {
            return Err(ApiError::bad_request("the object provided is not a JSON object"));
        }
        for (field, wanted) in [("kind", kind.kind.clone()), ("apiVersion", kind.api_version())] {
            match value[field].as_str() {
                None | Some("") => value[field] = json!(wanted),
                Some(given) if given != wanted => {
                    return Err(ApiError::bad_request(format!(
                        "the {field} in the data ({given}) does not match the expected one ({wanted})"
                    )));
                }
                Some(_) => {}
            }
        }
        let metadata = meta_mut(value);
        let given = metadata.get("namespace").and_then(Value::as_str).unwrap_or("").to_owned();
        if kind.namespaced {
            if namespace.is_empty() {
                return Err(ApiError::bad_request("an empty namespace may not be set during creation"));
            }
            if !given.is_empty() && given != namespace {
                return Err(ApiError::bad_request(format!(
                    "the namespace of the provided object does not match the namespace sent on the request \
                     ({given}, {namespace})"
                )));
            }
            metadata.insert("namespace".into(), namespace.into());
        } else {
            metadata.remove("namespace");
        }
        let Some(name) = name else { return Ok(()) };
        match metadata.get("name").and_then(Value::as_str) {
            None | Some("") => {
                metadata.insert("name".into(), name.into());
            }
            Some(given) if given != name => {
                return Err(ApiError::bad_request(format!(
                    "the name of the object ({given}) does not match the name on the URL ({name})"
                )));
            }
            Some(_) => {}
        }
        Ok(())
    }
}

fn to_stored(kind: &Kind, value: Value) -> Value {
    if kind.is_events_v1() { to_core_v1(&value) } else { value }
}

fn undecodable(kind: &Kind, why: &str) -> ApiError {
    let Kind { kind, version, .. } = kind;
    ApiError::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {why}"))
}

fn conflict(kind: &Kind, name: &str) -> ApiError {
    ApiError::conflict(
        kind,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )
}

fn crd_refused(error: &CrdError) -> ApiError {
    ApiError::new(422, "Invalid", knit_types::chain(error))
}

fn check_namespace(state: &State, kind: &Kind, key: &Key) -> Result<()> {
    let namespace = state.get(state.known.namespaces, &(String::new(), key.0.clone()));
    match namespace {
        None => {
            let mut error = ApiError::new(404, "NotFound", format!("namespaces {:?} not found", key.0));
            error.details = Some(Box::new(json!({"name": key.0, "kind": "namespaces"})));
            Err(error)
        }
        Some(object) if object.is_deleting() => {
            let why =
                format!("unable to create new content in namespace {} because it is being terminated", key.0);
            let mut error = ApiError::forbidden(kind, &key.1, &why);
            if let Some(details) = &mut error.details {
                details["causes"] = json!([{"reason": "NamespaceTerminating", "message": format!("namespace \
                    {} is being terminated", key.0), "field": "metadata.namespace"}]);
            }
            Err(error)
        }
        Some(_) => Ok(()),
    }
}

fn random_suffix() -> String {
    // The letters that Kubernetes uses: no vowels, so that no words arise.
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    uuid::Uuid::new_v4().as_bytes()[..5]
        .iter()
        .map(|byte| LETTERS[usize::from(*byte) % LETTERS.len()] as char)
        .collect()
}
