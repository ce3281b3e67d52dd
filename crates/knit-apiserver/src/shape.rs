//! How the lists and maps of a kind merge: by keys, as sets, or as one value. Strategic merge patch and
//! server-side apply both read it; CRDs give it in their schema, the built-in kinds in the table below.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// A key of a keyed list, and the value an element has where it does not say.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// The field.
    pub name: String,
    /// Its default.
    pub default: Option<Value>,
}

/// How a list or map merges.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum How {
    /// Maps: field by field. Lists: as one value.
    #[default]
    Plain,
    /// As one value.
    Atomic,
    /// A list of scalars that merges as a set.
    Set,
    /// A list of objects that merges by these keys.
    Map(Vec<Key>),
}

/// The merge rules of a value and of what is below it. Where nothing is said, maps merge by field and lists
/// are one value.
#[derive(Debug, Clone, Default)]
pub struct Shape {
    /// How this value merges.
    pub how: How,
    /// The fields that have rules of their own.
    pub fields: BTreeMap<String, Shape>,
    /// List elements, or the values of a map whose keys are free.
    pub each: Option<Box<Shape>>,
}

static PLAIN: Shape = Shape { how: How::Plain, fields: BTreeMap::new(), each: None };

impl Shape {
    /// The shape of a field.
    pub fn field(&self, name: &str) -> &Shape {
        self.fields.get(name).or(self.each.as_deref()).unwrap_or(&PLAIN)
    }

    /// The shape of list elements.
    pub fn item(&self) -> &Shape {
        self.each.as_deref().unwrap_or(&PLAIN)
    }

    /// The keys, if this is a keyed list.
    pub fn keys(&self) -> Option<&[Key]> {
        match &self.how {
            How::Map(keys) => Some(keys),
            _ => None,
        }
    }

    /// The shape of a CRD's schema.
    pub fn of_schema(schema: &Value) -> Shape {
        let mut shape = Shape::default();
        let items = &schema["items"];
        match schema["x-kubernetes-list-type"].as_str() {
            Some("set") => shape.how = How::Set,
            Some("map") => {
                let names = schema["x-kubernetes-list-map-keys"].as_array().cloned().unwrap_or_default();
                let key = |name: &str| Key {
                    name: name.to_owned(),
                    default: items["properties"][name].get("default").cloned(),
                };
                shape.how = How::Map(names.iter().filter_map(Value::as_str).map(key).collect());
            }
            _ if schema["x-kubernetes-map-type"] == "atomic" => shape.how = How::Atomic,
            _ => {}
        }
        if items.is_object() {
            shape.each = Some(Box::new(Shape::of_schema(items)));
        } else if schema["additionalProperties"].is_object() {
            shape.each = Some(Box::new(Shape::of_schema(&schema["additionalProperties"])));
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            shape.fields.insert(name.clone(), Shape::of_schema(property));
        }
        shape.add(METADATA, "");
        shape
    }

    /// The shape of a built-in kind.
    pub fn of_builtin(kind: &str) -> Shape {
        let mut shape = Shape::default();
        shape.add(METADATA, "");
        for (of, table) in BUILTIN {
            if *of == kind {
                shape.add(table, "");
            }
        }
        match kind {
            "Pod" => shape.add(POD_SPEC, "spec."),
            "Deployment" => shape.add(POD_SPEC, "spec.template.spec."),
            _ => {}
        }
        shape
    }

    fn add(&mut self, table: &[(&str, &str)], prefix: &str) {
        for (path, rule) in table {
            let mut node = &mut *self;
            let full = format!("{prefix}{path}");
            for part in full.split('.') {
                if matches!(node.how, How::Map(_)) {
                    node = node.each.get_or_insert_default();
                }
                node = node.fields.entry(part.to_owned()).or_default();
            }
            node.how = match *rule {
                "atomic" => How::Atomic,
                "set" => How::Set,
                keys => How::Map(
                    keys.split(',')
                        .map(|name| Key {
                            name: name.to_owned(),
                            default: (name == "protocol").then(|| json!("TCP")),
                        })
                        .collect(),
                ),
            };
        }
    }
}

/// The key fields of an element, with defaults, as server-side apply writes them.
pub fn key_of(item: &Value, keys: &[Key]) -> Map<String, Value> {
    let mut found: Vec<(String, Value)> = keys
        .iter()
        .filter_map(|key| {
            let value = item.get(&key.name).cloned().or_else(|| key.default.clone())?;
            Some((key.name.clone(), value))
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found.into_iter().collect()
}

const METADATA: &[(&str, &str)] = &[("metadata.finalizers", "set"), ("metadata.ownerReferences", "uid")];

/// Rules below a pod spec.
const POD_SPEC: &[(&str, &str)] = &[
    ("containers", "name"),
    ("containers.env", "name"),
    ("containers.ports", "containerPort,protocol"),
    ("containers.volumeMounts", "mountPath"),
    ("containers.volumeDevices", "devicePath"),
    ("containers.resources.claims", "name"),
    ("initContainers", "name"),
    ("initContainers.env", "name"),
    ("initContainers.ports", "containerPort,protocol"),
    ("initContainers.volumeMounts", "mountPath"),
    ("initContainers.volumeDevices", "devicePath"),
    ("initContainers.resources.claims", "name"),
    ("ephemeralContainers", "name"),
    ("volumes", "name"),
    ("imagePullSecrets", "name"),
    ("hostAliases", "ip"),
    ("topologySpreadConstraints", "topologyKey,whenUnsatisfiable"),
    ("resourceClaims", "name"),
    ("schedulingGates", "name"),
    ("nodeSelector", "atomic"),
];

/// Rules of the built-in kinds beside those of pod specs.
const BUILTIN: &[(&str, &[(&str, &str)])] = &[
    (
        "Pod",
        &[
            ("status.conditions", "type"),
            ("status.podIPs", "ip"),
            ("status.hostIPs", "ip"),
            ("status.resourceClaimStatuses", "name"),
        ],
    ),
    ("Node", &[("spec.podCIDRs", "set"), ("status.conditions", "type"), ("status.addresses", "type")]),
    ("Namespace", &[("status.conditions", "type")]),
    (
        "Service",
        &[("spec.ports", "port,protocol"), ("spec.selector", "atomic"), ("status.conditions", "type")],
    ),
    ("ServiceAccount", &[("secrets", "name"), ("imagePullSecrets", "atomic")]),
    ("Deployment", &[("spec.selector", "atomic"), ("status.conditions", "type")]),
    ("EndpointSlice", &[("endpoints", "atomic"), ("ports", "atomic")]),
    ("NetworkPolicy", &[("spec.podSelector", "atomic")]),
    ("ServiceCIDR", &[("status.conditions", "type")]),
    ("CustomResourceDefinition", &[("status.conditions", "type"), ("spec.versions", "atomic")]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_tables_reach_nested_lists() {
        let pod = Shape::of_builtin("Pod");
        let env = pod.field("spec").field("containers").item().field("env");
        assert_eq!(env.keys().unwrap()[0].name, "name");
        let deployment = Shape::of_builtin("Deployment");
        let ports = deployment
            .field("spec")
            .field("template")
            .field("spec")
            .field("containers")
            .item()
            .field("ports");
        let key = key_of(&json!({"containerPort": 80}), ports.keys().unwrap());
        assert_eq!(Value::Object(key), json!({"containerPort": 80, "protocol": "TCP"}));
        assert_eq!(pod.field("spec").field("tolerations").how, How::Plain);
    }
}
