//! What agents know of other nodes from slices, when there are none, and when somebody deletes them.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node as NodeObject};
use knit_api::{AddressBlock, BlockSlice, Network, NodeSlice};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_cni::code;
use knit_cni::protocol::Command;
use knit_node::agent::Agent;
use knit_objects::{Key, Objects, Source, Write};
use knit_testbed::wait::holds;
use serde_json::{Value, json};

use super::{Node, added, error_code, text_of};

pub(super) async fn create<K: knit_objects::Object + serde::Serialize>(objects: &Objects, object: &Value) {
    let object: K = serde_json::from_value(object.clone()).expect("an object");
    objects.write(&Write::create(&object)).await.expect("created");
}

/// An API server with the objects of a node's folder, and no controller.
pub(super) async fn api(node: &Node) -> (Handle, Objects) {
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let server = Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server");
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    for file in std::fs::read_dir(node.path("objects")).expect("the objects") {
        let path = file.expect("a file").path();
        if !path.is_file() {
            continue;
        }
        let object: Value = serde_json::from_slice(&std::fs::read(path).expect("read")).expect("an object");
        match object["kind"].as_str().expect("a kind") {
            "Network" => {
                create::<Network>(&objects, &object).await;
                let key = Key::cluster(object["metadata"]["name"].as_str().expect("a name"));
                let write = Write::status::<Network>(key, &object["status"], "test");
                objects.write(&write).await.expect("written");
            }
            "AddressBlock" => create::<AddressBlock>(&objects, &object).await,
            "Namespace" => create::<Namespace>(&objects, &object).await,
            "Node" => {
                create::<NodeObject>(&objects, &object).await;
                let write = Write::status::<NodeObject>(Key::cluster("node-1"), &object["status"], "test");
                objects.write(&write).await.expect("written");
            }
            other => panic!("{other}"),
        }
    }
    (server, objects)
}

/// An API server that lists some objects, never has news, and does not list the kinds that it holds back.
async fn half_an_api(objects: Vec<Value>, held: &'static str) -> (String, tokio::sync::watch::Sender<bool>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let api = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", api.local_addr().expect("an address"));
    let (open, opened) = tokio::sync::watch::channel(false);
    let objects = Arc::new(objects);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = api.accept().await {
            let (objects, opened) = (Arc::clone(&objects), opened.clone());
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = client.read_u8().await else { return };
                    head.push(byte);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let request = head.lines().next().unwrap_or_default();
                let target = request.split(' ').nth(1).unwrap_or_default();
                let plural = target.split('?').next().and_then(|path| path.rsplit('/').next());
                let plural = plural.unwrap_or_default();
                if target.contains("watch=") {
                    let begun = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
                    let _ = client.write_all(begun).await;
                    return std::future::pending().await;
                }
                // All objects of a kind, or those of the Network behind the slash.
                let (held_kind, of_network) = held.split_once('/').unwrap_or((held, ""));
                let is_held = plural == held_kind && target.contains(of_network);
                let (status, body) = if is_held && !*opened.borrow() {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
                        "reason": "Forbidden", "message": "no role allows it"});
                    ("403 Forbidden", body)
                } else if request.starts_with("GET ") {
                    let of_kind = |object: &&Value| {
                        let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
                        plural == format!("{kind}s")
                    };
                    let items: Vec<&Value> = objects.iter().filter(of_kind).collect();
                    let list = json!({"kind": "List", "apiVersion": "v1",
                        "metadata": {"resourceVersion": "1"},
                        "items": items});
                    ("200 OK", list)
                } else {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503,
                        "reason": "ServiceUnavailable", "message": "it only lists"});
                    ("503 Service Unavailable", body)
                };
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
    (url, open)
}

