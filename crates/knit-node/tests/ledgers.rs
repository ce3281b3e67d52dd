//! Ledgers of earlier versions, and records that cannot be read: what the agent makes of them.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Node, id};
use knit_ledger::{AttachmentState, Entry, SandboxRecord};
use knit_node::files::Files;
use knit_node::sandboxes::books::{Books, Store as _};
use knit_node::testing::Faults;
use knit_node::{Asked, ClaimRequest, Door, ObjectDoor, Reason};
use knit_runtime::{InterfaceName, Pod, PortMapping, Protocol};
use knit_types::ObjectRef;
use serde_json::{Value, json};

/// The agent's books on a copy of a ledger that an earlier version wrote.
fn books(fixture: &str) -> (tempfile::TempDir, Books) {
    let dir = tempfile::tempdir().expect("a directory");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../knit-ledger/tests/fixtures").join(fixture);
    let path = dir.path().join("ledger");
    std::fs::copy(from, &path).expect("a fixture");
    let (files, recovery) = Files::open(&path).expect("a ledger");
    assert_eq!(recovery, knit_ledger::Recovery::Clean);
    assert_eq!(files.unreadable().count(), 0);
    (dir, Books::open("node-1", Box::new(files), knit_ipam::Millis(30_000)))
}

fn shown(record: &SandboxRecord) -> Vec<String> {
    let line = |a: &knit_ledger::Attachment| {
        let (plan, details) = (a.plan(), a.details());
        let state = match a.state() {
            AttachmentState::Planned => "planned",
            AttachmentState::Attached(_) => "attached",
            AttachmentState::Detaching(Some(_)) => "leaving",
            AttachmentState::Detaching(None) => "leaving, never made",
        };
        let addresses = plan.lease.as_ref().map(|lease| lease.addresses.to_string()).unwrap_or_default();
        let flags = format!("main {} route {}", details.main, details.default_route);
        format!("{} {} [{addresses}] {flags} {state}", plan.interface, plan.network)
    };
    record.attachments().iter().map(line).collect()
}

#[test]
fn the_agent_reads_a_ledger_of_e3f7f38() {
    let (_dir, books) = books("ledger-e3f7f38");
    let get = |sandbox: &str| books.get(&id(sandbox)).expect("a record");
    let one = get(&"1".repeat(64));
    assert_eq!(
        shown(one),
        [
            "eth0 default [10.77.0.10,fd77::a] main true route true attached",
            "net1 blue [10.77.0.11,fd77::b] main false route false attached",
        ]
    );
    let [eth0, net1] = one.attachments() else { panic!("two interfaces") };
    let ports = [PortMapping {
        protocol: Protocol::Udp,
        host_port: 5353,
        container_port: 53,
        host_ip: Some("192.0.2.1".parse().expect("an address")),
    }];
    assert_eq!((&eth0.details().door, &eth0.details().ports[..]), (&Door::Cni("knit".into()), &ports[..]));
    assert_eq!(eth0.details().dns.options, ["ndots:5"]);
    let made = eth0.made().expect("it is attached");
    let pod = Pod {
        sandbox: id(&"1".repeat(64)),
        namespace: Some("shop".into()),
        name: Some("web-0".into()),
        uid: Some("u-1".into()),
    };
    assert_eq!((&made.pod, &one.runtime_pod()), (&pod, &pod));
    let nets: Vec<String> = made.addresses.iter().map(|a| a.net.to_string()).collect();
    assert_eq!(
        (nets, made.mtu, made.host.index),
        (vec!["10.77.0.10/32".into(), "fd77::a/128".into()], 1450, 42)
    );
    assert_eq!((made.routes.len(), made.pod_netns_inode), (2, 4_026_532_001));
    let more = ObjectDoor { name: "shop/more".into(), uid: None };
    assert_eq!(net1.details().door, Door::Object(more));
    assert_eq!(one.goes_with(net1).to_string(), "object shop/more");
    assert_eq!(net1.made().expect("it is attached").interface.as_str(), "net1");

    let planned = get("2-planned");
    assert_eq!(shown(planned), ["eth0 blue [10.77.0.12,fd77::c] main true route true planned"]);
    assert!(planned.attachments()[0].made().is_none());

    let leaving = get("3_leaving.x");
    assert_eq!(
        shown(leaving),
        [
            "eth0 default [10.77.0.13,fd77::d] main true route true leaving",
            "net1 blue [10.77.0.14,fd77::e] main false route false leaving, never made",
        ]
    );
    assert!(leaving.pod().is_none() && leaving.attachments().iter().all(|a| a.details().door == Door::Kni));

    let other = get("5-other");
    assert_eq!(shown(other), ["eth0 red [] main true route true attached"], "its runtime gave the addresses");
    assert_eq!(other.attachments()[0].plan().runtime, "example.com/other");
    assert_eq!(other.attachments()[0].made().expect("it is attached").network, "red");
    assert_eq!(books.records().count(), 4);
    assert_eq!(books.allocator.leases().count(), 5, "each address is somebody's");
}

