//! What any client may expect of a Kubernetes API, checked through kube-rs. The same suite runs against the
//! embedded API and, by `cargo xtask kube test client_suite`, against a real API server, so that the stand-in
//! cannot drift from the real thing.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Secret, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use knit_apiserver::{Config as ServerConfig, Server};
use knit_testbed::wait::holds_when_asked;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
    PropagationPolicy, WatchEvent, WatchParams,
};
use kube::core::{GroupVersionKind, Status};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, Config, Discovery, Error, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

#[tokio::test]
async fn embedded() {
    let server = Server::start(ServerConfig::default()).await.unwrap();
    suite(Config::new(server.url().parse().unwrap())).await;
    server.shutdown().await;
}

#[tokio::test]
#[ignore = "needs a real cluster: `cargo xtask kube test client_suite` runs it on one"]
async fn real_api_server() {
    let path =
        std::env::var("KNIT_TEST_KUBECONFIG").expect("KNIT_TEST_KUBECONFIG names a cluster's kubeconfig");
    let kubeconfig = kube::config::Kubeconfig::read_from(path).unwrap();
    suite(
        Config::from_custom_kubeconfig(kubeconfig, &kube::config::KubeConfigOptions::default())
            .await
            .unwrap(),
    )
    .await;
}

/// Everything, in a namespace of its own that is deleted at the end.
async fn suite(config: Config) {
    let client = Client::try_from(config).unwrap();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let made = namespaces
        .create(&PostParams::default(), &object(&json!({"metadata": {"generateName": "suite-"}})))
        .await
        .unwrap();
    let ns = made.name_any();
    assert!(ns.starts_with("suite-") && ns.len() == 11, "{ns}");
    assert_eq!(made.labels()["kubernetes.io/metadata.name"], ns);
    assert_eq!(made.status.unwrap().phase.unwrap(), "Active");

    objects(&client, &ns).await;
    patches(&client, &ns).await;
    server_side_apply(&client, &ns).await;
    watches(&client, &ns).await;
    selectors_and_pages(&client, &ns).await;
    services(&client, &ns).await;
    events(&client, &ns).await;
    custom_resources(&client, &ns).await;
    discovery(&client).await;
    // What follows is the work of controllers, which a bare API server does not have.
    finalizers_and_owners(&client, &ns).await;

    namespaces.delete(&ns, &DeleteParams::default()).await.unwrap();
    holds_when_asked("the namespace is gone", || async { namespaces.get_opt(&ns).await.unwrap().is_none() })
        .await;
    let configs: Api<ConfigMap> = Api::namespaced(client, &ns);
    let refused = configs.create(&PostParams::default(), &config_map("late", &[])).await;
    assert_eq!(status(refused).code, 404);
}

fn object<T: DeserializeOwned>(value: &Value) -> T {
    T::deserialize(value).unwrap()
}

fn config_map(name: &str, data: &[(&str, &str)]) -> ConfigMap {
    let data: BTreeMap<&str, &str> = data.iter().copied().collect();
    object(&json!({"metadata": {"name": name}, "data": data}))
}

/// The Status object of an answer that must be a refusal.
fn status<T: std::fmt::Debug>(result: Result<T, Error>) -> Status {
    match result {
        Err(Error::Api(status)) => *status,
        other => panic!("should have been refused: {other:?}"),
    }
}

