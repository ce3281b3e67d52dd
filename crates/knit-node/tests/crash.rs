//! The agent is killed at every step, before and after each ledger write and each change of the kernel; the
//! next one leaves nothing behind and loses no pod.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use common::{Agent, Node, addresses, main_of};
use knit_ledger::{AttachmentState, Entry};
use knit_node::Reason;
use knit_node::testing::{Faults, Life};
use knit_runtime::{PortMapping, Protocol};

/// What the container runtime was told.
#[derive(Clone, Debug, Default)]
struct Told {
    /// Pods that were acknowledged, with their addresses, and whose DEL was not asked for yet.
    running: BTreeMap<String, Vec<(String, String)>>,
    /// Pods whose DEL was acknowledged.
    gone: BTreeSet<String>,
}

#[test]
fn killed_at_every_step() {
    let mut kill_at = 0;
    loop {
        let node = Node::new();
        let life = Life::new(Some(kill_at));
        let told = Arc::new(Mutex::new(Told::default()));
        run(async {
            tokio::select! {
                () = life.over() => {}
                () = scenario(&node, &life, &told) => {}
            }
        });
        let completed = !life.is_over();
        let told = told.lock().expect("nobody panicked").clone();
        run(afterwards(&node, &told, kill_at));
        if completed {
            assert!(kill_at > 40, "the scenario has only {kill_at} steps");
            break;
        }
        kill_at += 1;
    }
}

/// Each life is a runtime of its own: what it spawned dies with it.
fn run(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(work);
}

async fn scenario(node: &Node, life: &Life, told: &Mutex<Told>) {
    let agent = node.start_with(life).await;
    add(node, &agent, told, "a", "blue,other").await;
    add(node, &agent, told, "b", "").await;
    del(&agent, told, "a").await;
    add(node, &agent, told, "c", "blue").await;
    del(&agent, told, "b").await;
}

async fn add(node: &Node, agent: &Agent, told: &Mutex<Told>, sandbox: &str, networks: &str) {
    if let Ok(attached) = agent.add(node.request(sandbox, "shop", networks)).await {
        told.lock().expect("nobody panicked").running.insert(sandbox.to_owned(), addresses(&attached));
    }
}

async fn del(agent: &Agent, told: &Mutex<Told>, sandbox: &str) {
    told.lock().expect("nobody panicked").running.remove(sandbox);
    if agent.del(sandbox).await.is_ok() {
        told.lock().expect("nobody panicked").gone.insert(sandbox.to_owned());
    }
}

async fn afterwards(node: &Node, told: &Told, kill_at: usize) {
    let agent = node.start().await;
    let when = format!("killed at step {kill_at}: {told:?}");
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    // Ledger and kernel say the same, and nothing is half way.
    let mut recorded = BTreeSet::new();
    for record in content.records.values().filter_map(Entry::sandbox) {
        for attachment in record.attachments() {
            assert!(matches!(attachment.state(), AttachmentState::Attached(_)), "{when}: {attachment:?}");
            recorded.insert((record.sandbox().to_string(), attachment.plan().interface.to_string()));
        }
    }
    let kernel: BTreeSet<(String, String)> =
        node.attachments().iter().map(|a| (a.pod.sandbox.to_string(), a.interface.to_string())).collect();
    assert_eq!(recorded, kernel, "{when}");
    // No pod that was acknowledged lost anything; none that is gone is there; each has all or nothing.
    let mut listed: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for attachment in agent.core.list(None) {
        let entry = listed.entry(attachment.pod.sandbox.to_string()).or_default();
        entry.push((attachment.interface.to_string(), attachment.addresses[0].net.to_string()));
    }
    for (sandbox, addresses) in &told.running {
        assert_eq!(listed.get(sandbox), Some(addresses), "{when}");
    }
    for (sandbox, whole) in [("a", 3), ("b", 1), ("c", 2)] {
        let has = listed.get(sandbox).map_or(0, Vec::len);
        assert!(has == 0 || has == whole, "{when}: {sandbox} has {has} of {whole} interfaces");
        assert!(has == 0 || !told.gone.contains(sandbox), "{when}: {sandbox} is back");
    }
    // New pods can be added, and after all DELs nothing is left.
    agent.add(node.request("d", "shop", "blue")).await.expect("a new pod");
    for sandbox in ["a", "b", "c", "d"] {
        agent.del(sandbox).await.expect("detached");
    }
    assert!(node.is_clean(), "{when}");
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    assert!(content.records.is_empty() && content.unreadable.is_empty(), "{when}");
}

