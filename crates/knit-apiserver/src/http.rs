//! The HTTP side: requests in, answers and watch streams out. All rules are the store's.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::{Stream, StreamExt as _, stream};
use http_body_util::{BodyExt as _, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Frame;
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::{Value, json};

use super::admission::Part;
use super::event::line;
use super::exec::Exec;
use super::kinds::Kind;
use super::object::{Object, at, meta};
use super::patch::PatchType;
use super::request::{Form, Query, Target, decode, encode_token};
use super::selector::Selector;
use super::status::{ApiError, Result, details};
use super::store::{List, ListParams, Store, from_stored};
use super::stream::{Encoder, WatchStream};
use super::table::{partial, table};
use super::watch::WatchParams;
use super::write::{WriteOptions, Written};
use super::{discovery, exec, log, openapi};

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What a real server allows as well.
const MAX_BODY: usize = 3 * 1024 * 1024;

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).boxed_unsync()
}

fn respond(code: u16, bytes: Bytes, media: &str, warnings: &[String]) -> Response<Body> {
    let mut response = Response::new(full(bytes));
    *response.status_mut() =
        hyper::StatusCode::from_u16(code).unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    if let Ok(media) = media.parse() {
        headers.insert("content-type", media);
    }
    for warning in warnings {
        let text = warning.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = format!("299 - \"{text}\"").parse() {
            headers.append("warning", value);
        }
    }
    response
}

fn json_response(code: u16, value: &Value) -> Response<Body> {
    respond(code, Bytes::from(value.to_string()), "application/json", &[])
}

/// What requests are answered from.
#[derive(Clone, Debug)]
pub struct Served {
    /// The objects.
    pub store: Store,
    /// Where the output of pods goes, if somebody runs them: see [`super::log`].
    pub logs: Option<PathBuf>,
    /// Who runs commands in pods, if anybody does.
    pub exec: Option<Arc<dyn Exec>>,
}

/// Answers one request. Never fails: what goes wrong is a Status object.
pub async fn handle<B>(served: Served, request: Request<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut request = request;
    let upgrade = hyper::upgrade::on(&mut request);
    let (parts, body) = request.into_parts();
    let body = match Limited::new(body, MAX_BODY).collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => {
            let why = "the request body could not be read, or is larger than 3 MiB";
            return failure(&ApiError::new(413, "RequestEntityTooLarge", why));
        }
    };
    let Served { store, logs, exec } = served;
    let call = Call {
        store,
        method: parts.method,
        query: Query::parse(parts.uri.query().unwrap_or("")),
        headers: parts.headers,
        body,
    };
    let path = parts.uri.path();
    let (log_of, exec_in) = (pod_of(path, "/log"), pod_of(path, "/exec"));
    let answer = match (log_of, exec_in) {
        (Some((namespace, name)), _) if call.method == Method::GET => {
            log::answer(&call.store, logs.as_deref(), &namespace, &name, &call.query).await
        }
        (_, Some((namespace, name))) if matches!(call.method, Method::GET | Method::POST) => {
            let pod = (namespace.as_str(), name.as_str());
            exec::answer(&call.store, exec.as_deref(), pod, &call.query, &call.headers, upgrade)
        }
        _ => call.route(path),
    };
    answer.unwrap_or_else(|error| failure(&error))
}

/// The namespace and name of the pod of which a path names this subresource.
fn pod_of(path: &str, subresource: &str) -> Option<(String, String)> {
    let rest = path.strip_prefix("/api/v1/namespaces/")?.strip_suffix(subresource)?;
    let (namespace, name) = rest.split_once("/pods/")?;
    (!namespace.contains('/') && !name.contains('/')).then(|| (decode(namespace), decode(name)))
}

fn failure(error: &ApiError) -> Response<Body> {
    json_response(error.code, &error.to_status())
}

/// A request that has been read.
struct Call {
    store: Store,
    method: Method,
    query: Query,
    headers: HeaderMap,
    body: Bytes,
}