async fn objects(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    let post = PostParams::default();
    let made = configs.create(&post, &config_map("one", &[("a", "1")])).await.unwrap();
    assert!(made.uid().is_some() && made.creation_timestamp().is_some() && made.resource_version().is_some());
    assert_eq!(status(configs.create(&post, &config_map("one", &[])).await).reason, "AlreadyExists");
    let wrong = status(configs.create(&post, &config_map("No_Name", &[])).await);
    assert_eq!((wrong.code, wrong.reason.as_str()), (422, "Invalid"));
    assert_eq!(wrong.details.unwrap().causes[0].field, "metadata.name");
    assert_eq!(status(configs.get("none").await).reason, "NotFound");
    let missing: Api<ConfigMap> = Api::namespaced(client.clone(), "no-such-namespace");
    assert_eq!(status(missing.create(&post, &config_map("x", &[])).await).code, 404);

    let mut newer = made.clone();
    newer.data.as_mut().unwrap().insert("b".into(), "2".into());
    let newer = configs.replace("one", &post, &newer).await.unwrap();
    assert_ne!(newer.resource_version(), made.resource_version());
    let mut stale = made.clone();
    stale.data.as_mut().unwrap().insert("c".into(), "3".into());
    let conflict = status(configs.replace("one", &post, &stale).await);
    assert_eq!((conflict.code, conflict.reason.as_str()), (409, "Conflict"));
    let same = configs.replace("one", &post, &newer).await.unwrap();
    assert_eq!(same.resource_version(), newer.resource_version(), "nothing changed, nothing written");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    configs.create(&dry, &config_map("dry", &[])).await.unwrap();
    assert!(configs.get_opt("dry").await.unwrap().is_none());

    let stale =
        Preconditions { uid: Some("00000000-0000-0000-0000-000000000000".into()), resource_version: None };
    let params = DeleteParams { preconditions: Some(stale), ..DeleteParams::default() };
    assert_eq!(status(configs.delete("one", &params).await).code, 409);
    configs.delete("one", &DeleteParams::default()).await.unwrap();
    assert_eq!(status(configs.delete("one", &DeleteParams::default()).await).code, 404);

    let everywhere: Api<ConfigMap> = Api::all(client.clone());
    assert_eq!(status(everywhere.create(&post, &config_map("x", &[])).await).code, 405, "which namespace?");

    let secrets: Api<Secret> = Api::namespaced(client.clone(), ns);
    let secret = secrets
        .create(&post, &object(&json!({"metadata": {"name": "s"}, "stringData": {"k": "v"}})))
        .await
        .unwrap();
    assert_eq!(secret.data.unwrap()["k"].0, b"v");
    assert_eq!(secret.type_.unwrap(), "Opaque");
}

fn deployment(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": 0, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [
            {"name": "a", "image": "x:1", "ports": [{"containerPort": 80}]}, {"name": "b",
                "image": "x:1"}]}}}})
}

async fn patches(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    configs.create(&PostParams::default(), &config_map("p", &[("a", "1"), ("b", "2")])).await.unwrap();
    let params = PatchParams::default();
    let merged =
        configs.patch("p", &params, &Patch::Merge(json!({"data": {"a": null, "c": "3"}}))).await.unwrap();
    assert_eq!(merged.data.unwrap().keys().cloned().collect::<Vec<_>>(), ["b", "c"]);
    let ops = json!([{"op": "test", "path": "/data/b", "value": "2"}, {"op": "move", "from": "/data/b",
        "path": "/data/d"}]);
    let patch: Patch<Value> = Patch::Json(serde_json::from_value(ops).unwrap());
    let moved = configs.patch("p", &params, &patch).await.unwrap();
    assert_eq!(moved.data.unwrap().keys().cloned().collect::<Vec<_>>(), ["c", "d"]);
    for (patch, code) in [
        (json!({"data": {"a": {}}}), 422),
        (json!({"metadata": {"uid": "another"}}), 422),
        (json!({"metadata": {"name": "another"}}), 400),
        (json!({"metadata": {"labels": {"a b": "c"}}}), 422),
        (json!({"metadata": {"finalizers": ["unqualified"]}}), 422),
    ] {
        let refused = status(configs.patch("p", &params, &Patch::Merge(patch.clone())).await);
        assert_eq!(refused.code, code, "{patch}: {refused:?}");
    }
    let stale = Patch::Merge(json!({"metadata": {"resourceVersion": "1"}, "data": {"z": "1"}}));
    assert_eq!(status(configs.patch("p", &params, &stale).await).code, 409);

    let deployments: Api<Deployment> = Api::namespaced(client.clone(), ns);
    let made = deployments.create(&PostParams::default(), &object(&deployment("d"))).await.unwrap();
    assert_eq!(made.metadata.generation, Some(1));
    let strategic = Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": [
        {"name": "a", "image": "x:2"}, {"name": "b", "$patch": "delete"}]}}}}));
    let patched = deployments.patch("d", &params, &strategic).await.unwrap();
    let containers = patched.spec.unwrap().template.spec.unwrap().containers;
    assert_eq!(containers.len(), 1);
    assert_eq!(containers[0].image.as_deref(), Some("x:2"));
    assert_eq!(containers[0].ports.as_ref().unwrap()[0].protocol.as_deref(), Some("TCP"));
    assert!(patched.metadata.generation >= Some(2));
    let immutable = Patch::Merge(json!({"spec": {"selector": {"matchLabels": {"app": "other"}}}}));
    assert_eq!(status(deployments.patch("d", &params, &immutable).await).code, 422);
}

