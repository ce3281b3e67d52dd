//! What others damage is repaired without waiting for a pass, also where the first attempt fails.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Node, block};
use knit_node::testing::{FakeRuntime, Faults, Life};

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
