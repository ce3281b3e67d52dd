//! What is told about pods, to an API server that refuses some of it.

mod common;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Node;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use knit_api::{NetworkAttachment, names};
use knit_apiserver::{Config as ApiConfig, Server, StoreOptions};
use knit_node::report::{published, writer};
use knit_objects::{Key, Objects, Source, Write};
use knit_testbed::wait::holds;
use serde_json::{Value, json};

/// What was written, by method and path: how often, and the last body.
type Written = Arc<Mutex<BTreeMap<String, (usize, Value)>>>;

/// A user made this object beforehand, for something else.
const TAKEN: &str = "pod-evil-net1";

async fn answer(request: Request<Incoming>, written: Written) -> Response<Full<Bytes>> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body =
        request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut code = 200;
    let answer = match method {
        Method::GET if path.ends_with(TAKEN) => json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
            "metadata": {"name": TAKEN, "namespace": "shop"}, "spec": {"pod": "another", "network": "blue"}
        }),
        Method::GET if path.ends_with("/networkattachments") => json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachmentList", "metadata": {}, "items": []
        }),
        // What an agent wrote is there as it wrote it.
        Method::GET if written.lock().expect("nobody panicked").contains_key(&format!("PATCH {path}")) => {
            written.lock().expect("nobody panicked")[&format!("PATCH {path}")].1.clone()
        }
        Method::GET => {
            code = 404;
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                "reason": "NotFound", "message": "it is not there"})
        }
        _ => {
            let mut written = written.lock().expect("nobody panicked");
            let entry = written.entry(format!("{method} {path}")).or_default();
            *entry = (entry.0 + 1, body.clone());
            if path.contains(TAKEN) {
                code = 422;
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 422,
                    "reason": "Invalid",
                    "message": "an attachment cannot be changed in place", "details": {"name": TAKEN}})
            } else {
                body
            }
        }
    };
    let mut response = Response::new(Full::from(answer.to_string()));
    *response.status_mut() = hyper::StatusCode::from_u16(code).expect("a code");
    response
        .headers_mut()
        .insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
    response
}

async fn serve() -> (String, Written) {
    let written = Written::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let seen = Arc::clone(&written);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let seen = Arc::clone(&seen);
                    async move { Ok::<_, Infallible>(answer(request, seen).await) }
                });
                let server = hyper::server::conn::http1::Builder::new();
                // A client that goes away is none of our business.
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    (url, written)
}

/// How often something was written to paths with these words in them.
fn count(written: &Written, words: &str) -> usize {
    let written = written.lock().expect("nobody panicked");
    written.iter().filter(|(path, _)| path.contains(words)).map(|(_, (n, _))| n).sum()
}

#[tokio::test]
async fn a_name_that_a_user_took_delays_no_other_pods_report() {
    let node = Node::new();
    let agent = node.start().await;
    let (url, written) = serve().await;
    let objects = Objects::open(Source::Url(url)).await.expect("objects");
    agent.add(node.request("evil", "shop", "blue")).await.expect("attached");
    let writing = tokio::spawn(writer::write_reports(agent.core.clone(), objects));
    holds("the refusal", || count(&written, TAKEN) == 1).await;
    // All others are told without it being tried again before each.
    for n in 0..8 {
        let name = format!("p{n}");
        agent.add(node.request(&name, "shop", "blue")).await.expect("attached");
        holds("the report", || count(&written, &format!("pod-{name}-net1")) == 2).await;
    }
    assert!(count(&written, TAKEN) < 8, "{} attempts", count(&written, TAKEN));
    // Its pod says what to do about it, once.
    holds("the event", || count(&written, "/events") == 1).await;
    let event = {
        let written = written.lock().expect("nobody panicked");
        written.iter().find(|(path, _)| path.contains("/events")).map(|(_, (_, body))| body.to_string())
    };
    assert!(event.is_some_and(|e| e.contains("NameTaken") && e.contains(TAKEN) && e.contains("delete it")));
    holds("the next attempt", || count(&written, TAKEN) >= 2).await;
    assert_eq!(count(&written, "/events"), 1);
    writing.abort();
}

