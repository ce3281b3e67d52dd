//! The rules for names, labels and annotations.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::kinds::Kind;
use super::object::list_at;
use super::status::Cause;

fn alphanumeric(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit()
}

/// A DNS label of RFC 1123.
pub fn is_label(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 63
        && text.chars().all(|c| alphanumeric(c) || c == '-')
        && text.starts_with(alphanumeric)
        && text.ends_with(alphanumeric)
}

/// DNS labels with dots between them.
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253
        && !text.is_empty()
        && text.split('.').all(|part| {
            part.starts_with(alphanumeric)
                && part.ends_with(alphanumeric)
                && part.chars().all(|c| alphanumeric(c) || c == '-')
        })
}

/// A name and, optionally, a prefix of a DNS name: the key of a label.
fn is_qualified(text: &str) -> bool {
    let (prefix, name) = text.rsplit_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    prefix.is_none_or(is_subdomain) && is_label_value(name) && !name.is_empty()
}

fn is_label_value(text: &str) -> bool {
    text.is_empty()
        || (text.len() <= 63
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric()))
}

/// What is wrong with the name of a new object.
pub fn check_name(kind: &Kind, name: &str) -> Option<Cause> {
    let at = "metadata.name";
    if name.is_empty() {
        return Some(Cause::required(at, "name or generateName is required"));
    }
    let why = match (kind.group.as_str(), kind.kind.as_str()) {
        ("networking.k8s.io", "IPAddress") => {
            let canonical = name.parse::<IpAddr>().is_ok_and(|ip| ip.to_string() == name);
            (!canonical).then_some("must be a valid IP address in its canonical form")
        }
        ("", "Namespace" | "Service") => (!is_label(name)).then_some(
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
             start \
             and end with an alphanumeric character, at most 63 of them (e.g. 'my-name' or '123-abc')",
        ),
        _ => (!is_subdomain(name)).then_some(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
             and must \
             start and end with an alphanumeric character (e.g. 'example.com')",
        ),
    };
    why.map(|why| Cause::invalid(at, &json!(name), why))
}

/// What is wrong with labels, annotations, finalizers and owner references.
pub fn check_metadata(kind: &Kind, value: &Value, causes: &mut Vec<Cause>) {
    for (key, label) in value["metadata"]["labels"].as_object().into_iter().flatten() {
        if !is_qualified(key) {
            causes.push(Cause::invalid(
                "metadata.labels",
                &json!(key),
                "a label key is a name with an optional DNS prefix (e.g. 'app' or 'example.com/app')",
            ));
        }
        if !label.as_str().is_some_and(is_label_value) {
            causes.push(Cause::invalid(
                "metadata.labels",
                label,
                "a valid label must be an empty string or \
                consist of alphanumeric characters, '-', '_' or '.', at most 63 of them, and must start and \
                end with an alphanumeric character",
            ));
        }
    }
    for (key, text) in value["metadata"]["annotations"].as_object().into_iter().flatten() {
        if !is_qualified(&key.to_lowercase()) {
            causes.push(Cause::invalid(
                "metadata.annotations",
                &json!(key),
                "an annotation key is a name with an optional DNS prefix (e.g. 'note' or 'example.com/note')",
            ));
        }
        if !text.is_string() {
            causes.push(Cause::wrong_type(format!("metadata.annotations.{key}"), text, "must be a string"));
        }
    }
    for (index, finalizer) in list_at(value, "metadata.finalizers").iter().enumerate() {
        let standard = |name: &str| matches!(name, "foregroundDeletion" | "kubernetes" | "orphan");
        let good = |name: &str| {
            is_qualified(name) && (name.contains('/') || standard(name) || kind.custom().is_some())
        };
        if !finalizer.as_str().is_some_and(good) {
            causes.push(Cause::invalid(
                format!("metadata.finalizers[{index}]"),
                finalizer,
                "name is neither a standard finalizer name nor is it fully qualified",
            ));
        }
    }
    for (index, owner) in list_at(value, "metadata.ownerReferences").iter().enumerate() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if owner[field].as_str().is_none_or(str::is_empty) {
                causes.push(Cause::required(
                    format!("metadata.ownerReferences[{index}].{field}"),
                    "must not be empty",
                ));
            }
        }
    }
}
