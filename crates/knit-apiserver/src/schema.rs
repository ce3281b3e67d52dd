//! Structural schemas of CRDs: read once, with patterns and rules compiled; pruning and defaults.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;

use super::cel::{Rule, RuleError};
/// What a value may be, by `type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A map or struct.
    Object,
    /// A list.
    Array,
    /// A string.
    String,
    /// A whole number.
    Integer,
    /// Any number.
    Number,
    /// true or false.
    Boolean,
    /// A whole number or a string.
    IntOrString,
    /// Not said.
    Any,
}

impl Type {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
            Self::IntOrString => "integer or string",
            Self::Any => "any",
        }
    }

    pub(super) fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Object => value.is_object(),
            Self::Array => value.is_array(),
            Self::String => value.is_string(),
            Self::Integer => {
                value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
            }
            Self::Number => value.is_number(),
            Self::Boolean => value.is_boolean(),
            Self::IntOrString => value.is_i64() || value.is_u64() || value.is_string(),
            Self::Any => true,
        }
    }
}

/// One node of a schema, with its patterns and rules compiled.
#[derive(Debug)]
pub struct Schema {
    /// Its type.
    pub kind: Type,
    /// `format`, which CEL needs for dates and durations.
    pub format: Option<String>,
    /// The named fields.
    pub properties: BTreeMap<String, Schema>,
    /// The values of a map whose keys are free.
    pub additional: Option<Box<Schema>>,
    /// List elements.
    pub items: Option<Box<Schema>>,
    /// The keys of a list that is a map.
    pub map_keys: Vec<String>,
    /// The CEL rules on this value.
    pub rules: Vec<Rule>,
    pub(super) is_set: bool,
    pub(super) required: Vec<String>,
    pub(super) nullable: bool,
    default: Option<Value>,
    pub(super) choices: Option<Vec<Value>>,
    pub(super) pattern: Option<(String, Regex)>,
    pub(super) bounds: Bounds,
    preserve_unknown: bool,
    pub(super) any_of: Vec<Value>,
    pub(super) not: Option<Value>,
}

#[derive(Debug, Default)]
pub(super) struct Bounds {
    pub(super) minimum: Option<f64>,
    pub(super) maximum: Option<f64>,
    pub(super) exclusive_minimum: bool,
    pub(super) exclusive_maximum: bool,
    pub(super) multiple_of: Option<f64>,
    pub(super) min_length: Option<u64>,
    pub(super) max_length: Option<u64>,
    pub(super) min_items: Option<u64>,
    pub(super) max_items: Option<u64>,
    pub(super) min_properties: Option<u64>,
    pub(super) max_properties: Option<u64>,
}

/// A schema that cannot be used, and where in it.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// A `pattern` is no regular expression.
    #[error("the pattern at {path} does not compile")]
    Pattern {
        /// The field's path.
        path: String,
        /// The cause.
        #[source]
        source: Box<regex::Error>,
    },
    /// A CEL rule does not parse.
    #[error("the rule at {path} does not compile")]
    Rule {
        /// The field's path.
        path: String,
        /// The cause.
        #[source]
        source: RuleError,
    },
}

impl Schema {
    /// Whether there is a CEL rule on this value or below it.
    pub fn has_rules(&self) -> bool {
        let below = self.properties.values().chain(self.items.as_deref()).chain(self.additional.as_deref());
        !self.rules.is_empty() || below.into_iter().any(Self::has_rules)
    }

    /// Reads an `openAPIV3Schema`.
    pub fn parse(schema: &Value) -> Result<Self, SchemaError> {
        Self::parse_at(schema, "")
    }

