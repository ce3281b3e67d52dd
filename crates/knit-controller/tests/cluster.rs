//! The controller against the lab's embedded API: first start, nodes that join and ask, leaders that change,
//! outages.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_api::names::{
    AGENT_MANAGER, ATTACHMENT_FINALIZER, DEFAULT_NETWORK, NETWORK_FINALIZER, UNSCHEDULABLE_TAINT,
};
use knit_api::{AddressBlock, Network, NetworkAttachment, NetworkClass, NodeNetwork, PolicyPeerSlice};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_controller::{Config, Controller, ControllerState};
use knit_objects::{Cache, Key, Objects, Source, Write};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A loopback address that only one test of one process has: nobody else takes its port while a server is
/// away.
fn own_loopback() -> std::net::SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(100);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    ([127, NEXT.fetch_add(1, Ordering::Relaxed), high, low.clamp(1, 254)], 0).into()
}

async fn serve() -> Handle {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let config = ApiConfig { listen: own_loopback(), store, ..ApiConfig::default() };
    Server::start(config).await.expect("an API server")
}

async fn open(server: &Handle) -> Objects {
    Objects::open(Source::Url(server.url())).await.expect("objects")
}

/// What people and agents write.
struct World {
    objects: Objects,
    networks: Cache<Network>,
    blocks: Cache<AddressBlock>,
    nodes: Cache<Node>,
}

impl World {
    async fn new(server: &Handle) -> Self {
        let objects = open(server).await;
        let world = Self {
            networks: objects.watch().cache().expect("a cache"),
            blocks: objects.watch().cache().expect("a cache"),
            nodes: objects.watch().cache().expect("a cache"),
            objects,
        };
        world.create::<Namespace>(json!({"metadata": {"name": "knit-system"}})).await;
        world
    }

    async fn create<K>(&self, object: Value)
    where
        K: knit_objects::Object + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).expect("an object");
        self.objects.write(&Write::create(&object)).await.expect("created");
    }

    async fn network(&self, name: &str, cidr: &str) {
        let spec = json!({"topology": "Layer3", "subnets": [{"cidr": cidr}]});
        self.create::<Network>(json!({"metadata": {"name": name}, "spec": spec})).await;
    }

    async fn node(&self, name: &str, address: &str, range: Option<&str>) {
        let ranges: Vec<&str> = range.into_iter().collect();
        self.create::<Node>(
            json!({"metadata": {"name": name}, "spec": {"podCIDRs": ranges, "podCIDR": range}}),
        )
        .await;
        let addresses = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        let write = Write::status::<Node>(Key::cluster(name), &addresses, "kubelet");
        self.objects.write(&write).await.expect("written");
        self.create::<NodeNetwork>(json!({"metadata": {"name": name}, "spec": {}})).await;
        self.says(name, json!([])).await;
    }

    async fn says(&self, node: &str, networks: Value) {
        let runtime =
            json!({"name": "knit.dev/linux", "version": "1", "features": ["layer3"], "healthy": true});
        let status =
            json!({"runtimes": [runtime], "networks": networks, "networkCount": 0, "notReadyCount": 0});
        let write = Write::status::<NodeNetwork>(Key::cluster(node), &status, AGENT_MANAGER);
        self.objects.write(&write).await.expect("written");
    }

    async fn network_becomes(&self, name: &str, what: &str, check: impl Fn(&Network) -> bool) {
        let key = Key::cluster(name);
        let found = |cache: &Cache<Network>| cache.get(&key).filter(|n| check(n)).map(|_| ());
        let result = self.networks.wait_until(&format!("Network {name} {what}"), deadline(), found).await;
        result.unwrap_or_else(|error| panic!("{error}: {:?}", self.networks.get(&key)));
    }

    async fn blocks_become(&self, expected: &[&str]) {
        let list = |cache: &Cache<AddressBlock>| {
            let mut list: Vec<_> = cache
                .list()
                .iter()
                .map(|(_, b)| {
                    format!("{} {} {}", b.spec.network, b.spec.node, b.spec.ipv4.as_deref().unwrap_or("-"))
                })
                .collect();
            list.sort();
            list
        };
        let found = |cache: &Cache<AddressBlock>| (list(cache) == expected).then_some(());
        let result = self.blocks.wait_until("the blocks", deadline(), found).await;
        result.unwrap_or_else(|error| panic!("{error}: {:?}", list(&self.blocks)));
    }

    async fn tainted_becomes(&self, node: &str, expected: bool) {
        let tainted = |node: &Node| {
            let taints = node.spec.as_ref().and_then(|s| s.taints.as_ref());
            taints.into_iter().flatten().any(|t| t.key == UNSCHEDULABLE_TAINT)
        };
        let key = Key::cluster(node);
        let found = |cache: &Cache<Node>| cache.get(&key).filter(|n| tainted(n) == expected).map(|_| ());
        self.nodes.wait_until("the taint", deadline(), found).await.expect("a taint");
    }
}

