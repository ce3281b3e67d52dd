//! Blocks that an agent gives back: only on the controller's word, and whatever is killed on the way.

use std::time::Duration;

use knit_api::{AddressBlock, BlockSlice, NodeNetwork, NodeNetworkStatus, NodeSlice};
use knit_cni::protocol::Command;
use knit_node::agent::Agent;
use knit_node::world::boot::BootLog;
use knit_objects::{Key, Objects, Source, Write};
use knit_testbed::objects;
use knit_testbed::wait::{holds, holds_when_asked};
use serde_json::json;

use super::slices::{api, create, slices};
use super::{Node, added, error_code};

/// The Network `blue` with a second block of node-1, besides what [`Node`] has.
const SECOND: &str = "10.2.0.32/28";

async fn start(node: &Node, source: Source) -> Agent {
    let mut config = node.config(source);
    config.core.block_grace = Duration::ZERO;
    config.core.block_wait = Duration::from_millis(200);
    Agent::start(config).await.expect("started")
}

async fn said(objects: &Objects) -> NodeNetworkStatus {
    let said = objects.get::<NodeNetwork>(&Key::cluster("node-1")).await.expect("an answer");
    said.and_then(|said| said.status).unwrap_or_default()
}

/// Waits until this is what the agent says of a block: that it can do without it, and what it has given it
/// up for.
async fn says(agent: &Agent, objects: &Objects, block: &str, expected: Option<Option<&str>>) {
    holds_when_asked(&format!("{block}: {expected:?}"), || async {
        // It looks once a minute, and whenever anything happens.
        agent.core().networks_changed();
        let said = said(objects).await;
        let spare = said.spare_blocks.iter().find(|spare| spare.name == block);
        spare.map(|spare| spare.given_up.as_deref()) == expected
    })
    .await;
}

async fn wish(objects: &Objects, block: &str, wish: Option<&str>) {
    let patch = json!({"metadata": {"annotations": {"knit.dev/reclaim": wish}}});
    objects.write(&Write::merge::<AddressBlock>(Key::cluster(block), patch)).await.expect("written");
}

fn wish_on_disk(node: &Node, block: &str) -> Option<String> {
    BootLog::read(&node.path("state"))?.reclaimed.get(block).cloned()
}

fn is_held(said: &NodeNetworkStatus, network: &str, range: &str) -> bool {
    let of_network = said.held_ranges.iter().filter(|held| held.network == network);
    of_network.flat_map(|held| &held.ranges).any(|held| held == range)
}

/// A request for an address of the second block of `blue`.
async fn asks_for_the_second(node: &Node, sandbox: &str) -> super::Response {
    let fixed = json!([{"name": "blue", "ips": ["10.2.0.37"]}]).to_string();
    node.call(node.request(Command::Add, sandbox, &fixed)).await
}

async fn world() -> (Node, knit_apiserver::Handle, Objects) {
    let node = Node::new();
    let mut second = objects::block("blue", "node-1", SECOND, None);
    second["metadata"]["name"] = json!("blue-second");
    node.put("second", &second);
    let (server, objects) = api(&node).await;
    let [nodes, default, blue] = slices(true);
    create::<NodeSlice>(&objects, &nodes).await;
    create::<BlockSlice>(&objects, &default).await;
    create::<BlockSlice>(&objects, &blue).await;
    (node, server, objects)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_goes_back_only_when_an_agent_that_starts_now_would_lease_nothing_of_it() {
    let (node, server, objects) = world().await;
    let source = || Source::Url(server.url());
    let agent = start(&node, source()).await;
    added(&node, "a", "blue").await;
    says(&agent, &objects, "blue-second", Some(None)).await;
    says(&agent, &objects, "blue-node-1", None).await;
    // A pod comes before the controller does.
    assert!(matches!(asks_for_the_second(&node, "b").await, super::Response::Ok(_)));
    says(&agent, &objects, "blue-second", None).await;
    wish(&objects, "blue-second", Some("too late")).await;
    holds("the wish on disk", || wish_on_disk(&node, "blue-second").is_some()).await;
    says(&agent, &objects, "blue-second", None).await;
    wish(&objects, "blue-second", None).await;
    holds("no wish on disk", || wish_on_disk(&node, "blue-second").is_none()).await;
    super::result(node.call(node.request(Command::Del, "b", "")).await);

    says(&agent, &objects, "blue-second", Some(None)).await;
    wish(&objects, "blue-second", Some("first")).await;
    says(&agent, &objects, "blue-second", Some(Some("first"))).await;
    // What is said is on disk by now, and nothing is leased of it, by this agent or by the next one, which
    // has nobody to ask.
    assert_eq!(wish_on_disk(&node, "blue-second").as_deref(), Some("first"));
    assert!(matches!(asks_for_the_second(&node, "c").await, super::Response::Err(_)));
    agent.stop(Duration::from_secs(5)).await;
    let agent = start(&node, Source::Url("http://127.0.0.1:1".into())).await;
    assert!(matches!(asks_for_the_second(&node, "d").await, super::Response::Err(_)));
    let other = added(&node, "e", "blue").await.to_string();
    assert!(other.contains("\"10.2.0."), "{other}");
    agent.stop(Duration::from_secs(5)).await;

    // It is held until it is gone from the disk, too.
    let agent = start(&node, source()).await;
    says(&agent, &objects, "blue-second", Some(Some("first"))).await;
    assert!(is_held(&said(&objects).await, "blue", SECOND));
    objects.write(&Write::delete::<AddressBlock>(Key::cluster("blue-second"))).await.expect("deleted");
    holds_when_asked("the end of the block", || async {
        agent.core().networks_changed();
        !is_held(&said(&objects).await, "blue", SECOND)
    })
    .await;
    assert!(!BootLog::read(&node.path("state")).expect("a cache").blocks.contains_key("blue-second"));
    says(&agent, &objects, "blue-second", None).await;
    assert!(is_held(&said(&objects).await, "blue", "10.2.0.0/28"));
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_block_of_a_network_that_no_pod_uses_goes_back_unless_a_pod_comes() {
    let (node, server, objects) = world().await;
    objects.write(&Write::delete::<AddressBlock>(Key::cluster("blue-second"))).await.expect("deleted");
    let agent = start(&node, Source::Url(server.url())).await;
    // No pod has ever wanted it here.
    let own = "blue-node-1";
    says(&agent, &objects, own, Some(None)).await;
    assert!(is_held(&said(&objects).await, "blue", "10.2.0.0/28"));
    assert!(said(&objects).await.spare_blocks.iter().all(|spare| spare.name != "default-node-1"));
    wish(&objects, own, Some("w")).await;
    says(&agent, &objects, own, Some(Some("w"))).await;
    // A pod comes after all: it waits until the controller has taken its wish back.
    let answer = node.call(node.request(Command::Add, "a", "blue")).await;
    assert_eq!(error_code(&answer), knit_cni::code::TRY_AGAIN, "{answer:?}");
    says(&agent, &objects, own, None).await;
    let wants: Vec<_> = said(&objects).await.networks.into_iter().filter(|n| n.wants_block).collect();
    assert!(wants.iter().any(|network| network.name == "blue"), "{wants:?}");
    wish(&objects, own, None).await;
    let added = added(&node, "a", "blue").await.to_string();
    assert!(added.contains("\"10.2.0."), "{added}");
    agent.stop(Duration::from_secs(5)).await;
}