async fn server_side_apply(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    let config = |data: Value| {
        Patch::Apply(
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ssa"}, "data": data}),
        )
    };
    let one = PatchParams::apply("one");
    let two = PatchParams::apply("two");
    configs.patch("ssa", &one, &config(json!({"a": "1", "b": "1"}))).await.unwrap();
    let conflict = status(configs.patch("ssa", &two, &config(json!({"a": "2"}))).await);
    assert_eq!(conflict.code, 409);
    let cause = &conflict.details.unwrap().causes[0];
    assert_eq!((cause.reason.as_str(), cause.field.as_str()), ("FieldManagerConflict", ".data.a"));
    assert!(cause.message.contains("\"one\""), "{}", cause.message);
    let forced = configs.patch("ssa", &two.clone().force(), &config(json!({"a": "2"}))).await.unwrap();
    assert_eq!(forced.data.unwrap()["a"], "2");
    let less = configs.patch("ssa", &one, &config(json!({"c": "1"}))).await.unwrap();
    assert_eq!(
        less.data.clone().unwrap().keys().cloned().collect::<Vec<_>>(),
        ["a", "c"],
        "b is gone, a is two's"
    );
    let managers: Vec<String> =
        less.managed_fields().iter().filter_map(|entry| entry.manager.clone()).collect();
    assert!(managers.contains(&"one".to_owned()) && managers.contains(&"two".to_owned()), "{managers:?}");
    let again = configs.patch("ssa", &one, &config(json!({"c": "1"}))).await.unwrap();
    assert_eq!(again.resource_version(), less.resource_version(), "applying the same again writes nothing");

    let deployments: Api<Deployment> = Api::namespaced(client.clone(), ns);
    deployments.patch("s", &one, &Patch::Apply(deployment("s"))).await.unwrap();
    let sidecar = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "s"}, "spec": {
        "template": {"spec": {"containers": [{"name": "side", "image": "y:1"}]}}}});
    let both = deployments.patch("s", &two, &Patch::Apply(sidecar)).await.unwrap();
    let names: Vec<String> =
        both.spec.unwrap().template.spec.unwrap().containers.into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["a", "b", "side"]);
    let strict = PatchParams { field_validation: Some(kube::api::ValidationDirective::Strict), ..one };
    let unknown = Patch::Apply(
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ssa"}, "dat": {}}),
    );
    let refused = status(configs.patch("ssa", &strict, &unknown).await);
    assert_eq!(refused.code, 500);
    assert!(refused.message.contains(".dat: field not declared in schema"), "{}", refused.message);
    let nobody = configs.patch("ssa", &PatchParams::default(), &config(json!({}))).await;
    assert_eq!(status(nobody).code, 422, "who applies must say who that is");
}

