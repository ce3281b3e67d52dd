//! What others damage is repaired without waiting for a pass, also where the first attempt fails.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Agent, NODE, Node, block};
use knit_node::reconcile::Pass;
use knit_node::testing::{FakeRuntime, Faults, Life};
use tokio::time::Instant;

/// Damages a Network once, with these faults: it is repaired although no pass ever runs here.
async fn is_put_right(faults: Faults) {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("one", "shop", "")).await.expect("a pod");
    node.kernel.fail(faults);
    let runtime = Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()));
    let before = node.kernel.set_ups();
    node.kernel.damage("default");
    let repaired = async {
        while node.kernel.set_ups() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = agent.core.keep_right(runtime) => unreachable!("it never ends"),
        done = tokio::time::timeout(Duration::from_secs(30), repaired) => done.expect("repaired"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_that_failed_is_not_put_off_until_the_next_pass() {
    is_put_right(Faults { surveys: 2, ..Faults::default() }).await;
}

#[tokio::test(start_paused = true)]
async fn a_repair_that_failed_is_not_put_off_until_the_next_pass() {
    is_put_right(Faults { set_ups: 2, ..Faults::default() }).await;
}

/// Half of the newer one may be in force: going back to the older one would take that away again.
#[tokio::test(start_paused = true)]
async fn a_repair_went_back_behind_a_set_up_that_failed_midway() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("one", "shop", "")).await.expect("a pod");
    node.kernel.fail(Faults { set_ups: 1, ..Faults::default() });
    agent.core.world().update_networks(|world| {
        let blocks = Arc::make_mut(&mut world.blocks);
        blocks.insert("default-2".into(), Arc::new(block("default", "node-2", "10.1.0.16/28")));
    });
    agent.core.networks().pass().await;
    assert_eq!(node.kernel.networks()["default"].blocks.len(), 1, "it failed");
    node.kernel.damage("default");
    let runtime = Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()));
    let before = node.kernel.set_ups();
    let repaired = async {
        while node.kernel.set_ups() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = agent.core.keep_right(runtime) => unreachable!("it never ends"),
        done = tokio::time::timeout(Duration::from_secs(30), repaired) => done.expect("repaired"),
    }
    assert_eq!(node.kernel.networks()["default"].blocks.len(), 2, "the newest is made");
    // And it counts as made: nothing is left to do.
    let set_ups = node.kernel.set_ups();
    agent.core.networks().pass().await;
    assert_eq!(node.kernel.set_ups(), set_ups);
}

/// More pods than are reconciled at a time.
const PODS: usize = 100;

/// A node with many pods of one Network, all of which are damaged and do not answer when they are attached
/// again.
async fn with_pods_that_do_not_answer() -> (Node, Agent) {
    let mut node = Node::new();
    Arc::make_mut(&mut node.world.blocks)
        .insert("default-1".into(), Arc::new(block("default", NODE, "10.1.0.0/24")));
    let agent = node.start().await;
    for number in 0..PODS {
        agent.add(node.request(&format!("one-{number}"), "shop", "")).await.expect("a pod");
    }
    agent.add(node.request("other", "shop", "blue")).await.expect("a pod");
    node.kernel.fail(Faults { hang_on: Some("eth0".into()), ..Faults::default() });
    node.kernel.break_all();
    (node, agent)
}

/// One after the other, each for as long as a pod may take to answer: nobody looked at rules meanwhile.
#[tokio::test(start_paused = true)]
async fn the_repair_of_a_networks_rules_waited_for_pods_that_did_not_answer() {
    let (node, agent) = with_pods_that_do_not_answer().await;
    let runtime = Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()));
    let (begun, before) = (Instant::now(), node.kernel.set_ups());
    let repaired = async {
        // It has begun with the pods.
        while node.kernel.attaches_begun() == 0 {
            tokio::task::yield_now().await;
        }
        node.kernel.damage("blue");
        while node.kernel.set_ups() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = agent.core.keep_right(runtime) => unreachable!("it never ends"),
        () = repaired => {}
    }
    let (took, limit) = (begun.elapsed(), agent.core.config().runtime_deadline);
    assert!(took < limit, "{took:?}: pods are given up after {limit:?}");
    assert_eq!(node.kernel.broken(), PODS + 2, "no pod has answered");
    assert!(node.kernel.attaches_begun() < PODS, "not all of them are made again at once");
}

/// It went on without the sandbox's lock: what it made after the pod was deleted had an address of nobody.
#[tokio::test(start_paused = true)]
async fn a_repair_that_was_given_up_made_the_interface_of_a_pod_that_was_gone() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("one", "shop", "")).await.expect("a pod");
    let limit = agent.core.config().runtime_deadline;
    let slow_on = Some(("eth0".to_owned(), limit + Duration::from_secs(10)));
    node.kernel.fail(Faults { slow_on, ..Faults::default() });
    node.kernel.lose("one", "eth0");
    let attaches = node.kernel.attaches();
    agent.core.reconcile(&Pass::default()).await;
    assert_eq!(node.kernel.attaches(), attaches, "it was given up");
    agent.del("one").await.expect("detached");
    node.kernel.fail(Faults::default());
    // It ends ten seconds later, and is followed to its end.
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(node.kernel.attaches(), attaches + 1, "the late one was made after all");
    assert!(node.is_clean());
}

#[tokio::test(start_paused = true)]
async fn a_pass_waited_for_each_pod_that_did_not_answer() {
    let (node, agent) = with_pods_that_do_not_answer().await;
    let begun = Instant::now();
    agent.core.reconcile(&Pass::default()).await;
    let (took, limit) = (begun.elapsed(), agent.core.config().runtime_deadline);
    assert_eq!(node.kernel.attaches_begun(), PODS + 2, "each was tried");
    assert!(took < limit * 5, "{took:?}: one of them takes {limit:?}");
}

/// Each of them is made again once it answers, those that had to wait for others too.
#[tokio::test(start_paused = true)]
async fn many_damaged_pods_are_all_repaired_without_a_pass() {
    let (node, agent) = with_pods_that_do_not_answer().await;
    node.kernel.fail(Faults::default());
    let runtime = Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()));
    let repaired = async {
        while node.kernel.broken() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = agent.core.keep_right(runtime) => unreachable!("it never ends"),
        done = tokio::time::timeout(Duration::from_secs(30), repaired) => done.expect("repaired"),
    }
}

/// The runtime inside the agent works right where it is awaited: whatever is polled beside it waits, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_keeps_its_thread_for_each_pod_kept_the_repair_of_rules_waiting() {
    let (node, agent) = with_pods_that_do_not_answer().await;
    node.kernel.fail(Faults { hold_on: Some("eth0".into()), ..Faults::default() });
    let runtime = Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()));
    let before = node.kernel.set_ups();
    let (core, kernel) = (agent.core.clone(), node.kernel.clone());
    let keeping = tokio::spawn(async move { core.keep_right(runtime).await });
    let repaired = async {
        while kernel.attaches_begun() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        kernel.damage("blue");
        while kernel.set_ups() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let repaired = tokio::time::timeout(Duration::from_secs(25), repaired).await;
    let broken = kernel.broken();
    kernel.release();
    keeping.abort();
    repaired.expect("repaired meanwhile");
    assert!(broken > PODS, "pods answered: {broken} are left");
}
