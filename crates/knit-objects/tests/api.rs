//! The Kubernetes API as the source, against the lab's embedded one: what is read, what an outage does, what
//! is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, ObjectReference, Pod};
use k8s_openapi::api::events::v1::Event as KubeEvent;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::Network;
use knit_apiserver::{Config, Handle, Server, Store, StoreOptions};
use knit_objects::{
    Cache, Connection, Error, Event, EventLimits, EventNote, EventRecorder, Key, Objects, Reporter,
    Selection, Source, Write,
};
use serde_json::json;
use tokio::time::Instant;

const MANAGER: &str = "test";

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn store_options() -> StoreOptions {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    StoreOptions { crds, ..StoreOptions::default() }
}

/// A loopback address that only one test of one process has: nobody else takes its port while a server is
/// away.
fn own_loopback() -> std::net::SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(100);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    ([127, NEXT.fetch_add(1, Ordering::Relaxed), high, low.clamp(1, 254)], 0).into()
}

async fn serve() -> Handle {
    let config = Config { listen: own_loopback(), store: store_options(), ..Config::default() };
    Server::start(config).await.expect("an API server")
}

/// The same address again, as a server does that comes back.
async fn serve_again(store: Store, listen: std::net::SocketAddr) -> Handle {
    let config = Config { listen, ..Config::default() };
    Server::serve(store, &config).await.expect("an API server")
}

async fn open(server: &Handle) -> Objects {
    Objects::open(Source::Url(server.url())).await.expect("objects")
}