async fn watches(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    let from = configs.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let params = WatchParams::default().labels("watched=yes");
    let mut stream = configs.watch(&params, &from).await.unwrap().boxed();
    let labelled = |value: &str| Patch::Merge(json!({"metadata": {"labels": {"watched": value}}}));
    configs.create(&PostParams::default(), &config_map("w", &[])).await.unwrap();
    let merge = PatchParams::default();
    configs.patch("w", &merge, &labelled("yes")).await.unwrap();
    configs.patch("w", &merge, &Patch::Merge(json!({"data": {"x": "1"}}))).await.unwrap();
    configs.patch("w", &merge, &labelled("no")).await.unwrap();
    configs.patch("w", &merge, &labelled("yes")).await.unwrap();
    configs.delete("w", &DeleteParams::default()).await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 5 {
        let event = tokio::time::timeout(Duration::from_secs(60), stream.try_next()).await;
        match event.expect("an event within 60 s").unwrap().expect("the watch goes on") {
            WatchEvent::Added(_) => seen.push("ADDED"),
            WatchEvent::Modified(_) => seen.push("MODIFIED"),
            WatchEvent::Deleted(_) => seen.push("DELETED"),
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(error) => panic!("{error:?}"),
        }
    }
    assert_eq!(seen, ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]);

    for strategy in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut objects = watcher(configs.clone(), strategy.labels("run=yes")).applied_objects().boxed();
        let mut labelled = config_map("run", &[]);
        labelled.metadata.labels = Some(BTreeMap::from([("run".to_owned(), "yes".to_owned())]));
        configs.create(&PostParams::default(), &labelled).await.unwrap();
        let first = tokio::time::timeout(Duration::from_secs(60), objects.try_next()).await;
        assert_eq!(first.expect("an object within 60 s").unwrap().unwrap().name_any(), "run");
        configs.delete("run", &DeleteParams::default()).await.unwrap();
    }
}

async fn selectors_and_pages(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    for index in 0..7 {
        let mut made = config_map(&format!("page-{index}"), &[]);
        let parity = if index % 2 == 0 { "even" } else { "odd" };
        made.metadata.labels = Some(BTreeMap::from([("parity".to_owned(), parity.to_owned())]));
        configs.create(&PostParams::default(), &made).await.unwrap();
    }
    let names = |list: kube::core::ObjectList<ConfigMap>| {
        list.items.iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>()
    };
    let even = configs.list(&ListParams::default().labels("parity=even")).await.unwrap();
    assert_eq!(names(even), ["page-0", "page-2", "page-4", "page-6"]);
    let one = configs.list(&ListParams::default().fields("metadata.name=page-3")).await.unwrap();
    assert_eq!(names(one), ["page-3"]);
    let wrong = configs.list(&ListParams::default().fields("spec.none=1")).await;
    assert_eq!(status(wrong).code, 400);

    let mut params = ListParams::default().labels("parity").limit(3);
    let (mut all, mut pages) = (Vec::new(), 0);
    loop {
        let page = configs.list(&params).await.unwrap();
        let token = page.metadata.continue_.clone().filter(|token| !token.is_empty());
        assert!(page.items.len() <= 3);
        all.extend(names(page));
        pages += 1;
        match token {
            Some(token) => params = params.continue_token(&token),
            None => break,
        }
    }
    assert_eq!((all.len(), pages), (7, 3));
    configs
        .delete_collection(&DeleteParams::default(), &ListParams::default().labels("parity"))
        .await
        .unwrap();
    holds_when_asked("the collection is gone", || async {
        configs.list(&ListParams::default().labels("parity")).await.unwrap().items.is_empty()
    })
    .await;
}

