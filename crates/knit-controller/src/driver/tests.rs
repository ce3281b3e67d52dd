//! What starts a pass, and what a pass may not hold up.

use k8s_openapi::api::core::v1::{Namespace, Node};
use knit_api::NetworkAttachment;
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_objects::{Source, Write};
use serde_json::{Value, json};

use super::writes::{Attempt, Done};
use super::*;
use crate::cluster::WriteFailure;
use crate::plan::{Action, Lane};

/// An API server with the namespace of the controller.
async fn api() -> (Handle, Objects) {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let api = ApiConfig { store, ..ApiConfig::default() };
    let server = Server::start(api).await.expect("an API server");
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    create::<Namespace>(&objects, json!({"metadata": {"name": "knit-system"}})).await;
    (server, objects)
}

async fn create<K>(objects: &Objects, object: Value)
where
    K: kube::Resource<DynamicType = ()> + serde::Serialize + serde::de::DeserializeOwned,
{
    let object: K = serde_json::from_value(object).expect("an object");
    objects.write(&Write::create(&object)).await.expect("created");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenants_patches_of_one_attachment_and_heartbeats_of_nodes_were_a_plan_each() {
    let (_server, objects) = api().await;
    let caches = Caches::start(&objects, &Config::new("one"));
    let attachment = |name: &str| {
        json!({"apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
            "metadata": {"name": name, "namespace": "knit-system"},
            "spec": {"pod": "web", "network": "blue"}})
    };
    let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    let (place, here) = (Key::namespaced("knit-system", "patched"), Key::cluster("patched"));
    create::<NetworkAttachment>(&objects, attachment("patched")).await;
    create::<Node>(&objects, node("patched")).await;
    let soon = || Instant::now() + Duration::from_secs(60);
    caches.wait_synced().await;
    caches.attachments.wait_for(&place, soon()).await.expect("an attachment");
    caches.nodes.wait_for(&here, soon()).await.expect("a Node");
    let before = (caches.attachments.changes().borrow().changes, caches.nodes.changes().borrow().changes);
    for n in 0..50 {
        let patch = json!({"metadata": {"annotations": {"patch": n.to_string()}}});
        let write = Write::merge::<NetworkAttachment>(place.clone(), patch);
        objects.write(&write).await.expect("patched");
        let condition = json!({"type": "Ready", "status": "True", "reason": n.to_string()});
        let patch = json!({"status": {"conditions": [condition]}});
        objects.write(&Write::merge_status::<Node>(here.clone(), patch)).await.expect("patched");
    }
    // What comes behind them has arrived, so they have.
    create::<NetworkAttachment>(&objects, attachment("next")).await;
    create::<Node>(&objects, node("next")).await;
    let next = Key::namespaced("knit-system", "next");
    caches.attachments.wait_for(&next, soon()).await.expect("an attachment");
    caches.nodes.wait_for(&Key::cluster("next"), soon()).await.expect("a Node");
    let after = (caches.attachments.changes().borrow().changes, caches.nodes.changes().borrow().changes);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "the new ones, and none of the patches");
    // Writes refer to the newest version.
    let newest = objects.get::<NetworkAttachment>(&place).await.expect("an answer").expect("an object");
    let kept = caches.attachments.get(&place).expect("an attachment");
    assert_eq!(Some(kept.resource_version.as_str()), newest.metadata.resource_version.as_deref());
    let newest = objects.get::<Node>(&here).await.expect("an answer").expect("a Node");
    let kept = caches.nodes.get(&here).expect("a Node");
    assert_eq!(Some(kept.resource_version.as_str()), newest.metadata.resource_version.as_deref());
}

