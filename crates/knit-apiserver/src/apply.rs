//! Server-side apply, and the bookkeeping of `managedFields` for every other write.

use serde_json::{Map, Value, json};

use super::fields::FieldSet;
use super::object::meta_mut;
use super::shape::{How, Shape, key_of};
use super::status::{ApiError, Result};

/// Who writes, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writer {
    /// The field manager.
    pub manager: String,
    /// The apiVersion it writes with.
    pub api_version: String,
    /// `status` or another subresource, if the write goes there.
    pub subresource: Option<String>,
    /// The time of the write, RFC 3339 in seconds.
    pub time: String,
}

/// One entry of `managedFields`.
#[derive(Debug, Clone)]
struct Entry {
    manager: String,
    operation: String,
    api_version: String,
    subresource: Option<String>,
    time: Option<String>,
    fields: FieldSet,
}

impl Entry {
    fn is(&self, writer: &Writer, operation: &str) -> bool {
        self.manager == writer.manager
            && self.operation == operation
            && self.api_version == writer.api_version
            && self.subresource == writer.subresource
    }

    fn described(&self) -> String {
        match &self.subresource {
            Some(sub) => format!("{:?} with subresource {sub:?} using {}", self.manager, self.api_version),
            None if self.operation == "Update" => format!("{:?} using {}", self.manager, self.api_version),
            None => format!("{:?}", self.manager),
        }
    }
}

fn read(object: &Value) -> Vec<Entry> {
    let text = |entry: &Value, field: &str| entry[field].as_str().map(str::to_owned);
    object["metadata"]["managedFields"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|entry| Entry {
            manager: text(entry, "manager").unwrap_or_default(),
            operation: text(entry, "operation").unwrap_or_default(),
            api_version: text(entry, "apiVersion").unwrap_or_default(),
            subresource: text(entry, "subresource").filter(|sub| !sub.is_empty()),
            time: text(entry, "time"),
            fields: FieldSet::from_json(&entry["fieldsV1"]),
        })
        .collect()
}

fn write(object: &mut Value, mut entries: Vec<Entry>) {
    entries.retain(|entry| !entry.fields.is_empty());
    if entries.is_empty() {
        meta_mut(object).remove("managedFields");
        return;
    }
    entries.sort_by(|a, b| (&a.operation, &a.time, &a.manager).cmp(&(&b.operation, &b.time, &b.manager)));
    let list = entries
        .into_iter()
        .map(|entry| {
            let mut map = Map::new();
            map.insert("manager".into(), entry.manager.into());
            map.insert("operation".into(), entry.operation.into());
            map.insert("apiVersion".into(), entry.api_version.into());
            if let Some(time) = entry.time {
                map.insert("time".into(), time.into());
            }
            map.insert("fieldsType".into(), "FieldsV1".into());
            map.insert("fieldsV1".into(), entry.fields.to_json());
            if let Some(subresource) = entry.subresource {
                map.insert("subresource".into(), subresource.into());
            }
            Value::Object(map)
        })
        .collect();
    meta_mut(object).insert("managedFields".into(), Value::Array(list));
}

/// Records an update: what `new` changed belongs to its writer, and to nobody else any more. An explicit
/// `managedFields: [{}]` (or `[]`) in `new` empties the record first, as in a real server.
pub fn track_update(old: Option<&Value>, new: &mut Value, shape: &Shape, writer: &Writer) {
    let reset = new["metadata"]["managedFields"]
        .as_array()
        .is_some_and(|list| list.is_empty() || (list.len() == 1 && list[0] == json!({})));
    if reset {
        meta_mut(new).remove("managedFields");
        return;
    }
    let nothing = json!({});
    let before = old.unwrap_or(&nothing);
    let changed = FieldSet::changed(before, new, shape);
    let mut entries = old.map(read).unwrap_or_default();
    for entry in &mut entries {
        if !entry.is(writer, "Update") {
            entry.fields.subtract(&changed);
        }
        entry.fields.keep_existing(new, shape);
    }
    if !changed.is_empty() {
        let time = Some(writer.time.clone());
        match entries.iter_mut().find(|entry| entry.is(writer, "Update")) {
            Some(entry) => {
                entry.fields.add(&changed);
                entry.time = time;
            }
            None => entries.push(Entry {
                manager: writer.manager.clone(),
                operation: "Update".into(),
                api_version: writer.api_version.clone(),
                subresource: writer.subresource.clone(),
                time,
                fields: changed,
            }),
        }
    }
    write(new, entries);
}

