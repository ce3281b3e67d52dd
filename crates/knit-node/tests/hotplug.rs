//! NetworkAttachments that users make, over a runtime in memory: nobody's hold up another's, and an object is
//! itself and not its name.

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use common::{Agent, NODE, Node, block, network};
use knit_api::NetworkAttachment;
use knit_node::front_door::network_attachment::{ObjectsDoor, PER_NAMESPACE, PER_POD};
use knit_node::testing::Faults;
use knit_objects::{Event, Key, Objects, Source};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

struct Bed {
    node: Node,
    agent: Agent,
    objects: Objects,
}

impl Bed {
    /// Two tenants with a pod each, `evil` in `aaa` and `good` in `zzz`; a Network without addresses here,
    /// and one that neither may use.
    async fn new() -> Self {
        let mut node = Node::new();
        let namespaces = Arc::make_mut(&mut node.world.namespaces);
        namespaces.insert("aaa".into(), Arc::default());
        namespaces.insert("zzz".into(), Arc::default());
        let networks = Arc::make_mut(&mut node.world.networks);
        let tiny = network("tiny", 6, "10.6.0.0/16", json!({"allowedNamespaces": {"from": "All"}}));
        networks.insert("tiny".into(), Arc::new(tiny));
        let folder = node.dir.path().join("objects");
        std::fs::create_dir(&folder).expect("a folder");
        let objects = Objects::open(Source::folder(folder)).await.expect("a folder");
        let agent = node.start().await;
        agent.add(node.request("evil", "aaa", "")).await.expect("attached");
        agent.add(node.request("good", "zzz", "")).await.expect("attached");
        Self { node, agent, objects }
    }

    fn follow(&self) -> JoinHandle<()> {
        tokio::spawn(ObjectsDoor::new(self.agent.core.clone(), self.objects.clone()).serve())
    }

    fn put(&self, objects: Vec<NetworkAttachment>) {
        let users = self.agent.core.world().users();
        for object in objects {
            users.take(Event::Applied(Key::of(&object), Arc::new(object)));
        }
    }

    fn delete(&self, namespace: &str, name: &str) {
        self.agent.core.world().users().take(Event::Deleted(Key::namespaced(namespace, name)));
    }

    fn delete_all(&self) {
        for object in self.agent.core.world().users().all() {
            self.agent.core.world().users().take(Event::Deleted(Key::of(&*object)));
        }
    }

    /// Which interfaces a sandbox has.
    fn interfaces(&self, sandbox: &str) -> Vec<String> {
        let of = |a: &knit_runtime::Attachment| a.pod.sandbox.as_str() == sandbox;
        let attachments = self.node.attachments();
        attachments.iter().filter(|a| of(a)).map(|a| a.interface.to_string()).collect()
    }

    /// What was written, by file.
    fn written(&self) -> BTreeMap<PathBuf, (String, SystemTime)> {
        let folder = self.node.dir.path().join("objects").join("status");
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let files = files.filter(|f| !f.file_name().to_string_lossy().starts_with('.'));
        let read = files.filter_map(|f| {
            let time = f.metadata().ok()?.modified().ok()?;
            Some((f.path(), (std::fs::read_to_string(f.path()).ok()?, time)))
        });
        read.collect()
    }

    /// What was written about an object.
    fn status(&self, namespace: &str, name: &str) -> String {
        let file = format!("networkattachments.knit.dev_{namespace}_{name}.yaml");
        let file = self.node.dir.path().join("objects").join("status").join(file);
        std::fs::read_to_string(file).unwrap_or_default()
    }

    /// Waits for a condition, so long at most on a clock that stands still while anything is being done.
    async fn within(&self, seconds: u64, what: &str, condition: impl Fn(&Self) -> bool) {
        let waited = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(seconds), waited).await;
        waited.unwrap_or_else(|_| panic!("{what} takes longer than {seconds} s"));
    }

    fn plugs(&self, result: &str) -> u64 {
        let text = self.agent.core.metrics().text();
        let start = format!("knit_node_requests_total{{operation=\"plug\",result=\"{result}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or_default()
    }
}

fn object(namespace: &str, name: &str, pod: &str, network: &str, extra: Value) -> NetworkAttachment {
    let mut object = json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-of-{name}")},
        "spec": {"pod": format!("pod-{pod}"), "network": network},
    });
    if let (Value::Object(object), Value::Object(extra)) = (&mut object, extra) {
        for (part, fields) in extra {
            let part = object.entry(part).or_insert_with(|| json!({}));
            part.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        }
    }
    serde_json::from_value(object).expect("a NetworkAttachment")
}