    fn parse_at(schema: &Value, path: &str) -> Result<Self, SchemaError> {
        let flag = |name: &str| schema[name].as_bool().unwrap_or(false);
        let kind = match schema["type"].as_str() {
            _ if flag("x-kubernetes-int-or-string") => Type::IntOrString,
            Some("object") => Type::Object,
            Some("array") => Type::Array,
            Some("string") => Type::String,
            Some("integer") => Type::Integer,
            Some("number") => Type::Number,
            Some("boolean") => Type::Boolean,
            _ => Type::Any,
        };
        let mut properties = BTreeMap::new();
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            properties.insert(name.clone(), Self::parse_at(property, &field(path, name))?);
        }
        let sub = |name: &str, step: &str| -> Result<Option<Box<Schema>>, SchemaError> {
            match &schema[name] {
                inner @ Value::Object(_) => {
                    Ok(Some(Box::new(Self::parse_at(inner, &format!("{path}{step}"))?)))
                }
                _ => Ok(None),
            }
        };
        let pattern = match schema["pattern"].as_str() {
            Some(text) => {
                let regex = Regex::new(text).map_err(|source| SchemaError::Pattern {
                    path: path.to_owned(),
                    source: Box::new(source),
                })?;
                Some((text.to_owned(), regex))
            }
            None => None,
        };
        let mut rules = Vec::new();
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            rules.push(
                Rule::compile(rule).map_err(|source| SchemaError::Rule { path: path.to_owned(), source })?,
            );
        }
        let strings = |name: &str| -> Vec<String> {
            schema[name]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        };
        Ok(Self {
            kind,
            format: schema["format"].as_str().map(str::to_owned),
            properties,
            additional: sub("additionalProperties", "[*]")?,
            items: sub("items", "[*]")?,
            map_keys: strings("x-kubernetes-list-map-keys"),
            rules,
            is_set: schema["x-kubernetes-list-type"] == "set",
            required: strings("required"),
            nullable: flag("nullable"),
            default: schema.get("default").cloned(),
            choices: schema["enum"].as_array().cloned(),
            pattern,
            bounds: Bounds {
                minimum: schema["minimum"].as_f64(),
                maximum: schema["maximum"].as_f64(),
                exclusive_minimum: flag("exclusiveMinimum"),
                exclusive_maximum: flag("exclusiveMaximum"),
                multiple_of: schema["multipleOf"].as_f64(),
                min_length: schema["minLength"].as_u64(),
                max_length: schema["maxLength"].as_u64(),
                min_items: schema["minItems"].as_u64(),
                max_items: schema["maxItems"].as_u64(),
                min_properties: schema["minProperties"].as_u64(),
                max_properties: schema["maxProperties"].as_u64(),
            },
            preserve_unknown: flag("x-kubernetes-preserve-unknown-fields")
                || schema["additionalProperties"] == true
                || flag("x-kubernetes-embedded-resource"),
            any_of: ["anyOf", "oneOf", "allOf"]
                .iter()
                .filter_map(|name| schema.get(*name).map(|list| serde_json::json!({ *name: list })))
                .collect(),
            not: schema.get("not").cloned(),
        })
    }

    /// Removes the fields that the schema does not know, and names them.
    pub fn prune(&self, value: &mut Value) -> Vec<String> {
        let mut unknown = Vec::new();
        self.prune_at(value, "", true, &mut unknown);
        unknown
    }

    fn prune_at(&self, value: &mut Value, path: &str, top: bool, unknown: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                let known = |name: &str| {
                    self.properties.contains_key(name)
                        || self.additional.is_some()
                        || self.preserve_unknown
                        || (top && ["apiVersion", "kind", "metadata"].contains(&name))
                        || (self.kind == Type::Any && self.properties.is_empty())
                };
                map.retain(|name, _| {
                    let keep = known(name);
                    if !keep {
                        unknown.push(field(path, name));
                    }
                    keep
                });
                for (name, child) in map.iter_mut() {
                    // The metadata is the server's own, whatever the schema says about it.
                    if top && name == "metadata" {
                        continue;
                    }
                    if let Some(schema) = self.properties.get(name).or(self.additional.as_deref()) {
                        schema.prune_at(child, &field(path, name), false, unknown);
                    }
                }
            }
            Value::Array(list) => {
                if let Some(schema) = &self.items {
                    for (index, child) in list.iter_mut().enumerate() {
                        schema.prune_at(child, &format!("{path}[{index}]"), false, unknown);
                    }
                }
            }
            _ => {}
        }
    }

    /// Fills in defaults; a null where null is not allowed counts as missing.
    pub fn apply_defaults(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (name, schema) in &self.properties {
                    let missing = map.get(name).is_none_or(|child| child.is_null() && !schema.nullable);
                    if missing && let Some(default) = &schema.default {
                        map.insert(name.clone(), default.clone());
                    }
                    if let Some(child) = map.get_mut(name) {
                        schema.apply_defaults(child);
                    }
                }
                if let Some(schema) = &self.additional {
                    for (name, child) in map.iter_mut() {
                        if !self.properties.contains_key(name) {
                            schema.apply_defaults(child);
                        }
                    }
                }
            }
            Value::Array(list) => {
                if let Some(schema) = &self.items {
                    list.iter_mut().for_each(|child| schema.apply_defaults(child));
                }
            }
            _ => {}
        }
    }

    /// Drops nulls that mean "missing".
    pub fn drop_nulls(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|name, child| {
                    !child.is_null()
                        || self.properties.get(name).is_none_or(|schema| {
                            schema.nullable || schema.kind == Type::Any || self.required.contains(name)
                        })
                });
                for (name, child) in map.iter_mut() {
                    if let Some(schema) = self.properties.get(name).or(self.additional.as_deref()) {
                        schema.drop_nulls(child);
                    }
                }
            }
            Value::Array(list) => {
                if let Some(schema) = &self.items {
                    list.iter_mut().for_each(|child| schema.drop_nulls(child));
                }
            }
            _ => {}
        }
    }
}

