//! Validation of values against the structural schemas of CRDs, with errors worded as a real server words
//! them.

use serde_json::{Map, Value};

use super::schema::{Schema, Type, field};
use super::status::{Cause, type_of};

impl Schema {
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
            out.push(Cause::invalid(path, value, why));
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
}
