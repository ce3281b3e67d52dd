//! A runtime that hangs costs an agent that starts, and so every pod of its node, one timeout; what it has
//! and nobody knows goes as soon as that can be told.

use super::*;

const PODS: usize = 100;

/// A node with room for that many pods on the other runtime's Network.
fn roomy() -> Node {
    let mut node = Node::new();
    let blocks = Arc::make_mut(&mut node.world.blocks);
    blocks.insert("default-1".into(), Arc::new(block("default", NODE, "10.1.0.0/24")));
    blocks.insert("other-1".into(), Arc::new(block("other", NODE, "10.4.0.0/24")));
    node
}

/// A node with a Network of the other runtime that was deleted while no agent ran, and another one.
async fn had_a_network_that_is_gone() -> Node {
    let mut node = Node::new();
    let there = node.world.clone();
    let gone = network("gone", 9, "10.9.0.0/16", json!({"class": "other"}));
    Arc::make_mut(&mut node.world.networks).insert("gone".into(), Arc::new(gone));
    Arc::make_mut(&mut node.world.blocks)
        .insert("gone-1".into(), Arc::new(block("gone", NODE, "10.9.0.0/28")));
    let agent = node.start().await;
    for name in ["gone", "other"] {
        agent.core.keep_network(&name.into()).await;
        assert!(node.other.networks().contains_key(name), "{name}");
    }
    node.world = there;
    node
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_started_waited_for_a_hung_runtime_once_for_each_interface_that_it_had_lost() {
    let node = roomy();
    let agent = node.start().await;
    for number in 0..PODS {
        let sandbox = format!("one-{number}");
        agent.add(node.request(&sandbox, "shop", "other")).await.expect("a pod");
        node.other.lose(&sandbox, "net1");
    }
    drop(agent);
    node.other.fail(Faults { hang_on: Some("net1".into()), ..Faults::default() });
    let (begun, limit) = (Instant::now(), node.config().runtime_deadline);
    let agent = node.start().await;
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    // And it is asked for neither leftovers nor Networks that nobody knows.
    assert_eq!((agent.outcome.repaired, agent.outcome.failed), (0, PODS + 2), "{:?}", agent.outcome);
    // It answers again, and has all of them at once.
    node.other.fail(Faults::default());
    let outcome = agent.core.reconcile(&Pass::default()).await;
    assert_eq!((outcome.repaired, outcome.failed), (PODS, 0), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_did_not_start_while_a_runtime_hung_at_its_leftovers() {
    for faults in [
        Faults { hang_garbage: true, ..Faults::default() },
        Faults { hang_status: true, ..Faults::default() },
        Faults { hang_networks: true, ..Faults::default() },
    ] {
        let what = format!("{faults:?}");
        let node = had_a_network_that_is_gone().await;
        node.other.fail(faults);
        let (begun, limit) = (Instant::now(), node.config().runtime_deadline);
        let start = tokio::time::timeout(limit * 2, node.start()).await;
        let agent = start.unwrap_or_else(|_| panic!("{what}: it did not start within {:?}", begun.elapsed()));
        agent.add(node.request("s1", "shop", "blue")).await.expect("another runtime's pod");
    }
}

/// They were looked for once, in the first pass, whether or not Networks had been listed by then.
#[tokio::test]
async fn a_network_that_was_deleted_while_no_agent_ran_stayed_until_the_next_start() {
    let mut node = had_a_network_that_is_gone().await;
    node.world.synced.networks = false;
    let agent = node.start().await;
    let has = |name: &str| node.other.networks().contains_key(name);
    assert!(has("gone") && has("other"), "it is not known which ones there are");
    agent.core.world().update(|world| world.synced.networks = true);
    node.other.fail(Faults { removals: 1, ..Faults::default() });
    assert_eq!(agent.core.reconcile(&Pass::default()).await.failed, 1);
    assert!(has("gone"), "its runtime refuses");
    assert_eq!(agent.core.reconcile(&Pass::default()).await.failed, 0);
    assert!(!has("gone") && has("other"));
    assert!(agent.core.networks().states().iter().all(|state| state.name != "gone"));
}
