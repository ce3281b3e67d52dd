//! A folder as the source: what is read, how changes arrive, what a broken file does, where writes go.

use std::fs;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use knit_api::{AddressBlock, Network};
use knit_objects::{Cache, Error, Event, Key, Objects, Selection, Source, Write};
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn namespace(name: &str, labels: &str) -> String {
    format!("---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n")
}

async fn open(folder: &TempDir) -> Objects {
    Objects::open(Source::folder(folder.path())).await.expect("a folder of objects")
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

fn put(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).expect("a file");
}

/// As editors and configuration tools do it.
fn put_by_rename(folder: &Path, name: &str, text: &str) {
    let temporary = folder.join(format!(".{name}.swp"));
    fs::write(&temporary, text).expect("a file");
    fs::rename(&temporary, folder.join(name)).expect("a rename");
}

#[tokio::test]
async fn the_initial_set_then_synced_then_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "a.yaml", &namespace("one", ""));
    let objects = open(&folder).await;
    let mut events = objects.watch::<Namespace>().map(|_| Some(())).subscribe().expect("a subscription");
    assert_eq!(events.next().await, Some(Event::Applied(Key::cluster("one"), ())));
    assert_eq!(events.next().await, Some(Event::Synced));
    assert!(events.connection().borrow().is_connected());
    put_by_rename(folder.path(), "a.yaml", &namespace("two", ""));
    let mut changes = vec![events.next().await.expect("an event"), events.next().await.expect("an event")];
    changes.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(changes, [Event::Applied(Key::cluster("two"), ()), Event::Deleted(Key::cluster("one"))]);
}

#[tokio::test]
async fn files_come_change_and_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = open(&folder).await;
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    cache.wait_synced(deadline()).await.expect("synced");
    put(folder.path(), "a.yaml", &namespace("a", ""));
    names_become(&cache, &["a"]).await;
    put(folder.path(), "b.json", r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"b"}}"#);
    names_become(&cache, &["a", "b"]).await;
    put(folder.path(), "notes.txt", &namespace("no", ""));
    put(folder.path(), ".hidden.yaml", &namespace("no", ""));
    fs::create_dir(folder.path().join("sub.yaml")).expect("a folder");
    fs::rename(folder.path().join("a.yaml"), folder.path().join("a.off")).expect("a rename");
    names_become(&cache, &["b"]).await;
    fs::remove_file(folder.path().join("b.json")).expect("removed");
    names_become(&cache, &[]).await;
}

#[tokio::test]
async fn many_writes_of_the_same_size_are_all_seen() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = open(&folder).await;
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    for round in 0..50 {
        put(folder.path(), "a.yaml", &namespace(&format!("n{round:02}"), ""));
        if round % 10 == 9 {
            names_become(&cache, &[&format!("n{round:02}")]).await;
        }
    }
}

#[tokio::test]
async fn a_broken_file_takes_nothing_away_and_says_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "a.yaml", &(namespace("a", "") + &namespace("b", "")));
    put(folder.path(), "b.yaml", &namespace("c", ""));
    let objects = open(&folder).await;
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    names_become(&cache, &["a", "b", "c"]).await;
    let mut problems = objects.problems();
    assert!(problems.borrow_and_update().is_empty());

    put(folder.path(), "a.yaml", "kind: [\n");
    problems.changed().await.expect("problems");
    {
        let problems = problems.borrow_and_update();
        let problem = &problems[0];
        assert_eq!(problem.file.as_deref(), Some(Path::new("a.yaml")));
        assert!(problem.line.is_some() && problem.message.starts_with("not YAML"), "{problem}");
    }
    put(folder.path(), "b.yaml", &namespace("d", ""));
    names_become(&cache, &["a", "b", "d"]).await;

    put(folder.path(), "a.yaml", &namespace("a", ""));
    names_become(&cache, &["a", "d"]).await;
    assert!(problems.borrow_and_update().is_empty());
}