impl Call {
    fn route(&self, path: &str) -> Result<Response<Body>> {
        let segments: Vec<String> = path.split('/').filter(|part| !part.is_empty()).map(decode).collect();
        let text: Vec<&str> = segments.iter().map(String::as_str).collect();
        let found = |value: Option<Value>| {
            value.map(|value| json_response(200, &value)).ok_or_else(ApiError::no_such_path)
        };
        match text.as_slice() {
            ["healthz" | "livez" | "readyz", ..] => {
                Ok(respond(200, Bytes::from_static(b"ok"), "text/plain", &[]))
            }
            ["version"] => Ok(json_response(200, &super::version())),
            [] => Ok(json_response(
                200,
                &json!({"paths": ["/api", "/apis", "/healthz", "/livez", "/openapi/v3", "/readyz",
                    "/version"]}),
            )),
            ["api"] => self.discovery(true),
            ["apis"] => self.discovery(false),
            ["api", version] => {
                found(self.store.with_registry(|registry| discovery::resources(registry, "", version)))
            }
            ["apis", group] => found(self.store.with_registry(|registry| discovery::group(registry, group))),
            ["apis", group, version] => {
                found(self.store.with_registry(|registry| discovery::resources(registry, group, version)))
            }
            ["openapi", "v2"] => {
                Form::negotiate(&self.headers, &self.query)?;
                Ok(json_response(200, &openapi::v2()))
            }
            ["openapi", "v3"] => Ok(json_response(200, &self.store.with_registry(openapi::index))),
            ["openapi", "v3", "api", version] => {
                found(self.store.with_registry(|registry| openapi::document(registry, "", version)))
            }
            ["openapi", "v3", "apis", group, version] => {
                found(self.store.with_registry(|registry| openapi::document(registry, group, version)))
            }
            ["api", version, ..] => self.resource(&Target::parse(&self.store, "", version, &segments[2..])?),
            ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"] => {
                // Whatever is asked, the answer is the same: the lab has no authorization.
                let review = json!({"kind": "SelfSubjectAccessReview",
                    "apiVersion": "authorization.k8s.io/v1", "spec": {}, "status": {"allowed": true}});
                Ok(json_response(201, &review))
            }
            ["apis", group, version, ..] => {
                self.resource(&Target::parse(&self.store, group, version, &segments[3..])?)
            }
            _ => Err(ApiError::no_such_path()),
        }
    }

    fn discovery(&self, core: bool) -> Result<Response<Body>> {
        match Form::negotiate(&self.headers, &self.query)? {
            Form::Discovery(version) => {
                let value =
                    self.store.with_registry(|registry| discovery::aggregated(registry, core, &version));
                let media =
                    format!("application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList");
                Ok(respond(200, Bytes::from(value.to_string()), &media, &[]))
            }
            _ if core => Ok(json_response(200, &discovery::api_versions())),
            _ => Ok(json_response(200, &self.store.with_registry(discovery::groups))),
        }
    }

    fn json_body(&self) -> Result<Value> {
        let media = self.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("");
        if media.contains("protobuf") {
            return super::proto::decode(&self.body);
        }
        parse_body(&self.body)
    }

    fn resource(&self, target: &Target) -> Result<Response<Body>> {
        let (kind, ns) = (&*target.kind, target.ns());
        let part = if target.subresource.as_deref() == Some("status") { Part::Status } else { Part::Main };
        let Some(name) = target.name.as_deref() else { return self.collection(target) };
        match target.subresource.as_deref() {
            None => {}
            Some("status") if kind.status => {}
            Some("scale") if kind.scale => return self.scale(kind, ns, name),
            Some("binding") if kind.is("", "Pod") && self.method == Method::POST => {
                let body = self.json_body()?;
                if meta(&body, "name") != name {
                    return Err(ApiError::bad_request("name in URL does not match name in Binding object"));
                }
                let node = at(&body, "target.name").and_then(Value::as_str).unwrap_or("");
                if node.is_empty() {
                    return Err(ApiError::bad_request("the Binding names no node: set target.name"));
                }
                self.store.bind(ns, name, node, &self.options(Part::Binding)?)?;
                return Ok(json_response(201, &success(kind, name, "")));
            }
            Some("eviction") if kind.is("", "Pod") && self.method == Method::POST => {
                let body = self.json_body()?;
                self.store.delete(kind, ns, name, &self.query.delete_options(&body["deleteOptions"]))?;
                return Ok(json_response(201, &success(kind, name, "")));
            }
            Some(which @ ("attach" | "portforward")) if kind.is("", "Pod") => {
                let instead = if which == "attach" {
                    format!("see what it prints with `kubectl logs {name}`, or run a command in it")
                } else {
                    format!("run a command in the pod: `knit lab exec {ns}/{name} -- COMMAND`")
                };
                let why = format!("{which} is not served by the lab's API: {instead}");
                return Err(ApiError::new(501, "NotImplemented", why));
            }
            Some(_) => return Err(ApiError::no_such_path()),
        }
        match self.method {
            Method::GET => self.object(200, kind, &self.store.get(kind, ns, name)?, &[]),
            Method::PUT => self
                .written(kind, &self.store.update(kind, ns, name, self.json_body()?, &self.options(part)?)?),
            Method::PATCH => {
                let (patch, patch_type) = self.patch_body()?;
                let mut options = self.options(part)?;
                if patch_type == PatchType::Apply && self.query.get("fieldManager").is_empty() {
                    options.manager.clear();
                }
                self.written(kind, &self.store.patch(kind, ns, name, &patch, patch_type, &options)?)
            }
            Method::DELETE if part == Part::Main => {
                let body = if self.body.is_empty() { Value::Null } else { self.json_body()? };
                let (object, gone) = self.store.delete(kind, ns, name, &self.query.delete_options(&body))?;
                // These kinds answer with what they were.
                let shown = kind.group.is_empty()
                    && matches!(kind.kind.as_str(), "Pod" | "Service" | "ServiceAccount");
                if gone && !shown {
                    Ok(json_response(200, &success(kind, name, object.uid())))
                } else {
                    self.object(200, kind, &object, &[])
                }
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn options(&self, part: Part) -> Result<WriteOptions> {
        self.query.write_options(&self.method, &self.headers, part)
    }

    fn patch_body(&self) -> Result<(Value, PatchType)> {
        let media = self.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("");
        let patch_type = PatchType::of_content_type(media).ok_or_else(|| {
            ApiError::unsupported_media_type(format!(
                "the body of the request was in an unknown format ({media:?}) - accepted media types \
                 include: \
                 application/json-patch+json, application/merge-patch+json, \
                 application/strategic-merge-patch+json, \
                 application/apply-patch+yaml"
            ))
        })?;
        Ok((parse_body(&self.body)?, patch_type))
    }

    fn collection(&self, target: &Target) -> Result<Response<Body>> {
        let kind = &target.kind;
        match self.method {
            // Objects of a namespace are made and deleted in one.
            Method::POST | Method::DELETE if kind.namespaced && target.namespace.is_none() => {
                Err(ApiError::method_not_allowed())
            }
            Method::POST => {
                let written =
                    self.store.create(kind, target.ns(), self.json_body()?, &self.options(Part::Main)?)?;
                self.written(kind, &written)
            }
            Method::GET | Method::DELETE => {
                let selector =
                    Selector::parse(kind, self.query.get("labelSelector"), self.query.get("fieldSelector"))?;
                if self.method == Method::GET && self.query.flag("watch") {
                    return self.watch(target, selector);
                }
                let limit =
                    self.query.number("limit")?.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
                let params = ListParams {
                    namespace: target.namespace.clone(),
                    selector,
                    limit,
                    after: self.query.continue_from()?,
                };
                if self.method == Method::GET {
                    self.version()?;
                    return self.list(kind, &self.store.list(kind, &params)?);
                }
                let body = if self.body.is_empty() { Value::Null } else { self.json_body()? };
                let gone = self.store.delete_collection(kind, &params, &self.query.delete_options(&body))?;
                self.list(kind, &gone)
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn written(&self, kind: &Kind, written: &Written) -> Result<Response<Body>> {
        let code = if written.created { 201 } else { 200 };
        self.object(code, kind, &written.object, &written.warnings)
    }

    fn object(
        &self,
        code: u16,
        kind: &Kind,
        object: &Arc<Object>,
        warnings: &[String],
    ) -> Result<Response<Body>> {
        let bytes = match Form::negotiate(&self.headers, &self.query)? {
            Form::Table(include) => {
                let metadata = json!({"resourceVersion": object.rv.to_string()});
                Bytes::from(
                    table(kind, std::slice::from_ref(object), &metadata, include, self.store.now())
                        .to_string(),
                )
            }
            Form::Partial => Bytes::from(partial(&object.value).to_string()),
            _ => encoded(kind, object),
        };
        Ok(respond(code, bytes, "application/json", warnings))
    }

    fn list(&self, kind: &Kind, list: &List) -> Result<Response<Body>> {
        let mut metadata = json!({"resourceVersion": list.resource_version.to_string()});
        if let Some((rv, key)) = &list.more {
            metadata["continue"] = json!(encode_token(*rv, key));
        }
        if let Some(remaining) = list.remaining {
            metadata["remainingItemCount"] = json!(remaining);
        }
        let bytes = match Form::negotiate(&self.headers, &self.query)? {
            Form::Table(include) => {
                Bytes::from(table(kind, &list.items, &metadata, include, self.store.now()).to_string())
            }
            Form::Partial => {
                let items: Vec<Value> = list.items.iter().map(|object| partial(&object.value)).collect();
                let value = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                    "metadata": metadata, "items": items});
                Bytes::from(value.to_string())
            }
            _ => {
                let items: Vec<Bytes> = list.items.iter().map(|object| encoded(kind, object)).collect();
                let mut out =
                    BytesMut::with_capacity(items.iter().map(|item| item.len() + 1).sum::<usize>() + 200);
                let head = format!(
                    "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{metadata},\"items\":[",
                    kind.kind,
                    kind.api_version()
                );
                out.put_slice(head.as_bytes());
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.put_u8(b',');
                    }
                    out.put_slice(item);
                }
                out.put_slice(b"]}");
                out.freeze()
            }
        };
        Ok(respond(200, bytes, "application/json", &[]))
    }

    fn scale(&self, kind: &Kind, ns: &str, name: &str) -> Result<Response<Body>> {
        let object = match self.method {
            Method::GET => self.store.get(kind, ns, name)?,
            Method::PUT | Method::PATCH => {
                let (patch, patch_type) = match self.method {
                    Method::PUT => (self.json_body()?, None),
                    _ => self.patch_body().map(|(patch, patch_type)| (patch, Some(patch_type)))?,
                };
                let written =
                    self.store.modify(kind, ns, name, &self.options(Part::Main)?, false, |current| {
                        let scale = scale_of(current);
                        let scale = match patch_type {
                            Some(patch_type) => super::patch::patched(
                                &scale,
                                &patch,
                                patch_type,
                                &super::shape::Shape::default(),
                            )?,
                            None => patch.clone(),
                        };
                        let mut new = current.clone();
                        new["spec"]["replicas"] = json!(scale["spec"]["replicas"].as_i64().unwrap_or(0));
                        new["metadata"]["resourceVersion"] = scale["metadata"]["resourceVersion"].clone();
                        Ok(new)
                    })?;
                written.object
            }
            _ => return Err(ApiError::method_not_allowed()),
        };
        Ok(json_response(200, &scale_of(&object.value)))
    }

    /// The version that is asked for.
    fn version(&self) -> Result<Option<u64>> {
        match self.query.get("resourceVersion") {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|_| {
                ApiError::bad_request(format!("invalid resource version {text:?}: not a number"))
            }),
        }
    }

    fn watch(&self, target: &Target, selector: Selector) -> Result<Response<Body>> {
        let resource_version = self.version()?;
        let form = Form::negotiate(&self.headers, &self.query)?;
        let send_initial_events = self.query.flag("sendInitialEvents");
        if send_initial_events && self.query.get("resourceVersionMatch") != "NotOlderThan" {
            return Err(ApiError::new(
                422,
                "Invalid",
                "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents \
                 requires setting resourceVersionMatch to NotOlderThan",
            ));
        }
        let bookmarks = self.query.flag("allowWatchBookmarks");
        let params = WatchParams {
            namespace: target.namespace.clone(),
            selector,
            resource_version,
            send_initial_events,
        };
        let timeout =
            Duration::from_secs(self.query.number("timeoutSeconds")?.filter(|s| *s > 0).unwrap_or(3600));
        let stream: std::pin::Pin<Box<dyn Stream<Item = Bytes> + Send>> =
            match self.store.watch(&target.kind, params) {
                Ok(watcher) => {
                    let watch = WatchStream {
                        encoder: Encoder { kind: Arc::clone(&target.kind), form, store: self.store.clone() },
                        watcher,
                        bookmarks,
                        announce: send_initial_events && bookmarks,
                        end: tokio::time::Instant::now() + timeout,
                        done: false,
                    };
                    Box::pin(
                        stream::unfold(watch, |mut watch| async move { Some((watch.next().await?, watch)) })
                            .flat_map(stream::iter),
                    )
                }
                // As in a real server, the watch begins and then says why it cannot go on.
                Err(error) if error.code == 410 => {
                    Box::pin(stream::iter([line("ERROR", error.to_status().to_string().as_bytes())]))
                }
                Err(error) => return Err(error),
            };
        let frames = stream.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes)));
        let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
        response
            .headers_mut()
            .insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
        Ok(response)
    }
}

