//! One tenant does its worst with NetworkAttachments: what that is to other nodes, and to other tenants of
//! its node, is counted.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use knit_api::NetworkAttachment;
use knit_objects::{Cache, Key, Objects, Write};
use knit_scale::cluster::{Api, Cluster};
use knit_scale::controller;
use knit_scale::meter::{Count, Counts, Group};
use knit_scale::node::{self, WholeNode};
use knit_scale::scenario::Scenario;
use knit_testbed::wait::holds;
use serde_json::json;
use tokio::time::Instant;

/// How many objects it makes for its pod, and as many for pods that there are not.
const OBJECTS: usize = 400;
/// How many an agent hears of.
const TOLD: usize = 256;
const PATCHES: usize = 1000;
const KIND: &str = "networkattachments";

fn of(counts: &Counts, group: Group, kind: &str) -> Count {
    counts.get(&group).and_then(|kinds| kinds.get(kind)).copied().unwrap_or_default()
}

fn object(namespace: &str, name: &str, pod: &str) -> NetworkAttachment {
    serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"pod": pod, "network": node::network_name(0)},
    }))
    .expect("a NetworkAttachment")
}

async fn create<K: knit_objects::Object + serde::Serialize>(objects: &Objects, object: &K) {
    objects.write(&Write::create(object)).await.expect("created");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_tenants_objects_are_no_event_for_other_nodes_and_do_not_delay_other_tenants() {
    let scenario = Scenario { networks: 1, services: 0, policies: 0, ..Scenario::default() };
    let cluster = Cluster::open(&Api::Embedded).await.expect("an API");
    cluster.make_objects(&scenario, 2).await.expect("its objects");
    let directory = tempfile::tempdir().expect("a directory");
    let url = cluster.meter.open(Group::Controller).await.expect("a port");
    let controller = controller::Running::start(None, &url).await.expect("a controller");
    for number in 0..2 {
        cluster.join(number, true, 0).await.expect("a node");
    }
    // The tenant's node, and another one.
    let url = cluster.meter.open(Group::Agents).await.expect("a port");
    let here = WholeNode::start(0, &url, directory.path()).await.expect("an agent");
    let url = cluster.meter.open(Group::Probe).await.expect("a port");
    let other = WholeNode::start(1, &url, directory.path()).await.expect("an agent");
    let synced = |node: &WholeNode| node.world().is_synced();
    holds("all lists", || synced(&here) && synced(&other)).await;
    let accepted = |node: &WholeNode| {
        let world = node.world();
        world.networks.len() == 2
            && world.networks.values().all(|n| n.id().is_some() && n.refusal().is_none())
    };
    holds("all Networks", || accepted(&here) && accepted(&other)).await;
    let blocks = |node: &WholeNode| node.world().blocks.values().filter(|b| b.network() == "default").count();
    holds("all blocks", || blocks(&here) == 2 && blocks(&other) == 2).await;

    // Each tenant has a pod on the first node.
    let objects = &cluster.others;
    let namespaces = [node::NAMESPACE, "good"];
    create::<Namespace>(
        objects,
        &serde_json::from_value(json!({"metadata": {"name": "good"}})).expect("one"),
    )
    .await;
    for (number, namespace) in namespaces.iter().enumerate() {
        let number = u32::try_from(number).expect("a number");
        let mut pod: Pod = node::pod(number, 0, None);
        pod.metadata.namespace = Some((*namespace).into());
        create(objects, &pod).await;
        here.add_in(namespace, number, None).await.expect("attached");
    }
    let attachments: Cache<NetworkAttachment> = objects.watch().cache().expect("a cache");
    // However slow the machine is: each wait has a time of its own.
    let deadline = || Instant::now() + Duration::from_secs(120);
    attachments.wait_synced(deadline()).await.expect("a list");
    let before = cluster.meter.counts();

    let evil = node::NAMESPACE;
    for n in 0..OBJECTS {
        create(objects, &object(evil, &format!("own-{n:04}"), "pod-0")).await;
        create(objects, &object(evil, &format!("nobodys-{n:04}"), &format!("none-{n}"))).await;
    }
    for n in 0..PATCHES {
        let patch = json!({"metadata": {"annotations": {"patch": n.to_string()}}});
        let key = Key::namespaced(evil, format!("own-{:04}", n % 10));
        objects.write(&Write::merge::<NetworkAttachment>(key, patch)).await.expect("patched");
    }
    let named = |cache: &Cache<NetworkAttachment>| {
        let all = cache.list();
        all.iter().filter(|(_, object)| object.status.as_ref().is_some_and(|s| s.node.is_some())).count()
    };
    let told = |cache: &Cache<NetworkAttachment>| (named(cache) >= TOLD).then_some(());
    attachments.wait_until("all that its node is told of", deadline(), told).await.expect("told");

    // Another tenant of the same node comes, and is served.
    let asked_at = Instant::now();
    create(objects, &object("good", "mine", "pod-1")).await;
    let key = Key::namespaced("good", "mine");
    let ready = |cache: &Cache<NetworkAttachment>| {
        let object = cache.get(&key)?;
        let conditions = object.status.as_ref()?.conditions.iter();
        conditions.clone().any(|c| c.type_ == "Ready" && c.status == "True").then_some(())
    };
    let served = attachments.wait_until("the other tenant's", deadline(), ready).await;
    served.unwrap_or_else(|error| panic!("{error}: {:?}", attachments.get(&key)));
    println!("served after {} ms", asked_at.elapsed().as_millis());

    let after = cluster.meter.counts();
    let since = |group, kind| of(&after, group, kind).since(of(&before, group, kind));
    // No object is an event for the other node's agent, nor a request or a write: there are only bookmarks,
    // every half minute for each of its watches, which it may open again on a slow machine.
    for kind in [KIND, "blockslices"] {
        let other = Count { bytes: 0, watches: 0, ..since(Group::Probe, kind) };
        assert!(other.events < OBJECTS as u64 / 10, "{kind}: {other:?}");
        assert_eq!(Count { events: 0, ..other }, Count::default(), "{kind}");
    }
    let own = since(Group::Agents, KIND);
    println!("events to the tenant's node: {}; its writes: {}", own.events, own.writes);
    // What it hears of each of them: its name, its finalizer and two statuses. And the patches of ten of
    // them.
    let most = u64::try_from(5 * (TOLD + 1) + PATCHES).expect("a number");
    assert!(own.events <= most, "{} events", own.events);
    let controllers = since(Group::Controller, KIND);
    // Each object's node, or that it is too many, or that there is no such pod; some of them twice, where the
    // object was another one by then.
    let most = u64::try_from(2 * OBJECTS + OBJECTS / 2).expect("a number");
    assert!(controllers.writes <= most, "{} writes", controllers.writes);
    assert_eq!(named(&attachments), TOLD + 1);
    drop((here, other, controller));
}
