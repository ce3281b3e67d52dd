//! Protobuf bodies. `kubectl create namespace`, `create configmap` and their like send nothing else, so that
//! the messages they can make are read here, from a table of field numbers. A field that the table does not
//! have is refused by its number, never dropped.

use serde_json::{Map, Value, json};

use super::status::{ApiError, Result};

/// What a field holds.
#[derive(Debug, Clone, Copy)]
enum Is {
    /// Text; the empty text is as good as none.
    Text,
    /// Text in a list.
    Texts,
    /// A number; 0 is as good as none.
    Number,
    /// A number whose 0 is meant.
    Pointer,
    Bool,
    /// A message of the table.
    Message(&'static str),
    Messages(&'static str),
    TextMap,
    BytesMap,
    /// A map to quantities.
    Quantities,
    IntOrString,
    Time,
}

type Fields = &'static [(u64, &'static str, Is)];

fn fields(message: &str) -> Option<Fields> {
    use Is::{
        Bool, BytesMap, IntOrString, Message, Messages, Number, Pointer, Quantities, Text, TextMap, Texts,
        Time,
    };
    Some(match message {
        "Namespace" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "spec", Message("NamespaceSpec")),
            (3, "status", Message("NamespaceStatus")),
        ],
        "NamespaceSpec" => &[(1, "finalizers", Texts)],
        "NamespaceStatus" => &[(1, "phase", Text)],
        "ConfigMap" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "data", TextMap),
            (3, "binaryData", BytesMap),
            (4, "immutable", Bool),
        ],
        "Secret" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "data", BytesMap),
            (3, "type", Text),
            (4, "stringData", TextMap),
            (5, "immutable", Bool),
        ],
        "ServiceAccount" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "secrets", Messages("ObjectReference")),
            (3, "imagePullSecrets", Messages("LocalObjectReference")),
            (4, "automountServiceAccountToken", Bool),
        ],
        "ObjectReference" => &[
            (1, "kind", Text),
            (2, "namespace", Text),
            (3, "name", Text),
            (4, "uid", Text),
            (5, "apiVersion", Text),
            (6, "resourceVersion", Text),
            (7, "fieldPath", Text),
        ],
        "LocalObjectReference" => &[(1, "name", Text)],
        "Service" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "spec", Message("ServiceSpec")),
            (3, "status", Message("ServiceStatus")),
        ],
        "ServiceSpec" => &[
            (1, "ports", Messages("ServicePort")),
            (2, "selector", TextMap),
            (3, "clusterIP", Text),
            (4, "type", Text),
            (5, "externalIPs", Texts),
            (7, "sessionAffinity", Text),
            (8, "loadBalancerIP", Text),
            (9, "loadBalancerSourceRanges", Texts),
            (10, "externalName", Text),
            (11, "externalTrafficPolicy", Text),
            (12, "healthCheckNodePort", Number),
            (13, "publishNotReadyAddresses", Bool),
            (17, "ipFamilyPolicy", Text),
            (18, "clusterIPs", Texts),
            (19, "ipFamilies", Texts),
            (20, "allocateLoadBalancerNodePorts", Bool),
            (21, "loadBalancerClass", Text),
            (22, "internalTrafficPolicy", Text),
            (23, "trafficDistribution", Text),
        ],
        "ServicePort" => &[
            (1, "name", Text),
            (2, "protocol", Text),
            (3, "port", Number),
            (4, "targetPort", IntOrString),
            (5, "nodePort", Number),
            (6, "appProtocol", Text),
        ],
        "ServiceStatus" => &[(1, "loadBalancer", Message("Empty"))],
        "Empty" => &[],
        "Deployment" => &[
            (1, "metadata", Message("ObjectMeta")),
            (2, "spec", Message("DeploymentSpec")),
            (3, "status", Message("DeploymentStatus")),
        ],
        "DeploymentSpec" => &[
            (1, "replicas", Pointer),
            (2, "selector", Message("LabelSelector")),
            (3, "template", Message("PodTemplateSpec")),
            (4, "strategy", Message("DeploymentStrategy")),
            (5, "minReadySeconds", Number),
            (6, "revisionHistoryLimit", Pointer),
            (7, "paused", Bool),
            (9, "progressDeadlineSeconds", Pointer),
        ],
        "DeploymentStrategy" => &[(1, "type", Text)],
        "DeploymentStatus" => &[
            (1, "observedGeneration", Number),
            (2, "replicas", Number),
            (3, "updatedReplicas", Number),
            (4, "availableReplicas", Number),
            (5, "unavailableReplicas", Number),
            (7, "readyReplicas", Number),
        ],
        "LabelSelector" => &[(1, "matchLabels", TextMap), (2, "matchExpressions", Messages("Requirement"))],
        "Requirement" => &[(1, "key", Text), (2, "operator", Text), (3, "values", Texts)],
        "PodTemplateSpec" => &[(1, "metadata", Message("ObjectMeta")), (2, "spec", Message("PodSpec"))],
        "PodSpec" => &[
            (2, "containers", Messages("Container")),
            (3, "restartPolicy", Text),
            (4, "terminationGracePeriodSeconds", Pointer),
            (5, "activeDeadlineSeconds", Pointer),
            (6, "dnsPolicy", Text),
            (7, "nodeSelector", TextMap),
            (8, "serviceAccountName", Text),
            (9, "serviceAccount", Text),
            (10, "nodeName", Text),
            (11, "hostNetwork", Bool),
            (12, "hostPID", Bool),
            (13, "hostIPC", Bool),
            (14, "securityContext", Message("Empty")),
            (16, "hostname", Text),
            (17, "subdomain", Text),
            (19, "schedulerName", Text),
            (20, "initContainers", Messages("Container")),
            (24, "priorityClassName", Text),
        ],
        "Container" => &[
            (1, "name", Text),
            (2, "image", Text),
            (3, "command", Texts),
            (4, "args", Texts),
            (5, "workingDir", Text),
            (6, "ports", Messages("ContainerPort")),
            (7, "env", Messages("EnvVar")),
            (8, "resources", Message("Resources")),
            (13, "terminationMessagePath", Text),
            (14, "imagePullPolicy", Text),
            (16, "stdin", Bool),
            (17, "stdinOnce", Bool),
            (18, "tty", Bool),
            (20, "terminationMessagePolicy", Text),
        ],
        "ContainerPort" => &[
            (1, "name", Text),
            (2, "hostPort", Number),
            (3, "containerPort", Number),
            (4, "protocol", Text),
            (5, "hostIP", Text),
        ],
        "EnvVar" => &[(1, "name", Text), (2, "value", Text)],
        "Resources" => &[(1, "limits", Quantities), (2, "requests", Quantities)],
        "ObjectMeta" => &[
            (1, "name", Text),
            (2, "generateName", Text),
            (3, "namespace", Text),
            (4, "selfLink", Text),
            (5, "uid", Text),
            (6, "resourceVersion", Text),
            (7, "generation", Number),
            (8, "creationTimestamp", Time),
            (9, "deletionTimestamp", Time),
            (10, "deletionGracePeriodSeconds", Pointer),
            (11, "labels", TextMap),
            (12, "annotations", TextMap),
            (13, "ownerReferences", Messages("OwnerReference")),
            (14, "finalizers", Texts),
        ],
        "OwnerReference" => &[
            (1, "kind", Text),
            (3, "name", Text),
            (4, "uid", Text),
            (5, "apiVersion", Text),
            (6, "controller", Bool),
            (7, "blockOwnerDeletion", Bool),
        ],
        "DeleteOptions" => &[
            (1, "gracePeriodSeconds", Pointer),
            (2, "preconditions", Message("Preconditions")),
            (3, "orphanDependents", Bool),
            (4, "propagationPolicy", Text),
            (5, "dryRun", Texts),
        ],
        "Preconditions" => &[(1, "uid", Text), (2, "resourceVersion", Text)],
        _ => return None,
    })
}