fn namespace(name: &str, tenant: &str) -> Namespace {
    Namespace {
        metadata: ObjectMeta {
            name: Some(name.into()),
            labels: Some([("tenant".to_owned(), tenant.to_owned())].into()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    }
}

async fn names_become<T: Send + Sync + 'static>(cache: &Cache<T>, expected: &[&str]) {
    let names = |cache: &Cache<T>| {
        let mut names: Vec<_> = cache.list().iter().map(|(key, _)| key.to_string()).collect();
        names.sort();
        names
    };
    cache
        .wait_until(&format!("{expected:?}"), deadline(), |cache| (names(cache) == expected).then_some(()))
        .await
        .unwrap_or_else(|error| panic!("{error}; there is {:?}", names(cache)));
}

#[tokio::test]
async fn the_initial_set_then_synced_then_changes() {
    let server = serve().await;
    let objects = open(&server).await;
    objects.write(&Write::create(&namespace("one", "blue"))).await.expect("created");
    objects.write(&Write::create(&namespace("red", "red"))).await.expect("created");
    let watch = objects.watch::<Namespace>().labels("tenant=blue").map(|_| Some(()));
    let mut events = watch.subscribe().expect("a subscription");
    assert_eq!(events.next().await, Some(Event::Applied(Key::cluster("one"), ())));
    assert_eq!(events.next().await, Some(Event::Synced));
    objects.write(&Write::create(&namespace("two", "blue"))).await.expect("created");
    assert_eq!(events.next().await, Some(Event::Applied(Key::cluster("two"), ())));
    // What no longer matches the selector is gone for this reader.
    let patch = json!({"metadata": {"labels": {"tenant": "red"}}});
    objects.write(&Write::merge::<Namespace>(Key::cluster("one"), patch)).await.expect("patched");
    assert_eq!(events.next().await, Some(Event::Deleted(Key::cluster("one"))));
    assert!(events.connection().borrow().is_connected());
}

#[tokio::test]
async fn more_objects_than_a_page() {
    let server = serve().await;
    let objects = open(&server).await;
    for i in 0..1100 {
        objects.write(&Write::create(&namespace(&format!("n{i:04}"), "blue"))).await.expect("created");
    }
    let selection = Selection { labels: Some("tenant=blue".into()), ..Selection::default() };
    assert_eq!(objects.list::<Namespace>(&selection).await.expect("a list").len(), 1100);
    let cache =
        objects.watch::<Namespace>().labels("tenant=blue").map(|_| Some(())).cache().expect("a cache");
    cache.wait_synced(deadline()).await.expect("synced");
    assert_eq!(cache.len(), 1100);
}

#[tokio::test]
async fn an_outage_keeps_what_is_known_and_catches_up_with_deletions() {
    let server = serve().await;
    let (store, address) = (server.store().clone(), server.addr);
    let objects = open(&server).await;
    for name in ["a", "b"] {
        objects.write(&Write::create(&namespace(name, "blue"))).await.expect("created");
    }
    let cache = objects.watch::<Namespace>().labels("tenant=blue").cache().expect("a cache");
    names_become(&cache, &["a", "b"]).await;
    let mut connection = cache.connection();
    connection.wait_for(Connection::is_connected).await.expect("a state");

    server.shutdown().await;
    let state = connection.wait_for(|c| !c.is_connected()).await.expect("a state").clone();
    assert!(matches!(state, Connection::Disconnected { .. }), "{state}");
    assert!(state.error().is_some_and(|e| e.contains("does not answer")), "{state}");
    names_become(&cache, &["a", "b"]).await;

    // Meanwhile one object goes and another comes, behind our back.
    let other = serve_again(store.clone(), own_loopback()).await;
    let elsewhere = open(&other).await;
    elsewhere.write(&Write::delete::<Namespace>(Key::cluster("a"))).await.expect("deleted");
    elsewhere.write(&Write::create(&namespace("c", "blue"))).await.expect("created");
    let _back = serve_again(store, address).await;
    connection.wait_for(Connection::is_connected).await.expect("a state");
    names_become(&cache, &["b", "c"]).await;
}

#[tokio::test]
async fn a_history_that_is_too_old_means_a_new_list() {
    let server = serve().await;
    let address = server.addr;
    let objects = open(&server).await;
    for name in ["a", "b"] {
        objects.write(&Write::create(&namespace(name, "blue"))).await.expect("created");
    }
    let cache = objects.watch::<Namespace>().labels("tenant=blue").cache().expect("a cache");
    names_become(&cache, &["a", "b"]).await;
    server.shutdown().await;

    // A server with another history: it does not know the version that we ask for.
    let store = Store::new(&StoreOptions { first_resource_version: 1_000_000, ..store_options() });
    let _back = serve_again(store.expect("a store"), address).await;
    objects
        .write_retrying(&Write::create(&namespace("b", "blue")), knit_objects::Backoff::default(), deadline())
        .await
        .expect("created");
    names_become(&cache, &["b"]).await;
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_waited_for() {
    let listener = std::net::TcpListener::bind(own_loopback()).expect("an address");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let objects = Objects::open(Source::Url(format!("http://{address}"))).await.expect("objects");
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    let mut connection = cache.connection();
    let state = connection.wait_for(|c| c.error().is_some()).await.expect("a state").clone();
    assert!(matches!(state, Connection::Connecting { .. }), "{state}");
    let error = cache.wait_synced(Instant::now()).await.expect_err("nothing there").to_string();
    assert!(error.contains("Namespace") && error.contains("connecting since"), "{error}");
    let store = Store::new(&store_options()).expect("a store");
    let _server = serve_again(store, address).await;
    cache.wait_synced(deadline()).await.expect("synced");
}

#[tokio::test]
async fn what_cannot_be_understood_is_a_problem_and_not_the_end() {
    let server = serve().await;
    let objects = open(&server).await;
    objects.write(&Write::create(&namespace("a", "blue"))).await.expect("created");
    // Another shape of a Namespace: labels must be a number for this reader.
    #[derive(Clone, Debug, serde::Deserialize)]
    struct Odd {
        metadata: ObjectMeta,
        #[serde(default)]
        spec: OddSpec,
    }
    #[derive(Clone, Debug, Default, serde::Deserialize)]
    struct OddSpec {
        #[serde(default)]
        finalizers: Option<u32>,
    }
    impl kube::Resource for Odd {
        type DynamicType = ();
        type Scope = kube::core::ClusterResourceScope;
        fn kind((): &()) -> std::borrow::Cow<'_, str> {
            "Namespace".into()
        }
        fn group((): &()) -> std::borrow::Cow<'_, str> {
            "".into()
        }
        fn version((): &()) -> std::borrow::Cow<'_, str> {
            "v1".into()
        }
        fn plural((): &()) -> std::borrow::Cow<'_, str> {
            "namespaces".into()
        }
        fn meta(&self) -> &ObjectMeta {
            &self.metadata
        }
        fn meta_mut(&mut self) -> &mut ObjectMeta {
            &mut self.metadata
        }
    }
    let cache = objects.watch::<Odd>().map(|odd| Some(odd.spec.finalizers)).cache().expect("a cache");
    cache.wait_synced(deadline()).await.expect("synced");
    let problems = Arc::clone(&objects.problems().borrow());
    assert!(problems.iter().any(|p| p.object.as_deref() == Some("Namespace a")), "{problems:?}");
    assert!(cache.get(&Key::cluster("a")).is_none());
}

