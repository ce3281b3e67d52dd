//! JSON patch, JSON merge patch and strategic merge patch.

use serde_json::{Map, Value};

use super::shape::{How, Shape};
use super::status::{ApiError, Result};

/// The kinds of patch, by their media type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchType {
    /// RFC 6902.
    Json,
    /// RFC 7386.
    Merge,
    /// Kubernetes' own.
    Strategic,
    /// Server-side apply.
    Apply,
}

impl PatchType {
    /// From the Content-Type of a request.
    pub fn of_content_type(text: &str) -> Option<Self> {
        match text.split(';').next().unwrap_or("").trim() {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            "application/apply-patch+yaml" | "application/apply-patch+json" => Some(Self::Apply),
            _ => None,
        }
    }
}

/// The patched value, for every type but [`PatchType::Apply`].
pub fn patched(base: &Value, patch: &Value, patch_type: PatchType, shape: &Shape) -> Result<Value> {
    let mut value = base.clone();
    match patch_type {
        PatchType::Json => {
            let operations: json_patch::Patch = serde_json::from_value(patch.clone()).map_err(|e| {
                let why = format!("this is not a JSON patch: {e}");
                if patch.is_array() { ApiError::new(422, "Invalid", why) } else { ApiError::bad_request(why) }
            })?;
            json_patch::patch(&mut value, &operations).map_err(|e| {
                ApiError::new(
                    422,
                    "Invalid",
                    format!("the server rejected our request due to an error in our request: {e}"),
                )
            })?;
        }
        PatchType::Merge => json_patch::merge(&mut value, patch),
        PatchType::Strategic => {
            let (Some(map), Some(patch)) = (value.as_object_mut(), patch.as_object()) else {
                return Err(ApiError::bad_request("a strategic merge patch must be a JSON object"));
            };
            merge_map(map, patch, shape)?;
        }
        PatchType::Apply => {
            return Err(ApiError::bad_request("an apply patch does not work on a single value"));
        }
    }
    Ok(value)
}

/// Whether a key of a patch steers the merge instead of being a field.
fn directive(key: &str) -> bool {
    key == "$patch"
        || key == "$retainKeys"
        || key.starts_with("$setElementOrder/")
        || key.starts_with("$deleteFromPrimitiveList/")
}

fn merge_map(base: &mut Map<String, Value>, patch: &Map<String, Value>, shape: &Shape) -> Result<()> {
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            *base = patch
                .iter()
                .filter(|(key, _)| !directive(key))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
            return Ok(());
        }
        Some("delete") => {
            base.clear();
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => {
            let why = format!(
                "unknown $patch directive {other:?} in a strategic merge patch: replace, delete or merge"
            );
            return Err(ApiError::bad_request(why));
        }
    }
    if let Some(keep) = patch.get("$retainKeys").and_then(Value::as_array) {
        base.retain(|key, _| keep.iter().any(|kept| kept == key));
    }
    for (key, value) in patch {
        if let Some(field) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(list), Some(gone)) =
                (base.get_mut(field).and_then(Value::as_array_mut), value.as_array())
            {
                list.retain(|item| !gone.contains(item));
            }
            continue;
        }
        if directive(key) {
            continue;
        }
        let below = shape.field(key);
        match (base.get_mut(key), value) {
            (_, Value::Null) => {
                base.remove(key);
            }
            (Some(Value::Object(old)), Value::Object(new)) => merge_map(old, new, below)?,
            (Some(Value::Array(old)), Value::Array(new)) => merge_list(old, new, below)?,
            (_, Value::Object(new)) => {
                let mut map = Map::new();
                merge_map(&mut map, new, below)?;
                base.insert(key.clone(), Value::Object(map));
            }
            (_, Value::Array(new)) => {
                let mut list = Vec::new();
                merge_list(&mut list, new, below)?;
                base.insert(key.clone(), Value::Array(list));
            }
            (_, scalar) => {
                base.insert(key.clone(), scalar.clone());
            }
        }
    }
    for (key, order) in patch {
        if let (Some(field), Some(order)) = (key.strip_prefix("$setElementOrder/"), order.as_array())
            && let Some(list) = base.get_mut(field).and_then(Value::as_array_mut)
        {
            sort_by_order(list, order, shape.field(field));
        }
    }
    Ok(())
}