fn many(n: usize, network: &str) -> Vec<NetworkAttachment> {
    (0..n).map(|n| object("aaa", &format!("{network}-{n:04}"), "evil", network, json!({}))).collect()
}

#[tokio::test(start_paused = true)]
async fn a_thousand_objects_of_one_tenant_do_not_hold_up_another() {
    // Starved of addresses, and refused.
    for network in ["tiny", "green"] {
        let bed = Bed::new().await;
        bed.put(many(1000, network));
        let following = bed.follow();
        let tried = |bed: &Bed| bed.plugs("AddressesExhausted") + bed.plugs("NotAllowed") > 0;
        bed.within(60, "the first attempt", tried).await;
        bed.put(vec![object("zzz", "mine", "good", "blue", json!({}))]);
        bed.within(1, "plugging in", |bed| bed.interfaces("good") == ["eth0", "net1"]).await;
        bed.within(1, "its status", |bed| bed.status("zzz", "mine").contains("Attached")).await;

        // Out again, with the finalizer.
        let going = json!({"metadata": {
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["knit.dev/attached",
                "example.com/other"]
        }});
        bed.put(vec![object("zzz", "mine", "good", "blue", going)]);
        bed.within(1, "unplugging", |bed| bed.interfaces("good") == ["eth0"]).await;
        let let_go = |bed: &Bed| bed.status("zzz", "mine").contains("example.com/other");
        bed.within(1, "letting go", let_go).await;
        assert!(!bed.status("zzz", "mine").contains("knit.dev/attached"));
        following.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_plug_that_hangs_holds_up_nobody_else() {
    let bed = Bed::new().await;
    bed.node.kernel.fail(Faults { hang_on: Some("evil0".into()), ..Faults::default() });
    let hangs = json!({"spec": {"interface": "evil0"}});
    bed.put(vec![object("aaa", "hangs", "evil", "blue", hangs)]);
    let following = bed.follow();
    let planned = |bed: &Bed| !bed.node.kernel.is_clean() && bed.agent.core.list(None).len() == 2;
    bed.within(1, "its plan", planned).await;
    bed.put(vec![object("zzz", "mine", "good", "blue", json!({}))]);
    bed.within(1, "plugging in", |bed| bed.interfaces("good") == ["eth0", "net1"]).await;
    following.abort();
}

thread_local! {
    /// Lines of the log that warn, by the test's own thread.
    static WARNINGS: Cell<usize> = const { Cell::new(0) };
}

/// Counts them. It is the process's: a subscriber of one thread misses what another thread reached first.
struct Warnings;

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        WARNINGS.set(WARNINGS.get() + 1);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_is_said_once_and_tried_ever_more_seldom() {
    tracing::subscriber::set_global_default(Warnings).expect("nobody else counts");
    let bed = Bed::new().await;
    bed.put(many(PER_NAMESPACE + 44, "green"));
    let following = bed.follow();
    let all = PER_NAMESPACE + 44;
    bed.within(60, "all statuses", |bed| bed.written().len() == all).await;
    let said = |words: &str| bed.written().values().filter(|(text, _)| text.contains(words)).count();
    assert_eq!((said("reason: NotAllowed"), said("delete some of them")), (PER_NAMESPACE, 44));
    // As it stands, nothing is written again.
    let before = bed.written();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(bed.written(), before, "statuses are written when they change only");
    let attempts = bed.plugs("NotAllowed");
    let per_object = attempts / PER_NAMESPACE as u64;
    assert!((5..=12).contains(&per_object), "{attempts} attempts in ten minutes");
    let lines = WARNINGS.get();
    assert!((1..=PER_NAMESPACE + 44).contains(&lines), "{lines} lines in the log for {attempts} attempts");
    // One is allowed now, and those beyond the limit get the places of those that go.
    bed.agent.core.world().update_networks(|world| {
        let green = network("green", 3, "10.2.0.0/16", json!({"allowedNamespaces": {"from": "All"}}));
        Arc::make_mut(&mut world.networks).insert("green".into(), Arc::new(green));
    });
    bed.within(10, "the change", |bed| bed.interfaces("evil").len() == 2).await;
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn a_status_that_somebody_else_overwrote_was_never_told_again() {
    let bed = Bed::new().await;
    bed.put(vec![object("aaa", "x", "evil", "blue", json!({}))]);
    let following = bed.follow();
    bed.within(1, "its status", |bed| bed.status("aaa", "x").contains("Attached")).await;
    let file = bed.written().into_keys().next().expect("a file");
    let ready = |status: &str, reason: &str| {
        let time = "2026-01-01T00:00:00Z";
        let condition = json!({"type": "Ready", "status": status, "reason": reason, "message": "",
            "lastTransitionTime": time});
        json!({"status": {"conditions": [condition]}})
    };
    // Our own has not arrived yet, and something else of the object changes: nothing is to be said again.
    std::fs::remove_file(&file).expect("removed");
    let mut labelled = object("aaa", "x", "evil", "blue", json!({}));
    labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    bed.put(vec![labelled]);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(bed.status("aaa", "x"), "", "it was told already");
    // The node was taken for dead for a while: the controller forgot what it had said.
    bed.put(vec![object("aaa", "x", "evil", "blue", ready("False", "PodNotFound"))]);
    bed.within(5, "its status", |bed| bed.status("aaa", "x").contains("Attached")).await;
    assert_eq!(bed.interfaces("evil"), ["eth0", "net1"]);
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn a_pod_gets_no_more_interfaces_than_its_limit_by_objects() {
    let bed = Bed::new().await;
    let names: Vec<String> = (0..=PER_POD).map(|n| format!("n{n:02}")).collect();
    bed.agent.core.world().update_networks(|world| {
        for (n, name) in names.iter().enumerate() {
            let allowed = json!({"allowedNamespaces": {"from": "All"}});
            let object = network(name, 100 + n as u32, &format!("10.{}.0.0/16", 100 + n), allowed);
            Arc::make_mut(&mut world.networks).insert(object.name().clone(), Arc::new(object));
            let block = block(name, NODE, &format!("10.{}.0.0/28", 100 + n));
            Arc::make_mut(&mut world.blocks).insert(format!("{name}-1"), Arc::new(block));
        }
    });
    bed.put(names.iter().map(|name| object("aaa", name, "evil", name, json!({}))).collect());
    let following = bed.follow();
    let refused = |bed: &Bed| bed.written().values().any(|(text, _)| text.contains("delete one of them"));
    bed.within(60, "the refusal", |bed| refused(bed)).await;
    bed.within(60, "all others", |bed| bed.interfaces("evil").len() == 1 + PER_POD).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(bed.interfaces("evil").len(), 1 + PER_POD);
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn an_object_made_again_under_its_name_is_another_one() {
    let bed = Bed::new().await;
    let first = json!({"metadata": {"uid": "1"}, "spec": {"addresses": ["10.2.0.9"]}});
    bed.put(vec![object("aaa", "x", "evil", "blue", first.clone())]);
    let following = bed.follow();
    bed.within(1, "its status", |bed| bed.status("aaa", "x").contains("10.2.0.9")).await;
    following.abort();

    // Nobody looked while it was deleted and made again: for a Network that its namespace may not use.
    let second = json!({"metadata": {"uid": "2"}});
    bed.put(vec![object("aaa", "x", "evil", "green", second)]);
    let following = bed.follow();
    bed.within(5, "the refusal", |bed| bed.status("aaa", "x").contains("NotAllowed")).await;
    assert!(!bed.status("aaa", "x").contains("10.2.0.9"), "{}", bed.status("aaa", "x"));
    assert_eq!(bed.interfaces("evil"), ["eth0"], "what the first one asked for is unplugged");

    // And for the same one: unplugged, and plugged in for the new one.
    bed.put(vec![object("aaa", "x", "evil", "blue", first)]);
    bed.within(10, "its status", |bed| bed.status("aaa", "x").contains("10.2.0.9")).await;
    let attaches = bed.node.kernel.attaches();
    let third = json!({"metadata": {"uid": "3"}, "spec": {"addresses": ["10.2.0.10"]}});
    bed.put(vec![object("aaa", "x", "evil", "blue", third)]);
    bed.within(10, "its status", |bed| bed.status("aaa", "x").contains("10.2.0.10")).await;
    assert_eq!((bed.interfaces("evil").len(), bed.node.kernel.attaches()), (2, attaches + 1));

    // A folder's objects have no uid: what they ask for tells them apart.
    let nameless = |network: &str, address: Value| {
        let mut object = object("aaa", "x", "evil", network, json!({"spec": {"addresses": address}}));
        object.metadata.uid = None;
        object
    };
    bed.put(vec![nameless("blue", json!(["10.2.0.11"]))]);
    bed.within(10, "its status", |bed| bed.status("aaa", "x").contains("10.2.0.11")).await;
    bed.put(vec![nameless("green", json!([]))]);
    bed.within(10, "the refusal", |bed| bed.status("aaa", "x").contains("NotAllowed")).await;
    assert_eq!(bed.interfaces("evil"), ["eth0"], "what the one before asked for is unplugged");
    following.abort();
}

/// The record of its pod was there, and lacked the interface: its address was given out again, and the
/// interface removed.
#[tokio::test(start_paused = true)]
async fn an_interface_of_an_object_was_lost_with_a_part_of_the_ledger() {
    let mut bed = Bed::new().await;
    let ledger = bed.node.config().ledger();
    let earlier = std::fs::read(&ledger).expect("the ledger");
    let asked = json!({"spec": {"addresses": ["10.2.0.9"]}});
    bed.put(vec![object("aaa", "x", "evil", "blue", asked)]);
    let following = bed.follow();
    bed.within(1, "its status", |bed| bed.status("aaa", "x").contains("10.2.0.9")).await;
    following.abort();
    assert!(following.await.is_err_and(|end| end.is_cancelled()));
    let interfaces = bed.interfaces("evil");
    assert_eq!(interfaces.len(), 2);
    let Bed { node, agent, objects } = bed;
    drop(agent);
    std::fs::write(&ledger, [earlier, vec![0x5a; 64]].concat()).expect("damaged");
    let agent = node.start().await;
    assert_eq!((agent.outcome.adopted, agent.outcome.strays), (1, 0), "{:?}", agent.outcome);
    bed = Bed { node, agent, objects };

    let status = json!({"node": NODE, "sandboxId": "evil", "interface": interfaces[1]});
    let known = json!({"spec": {"addresses": ["10.2.0.9"]}, "status": status});
    let other = json!({"spec": {"addresses": ["10.2.0.9"]}});
    bed.put(vec![object("aaa", "x", "evil", "blue", known), object("zzz", "y", "good", "blue", other)]);
    let following = bed.follow();
    bed.within(10, "the refusal", |bed| bed.status("zzz", "y").contains("RequestRefused")).await;
    bed.within(10, "its status", |bed| bed.status("aaa", "x").contains("Ready")).await;
    assert!(!bed.status("aaa", "x").contains("RequestRefused"), "{}", bed.status("aaa", "x"));
    for _ in 0..2 {
        bed.agent.core.reconcile(&Default::default()).await;
        assert_eq!(bed.interfaces("evil"), interfaces);
        assert_eq!(bed.interfaces("good"), ["eth0"]);
    }
    bed.delete("aaa", "x");
    bed.within(10, "unplugging", |bed| bed.interfaces("evil") == ["eth0"]).await;
    following.abort();
}

/// The kernel knows sandboxes only, and without a container runtime's socket nobody said which pod it was:
/// the object asked for its interface again, and again.
#[tokio::test(start_paused = true)]
async fn an_interface_of_an_object_finds_it_after_the_whole_ledger_was_lost() {
    let mut bed = Bed::new().await;
    bed.put(vec![object("aaa", "x", "evil", "blue", json!({}))]);
    let following = bed.follow();
    bed.within(1, "plugging in", |bed| bed.interfaces("evil") == ["eth0", "net1"]).await;
    following.abort();
    assert!(following.await.is_err_and(|end| end.is_cancelled()));
    let Bed { mut node, agent, objects } = bed;
    drop(agent);
    std::fs::remove_file(node.config().ledger()).expect("removed");
    node.kernel.forget_pods();
    let status = json!({"node": NODE, "sandboxId": "evil", "interface": "net1"});
    let known = object("aaa", "x", "evil", "blue", json!({"status": status}));
    // What somebody wrote of another node's sandbox says nothing.
    let elsewhere = json!({"status": {"node": "node-2", "sandboxId": "good", "interface": "net1"}});
    let other = object("aaa", "y", "evil", "blue", elsewhere);
    node.users = vec![known.clone(), other];
    let agent = node.start().await;
    assert_eq!(agent.outcome.adopted, 3, "{:?}", agent.outcome);
    let name = |sandbox: &str| agent.core.sandboxes().pod(&common::id(sandbox)).expect("adopted").name;
    assert_eq!((name("evil"), name("good")), (Some("pod-evil".to_owned()), None));
    node.users.clear();
    bed = Bed { node, agent, objects };
    bed.delete("aaa", "y");
    let attaches = bed.node.kernel.attaches();
    let written = bed.written();
    written.keys().for_each(|file| std::fs::remove_file(file).expect("removed"));
    let following = bed.follow();
    bed.within(10, "its status", |bed| bed.status("aaa", "x").contains("Ready")).await;
    assert_eq!((bed.interfaces("evil").len(), bed.node.kernel.attaches()), (2, attaches));
    bed.delete_all();
    bed.within(10, "unplugging", |bed| bed.interfaces("evil") == ["eth0"]).await;
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_version_plugged_in_stays() {
    let bed = Bed::new().await;
    let mut old = object("aaa", "x", "evil", "blue", json!({}));
    // It recorded no uid.
    let uid = old.metadata.uid.take();
    bed.put(vec![old.clone()]);
    let following = bed.follow();
    bed.within(1, "plugging in", |bed| bed.interfaces("evil") == ["eth0", "net1"]).await;
    following.abort();
    let attaches = bed.node.kernel.attaches();
    old.metadata.uid = uid;
    bed.put(vec![old]);
    let following = bed.follow();
    bed.within(5, "its status", |bed| bed.status("aaa", "x").contains("Attached")).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((bed.interfaces("evil").len(), bed.node.kernel.attaches()), (2, attaches));
    // It goes with its object, and so does what was written about it.
    bed.delete_all();
    bed.within(5, "unplugging", |bed| bed.interfaces("evil") == ["eth0"]).await;
    bed.within(5, "the end of its file", |bed| bed.status("aaa", "x").is_empty()).await;
    following.abort();
}

/// What one tenant does with its objects was work for the objects of all others: each change of anything had
/// all of them looked at.
#[tokio::test(start_paused = true)]
async fn what_one_tenant_does_is_no_work_for_the_objects_of_another() {
    let bed = Bed::new().await;
    bed.put(many(200, "green"));
    bed.put((0..100).map(|n| object("zzz", &format!("z{n:03}"), "good", "green", json!({}))).collect());
    let door = ObjectsDoor::new(bed.agent.core.clone(), bed.objects.clone());
    let looks = door.looks();
    let following = tokio::spawn(door.serve());
    bed.within(60, "all statuses", |bed| bed.written().len() == 300).await;
    // Until the next time that what is refused is tried again.
    tokio::time::sleep(Duration::from_secs(610)).await;
    let before = looks.counts();
    for patch in 0..1000 {
        let annotated = json!({"metadata": {"annotations": {"patch": patch.to_string()}}});
        bed.put(vec![object("aaa", "green-0000", "evil", "green", annotated)]);
        if patch % 100 == 0 {
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }
    let patched = looks.counts();
    assert!(patched.0 - before.0 <= 3, "patches are not looked at: {before:?} {patched:?}");
    // It deletes one of its own.
    bed.delete("aaa", "green-0199");
    tokio::time::sleep(Duration::from_millis(250)).await;
    let deleted = looks.counts();
    let (times, objects) = (deleted.0 - patched.0, deleted.1 - patched.1);
    assert!(times <= 3 && objects <= 199 * times, "only its own are looked at: {times} {objects}");
    // A pod of a third namespace comes, which has no objects.
    bed.agent.add(bed.node.request("other", "shop", "")).await.expect("attached");
    tokio::time::sleep(Duration::from_millis(250)).await;
    let other = looks.counts();
    assert!(other.1 - deleted.1 <= 200, "{deleted:?} {other:?}");
    following.abort();
}

/// An agent of an earlier version plugged objects in that did not name its node yet; to its successor, which
/// follows those that do, they seem to be gone.
#[tokio::test(start_paused = true)]
async fn what_is_not_seen_any_more_is_unplugged_only_if_it_is_gone() {
    let bed = Bed::new().await;
    let mut own = object("aaa", "x", "evil", "blue", json!({}));
    bed.put(vec![own.clone()]);
    let following = bed.follow();
    bed.within(1, "plugging in", |bed| bed.interfaces("evil") == ["eth0", "net1"]).await;
    let file = bed.node.dir.path().join("objects").join("x.json");
    let write = |object: &NetworkAttachment| {
        std::fs::write(&file, serde_json::to_vec(object).expect("JSON")).expect("written");
    };
    write(&own);
    bed.delete("aaa", "x");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(bed.interfaces("evil"), ["eth0", "net1"], "it is there, and names no other node");
    own.status.get_or_insert_default().node = Some("node-2".into());
    write(&own);
    bed.within(60, "unplugging", |bed| bed.interfaces("evil") == ["eth0"]).await;
    following.abort();
}
