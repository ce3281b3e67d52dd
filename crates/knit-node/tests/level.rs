//! What others damage is put right without waiting for a pass, also where the first attempt fails.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Node;
use knit_node::testing::{FakeRuntime, Faults, Life};

/// Damages a Network once, with these faults: it is put right although no pass ever runs here.
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
        done = tokio::time::timeout(Duration::from_secs(30), repaired) => done.expect("put right"),
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