#[test]
fn the_agent_reads_a_ledger_of_c14f8c8() {
    let (_dir, books) = books("ledger-c14f8c8");
    let get = |sandbox: &str| books.get(&id(sandbox)).expect("a record");
    assert_eq!(
        shown(get("one")),
        [
            "eth0 default [10.1.0.2] main true route true attached",
            "net1 blue [10.2.0.3] main false route false attached",
            "net2 other [10.4.0.3] main false route false attached",
        ]
    );
    assert_eq!(get("one").attachments()[0].details().ports[0].host_port, 8080);
    let three = get("three");
    assert_eq!(shown(three)[1], "net1 blue [10.2.0.9] main false route false attached");
    let object = ObjectDoor { name: "shop/more".into(), uid: Some("u-more".into()) };
    assert_eq!(three.attachments()[1].details().door, Door::Object(object));
    assert_eq!(get("four").attachments()[0].details().door, Door::Kni);
    assert!(shown(get("leaving")).iter().all(|line| line.ends_with("leaving")));
    for record in books.records() {
        for made in record.attachments().iter().filter_map(knit_ledger::Attachment::made) {
            assert_eq!(made.pod, record.runtime_pod());
        }
    }
    assert_eq!(books.allocator.leases().count(), 9);
}

/// containerd says `/var/run/netns`, which is a link to `/run/netns`, where the agent looks for namespaces.
#[tokio::test]
async fn a_running_pod_lost_its_interface_since_its_namespace_had_another_path() {
    let node = Node::new();
    let var = node.dir.path().join("var");
    std::os::unix::fs::symlink(node.dir.path().join("netns"), &var).expect("a link");
    let request = || common::in_namespace(node.request("s1", "shop", "blue"), var.join("s1"));
    let agent = node.start().await;
    let before = agent.add(request()).await.expect("attached");
    let attaches = node.kernel.attaches();
    drop(agent);
    std::fs::remove_file(node.config().ledger()).expect("lost");
    let agent = node.start().await;
    assert_eq!(agent.outcome.adopted, 2, "{:?}", agent.outcome);
    assert_eq!(agent.add(request()).await.expect("it runs"), before);
    assert_eq!(node.kernel.attaches(), attaches, "nothing is made again");
    // Another namespace is another sandbox.
    std::fs::rename(node.netns("s1"), node.dir.path().join("old")).expect("moved");
    node.netns("s1");
    agent.add(request()).await.expect("attached");
    assert_ne!(node.kernel.attaches(), attaches);
}

