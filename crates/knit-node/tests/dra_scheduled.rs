//! Pods whose addresses the scheduler counts: it makes a claim for a Network that the pod has anyway, by its
//! annotation or as its main one, and the pod has one interface there, with the address of the claim.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::claims::{Api, parameters};
use common::{Agent, Node};
use knit_ledger::Entry;
use knit_node::front_door::annotation::wishes;
use knit_node::world::PodView;
use knit_node::{PodClaim, PodRequest, Reason, Wishes};
use knit_types::ObjectRef;
use serde_json::json;
use tokio::time::Instant;

const NETWORKS: &str = "knit.dev/networks";

fn said(networks: &str) -> Wishes {
    wishes(&BTreeMap::from([(NETWORKS.to_owned(), networks.to_owned())]))
}

/// Pods of namespace `shop`, each with its annotation and one claim of its own name, as the scheduler makes
/// it.
fn scheduled(node: &mut Node, api: &Api, pods: &[(&str, &str, &str)]) {
    let views = pods.iter().map(|(sandbox, networks, device)| {
        api.allocate(&format!("claim-{sandbox}"), &[sandbox], &[device], json!([]));
        let view = PodView {
            uid: Some(format!("uid-{sandbox}")),
            claims: vec![PodClaim::Named(format!("claim-{sandbox}"))],
            wishes: said(networks),
            ..PodView::default()
        };
        (("shop".to_owned(), format!("pod-{sandbox}")), Arc::new(view))
    });
    node.world.pods = Arc::new(views.collect());
}

async fn start(node: &Node, api: &Api) -> Agent {
    let agent = node.start().await;
    agent.core.use_claims(Arc::new(api.clone()), false);
    agent
}

fn claim(sandbox: &str) -> ObjectRef {
    let name = format!("claim-{sandbox}");
    ObjectRef { namespace: "shop".into(), uid: format!("uid-{name}"), name }
}

async fn prepare(agent: &Agent, sandbox: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    agent.core.prepare(claim(sandbox), deadline).await.expect("prepared");
}

/// The interfaces that a pod has now, as `network@interface address`, with `*` where its default route is.
fn attached(attached: &knit_node::Attached) -> Vec<String> {
    let one = |a: &knit_runtime::Attachment| {
        let addresses: Vec<String> = a.addresses.iter().map(|a| a.net.addr().to_string()).collect();
        format!("{}@{} {}", a.network, a.interface, addresses.join(","))
    };
    attached.attachments.iter().map(one).collect()
}

/// Whose each address of a Network is.
fn owners(node: &Node, network: &str) -> Vec<String> {
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    let leases = content.records.values().flat_map(|entry| match entry {
        Entry::Sandbox(record) => record.leases().collect::<Vec<_>>(),
        Entry::Reservation(reservation) => reservation.leases().collect(),
    });
    leases.filter(|l| l.network == network).map(|l| format!("{} {}", l.addresses, l.key)).collect()
}

#[tokio::test]
async fn a_pod_whose_address_is_counted_has_one_interface_and_one_address() {
    let (mut node, api) = (Node::new(), Api::default());
    let json = r#"[{"name":"blue","interface":"data0","ips":["10.2.0.9"],"default-route":["10.2.0.1"]}]"#;
    scheduled(&mut node, &api, &[("s1", "blue", "blue"), ("s2", json, "blue"), ("s3", "", "blue")]);
    let agent = start(&node, &api).await;
    for sandbox in ["s1", "s2", "s3"] {
        prepare(&agent, sandbox).await;
    }
    assert_eq!(owners(&node, "blue").len(), 3);
    let reserved = owners(&node, "blue");

    let first = agent.add(node.request("s1", "shop", "blue")).await.expect("attached");
    assert_eq!(first.attachments.len(), 2, "{:?}", attached(&first));
    assert_eq!(first.attachments[1].interface.as_str(), "net1");
    let second = agent.add(node.request("s2", "shop", json)).await.expect("attached");
    assert_eq!(attached(&second)[1], "blue@data0 10.2.0.9");
    // What nobody asked for by annotation is an interface of its own, as any claim's.
    let third = agent.add(node.request("s3", "shop", "")).await.expect("attached");
    assert_eq!(third.attachments[1].network, "blue");
    assert_eq!(owners(&node, "blue").len(), 3, "no second address for any of them");

    // The next sandbox has the same; when the claims are released, nothing is left.
    for (sandbox, annotation, before) in [("s1", "blue", &first), ("s2", json, &second)] {
        agent.del(sandbox).await.expect("detached");
        prepare(&agent, sandbox).await;
        let again = agent.add(node.request(sandbox, "shop", annotation)).await.expect("attached");
        assert_eq!(attached(&again)[1], attached(before)[1]);
        agent.del(sandbox).await.expect("detached");
    }
    agent.del("s3").await.expect("detached");
    assert_eq!(owners(&node, "blue"), reserved, "each claim has what it had");
    for sandbox in ["s1", "s2", "s3"] {
        agent.core.release_claim(claim(sandbox)).await.expect("released");
    }
    assert_eq!(owners(&node, "blue"), Vec::<String>::new());
    assert!(node.is_clean());
}

