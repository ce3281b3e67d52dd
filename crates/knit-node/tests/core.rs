//! One pod's way through the core, and every fault on it, over a runtime in memory.

mod common;

use std::time::Duration;

use common::{Node, addresses, block, id, in_namespace, main_of, netns_of, network};
use knit_node::reconcile::Pass;
use knit_node::testing::Faults;
use knit_node::{Door, Reason};
use knit_runtime::InterfaceName;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[tokio::test]
async fn a_pod_gets_all_its_networks_main_one_first() {
    let node = Node::new();
    let agent = node.start().await;
    agent.core.status().expect("ready");
    let attached = agent.add(node.request("a", "shop", "blue@data0,other")).await.expect("attached");
    let found = addresses(&attached);
    assert_eq!(found.iter().map(|(i, _)| i.as_str()).collect::<Vec<_>>(), ["eth0", "data0", "net1"]);
    assert!(found[0].1.starts_with("10.1.0.") && found[0].1.ends_with("/32"), "{found:?}");
    assert_eq!(node.attachments().len(), 3);
    assert_eq!(agent.core.list(Some(&id("a"))).len(), 3);

    // The namespace of another team has another primary, switched, with the subnet's prefix.
    let attached = agent.add(node.request("b", "forest", "")).await.expect("attached");
    assert_eq!(attached.attachments[0].network, "green");
    assert!(addresses(&attached)[0].1.ends_with("/16"), "{attached:?}");

    agent.del("a").await.expect("detached");
    agent.del("b").await.expect("detached");
    assert!(node.is_clean());
    assert!(agent.core.list(None).is_empty());
}

#[tokio::test]
async fn the_same_add_again_gives_the_same_answer() {
    let node = Node::new();
    let agent = node.start().await;
    let first = agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    let (x, y) = tokio::join!(
        agent.add(node.request("a", "shop", "blue")),
        agent.add(node.request("a", "shop", "blue"))
    );
    assert_eq!(x.expect("again"), first);
    assert_eq!(y.expect("again"), first);
    assert_eq!(node.kernel.attaches(), 2, "nothing was made twice");

    // Two at once for a new sandbox: one makes, both answer.
    let (x, y) =
        tokio::join!(agent.add(node.request("n", "shop", "")), agent.add(node.request("n", "shop", "")));
    assert_eq!(x.expect("one"), y.expect("the other"));
    assert_eq!(node.attachments().len(), 3);
}

#[tokio::test]
async fn all_or_nothing_whichever_attach_fails() {
    let node = Node::new();
    let agent = node.start().await;
    for (kernel, k) in [(&node.kernel, 0), (&node.kernel, 1), (&node.other, 0)] {
        kernel.fail(Faults { attach: Some((k, knit_runtime::Reason::Internal)), ..Faults::default() });
        let error = agent.add(node.request("a", "shop", "blue,other")).await.expect_err("told to fail");
        assert_eq!(error.reason, Reason::AttachFailed);
        assert!(error.chain().contains("Network"), "{}", error.chain());
        assert!(node.is_clean(), "attach {k} failed and something is left");
        assert!(agent.core.list(None).is_empty());
        kernel.fail(Faults::default());
    }
    agent.add(node.request("a", "shop", "blue,other")).await.expect("attached at last");
}

#[tokio::test]
async fn a_runtime_that_answers_half_has_failed() {
    let node = Node::new();
    let agent = node.start().await;
    node.kernel.fail(Faults { forget_addresses: true, ..Faults::default() });
    let error = agent.add(node.request("a", "shop", "")).await.expect_err("no address in the answer");
    assert_eq!(error.reason, Reason::AttachFailed);
    assert!(node.is_clean());
}

