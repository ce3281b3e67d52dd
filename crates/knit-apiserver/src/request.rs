//! Reading requests: which object a path names, what the query asks for, which form the answer should have.

use std::collections::HashMap;
use std::sync::Arc;

use hyper::{HeaderMap, Method};
use serde_json::{Value, json};

use super::admission::{FieldValidation, Part};
use super::kinds::Kind;
use super::state::Key;
use super::status::{ApiError, Cause, Result};
use super::store::Store;
use super::table::Include;
use super::write::{DeleteOptions, WriteOptions};

/// What a path below a group and version names.
#[derive(Debug, Clone)]
pub struct Target {
    /// The kind.
    pub kind: Arc<Kind>,
    /// The namespace, if the path has one.
    pub namespace: Option<String>,
    /// The name, if the path has one.
    pub name: Option<String>,
    /// The subresource, if the path has one.
    pub subresource: Option<String>,
}

impl Target {
    /// Reads the path segments after group and version.
    pub fn parse(store: &Store, group: &str, version: &str, segments: &[String]) -> Result<Self> {
        let kind = |plural: &str| {
            store
                .with_registry(|registry| registry.by_path(group, version, plural))
                .ok_or_else(ApiError::no_such_path)
        };
        let text: Vec<&str> = segments.iter().map(String::as_str).collect();
        let own = |text: Option<&&str>| text.map(|text| (*text).to_owned());
        match text.as_slice() {
            ["namespaces", namespace, plural, rest @ ..]
                if !(group.is_empty() && matches!(*plural, "status" | "finalize")) && rest.len() <= 2 =>
            {
                let kind = kind(plural)?;
                if !kind.namespaced {
                    return Err(ApiError::no_such_path());
                }
                Ok(Self {
                    kind,
                    namespace: Some((*namespace).to_owned()),
                    name: own(rest.first()),
                    subresource: own(rest.get(1)),
                })
            }
            [plural, rest @ ..] if rest.len() <= 2 => {
                let kind = kind(plural)?;
                if kind.namespaced && !rest.is_empty() {
                    return Err(ApiError::no_such_path());
                }
                Ok(Self { kind, namespace: None, name: own(rest.first()), subresource: own(rest.get(1)) })
            }
            _ => Err(ApiError::no_such_path()),
        }
    }

    /// The namespace as the store has it: empty for cluster-scoped kinds.
    pub fn ns(&self) -> &str {
        self.namespace.as_deref().unwrap_or("")
    }
}

/// The query of a request.
#[derive(Debug, Clone, Default)]
pub struct Query {
    values: HashMap<String, String>,
    /// The words of `command`, which comes once for each.
    command: Vec<String>,
}

impl Query {
    /// Decodes the text after `?`.
    pub fn parse(text: &str) -> Self {
        let pair = |part: &str| {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            (decode(&key.replace('+', " ")), decode(&value.replace('+', " ")))
        };
        let pairs: Vec<(String, String)> =
            text.split('&').filter(|part| !part.is_empty()).map(pair).collect();
        let command =
            pairs.iter().filter(|(key, _)| key == "command").map(|(_, value)| value.clone()).collect();
        Self { values: pairs.into_iter().collect(), command }
    }

    /// The words of the command that is to be run.
    pub fn command(&self) -> &[String] {
        &self.command
    }

    /// A parameter, empty where it is missing.
    pub fn get(&self, name: &str) -> &str {
        self.values.get(name).map_or("", String::as_str)
    }

    /// A flag.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1" | "True")
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<u64>> {
        match self.get(name) {
            "" => Ok(None),
            text => text
                .parse()
                .map(Some)
                .map_err(|_| ApiError::bad_request(format!("invalid {name} {text:?}: not a number"))),
        }
    }

    /// How a write is to be done.
    pub fn write_options(&self, method: &Method, headers: &HeaderMap, part: Part) -> Result<WriteOptions> {
        let options = match *method {
            Method::POST => "CreateOptions",
            Method::PATCH => "PatchOptions",
            _ => "UpdateOptions",
        };
        let unsupported = |field: &str, value: &Value, known: &[&str]| {
            let known: Vec<String> = known.iter().map(|text| (*text).to_owned()).collect();
            ApiError::invalid_options(options, &Cause::not_supported(field, value, &known))
        };
        let dry_run = match self.get("dryRun") {
            "" => false,
            "All" => true,
            other => return Err(unsupported("dryRun", &json!([other]), &["All"])),
        };
        let validation = match self.get("fieldValidation") {
            "" | "Warn" => FieldValidation::Warn,
            "Strict" => FieldValidation::Strict,
            "Ignore" => FieldValidation::Ignore,
            other => {
                return Err(unsupported("fieldValidation", &json!(other), &["", "Ignore", "Strict", "Warn"]));
            }
        };
        if self.get("fieldManager").len() > 128 {
            let cause = Cause::too_long("fieldManager", 128);
            return Err(ApiError::invalid_options(options, &cause));
        }
        let agent = headers.get("user-agent").and_then(|value| value.to_str().ok()).unwrap_or("unknown");
        let manager = match self.get("fieldManager") {
            "" => agent.split('/').next().unwrap_or("unknown").to_owned(),
            name => name.to_owned(),
        };
        Ok(WriteOptions { manager, dry_run, validation, force: self.flag("force"), part })
    }