#[tokio::test]
async fn whole_objects_with_status_and_selectors() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "\
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: x, labels: {app: web}}
spec: {nodeName: n1, containers: [{name: c, image: i}]}
status: {podIP: 10.0.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: y, labels: {app: db}}
spec: {nodeName: n2, containers: [{name: c, image: i}]}
---
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: blue}
spec: {topology: Layer3, subnets: [{cidr: 10.77.0.0/16}]}
status: {id: 7}
---
apiVersion: knit.dev/v1alpha1
kind: AddressBlock
metadata: {name: blue-n1}
spec: {network: blue, node: n1, ipv4: 10.77.0.0/28}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
spec: {podCIDRs: [10.244.0.0/24]}
";
    put(folder.path(), "all.yml", text);
    let objects = open(&folder).await;
    let on_n1 = objects.watch::<Pod>().fields("spec.nodeName=n1").map(|pod| pod.status?.pod_ip).cache();
    let on_n1 = on_n1.expect("a cache");
    on_n1.wait_synced(deadline()).await.expect("synced");
    assert_eq!(on_n1.list().len(), 1);
    assert_eq!(on_n1.get(&Key::namespaced("x", "a")).expect("pod").as_str(), "10.0.0.1");
    let databases = objects.watch::<Pod>().labels("app in (db)").cache().expect("a cache");
    names_become(&databases, &["y/b"]).await;
    let in_x = Selection { namespace: Some("x".into()), ..Selection::default() };
    assert_eq!(objects.list::<Pod>(&in_x).await.expect("a list").len(), 1);
    let network = objects.get::<Network>(&Key::cluster("blue")).await.expect("answer").expect("a Network");
    assert_eq!(network.status.expect("a status").id, Some(7));
    assert!(objects.get::<Network>(&Key::cluster("red")).await.expect("answer").is_none());
    assert_eq!(objects.list::<AddressBlock>(&Selection::default()).await.expect("a list").len(), 1);
    let node = objects.get::<Node>(&Key::cluster("n1")).await.expect("answer").expect("a Node");
    assert_eq!(node.spec.expect("a spec").pod_cidrs.expect("ranges"), ["10.244.0.0/24"]);
    let wrong = objects.watch::<Pod>().labels("a in (").subscribe();
    assert!(matches!(wrong, Err(Error::Selector { .. })));
}

#[tokio::test]
async fn what_no_longer_matches_is_gone() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "a.yaml", &namespace("a", "tenant: blue"));
    let objects = open(&folder).await;
    let selected = objects.watch::<Namespace>().labels("tenant=blue").cache().expect("a cache");
    let mapped = objects
        .watch::<Namespace>()
        .map(|namespace| namespace.metadata.labels?.get("tenant").filter(|t| *t == "blue").cloned())
        .cache()
        .expect("a cache");
    names_become(&selected, &["a"]).await;
    names_become(&mapped, &["a"]).await;
    put(folder.path(), "a.yaml", &namespace("a", "tenant: red"));
    names_become(&selected, &[]).await;
    names_become(&mapped, &[]).await;
}

#[tokio::test]
async fn writes_go_beside_and_are_never_read_back() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "a.yaml", &namespace("a", ""));
    let objects = open(&folder).await;
    let cache = objects.watch::<Network>().cache().expect("a cache");
    cache.wait_synced(deadline()).await.expect("synced");
    let write = Write::status::<Network>(Key::cluster("blue"), &json!({"id": 7}), "test");
    objects.write(&write).await.expect("written");
    let file = folder.path().join("status/networks.knit.dev_blue.yaml");
    assert!(fs::read_to_string(&file).expect("a file").contains("id: 7"));
    assert_eq!(objects.output_folder(), Some(folder.path().join("status")));
    // A later change of the folder is a point after which the status would have been seen.
    let spaces = objects.watch::<Namespace>().cache().expect("a cache");
    put(folder.path(), "b.yaml", &namespace("b", ""));
    names_become(&spaces, &["a", "b"]).await;
    assert!(cache.is_empty());
}

