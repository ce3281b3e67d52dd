//! An API, a controller and two agents: what the controller writes about a pod of one node lets it in on the
//! other, and nothing else does.

use std::time::Instant;

use k8s_openapi::api::core::v1::{Namespace, Node as NodeObject, Pod as PodObject};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_api::NodeNetwork;
use knit_apiserver::{Config as ApiConfig, Server, StoreOptions};
use knit_controller::{Config as ControllerConfig, Controller};
use knit_enforcement::Mode;
use knit_objects::{Key, Object, Objects, Source, Write};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::*;

async fn create<K: Object + Serialize>(objects: &Objects, object: Value) {
    let object: K = serde_json::from_value(object).expect("an object");
    objects.write(&Write::create(&object)).await.expect("created");
}

/// Starts a pod as a kubelet does: again and again until the node can.
async fn start(node: &Node, name: &'static str) -> Pod {
    let (plain, until) = (json!({"io.kubernetes.cri.pod-annotations": {}}), Instant::now() + SOON);
    loop {
        match node.add_with("shop", name, &plain).await {
            Ok(pod) => return pod,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

fn pod(node: &str, name: &str, labels: &Value) -> Value {
    json!({"metadata": {"namespace": "shop", "name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}})
}

/// An API with two nodes, and a controller.
async fn cluster() -> (knit_apiserver::Handle, Objects, tokio::task::JoinHandle<()>) {
    let crds = StoreOptions::with_crds(&knit_api::crds()).expect("CRDs");
    let server = Server::start(ApiConfig { store: crds, ..ApiConfig::default() }).await.expect("an API");
    let open = async || Objects::open(Source::Url(server.url())).await.expect("objects");
    let objects = open().await;
    for name in ["knit-system", "shop"] {
        create::<Namespace>(&objects, json!({"metadata": {"name": name}})).await;
    }
    for (name, address, range) in
        [("a", "192.168.7.1", "10.244.1.0/24"), ("b", "192.168.7.2", "10.244.2.0/24")]
    {
        let spec = json!({"podCIDR": range, "podCIDRs": [range]});
        create::<NodeObject>(&objects, json!({"metadata": {"name": name}, "spec": spec})).await;
        let addresses = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        let write = Write::status::<NodeObject>(Key::cluster(name), &addresses, "kubelet");
        objects.write(&write).await.expect("written");
    }
    let controller = Controller::new(open().await, ControllerConfig::new("one")).expect("a controller");
    let running = tokio::spawn(controller.run(std::future::pending()));
    (server, objects, running)
}

/// In front of an API server: refuses every request with 503 until it has refused questions for all of these.
async fn starting(
    server: &std::sync::Arc<knit_apiserver::Handle>,
    questions: &'static [&'static str],
) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = std::sync::Arc::clone(server);
    tokio::spawn(async move {
        let mut left: Vec<&str> = questions.to_vec();
        while let Ok((mut stream, _)) = listener.accept().await {
            if left.is_empty() {
                let stream = stream.into_std().expect("a stream");
                server.serve_connection(stream).expect("handed over");
                continue;
            }
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap_or_default();
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let answer = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(answer.as_bytes()).await;
            left.retain(|question| !request.starts_with(&format!("GET {question} ")));
        }
    });
    format!("http://{address}")
}

#[test]
fn pods_start_where_the_api_was_starting_when_it_was_asked_for_kinds_that_it_does_not_have() {
    with_bed(|bed| async move {
        let bed = bed;
        let (server, objects, controller) = cluster().await;
        let server = std::sync::Arc::new(server);
        let node = bed.node();
        let agent = node.start_from(Source::Url(server.url()), Mode::On).await;
        create::<PodObject>(&objects, pod("a", "first", &json!({}))).await;
        create::<PodObject>(&objects, pod("a", "second", &json!({}))).await;
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
        let deny = json!({"metadata": {"namespace": "shop", "name": "deny"}, "spec": spec});
        create::<NetworkPolicy>(&objects, deny).await;
        let first = start(node, "first").await;
        let cache = node.dir.join("state").join("policy-cache.json");
        knit_testbed::wait::eventually("it is on disk", SOON, || {
            let text = std::fs::read_to_string(&cache).map_err(|e| e.to_string())?;
            if text.contains("deny") { Ok(()) } else { Err(text) }
        })
        .await;
        agent.stop(STOP).await;
        // Without the CRDs of policies, and asked for them while it comes up.
        let starting = starting(&server, &["/apis"]).await;
        let agent = node.start_from(Source::Url(starting), Mode::On).await;
        let second = start(node, "second").await;
        assert!(!reaches(&first.space, second.addresses[0], REFUSED), "and policies are in force");
        agent.stop(STOP).await;
        controller.abort();
    });
}

#[test]
fn a_pod_of_another_node_is_let_in_by_what_the_controller_writes() {
    with_bed(|bed| async move {
        // All of it: the wire too.
        let bed = bed;
        let (server, objects, controller) = cluster().await;
        let (a, b) = (&bed.nodes[0], &bed.nodes[1]);
        let source = || Source::Url(server.url());
        let agents = [a.start_from(source(), Mode::On).await, b.start_from(source(), Mode::On).await];
        for (node, name, role) in [("a", "server", "server"), ("b", "client", "client")] {
            create::<PodObject>(&objects, pod(node, name, &json!({"role": role}))).await;
        }
        let from = json!([{"podSelector": {"matchLabels": {"role": "client"}}}]);
        let spec = json!({"podSelector": {"matchLabels": {"role": "server"}}, "ingress": [{"from": from}]});
        let allow = json!({"metadata": {"namespace": "shop", "name": "allow"}, "spec": spec});
        create::<NetworkPolicy>(&objects, allow).await;
        let (server_pod, client) = (start(a, "server").await, start(b, "client").await);
        becomes("it is isolated", &client.space, server_pod.addresses[0], false).await;
        // As kubelets do a moment after a pod has its address.
        for pod in [&server_pod, &client] {
            let ip = pod.addresses[0].to_string();
            let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]});
            let write = Write::status::<PodObject>(Key::namespaced("shop", pod.name), &status, "kubelet");
            objects.write(&write).await.expect("written");
        }
        let known = Instant::now();
        becomes("it is let in", &client.space, server_pod.addresses[0], true).await;
        println!("let in {:?} after its address was known", known.elapsed());
        // What is in force is told.
        let told = knit_testbed::wait::eventually("NodeNetwork says so", SOON, || {
            let shown = agents[0].core().networks().states();
            let state = shown.into_iter().find(|state| state.name == "default").and_then(|s| s.policies);
            match state {
                Some(state) if state.acting == 1 && state.newest.is_some() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        told.await;
        let shown = async || {
            let object = objects.get::<NodeNetwork>(&Key::cluster("a")).await.ok()??;
            let networks = object.status?.networks;
            networks.into_iter().find(|network| network.name == "default")?.policies
        };
        let until = Instant::now() + SOON;
        while shown().await.is_none_or(|policies| policies.acting != 1) {
            assert!(Instant::now() < until, "it is not in NodeNetwork: {:?}", shown().await);
            tokio::task::yield_now().await;
        }
        let label = json!({"metadata": {"labels": {"role": "another"}}});
        let write = Write::merge::<PodObject>(Key::namespaced("shop", "client"), label);
        objects.write(&write).await.expect("patched");
        becomes("its label is another", &client.space, server_pod.addresses[0], false).await;
        for agent in agents {
            agent.stop(STOP).await;
        }
        controller.abort();
    });
}
