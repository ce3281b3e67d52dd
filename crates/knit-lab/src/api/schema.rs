//! Structural schemas of CRDs: pruning, defaults and validation, with errors worded as a real server words them.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Map, Value};

use super::cel::{Rule, RuleError};
use super::status::Cause;

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
    fn name(self) -> &'static str {
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

    fn accepts(self, value: &Value) -> bool {
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
    is_set: bool,
    required: Vec<String>,
    nullable: bool,
    default: Option<Value>,
    choices: Option<Vec<Value>>,
    pattern: Option<(String, Regex)>,
    bounds: Bounds,
    preserve_unknown: bool,
    any_of: Vec<Value>,
    not: Option<Value>,
}

#[derive(Debug, Default)]
struct Bounds {
    minimum: Option<f64>,
    maximum: Option<f64>,
    exclusive_minimum: bool,
    exclusive_maximum: bool,
    multiple_of: Option<f64>,
    min_length: Option<u64>,
    max_length: Option<u64>,
    min_items: Option<u64>,
    max_items: Option<u64>,
    min_properties: Option<u64>,
    max_properties: Option<u64>,
}

/// A schema that cannot be used, and where in it.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// A `pattern` is no regular expression.
    #[error("the pattern at {path} does not compile")]
    Pattern {
        /// Where.
        path: String,
        /// Why.
        #[source]
        source: Box<regex::Error>,
    },
    /// A CEL rule does not parse.
    #[error("the rule at {path} does not compile")]
    Rule {
        /// Where.
        path: String,
        /// Why.
        #[source]
        source: RuleError,
    },
}

impl Schema {
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

    /// Everything that is wrong with a value, CEL rules apart.
    pub fn validate(&self, value: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        self.validate_at(value, "", &mut causes);
        causes
    }