#[tokio::test]
async fn the_lease_is_in_the_namespace_that_the_agent_is_told() {
    for (told, namespace) in [(None, "knit-system"), (Some("pod-networks"), "pod-networks")] {
        let node = Node { namespace: told.map(str::to_owned), ..Node::new() };
        let agent = node.start().await;
        let (url, written) = serve().await;
        let objects = Objects::open(Source::Url(url)).await.expect("objects");
        let renewing = tokio::spawn(writer::renew_lease(agent.core.clone(), objects));
        holds("the Lease", || count(&written, &format!("/namespaces/{namespace}/leases")) > 0).await;
        renewing.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announcement_that_a_user_deleted_was_never_written_again() {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let server = Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server");
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    let namespace = json!({"metadata": {"name": "shop"}});
    let namespace: k8s_openapi::api::core::v1::Namespace =
        serde_json::from_value(namespace).expect("a Namespace");
    objects.write(&Write::create(&namespace)).await.expect("created");

    let mut node = Node::new();
    let blue = Arc::make_mut(Arc::make_mut(&mut node.world.networks).get_mut("blue").expect("it is there"));
    blue.edit(|blue| blue.spec.subnets[0].reserved = vec!["10.2.9.0/24".into()]);
    let agent = node.start().await;
    // Out of a reserved range: no other node could know where it is.
    let request = node.request("a", "shop", r#"[{"name": "blue", "ips": ["10.2.9.7"]}]"#);
    agent.add(request).await.expect("attached");
    let writing = [
        tokio::spawn(writer::write_reports(agent.core.clone(), objects.clone())),
        tokio::spawn(published::follow(agent.core.clone(), objects.clone())),
    ];
    let key = Key::namespaced("shop", "pod-a-net1");
    let there = async |what: &str, good: &dyn Fn(&NetworkAttachment) -> bool| {
        let waited = async {
            loop {
                if let Ok(Some(object)) = objects.get::<NetworkAttachment>(&key).await
                    && good(&object)
                {
                    return object;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(60), waited).await;
        waited.unwrap_or_else(|_| panic!("{what} did not happen"))
    };
    let label = |object: &NetworkAttachment, label: &str| {
        object.metadata.labels.as_ref().and_then(|labels| labels.get(label).cloned())
    };
    let whole = |object: &NetworkAttachment| {
        label(object, names::ANNOUNCED_LABEL).as_deref() == Some("true")
            && label(object, names::MANAGED_BY_LABEL).as_deref() == Some(names::MANAGED_BY)
            && object.status.as_ref().is_some_and(|s| s.addresses.iter().any(|a| a.address == "10.2.9.7"))
    };
    let first = there("the announcement", &whole).await;
    for round in 0..2 {
        let before = there("the announcement", &whole).await;
        objects.write(&Write::delete::<NetworkAttachment>(key.clone())).await.expect("deleted");
        let another =
            |object: &NetworkAttachment| whole(object) && object.metadata.uid != before.metadata.uid;
        let again = there("the announcement after its deletion", &another).await;
        assert_ne!(again.metadata.uid, first.metadata.uid, "round {round}");
    }
    // Labels by which others find it, and what it says.
    for (what, patch) in [
        ("the announced label", json!({"metadata": {"labels": {names::ANNOUNCED_LABEL: null}}})),
        ("whose it is", json!({"metadata": {"labels": {names::MANAGED_BY_LABEL: "me"}}})),
    ] {
        let write = Write::merge::<NetworkAttachment>(key.clone(), patch);
        objects.write(&write).await.expect("patched");
        there(what, &whole).await;
    }
    let patch = json!({"status": {"addresses": []}});
    objects.write(&Write::merge_status::<NetworkAttachment>(key.clone(), patch)).await.expect("patched");
    there("the address", &whole).await;
    // With its pod it goes, and stays away.
    agent.del("a").await.expect("detached");
    let gone = async {
        while objects.get::<NetworkAttachment>(&key).await.expect("an answer").is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("it goes with its pod");
    writing.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn an_object_that_a_user_made_under_a_pods_name_is_not_deleted_with_the_pod() {
    let node = Node::new();
    let agent = node.start().await;
    let (url, written) = serve().await;
    let objects = Objects::open(Source::Url(url)).await.expect("objects");
    for name in ["evil", "good"] {
        agent.add(node.request(name, "shop", "blue")).await.expect("attached");
    }
    let writing = tokio::spawn(writer::write_reports(agent.core.clone(), objects));
    holds("the refusal", || count(&written, TAKEN) > 0).await;
    holds("the report", || count(&written, "pod-good-net1") == 2).await;
    // The user's first: reports are written one after the other.
    agent.del("evil").await.expect("detached");
    agent.del("good").await.expect("detached");
    let deletions = |name: &str| {
        let written = written.lock().expect("nobody panicked");
        written.keys().filter(|key| key.starts_with("DELETE ") && key.contains(name)).count()
    };
    holds("the end of the other's", || deletions("pod-good-net1") == 1).await;
    assert_eq!(deletions(TAKEN), 0, "it is the user's");
    writing.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_was_restarted_wrote_again_what_its_node_said_already() {
    use k8s_openapi::api::core::v1::Node as NodeObject;
    use knit_api::NodeNetwork;

    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let server = Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server");
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    let object: NodeObject =
        serde_json::from_value(json!({"metadata": {"name": common::NODE}})).expect("a Node");
    objects.write(&Write::create(&object)).await.expect("created");
    let key = Key::cluster(common::NODE);
    // What an agent said an hour ago.
    let then = jiff::Timestamp::now() - jiff::SignedDuration::from_hours(1);
    let (reason, message) = ("KnitIsReady", "the node agent is ready to attach pods");
    let manager = names::AGENT_MANAGER;
    let write = Write::node_network_unavailable(common::NODE, false, reason, message, then, manager);
    objects.write(&write).await.expect("written");
    let first = objects.get::<NodeObject>(&key).await.expect("an answer").expect("a Node");

    let node = Node::new();
    let agent = node.start().await;
    let writing = tokio::spawn(writer::write_node(agent.core.clone(), objects.clone()));
    // Two pods, one after the other: what is said of the second is written after all that was written at the
    // start.
    for (sandbox, network) in [("a", "blue"), ("b", "other")] {
        agent.add(node.request(sandbox, "shop", network)).await.expect("attached");
        let said = async {
            loop {
                let said = objects.get::<NodeNetwork>(&key).await.expect("an answer");
                let networks = said.and_then(|said| said.status).map(|status| status.networks);
                if networks.unwrap_or_default().iter().any(|n| n.name == network && n.ready) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), said).await.expect("what is said of a Network");
    }
    let said = objects.get::<NodeNetwork>(&key).await.expect("an answer").expect("a NodeNetwork");
    let held = said.status.expect("a status").held_ranges;
    assert!(held.iter().any(|held| held.network == "blue" && !held.ranges.is_empty()), "{held:?}");
    let second = objects.get::<NodeObject>(&key).await.expect("an answer").expect("a Node");
    assert_eq!(second.metadata.resource_version, first.metadata.resource_version, "it was written again");
    writing.abort();
}