/// What a controller writes about two nodes.
pub(super) fn slices(complete: bool) -> [Value; 3] {
    let slice = |kind: &str, name: &str, network: Option<&str>, mut spec: Value| {
        (spec["index"], spec["complete"]) = (json!(0), json!(complete));
        if let Some(network) = network {
            spec["network"] = json!(network);
        }
        json!({"apiVersion": "knit.dev/v1alpha1", "kind": kind,
            "metadata": {"name": name, "labels": network.map(|n| json!({"knit.dev/network": n}))},
            "spec": spec})
    };
    let block = |network: &str, node: &str, range: &str| {
        json!({"name": format!("{network}-{node}"), "node": node, "ipv4": range,
            "created": "2026-01-01T00:00:00Z"})
    };
    [
        slice(
            "NodeSlice",
            "nodes-0",
            None,
            json!({"nodes": [
            {"name": "node-1", "addresses": ["192.0.2.1"]}, {"name": "node-2", "addresses": ["192.0.2.2"]}]}),
        ),
        slice(
            "BlockSlice",
            "default-0",
            Some("default"),
            json!({"blocks": [block("default", "node-1", "10.1.0.0/28")]}),
        ),
        slice(
            "BlockSlice",
            "blue-0",
            Some("blue"),
            json!({"blocks": [
            block("blue", "node-1", "10.2.0.0/28"), block("blue", "node-2", "10.2.0.16/28")]}),
        ),
    ]
}

/// How many blocks of each node an agent told the runtime of.
fn told_blocks(node: &Node, network: &str) -> Vec<String> {
    let networks = node.kernel.networks();
    networks.get(network).map(|n| n.blocks.iter().map(|b| b.node.clone()).collect()).unwrap_or_default()
}