/// Applies a configuration on top of what is there: the merged object, with the record of who owns what.
pub fn apply(
    live: Option<&Value>,
    applied: &Value,
    shape: &Shape,
    writer: &Writer,
    force: bool,
) -> Result<Value> {
    let mut applied = applied.clone();
    drop_nulls(&mut applied);
    meta_mut(&mut applied).remove("managedFields");
    let wanted = FieldSet::of(&applied, shape);
    let nothing = json!({});
    let before = live.unwrap_or(&nothing);
    let mut entries = live.map(read).unwrap_or_default();
    let mut merged = merge(before, &applied, shape);

    let changed = FieldSet::changed(before, &merged, shape);
    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|entry| !entry.is(writer, "Apply")) {
        let taken = entry.fields.intersect(&changed);
        if taken.is_empty() {
            continue;
        }
        if force {
            entry.fields.subtract(&taken);
        } else {
            let who = entry.described();
            conflicts.extend(taken.paths().into_iter().map(|path| (who.clone(), path)));
        }
    }
    if !conflicts.is_empty() {
        return Err(ApiError::apply_conflict(&conflicts));
    }

    // What this manager applied before and no longer names goes, unless somebody else owns it too.
    if let Some(mine) = entries.iter().find(|entry| entry.is(writer, "Apply")) {
        let mut gone = mine.fields.clone();
        gone.subtract(&wanted);
        for entry in entries.iter().filter(|entry| !entry.is(writer, "Apply")) {
            gone.subtract(&entry.fields);
            keep_parents(&mut gone, &entry.fields);
        }
        keep_parents(&mut gone, &wanted);
        gone.remove_from(&mut merged, shape);
    }

    let time = Some(writer.time.clone());
    match entries.iter_mut().find(|entry| entry.is(writer, "Apply")) {
        Some(entry) => {
            // The time moves only with the set, so that applying the same thing twice writes nothing.
            if entry.fields != wanted {
                entry.time = time;
            }
            entry.fields = wanted;
        }
        None => entries.push(Entry {
            manager: writer.manager.clone(),
            operation: "Apply".into(),
            api_version: writer.api_version.clone(),
            subresource: writer.subresource.clone(),
            time,
            fields: wanted,
        }),
    }
    for entry in &mut entries {
        entry.fields.keep_existing(&merged, shape);
    }
    write(&mut merged, entries);
    Ok(merged)
}

