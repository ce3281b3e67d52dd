//! What happens to an object between request and store: unknown fields, defaults, what the server sets
//! itself, validation. No I/O and no locks; what needs the store's state (addresses of Services) comes after.

use serde_json::{Map, Value, json};

use super::apply::{Writer, track_update};
use super::kinds::{Kind, Logic};
use super::object::{finalizers, is_deleting, meta, meta_mut};
use super::status::{ApiError, Cause, Result};
use super::{builtin, cel, names};

/// What to do about fields that the kind does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FieldValidation {
    /// Drop them silently.
    Ignore,
    /// Drop them and warn.
    #[default]
    Warn,
    /// Refuse the object.
    Strict,
}

/// Which part of an object a write may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// Everything but the status, where that is a subresource.
    #[default]
    Main,
    /// The status.
    Status,
    /// The node of a pod, through its binding.
    Binding,
}

impl Part {
    /// The name of the subresource in `managedFields`.
    pub fn subresource(self) -> Option<String> {
        match self {
            Self::Main => None,
            Self::Status => Some("status".to_owned()),
            Self::Binding => Some("binding".to_owned()),
        }
    }
}

/// Removes what the kind does not know, and says what that was; or why the value is none of this kind.
pub fn take_unknown(kind: &Kind, value: &mut Value) -> Result<Vec<String>, String> {
    match &kind.logic {
        Logic::Custom(custom) => {
            let mut unknown = custom.schema.prune(value);
            unknown.extend(unknown_metadata(value));
            Ok(unknown)
        }
        Logic::Builtin(builtin) => {
            let known = (builtin.round_trip)(value).map_err(|error| error.to_string())?;
            let mut unknown = Vec::new();
            without_unknown(value, &known, "", &mut unknown);
            Ok(unknown)
        }
    }
}

/// Removes what the kind does not know, and adds warnings; or says why the value is refused.
pub fn drop_unknown(
    kind: &Kind,
    value: &mut Value,
    mode: FieldValidation,
    warnings: &mut Vec<String>,
) -> Result<(), String> {
    let unknown = take_unknown(kind, value)?;
    if unknown.is_empty() || mode == FieldValidation::Ignore {
        return Ok(());
    }
    let words: Vec<String> = unknown.iter().map(|path| format!("unknown field {path:?}")).collect();
    if mode == FieldValidation::Strict {
        return Err(format!("strict decoding error: {}", words.join(", ")));
    }
    warnings.extend(words);
    Ok(())
}