/// One field on the wire.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn broken() -> ApiError {
    ApiError::bad_request("the body is not a protobuf message of Kubernetes")
}

fn varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut out = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().ok_or_else(broken)?;
        *bytes = rest;
        out |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(out);
        }
    }
    Err(broken())
}

fn next<'a>(bytes: &mut &'a [u8]) -> Result<(u64, Wire<'a>)> {
    let tag = varint(bytes)?;
    let value = match tag & 7 {
        0 => Wire::Number(varint(bytes)?),
        2 => {
            let length = usize::try_from(varint(bytes)?).map_err(|_| broken())?;
            if length > bytes.len() {
                return Err(broken());
            }
            let (value, rest) = bytes.split_at(length);
            *bytes = rest;
            Wire::Bytes(value)
        }
        _ => return Err(broken()),
    };
    Ok((tag >> 3, value))
}

fn text(bytes: &[u8]) -> Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| broken())
}

/// Reads a body with the envelope of Kubernetes into the JSON object that it stands for.
pub fn decode(body: &[u8]) -> Result<Value> {
    let mut rest = body.strip_prefix(b"k8s\0").ok_or_else(broken)?;
    let (mut api_version, mut kind, mut raw) = (String::new(), String::new(), &[][..]);
    while !rest.is_empty() {
        match next(&mut rest)? {
            (1, Wire::Bytes(mut types)) => {
                while !types.is_empty() {
                    match next(&mut types)? {
                        (1, Wire::Bytes(value)) => api_version = text(value)?,
                        (2, Wire::Bytes(value)) => kind = text(value)?,
                        _ => return Err(broken()),
                    }
                }
            }
            (2, Wire::Bytes(value)) => raw = value,
            _ => {}
        }
    }
    if fields(&kind).is_none() {
        return Err(ApiError::unsupported_media_type(format!(
            "{kind} is not read from protobuf here; send application/json"
        )));
    }
    let mut value = message(&kind, raw)?;
    value.insert("apiVersion".to_owned(), api_version.into());
    value.insert("kind".to_owned(), kind.into());
    Ok(Value::Object(value))
}