#[tokio::test]
async fn an_interface_in_another_namespace_than_the_pods_does_not_stay() {
    let node = Node::new();
    let agent = node.start().await;
    // Between the look at the namespace and the runtime's own, its path became another's.
    node.kernel.fail(Faults { other_namespace: true, ..Faults::default() });
    let error = agent.add(node.request("a", "shop", "blue")).await.expect_err("not the pod's namespace");
    assert_eq!(error.reason, Reason::AttachFailed);
    assert!(error.chain().contains("network namespace"), "{}", error.chain());
    assert!(node.is_clean());
    node.kernel.fail(Faults::default());
    agent.add(node.request("a", "shop", "blue")).await.expect("attached");
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_given_up() {
    let node = Node::new();
    let agent = node.start().await;
    node.kernel.fail(Faults { hang_on: Some("net1".into()), ..Faults::default() });
    let error = agent.add(node.request("a", "shop", "blue")).await.expect_err("it hangs");
    assert_eq!(error.reason, Reason::NotReady);
    assert!(node.is_clean());
}

/// It was given up, and made the interface all the same: nobody else may have its address meanwhile, and it
/// goes.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_is_late_leaves_nothing_and_shares_no_address() {
    let node = Node::new();
    let agent = node.start().await;
    let first = agent.add(node.request("first", "shop", "blue")).await.expect("attached");
    let last_byte = |attached: &knit_node::Attached| match attached.attachments[1].addresses[0].net.addr() {
        std::net::IpAddr::V4(address) => address.octets()[3],
        std::net::IpAddr::V6(_) => panic!("it has no IPv6"),
    };
    let slow_on = Some(("net1".to_owned(), Duration::from_secs(40)));
    node.kernel.fail(Faults { slow_on, ..Faults::default() });
    let error = agent.add(node.request("late", "shop", "blue")).await.expect_err("it is too slow");
    assert_eq!(error.reason, Reason::NotReady);
    assert!(error.chain().contains("knit.dev/linux"), "{}", error.chain());
    assert!(agent.core.list(Some(&id("late"))).is_empty());
    node.kernel.fail(Faults::default());

    let next = agent.add(node.request("next", "shop", "blue")).await.expect("attached");
    assert_eq!(last_byte(&next), last_byte(&first) + 2, "the one between may still be made");
    // It is made, and removed again.
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(node.kernel.attaches(), 3, "the late one was made after all");
    assert_eq!(node.attachments().len(), 4, "and is gone again");
    agent.del("first").await.expect("detached");
    agent.del("next").await.expect("detached");
    assert!(node.is_clean());
}

/// The container runtime waits 60 s for ADD and 30 s for DEL, and should hear who is slow.
#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_named_before_the_caller_gives_up() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("there", "shop", "")).await.expect("attached");
    node.kernel.fail(Faults { hang_on: Some("eth0".into()), hang_detaches: true, ..Faults::default() });
    let add = agent
        .core
        .attach(node.request("a", "shop", ""), tokio::time::Instant::now() + Duration::from_secs(54));
    let error =
        tokio::time::timeout(Duration::from_secs(54), add).await.expect("in time").expect_err("it hangs");
    assert!(error.chain().contains("network runtime knit.dev/linux did not attach"), "{}", error.chain());
    let del = agent.del("there");
    let error =
        tokio::time::timeout(Duration::from_secs(27), del).await.expect("in time").expect_err("it hangs");
    assert!(error.chain().contains("network runtime knit.dev/linux did not detach"), "{}", error.chain());
    // One DEL behind another that hangs hears something, too.
    let both = futures::future::join(agent.del("there"), agent.del("there"));
    let (x, y) = tokio::time::timeout(Duration::from_secs(27), both).await.expect("in time");
    assert!(x.is_err() && y.is_err());
}

#[tokio::test]
async fn a_detach_that_fails_is_tried_again() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("a", "shop", "")).await.expect("attached");
    node.kernel.fail(Faults { detaches: 1, ..Faults::default() });
    assert_eq!(agent.del("a").await.expect_err("told to fail").reason, Reason::NotReady);
    assert_eq!(node.attachments().len(), 1);
    let outcome = agent.core.reconcile(&Default::default()).await;
    assert_eq!((outcome.rolled_back, outcome.failed), (1, 0));
    assert!(node.is_clean());
    agent.del("a").await.expect("gone already is success");
}

