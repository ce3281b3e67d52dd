//! Sets of fields, as `managedFields` records them (FieldsV1): who owns what, and what a write changed.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::shape::{How, Key, Shape, key_of};

/// A set of field paths as a tree. The path elements are written as FieldsV1 does: `f:name`,
/// `k:{"name":"x"}`, `v:"x"`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSet {
    /// Whether this very path is in the set.
    pub here: bool,
    /// What is below it.
    pub children: BTreeMap<String, FieldSet>,
}

/// Fields that nobody owns: identity, and what the server keeps.
const UNOWNED: &[&str] = &[
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "managedFields",
];

impl FieldSet {
    fn leaf() -> Self {
        Self { here: true, children: BTreeMap::new() }
    }

    /// Whether no path is in it.
    pub fn is_empty(&self) -> bool {
        !self.here && self.children.values().all(FieldSet::is_empty)
    }

    /// Reads FieldsV1.
    pub fn from_json(value: &Value) -> Self {
        fn read(value: &Value) -> FieldSet {
            let Some(map) = value.as_object() else { return FieldSet::leaf() };
            let children: BTreeMap<String, FieldSet> =
                map.iter().filter(|(key, _)| *key != ".").map(|(key, v)| (key.clone(), read(v))).collect();
            FieldSet { here: map.contains_key(".") || children.is_empty(), children }
        }
        let mut set = read(value);
        set.here = false;
        set
    }