/// A field's path below another.
pub fn field(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

#[cfg(test)]
mod tests {
    use super::super::status::Cause;
    use super::*;
    use serde_json::json;

    fn schema() -> Schema {
        Schema::parse(&json!({"type": "object", "required": ["spec"], "properties": {"spec": {
        "type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 9},
            "mode": {"type": "string", "enum": ["A", "B"], "default": "A"},
            "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
            "ports": {"type": "array", "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["port"],
                "items": {"type": "object", "properties": {"port": {"type": "integer"},
                    "proto": {"type": "string", "default": "TCP"}}}},
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}
        }}}}))
        .unwrap()
    }

    #[test]
    fn prunes_and_defaults() {
        let mut value =
            json!({"spec": {"size": 1, "typo": 2, "free": {"any": 1}, "ports": [{"port": 1, "x": 1}]}});
        let schema = schema();
        assert_eq!(schema.prune(&mut value), ["spec.typo", "spec.ports[0].x"]);
        schema.apply_defaults(&mut value);
        assert_eq!(
            value,
            json!({"spec": {"size": 1, "mode": "A", "free": {"any": 1}, "ports": [{"port": 1,
                "proto": "TCP"}]}})
        );
        assert_eq!(schema.validate(&value), []);
    }

    #[test]
    fn names_every_wrong_field() {
        let value = json!({"spec": {"size": 10, "mode": "C", "name": "ABCDE", "ports": [{"port": 1},
            {"port": 1}], "tags": ["a", "a", 1]}});
        let causes = schema().validate(&value);
        let found: Vec<(&str, &str)> =
            causes.iter().map(|cause| (cause.field.as_str(), cause.reason)).collect();
        assert_eq!(
            found,
            [
                ("spec.mode", "FieldValueNotSupported"),
                ("spec.name", "FieldValueTooLong"),
                ("spec.name", "FieldValueInvalid"),
                ("spec.ports[1]", "FieldValueDuplicate"),
                ("spec.size", "FieldValueInvalid"),
                ("spec.tags[1]", "FieldValueDuplicate"),
                ("spec.tags[2]", "FieldValueTypeInvalid"),
            ]
        );
        let missing = schema().validate(&json!({"spec": {}}));
        assert_eq!(missing, [Cause::required("spec.size", "")]);
    }
}