/// Writes one more frame behind a ledger that nobody has open.
fn append(path: &Path, change: &Value) {
    let content = serde_json::to_vec(&json!([change])).expect("JSON");
    let mut frame = (content.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(&crc32c::crc32c(&content).to_le_bytes());
    frame.extend_from_slice(&crc32c::crc32c(&frame).to_le_bytes());
    frame.extend_from_slice(&content);
    let mut bytes = std::fs::read(path).expect("a ledger");
    bytes.extend_from_slice(&frame);
    std::fs::write(path, bytes).expect("written");
}

/// What the ledger has of a sandbox, changed in one place.
fn changed(path: &Path, sandbox: &str, pointer: &str, value: Value) -> Value {
    let (content, _) = knit_ledger::read::<Entry>(path).expect("a ledger");
    let mut record = serde_json::to_value(&content.records[sandbox]).expect("JSON");
    *record.pointer_mut(pointer).expect("that field") = value;
    record
}

/// An interface name that no longer parses widened a detach of one interface to the whole sandbox; details
/// that did not parse were taken for none.
#[tokio::test]
async fn a_record_that_cannot_be_read_keeps_its_addresses_and_interfaces_until_its_del() {
    for (pointer, value) in [
        ("/attachments/1/interface", json!("default")),
        ("/attachments/0/parameters/door", json!({"Carrier": "pigeon"})),
        ("/created_at", json!("yesterday")),
    ] {
        let node = Node::new();
        let agent = node.start().await;
        let fixed = r#"[{"name":"blue","ips":["10.2.0.9"]}]"#;
        agent.add(node.request("s1", "shop", fixed)).await.expect("attached");
        agent.add(node.request("s2", "shop", "")).await.expect("attached");
        drop(agent);
        let ledger = node.config().ledger();
        append(&ledger, &json!({"put": changed(&ledger, "s1", pointer, value)}));

        // Again and again: the next agent says the same.
        for start in ["first", "second"] {
            let agent = node.start().await;
            let when = format!("{pointer}, {start} start");
            assert_eq!((agent.outcome.strays, agent.outcome.adopted), (0, 0), "{when}: {:?}", agent.outcome);
            agent.core.reconcile(&Default::default()).await;
            assert_eq!(node.attachments().len(), 3, "{when}: nothing of it is taken for a stray");
            assert_eq!(agent.core.list(None).len(), 1, "{when}: s2 is as it was");
            assert!(agent.core.metrics_text().contains("knit_node_unreadable_records 1"), "{when}");
            let said: Vec<_> = agent.core.report().take_of_node();
            assert!(
                said.iter().any(|e| e.reason == "RecordUnreadable" && e.message.contains("s1")),
                "{when}"
            );

            let error = agent.add(node.request("s1", "shop", fixed)).await.expect_err("it is not known");
            assert_eq!(error.reason, Reason::Damaged, "{when}: {error}");
            assert!(error.to_string().contains("sandbox s1 cannot be read"), "{when}: {error}");
            assert!(error.to_string().contains("delete the pod"), "{when}: {error}");
            let error = agent.core.check(id("s1")).await.expect_err("it is not known");
            assert_eq!(error.reason, Reason::Damaged, "{when}: {error}");
            let error = agent.add(node.request("s3", "shop", fixed)).await.expect_err("s1 has it");
            assert!(error.chain().contains("10.2.0.9"), "{when}: {}", error.chain());
            assert!(error.chain().contains("a record that cannot be read (sandbox s1)"), "{}", error.chain());
        }

        let agent = node.start().await;
        agent.del("s1").await.expect("detached");
        assert_eq!(node.attachments().len(), 1, "{pointer}: all of it is gone, and s2 is there");
        assert!(agent.core.metrics_text().contains("knit_node_unreadable_records 1"), "until a pass looks");
        agent.core.reconcile(&Default::default()).await;
        assert!(agent.core.metrics_text().contains("knit_node_unreadable_records 0"));
        agent.add(node.request("s3", "shop", fixed)).await.expect("free at last");
        let (content, _) = knit_ledger::read::<Entry>(&ledger).expect("a ledger");
        assert_eq!((content.records.len(), content.unreadable.len()), (2, 0), "{pointer}");
    }
}

#[tokio::test]
async fn a_record_that_cannot_be_read_goes_with_its_namespace() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("s1", "shop", "blue")).await.expect("attached");
    drop(agent);
    let ledger = node.config().ledger();
    append(&ledger, &json!({"put": changed(&ledger, "s1", "/attachments/0/state", json!("melted"))}));
    let agent = node.start().await;
    assert_eq!((node.attachments().len(), agent.outcome.removed), (2, 0));
    std::fs::remove_file(node.netns("s1")).expect("removed");
    assert_eq!(agent.core.reconcile(&Default::default()).await.removed, 1);
    assert!(node.is_clean());
}

#[tokio::test]
async fn while_a_record_cannot_be_read_no_network_is_taken_for_one_that_nobody_has() {
    let mut node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("s1", "shop", "blue")).await.expect("attached");
    drop(agent);
    let ledger = node.config().ledger();
    append(&ledger, &json!({"put": changed(&ledger, "s1", "/attachments", json!("none"))}));
    Arc::make_mut(&mut node.world.networks).remove("blue");
    let agent = node.start().await;
    assert_eq!(agent.outcome.failed, 0, "no runtime is asked to remove it: {:?}", agent.outcome);
    assert!(node.kernel.networks().contains_key("blue"));
    agent.del("s1").await.expect("detached");
    agent.core.reconcile(&Default::default()).await;
    assert!(!node.kernel.networks().contains_key("blue"), "now it is nobody's");
}