fn message(name: &str, mut bytes: &[u8]) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    while !bytes.is_empty() {
        let (number, wire) = next(&mut bytes)?;
        let known = fields(name).unwrap_or(&[]).iter().find(|(of, _, _)| *of == number);
        let Some((_, field, is)) = known else {
            return Err(ApiError::unsupported_media_type(format!(
                "field {number} of {name} is not read from protobuf here; send application/json"
            )));
        };
        put(&mut out, field, *is, &wire)?;
    }
    Ok(out)
}

fn put(out: &mut Map<String, Value>, field: &str, is: Is, wire: &Wire<'_>) -> Result<()> {
    let list = |out: &mut Map<String, Value>, value: Value| {
        if let Value::Array(list) = out.entry(field).or_insert_with(|| json!([])) {
            list.push(value);
        }
    };
    match (is, wire) {
        (Is::Text, Wire::Bytes(bytes)) => {
            if !bytes.is_empty() {
                out.insert(field.to_owned(), text(bytes)?.into());
            }
        }
        (Is::Texts, Wire::Bytes(bytes)) => list(out, text(bytes)?.into()),
        (Is::Number, Wire::Number(0)) => {}
        // Negative numbers are sign-extended to 64 bits on the wire.
        (Is::Number | Is::Pointer, Wire::Number(number)) => {
            out.insert(field.to_owned(), number.cast_signed().into());
        }
        (Is::Bool, Wire::Number(number)) => {
            if *number != 0 {
                out.insert(field.to_owned(), true.into());
            }
        }
        (Is::Message(name), Wire::Bytes(bytes)) => {
            out.insert(field.to_owned(), Value::Object(message(name, bytes)?));
        }
        (Is::Messages(name), Wire::Bytes(bytes)) => list(out, Value::Object(message(name, bytes)?)),
        (Is::TextMap | Is::BytesMap | Is::Quantities, Wire::Bytes(bytes)) => {
            let (key, value) = entry(bytes)?;
            let value = match is {
                Is::TextMap => text(value)?,
                Is::BytesMap => {
                    use base64::Engine as _;
                    base64::engine::general_purpose::STANDARD.encode(value)
                }
                _ => quantity(value)?,
            };
            if let Value::Object(map) = out.entry(field).or_insert_with(|| json!({})) {
                map.insert(key, value.into());
            }
        }
        (Is::IntOrString, Wire::Bytes(bytes)) => {
            out.insert(field.to_owned(), int_or_string(bytes)?);
        }
        (Is::Time, Wire::Bytes(bytes)) => {
            if let Some(time) = time(bytes)? {
                out.insert(field.to_owned(), time.into());
            }
        }
        _ => return Err(broken()),
    }
    Ok(())
}

