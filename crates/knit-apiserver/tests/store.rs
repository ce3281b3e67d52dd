//! The store in process: watches and their log, services of two families, Knit's own kinds.

use knit_apiserver::event::ChangeType;
use knit_apiserver::status::ApiError;
use knit_apiserver::watch::WatchParams;
use knit_apiserver::{DeleteOptions, Store, StoreOptions, WriteOptions};
use serde_json::{Value, json};

fn store(options: StoreOptions) -> Store {
    let crds = StoreOptions::with_crds(&knit_api::crds()).unwrap().crds;
    Store::new(&StoreOptions { crds, ..options }).unwrap()
}

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}})
}

fn network(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name}, "spec": spec})
}

fn refused(result: Result<impl std::fmt::Debug, ApiError>) -> ApiError {
    result.expect_err("this must be refused")
}

#[tokio::test]
async fn a_watch_resumes_from_the_log_and_is_told_when_it_is_too_late() {
    let store = store(StoreOptions { log_size: 16, ..StoreOptions::default() });
    let kind = store.kind("v1", "ConfigMap").unwrap();
    let first = store.create_object(config_map("first")).unwrap();
    for index in 0..10 {
        store.create_object(config_map(&format!("c{index}"))).unwrap();
    }
    let from = |rv: u64| WatchParams { resource_version: Some(rv), ..WatchParams::default() };
    let mut watch = store.watch(&kind, from(first.rv)).unwrap();
    let events = watch.next().await.unwrap();
    assert_eq!(events.len(), 10);
    assert!(events.iter().all(|event| event.change == ChangeType::Added));

    let mut slow = store.watch(&kind, from(first.rv)).unwrap();
    for index in 10..40 {
        store.create_object(config_map(&format!("c{index}"))).unwrap();
    }
    assert_eq!(slow.next().await.unwrap_err().code, 410, "a watch that fell behind is told so");
    assert_eq!(refused(store.watch(&kind, from(first.rv))).code, 410);
    assert_eq!(refused(store.watch(&kind, from(9_999_999))).code, 410, "a version of another time");
    let mut all = store.watch(&kind, WatchParams::default()).unwrap();
    assert_eq!(all.next().await.unwrap().len(), 41);
}

#[test]
fn an_object_whose_owner_is_gone_does_not_stay() {
    let store = store(StoreOptions::default());
    let kind = store.kind("v1", "ConfigMap").unwrap();
    let mut orphan = config_map("orphan");
    orphan["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "gone",
        "uid": "00000000-0000-0000-0000-000000000000"}]);
    store.create_object(orphan).unwrap();
    assert_eq!(refused(store.get(&kind, "default", "orphan")).code, 404);
}

#[test]
fn pods_on_a_node_end_in_their_own_time() {
    let store = store(StoreOptions::default());
    let kind = store.kind("v1", "Pod").unwrap();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    store.create_object(pod.clone()).unwrap();
    store.bind("default", "p", "node-1", &WriteOptions::default()).unwrap();
    assert_eq!(refused(store.bind("default", "p", "node-2", &WriteOptions::default())).code, 409);
    let (object, gone) = store.delete(&kind, "default", "p", &DeleteOptions::default()).unwrap();
    assert!(!gone);
    assert_eq!(object.value["metadata"]["deletionGracePeriodSeconds"], 30);
    let now = DeleteOptions { grace: Some(0), ..DeleteOptions::default() };
    assert!(store.delete(&kind, "default", "p", &now).unwrap().1);
    store.create_object(pod).unwrap();
    assert!(
        store.delete(&kind, "default", "p", &DeleteOptions::default()).unwrap().1,
        "nobody runs it: gone at once"
    );
    let change = |pod: &Value| {
        let mut pod = pod.clone();
        pod["spec"]["hostNetwork"] = json!(true);
        Ok(pod)
    };
    store
        .create_object(json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "q",
        "namespace": "default"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}))
        .unwrap();
    assert_eq!(
        refused(store.modify(&kind, "default", "q", &WriteOptions::default(), false, change)).code,
        422
    );
}