async fn finalizers_and_owners(client: &Client, ns: &str) {
    let configs: Api<ConfigMap> = Api::namespaced(client.clone(), ns);
    let mut held = config_map("held", &[]);
    held.metadata.finalizers = Some(vec!["test.knit.dev/hold".into()]);
    configs.create(&PostParams::default(), &held).await.unwrap();
    configs.delete("held", &DeleteParams::default()).await.unwrap();
    let held = configs.get("held").await.unwrap();
    assert!(held.metadata.deletion_timestamp.is_some());
    let more =
        Patch::Merge(json!({"metadata": {"finalizers": ["test.knit.dev/hold", "test.knit.dev/more"]}}));
    assert_eq!(status(configs.patch("held", &PatchParams::default(), &more).await).code, 422);
    let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    configs.patch("held", &PatchParams::default(), &release).await.unwrap();
    assert!(configs.get_opt("held").await.unwrap().is_none());

    for (policy, dependent_stays) in
        [(PropagationPolicy::Background, false), (PropagationPolicy::Orphan, true)]
    {
        let owner = configs.create(&PostParams::default(), &config_map("owner", &[])).await.unwrap();
        let mut dependent = config_map("dependent", &[]);
        dependent.metadata.owner_references = Some(vec![object(&json!({
            "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.uid().unwrap()}))]);
        configs.create(&PostParams::default(), &dependent).await.unwrap();
        let params = DeleteParams { propagation_policy: Some(policy), ..DeleteParams::default() };
        configs.delete("owner", &params).await.unwrap();
        if dependent_stays {
            holds_when_asked("the dependent is an orphan", || async {
                configs.get("dependent").await.unwrap().owner_references().is_empty()
            })
            .await;
            holds_when_asked("the owner is gone", || async {
                configs.get_opt("owner").await.unwrap().is_none()
            })
            .await;
        } else {
            holds_when_asked("the dependent is gone", || async {
                configs.get_opt("dependent").await.unwrap().is_none()
            })
            .await;
        }
    }
}

async fn services(client: &Client, ns: &str) {
    let services: Api<Service> = Api::namespaced(client.clone(), ns);
    let service =
        |name: &str, spec: Value| object::<Service>(&json!({"metadata": {"name": name}, "spec": spec}));
    let post = PostParams::default();
    let made = services
        .create(&post, &service("a", json!({"type": "NodePort", "ports": [{"port": 80}]})))
        .await
        .unwrap();
    let spec = made.spec.clone().unwrap();
    let ip = spec.cluster_ip.clone().unwrap();
    ip.parse::<std::net::IpAddr>().unwrap();
    assert_eq!(spec.cluster_ips.unwrap(), std::slice::from_ref(&ip));
    assert_eq!(spec.ip_family_policy.as_deref(), Some("SingleStack"));
    assert_eq!(spec.session_affinity.as_deref(), Some("None"));
    let port = spec.ports.unwrap()[0].clone();
    let node_port = port.node_port.unwrap();
    assert!((30000..=32767).contains(&node_port));
    assert_eq!(port.protocol.as_deref(), Some("TCP"));

    let taken = status(
        services.create(&post, &service("b", json!({"clusterIP": ip, "ports": [{"port": 80}]}))).await,
    );
    assert_eq!(taken.code, 422);
    assert!(taken.message.contains("already allocated"), "{}", taken.message);
    let taken = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": node_port}]});
    assert!(status(services.create(&post, &service("b", taken)).await).message.contains("already allocated"));
    let outside = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 80}]});
    assert!(status(services.create(&post, &service("b", outside)).await).message.contains("30000-32767"));
    let headless = services
        .create(&post, &service("h", json!({"clusterIP": "None", "ports": [{"port": 80}]})))
        .await
        .unwrap();
    assert_eq!(headless.spec.unwrap().cluster_ip.as_deref(), Some("None"));
    assert_eq!(status(services.create(&post, &service("n", json!({"ports": []}))).await).code, 422);

    let changed = Patch::Merge(json!({"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}));
    assert_eq!(status(services.patch("a", &PatchParams::default(), &changed).await).code, 422);
    let mut kept = made.clone();
    kept.spec.as_mut().unwrap().cluster_ip = None;
    kept.spec.as_mut().unwrap().cluster_ips = None;
    kept.spec.as_mut().unwrap().selector = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
    let kept = services.replace("a", &post, &kept).await.unwrap();
    assert_eq!(
        kept.spec.unwrap().cluster_ip,
        Some(ip.clone()),
        "an update that does not name the address keeps it"
    );
    services.delete("a", &DeleteParams::default()).await.unwrap();
    holds_when_asked("the address is free again", || async {
        services
            .create(&post, &service("again", json!({"clusterIP": ip, "ports": [{"port": 80}]})))
            .await
            .is_ok()
    })
    .await;
}

async fn events(client: &Client, ns: &str) {
    let new: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(client.clone(), ns);
    let event = json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod", "namespace": ns, "name": "p"},
        "note": "hello", "reason": "Testing", "action": "Test", "type": "Normal",
            "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "knit.dev/test", "reportingInstance": "one"});
    new.create(&PostParams::default(), &object(&event)).await.unwrap();
    let old: Api<Event> = Api::namespaced(client.clone(), ns);
    let found =
        old.list(&ListParams::default().fields("involvedObject.name=p,type=Normal")).await.unwrap().items;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].message.as_deref(), Some("hello"));
    assert_eq!(found[0].involved_object.kind.as_deref(), Some("Pod"));
    assert_eq!(new.get("e").await.unwrap().note.as_deref(), Some("hello"));
}

/// A CRD with most of what schemas can say.
fn widget_crd() -> Value {
    let schema = json!({"type": "object", "required": ["spec"], "properties": {
        "spec": {"type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 10},
            "color": {"type": "string", "enum": ["red", "green"], "default": "red"},
            "cidr": {"type": "string", "maxLength": 43, "x-kubernetes-validations": [
                {"rule": "isCIDR(self) && cidr(self).ip().family() == 4", 
                    "message": "must be an IPv4 CIDR"}]},
            "fixed": {"type": "string", "maxLength": 20, "x-kubernetes-validations": [
                {"rule": "self == oldSelf", "message": "fixed cannot change"}]},
            "parts": {"type": "array", "maxItems": 5, "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"},
                    "count": {"type": "integer", "default": 1}}}},
            "max": {"type": "integer"}},
            "x-kubernetes-validations": [{"rule": "!has(self.max) || self.size <= self.max",
                "messageExpression": "'size %d is above max %d'.format([self.size, self.max])",
                    "fieldPath": ".size"}]},
        "status": {"type": "object", "properties": {"phase": {"type": "string"}}}}});
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.test.knit.dev"},
        "spec": {"group": "test.knit.dev", "scope": "Namespaced", "names": {"kind": "Widget",
            "plural": "widgets", "singular": "widget", "shortNames": ["wg"]},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "Size", "type": "integer",
                    "jsonPath": ".spec.size"}]}]}})
}

