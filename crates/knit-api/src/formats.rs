//! Formats of integers in the CRDs: the API server knows `int32` and `int64`, and warns about any other. And
//! limits of selectors, without which it refuses rules about them as too costly.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

/// The same definition with formats that the API server knows, and the limits that the others stood for.
pub fn known(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let schemas = crd.spec.versions.iter_mut().filter_map(|v| v.schema.as_mut()?.open_api_v3_schema.as_mut());
    schemas.for_each(walk);
    crd
}

fn walk(schema: &mut JSONSchemaProps) {
    let known = match schema.format.as_deref() {
        Some("uint8") => Some(("int32", Some(f64::from(u8::MAX)))),
        Some("uint16") => Some(("int32", Some(f64::from(u16::MAX)))),
        Some("uint32") => Some(("int64", Some(f64::from(u32::MAX)))),
        Some("uint64") => Some(("int64", None)),
        _ => None,
    };
    if let Some((format, most)) = known {
        schema.format = Some(format.into());
        schema.minimum.get_or_insert(0.0);
        schema.maximum = schema.maximum.or(most);
    }
    if let Some(expressions) = schema.properties.as_mut().and_then(|p| p.get_mut("matchExpressions")) {
        limit(expressions);
    }
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(walk);
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(item)) => walk(item),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(walk),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(rest)) = &mut schema.additional_properties {
        walk(rest);
    }
}

/// The most that a selector of labels may say.
fn limit(expressions: &mut JSONSchemaProps) {
    expressions.max_items = Some(32);
    let Some(JSONSchemaPropsOrArray::Schema(item)) = &mut expressions.items else { return };
    for (name, field) in item.properties.iter_mut().flatten() {
        match name.as_str() {
            "key" => field.max_length = Some(317),
            "operator" => field.max_length = Some(16),
            "values" => field.max_items = Some(256),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    fn formats<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("format").and_then(Value::as_str));
                fields.values().for_each(|value| formats(value, found));
            }
            Value::Array(items) => items.iter().for_each(|item| formats(item, found)),
            _ => {}
        }
    }

    #[test]
    fn the_api_server_knows_every_format() {
        for crd in crate::crds() {
            let (value, mut found) = (serde_json::to_value(&crd).expect("JSON"), Vec::new());
            formats(&value, &mut found);
            let unknown: Vec<_> =
                found.iter().filter(|f| !["int32", "int64", "date-time"].contains(f)).collect();
            assert!(unknown.is_empty(), "{:?}: {unknown:?}", crd.metadata.name);
        }
    }
}