/// A path that holds something another set still wants is not to be removed as a whole.
fn keep_parents(gone: &mut FieldSet, wanted: &FieldSet) {
    for (key, child) in &wanted.children {
        if let Some(mine) = gone.children.get_mut(key) {
            mine.here = false;
            keep_parents(mine, child);
        }
    }
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, child| !child.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn merge(live: &Value, applied: &Value, shape: &Shape) -> Value {
    match (live, applied) {
        (Value::Object(before), Value::Object(after)) if shape.how != How::Atomic => {
            let mut out = before.clone();
            for (name, value) in after {
                let merged = match before.get(name) {
                    Some(old) => merge(old, value, shape.field(name)),
                    None => value.clone(),
                };
                out.insert(name.clone(), merged);
            }
            Value::Object(out)
        }
        (Value::Array(before), Value::Array(after)) if shape.keys().is_some() => {
            let keys = shape.keys().unwrap_or_default();
            let mut out = before.clone();
            for item in after {
                let key = key_of(item, keys);
                match out.iter_mut().find(|old| key_of(old, keys) == key) {
                    Some(old) => *old = merge(old, item, shape.item()),
                    None => out.push(item.clone()),
                }
            }
            Value::Array(out)
        }
        (Value::Array(before), Value::Array(after)) if shape.how == How::Set => {
            let mut out = before.clone();
            out.extend(after.iter().filter(|item| !before.contains(item)).cloned());
            Value::Array(out)
        }
        (_, after) => after.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(manager: &str) -> Writer {
        Writer {
            manager: manager.into(),
            api_version: "v1".into(),
            subresource: None,
            time: "2026-01-01T00:00:00Z".into(),
        }
    }

    #[test]
    fn two_managers_share_a_keyed_list_and_remove_only_their_own() {
        let shape = Shape::of_builtin("Service");
        let one = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80, "name": "a"}]}});
        let two = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 81, "name": "b"}]}});
        let live = apply(None, &one, &shape, &writer("one"), false).unwrap();
        let live = apply(Some(&live), &two, &shape, &writer("two"), false).unwrap();
        assert_eq!(live["spec"]["ports"].as_array().unwrap().len(), 2);
        let none = json!({"metadata": {"name": "s"}, "spec": {"type": "ClusterIP"}});
        let live = apply(Some(&live), &none, &shape, &writer("one"), false).unwrap();
        assert_eq!(live["spec"], json!({"ports": [{"port": 81, "name": "b"}], "type": "ClusterIP"}));
    }

    #[test]
    fn a_conflict_names_manager_and_field_and_force_takes_it() {
        let shape = Shape::default();
        let one = json!({"metadata": {"name": "c"}, "data": {"k": "1"}});
        let two = json!({"metadata": {"name": "c"}, "data": {"k": "2"}});
        let live = apply(None, &one, &shape, &writer("one"), false).unwrap();
        let error = apply(Some(&live), &two, &shape, &writer("two"), false).unwrap_err();
        assert_eq!(error.code, 409);
        assert_eq!(error.message, "Apply failed with 1 conflict: conflict with \"one\": .data.k");
        let live = apply(Some(&live), &two, &shape, &writer("two"), true).unwrap();
        assert_eq!(live["data"]["k"], "2");
        let owners: Vec<&str> = live["metadata"]["managedFields"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["manager"].as_str().unwrap())
            .collect();
        assert_eq!(owners, ["two"]);
    }

    #[test]
    fn the_same_value_is_owned_by_both_and_survives_one_of_them() {
        let shape = Shape::default();
        let both = json!({"metadata": {"name": "c"}, "data": {"k": "1", "x": "1"}});
        let less = json!({"metadata": {"name": "c"}, "data": {"x": "1"}});
        let live = apply(None, &both, &shape, &writer("one"), false).unwrap();
        let live = apply(Some(&live), &both, &shape, &writer("two"), false).unwrap();
        let live = apply(Some(&live), &less, &shape, &writer("one"), false).unwrap();
        assert_eq!(live["data"], json!({"k": "1", "x": "1"}));
        let live = apply(Some(&live), &less, &shape, &writer("two"), false).unwrap();
        assert_eq!(live["data"], json!({"x": "1"}));
    }

    #[test]
    fn an_update_takes_the_changed_fields_from_their_owner() {
        let shape = Shape::default();
        let one = json!({"metadata": {"name": "c"}, "data": {"k": "1", "x": "1"}});
        let live = apply(None, &one, &shape, &writer("one"), false).unwrap();
        let mut new = live.clone();
        new["data"]["k"] = json!("9");
        track_update(Some(&live), &mut new, &shape, &writer("editor"));
        let error = apply(Some(&new), &one, &shape, &writer("one"), false).unwrap_err();
        assert_eq!(error.message, "Apply failed with 1 conflict: conflict with \"editor\" using v1: .data.k");
    }
}