#[tokio::test]
async fn a_damaged_ledger_is_rebuilt_and_no_pod_notices() {
    let node = Node::new();
    let agent = node.start().await;
    let mut request = node.request("a", "shop", "blue");
    let ports =
        vec![PortMapping { protocol: Protocol::Tcp, host_port: 8080, container_port: 80, host_ip: None }];
    main_of(&mut request).ports.clone_from(&ports);
    let before = agent.add(request).await.expect("attached");
    drop(agent);
    let ledger = node.config().ledger();
    let mut bytes = std::fs::read(&ledger).expect("the ledger");
    let middle = bytes.len() / 3;
    for byte in &mut bytes[middle..middle + 8] {
        *byte ^= 0x5a;
    }
    std::fs::write(&ledger, bytes).expect("damaged");
    let agent = node.start().await;
    assert_eq!(agent.outcome.adopted, 2, "{:?}", agent.outcome);
    assert_eq!(agent.outcome.strays, 0);
    assert_eq!(agent.core.list(None), before.attachments);
    let (content, _) = knit_ledger::read::<Entry>(&ledger).expect("the ledger");
    let recorded = content.records.values().find_map(Entry::sandbox).expect("it is recorded again");
    let eth0 = recorded.attachment(&"eth0".parse().expect("a name")).expect("eth0");
    assert_eq!(eth0.details().ports, ports, "a repair would close its host ports");
    // The addresses are not given out a second time.
    let other = agent.add(node.request("b", "shop", "blue")).await.expect("attached");
    assert_ne!(addresses(&other), addresses(&before));
    agent.del("a").await.expect("detached");
    assert_eq!(node.attachments().len(), 2);
    // Its namespace was found again by its inode, so it is cleared away when that is gone.
    std::fs::remove_file(node.netns("b")).expect("removed");
    let outcome = agent.core.reconcile(&Default::default()).await;
    assert_eq!(outcome.removed, 1);
}

/// The damage hid that one pod had ended and another one got its address.
#[tokio::test]
async fn a_damaged_ledger_gives_no_running_pods_address_away() {
    for detach_fails in [false, true] {
        let node = Node::new();
        let fixed = r#"[{"name":"blue","ips":["10.2.0.9"]}]"#;
        let agent = node.start().await;
        agent.add(node.request("s1", "shop", fixed)).await.expect("attached");
        let ledger = node.config().ledger();
        let then = std::fs::read(&ledger).expect("the ledger");
        agent.del("s1").await.expect("detached");
        agent.add(node.request("s2", "shop", fixed)).await.expect("attached");
        drop(agent);
        std::fs::remove_file(node.netns("s1")).expect("removed");
        std::fs::write(&ledger, [&then[..], &[0x5a; 64]].concat()).expect("damaged");

        node.kernel.fail(Faults { detaches: usize::from(detach_fails), ..Faults::default() });
        let agent = node.start().await;
        assert_eq!(agent.outcome.adopted, 2, "{:?}", agent.outcome);
        // What could not be removed then is now.
        agent.core.reconcile(&Default::default()).await;
        let left: BTreeSet<String> =
            agent.core.list(None).iter().map(|a| a.pod.sandbox.to_string()).collect();
        assert_eq!(left, BTreeSet::from(["s2".to_owned()]));
        let asked = node.kernel.attaches();
        let error = agent.add(node.request("s3", "shop", fixed)).await.expect_err("s2 has it");
        assert!(error.chain().contains("pod-s2"), "detach fails: {detach_fails}: {}", error.chain());
        assert_eq!(node.kernel.attaches(), asked, "the runtime was not even asked");
        agent.del("s2").await.expect("detached");
        agent.add(node.request("s3", "shop", fixed)).await.expect("free at last");
    }
}