#[tokio::test]
async fn errors_say_what_to_do() {
    let server = serve().await;
    let objects = open(&server).await;
    let missing =
        Write::merge::<Namespace>(Key::cluster("none"), json!({"metadata": {"labels": {"a": "b"}}}));
    assert!(matches!(objects.write(&missing).await, Err(Error::NotFound { .. })));
    objects.write(&Write::create(&namespace("a", "x"))).await.expect("created");
    let again = objects.write(&Write::create(&namespace("a", "x"))).await;
    assert!(matches!(again, Err(Error::AlreadyExists { .. })), "{again:?}");
    let stale = Write::merge::<Namespace>(Key::cluster("a"), json!({"metadata": {"labels": {"a": "b"}}}));
    let stale = objects.write(&stale.if_version("1")).await;
    assert!(matches!(stale, Err(Error::Conflict { .. })), "{stale:?}");
    let wrong = json!({"spec": {"topology": "Layer9"}});
    let network = Network::new(
        "blue",
        knit_api::NetworkSpec {
            subnets: vec![knit_api::Subnet { cidr: "10.77.0.0/16".into(), ..Default::default() }],
            class: "knit".into(),
            ..Default::default()
        },
    );
    objects.write(&Write::create(&network)).await.expect("created");
    let refused = objects.write(&Write::merge::<Network>(Key::cluster("blue"), wrong)).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    assert!(!refused.expect_err("refused").retryable());
    objects.write(&Write::delete::<Namespace>(Key::cluster("none"))).await.expect("gone already");
    objects
        .write(&Write::delete_uid::<Namespace>(Key::cluster("a"), "other"))
        .await
        .expect("not the one that was meant");
    assert!(objects.get::<Namespace>(&Key::cluster("a")).await.expect("answer").is_some());
    let no_kubeconfig = Source::Kubeconfig { path: "/does/not/exist".into(), context: None };
    let error = Objects::open(no_kubeconfig).await.expect_err("no file").to_string();
    assert!(error.contains("/does/not/exist") && error.contains("kubectl"), "{error}");
    assert!(matches!(Objects::open(Source::Url("not a url".into())).await, Err(Error::Url { .. })));
}

#[tokio::test]
async fn statuses_leases_and_node_conditions() {
    let server = serve().await;
    let objects = open(&server).await;
    let network = Network::new(
        "blue",
        knit_api::NetworkSpec {
            subnets: vec![knit_api::Subnet { cidr: "10.77.0.0/16".into(), ..Default::default() }],
            class: "knit".into(),
            ..Default::default()
        },
    );
    objects.write(&Write::create(&network)).await.expect("created");
    objects
        .write(&Write::status::<Network>(Key::cluster("blue"), &json!({"id": 7}), MANAGER))
        .await
        .expect("status");
    let read = objects.get::<Network>(&Key::cluster("blue")).await.expect("answer").expect("a Network");
    assert_eq!(read.status.and_then(|s| s.id), Some(7));

    let node =
        Node { metadata: ObjectMeta { name: Some("n1".into()), ..Default::default() }, ..Default::default() };
    objects.write(&Write::create(&node)).await.expect("created");
    let kubelet = json!({"conditions": [{"type": "Ready", "status": "True", "reason": "r", "message": "m"}]});
    objects.write(&Write::status::<Node>(Key::cluster("n1"), &kubelet, "kubelet")).await.expect("status");
    let now = Timestamp::now();
    let write = Write::node_network_unavailable("n1", false, "KnitIsUp", "the agent serves", now, MANAGER);
    objects.write(&write).await.expect("condition");
    let node = objects.get::<Node>(&Key::cluster("n1")).await.expect("answer").expect("a Node");
    let mut types: Vec<_> = node.status.expect("a status").conditions.expect("conditions");
    types.sort_by(|a, b| a.type_.cmp(&b.type_));
    let types: Vec<_> = types.iter().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    assert_eq!(types, [("NetworkUnavailable", "False"), ("Ready", "True")]);

    objects.write(&Write::create(&namespace("knit-system", ""))).await.expect("created");
    let key = Key::namespaced("knit-system", "n1");
    for _ in 0..2 {
        let now = Timestamp::now();
        let write = Write::lease("knit-system", "n1", "n1", Duration::from_secs(40), now, MANAGER);
        objects.write(&write).await.expect("a lease");
        let lease = objects.get::<Lease>(&key).await.expect("answer").expect("a Lease").spec.expect("a spec");
        assert_eq!(lease.lease_duration_seconds, Some(40));
        assert_eq!(lease.renew_time.expect("a time").0.as_microsecond(), now.as_microsecond());
    }
}

