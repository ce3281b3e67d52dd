//! What is written, when objects come from a folder: one file per object, in another folder. A file always is
//! a whole object; it is put in place by a rename, so a reader never sees half of one.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use knit_types::sync::Locked;
use kube::core::ApiResource;
use serde_json::{Map, Value, json};

use super::parse::{is_name, yaml_options};
use crate::error::{Error, Result};
use crate::key::{Target, resource_name};
use crate::write::{Operation, Part, Write};

/// The folder that is written to. It is made with the first write.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    folder: PathBuf,
    /// One write at a time: each reads what is there before.
    lock: Arc<Mutex<()>>,
}

/// So many events are kept.
const MAX_EVENTS: usize = 500;

// === impl Output ===

impl Output {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder, lock: Arc::default() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Carries out one write. Blocks on files, shortly.
    pub(crate) fn write(&self, write: &Write) -> Result<Value> {
        let attempt = || write.attempt();
        let name = self
            .file_name(&write.target)
            .ok_or_else(|| Error::Name { attempt: attempt(), name: write.target.key.to_string() })?;
        let path = self.folder.join(name);
        let failed = |source| Error::Output { attempt: attempt(), path: path.clone(), source };
        let _guard = self.lock.locked();
        let old = || read(&path).map_err(failed);
        let new = match &write.operation {
            Operation::Create(_) if old()?.is_some() => {
                return Err(Error::AlreadyExists { attempt: attempt() });
            }
            Operation::Create(body) | Operation::Replace(body) => body.clone(),
            Operation::Apply { body, part, .. } => applied(old()?, body, *part, &write.target),
            Operation::Merge { patch, .. } => {
                let mut object = old()?.unwrap_or_else(|| bare(&write.target));
                merge(&mut object, patch);
                object
            }
            Operation::Delete { .. } => {
                return match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
                    _ => Ok(Value::Null),
                };
            }
        };
        put(&path, &new).map_err(failed)?;
        if matches!(write.operation, Operation::Create(_)) && write.target.resource.kind == "Event" {
            self.forget_events().map_err(failed)?;
        }
        Ok(new)
    }

    /// All objects of a kind that were written. Blocks on files, shortly.
    pub(crate) fn list(&self, resource: &ApiResource) -> io::Result<Vec<Value>> {
        let start = format!("{}_", resource_name(resource));
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut objects = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&start) {
                objects.extend(read(&entry.path())?);
            }
        }
        Ok(objects)
    }

    /// An API server forgets events after an hour; here the oldest go when there are too many.
    fn forget_events(&self) -> io::Result<()> {
        let mut events = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("events.") {
                events.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        if events.len() > MAX_EVENTS {
            events.sort();
            for (_, path) in &events[..events.len() - MAX_EVENTS] {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// `networkattachments.knit.dev_blue_web-0.yaml`: an underscore is in no name.
    fn file_name(&self, target: &Target) -> Option<String> {
        let key = &target.key;
        if !is_name(key.name()) || !key.namespace().is_none_or(is_name) {
            return None;
        }
        let resource = resource_name(&target.resource);
        Some(match key.namespace() {
            Some(namespace) => format!("{resource}_{namespace}_{}.yaml", key.name()),
            None => format!("{resource}_{}.yaml", key.name()),
        })
    }
}

/// The object that an apply leaves: the part that it is about becomes what is applied.
fn applied(old: Option<Value>, body: &Value, part: Part, target: &Target) -> Value {
    let mut object = old.unwrap_or_else(|| bare(target));
    match part {
        Part::Status => object["status"] = body.get("status").cloned().unwrap_or_default(),
        Part::Whole => {
            let status = object.get("status").cloned();
            object = body.clone();
            if let Some(status) = status {
                object["status"] = status;
            }
        }
    }
    object
}

fn bare(target: &Target) -> Value {
    let mut object = json!({
        "apiVersion": target.resource.api_version,
        "kind": target.resource.kind,
        "metadata": { "name": target.key.name() },
    });
    if let Some(namespace) = target.key.namespace() {
        object["metadata"]["namespace"] = namespace.into();
    }
    object
}

/// JSON merge patch, RFC 7386.
pub(crate) fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    if let Value::Object(object) = object {
        for (key, value) in patch {
            if value.is_null() {
                object.remove(key);
            } else {
                merge(object.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Option<Value>> {
    match fs::read_to_string(path) {
        // A file that somebody broke by hand is written again.
        Ok(text) => Ok(serde_saphyr::from_str_with_options(&text, yaml_options()).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn put(path: &Path, object: &Value) -> io::Result<()> {
    let text = serde_saphyr::to_string(object).map_err(io::Error::other)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // A name of its own per process: two agents may share the folder by mistake.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let written = fs::File::create(&temporary).and_then(|mut file| file.write_all(text.as_bytes()));
    let placed = written.and_then(|()| fs::rename(&temporary, path));
    if placed.is_err() {
        // Nothing more can be done about the leftover than this.
        let _ = fs::remove_file(&temporary);
    }
    placed
}

#[cfg(test)]
mod tests {
    use knit_api::{Network, NetworkAttachment};

    use super::*;
    use crate::key::Key;

    fn written(output: &Output) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(output.folder())
            .expect("a folder")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn each_object_has_a_file_that_holds_it_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Output::new(folder.path().join("status"));
        let key = Key::namespaced("blue", "web-0");
        let mut object = NetworkAttachment::new(
            "web-0",
            knit_api::NetworkAttachmentSpec {
                pod: "web-0".into(),
                network: "blue".into(),
                ..Default::default()
            },
        );
        object.metadata.namespace = Some("blue".into());
        output.write(&Write::apply(&object, "test")).expect("apply");
        let status = Write::status::<NetworkAttachment>(key.clone(), &json!({"interface": "net1"}), "test");
        output.write(&status).expect("status");
        output.write(&Write::apply(&object, "test")).expect("apply again");
        assert_eq!(written(&output), ["networkattachments.knit.dev_blue_web-0.yaml"]);
        let text = fs::read_to_string(output.folder().join(&written(&output)[0])).expect("a file");
        let value: Value = serde_saphyr::from_str(&text).expect("yaml");
        assert_eq!(value["spec"]["pod"], "web-0");
        assert_eq!(value["status"]["interface"], "net1");
        assert!(matches!(output.write(&Write::create(&object)), Err(Error::AlreadyExists { .. })));
        let status =
            knit_api::NetworkAttachmentStatus { interface: Some("net2".into()), ..Default::default() };
        object.status = Some(status);
        let value = output.write(&Write::replace(&object)).expect("replace");
        assert_eq!(value["status"]["interface"], "net2");
        assert_eq!(read(&output.folder().join(&written(&output)[0])).expect("a file"), Some(value));
        output.write(&Write::delete::<NetworkAttachment>(key.clone())).expect("delete");
        output.write(&Write::delete::<NetworkAttachment>(key)).expect("delete again");
        assert!(written(&output).is_empty());
    }

    #[test]
    fn old_events_are_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Output::new(folder.path().join("status"));
        for i in 0..MAX_EVENTS + 20 {
            let mut event = k8s_openapi::api::events::v1::Event::default();
            event.metadata.namespace = Some("default".into());
            event.metadata.name = Some(format!("web.{i:05}"));
            output.write(&Write::create(&event)).expect("written");
        }
        let names = written(&output);
        assert_eq!(names.len(), MAX_EVENTS);
        assert_eq!(names.last().map(String::as_str), Some("events.events.k8s.io_default_web.00519.yaml"));
    }

    #[test]
    fn a_name_never_leaves_the_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Output::new(folder.path().join("status"));
        for name in ["../x", "", "a/b", ".hidden"] {
            let write = Write::merge::<Network>(Key::cluster(name), json!({"status": {}}));
            assert!(matches!(output.write(&write), Err(Error::Name { .. })), "{name}");
        }
        assert!(!output.folder().exists());
    }

    #[test]
    fn merge_patch_is_rfc_7386() {
        let mut object = json!({"a": {"b": 1, "c": [1]}, "d": 2});
        merge(&mut object, &json!({"a": {"b": null, "c": [2]}, "d": {"e": {"f": null, "g": 1}}}));
        assert_eq!(object, json!({"a": {"c": [2]}, "d": {"e": {"g": 1}}}));
    }
}
