//! What the authors of cluster-wide policies are told, against the lab's embedded API: by the status of the
//! policy, and by events.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::events::v1::Event;
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_controller::{Config, Controller};
use knit_objects::{Cache, Key, Objects, Source, Write};
use knit_policy::kubernetes::ClusterNetworkPolicy;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::Instant;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// As much of the CRD as an API server needs to keep such objects.
fn crd() -> Value {
    let condition = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true,
        "required": ["type"], "properties": {"type": {"type": "string"}}});
    let conditions = json!({"type": "array", "items": condition, "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"]});
    let schema = json!({"type": "object", "properties": {
        "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
        "status": {"type": "object", "properties": {"conditions": conditions}}}});
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "clusternetworkpolicies.policy.networking.k8s.io"},
        "spec": {"group": "policy.networking.k8s.io", "scope": "Cluster",
            "names": {"kind": "ClusterNetworkPolicy", "plural": "clusternetworkpolicies",
                "singular": "clusternetworkpolicy", "listKind": "ClusterNetworkPolicyList"},
            "versions": [{"name": "v1alpha2", "served": true, "storage": true,
                "subresources": {"status": {}}, "schema": {"openAPIV3Schema": schema}}]}})
}

async fn serve() -> Handle {
    let ours = knit_api::crds();
    let ours = ours.iter().map(|crd| serde_json::to_value(crd).expect("JSON"));
    let store = StoreOptions { crds: ours.chain([crd()]).collect(), ..StoreOptions::default() };
    Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server")
}

/// Runs a controller until it is stopped.
struct Running {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(server: &Handle, identity: &str, enforce_policies: bool) -> Self {
        let config = Config {
            enforce_policies,
            renew_every: Duration::from_millis(200),
            lease_duration: Duration::from_secs(10),
            ..Config::new(identity)
        };
        let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
        let controller = Controller::new(objects, config).expect("a controller");
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(controller.run(async move {
            let _ = stopped.await;
        }));
        Self { stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).expect("a controller that runs");
        self.task.await.expect("no panic");
    }
}

fn policy(rule: &Value) -> ClusterNetworkPolicy {
    let object = json!({"metadata": {"name": "p"},
        "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]}});
    serde_json::from_value(object).expect("an object")
}

/// Waits until Knit's condition of the policy says this.
async fn becomes(policies: &Cache<ClusterNetworkPolicy>, status: &str, reason: &str, about: &str) {
    let said = |cache: &Cache<ClusterNetworkPolicy>| {
        let policy = cache.get(&Key::cluster("p"))?;
        let conditions = policy.status.as_ref()?["conditions"].as_array()?.clone();
        conditions.into_iter().find(|one| one["type"] == "knit.dev/Accepted")
    };
    let found = |cache: &Cache<ClusterNetworkPolicy>| {
        let said = said(cache).filter(|one| one["status"] == status && one["reason"] == reason);
        said.filter(|one| one["message"].as_str().is_some_and(|text| text.contains(about))).map(|_| ())
    };
    let result = policies.wait_until("the condition", deadline(), found).await;
    result.unwrap_or_else(|error| panic!("{error}: {:?}", said(policies)));
}

#[tokio::test]
async fn the_status_of_a_policy_of_the_cluster_says_what_becomes_of_it() {
    let server = serve().await;
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    let namespace: Namespace =
        serde_json::from_value(json!({"metadata": {"name": "knit-system"}})).expect("an object");
    objects.write(&Write::create(&namespace)).await.expect("created");
    let policies: Cache<ClusterNetworkPolicy> = objects.watch().cache().expect("a cache");
    let events: Cache<Event> = objects.watch().cache().expect("a cache");
    let peers = json!([{"networks": ["192.0.2.0/24"]}]);
    objects.write(&Write::create(&policy(&json!({"action": "Deny", "to": peers})))).await.expect("created");
    let others = json!({"conditions": [{"type": "Ready-In-Zone-x", "status": "True"}]});
    let write = Write::status::<ClusterNetworkPolicy>(Key::cluster("p"), &others, "another-engine");
    objects.write(&write).await.expect("written");

    let controller = Running::start(&server, "a", true).await;
    becomes(&policies, "True", "Accepted", "understood").await;
    let spec = json!({"egress": [{"action": "Accept", "to": [{"asterisks": {}}]}]});
    let write = Write::merge::<ClusterNetworkPolicy>(Key::cluster("p"), json!({ "spec": spec }));
    objects.write(&write).await.expect("patched");
    becomes(&policies, "True", "PartlyIgnored", "to[0] is not valid").await;
    let write =
        Write::merge::<ClusterNetworkPolicy>(Key::cluster("p"), json!({"spec": {"tier": "Nobody's"}}));
    objects.write(&write).await.expect("patched");
    becomes(&policies, "False", "Invalid", "tier").await;
    let write = Write::merge::<ClusterNetworkPolicy>(Key::cluster("p"), json!({"spec": {"tier": "Admin"}}));
    objects.write(&write).await.expect("patched");
    becomes(&policies, "True", "PartlyIgnored", "to[0] is not valid").await;
    controller.stop().await;

    // Policies are switched off in the cluster.
    let controller = Running::start(&server, "b", false).await;
    becomes(&policies, "False", "NotEnforced", "in this cluster").await;
    let told = |cache: &Cache<Event>| {
        let all = cache.list();
        let about = |event: &Event| {
            let regarding = event.regarding.as_ref().and_then(|object| object.kind.as_deref());
            event.reason.as_deref() == Some("NotEnforced") && regarding == Some("ClusterNetworkPolicy")
        };
        all.iter().any(|(_, event)| about(event)).then_some(())
    };
    events.wait_until("an event", deadline(), told).await.expect("an event");
    controller.stop().await;
    let status = policies.get(&Key::cluster("p")).and_then(|policy| policy.status.clone()).expect("a status");
    let foreign = |one: &Value| one["type"] == "Ready-In-Zone-x" && one["status"] == "True";
    assert!(status["conditions"].as_array().expect("a list").iter().any(foreign), "{status}");
}