/// A controller that runs until it is stopped.
struct Running {
    state: watch::Receiver<ControllerState>,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start(objects: Objects, config: Config) -> Self {
        let controller = Controller::new(objects, config).expect("a controller");
        let state = controller.state();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(controller.run(async move {
            let _ = stopped.await;
        }));
        Self { state, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).expect("a controller that runs");
        self.task.await.expect("no panic");
    }
}

fn config(identity: &str) -> Config {
    Config {
        renew_every: Duration::from_millis(200),
        // Long enough that a leader on a busy machine renews it in time.
        lease_duration: Duration::from_secs(10),
        node_gone_grace: Duration::ZERO,
        counts_every: Duration::ZERO,
        ..Config::new(identity)
    }
}

fn condition(network: &Network, type_: &str) -> Option<(String, String)> {
    let condition = network.status.as_ref()?.conditions.iter().find(|c| c.type_ == type_)?;
    Some((condition.status.clone(), condition.reason.clone()))
}

fn is(network: &Network, type_: &str, status: &str, reason: &str) -> bool {
    condition(network, type_) == Some((status.into(), reason.into()))
}

#[tokio::test]
async fn from_the_first_start_to_the_end_of_a_network() {
    let server = serve().await;
    let world = World::new(&server).await;
    let controller = Running::start(open(&server).await, config("a"));

    // The first start: class and default Network are there, and say that no node serves them yet.
    world
        .network_becomes(DEFAULT_NETWORK, "has its number", |n| {
            n.status.as_ref().and_then(|s| s.id) == Some(1)
        })
        .await;
    world.network_becomes(DEFAULT_NETWORK, "waits", |n| is(n, "Accepted", "False", "ClassNotFound")).await;

    // Nodes join: a block each without being asked, one of its podCIDR.
    world.node("n1", "192.0.2.1", Some("10.244.1.0/24")).await;
    world.node("n2", "192.0.2.2", Some("10.244.2.0/24")).await;
    world.blocks_become(&["default n1 10.244.1.0/24", "default n2 10.244.2.0/24"]).await;
    world.network_becomes(DEFAULT_NETWORK, "is ready", |n| is(n, "Ready", "True", "Ready")).await;
    let classes = world.objects.watch::<NetworkClass>().cache().expect("a cache");
    let supported = |cache: &Cache<NetworkClass>| {
        let class = cache.get(&Key::cluster("knit"))?;
        (class.status.as_ref()?.supported_features == ["layer3"]).then_some(())
    };
    let result = classes.wait_until("the class's features", deadline(), supported).await;
    result.unwrap_or_else(|error| panic!("{error}: {:?}", classes.list()));

    // Another Network: a number, a finalizer, and a block for the node that asks.
    world.network("blue", "10.77.0.0/16").await;
    world.network_becomes("blue", "is accepted", |n| is(n, "Accepted", "True", "Accepted")).await;
    world
        .network_becomes("blue", "is kept", |n| {
            n.metadata.finalizers.as_deref() == Some(&[NETWORK_FINALIZER.into()])
        })
        .await;
    let asks =
        json!([{"name": "blue", "ready": false, "reason": "NotSetUp", "wantsBlock": true, "blocks": 0}]);
    world.says("n1", asks).await;
    let three = ["blue n1 10.77.0.0/29", "default n1 10.244.1.0/24", "default n2 10.244.2.0/24"];
    world.blocks_become(&three).await;
    world.network_becomes("blue", "waits for n1", |n| is(n, "Ready", "False", "NodesNotReady")).await;
    let uses = json!([{"name": "blue", "ready": true, "reason": "Ready", "wantsBlock": false, "blocks": 1,
        "attachments": 1,
        "addresses": [{"family": "IPv4", "used": 2, "free": 3}]}]);
    world.says("n1", uses).await;
    world
        .network_becomes("blue", "counts", |n| {
            let counts = n.status.as_ref().map(|s| s.addresses.clone()).unwrap_or_default();
            // 65,536 less the block, less the broadcast address, plus what is free in the block.
            counts.first().is_some_and(|c| c.used == 2 && c.free == 65_536 - 8 - 1 + 3)
        })
        .await;

    // It is deleted, and stays until nothing uses it.
    world.objects.write(&Write::delete::<Network>(Key::cluster("blue"))).await.expect("deleted");
    world.network_becomes("blue", "is in use", |n| is(n, "Ready", "False", "InUse")).await;
    world.says("n1", json!([])).await;
    let gone = |cache: &Cache<Network>| cache.get(&Key::cluster("blue")).is_none().then_some(());
    world.networks.wait_until("the end of blue", deadline(), gone).await.expect("gone");

    // A node goes, and its block with it.
    world.objects.write(&Write::delete::<Node>(Key::cluster("n2"))).await.expect("deleted");
    world.blocks_become(&["default n1 10.244.1.0/24"]).await;
    controller.stop().await;
    let lease = world.objects.get::<Lease>(&Key::namespaced("knit-system", "knit-controller")).await;
    let spec = lease.expect("answer").expect("a Lease").spec.expect("a spec");
    assert_eq!(spec.holder_identity.as_deref(), Some(""));
}

