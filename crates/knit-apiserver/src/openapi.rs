//! `/openapi/v3`: schemas for `kubectl explain`, and the paths from which `kubectl` reads that fields are
//! validated by the server. Strategic merge patch is deliberately not among the media types: `kubectl` then
//! takes the merge keys that are built into it, not ones from these schemas, which have none.

use serde_json::{Map, Value, json};

use super::discovery::group_versions;
use super::kinds::{Kind, Logic, Registry};

/// `/openapi/v3`: where the document of each group and version is.
pub fn index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for (group, version) in group_versions(registry) {
        let path =
            if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") };
        paths.insert(path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}")}));
    }
    json!({ "paths": paths })
}

/// The document of one group and version.
pub fn document(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for kind in registry.all().iter().filter(|kind| kind.group == group && kind.version == version) {
        add_kind(kind, &mut paths, &mut schemas);
    }
    if paths.is_empty() {
        return None;
    }
    Some(json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": super::VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }))
}

/// `/openapi/v2`: an empty document; there is nothing in it that version 3 does not have.
pub fn v2() -> Value {
    json!({"swagger": "2.0", "info": {"title": "Kubernetes", "version": super::VERSION}, "paths": {},
        "definitions": {}})
}

fn add_kind(kind: &Kind, paths: &mut Map<String, Value>, schemas: &mut Map<String, Value>) {
    let gvk = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
    let (name, mut schema) = match &kind.logic {
        Logic::Custom(custom) => {
            let reversed: Vec<&str> = kind.group.split('.').rev().collect();
            (format!("{}.{}.{}", reversed.join("."), kind.version, kind.kind), custom.openapi.clone())
        }
        Logic::Builtin(builtin) => {
            let mut root = (builtin.schema)();
            if let Some(Value::Object(components)) =
                root.as_object_mut().and_then(|map| map.remove("components"))
                && let Some(Value::Object(found)) = components.get("schemas")
            {
                schemas.extend(found.clone());
            }
            let group =
                if kind.group.is_empty() { "core" } else { kind.group.split('.').next().unwrap_or("") };
            (format!("io.k8s.api.{group}.{}.{}", kind.version, kind.kind), root)
        }
    };
    schema["x-kubernetes-group-version-kind"] = json!([gvk]);
    schemas.insert(name.clone(), schema);
    let base = if kind.group.is_empty() {
        format!("/api/{}", kind.version)
    } else {
        format!("/apis/{}", kind.api_version())
    };
    let scope = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
    let query =
        |name: &str| json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}});
    let parameters =
        json!([query("dryRun"), query("fieldManager"), query("fieldValidation"), query("force")]);
    let content = json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{name}")}}});
    let operation = |action: &str, patch: bool| {
        let media = if patch {
            json!({"application/json-patch+json": {}, "application/merge-patch+json": {},
                "application/apply-patch+yaml": {}})
        } else {
            content.clone()
        };
        json!({"x-kubernetes-action": action, "x-kubernetes-group-version-kind": gvk,
            "parameters": parameters,
            "requestBody": {"content": media}, "responses": {"200": {"description": "OK",
                "content": content}}})
    };
    let read = json!({"x-kubernetes-action": "get", "x-kubernetes-group-version-kind": gvk,
        "responses": {"200": {"description": "OK", "content": content}}});
    paths.insert(
        format!("{base}{scope}/{}", kind.plural),
        json!({"get": read, "post": operation("post", false)}),
    );
    paths.insert(
        format!("{base}{scope}/{}/{{name}}", kind.plural),
        json!({"get": read, "put": operation("put", false), "patch": operation("patch", true)}),
    );
}