#[tokio::test]
async fn waiting_ends_when_the_object_comes_or_at_the_deadline() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = open(&folder).await;
    let cache = objects.watch::<Service>().cache().expect("a cache");
    let key = Key::namespaced("default", "web");
    let error = cache.wait_for(&key, Instant::now()).await.expect_err("it is not there").to_string();
    assert!(error.starts_with("Service default/web did not arrive"), "{error}");
    let waiting = tokio::spawn({
        let (cache, key) = (cache.clone(), key.clone());
        async move { cache.wait_for(&key, deadline()).await.map(|service| Key::of(&*service)) }
    });
    put(
        folder.path(),
        "s.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}]}\n",
    );
    assert_eq!(waiting.await.expect("a task").expect("the Service"), key);
}

#[tokio::test]
async fn seeds_count_until_the_source_says_otherwise() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "a.yaml", &namespace("a", ""));
    let objects = open(&folder).await;
    let seed = [(Key::cluster("a"), "old".to_owned()), (Key::cluster("gone"), "old".to_owned())];
    let mut events = objects
        .watch::<Namespace>()
        .map(|_| Some("new".to_owned()))
        .seed(seed)
        .subscribe()
        .expect("a subscription");
    let mut seen = Vec::new();
    loop {
        match events.next().await.expect("an event") {
            Event::Synced => break,
            event => seen.push(event),
        }
    }
    let old = |name: &str| Event::Applied(Key::cluster(name), "old".to_owned());
    let new = Event::Applied(Key::cluster("a"), "new".to_owned());
    assert_eq!(seen, [old("a"), old("gone"), new, Event::Deleted(Key::cluster("gone"))]);
}

#[tokio::test]
async fn a_folder_that_is_not_there_is_a_clear_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = Objects::open(Source::folder(folder.path().join("none"))).await.expect_err("no folder");
    assert!(matches!(error, Error::Folder { .. }));
    assert!(error.to_string().contains("create it, or specify another one"), "{error}");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    assert!(matches!(Objects::open(Source::folder(file)).await, Err(Error::Folder { .. })));
}

#[tokio::test]
async fn a_folder_that_goes_and_comes_back_is_read_again() {
    let outer = tempfile::tempdir().expect("a folder");
    let folder = outer.path().join("objects");
    fs::create_dir(&folder).expect("a folder");
    put(&folder, "a.yaml", &namespace("a", ""));
    let objects = Objects::open(Source::folder(&folder)).await.expect("objects");
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    names_become(&cache, &["a"]).await;
    let mut connection = cache.connection();
    fs::rename(&folder, outer.path().join("away")).expect("a rename");
    connection.wait_for(|c| !c.is_connected()).await.expect("a state");
    names_become(&cache, &["a"]).await;
    let fresh = outer.path().join("fresh");
    fs::create_dir(&fresh).expect("a folder");
    put(&fresh, "b.yaml", &namespace("b", ""));
    fs::rename(&fresh, &folder).expect("a rename");
    connection.wait_for(knit_objects::Connection::is_connected).await.expect("a state");
    names_become(&cache, &["b"]).await;
}

/// A ConfigMap's volume: files are links through a link that is swapped.
#[tokio::test]
async fn a_mounted_config_map_is_followed() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().expect("a folder");
    let version = |name: &str, text: &str| {
        fs::create_dir(folder.path().join(name)).expect("a folder");
        put(&folder.path().join(name), "a.yaml", text);
        symlink(name, folder.path().join("..data_tmp")).expect("a link");
        fs::rename(folder.path().join("..data_tmp"), folder.path().join("..data")).expect("a rename");
    };
    version("..1", &namespace("a", ""));
    symlink("..data/a.yaml", folder.path().join("a.yaml")).expect("a link");
    let objects = open(&folder).await;
    let cache = objects.watch::<Namespace>().cache().expect("a cache");
    names_become(&cache, &["a"]).await;
    version("..2", &namespace("b", ""));
    names_become(&cache, &["b"]).await;
}