#[tokio::test]
async fn an_address_rests_though_the_agent_restarts() {
    let node = Node::new();
    let agent = node.start().await;
    let before = agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    agent.del("a").await.expect("detached");
    drop(agent);
    let agent = node.start().await;
    let after = agent.add(node.request("b", "shop", "blue")).await.expect("attached");
    let (before, after) = (addresses(&before), addresses(&after));
    assert!(before.iter().all(|address| !after.contains(address)), "{before:?} {after:?}");
}

/// Without it the agent did not start, and with a damaged one it gave out at once what had to rest.
#[tokio::test(start_paused = true)]
async fn a_list_of_resting_addresses_that_cannot_be_read_keeps_no_agent_from_starting() {
    type Damage = fn(&std::path::Path);
    let damages: [(&str, Damage); 2] = [
        ("another thing in its place", |path| {
            std::fs::remove_file(path).expect("removed");
            std::fs::create_dir_all(path.join("something")).expect("made");
        }),
        ("damaged", |path| {
            let mut bytes = std::fs::read(path).expect("read");
            let end = bytes.len();
            // In the middle of its first record, with a sound one behind it.
            bytes[end / 4] ^= 0xff;
            std::fs::write(path, bytes).expect("written");
        }),
    ];
    for (what, damage) in damages {
        let node = Node::new();
        let agent = node.start().await;
        agent.add(node.request("stays", "shop", "")).await.expect("attached");
        for sandbox in ["a", "b"] {
            agent.add(node.request(sandbox, "shop", "blue")).await.expect("attached");
            agent.del(sandbox).await.expect("detached");
        }
        drop(agent);
        let path = node.config().ledger().with_file_name("resting");
        damage(&path);
        let agent = node.start().await;
        assert_eq!(agent.core.list(None).len(), 1, "{what}: what runs is there");
        // Any free address may be one that has to rest.
        let error = agent.add(node.request("c", "shop", "")).await.expect_err(what);
        assert_eq!(error.reason, Reason::AddressesExhausted, "{what}: {error}");
        agent.del("stays").await.expect("detached");
        drop(agent);
        // And the next agent knows what rests.
        let agent = node.start().await;
        agent.add(node.request("d", "shop", "")).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        let aside = std::fs::read_dir(path.parent().expect("a folder")).expect("read").flatten();
        let aside = aside.filter(|f| f.file_name().to_string_lossy().starts_with("resting.")).count();
        assert!(aside >= 1, "{what}: it is kept for whoever wants to know");
    }
}

#[tokio::test]
async fn a_del_that_came_while_the_agent_was_away() {
    let node = Node::new();
    let agent = node.start().await;
    agent.add(node.request("a", "shop", "blue")).await.expect("attached");
    drop(agent);
    let del = |ifname: &str| knit_cni::protocol::Request {
        version: knit_cni::protocol::PROTOCOL_VERSION,
        command: knit_cni::protocol::Command::Del,
        container_id: "a".into(),
        netns: String::new(),
        ifname: ifname.into(),
        args: knit_cni::Args::default(),
        path: String::new(),
        config: knit_cni::NetworkConfig { cni_version: "1.1.0".into(), ..Default::default() },
        timeout_ms: None,
    };
    let spool = knit_cni::paths::spool(&node.config().run_dir);
    // One for another interface is not this pod's end.
    knit_cni::spool::leave(&spool, &del("eth1")).expect("noted");
    let agent = node.start().await;
    assert_eq!(agent.core.list(None).len(), 2);
    assert!(knit_cni::spool::notes(&spool).expect("read").is_empty(), "the note is done");
    drop(agent);
    knit_cni::spool::leave(&spool, &del("eth0")).expect("noted");
    let agent = node.start().await;
    assert!(node.is_clean());
    assert!(agent.core.list(None).is_empty());
    assert!(knit_cni::spool::notes(&spool).expect("read").is_empty(), "the note is done");
}