fn merge_list(base: &mut Vec<Value>, patch: &[Value], shape: &Shape) -> Result<()> {
    let replace =
        patch.iter().any(|item| item["$patch"] == "replace" && item.as_object().map_or(0, Map::len) == 1);
    match &shape.how {
        How::Set if !replace => {
            for item in patch {
                if !base.contains(item) {
                    base.push(item.clone());
                }
            }
        }
        How::Map(keys) if !replace && !keys.is_empty() => {
            let key = &keys[0].name;
            for item in patch {
                let Some(fields) = item.as_object() else {
                    return Err(ApiError::bad_request(format!(
                        "an element of a list merged by {key:?} must be an object"
                    )));
                };
                let Some(id) = fields.get(key) else {
                    let why = format!("map: {item} does not contain declared merge key: {key}");
                    return Err(ApiError::new(500, "InternalError", why));
                };
                let position = base.iter().position(|old| old.get(key) == Some(id));
                if item["$patch"] == "delete" {
                    base.retain(|old| old.get(key) != Some(id));
                } else if let Some(Value::Object(old)) = position.map(|index| &mut base[index]) {
                    merge_map(old, fields, shape.item())?;
                } else {
                    let mut map = Map::new();
                    merge_map(&mut map, fields, shape.item())?;
                    base.push(Value::Object(map));
                }
            }
        }
        _ => *base = patch.iter().filter(|item| item.get("$patch").is_none()).cloned().collect(),
    }
    Ok(())
}

fn sort_by_order(list: &mut [Value], order: &[Value], shape: &Shape) {
    let rank = |item: &Value| match shape.keys().and_then(|keys| keys.first()) {
        Some(key) => order.iter().position(|o| o.get(&key.name) == item.get(&key.name)),
        None => order.iter().position(|o| o == item),
    };
    // Elements that the patch does not name keep their places behind the named ones.
    list.sort_by_key(|item| rank(item).unwrap_or(usize::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn strategic_merges_containers_by_name() {
        let shape = Shape::of_builtin("Pod");
        let base = json!({"spec": {"containers": [
            {"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b",
                "image": "1"}]}});
        let patch = json!({"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
            "containers": [
            {"name": "a", "image": "2", "env": [{"name": "Y", "value": "2"}]},
            {"name": "b", "$patch": "delete"}, {"name": "c", "image": "3"}]}});
        let out = patched(&base, &patch, PatchType::Strategic, &shape).unwrap();
        assert_eq!(
            out["spec"]["containers"],
            json!([
                {"name": "a", "image": "2", "env": [{"name": "X", "value": "1"}, {"name": "Y",
                    "value": "2"}]},
                {"name": "c", "image": "3"}
            ])
        );
    }

    #[test]
    fn strategic_directives() {
        let shape = Shape::of_builtin("Pod");
        let base = json!({"metadata": {"finalizers": ["a", "b"], "labels": {"x": "1", "y": "2"}},
            "spec": {"tolerations": [{"key": "a"}]}});
        let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "labels": {"x": null}},
            "spec": {"tolerations": [{"key": "b"}]}});
        let out = patched(&base, &patch, PatchType::Strategic, &shape).unwrap();
        assert_eq!(
            out,
            json!({"metadata": {"finalizers": ["b"], "labels": {"y": "2"}},
                "spec": {"tolerations": [{"key": "b"}]}})
        );
        let replace = json!({"metadata": {"labels": {"$patch": "replace", "z": "3"}}});
        let out = patched(&base, &replace, PatchType::Strategic, &shape).unwrap();
        assert_eq!(out["metadata"]["labels"], json!({"z": "3"}));
    }

    #[test]
    fn json_and_merge_patch() {
        let base = json!({"a": {"b": 1}, "l": [1]});
        let ops = json!([{"op": "test", "path": "/a/b", "value": 1}, {"op": "replace", "path": "/a/b",
            "value": 2}, {"op": "add", "path": "/l/-", "value": 2}]);
        let out = patched(&base, &ops, PatchType::Json, &Shape::default()).unwrap();
        assert_eq!(out, json!({"a": {"b": 2}, "l": [1, 2]}));
        let failing = json!([{"op": "test", "path": "/a/b", "value": 7}]);
        assert_eq!(patched(&base, &failing, PatchType::Json, &Shape::default()).unwrap_err().code, 422);
        let out = patched(&base, &json!({"a": null}), PatchType::Merge, &Shape::default()).unwrap();
        assert_eq!(out, json!({"l": [1]}));
    }
}