/// Takes longer than the Lease holds.
fn slow(known: &mut Indexed, memory: &mut Memory, config: &Config, now: Now) -> Plan {
    let (_never, nothing) = std::sync::mpsc::channel::<()>();
    // Waits: somebody holds the other end.
    let _ = nothing.recv_timeout(config.lease_duration * 5 / 3);
    known.plan(memory, config, now)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_plan_never_loses_the_lease() {
    let (server, objects) = api().await;
    let config = |identity: &str| Config {
        lease_duration: Duration::from_secs(3),
        renew_every: Duration::from_millis(200),
        ..Config::new(identity)
    };
    // On one thread, as the program runs it.
    let (url, slow_config) = (server.url(), config("slow"));
    let (tell, told) = tokio::sync::oneshot::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let objects = Objects::open(Source::Url(url)).await.expect("objects");
            let mut controller = Controller::new(objects, slow_config).expect("a controller");
            controller.planner = slow;
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            tell.send((controller.state(), stop)).expect("somebody listens");
            controller.run(async move { drop(stopped.await) }).await;
        });
    });
    let (mut state, stop) = told.await.expect("a controller");
    state.wait_for(|state| state.leading).await.expect("a leader");
    // Another one stands by, and takes the Lease as soon as it is not renewed.
    let other = Controller::new(objects, config("other")).expect("a controller");
    let mut others = other.state();
    let standing_by = tokio::spawn(other.run(std::future::pending()));
    tokio::select! {
        state = state.wait_for(|state| state.passes >= 2) => assert!(state.expect("a state").leading),
        _ = others.wait_for(|other| other.leading) => panic!("it lost the Lease while it thought"),
    }
    standing_by.abort();
    stop.send(()).expect("a controller that runs");
    tokio::task::spawn_blocking(move || thread.join()).await.expect("joined").expect("no panic");
}

/// An API server that gives this answer to whatever is created.
async fn answers(status: &'static str, code: u16, reason: &'static str) -> Objects {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let api = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", api.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut client, _)) = api.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = client.read_u8().await else { return };
                    head.push(byte);
                }
                let head = String::from_utf8_lossy(&head).to_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
                let length: usize = length.map_or(0, |text| text.trim().parse().expect("a length"));
                if !head.starts_with("post ") || client.read_exact(&mut vec![0; length]).await.is_err() {
                    return;
                }
                let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                    "reason": reason, "message": "no"});
                let body = body.to_string();
                let answer = format!(
                    "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
                     Connection: close\r\n\r\n{body}",
                    body.len()
                );
                let _ = client.write_all(answer.as_bytes()).await;
            });
        }
    });
    Objects::open(Source::Url(url)).await.expect("objects")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_was_forgotten_although_the_api_server_may_have_made_it() {
    for (status, code, reason, kept) in [
        ("504 Gateway Timeout", 504, "Timeout", true),
        ("403 Forbidden", 403, "Forbidden", false),
        ("409 Conflict", 409, "AlreadyExists", false),
    ] {
        let controller =
            Controller::new(answers(status, code, reason).await, Config::new("one")).expect("a controller");
        let written = json!({"metadata": {"name": "blue-10-77-0-0"},
            "spec": {"network": "blue", "node": "n1", "ipv4": "10.77.0.0/29"}});
        let block: AddressBlock = serde_json::from_value(written).expect("a block");
        let view = Arc::new(BlockView::of(block.clone()));
        let known = Remembered { block: view, until: Duration::from_secs(60), again: None };
        let mut memory = Memory { blocks: [("blue-10-77-0-0".into(), known)].into(), ..Memory::default() };
        let plan = Plan { actions: vec![Action::GiveBlock(block.clone())], ..Plan::default() };
        let until = Instant::now() + Duration::from_secs(60);
        let term = leader::Term { until, end: until };
        let (_tell, leading) = watch::channel(Leading(Some(term)));
        let mut writers = Writers::default();
        controller.begin(plan, &mut memory, &leading, &mut writers);
        let done = writers.next().await;
        controller.finish(done, &mut memory);
        let known = memory.blocks.get("blue-10-77-0-0");
        assert_eq!(known.is_some(), kept, "{reason}");
        assert_eq!(known.and_then(|known| known.again.clone()), kept.then_some(block), "{reason}");
    }
}