    /// Writes FieldsV1.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        if self.here && !self.children.is_empty() {
            map.insert(".".to_owned(), Value::Object(Map::new()));
        }
        for (key, child) in &self.children {
            map.insert(key.clone(), child.to_json());
        }
        Value::Object(map)
    }

    /// Every field that an applied configuration names.
    pub fn of(value: &Value, shape: &Shape) -> Self {
        let mut set = Self::collect(value, shape, false);
        set.strip();
        set
    }

    /// All below a value. `containers` says whether non-empty maps and lists are members themselves, as they
    /// are when an update adds them, or only what is in them, as for an applied configuration.
    fn collect(value: &Value, shape: &Shape, containers: bool) -> Self {
        let mut set = Self { here: containers, children: BTreeMap::new() };
        match value {
            Value::Object(map) if !map.is_empty() && shape.how != How::Atomic => {
                for (name, child) in map {
                    set.children
                        .insert(format!("f:{name}"), Self::collect(child, shape.field(name), containers));
                }
            }
            Value::Array(items) if !items.is_empty() => match &shape.how {
                How::Map(keys) => {
                    for item in items {
                        let mut child = Self::collect(item, shape.item(), containers);
                        child.here = true;
                        set.children.insert(item_name(item, keys), child);
                    }
                }
                How::Set => {
                    for item in items {
                        set.children.insert(format!("v:{item}"), Self::leaf());
                    }
                }
                _ => set.here = true,
            },
            _ => set.here = true,
        }
        set
    }

    /// The fields of `new` that are not the same in `old`.
    pub fn changed(old: &Value, new: &Value, shape: &Shape) -> Self {
        let mut set = Self::diff(old, new, shape);
        set.strip();
        set
    }

    fn diff(old: &Value, new: &Value, shape: &Shape) -> Self {
        let mut set = Self::default();
        let mut put = |name: String, child: Self| {
            if !child.is_empty() {
                set.children.insert(name, child);
            }
        };
        match (old, new) {
            (Value::Object(before), Value::Object(after)) if shape.how != How::Atomic => {
                for (name, value) in after {
                    let shape = shape.field(name);
                    let child = match before.get(name) {
                        Some(old) => Self::diff(old, value, shape),
                        None => Self::collect(value, shape, true),
                    };
                    put(format!("f:{name}"), child);
                }
            }
            (Value::Array(before), Value::Array(after)) if shape.keys().is_some() => {
                let keys = shape.keys().unwrap_or_default();
                for item in after {
                    let key = key_of(item, keys);
                    let child = match before.iter().find(|old| key_of(old, keys) == key) {
                        Some(old) => Self::diff(old, item, shape.item()),
                        None => Self { here: true, ..Self::collect(item, shape.item(), true) },
                    };
                    put(item_name(item, keys), child);
                }
            }
            (Value::Array(before), Value::Array(after)) if shape.how == How::Set => {
                for item in after.iter().filter(|item| !before.contains(item)) {
                    put(format!("v:{item}"), Self::leaf());
                }
            }
            (before, after) => {
                if before != after {
                    return Self { here: true, ..Self::collect(after, shape, true) };
                }
            }
        }
        set
    }

    fn strip(&mut self) {
        self.here = false;
        self.children.remove("f:apiVersion");
        self.children.remove("f:kind");
        if let Some(metadata) = self.children.get_mut("f:metadata") {
            metadata.here = false;
            for field in UNOWNED {
                metadata.children.remove(&format!("f:{field}"));
            }
            if metadata.children.is_empty() {
                self.children.remove("f:metadata");
            }
        }
    }

    /// Adds the other set.
    pub fn add(&mut self, other: &FieldSet) {
        self.here |= other.here;
        for (key, child) in &other.children {
            self.children.entry(key.clone()).or_default().add(child);
        }
    }

    /// Takes the other set away.
    pub fn subtract(&mut self, other: &FieldSet) {
        self.here &= !other.here;
        for (key, child) in &other.children {
            if let Some(mine) = self.children.get_mut(key) {
                mine.subtract(child);
                if mine.is_empty() {
                    self.children.remove(key);
                }
            }
        }
    }

    /// What is in both.
    pub fn intersect(&self, other: &FieldSet) -> FieldSet {
        let children = self
            .children
            .iter()
            .filter_map(|(key, mine)| Some((key.clone(), mine.intersect(other.children.get(key)?))))
            .filter(|(_, child)| !child.is_empty())
            .collect();
        FieldSet { here: self.here && other.here, children }
    }

    /// Drops the paths that a value does not have (any more).
    pub fn keep_existing(&mut self, value: &Value, shape: &Shape) {
        self.children.retain(|key, child| match find(value, key, shape) {
            Some((value, shape)) => {
                child.keep_existing(value, shape);
                !child.is_empty()
            }
            None => false,
        });
    }

    /// The paths in words, such as `.spec.ports[port=80].name`.
    pub fn paths(&self) -> Vec<String> {
        fn walk(set: &FieldSet, prefix: &str, out: &mut Vec<String>) {
            if set.here {
                out.push(prefix.to_owned());
            }
            for (key, child) in &set.children {
                let step = if let Some(name) = key.strip_prefix("f:") {
                    format!(".{name}")
                } else if let Some(keys) = key.strip_prefix("k:") {
                    let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
                    let keys: Vec<String> =
                        keys.iter().map(|(name, value)| format!("{name}={value}")).collect();
                    format!("[{}]", keys.join(","))
                } else {
                    format!("[{}]", key.strip_prefix("v:").map_or(key.as_str(), |v| v))
                };
                walk(child, &format!("{prefix}{step}"), out);
            }
        }
        let mut out = Vec::new();
        walk(self, "", &mut out);
        out
    }

    /// Removes the fields of this set from a value. Maps and lists that this empties go too.
    pub fn remove_from(&self, value: &mut Value, shape: &Shape) {
        for (key, child) in &self.children {
            let whole = child.here;
            if let Some(name) = key.strip_prefix("f:") {
                let Some(map) = value.as_object_mut() else { continue };
                let Some(below) = map.get_mut(name) else { continue };
                child.remove_from(below, shape.field(name));
                let emptied = match below {
                    Value::Object(map) => map.is_empty(),
                    Value::Array(list) => list.is_empty(),
                    _ => true,
                };
                if emptied || (whole && child.children.is_empty()) {
                    map.remove(name);
                }
            } else if let Some(text) = key.strip_prefix("k:") {
                let (Some(list), Some(keys)) = (value.as_array_mut(), shape.keys()) else { continue };
                let wanted: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
                let Some(index) = list.iter().position(|item| key_of(item, keys) == wanted) else { continue };
                if whole {
                    list.remove(index);
                } else {
                    child.remove_from(&mut list[index], shape.item());
                }
            } else if let Some(text) = key.strip_prefix("v:")
                && let Some(list) = value.as_array_mut()
            {
                list.retain(|item| !is_value(item, text));
            }
        }
    }
}

/// Whether an element of a set is the one that a path element names.
fn is_value(item: &Value, text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|wanted| wanted == *item)
}

fn item_name(item: &Value, keys: &[Key]) -> String {
    format!("k:{}", Value::Object(key_of(item, keys)))
}

/// What a path element names in a value.
fn find<'a>(value: &'a Value, element: &str, shape: &'a Shape) -> Option<(&'a Value, &'a Shape)> {
    if let Some(name) = element.strip_prefix("f:") {
        return Some((value.get(name)?, shape.field(name)));
    }
    let list = value.as_array()?;
    if let Some(text) = element.strip_prefix("k:") {
        let keys = shape.keys()?;
        let wanted: Map<String, Value> = serde_json::from_str(text).ok()?;
        return Some((list.iter().find(|item| key_of(item, keys) == wanted)?, shape.item()));
    }
    let text = element.strip_prefix("v:")?;
    Some((list.iter().find(|item| is_value(item, text))?, shape.item()))
}
