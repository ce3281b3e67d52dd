//! Slices against the lab's embedded API: what agents read of Nodes and AddressBlocks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node};
use knit_api::{AddressBlock, BlockSlice, Network, NodeSlice};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_controller::{Config, Controller};
use knit_objects::{Cache, Key, Objects, Source, Write};
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