#[test]
fn services_of_two_families() {
    let cidrs = vec!["10.96.0.0/24".to_owned(), "fd96::/112".to_owned()];
    let store = store(StoreOptions { service_cidrs: cidrs, ..StoreOptions::default() });
    let service = |name: &str, spec: Value| {
        let mut spec = spec;
        spec["ports"] = json!([{"port": 80}]);
        store.create_object(json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name,
            "namespace": "default"}, "spec": spec}))
    };
    let single = service("single", json!({})).unwrap();
    assert_eq!(single.value["spec"]["ipFamilies"], json!(["IPv4"]));
    let dual = service("dual", json!({"ipFamilyPolicy": "PreferDualStack"})).unwrap();
    assert_eq!(dual.value["spec"]["ipFamilies"], json!(["IPv4", "IPv6"]));
    assert_eq!(dual.value["spec"]["clusterIPs"].as_array().unwrap().len(), 2);
    let six = service("six", json!({"ipFamilies": ["IPv6"]})).unwrap();
    assert!(six.value["spec"]["clusterIP"].as_str().unwrap().starts_with("fd96::"));
    let swapped =
        service("swapped", json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}))
            .unwrap();
    assert!(swapped.value["spec"]["clusterIP"].as_str().unwrap().starts_with("fd96::"));
    assert_eq!(refused(service("bad", json!({"clusterIP": "10.97.0.1"}))).code, 422);

    let addresses = store.kind("networking.k8s.io/v1", "IPAddress").unwrap();
    let count = || store.list(&addresses, &knit_apiserver::ListParams::default()).unwrap().items.len();
    assert_eq!(count(), 7, "one each for kubernetes, single and six, two each for dual and swapped");
    let kind = store.kind("v1", "Service").unwrap();
    store.delete(&kind, "default", "dual", &DeleteOptions::default()).unwrap();
    assert_eq!(count(), 5);
    let only_four = Store::new(&StoreOptions::default()).unwrap();
    let both = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b",
        "namespace": "default"}, "spec": {"ipFamilyPolicy": "RequireDualStack", "ports": [{"port": 80}]}});
    assert!(refused(only_four.create_object(both)).message.contains("not configured for dual-stack"));
}

#[test]
fn a_full_service_range_says_so() {
    let store =
        store(StoreOptions { service_cidrs: vec!["10.96.0.0/29".to_owned()], ..StoreOptions::default() });
    let create = |index: usize| {
        store.create_object(json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": format!("s{index}"), "namespace": "default"},
                "spec": {"ports": [{"port": 80}]}}))
    };
    // Six usable addresses; the first is the `kubernetes` Service's.
    for index in 0..5 {
        create(index).unwrap();
    }
    assert!(refused(create(5)).message.contains("none left"));
}

#[test]
fn every_knit_kind_is_served_with_its_rules() {
    let store = store(StoreOptions::default());
    for kind in ["NetworkClass", "Network", "NetworkAttachment", "NodeNetwork", "AddressBlock"] {
        store.kind("knit.dev/v1alpha1", kind).unwrap();
    }
    let good = json!({"topology": "Layer3", "subnets": [{"cidr": "10.77.0.0/16", "gateway": "10.77.0.1",
        "reserved": ["10.77.0.0/28"]}, {"cidr": "fd77::/64"}]});
    let made = store.create_object(network("blue", &good)).unwrap();
    assert_eq!(made.value["spec"]["class"], "knit");

    let subnet = |subnet: Value| json!({"topology": "Layer3", "subnets": [subnet]});
    for (spec, words) in [
        (json!({"topology": "Layer3"}), "at least one subnet"),
        (json!({"topology": "Layer9", "subnets": [{"cidr": "10.77.0.0/16"}]}), "supported values"),
        (subnet(json!({"cidr": "10.77.0.0"})), "must be a CIDR"),
        (subnet(json!({"cidr": "10.77.0.9/16"})), "host bits set"),
        (subnet(json!({"cidr": "10.77.0.0/30"})), "too small"),
        (
            subnet(json!({"cidr": "10.77.0.0/16", "gateway": "10.78.0.1"})),
            "gateway must be an address inside",
        ),
        (subnet(json!({"cidr": "10.77.0.0/16", "reserved": ["10.0.0.0/8"]})), "reserved range must be"),
        (
            json!({"topology": "Layer3", "subnets": [{"cidr": "10.1.0.0/16"}, {"cidr": "10.2.0.0/16"}]}),
            "at most one IPv4 subnet",
        ),
        (json!({"topology": "Layer3", "subnets": [{"cidr": "10.1.0.0/16"}], "mtu": 100}), "1280"),
        (
            json!({"topology": "Layer3", "subnets": [{"cidr": "10.1.0.0/16"}], "subnet": 1}),
            "unknown field \"spec.subnet\"",
        ),
        (
            json!({"topology": "Layer3", "subnets": [{"cidr": "10.1.0.0/16"}],
                "allowedNamespaces": {"from": "Selector"}}),
            "selector",
        ),
    ] {
        let error = refused(store.create_object(network("bad", &spec)));
        assert!(error.message.contains(words), "{spec}: {error}");
        assert!(!error.message.contains("rule evaluation error"), "{spec}: {error}");
    }

    let kind = store.kind("knit.dev/v1alpha1", "Network").unwrap();
    let patch = |change: Value| {
        store.patch(
            &kind,
            "",
            "blue",
            &change,
            knit_apiserver::patch::PatchType::Merge,
            &WriteOptions::default(),
        )
    };
    let error = refused(patch(json!({"spec": {"topology": "Layer2"}})));
    assert!(error.message.contains("topology of a Network cannot be changed"), "{error}");
    let error = refused(patch(json!({"spec": {"subnets": [{"cidr": "10.77.0.0/16"}]}})));
    assert!(error.message.contains("cannot be changed or removed"), "{error}");
    patch(json!({"spec": {"mtu": 1400}})).unwrap();
}