/// An API server that refuses to write one object, and takes all other writes; which ones there were.
async fn refuses(name: &'static str) -> (Objects, Arc<Mutex<Vec<String>>>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let api = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", api.local_addr().expect("an address"));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = api.accept().await {
            let told = Arc::clone(&told);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = client.read_u8().await else { return };
                    head.push(byte);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let lower = head.to_lowercase();
                let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
                let mut body = vec![0; length.map_or(0, |text| text.trim().parse().expect("a length"))];
                if client.read_exact(&mut body).await.is_err() {
                    return;
                }
                let object: Value = serde_json::from_slice(&body).unwrap_or_default();
                let mut words = head.split([' ', '?']);
                let method = words.next().unwrap_or_default();
                let target = words.next().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
                if method == "GET" {
                    return;
                }
                let generation = &object["spec"]["pool"]["generation"];
                told.lock().expect("nobody panicked").push(format!("{method} {target} {generation}"));
                let (status, body) = if target == name {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 422,
                        "reason": "Invalid", "message": "no"});
                    ("422 Unprocessable Entity", body.to_string())
                } else if method == "DELETE" {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
                    ("200 OK", body.to_string())
                } else {
                    ("200 OK", String::from_utf8_lossy(&body).into_owned())
                };
                let answer = format!(
                    "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
                     Connection: close\r\n\r\n{body}",
                    body.len()
                );
                let _ = client.write_all(answer.as_bytes()).await;
            });
        }
    });
    (Objects::open(Source::Url(url)).await.expect("objects"), seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slice_that_cannot_be_written_left_its_pool_in_two_generations_and_kept_classes_back() {
    use crate::plan::devices::{Shown, writes};
    use k8s_openapi::api::resource::v1::{Device, DeviceClassSpec, ResourceSlice};

    let (objects, seen) = refuses("knit-networks-00001").await;
    let controller = Controller::new(objects, Config::new("one")).expect("a controller");
    let device = |n: usize| Device { name: format!("net-{n}"), ..Device::default() };
    let shown = Shown {
        devices: (0..130).map(device).collect(),
        classes: [("knit".to_owned(), DeviceClassSpec::default())].into(),
    };
    let before: ResourceSlice = serde_json::from_value(json!({"metadata": {"name": "knit-networks-00000",
        "uid": "u"}, "spec": {"driver": "knit.dev", "pool": {"name": "knit-networks", "generation": 4,
        "resourceSliceCount": 1}, "allNodes": true, "devices": []}}))
    .expect("a slice");
    let surplus = ResourceSlice {
        metadata: serde_json::from_value(json!({"name": "knit-networks-00009", "uid": "s"})).expect("one"),
        ..before.clone()
    };
    let until = Instant::now() + Duration::from_secs(60);
    let (_tell, leading) = watch::channel(Leading(Some(leader::Term { until, end: until })));
    let planned = writes(&shown, &[before, surplus], &[]);
    assert_eq!((planned.slices.len(), planned.surplus.len(), planned.classes.len()), (2, 1, 1));
    controller.write_devices(&planned, &leading).await.expect_err("one is refused");
    let seen = seen.lock().expect("nobody panicked").clone();
    assert_eq!(
        seen,
        [
            "PATCH knit-networks-00000 5",
            "PATCH knit-networks-00001 5",
            // It was not there before; what was is as it was, and the pool keeps all of its slices.
            "DELETE knit-networks-00001 null",
            "PATCH knit-networks-00000 4",
            "PATCH knit null",
        ]
    );
}

/// What is under way is in nobody's way: a webhook that one user has on one kind answers after half a minute.
#[tokio::test]
async fn a_slow_webhook_on_attachments_held_up_blocks_and_taints() {
    let mut writers = Writers::default();
    for _ in 0..100 {
        writers.begin(Attempt { lane: Lane::Users, work: std::future::pending().boxed() });
    }
    let action = Action::ReleaseBlock {
        name: "b".into(),
        uid: "u".into(),
        resource_version: None,
        why: "the node is gone".into(),
    };
    assert_eq!(action.lane(), Lane::Nodes);
    let done = Done { action: action.clone(), result: Some(Ok(())), numbers: None };
    writers.begin(Attempt { lane: action.lane(), work: std::future::ready(done).boxed() });
    assert_eq!(writers.next().await.action, action);
    assert_eq!(writers.next().now_or_never().map(|done| done.action), None);
}

#[test]
fn one_slow_plan_at_the_start_was_shown_as_slow_forever() {
    let mut plans = PlanTimes::default();
    plans.note(Duration::from_secs(9));
    let slow = |plans: &PlanTimes| plans.counts[6..].iter().sum::<u64>();
    let before = plans;
    for millis in [1, 50, 50, 3] {
        plans.note(Duration::from_millis(millis));
    }
    assert_eq!((slow(&before), slow(&plans)), (1, 1), "none of those since took more than 50 ms");
    assert_eq!(plans.counts.iter().sum::<u64>(), 5);
    assert_eq!((plans.counts[0], plans.counts[2], plans.counts[5]), (1, 1, 2));
    assert_eq!(plans.sum, Duration::from_millis(9104));
}

#[tokio::test]
async fn a_block_whose_name_was_taken_was_asked_for_forever() {
    let objects = answers("409 Conflict", 409, "AlreadyExists").await;
    let controller = Controller::new(objects, Config::new("one")).expect("a controller");
    let written = json!({"metadata": {"name": "blue-10-77-0-0"},
        "spec": {"network": "blue", "node": "n1", "ipv4": "10.77.0.0/29"}});
    let block: AddressBlock = serde_json::from_value(written).expect("a block");
    let until = Instant::now() + Duration::from_secs(60);
    let (_tell, leading) = watch::channel(Leading(Some(leader::Term { until, end: until })));
    let (mut memory, mut writers) = (Memory::default(), Writers::default());
    let mut taken = Vec::new();
    for _ in 0..3 {
        let plan = Plan { actions: vec![Action::GiveBlock(block.clone())], ..Plan::default() };
        controller.begin(plan, &mut memory, &leading, &mut writers);
        let done = writers.next().await;
        controller.finish(done, &mut memory);
        taken.push(memory.taken.len());
    }
    assert_eq!(taken, [0, 0, 1], "the cache may be behind, but not for long");
    assert_eq!(
        memory.taken[0].0.to_string(),
        BlockView::of(block).block.expect("a range").block().to_string()
    );
}

#[tokio::test]
async fn a_block_that_was_made_after_two_errors_was_said_to_be_somebody_elses() {
    let written = json!({"metadata": {"name": "blue-10-77-0-0"},
        "spec": {"network": "blue", "node": "n1", "ipv4": "10.77.0.0/29"}});
    let block: AddressBlock = serde_json::from_value(written).expect("a block");
    let action = Action::GiveBlock(block);
    let until = Instant::now() + Duration::from_secs(60);
    let (_tell, leading) = watch::channel(Leading(Some(leader::Term { until, end: until })));
    let (mut memory, mut writers) = (Memory::default(), Writers::default());
    // The second attempt went through although it ended in an error, and the cache does not show that yet.
    let error = ("500 Internal Server Error", 500, "InternalError");
    for (status, code, reason) in [error, error, ("409 Conflict", 409, "AlreadyExists")] {
        let objects = answers(status, code, reason).await;
        let controller = Controller::new(objects, Config::new("one")).expect("a controller");
        let plan = Plan { actions: vec![action.clone()], ..Plan::default() };
        controller.begin(plan, &mut memory, &leading, &mut writers);
        let done = writers.next().await;
        controller.finish(done, &mut memory);
    }
    assert_eq!(memory.taken, []);
    // The wait has doubled with each of them, whatever it was.
    let now = Now { wall: Timestamp::now(), steady: Duration::from_secs(1000) };
    memory.writes.failed(&action.subject(), WriteFailure::NameTaken, None, (now.steady, 1.0));
    let until = memory.writes.waits(&action.subject(), now);
    assert_eq!(until, Some(Some(now.steady + Duration::from_millis(800))));
}
