//! Slices against the lab's embedded API: what agents read of Nodes and AddressBlocks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use knit_api::{AddressBlock, BlockSlice, Network, NetworkAttachment, NodeSlice};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_controller::{Config, Controller};
use knit_objects::{Cache, Key, Objects, Selection, Source, Write};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::Instant;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn serve() -> Handle {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server")
}

async fn create<K: knit_objects::Object + serde::Serialize>(objects: &Objects, object: Value) {
    let object: K = serde_json::from_value(object).expect("an object");
    objects.write(&Write::create(&object)).await.expect("created");
}

async fn node(objects: &Objects, name: &str, address: &str) {
    create::<Node>(objects, json!({"metadata": {"name": name}})).await;
    let addresses = json!({"addresses": [{"type": "InternalIP", "address": address},
        {"type": "ExternalIP", "address": "203.0.113.9"}]});
    let write = Write::status::<Node>(Key::cluster(name), &addresses, "kubelet");
    objects.write(&write).await.expect("written");
}

struct Running {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start(objects: Objects, identity: &str) -> Self {
        let config = Config {
            renew_every: Duration::from_millis(200),
            lease_duration: Duration::from_secs(10),
            ..Config::new(identity)
        };
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

/// Every node in complete slices, with its addresses.
fn nodes(cache: &Cache<NodeSlice>) -> Option<BTreeMap<String, Vec<String>>> {
    let slices = cache.list();
    let complete = slices.iter().any(|(_, slice)| slice.spec.index == 0 && slice.spec.complete);
    let listed = slices.iter().flat_map(|(_, slice)| slice.spec.nodes.clone());
    complete.then(|| listed.map(|node| (node.name, node.addresses)).collect())
}

fn blocks(cache: &Cache<BlockSlice>, network: &str) -> BTreeSet<String> {
    let slices = cache.list();
    let of_network = slices.iter().filter(|(_, slice)| slice.spec.network == network);
    of_network.flat_map(|(_, slice)| slice.spec.blocks.clone()).map(|block| block.name).collect()
}

#[tokio::test]
async fn nodes_and_blocks_are_in_slices_that_outlive_leaders_and_are_repaired() {
    let server = serve().await;
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    create::<Namespace>(&objects, json!({"metadata": {"name": "knit-system"}})).await;
    for n in 0..120 {
        node(&objects, &format!("n{n:03}"), &format!("192.0.2.{n}")).await;
    }
    let slices = objects.watch::<NodeSlice>().cache().expect("a cache");
    let of_blocks = objects.watch::<BlockSlice>().cache().expect("a cache");
    let first = Running::start(objects.clone(), "a");
    let count = |n: usize| move |cache: &Cache<NodeSlice>| nodes(cache).filter(|all| all.len() == n);
    let all = slices.wait_until("120 nodes", deadline(), count(120)).await.expect("all nodes");
    assert_eq!(all["n007"], ["192.0.2.7"]);
    assert_eq!(slices.len(), 2);
    let versions = |cache: &Cache<NodeSlice>| -> BTreeMap<String, Option<String>> {
        let list = cache.list();
        list.iter().map(|(k, s)| (k.name().to_owned(), s.metadata.resource_version.clone())).collect()
    };

    // A Network's blocks are in slices of its own; a Network without any has an empty one.
    let spec = json!({"topology": "Layer3", "subnets": [{"cidr": "10.7.0.0/16"}]});
    create::<Network>(&objects, json!({"metadata": {"name": "blue"}, "spec": spec})).await;
    let empty = |cache: &Cache<BlockSlice>| cache.get(&Key::cluster("blue-0")).filter(|s| s.spec.complete);
    of_blocks.wait_until("a slice of blue", deadline(), empty).await.expect("an empty slice");
    let spec = json!({"network": "blue", "node": "n001", "ipv4": "10.7.0.0/29"});
    create::<AddressBlock>(&objects, json!({"metadata": {"name": "blue-10-7-0-0"}, "spec": spec})).await;
    let there = |cache: &Cache<BlockSlice>| {
        (blocks(cache, "blue") == BTreeSet::from(["blue-10-7-0-0".to_owned()])).then_some(())
    };
    of_blocks.wait_until("the block", deadline(), there).await.expect("a block");

    // A heartbeat is no write, and one node more is one write.
    let before = versions(&slices);
    let status = json!({"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]});
    let beat = Write::status::<Node>(Key::cluster("n001"), &status, "heart");
    objects.write(&beat).await.expect("written");
    node(&objects, "n999", "192.0.2.250").await;
    let found = |cache: &Cache<NodeSlice>| nodes(cache)?.get("n999").filter(|a| !a.is_empty()).map(|_| ());
    slices.wait_until("one node more", deadline(), found).await.expect("a node");
    let after = versions(&slices);
    let changed = before.iter().filter(|(name, version)| after.get(*name) != Some(version)).count();
    assert_eq!((after.len(), changed), (2, 1), "{before:?} {after:?}");

    // Another leader finds them right, and writes again what somebody damaged meanwhile.
    first.stop().await;
    let damaged = Write::delete::<NodeSlice>(Key::cluster("nodes-1"));
    objects.write(&damaged).await.expect("deleted");
    objects.write(&Write::delete::<Node>(Key::cluster("n000"))).await.expect("deleted");
    let second = Running::start(objects.clone(), "b");
    let right = |cache: &Cache<NodeSlice>| nodes(cache).filter(|a| a.len() == 120 && !a.contains_key("n000"));
    slices.wait_until("slices that are right again", deadline(), right).await.expect("repaired");
    let patch = Write::merge::<NodeSlice>(Key::cluster("nodes-0"), json!({"spec": {"nodes": []}}));
    objects.write(&patch).await.expect("written");
    let emptied = |cache: &Cache<NodeSlice>| nodes(cache).filter(|all| all.len() < 120);
    slices.wait_until("the damage", deadline(), emptied).await.expect("damaged");
    slices.wait_until("slices that are right again", deadline(), right).await.expect("repaired");

    // A Network that is gone takes its slices along.
    objects
        .write(&Write::merge::<Network>(Key::cluster("blue"), json!({"metadata": {"finalizers": []}})))
        .await
        .expect("written");
    objects.write(&Write::delete::<Network>(Key::cluster("blue"))).await.expect("deleted");
    let gone = |cache: &Cache<BlockSlice>| cache.get(&Key::cluster("blue-0")).is_none().then_some(());
    of_blocks.wait_until("no slice of blue", deadline(), gone).await.expect("gone");
    second.stop().await;
}

/// What of interfaces every node of a Network must know comes in its slices, too; a controller of an earlier
/// version did not write that, and its slices are written again.
#[tokio::test]
async fn interfaces_that_do_not_follow_from_blocks_are_in_the_slices_of_their_network() {
    let server = serve().await;
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    for name in ["knit-system", "shop"] {
        create::<Namespace>(&objects, json!({"metadata": {"name": name}})).await;
    }
    node(&objects, "n1", "192.0.2.1").await;
    let spec = json!({"topology": "Layer3", "subnets": [{"cidr": "10.7.0.0/16"}]});
    create::<Network>(&objects, json!({"metadata": {"name": "blue"}, "spec": spec})).await;
    let earlier = json!({"metadata": {"name": "blue-0", "labels": {"knit.dev/network": "blue"}},
        "spec": {"network": "blue", "index": 0, "complete": true, "blocks": []}});
    create::<BlockSlice>(&objects, earlier).await;
    let attachment = |name: &str, network: &str| {
        let spec = json!({"pod": "web", "network": network});
        json!({"metadata": {"namespace": "shop", "name": name}, "spec": spec})
    };
    let told = |name: &str, status: Value| {
        Write::merge_status::<NetworkAttachment>(Key::namespaced("shop", name), json!({"status": status}))
    };
    let status = |address: &str| {
        json!({"node": "n1", "announced": true, "mac": "02:00:00:00:00:07",
            "addresses": [{"family": "IPv4", "address": address, "prefix": 16}]})
    };
    for (name, network) in [("a", "blue"), ("b", "blue"), ("c", "nobodys")] {
        create::<NetworkAttachment>(&objects, attachment(name, network)).await;
    }
    objects.write(&told("a", status("10.7.200.1"))).await.expect("written");
    objects.write(&told("c", status("10.9.200.1"))).await.expect("written");
    let mut derived = status("10.7.0.3");
    derived["announced"] = json!(false);
    objects.write(&told("b", derived)).await.expect("written");

    let slices = objects.watch::<BlockSlice>().cache().expect("a cache");
    let running = Running::start(objects.clone(), "a");
    let announced = |cache: &Cache<BlockSlice>| -> Option<Vec<(String, String, Vec<String>)>> {
        let spec = &cache.get(&Key::cluster("blue-0")).filter(|slice| slice.spec.complete)?.spec;
        let told = spec.announced.as_ref()?.iter();
        Some(told.map(|one| (one.attachment.clone(), one.node.clone(), one.addresses.clone())).collect())
    };
    let is = |wanted: &[(&str, &str)]| {
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(name, address)| ((*name).to_owned(), "n1".to_owned(), vec![(*address).to_owned()]))
            .collect();
        move |cache: &Cache<BlockSlice>| (announced(cache)? == wanted).then_some(())
    };
    let wait = |what, check| slices.wait_until(what, deadline(), check);
    wait("the first one", is(&[("shop/a", "10.7.200.1")])).await.expect("told");
    // It changes, and another one is not derivable any more.
    objects.write(&told("a", status("10.7.200.9"))).await.expect("written");
    objects.write(&told("b", json!({"announced": true}))).await.expect("written");
    wait("both", is(&[("shop/a", "10.7.200.9"), ("shop/b", "10.7.0.3")])).await.expect("told");
    // Who patches it all the time is no reason to write.
    let version = |cache: &Cache<BlockSlice>| {
        cache.get(&Key::cluster("blue-0")).map(|slice| slice.metadata.resource_version.clone())
    };
    let before = version(&slices);
    for patch in 0..50 {
        let patch = json!({"metadata": {"annotations": {"patch": patch.to_string()}}});
        let key = Key::namespaced("shop", "a");
        objects.write(&Write::merge::<NetworkAttachment>(key, patch)).await.expect("patched");
    }
    objects.write(&Write::delete::<NetworkAttachment>(Key::namespaced("shop", "b"))).await.expect("deleted");
    wait("the end of one", is(&[("shop/a", "10.7.200.9")])).await.expect("told");
    assert_ne!(version(&slices), before);
    let found = objects.list::<BlockSlice>(&Selection::default()).await.expect("a list");
    assert!(found.iter().all(|slice| slice.spec.network != "nobodys"), "slices of no Network");
    // Its Network comes.
    create::<Network>(
        &objects,
        json!({"metadata": {"name": "nobodys"}, "spec": {"topology": "Layer3",
        "subnets": [{"cidr": "10.9.0.0/16"}]}}),
    )
    .await;
    let there = |cache: &Cache<BlockSlice>| {
        let slice = cache.get(&Key::cluster("nobodys-0"))?;
        slice.spec.announced.as_ref().filter(|told| told.len() == 1).map(|_| ())
    };
    slices.wait_until("what waited for its Network", deadline(), there).await.expect("told");
    running.stop().await;
}

/// Which node a user's NetworkAttachment is for.
#[tokio::test]
async fn users_attachments_are_told_the_nodes_of_their_pods() {
    let server = serve().await;
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    create::<Namespace>(&objects, json!({"metadata": {"name": "knit-system"}})).await;
    for name in ["n1", "n2"] {
        node(&objects, name, "192.0.2.1").await;
    }
    let pod = |namespace: &str, name: &str, node: Option<&str>| {
        json!({"metadata": {"namespace": namespace, "name": name},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "app", "image": "app"}]}})
    };
    let spec = json!({"pod": "web", "network": "blue"});
    let attachment =
        |namespace: &str| json!({"metadata": {"namespace": namespace, "name": "mine"}, "spec": spec});
    let attachments = objects.watch::<NetworkAttachment>().cache().expect("a cache");
    let running = Running::start(objects.clone(), "a");
    // So many namespaces that pods are watched in all of them at once.
    for n in 0..40 {
        let namespace = format!("ns-{n}");
        create::<Namespace>(&objects, json!({"metadata": {"name": namespace}})).await;
        create::<NetworkAttachment>(&objects, attachment(&namespace)).await;
        create::<Pod>(&objects, pod(&namespace, "web", Some("n1"))).await;
    }
    let on = |node: &'static str, count: usize| {
        move |cache: &Cache<NetworkAttachment>| {
            let all = cache.list();
            let of = |object: &NetworkAttachment| {
                object.status.as_ref().and_then(|s| s.node.as_deref()) == Some(node)
            };
            (all.iter().filter(|(_, object)| of(object)).count() == count).then_some(())
        }
    };
    let wait = |what, node, count| attachments.wait_until(what, deadline(), on(node, count));
    wait("all on n1", "n1", 40).await.expect("told");
    // One pod is made again on another node; one object goes with its namespace's only watch.
    let web = || Key::namespaced("ns-7", "web");
    objects.write(&Write::delete::<Pod>(web())).await.expect("deleted");
    create::<Pod>(&objects, pod("ns-7", "web", Some("n2"))).await;
    wait("one on n2", "n2", 1).await.expect("told");
    for n in 8..40 {
        let key = Key::namespaced(format!("ns-{n}"), "mine");
        objects.write(&Write::delete::<NetworkAttachment>(key)).await.expect("deleted");
    }
    // Few are left, each with a watch of its own: what happens meanwhile is not missed.
    let web = || Key::namespaced("ns-3", "web");
    objects.write(&Write::delete::<Pod>(web())).await.expect("deleted");
    create::<Pod>(&objects, pod("ns-3", "web", Some("n2"))).await;
    wait("two on n2", "n2", 2).await.expect("told");
    wait("the others", "n1", 6).await.expect("told");
    // What an agent may not say, and says: it is put right.
    let wrong = json!({"status": {"node": "n2"}});
    let mine = Key::namespaced("ns-1", "mine");
    let written = objects.write(&Write::merge_status::<NetworkAttachment>(mine.clone(), wrong)).await;
    let number = |version: Option<&str>| version.and_then(|v| v.parse::<u64>().ok()).expect("a version");
    let said = number(written.expect("written")["metadata"]["resourceVersion"].as_str());
    let put_right = |cache: &Cache<NetworkAttachment>| {
        let object = cache.get(&mine)?;
        let node = object.status.as_ref()?.node.as_deref()?;
        (number(object.metadata.resource_version.as_deref()) > said && node == "n1").then_some(())
    };
    attachments.wait_until("n1 again", deadline(), put_right).await.expect("put right");
    running.stop().await;
}