async fn custom_resources(client: &Client, ns: &str) {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = "widgets.test.knit.dev";
    crds.create(&PostParams::default(), &object(&widget_crd())).await.unwrap();
    holds_when_asked("the definition is established", || async {
        let conditions = crds.get(name).await.unwrap().status.and_then(|status| status.conditions);
        conditions.unwrap_or_default().iter().any(|c| c.type_ == "Established" && c.status == "True")
    })
    .await;
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("test.knit.dev", "v1", "Widget"), "widgets");
    let widgets: Api<DynamicObject> = Api::namespaced_with(client.clone(), ns, &resource);
    let widget = |name: &str, spec: Value| {
        object::<DynamicObject>(
            &json!({"apiVersion": "test.knit.dev/v1", "kind": "Widget", "metadata": {"name": name},
                "spec": spec, "status": {"phase": "x"}}),
        )
    };
    let post = PostParams::default();
    holds_when_asked("the kind is served", || async { widgets.list(&ListParams::default()).await.is_ok() })
        .await;
    let made = widgets
        .create(&post, &widget("a", json!({"size": 2, "typo": 1, "parts": [{"name": "x"}]})))
        .await
        .unwrap();
    assert_eq!(made.data["spec"], json!({"size": 2, "color": "red", "parts": [{"name": "x", "count": 1}]}));
    assert!(made.data.get("status").is_none(), "status is for the subresource");
    assert_eq!(made.metadata.generation, Some(1));

    for (spec, field) in [
        (json!({}), "spec.size"),
        (json!({"size": 11}), "spec.size"),
        (json!({"size": "1"}), "spec.size"),
        (json!({"size": 1, "color": "blue"}), "spec.color"),
        (json!({"size": 1, "cidr": "fd00::/64"}), "spec.cidr"),
        (json!({"size": 3, "max": 2}), "spec.size"),
        (json!({"size": 1, "parts": [{"name": "x"}, {"name": "x"}]}), "spec.parts[1]"),
    ] {
        let refused = status(widgets.create(&post, &widget("b", spec.clone())).await);
        assert_eq!(refused.code, 422, "{spec}");
        let causes = refused.details.unwrap().causes;
        assert!(causes.iter().any(|cause| cause.field == field), "{spec}: {causes:?}");
    }
    let refused = status(widgets.create(&post, &widget("b", json!({"size": 3, "max": 2}))).await);
    assert!(refused.message.contains("size 3 is above max 2"), "{}", refused.message);

    let merge = PatchParams::default();
    let strict = PatchParams {
        field_validation: Some(kube::api::ValidationDirective::Strict),
        ..PatchParams::default()
    };
    let unknown = Patch::Merge(json!({"spec": {"typo": 1}}));
    let refused = status(widgets.patch("a", &strict, &unknown).await);
    assert_eq!((refused.code, refused.details.unwrap().causes[0].field.as_str()), (422, "patch"));
    let spec = Patch::Merge(json!({"spec": {"size": 3, "fixed": "f"}, "status": {"phase": "no"}}));
    let patched = widgets.patch("a", &merge, &spec).await.unwrap();
    assert_eq!((patched.metadata.generation, patched.data.get("status")), (Some(2), None));
    let changed = Patch::Merge(json!({"spec": {"fixed": "g"}}));
    let refused = status(widgets.patch("a", &merge, &changed).await);
    assert!(refused.message.contains("fixed cannot change"), "{}", refused.message);
    let strategic = Patch::Strategic(json!({"spec": {"size": 4}}));
    assert_eq!(status(widgets.patch("a", &merge, &strategic).await).code, 415);

    let both = Patch::Merge(json!({"spec": {"size": 9}, "status": {"phase": "Good"}}));
    let after = widgets.patch_status("a", &merge, &both).await.unwrap();
    assert_eq!((&after.data["spec"]["size"], &after.data["status"]["phase"]), (&json!(3), &json!("Good")));
    assert_eq!(after.metadata.generation, Some(2), "a status is no new generation");

    let part = |name: &str| {
        Patch::Apply(json!({"apiVersion": "test.knit.dev/v1", "kind": "Widget", "metadata": {"name": "a"},
                "spec": {"parts": [{"name": name}]}}))
    };
    widgets.patch("a", &PatchParams::apply("y"), &part("y")).await.unwrap();
    let merged = widgets.patch("a", &PatchParams::apply("z"), &part("z")).await.unwrap();
    let names: Vec<&str> = merged.data["spec"]["parts"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|part| part["name"].as_str())
        .collect();
    assert_eq!(names, ["x", "y", "z"]);

    crds.delete(name, &DeleteParams::default()).await.unwrap();
    holds_when_asked("the kind is gone", || async { widgets.list(&ListParams::default()).await.is_err() })
        .await;
}

async fn discovery(client: &Client) {
    let found = Discovery::new(client.clone()).run().await.unwrap();
    let (resource, capabilities) = found.resolve_gvk(&GroupVersionKind::gvk("", "v1", "Pod")).unwrap();
    assert_eq!(resource.plural, "pods");
    assert!(capabilities.subresources.iter().any(|(sub, _)| sub.plural.ends_with("status")));
    let found = Discovery::new(client.clone()).run_aggregated().await.unwrap();
    assert!(found.resolve_gvk(&GroupVersionKind::gvk("networking.k8s.io", "v1", "ServiceCIDR")).is_some());
    assert!(!client.apiserver_version().await.unwrap().git_version.is_empty());
}