fn entry(mut bytes: &[u8]) -> Result<(String, &[u8])> {
    let (mut key, mut value) = (String::new(), &[][..]);
    while !bytes.is_empty() {
        match next(&mut bytes)? {
            (1, Wire::Bytes(found)) => key = text(found)?,
            (2, Wire::Bytes(found)) => value = found,
            _ => return Err(broken()),
        }
    }
    Ok((key, value))
}

fn quantity(mut bytes: &[u8]) -> Result<String> {
    let mut out = String::new();
    while !bytes.is_empty() {
        if let (1, Wire::Bytes(found)) = next(&mut bytes)? {
            out = text(found)?;
        }
    }
    Ok(out)
}

fn int_or_string(mut bytes: &[u8]) -> Result<Value> {
    let (mut is_text, mut number, mut string) = (false, 0, String::new());
    while !bytes.is_empty() {
        match next(&mut bytes)? {
            (1, Wire::Number(kind)) => is_text = kind == 1,
            (2, Wire::Number(found)) => number = found.cast_signed(),
            (3, Wire::Bytes(found)) => string = text(found)?,
            _ => return Err(broken()),
        }
    }
    Ok(if is_text { string.into() } else { number.into() })
}

fn time(mut bytes: &[u8]) -> Result<Option<String>> {
    let mut seconds = None;
    while !bytes.is_empty() {
        if let (1, Wire::Number(found)) = next(&mut bytes)? {
            seconds = Some(found.cast_signed());
        }
    }
    let time = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    Ok(time.map(super::store::seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
        out.extend(bytes);
        out
    }

    fn envelope(kind: &str, raw: &[u8]) -> Vec<u8> {
        let types = [field(1, b"v1"), field(2, kind.as_bytes())].concat();
        [b"k8s\0".to_vec(), field(1, &types), field(2, raw), field(3, b""), field(4, b"")].concat()
    }

    #[test]
    fn reads_what_kubectl_create_sends() {
        let metadata = field(1, &[field(1, b"x"), field(3, b""), field(8, b""), vec![7 << 3, 0]].concat());
        let data = field(2, &[field(1, b"a"), field(2, b"b")].concat());
        let value = decode(&envelope("ConfigMap", &[metadata, data].concat())).unwrap();
        assert_eq!(
            value,
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "b"}})
        );
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        let unknown = decode(&envelope("ConfigMap", &field(9, b"x"))).unwrap_err();
        assert_eq!((unknown.code, unknown.message.contains("field 9 of ConfigMap")), (415, true));
        assert_eq!(decode(&envelope("Pod", b"")).unwrap_err().code, 415);
        for cut in 0..20 {
            let body = envelope("ConfigMap", &field(2, &[field(1, b"a"), field(2, b"b")].concat()));
            // Cut anywhere: an error or a smaller message, never a panic.
            let _ = decode(&body[..cut.min(body.len())]);
        }
        assert_eq!(decode(b"{}").unwrap_err().code, 400);
    }
}