    /// How a deletion is to be done: the body where there is one, and the query.
    pub fn delete_options(&self, body: &Value) -> DeleteOptions {
        let text = |name: &str| body[name].as_str().map_or_else(|| self.get(name).to_owned(), str::to_owned);
        let precondition = |name: &str| body["preconditions"][name].as_str().map(str::to_owned);
        let grace =
            body["gracePeriodSeconds"].as_i64().or_else(|| self.get("gracePeriodSeconds").parse().ok());
        let dry_run =
            self.get("dryRun") == "All" || body["dryRun"].as_array().is_some_and(|list| !list.is_empty());
        DeleteOptions {
            grace,
            orphan: text("propagationPolicy") == "Orphan" || body["orphanDependents"] == true,
            uid: precondition("uid"),
            resource_version: precondition("resourceVersion"),
            dry_run,
        }
    }

    /// Where a list goes on, from its continue token.
    pub fn continue_from(&self) -> Result<Option<(u64, Key)>> {
        match self.get("continue") {
            "" => Ok(None),
            token => decode_token(token).map(Some).ok_or_else(|| {
                ApiError::bad_request("continue key is not valid: it is not one of this server's")
            }),
        }
    }
}

/// A continue token.
pub fn encode_token(rv: u64, key: &Key) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(format!("{rv}/{}/{}", key.0, key.1))
}

fn decode_token(token: &str) -> Option<(u64, Key)> {
    use base64::Engine as _;
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(token).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let mut parts = text.splitn(3, '/');
    Some((parts.next()?.parse().ok()?, (parts.next()?.to_owned(), parts.next()?.to_owned())))
}

/// Percent-decodes.
pub fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let hex = (bytes[index] == b'%').then(|| text.get(index + 1..index + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                index += 3;
            }
            None => {
                out.push(bytes[index]);
                index += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The form of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// Objects as they are.
    Plain,
    /// A table.
    Table(Include),
    /// Metadata only.
    Partial,
    /// Aggregated discovery in this version.
    Discovery(String),
}

impl Form {
    /// The first form of the Accept header that is served; 406 if none is.
    pub fn negotiate(headers: &HeaderMap, query: &Query) -> Result<Self> {
        let accept = headers.get("accept").and_then(|value| value.to_str().ok()).unwrap_or("");
        if accept.trim().is_empty() {
            return Ok(Self::Plain);
        }
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or("");
            if !matches!(media, "application/json" | "*/*" | "application/*" | "application/yaml" | "text/*")
            {
                continue;
            }
            let parameters: HashMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
            let version = parameters.get("v").copied().unwrap_or("");
            match parameters.get("as").copied() {
                None if media == "application/yaml" => {}
                None => return Ok(Self::Plain),
                Some("Table") if version == "v1" => {
                    return Ok(Self::Table(match query.get("includeObject") {
                        "None" => Include::None,
                        "Object" => Include::Object,
                        _ => Include::Metadata,
                    }));
                }
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") if version == "v1" => {
                    return Ok(Self::Partial);
                }
                Some("APIGroupDiscoveryList") if matches!(version, "v2" | "v2beta1") => {
                    return Ok(Self::Discovery(version.to_owned()));
                }
                Some(_) => {}
            }
        }
        Err(ApiError::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json, \
             application/json;as=Table;v=v1;g=meta.k8s.io",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive() {
        let key = ("ns".to_owned(), "a.b".to_owned());
        assert_eq!(decode_token(&encode_token(7, &key)), Some((7, key)));
        assert_eq!(decode_token("garbage!"), None);
    }

    #[test]
    fn queries_are_decoded() {
        let query = Query::parse("labelSelector=a%3Db%2Cc+in+%28x%29&watch=1&limit=x");
        assert_eq!(query.get("labelSelector"), "a=b,c in (x)");
        assert!(query.flag("watch"));
        assert!(query.number("limit").is_err());
    }

    #[test]
    fn accept_headers() {
        let form = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("accept", text.parse().unwrap());
            Form::negotiate(&headers, &Query::default())
        };
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,\
                       application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(form(kubectl).unwrap(), Form::Table(Include::Metadata));
        assert_eq!(form("application/vnd.kubernetes.protobuf,application/json").unwrap(), Form::Plain);
        assert_eq!(form("application/vnd.kubernetes.protobuf").unwrap_err().code, 406);
        assert_eq!(form("*/*").unwrap(), Form::Plain);
    }
}