#[tokio::test]
async fn a_silent_agent_closes_its_node_until_it_is_back() {
    let server = serve().await;
    let world = World::new(&server).await;
    world.node("n1", "192.0.2.1", Some("10.244.1.0/24")).await;
    let renew = async |seconds: u64, ago: i64| {
        let when = Timestamp::now() - jiff::SignedDuration::from_secs(ago);
        let write =
            Write::lease("knit-system", "n1", "n1", Duration::from_secs(seconds), when, AGENT_MANAGER);
        world.objects.write(&write).await.expect("a Lease");
    };
    // The node's clock is an hour behind, which says nothing.
    renew(1, 3600).await;
    let controller = Running::start(open(&server).await, config("a"));
    world.tainted_becomes("n1", true).await;
    renew(100, 3600).await;
    world.tainted_becomes("n1", false).await;
    controller.stop().await;
}

#[tokio::test]
async fn one_leads_and_the_other_takes_over() {
    let server = serve().await;
    let world = World::new(&server).await;
    let first = Running::start(open(&server).await, config("a"));
    let mut state = first.state.clone();
    state.wait_for(|s| s.leading && s.settled).await.expect("a leader");
    let second = Running::start(open(&server).await, config("b"));
    world.network("blue", "10.77.0.0/16").await;
    world
        .network_becomes("blue", "has its number", |n| n.status.as_ref().and_then(|s| s.id) == Some(2))
        .await;
    assert!(!second.state.borrow().leading);
    // Killed, not stopped: the other one waits for the end of the Lease.
    first.task.abort();
    let mut state = second.state.clone();
    state.wait_for(|s| s.leading).await.expect("a leader");
    world.network("red", "10.77.0.0/16").await;
    world.network_becomes("red", "has its number", |n| n.status.as_ref().and_then(|s| s.id) == Some(3)).await;
    second.stop().await;
}