/// An agent reads slices, its own Node and its own blocks, and of no other Node or block the object.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_knows_other_nodes_from_slices_and_loses_none_when_somebody_deletes_them() {
    let node = Node::new();
    let (server, objects) = api(&node).await;
    // Another node that nobody has told of in a slice.
    create::<NodeObject>(&objects, &json!({"metadata": {"name": "node-9"}})).await;
    let start = || async {
        let mut config = node.config(Source::Url(server.url()));
        config.core.block_wait = Duration::from_secs(1);
        Agent::start(config).await.expect("started")
    };
    let agent = start().await;
    // A controller that is older writes no slices, and one that is at it has not written all.
    for held in ["no slices", "slices that are not complete"] {
        let answer = node.call(node.request(Command::Add, "a", "blue")).await;
        assert_eq!(error_code(&answer), code::TRY_AGAIN, "{held}: {answer:?}");
        assert!(format!("{answer:?}").contains("not all Nodes, BlockSlices have arrived"), "{answer:?}");
        assert!(
            !agent.core().world().get().can_serve(),
            "of addresses inside the cluster too little is known"
        );
        if held == "no slices" {
            let [nodes, default, blue] = slices(false);
            create::<NodeSlice>(&objects, &nodes).await;
            create::<BlockSlice>(&objects, &default).await;
            create::<BlockSlice>(&objects, &blue).await;
            let known = || agent.core().world().get().nodes.contains_key("node-2");
            holds("the other node", known).await;
        }
    }
    let complete = json!({"spec": {"complete": true}});
    objects
        .write(&Write::merge::<NodeSlice>(Key::cluster("nodes-0"), complete.clone()))
        .await
        .expect("written");
    for name in ["default-0", "blue-0"] {
        let write = Write::merge::<BlockSlice>(Key::cluster(name), complete.clone());
        objects.write(&write).await.expect("written");
    }
    holds("all lists", || agent.core().world().get().is_synced()).await;
    added(&node, "a", "blue").await;
    assert_eq!(told_blocks(&node, "blue"), ["node-1", "node-2"]);
    let inside = node.kernel.networks()["blue"].not_outside.clone();
    assert!(inside.contains(&"192.0.2.2/32".parse().expect("a range")), "{inside:?}");
    assert!(!agent.core().world().get().nodes.contains_key("node-9"), "Nodes themselves are not followed");

    // What does not follow from blocks is told there, too. A controller of an earlier version says nothing
    // of it.
    let told = json!([{"attachment": "shop/vm", "pod": "vm", "node": "node-2", "addresses": ["10.2.200.1"],
        "mac": "02:00:00:00:00:07"}]);
    let say = async |announced: Value| {
        let patch = json!({"spec": {"announced": announced}});
        objects.write(&Write::merge::<BlockSlice>(Key::cluster("blue-0"), patch)).await.expect("written");
    };
    let announced = |agent: &Agent| agent.core().world().get().announced.len();
    say(told.clone()).await;
    holds("an interface", || announced(&agent) == 1).await;
    say(Value::Null).await;
    let block = json!({"name": "blue-node-2b", "node": "node-2", "ipv4": "10.2.0.64/28"});
    let mark = json!({"metadata": {"name": "blue-2", "labels": {"knit.dev/network": "blue"}},
        "spec": {"network": "blue", "index": 2, "blocks": [block]}});
    create::<BlockSlice>(&objects, &mark).await;
    holds("one block more", || told_blocks(&node, "blue").len() == 3).await;
    assert_eq!(announced(&agent), 1, "nothing was said of it");
    say(json!([])).await;
    holds("the end of the interface", || announced(&agent) == 0).await;
    objects.write(&Write::delete::<BlockSlice>(Key::cluster("blue-2"))).await.expect("deleted");
    holds("one block less", || told_blocks(&node, "blue").len() == 2).await;
    say(told).await;
    holds("the interface", || announced(&agent) == 1).await;

    let kept = node.path("state").join("boot-cache.log");
    let all_kept = |text: String| {
        ["10.2.0.16/28", "\"whole\"", "10.2.200.1"].into_iter().all(|part| text.contains(part))
    };
    holds("the cache on disk", || text_of(&kept).is_some_and(all_kept)).await;

    // Somebody deletes all slices: whoever was known stays known.
    for name in ["blue-0", "default-0"] {
        objects.write(&Write::delete::<BlockSlice>(Key::cluster(name))).await.expect("deleted");
    }
    objects.write(&Write::delete::<NodeSlice>(Key::cluster("nodes-0"))).await.expect("deleted");
    // One more slice, by which it shows that the loss was heard of. Nothing waits for a controller.
    let block = json!({"name": "blue-node-3", "node": "node-3", "ipv4": "10.2.0.32/28"});
    let mark = json!({"metadata": {"name": "blue-1", "labels": {"knit.dev/network": "blue"}},
        "spec": {"network": "blue", "index": 1, "blocks": [block]}});
    create::<BlockSlice>(&objects, &mark).await;
    holds("the loss", || told_blocks(&node, "blue") == ["node-1", "node-2", "node-3"]).await;
    assert!(agent.core().world().get().is_synced());
    added(&node, "c", "blue").await;
    let all_kept = |text: String| text.contains("10.2.0.32/28");
    holds("the cache on disk", || text_of(&kept).is_some_and(all_kept)).await;
    objects.write(&Write::delete::<BlockSlice>(Key::cluster("blue-1"))).await.expect("deleted");
    // So it does over a restart of the agent, by what was kept on disk.
    agent.stop(Duration::from_secs(5)).await;
    let agent = start().await;
    added(&node, "b", "blue").await;
    assert_eq!(told_blocks(&node, "blue"), ["node-1", "node-2", "node-3"]);
    assert_eq!(announced(&agent), 1);
    // One that says that the other nodes are gone is believed once all of it is there.
    let [_, default, mut blue] = slices(true);
    blue["spec"]["blocks"].as_array_mut().expect("blocks").truncate(1);
    create::<BlockSlice>(&objects, &default).await;
    create::<BlockSlice>(&objects, &blue).await;
    holds("the end of a block", || told_blocks(&node, "blue") == ["node-1"]).await;
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_was_let_out_to_every_service_while_the_service_ranges_were_not_known() {
    for (held, list) in [
        ("servicecidrs", "servicecidrs"),
        ("nodes", "nodes"),
        ("nodeslices", "nodes"),
        ("blockslices", "blockslices"),
        // Where Nodes have podCIDRs, the blocks of the default Network say where its pods are.
        ("blockslices/default", "blockslices"),
        ("addressblocks", "addressblocks"),
    ] {
        let node = Node::new();
        let mut objects: Vec<Value> = std::fs::read_dir(node.path("objects"))
            .expect("the objects")
            .map(|file| std::fs::read(file.expect("a file").path()).expect("read"))
            .map(|text| serde_json::from_slice(&text).expect("an object"))
            .collect();
        objects.push(json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}}));
        objects.extend(slices(true));
        let (url, open) = half_an_api(objects, held).await;
        let mut config = node.config(Source::Url(url));
        config.core.block_wait = Duration::from_secs(1);
        config.node_addresses = vec!["192.0.2.1".parse().expect("an address")];
        let agent = Agent::start(config).await.expect("started");
        let answer = node.call(node.request(Command::Add, "a", "blue")).await;
        assert_eq!(error_code(&answer), code::TRY_AGAIN, "{held}: {answer:?}");
        let said = format!("{answer:?}").to_lowercase();
        assert!(said.contains(&format!("not all {list} have arrived")), "{said}");
        assert!(!node.kernel.networks().contains_key("blue"), "{held}");
        open.send_replace(true);
        holds("the list", || agent.core().world().get().is_synced()).await;
        added(&node, "a", "blue").await;
        let inside = node.kernel.networks()["blue"].not_outside.clone();
        for range in ["10.96.0.0/16", "192.0.2.1/32"] {
            assert!(inside.contains(&range.parse().expect("a range")), "{held}: {inside:?}");
        }
        agent.stop(Duration::from_secs(5)).await;
    }
}