/// Each of them waited for it, one after the other, and the whole pass with them.
#[tokio::test(start_paused = true)]
async fn a_pass_waited_for_a_hung_runtime_once_for_each_record_that_cannot_be_read() {
    const PODS: usize = 40;
    let mut node = Node::new();
    let blocks = Arc::make_mut(&mut node.world.blocks);
    blocks.insert("default-1".into(), Arc::new(common::block("default", common::NODE, "10.1.0.0/24")));
    let agent = node.start().await;
    for number in 0..PODS {
        agent.add(node.request(&format!("s{number}"), "shop", "")).await.expect("attached");
    }
    drop(agent);
    let ledger = node.config().ledger();
    for number in 0..PODS {
        let sandbox = format!("s{number}");
        append(&ledger, &json!({"put": changed(&ledger, &sandbox, "/created_at", json!("yesterday"))}));
    }
    let agent = node.start().await;
    for number in 0..PODS {
        std::fs::remove_file(node.netns(&format!("s{number}"))).expect("removed");
    }
    node.other.fail(Faults { hang_detaches: true, ..Faults::default() });
    let (begun, limit) = (tokio::time::Instant::now(), node.config().detach_deadline);
    let outcome = agent.core.reconcile(&Default::default()).await;
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    assert_eq!((outcome.removed, outcome.failed), (0, PODS), "{outcome:?}");
    assert!(node.kernel.attachments().len() < PODS, "what others made does not wait for it");
    node.other.fail(Faults::default());
    assert_eq!(agent.core.reconcile(&Default::default()).await.removed, PODS);
    assert!(node.is_clean());
}

#[tokio::test]
async fn while_a_record_has_no_owner_that_can_be_read_nothing_is_taken_for_a_stray() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("s1", "shop", "")).await.expect("attached");
    drop(agent);
    let ledger = node.config().ledger();
    let nobody = changed(&ledger, "s1", "/sandbox", json!(7));
    append(&ledger, &json!({"put": nobody}));
    append(&ledger, &json!({"remove": "s1"}));
    let agent = node.start().await;
    agent.core.reconcile(&Default::default()).await;
    assert_eq!(node.attachments().len(), 1, "{:?}", agent.outcome);
    // Its address is nobody else's.
    let own = node.attachments()[0].addresses[0].net.addr();
    for n in 0..9 {
        let attached = agent.add(node.request(&format!("n{n}"), "shop", "")).await.expect("attached");
        assert_ne!(attached.attachments[0].addresses[0].net.addr(), own);
    }
}

#[tokio::test]
async fn one_interface_is_never_detached_as_the_whole_sandbox() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("s1", "shop", "blue,other")).await.expect("attached");
    let net1 = InterfaceName::new("net1").expect("a name");
    agent.core.detach_some(id("s1"), [net1].into()).await.expect("detached");
    let mut left: Vec<String> = node.attachments().iter().map(|a| a.interface.to_string()).collect();
    left.sort();
    assert_eq!(left, ["eth0", "net2"]);
}

/// Only a sandbox's end removed records; a claim has none.
#[tokio::test]
async fn what_a_claim_has_reserved_stayed_for_ever_if_its_record_could_not_be_read() {
    for by_kubelet in [true, false] {
        let node = Node::new();
        let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
        let prepare = || {
            let blue = Asked { network: "blue".into(), ..Asked::default() };
            ClaimRequest { claim: claim.clone(), networks: vec![blue], pod: None }
        };
        let soon = || tokio::time::Instant::now() + std::time::Duration::from_secs(60);
        let agent = node.start().await;
        agent.core.prepare_claim(prepare(), soon()).await.expect("reserved");
        drop(agent);
        let ledger = node.config().ledger();
        append(&ledger, &json!({"put": changed(&ledger, "claim:u-c", "/created_at", json!("yesterday"))}));

        let agent = node.start().await;
        let said = agent.core.report().take_of_node();
        let told = |e: &&knit_node::report::NodeEvent| e.message.contains("claim shop/c cannot be read");
        assert!(said.iter().any(|e| told(&e)), "{said:?}");
        let error = agent.core.prepare_claim(prepare(), soon()).await.expect_err("it is not known");
        assert_eq!(error.reason, Reason::Damaged, "{error}");
        assert!(error.to_string().contains("delete the pods"), "{error}");
        if by_kubelet {
            agent.core.release_claim(claim.clone()).await.expect("released");
        } else {
            // Kubelet forgot it, and its object is gone.
            agent.core.use_claims(Arc::new(common::claims::Api::default()), false);
            assert_eq!(agent.core.sweep_claims().await, 1);
        }
        let (content, _) = knit_ledger::read::<Entry>(&ledger).expect("a ledger");
        assert!(content.records.is_empty() && content.unreadable.is_empty(), "{by_kubelet}");
        let other = ClaimRequest { claim: ObjectRef { uid: "u-d".into(), ..claim.clone() }, ..prepare() };
        agent.core.prepare_claim(other, soon()).await.expect("reserved");
    }
}
