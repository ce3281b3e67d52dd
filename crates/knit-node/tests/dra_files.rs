//! Files by which containers read what their claim has: there before kubelet hears that the claim is
//! prepared, complete before the pod's containers start, and gone with the claim; whatever died in between.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::claims::{Api, pods};
use common::{Agent, Node};
use knit_node::{DeviceFiles, Prepared};
use knit_types::ObjectRef;
use serde_json::{Value, json};
use tokio::time::Instant;

async fn start(node: &Node, api: &Api) -> Agent {
    let agent = node.start().await;
    let files = DeviceFiles::new(&node.dir.path().join("kubelet"), cdi(node));
    agent.core.use_claims_with(Arc::new(api.clone()), Some(files), false);
    agent
}

fn cdi(node: &Node) -> PathBuf {
    node.dir.path().join("cdi")
}

fn claim(name: &str) -> ObjectRef {
    ObjectRef { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
}

async fn prepare(agent: &Agent, name: &str) -> knit_node::Result<Vec<Prepared>> {
    agent.core.prepare(claim(name), Instant::now() + Duration::from_secs(60)).await
}

fn list(folder: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = found.map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// What a container of a claim would read, by the specification that its runtime finds.
fn read(node: &Node, device: &str) -> Value {
    let (kind, name) = device.split_once('=').expect("a CDI device");
    let specs = list(&cdi(node)).into_iter().map(|path| std::fs::read(path).expect("a file"));
    let mut specs = specs.map(|bytes| serde_json::from_slice::<Value>(&bytes).expect("JSON"));
    let spec = specs.find(|spec| spec["kind"] == kind && spec["devices"][0]["name"] == name);
    let spec = spec.unwrap_or_else(|| panic!("no specification has {device}"));
    let mount = &spec["devices"][0]["containerEdits"]["mounts"][0];
    assert_eq!(mount["options"], json!(["ro", "bind"]));
    let bytes = std::fs::read(mount["hostPath"].as_str().expect("a path")).expect("a file");
    let first = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>().next();
    first.expect("a document").expect("JSON")
}

#[tokio::test]
async fn a_container_reads_what_its_claim_has_and_nothing_is_left_of_it() {
    let (mut node, api) = (Node::new(), Api::default());
    pods(&mut node, &[("s1", &["c"])]);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    let agent = start(&node, &api).await;
    let prepared = prepare(&agent, "c").await.expect("prepared");
    assert_eq!(prepared[0].cdi, ["knit.dev/metadata=uid-c_r0"]);
    let before = read(&node, &prepared[0].cdi[0]);
    assert_eq!(before["kind"], "DeviceMetadata");
    assert_eq!((&before["metadata"]["name"], &before["metadata"]["uid"]), (&json!("c"), &json!("uid-c")));
    let device = &before["requests"][0]["devices"][0];
    assert_eq!((&device["driver"], &device["name"]), (&json!("knit.dev"), &json!("blue")));
    assert_eq!(device["networkData"], Value::Null, "nobody knows it yet");

    let attached = agent.add(node.request("s1", "shop", "")).await.expect("attached");
    let made = &attached.attachments[1];
    let says = || read(&node, &prepared[0].cdi[0])["requests"][0]["devices"][0]["networkData"].clone();
    let became = json!({
        "interfaceName": "net1", "ips": [made.addresses[0].net.to_string()],
        "hardwareAddress": made.mac.to_string(),
    });
    assert_eq!(says(), became, "before its containers start");
    // Kubelet has it prepared again while the pod runs: what is known stays known.
    assert_eq!(prepare(&agent, "c").await.expect("prepared"), prepared);
    assert_eq!(says(), became);

    agent.core.release_claim(claim("c")).await.expect_err("in use");
    assert_eq!(says(), became);
    agent.del("s1").await.expect("detached");
    agent.core.release_claim(claim("c")).await.expect("released");
    assert_eq!(list(&cdi(&node)), Vec::<PathBuf>::new());
    assert_eq!(
        list(&node.dir.path().join("kubelet/plugins/knit.dev/dra-device-metadata")),
        Vec::<PathBuf>::new()
    );
}

#[tokio::test]
async fn files_of_claims_that_are_gone_go() {
    let (mut node, api) = (Node::new(), Api::default());
    pods(&mut node, &[("s1", &["stays"]), ("s2", &["gone"])]);
    api.allocate("stays", &["s1"], &["blue"], json!([]));
    api.allocate("gone", &["s2"], &["blue"], json!([]));
    let agent = start(&node, &api).await;
    prepare(&agent, "stays").await.expect("prepared");
    prepare(&agent, "gone").await.expect("prepared");
    // The agent ends, its ledger is lost, and what a write left half-made is there as well.
    drop(agent);
    std::fs::remove_file(node.config().ledger()).expect("lost");
    let own = node.dir.path().join("kubelet/plugins/knit.dev/dra-device-metadata");
    std::fs::create_dir_all(own.join("uid-half")).expect("a folder");
    std::fs::write(own.join("uid-half/0.new"), b"{").expect("a file");
    std::fs::write(cdi(&node).join("other.example.com_x.json"), b"{}").expect("another driver's");
    api.delete("gone");
    let agent = start(&node, &api).await;
    *api.away.lock().expect("nobody panicked") = true;
    agent.core.sweep_claims().await;
    assert_eq!(list(&own), [own.join("uid-gone"), own.join("uid-stays")], "nothing goes on a guess");
    *api.away.lock().expect("nobody panicked") = false;
    agent.core.sweep_claims().await;
    assert_eq!(list(&own), [own.join("uid-stays")]);
    let left: Vec<_> =
        list(&cdi(&node)).into_iter().filter_map(|p| p.file_name().map(ToOwned::to_owned)).collect();
    assert_eq!(left, ["knit.dev_metadata_uid-stays.json", "other.example.com_x.json"]);
}

#[tokio::test]
async fn a_claim_whose_files_cannot_be_written_is_not_prepared() {
    let (mut node, api) = (Node::new(), Api::default());
    pods(&mut node, &[("s1", &["c"])]);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    std::fs::write(cdi(&node), b"not a folder").expect("a file");
    let agent = start(&node, &api).await;
    let error = prepare(&agent, "c").await.expect_err("no files");
    assert!(error.to_string().contains("device metadata"), "{error}");
    std::fs::remove_file(cdi(&node)).expect("removed");
    prepare(&agent, "c").await.expect("tried again");
    // The name that its pod has for it is the tenant's to write.
    {
        let mut claims = api.claims.lock().expect("nobody panicked");
        let annotations = &mut claims.get_mut("shop/c").expect("a claim").metadata.annotations;
        let wrong = ("resource.kubernetes.io/pod-claim-name".to_owned(), "../../../../etc".to_owned());
        annotations.get_or_insert_default().extend([wrong]);
    }
    let error = prepare(&agent, "c").await.expect_err("a path");
    assert!(error.chain().contains("cannot be part of a path"), "{}", error.chain());
}