/// Agents of earlier versions read Nodes and AddressBlocks themselves. What such a one kept on disk is what
/// its successor goes by until the controller has written slices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_was_upgraded_before_the_controller_goes_on_with_what_was_kept() {
    let node = Node::new();
    let other = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AddressBlock",
        "metadata": {"name": "blue-node-2"},
        "spec": {"network": "blue", "node": "node-2", "ipv4": "10.2.0.16/28"}});
    node.put("other", &other);
    // A folder is read as such an agent reads the API.
    let agent = node.start().await;
    added(&node, "a", "blue").await;
    let kept = node.path("state").join("boot-cache.log");
    let all_kept = |text: String| text.contains("10.2.0.16/28") && !text.contains("\"whole\"");
    holds("the cache on disk", || text_of(&kept).is_some_and(all_kept)).await;
    agent.stop(Duration::from_secs(5)).await;

    let (server, objects) = api(&node).await;
    let mut config = node.config(Source::Url(server.url()));
    config.core.block_wait = Duration::from_secs(1);
    let agent = Agent::start(config).await.expect("started");
    added(&node, "b", "blue").await;
    assert_eq!(told_blocks(&node, "blue"), ["node-1", "node-2"]);
    // Its Services are served, too.
    holds("all that is not in slices", || agent.core().world().get().can_serve()).await;
    assert!(!agent.core().world().get().is_synced());
    // The controller comes, and knows of one more node.
    let [nodes, default, mut blue] = slices(true);
    let block = json!({"name": "blue-node-3", "node": "node-3", "ipv4": "10.2.0.32/28"});
    blue["spec"]["blocks"].as_array_mut().expect("blocks").push(block);
    create::<NodeSlice>(&objects, &nodes).await;
    create::<BlockSlice>(&objects, &default).await;
    create::<BlockSlice>(&objects, &blue).await;
    holds("the new node", || told_blocks(&node, "blue") == ["node-1", "node-2", "node-3"]).await;
    holds("all lists", || agent.core().world().get().is_synced()).await;
    agent.stop(Duration::from_secs(5)).await;
}
