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
use knit_node::report::writer;
use knit_objects::{Objects, Source};
use serde_json::{Value, json};

/// What was written, by path: how often, and the last body.
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
        Method::GET => json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachmentList", "metadata": {}, "items": []
        }),
        _ => {
            let mut written = written.lock().expect("nobody panicked");
            let entry = written.entry(path.clone()).or_default();
            *entry = (entry.0 + 1, body.clone());
            if path.contains(TAKEN) {
                code = 422;
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 422, "reason": "Invalid",
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

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let waited = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"));
}

#[tokio::test]
async fn a_name_that_a_user_took_delays_no_other_pods_report() {
    let node = Node::new();
    let agent = node.start().await;
    let (url, written) = serve().await;
    let objects = Objects::open(Source::Url(url)).await.expect("objects");
    agent.add(node.request("evil", "shop", "blue")).await.expect("attached");
    let writing = tokio::spawn(writer::write_reports(agent.core.clone(), objects));
    eventually("the refusal", || count(&written, TAKEN) == 1).await;
    // All others are told without it being tried again before each.
    for n in 0..8 {
        let name = format!("p{n}");
        agent.add(node.request(&name, "shop", "blue")).await.expect("attached");
        eventually("the report", || count(&written, &format!("pod-{name}-net1")) == 2).await;
    }
    assert!(count(&written, TAKEN) < 8, "{} attempts", count(&written, TAKEN));
    // Its pod says what to do about it, once.
    eventually("the event", || count(&written, "/events") == 1).await;
    let event = {
        let written = written.lock().expect("nobody panicked");
        written.iter().find(|(path, _)| path.contains("/events")).map(|(_, (_, body))| body.to_string())
    };
    assert!(event.is_some_and(|e| e.contains("NameTaken") && e.contains(TAKEN) && e.contains("delete it")));
    eventually("the next attempt", || count(&written, TAKEN) >= 2).await;
    assert_eq!(count(&written, "/events"), 1);
    writing.abort();
}