#[tokio::test]
async fn events_are_counted_in_one_object() {
    let server = serve().await;
    let objects = open(&server).await;
    let reporter = Reporter { controller: "knit.dev/node".into(), instance: "n1".into() };
    let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
    let pod = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some("default".into()),
        name: Some("web".into()),
        ..Default::default()
    };
    let events = objects.watch::<KubeEvent>().cache().expect("a cache");
    for _ in 0..5 {
        recorder.tell(EventNote::warning(pod.clone(), "AttachFailed", "Attach", "no address is left"));
    }
    let count = |cache: &Cache<KubeEvent>| {
        let list = cache.list();
        let series = list.first().and_then(|(_, e)| e.series.as_ref().map(|s| s.count));
        (list.len() == 1 && series == Some(5)).then_some(())
    };
    events.wait_until("an event that counts 5", deadline(), count).await.expect("an event");
    assert_eq!(recorder.lost(), 0);
}

#[tokio::test]
async fn pods_of_one_namespace() {
    let server = serve().await;
    let objects = open(&server).await;
    for space in ["x", "y"] {
        objects.write(&Write::create(&namespace(space, ""))).await.expect("created");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": space},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
        }))
        .expect("a Pod");
        objects.write(&Write::create(&pod)).await.expect("created");
    }
    let one = objects.watch::<Pod>().namespace("x").fields("spec.nodeName=n1").cache().expect("a cache");
    names_become(&one, &["x/web"]).await;
    let all = objects.watch::<Pod>().cache().expect("a cache");
    names_become(&all, &["x/web", "y/web"]).await;
}

#[tokio::test]
async fn what_a_list_says_came_piece_by_piece() {
    let server = serve().await;
    let (store, address) = (server.store().clone(), server.addr);
    let objects = open(&server).await;
    for name in ["a", "b", "c"] {
        objects.write(&Write::create(&namespace(name, "blue"))).await.expect("created");
    }
    let watch = objects.watch::<Namespace>().labels("tenant=blue").map(|_| Some(()));
    let seed = [(Key::cluster("b"), ()), (Key::cluster("gone"), ())];
    let mut batches = watch.seed(seed).subscribe_batches().expect("a subscription");
    let told = |batch: Option<Vec<Event<()>>>| {
        let text = |event| match event {
            Event::Applied(key, ()) => format!("+{key}"),
            Event::Deleted(key) => format!("-{key}"),
            Event::Synced => "synced".to_owned(),
        };
        let mut told: Vec<String> = batch.expect("a batch").into_iter().map(text).collect();
        told.sort();
        told
    };
    assert_eq!(told(batches.next().await), ["+b", "+gone"]);
    assert_eq!(told(batches.next().await), ["+a", "+b", "+c", "-gone", "synced"]);
    objects.write(&Write::delete::<Namespace>(Key::cluster("c"))).await.expect("deleted");
    // First it says that it is going.
    assert_eq!(told(batches.next().await), ["+c"]);
    assert_eq!(told(batches.next().await), ["-c"]);

    // What changed while nobody was there comes as a list again if the history is another by then.
    server.shutdown().await;
    drop(store);
    let other = Store::new(&StoreOptions { first_resource_version: 1_000_000, ..store_options() });
    let other = other.expect("a store");
    let elsewhere = serve_again(other.clone(), own_loopback()).await;
    let there = open(&elsewhere).await;
    for name in ["b", "d"] {
        there.write(&Write::create(&namespace(name, "blue"))).await.expect("created");
    }
    let _back = serve_again(other, address).await;
    assert_eq!(told(batches.next().await), ["+b", "+d", "-a"]);
}