#[tokio::test]
async fn an_outage_ends_and_what_was_missed_is_done() {
    let server = serve().await;
    let (store, address) = (server.store().clone(), server.addr);
    let world = World::new(&server).await;
    let controller = Running::start(open(&server).await, config("a"));
    let mut state = controller.state.clone();
    state.wait_for(|s| s.leading && s.settled).await.expect("a leader");
    server.shutdown().await;
    state.wait_for(|s| !s.leading).await.expect("a state");
    let back =
        Server::serve(store, &ApiConfig { listen: address, ..ApiConfig::default() }).await.expect("a server");
    let node = json!({"metadata": {"name": "n1"}, "spec": {"podCIDRs": ["10.244.1.0/24"]}});
    let write = Write::create(&serde_json::from_value::<Node>(node).expect("a Node"));
    let written = world.objects.write_retrying(&write, knit_objects::Backoff::default(), deadline()).await;
    written.expect("created");
    world.blocks_become(&["default n1 10.244.1.0/24"]).await;
    controller.stop().await;
    back.shutdown().await;
}

#[tokio::test]
async fn a_network_that_is_used_up_says_so_in_an_event() {
    let server = serve().await;
    let world = World::new(&server).await;
    world.node("n1", "192.0.2.1", Some("10.244.1.0/24")).await;
    world.node("n2", "192.0.2.2", Some("10.244.2.0/24")).await;
    world.network("tiny", "10.77.0.0/29").await;
    let asks =
        json!([{"name": "tiny", "ready": false, "reason": "NotSetUp", "wantsBlock": true, "blocks": 0}]);
    world.says("n1", asks.clone()).await;
    world.says("n2", asks).await;
    let controller = Running::start(open(&server).await, config("a"));
    let events = world.objects.watch::<Event>().cache().expect("a cache");
    let found = |cache: &Cache<Event>| {
        cache.list().iter().any(|(_, e)| e.reason.as_deref() == Some("AddressesExhausted")).then_some(())
    };
    events.wait_until("an event", deadline(), found).await.expect("an event");
    controller.stop().await;
}