fn parse_body(body: &Bytes) -> Result<Value> {
    match serde_json::from_slice(body) {
        Ok(value) => Ok(value),
        Err(json) => {
            // kubectl sends JSON for everything; apply patches, and people with curl, may send YAML.
            let text = std::str::from_utf8(body)
                .map_err(|_| ApiError::bad_request("the body is neither JSON nor YAML"))?;
            serde_saphyr::from_str(text).map_err(|yaml| {
                ApiError::bad_request(format!("the body is neither JSON ({json}) nor YAML ({yaml})"))
            })
        }
    }
}

/// An object as JSON, in the form of its kind.
pub fn encoded(kind: &Kind, object: &Object) -> Bytes {
    if kind.is_events_v1() {
        return Bytes::from(from_stored(kind, &object.value).to_string());
    }
    object.json().clone()
}

fn success(kind: &Kind, name: &str, uid: &str) -> Value {
    let mut details = details(name, &kind.group, &kind.plural);
    if !uid.is_empty() {
        details["uid"] = json!(uid);
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

fn scale_of(deployment: &Value) -> Value {
    let labels = deployment["spec"]["selector"]["matchLabels"].as_object();
    let selector: Vec<String> =
        labels.into_iter().flatten().map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or(""))).collect();
    json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": {
            "name": meta(deployment, "name"), "namespace": meta(deployment, "namespace"),
                "uid": meta(deployment, "uid"),
            "resourceVersion": meta(deployment, "resourceVersion"), "creationTimestamp": meta(deployment,
                "creationTimestamp"),
        },
        "spec": {"replicas": deployment["spec"]["replicas"]},
        "status": {"replicas": deployment["status"]["replicas"].as_i64().unwrap_or(0),
            "selector": selector.join(",")},
    })
}