#[tokio::test]
async fn the_main_interface_has_the_address_that_was_counted() {
    let (mut node, api) = (Node::new(), Api::default());
    let own = json!({"primaryFor": {"matchLabels": {"team": "red"}}});
    let red = common::network("blue", 2, "10.2.0.0/16", own);
    Arc::make_mut(&mut node.world.networks).insert("blue".into(), Arc::new(red));
    let labels = BTreeMap::from([("team".to_owned(), "red".to_owned())]);
    Arc::make_mut(&mut node.world.namespaces).insert("shop".into(), Arc::new(labels.into_iter().collect()));
    scheduled(&mut node, &api, &[("s1", "", "blue")]);
    let agent = start(&node, &api).await;
    prepare(&agent, "s1").await;
    let reserved = owners(&node, "blue");
    let made = agent.add(node.request("s1", "shop", "")).await.expect("attached");
    assert_eq!(made.attachments.len(), 1, "{:?}", attached(&made));
    assert_eq!(made.attachments[0].interface.as_str(), "eth0");
    let address = made.attachments[0].addresses[0].net.addr().to_string();
    assert!(reserved[0].starts_with(&address), "{reserved:?} and {address}");
    agent.del("s1").await.expect("detached");
    assert_eq!(owners(&node, "blue"), reserved, "the claim has it again");
    // Kubelet has it prepared again after its own restart: that changes nothing.
    prepare(&agent, "s1").await;
    let again = agent.add(node.request("s1", "shop", "")).await.expect("attached");
    assert_eq!(attached(&again), attached(&made));

    // The ledger is lost while the pod runs: what the sandbox has is the claim's all the same.
    drop(agent);
    std::fs::remove_file(node.config().ledger()).expect("a ledger");
    let agent = start(&node, &api).await;
    prepare(&agent, "s1").await;
    assert_eq!(owners(&node, "blue").len(), 1, "{:?}", owners(&node, "blue"));
}

#[tokio::test]
async fn what_a_pod_asks_for_by_itself_is_not_replaced_by_what_its_claim_has() {
    let (mut node, api) = (Node::new(), Api::default());
    scheduled(&mut node, &api, &[("s1", "blue", "blue"), ("s2", "blue@data0", "blue")]);
    // A claim that names its interface means one of its own.
    api.allocate("claim-s2", &["s2"], &["blue"], parameters(json!({"interface": "own0"})));
    let agent = start(&node, &api).await;
    prepare(&agent, "s1").await;
    prepare(&agent, "s2").await;
    // The annotation was changed after the claim was prepared.
    let other = node.request("s1", "shop", r#"[{"name":"blue","ips":["10.2.0.77"]}]"#);
    let refused = |request: PodRequest| async { agent.add(request).await.expect_err("not what it asks for") };
    let error = refused(other).await;
    assert_eq!(error.reason, Reason::Refused, "{error}");
    assert!(error.to_string().contains("delete the pod"), "{error}");
    let error = refused(node.request("s2", "shop", "blue@data0")).await;
    assert!(error.to_string().contains("requests Network blue twice"), "{error}");
    assert_eq!(owners(&node, "blue").len(), 2);
    assert!(node.is_clean());
}