/// Drops what `known`, the same value decoded and encoded again, does not have.
fn without_unknown(value: &mut Value, known: &Value, path: &str, unknown: &mut Vec<String>) {
    match (value, known) {
        (Value::Object(map), Value::Object(known)) => {
            map.retain(|name, child| {
                let keep = child.is_null() || known.contains_key(name);
                if !keep {
                    unknown.push(super::schema::field(path, name));
                }
                keep && !child.is_null()
            });
            for (name, child) in map.iter_mut() {
                without_unknown(child, &known[name], &super::schema::field(path, name), unknown);
            }
        }
        (Value::Array(list), Value::Array(known)) => {
            for (index, (child, known)) in list.iter_mut().zip(known).enumerate() {
                without_unknown(child, known, &format!("{path}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

fn unknown_metadata(value: &mut Value) -> Vec<String> {
    const KNOWN: &[&str] = &[
        "name",
        "generateName",
        "namespace",
        "selfLink",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "labels",
        "annotations",
        "ownerReferences",
        "finalizers",
        "managedFields",
    ];
    let mut unknown = Vec::new();
    meta_mut(value).retain(|name, child| {
        let keep = KNOWN.contains(&name.as_str());
        if !keep {
            unknown.push(format!("metadata.{name}"));
        }
        keep && !child.is_null()
    });
    unknown
}

fn set_or_remove(map: &mut Map<String, Value>, key: &str, value: Option<&Value>) {
    match value {
        Some(value) => {
            map.insert(key.to_owned(), value.clone());
        }
        None => {
            map.remove(key);
        }
    }
}

/// Makes an object ready to be created; its name is set already. `applied` tells that server-side apply made
/// it, which has written `managedFields` itself.
pub fn for_create(kind: &Kind, value: &mut Value, writer: &Writer, uid: &str, applied: bool) -> Result<()> {
    if kind.status && !(kind.is("", "Node")) {
        value.as_object_mut().map(|map| map.remove("status"));
    }
    {
        let metadata = meta_mut(value);
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"] {
            metadata.remove(field);
        }
        metadata.insert("uid".into(), uid.into());
        metadata.insert("creationTimestamp".into(), writer.time.clone().into());
        if kind.has_generation() {
            metadata.insert("generation".into(), 1.into());
        } else {
            metadata.remove("generation");
        }
    }
    fill_defaults(kind, value, None);
    validate(kind, value, None)?;
    if !applied {
        track_update(None, value, &kind.shape, writer);
    }
    Ok(())
}

/// Makes a new version of an object ready to be stored. The parts that this write may not touch are taken
/// from the current version.
pub fn for_update(
    kind: &Kind,
    current: &Value,
    new: &mut Value,
    part: Part,
    writer: &Writer,
    applied: bool,
) -> Result<()> {
    if part == Part::Status {
        let (status, metadata) = (new.get("status").cloned(), new["metadata"].clone());
        *new = current.clone();
        if let Some(map) = new.as_object_mut() {
            set_or_remove(map, "status", status.as_ref());
        }
        let mine = meta_mut(new);
        set_or_remove(mine, "managedFields", metadata.get("managedFields"));
        if kind.custom().is_none() {
            for field in ["labels", "annotations", "finalizers"] {
                set_or_remove(mine, field, metadata.get(field));
            }
        }
    } else if kind.status
        && part == Part::Main
        && let Some(map) = new.as_object_mut()
    {
        set_or_remove(map, "status", current.get("status"));
    }
    {
        let metadata = meta_mut(new);
        for field in [
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "resourceVersion",
            "generateName",
            "name",
            "namespace",
        ] {
            set_or_remove(metadata, field, current["metadata"].get(field));
        }
        if !applied && metadata.get("managedFields").is_none() {
            set_or_remove(metadata, "managedFields", current["metadata"].get("managedFields"));
        }
    }
    fill_defaults(kind, new, Some(current));
    if is_deleting(current) {
        let had: Vec<&str> = finalizers(current).collect();
        let added: Vec<&str> = finalizers(new).filter(|name| !had.contains(name)).collect();
        if !added.is_empty() {
            let why = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers \
                 {added:?}"
            );
            return Err(ApiError::invalid(
                kind,
                meta(new, "name"),
                &[Cause::forbidden("metadata.finalizers", &why)],
            ));
        }
    }
    validate(kind, new, Some(current))?;
    if part == Part::Main {
        builtin::check_pod_immutable(kind, current, new)?;
    }
    if kind.has_generation() && part != Part::Status && spec_changed(current, new) {
        let generation = current["metadata"]["generation"].as_i64().unwrap_or(1) + 1;
        meta_mut(new).insert("generation".into(), generation.into());
    }
    if !applied {
        track_update(Some(current), new, &kind.shape, writer);
    }
    Ok(())
}

fn spec_changed(old: &Value, new: &Value) -> bool {
    let rest = |value: &Value| -> Vec<(String, Value)> {
        let mut fields: Vec<(String, Value)> = value
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| *key != "metadata" && *key != "status")
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        fields
    };
    rest(old) != rest(new)
}

fn fill_defaults(kind: &Kind, value: &mut Value, old: Option<&Value>) {
    value["apiVersion"] = json!(kind.api_version());
    value["kind"] = json!(kind.kind);
    match &kind.logic {
        Logic::Custom(custom) => {
            custom.schema.drop_nulls(value);
            custom.schema.apply_defaults(value);
        }
        Logic::Builtin(_) => builtin::fill_defaults(kind, value, old),
    }
}

fn validate(kind: &Kind, value: &Value, old: Option<&Value>) -> Result<()> {
    let name = meta(value, "name");
    let mut causes = Vec::new();
    if old.is_none() {
        causes.extend(names::check_name(kind, name));
    }
    names::check_metadata(kind, value, &mut causes);
    match &kind.logic {
        Logic::Custom(custom) => {
            let wrong = custom.schema.validate(value);
            // Rules are written for values that have the shape that the schema says.
            let shapeless = wrong.iter().any(Cause::is_of_shape);
            causes.extend(wrong);
            if shapeless {
                causes.extend(custom.schema.has_rules().then(Cause::rules_not_checked));
            } else {
                causes.extend(cel::check(&custom.schema, value, old));
            }
        }
        Logic::Builtin(_) => builtin::validate(kind, value, old, &mut causes),
    }
    if causes.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, name, &causes)) }
}