#[tokio::test]
async fn what_a_dead_node_held_is_let_go() {
    let server = serve().await;
    let world = World::new(&server).await;
    world.node("n1", "192.0.2.1", Some("10.244.1.0/24")).await;
    world.create::<Namespace>(json!({"metadata": {"name": "shop"}})).await;
    let status = json!({
        "node": "n9", "mac": "02:00:00:00:00:01", "mtu": 1450, "interface": "net1", "sandboxId": "s",
        "addresses": [{"family": "IPv4", "address": "10.77.0.9", "prefix": 24}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "Attached", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    });
    for name in ["deleted", "kept"] {
        let metadata = json!({"name": name, "namespace": "shop", "finalizers": [ATTACHMENT_FINALIZER]});
        let spec = json!({"pod": "web", "network": "blue"});
        world.create::<NetworkAttachment>(json!({"metadata": metadata, "spec": spec})).await;
        let key = Key::namespaced("shop", name);
        let write = Write::status::<NetworkAttachment>(key, &status, AGENT_MANAGER);
        world.objects.write(&write).await.expect("written");
    }
    let key = |name: &str| Key::namespaced("shop", name);
    world.objects.write(&Write::delete::<NetworkAttachment>(key("deleted"))).await.expect("deleted");
    let attachments = world.objects.watch::<NetworkAttachment>().cache().expect("a cache");
    let controller = Running::start(open(&server).await, config("a"));
    let done = |cache: &Cache<NetworkAttachment>| {
        let kept = cache.get(&key("kept"))?;
        let status = kept.status.clone()?;
        let says_so = status.conditions.iter().any(|c| c.status == "False" && c.message.contains("n9"));
        let nothing = status.node.is_none() && status.addresses.is_empty() && status.mac.is_none();
        (cache.get(&key("deleted")).is_none() && says_so && nothing).then_some(())
    };
    let result = attachments.wait_until("the end of what n9 held", deadline(), done).await;
    result.unwrap_or_else(|error| panic!("{error}: {:?}", attachments.list()));
    controller.stop().await;
}

#[tokio::test]
async fn a_number_is_not_given_again_by_the_next_controller() {
    let server = serve().await;
    let world = World::new(&server).await;
    let numbered = async |name: &str, number: u32| {
        world.network(name, "10.77.0.0/16").await;
        let has = |n: &Network| n.status.as_ref().and_then(|s| s.id) == Some(number);
        world.network_becomes(name, "has its number", has).await;
    };
    let gone = async |name: &str| {
        world.objects.write(&Write::delete::<Network>(Key::cluster(name))).await.expect("deleted");
        let gone = |cache: &Cache<Network>| cache.get(&Key::cluster(name)).is_none().then_some(());
        world.networks.wait_until("its end", deadline(), gone).await.expect("gone");
    };
    let first = Running::start(open(&server).await, config("a"));
    let is_numbered = |n: &Network| n.status.as_ref().and_then(|s| s.id) == Some(1);
    world.network_becomes(DEFAULT_NETWORK, "has its number", is_numbered).await;
    numbered("blue", 2).await;
    gone("blue").await;
    first.stop().await;
    let second = Running::start(open(&server).await, config("b"));
    numbered("red", 3).await;
    gone("red").await;
    numbered("green", 4).await;
    second.stop().await;
}

#[tokio::test]
async fn the_author_of_a_policy_gets_one_event_whoever_leads() {
    let server = serve().await;
    let world = World::new(&server).await;
    world.create::<Namespace>(json!({"metadata": {"name": "shop"}})).await;
    let spec = json!({"podSelector": {}});
    world
        .create::<NetworkPolicy>(json!({"metadata": {"name": "p", "namespace": "shop"}, "spec": spec}))
        .await;
    let events = world.objects.watch::<Event>().cache().expect("a cache");
    let told = |cache: &Cache<Event>| {
        let all = cache.list();
        all.iter().filter(|(_, event)| event.reason.as_deref() == Some("NotEnforced")).count()
    };
    for identity in ["a", "b"] {
        let left_to_others = Config { enforce_policies: false, ..config(identity) };
        let controller = Running::start(open(&server).await, left_to_others);
        let found = |cache: &Cache<Event>| (told(cache) > 0).then_some(());
        events.wait_until("an event", deadline(), found).await.expect("an event");
        for n in 0..5 {
            let patch = json!({"metadata": {"annotations": {"n": n.to_string()}}});
            let write = Write::merge::<NetworkPolicy>(Key::namespaced("shop", "p"), patch);
            world.objects.write(&write).await.expect("patched");
        }
        let mut state = controller.state.clone();
        let passes = state.borrow().passes;
        state.wait_for(|s| s.passes >= passes + 2 && s.settled).await.expect("a state");
        assert_eq!(told(&events), 1, "{:?}", events.list());
        controller.stop().await;
    }
}

#[tokio::test]
async fn slices_say_of_pods_what_policies_ask_for_and_go_with_the_policies() {
    let server = serve().await;
    let world = World::new(&server).await;
    world.node("n1", "192.0.2.1", Some("10.244.1.0/24")).await;
    world.create::<Namespace>(json!({"metadata": {"name": "shop"}})).await;
    let pod = |name: &str, ip: &str, app: &str| {
        (
            json!({"metadata": {"name": name, "namespace": "shop", "labels": {"app": app, "private": "yes"}},
                "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}}),
            json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}),
        )
    };
    for (name, ip, app) in [("web", "10.244.1.5", "web"), ("db", "10.244.1.6", "db")] {
        let (object, status) = pod(name, ip, app);
        world.create::<Pod>(object).await;
        let write = Write::status::<Pod>(Key::namespaced("shop", name), &status, "kubelet");
        world.objects.write(&write).await.expect("written");
    }
    let slices: Cache<PolicyPeerSlice> = world.objects.watch().cache().expect("a cache");
    let pods = |cache: &Cache<PolicyPeerSlice>| {
        let mut all: Vec<String> = cache
            .list()
            .iter()
            .flat_map(|(_, slice)| {
                let (network, node) = (slice.spec.network.clone(), slice.spec.node.clone());
                let each = slice.spec.pods.iter();
                let each = each.map(|pod| format!("{} {:?} {:?}", pod.name, pod.addresses, pod.labels));
                each.map(move |pod| format!("{network} {node} {pod}")).collect::<Vec<_>>()
            })
            .collect();
        all.sort();
        all
    };
    let become_ = async |expected: &[&str]| {
        let found = |cache: &Cache<PolicyPeerSlice>| (pods(cache) == expected).then_some(());
        let result = slices.wait_until("the slices", deadline(), found).await;
        result.unwrap_or_else(|error| panic!("{error}: {:?}", pods(&slices)));
    };
    let policy = |app: &str| {
        let from = json!([{"podSelector": {"matchLabels": {"app": app}}}]);
        json!({"metadata": {"name": "p", "namespace": "shop"},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": from}]}})
    };
    world.create::<NetworkPolicy>(policy("web")).await;
    let first = Running::start(open(&server).await, config("a"));
    let web = r#"default n1 web ["10.244.1.5"] {"app": "web"}"#;
    become_(&[web]).await;
    // What a pod becomes is told, and that it has come to its end.
    let label = json!({"metadata": {"labels": {"app": "web"}}});
    let write = Write::merge::<Pod>(Key::namespaced("shop", "db"), label);
    world.objects.write(&write).await.expect("patched");
    become_(&[r#"default n1 db ["10.244.1.6"] {"app": "web"}"#, web]).await;
    let write =
        Write::status::<Pod>(Key::namespaced("shop", "web"), &json!({"phase": "Succeeded"}), "kubelet");
    world.objects.write(&write).await.expect("written");
    become_(&[r#"default n1 db ["10.244.1.6"] {"app": "web"}"#]).await;
    // The next leader takes nothing away that is right, and puts right what somebody took away.
    first.stop().await;
    let all = slices.list();
    assert_eq!(all.len(), 2, "one of the node, and one with the keys of labels");
    for (name, _) in all {
        world.objects.write(&Write::delete::<PolicyPeerSlice>(name)).await.expect("deleted");
    }
    become_(&[]).await;
    let second = Running::start(open(&server).await, config("b"));
    become_(&[r#"default n1 db ["10.244.1.6"] {"app": "web"}"#]).await;
    let has_keys = |cache: &Cache<PolicyPeerSlice>| {
        let all = cache.list();
        let keys = all.iter().find(|(_, slice)| slice.spec.node.is_empty())?.1.spec.label_keys.clone();
        (keys == Some(vec!["app".to_owned()])).then_some(())
    };
    slices.wait_until("the keys of labels", deadline(), has_keys).await.expect("they are there again");
    let write = Write::delete::<NetworkPolicy>(Key::namespaced("shop", "p"));
    world.objects.write(&write).await.expect("deleted");
    second.stop().await;
    // What nobody asks for any more is told for a while, but not by one who never knew that anybody did.
    let third = Running::start(open(&server).await, config("c"));
    let is_empty = |cache: &Cache<PolicyPeerSlice>| cache.is_empty().then_some(());
    slices.wait_until("no slice, of keys neither", deadline(), is_empty).await.expect("they are gone");
    third.stop().await;
}

#[tokio::test]
async fn a_folder_needs_no_controller() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = Objects::open(Source::folder(folder.path())).await.expect("objects");
    let error = Controller::new(objects, config("a")).expect_err("no controller").to_string();
    assert!(error.contains("needs no controller"), "{error}");
}

/// What a slice is now: its version, the labels that it tells of, and those of its pods.
type SliceState = (String, Option<Vec<String>>, Vec<String>);

#[tokio::test]
async fn a_new_key_of_labels_is_written_where_a_pod_has_such_a_label_and_then_for_all() {
    let server = serve().await;
    let world = World::new(&server).await;
    for n in 1..4 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), Some(&format!("10.244.{n}.0/24"))).await;
    }
    world.create::<Namespace>(json!({"metadata": {"name": "shop"}})).await;
    for n in 1..4 {
        let (name, ip) = (format!("web{n}"), format!("10.244.{n}.5"));
        let labels = if n == 1 { json!({"app": "web", "zone": "dmz"}) } else { json!({"app": "web"}) };
        world
            .create::<Pod>(json!({"metadata": {"name": name, "namespace": "shop", "labels": labels},
                "spec": {"nodeName": format!("n{n}"), "containers": [{"name": "c", "image": "i"}]}}))
            .await;
        let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]});
        let write = Write::status::<Pod>(Key::namespaced("shop", name.as_str()), &status, "kubelet");
        world.objects.write(&write).await.expect("written");
    }
    let policy = |name: &str, selector: Value| {
        let from = json!([{"podSelector": selector}]);
        json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": from}]}})
    };
    // What there is, by node, and what of it is written: each version, in the order of the API server.
    let watch = world.objects.watch::<PolicyPeerSlice>();
    let mut written = watch.subscribe().expect("a subscription");
    let mut now: std::collections::BTreeMap<String, SliceState> = std::collections::BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    let mut until = async |now: &mut std::collections::BTreeMap<String, SliceState>,
                           order: &mut Vec<String>,
                           keys: &[&str]| {
        let is_told = |now: &std::collections::BTreeMap<String, SliceState>| {
            now.get("").is_some_and(|(_, told, _)| told.iter().flatten().eq(keys.iter()))
        };
        while !is_told(now) {
            let next = tokio::time::timeout_at(deadline(), written.next());
            let event = next.await.unwrap_or_else(|_| panic!("{keys:?}: {now:?}")).expect("it goes on");
            let knit_objects::Event::Applied(_, slice) = event else { continue };
            let version = slice.metadata.resource_version.unwrap_or_default();
            let labels = slice.spec.pods.iter().flat_map(|pod| pod.labels.keys().cloned()).collect();
            order.push(slice.spec.node.clone());
            now.insert(slice.spec.node, (version, slice.spec.label_keys, labels));
        }
    };
    world.create::<NetworkPolicy>(policy("web", json!({"matchLabels": {"app": "web"}}))).await;
    let running = Running::start(open(&server).await, config("a"));
    until(&mut now, &mut order, &["app"]).await;
    order.sort();
    assert_eq!(order, ["", "n1", "n2", "n3"], "each once, and what is said of all last: it was waited for");
    let before = now.clone();
    // One of these keys has the pod of n1, and the other nobody.
    order.clear();
    let odd = json!({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"},
        {"key": "quarantine", "operator": "DoesNotExist"}]});
    world.create::<NetworkPolicy>(policy("odd", odd)).await;
    until(&mut now, &mut order, &["app", "quarantine", "zone"]).await;
    assert_eq!(order, ["n1", ""], "nothing else is written, and the key is told last");
    assert_eq!(now["n1"].2, ["app", "zone"]);
    for node in ["n2", "n3"] {
        assert_eq!(now[node], before[node]);
    }
    running.stop().await;
}