#[tokio::test]
async fn del_of_the_unknown_is_success_and_del_waits_for_add() {
    let node = Node::new();
    let agent = node.start().await;
    agent.del("never-seen").await.expect("success");
    let (added, deleted) = tokio::join!(agent.add(node.request("a", "shop", "blue")), agent.del("a"));
    added.expect("attached");
    deleted.expect("detached");
    assert!(node.is_clean(), "the DEL came after the ADD");
}

#[tokio::test]
async fn add_after_a_del_that_never_came() {
    let node = Node::new();
    let agent = node.start().await;
    let mut request = node.request("a", "shop", r#"[{"name":"blue","ips":["10.2.0.9"]}]"#);
    agent.add(request.clone()).await.expect("attached");
    // The same pod comes with a new sandbox and wants the same address.
    request.pod.sandbox = id("b");
    let request = in_namespace(request, node.netns("b"));
    let attached = agent.add(request).await.expect("attached again");
    assert_eq!(addresses(&attached)[1].1, "10.2.0.9/32");
    assert_eq!(node.attachments().len(), 2);
    assert!(agent.core.list(Some(&id("a"))).is_empty());
}

#[tokio::test]
async fn a_namespace_that_is_gone_is_cleared_away() {
    let node = Node::new();
    let agent = node.start().await;
    let (gone, stays) = (node.request("gone", "shop", "blue"), node.request("stays", "shop", "blue"));
    agent.add(gone.clone()).await.expect("attached");
    agent.add(stays).await.expect("attached");
    std::fs::remove_file(netns_of(&gone)).expect("removed");
    let outcome = agent.core.reconcile(&Default::default()).await;
    assert_eq!((outcome.removed, outcome.failed), (1, 0));
    assert_eq!(agent.core.list(None).len(), 2);
    assert_eq!(agent.add(gone).await.expect_err("nothing to attach to").reason, Reason::UnknownSandbox);
}

#[tokio::test]
async fn what_a_runtime_lost_is_made_again_and_strays_are_removed() {
    let node = Node::new();
    let agent = node.start().await;
    let before = agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    node.kernel.lose("a", "net1");
    assert!(agent.core.check(id("a")).await.is_err());
    let outcome = agent.core.reconcile(&Default::default()).await;
    assert_eq!((outcome.repaired, outcome.failed), (1, 0));
    agent.core.check(id("a")).await.expect("whole again");
    let after = agent.core.list(Some(&id("a")));
    assert_eq!(after[1].addresses, before.attachments[1].addresses);
}

#[tokio::test]
async fn garbage_collection_keeps_what_is_listed_and_what_others_made() {
    let node = Node::new();
    let agent = node.start().await;
    for sandbox in ["a", "b"] {
        agent.add(node.request(sandbox, "shop", "")).await.expect("attached");
    }
    let mut kni = node.request("k", "shop", "");
    kni.door = Door::Kni;
    agent.add(kni).await.expect("attached");
    agent.core.gc(Door::Cni("knit".into()), BTreeSet::from(["b".to_owned()])).await.expect("collected");
    let left: BTreeSet<String> = agent.core.list(None).iter().map(|a| a.pod.sandbox.to_string()).collect();
    assert_eq!(left, BTreeSet::from(["b".to_owned(), "k".to_owned()]));
    agent.core.gc(Door::Cni("another".into()), BTreeSet::new()).await.expect("collected");
    assert_eq!(agent.core.list(None).len(), 2, "another configuration's garbage is not ours");
}

/// A container runtime that has just started may not know its sandboxes yet.
#[tokio::test]
async fn garbage_collection_with_an_empty_list_leaves_pods_that_live() {
    let node = Node::new();
    let agent = node.start().await;
    // This very process is in it.
    let lives = in_namespace(node.request("lives", "shop", ""), "/proc/self/ns/net");
    agent.add(lives).await.expect("attached");
    agent.add(node.request("empty", "shop", "")).await.expect("attached");
    for keep in [BTreeSet::new(), BTreeSet::from(["somebody".to_owned()])] {
        agent.core.gc(Door::Cni("knit".into()), keep).await.expect("collected");
        let left: Vec<String> = agent.core.list(None).iter().map(|a| a.pod.sandbox.to_string()).collect();
        assert_eq!(left, ["lives"]);
    }
}

/// As installed, an agent sees no processes and asks no container runtime.
#[tokio::test]
async fn a_garbage_collection_that_lists_some_removed_pods_that_live() {
    let mut node = Node::new();
    let pods = [("lives", "shop"), ("gone", "shop"), ("listed", "shop")];
    let view = |_: &str| Arc::new(knit_node::world::PodView::default());
    let known = pods.iter().map(|(s, n)| (((*n).to_owned(), format!("pod-{s}")), view(s)));
    node.world.pods = Arc::new(known.collect());
    node.world.synced.pods = true;
    let agent = node.start().await;
    for sandbox in ["lives", "gone", "listed", "deleted"] {
        agent.add(node.request(sandbox, "shop", "")).await.expect("attached");
    }
    std::fs::remove_file(node.netns("gone")).expect("removed");
    let collect = |keep: BTreeSet<String>| {
        agent.core.gc_among(Door::Cni("knit".into()), keep, knit_node::netns::Processes::unseen())
    };
    let left = || agent.core.list(None).iter().map(|a| a.pod.sandbox.to_string()).collect::<Vec<_>>();
    collect(["listed".to_owned()].into()).await.expect("collected");
    // One whose namespace is gone, and one that the API does not have, are collected.
    assert_eq!(left(), ["listed", "lives"]);
    collect(["somebody".to_owned()].into()).await.expect("collected");
    collect(BTreeSet::new()).await.expect("collected");
    assert_eq!(left(), ["listed", "lives"]);
    // Without the API's word it stays, too.
    agent.core.world().update(|world| world.synced.pods = false);
    agent.add(node.request("deleted", "shop", "")).await.expect("attached");
    collect(["somebody".to_owned()].into()).await.expect("collected");
    assert_eq!(left().len(), 3);
}

#[tokio::test]
async fn a_call_that_names_another_interface_took_the_running_pods_networks_away() {
    let node = Node::new();
    let agent = node.start().await;
    let before = agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    let further = before.attachments[1].interface.clone();
    for interface in [InterfaceName::new("eth1").expect("a name"), further] {
        let mut request = node.request("a", "shop", "blue");
        main_of(&mut request).interface = interface.clone();
        let error = agent.add(request).await.expect_err("it has its networks");
        assert_eq!(error.reason, Reason::Refused);
        assert!(error.chain().contains("detach the pod first"), "{}", error.chain());
        agent.core.detach(id("a"), Some(interface)).await.expect("nothing to do");
        assert_eq!(agent.core.list(None), before.attachments);
        assert_eq!(node.attachments().len(), 2);
    }
    agent.del("a").await.expect("detached");
    assert!(node.is_clean());
}

#[tokio::test]
async fn an_empty_pool_waits_for_a_block_and_then_says_so() {
    let mut node = Node::new();
    Arc::make_mut(&mut node.world.blocks)
        .insert("blue-1".into(), Arc::new(block("blue", common::NODE, "10.2.0.8/29")));
    let agent = node.start().await;
    let mut added = Vec::new();
    let error = loop {
        let sandbox = format!("s{}", added.len());
        match agent.add(node.request(&sandbox, "shop", "blue")).await {
            Ok(attached) => added.push(attached),
            Err(error) => break error,
        }
        assert!(added.len() < 9, "more pods than addresses");
    };
    assert_eq!(error.reason, Reason::AddressesExhausted);
    assert!(error.retryable());
    assert_eq!(added.len(), 7, "8 addresses less the router's");
    let starved = || agent.core.networks().states().iter().any(|s| s.name == "blue" && s.starved);
    assert!(starved());
    agent.core.status().expect("STATUS does not fail for it");
    // It asked for another block forever, even when pods had gone and nobody needed it.
    agent.del("s0").await.expect("detached");
    assert!(!starved(), "an address was given back");
    agent.add(node.request("s7", "shop", "blue")).await.expect_err("that address rests for a while");
    assert!(starved());

    // A further block comes while a pod waits.
    let core = agent.core.clone();
    let following = tokio::spawn(async move { core.networks().follow().await });
    let (waiting, ()) = tokio::join!(agent.add(node.request("w", "shop", "blue")), async {
        agent.core.world().update_networks(|world| {
            Arc::make_mut(&mut world.blocks)
                .insert("blue-2".into(), Arc::new(block("blue", common::NODE, "10.2.1.0/29")));
        });
    });
    let attached = waiting.expect("the block came");
    assert!(addresses(&attached)[1].1.starts_with("10.2.1."), "{attached:?}");
    assert!(node.kernel.networks()["blue"].blocks.len() == 2, "the runtime knows the block");
    following.abort();
}

#[tokio::test]
async fn unknown_things_are_waited_for_a_little() {
    let node = Node::new();
    let agent = node.start().await;
    for (namespace, networks, words) in [("new", "", "namespace new"), ("shop", "red", "Network red")] {
        let error = agent.add(node.request("a", namespace, networks)).await.expect_err("not known");
        assert_eq!(error.reason, Reason::NotReady);
        assert!(error.chain().contains(words), "{}", error.chain());
    }
    let (added, ()) = tokio::join!(agent.add(node.request("a", "new", "")), async {
        agent.core.world().update(|world| {
            Arc::make_mut(&mut world.namespaces).insert("new".into(), Arc::default());
        });
    });
    added.expect("the namespace came");
}

#[tokio::test]
async fn networks_follow_their_objects_and_unused_ones_go() {
    let node = Node::new();
    let agent = node.start().await;
    assert_eq!(node.kernel.networks().keys().collect::<Vec<_>>(), ["default"], "only what is needed");
    agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    let set_ups = node.kernel.set_ups();
    agent.core.networks().pass().await;
    assert_eq!(node.kernel.set_ups(), set_ups, "nothing changed, nothing is told");
    agent.core.world().update_networks(|world| {
        let blue =
            network("blue", 2, "10.2.0.0/16", json!({"mtu": 1400, "allowedNamespaces": {"from": "All"}}));
        Arc::make_mut(&mut world.networks).insert("blue".into(), Arc::new(blue));
        Arc::make_mut(&mut world.blocks)
            .insert("blue-2".into(), Arc::new(block("blue", "node-2", "10.2.3.0/28")));
    });
    agent.core.networks().pass().await;
    let blue = node.kernel.networks()["blue"].clone();
    assert_eq!((blue.mtu, blue.blocks.len()), (Some(1400), 2));
    assert_eq!(blue.router_addresses.len(), 1, "the router has an address of its own");

    // It is deleted, but a pod has it: it stays until the pod is gone.
    agent.core.world().update_networks(|world| drop(Arc::make_mut(&mut world.networks).remove("blue")));
    agent.core.networks().pass().await;
    assert!(node.kernel.networks().contains_key("blue"));
    agent.del("a").await.expect("detached");
    agent.core.networks().pass().await;
    assert!(!node.kernel.networks().contains_key("blue"));
}

#[tokio::test]
async fn status_fails_only_before_the_first_readiness_since_boot() {
    let mut node = Node::new();
    let networks = std::mem::take(&mut node.world.networks);
    let agent = node.start().await;
    let error = agent.core.status().expect_err("no default Network");
    assert!(error.chain().contains("default"), "{}", error.chain());
    drop(agent);
    node.world.networks = networks;
    drop(node.start().await);
    // The agent comes back while nothing is known: still no failure.
    node.world.networks = Arc::new(BTreeMap::new());
    let agent = node.start().await;
    agent.core.status().expect("it was ready since boot");
    assert!(agent.core.readiness().now().is_err());
}

#[tokio::test]
async fn work_goes_on_when_the_caller_stops_waiting() {
    let node = Node::new();
    let agent = node.start().await;
    {
        let add = agent.add(node.request("a", "shop", "blue"));
        tokio::pin!(add);
        assert!(futures::poll!(&mut add).is_pending());
    }
    tokio::time::timeout(Duration::from_secs(60), agent.core.idle()).await.expect("it ends");
    assert_eq!(agent.core.list(Some(&id("a"))).len(), 2, "attached all the same");
    assert_eq!(InterfaceName::new("eth0").expect("a name"), agent.core.list(None)[0].interface);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_never_answers_kept_a_sandbox_locked_for_ever() {
    let node = Node::new();
    let agent = node.start().await;
    // Its attach comes after the request was given up, and taking that away again hangs.
    let slow = Some(("net1".to_owned(), Duration::from_secs(40)));
    node.kernel.fail(Faults { slow_on: slow, hang_detaches: true, ..Faults::default() });
    agent.add(node.request("one", "shop", "blue")).await.expect_err("given up");
    tokio::time::sleep(Duration::from_secs(60)).await;
    node.kernel.fail(Faults::default());
    tokio::time::sleep(Duration::from_secs(60)).await;
    agent.core.reconcile(&Pass::default()).await;
    agent.add(node.request("one", "shop", "blue")).await.expect("nobody holds it any more");

    // An interface that is made again in another namespace is taken away again, and that hangs.
    node.kernel.lose("one", "net1");
    node.kernel.fail(Faults { other_namespace: true, hang_detaches: true, ..Faults::default() });
    let outcome =
        tokio::time::timeout(Duration::from_secs(300), agent.core.reconcile(&Pass::default())).await;
    assert_eq!(outcome.expect("a pass ends").failed, 1);
}

#[tokio::test(start_paused = true)]
async fn an_attach_that_never_ends_is_not_followed_for_ever() {
    let node = Node::new();
    let agent = node.start().await;
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = alive();
    node.kernel.fail(Faults { hang_on: Some("eth0".into()), ..Faults::default() });
    agent.add(node.request("one", "shop", "")).await.expect_err("given up");
    assert!(alive() > before, "it may still come");
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(alive(), before);
}

/// A Network whose removal failed was forgotten, and what the runtime had of it stayed forever.
#[tokio::test]
async fn a_network_that_cannot_be_removed_is_removed_later() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    agent.del("a").await.expect("detached");
    let has_blue = || node.kernel.networks().contains_key("blue");
    let delete = |world: &mut knit_node::world::World| {
        Arc::make_mut(&mut world.networks).remove("blue");
    };
    agent.core.world().update(delete);
    node.kernel.fail(Faults { removals: 2, ..Faults::default() });
    for _ in 0..2 {
        agent.core.networks().pass().await;
        assert!(has_blue(), "told to fail");
    }
    agent.core.networks().pass().await;
    assert!(!has_blue(), "what is left is tried again");

    // One of which only a part was made is removed, too.
    let node = Node::new();
    let agent = node.start().await;
    node.kernel.fail(Faults { set_up: Some(knit_runtime::Reason::Internal), ..Faults::default() });
    agent.core.keep_network(&"blue".into()).await;
    agent.core.world().update(delete);
    node.kernel.fail(Faults { removals: 1, ..Faults::default() });
    agent.core.networks().pass().await;
    assert!(agent.core.networks().states().iter().any(|state| state.name == "blue"), "it is not forgotten");
    agent.core.networks().pass().await;
    assert!(agent.core.networks().states().iter().all(|state| state.name != "blue"));
}