    fn validate_at(&self, value: &Value, path: &str, out: &mut Vec<Cause>) {
        if value.is_null() {
            if !self.nullable && self.kind != Type::Any {
                let why = format!("{path} in body must be of type {}: \"null\"", self.kind.name());
                out.push(Cause::wrong_type(path, value, why));
            }
            return;
        }
        if !self.kind.accepts(value) {
            let why = format!("{path} in body must be of type {}: {:?}", self.kind.name(), type_of(value));
            out.push(Cause::wrong_type(path, value, why));
            return;
        }
        if let Some(choices) = &self.choices
            && !choices.contains(value)
        {
            let names: Vec<String> =
                choices.iter().map(|c| c.as_str().map_or_else(|| c.to_string(), str::to_owned)).collect();
            out.push(Cause::not_supported(path, value, &names));
        }
        let body = |why: String| format!("{path} in body {why}");
        match value {
            Value::String(text) => self.validate_string(value, text, path, out),
            Value::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                let b = &self.bounds;
                if let Some(min) = b.minimum
                    && (number < min || (b.exclusive_minimum && number <= min))
                {
                    let word = if b.exclusive_minimum { "greater than" } else { "greater than or equal to" };
                    out.push(Cause::invalid(path, value, body(format!("should be {word} {min}"))));
                }
                if let Some(max) = b.maximum
                    && (number > max || (b.exclusive_maximum && number >= max))
                {
                    let word = if b.exclusive_maximum { "less than" } else { "less than or equal to" };
                    out.push(Cause::invalid(path, value, body(format!("should be {word} {max}"))));
                }
                if let Some(step) = b.multiple_of
                    && (number / step).fract() != 0.0
                {
                    out.push(Cause::invalid(path, value, body(format!("should be a multiple of {step}"))));
                }
                self.validate_number_format(value, path, out);
            }
            Value::Array(list) => self.validate_list(value, list, path, out),
            Value::Object(map) => self.validate_map(value, map, path, out),
            _ => {}
        }
        for combination in &self.any_of {
            self.validate_combination(combination, value, path, out);
        }
        if let Some(not) = &self.not
            && Self::parse(not).is_ok_and(|schema| schema.validate(value).is_empty())
        {
            out.push(Cause::invalid(path, value, body("must not validate the schema (not)".into())));
        }
    }

    fn validate_combination(&self, combination: &Value, value: &Value, path: &str, out: &mut Vec<Cause>) {
        for (how, list) in combination.as_object().into_iter().flatten() {
            let list = list.as_array().map_or(&[][..], Vec::as_slice);
            let good = list
                .iter()
                .filter(|part| Self::parse(part).is_ok_and(|schema| schema.validate(value).is_empty()))
                .count();
            let why = match how.as_str() {
                "anyOf" if good == 0 => "must validate at least one schema (anyOf)",
                "oneOf" if good != 1 => "must validate one and only one schema (oneOf)",
                "allOf" if good != list.len() => "must validate all the schemas (allOf)",
                _ => continue,
            };
            out.push(Cause::invalid(path, value, format!("{path} in body {why}")));
        }
    }

    fn validate_number_format(&self, value: &Value, path: &str, out: &mut Vec<Cause>) {
        if self.format.as_deref() == Some("int32")
            && value.as_i64().is_none_or(|number| i32::try_from(number).is_err())
        {
            out.push(Cause::invalid(path, value, format!("{path} in body must be of type int32")));
        }
    }

    fn validate_string(&self, value: &Value, text: &str, path: &str, out: &mut Vec<Cause>) {
        let length = text.chars().count() as u64;
        if let Some(min) = self.bounds.min_length
            && length < min
        {
            let why = format!("{path} in body should be at least {min} chars long");
            out.push(Cause::invalid(path, value, why));
        }
        if let Some(max) = self.bounds.max_length
            && length > max
        {
            out.push(Cause::too_long(path, max));
        }
        if let Some((shown, regex)) = &self.pattern
            && !regex.is_match(text)
        {
            out.push(Cause::invalid(path, value, format!("{path} in body should match '{shown}'")));
        }
        let good = match self.format.as_deref() {
            Some("ipv4") => text.parse::<std::net::Ipv4Addr>().is_ok(),
            Some("ipv6") => text.parse::<std::net::Ipv6Addr>().is_ok(),
            Some("cidr") => text.parse::<ipnet::IpNet>().is_ok(),
            Some("date-time") => text.parse::<jiff::Timestamp>().is_ok(),
            Some("uuid") => uuid::Uuid::parse_str(text).is_ok(),
            Some("mac") => {
                text.split([':', '-']).count() == 6
                    && text.split([':', '-']).all(|part| u8::from_str_radix(part, 16).is_ok())
            }
            _ => true,
        };
        if !good {
            let format = self.format.as_deref().unwrap_or("");
            let why = format!("{path} in body must be of type {format}: {text:?}");
            out.push(Cause::wrong_type(path, value, why));
        }
    }

    fn validate_list(&self, value: &Value, list: &[Value], path: &str, out: &mut Vec<Cause>) {
        if let Some(min) = self.bounds.min_items
            && (list.len() as u64) < min
        {
            out.push(Cause::invalid(path, value, format!("{path} in body should have at least {min} items")));
        }
        if let Some(max) = self.bounds.max_items
            && (list.len() as u64) > max
        {
            out.push(Cause::too_many(path, list.len(), max));
        }
        for (index, item) in list.iter().enumerate() {
            let here = format!("{path}[{index}]");
            let id = |item: &Value| -> Vec<Value> {
                if self.is_set {
                    return vec![item.clone()];
                }
                self.map_keys.iter().map(|key| item[key].clone()).collect()
            };
            if (self.is_set || !self.map_keys.is_empty())
                && list[..index].iter().any(|other| id(other) == id(item))
            {
                let shown = if self.is_set {
                    item.clone()
                } else {
                    let keys: Map<String, Value> =
                        self.map_keys.iter().map(|key| (key.clone(), item[key].clone())).collect();
                    Value::String(Value::Object(keys).to_string())
                };
                out.push(Cause::duplicate(&here, &shown));
            }
            if let Some(schema) = &self.items {
                schema.validate_at(item, &here, out);
            }
        }
    }

    fn validate_map(&self, value: &Value, map: &Map<String, Value>, path: &str, out: &mut Vec<Cause>) {
        for name in &self.required {
            if !map.contains_key(name) {
                out.push(Cause::required(field(path, name), ""));
            }
        }
        if let Some(min) = self.bounds.min_properties
            && (map.len() as u64) < min
        {
            let why = format!("{path} in body should have at least {min} properties");
            out.push(Cause::invalid(path, value, why));
        }
        if let Some(max) = self.bounds.max_properties
            && (map.len() as u64) > max
        {
            out.push(Cause::too_many(path, map.len(), max));
        }
        for (name, child) in map {
            let schema = self.properties.get(name).or(self.additional.as_deref());
            if let Some(schema) = schema {
                // A null is pruned to "missing" where null is not allowed and the field is not required.
                if child.is_null() && !schema.nullable && !self.required.contains(name) {
                    continue;
                }
                schema.validate_at(child, &field(path, name), out);
            }
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

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema() -> Schema {
        Schema::parse(&json!({"type": "object", "required": ["spec"], "properties": {"spec": {
            "type": "object", "required": ["size"], "properties": {
                "size": {"type": "integer", "minimum": 1, "maximum": 9},
                "mode": {"type": "string", "enum": ["A", "B"], "default": "A"},
                "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
                "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port"],
                    "items": {"type": "object", "properties": {"port": {"type": "integer"}, "proto": {"type": "string", "default": "TCP"}}}},
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
            json!({"spec": {"size": 1, "mode": "A", "free": {"any": 1}, "ports": [{"port": 1, "proto": "TCP"}]}})
        );
        assert_eq!(schema.validate(&value), []);
    }

    #[test]
    fn names_every_wrong_field() {
        let value = json!({"spec": {"size": 10, "mode": "C", "name": "ABCDE", "ports": [{"port": 1}, {"port": 1}], "tags": ["a", "a", 1]}});
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
