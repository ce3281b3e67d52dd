//! What a runtime has not announced is not asked of it; sockets that others can reach are not used; Services
//! of a foreign runtime's Networks are somebody else's.

mod common;
#[path = "runtimes/hung.rs"]
mod hung;
#[path = "runtimes/services.rs"]
mod services;

use std::future::pending;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::{NODE, Node, block, main_of, network};
use knit_api::conditions::node_network::{REASON_NOT_SET_UP, REASON_RUNTIME_DOWN, REASON_UNSUPPORTED};
use knit_cni::protocol::{Command, PROTOCOL_VERSION, Request};
use knit_ipam::Mac;
use knit_kernel::testing::{eventually, skip};
use knit_node::level::Followers;
use knit_node::proxy::{ProxyError, Running, ServiceProxy, ServicesState, Stopped};
use knit_node::reconcile::Pass;
use knit_node::testing::{FakeRuntime, Faults, Life};
use knit_node::{Core, Door, Parts, PodRequest, Reason};
use knit_runtime::{PortMapping, Protocol, feature, wire};
use knit_testbed::wait::holds_when_asked;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

const OTHER: &str = "example.com/other";

/// A core whose second runtime lacks some features.
async fn core_without(node: &Node, features: &[&str], proxy: Option<Arc<dyn ServiceProxy>>) -> Core {
    let config = node.config();
    let (ledger, _) = knit_node::files::Files::open(&config.ledger()).expect("the ledger");
    let core = Core::new(Parts {
        config,
        world: node.world.clone(),
        store: Box::new(ledger),
        proxy,
        policies: None,
    });
    let life = Life::default();
    core.runtimes()
        .add(Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &life)))
        .await
        .expect("ours");
    let other = FakeRuntime::new(OTHER, &node.other, &life).without(features);
    core.runtimes().add(Arc::new(other)).await.expect("the other");
    core
}

fn state(core: &Core, name: &str) -> knit_node::networks::NetworkState {
    core.networks().states().into_iter().find(|s| s.name == name).expect("the Network")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[tokio::test]
async fn a_runtime_was_asked_for_what_it_had_not_announced() {
    let mut node = Node::new();
    let open = json!({"class": "other", "allowedNamespaces": {"from": "All"}, "mtu": 1400});
    Arc::make_mut(&mut node.world.networks)
        .insert("other".into(), Arc::new(network("other", 4, "10.4.0.0/16", open)));
    for (lacks, named) in [(feature::LAYER3, "Layer3"), (feature::IPV4, "IPv4"), (feature::MTU, "Mtu")] {
        let core = core_without(&node, &[lacks], None).await;
        let refused = core.attach(node.request("s1", "shop", "other"), soon()).await.expect_err("refused");
        for words in [named, OTHER, "Network other"] {
            assert!(refused.message.contains(words), "{words}: {refused}");
        }
        let problem = state(&core, "other").problem.expect("a problem");
        assert_eq!((problem.reason, node.other.set_ups()), (REASON_UNSUPPORTED, 0), "{}", problem.message);
        assert!(node.is_clean(), "all or nothing");
        // The pod's other Network is not its business.
        core.attach(node.request("s2", "shop", ""), soon()).await.expect("attached");
        core.detach(common::id("s2"), None).await.expect("detached");
    }
}

#[tokio::test]
async fn a_runtime_without_network_setup_is_not_asked_to_set_up() {
    let node = Node::new();
    let core = core_without(&node, &[feature::NETWORK_SETUP], None).await;
    core.keep_network(&"other".into()).await;
    assert_eq!(state(&core, "other").problem, None);
    assert!(node.other.networks().is_empty(), "it was asked");
}

#[tokio::test]
async fn pods_ask_a_runtime_only_for_what_it_has() {
    let node = Node::new();
    for (lacks, asked) in [
        (feature::STATIC_ADDRESS, r#"[{"name": "other", "ips": ["10.4.0.7"]}]"#),
        (feature::STATIC_MAC, r#"[{"name": "other", "mac": "02:00:00:00:00:42"}]"#),
    ] {
        let core = core_without(&node, &[lacks], None).await;
        let refused = core.attach(node.request("s1", "shop", asked), soon()).await.expect_err("refused");
        assert_eq!(refused.reason, Reason::Refused);
        assert!(refused.message.contains(lacks) && refused.message.contains(OTHER), "{refused}");
        assert!(node.is_clean());
        // Without the wish it works; and who cannot be told a MAC chooses one.
        let made = core.attach(node.request("s1", "shop", "other"), soon()).await.expect("attached");
        let own_mac = made.attachments[1].mac == Mac([2, 0, 0, 0, 0, 1]);
        assert_eq!(own_mac, lacks == feature::STATIC_MAC, "{made:?}");
        core.detach(common::id("s1"), None).await.expect("detached");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_others_can_reach_were_used() {
    let node = Node::new();
    let core = core_without(&node, &[], None).await;
    let (dir, limit) = (core.config().runtimes_dir(), Duration::from_secs(5));
    std::fs::create_dir_all(&dir).expect("a directory");
    let socket = dir.join("late.sock");
    let (served, runtime) =
        (socket.clone(), FakeRuntime::new("example.com/late", &node.other, &Life::default()));
    tokio::spawn(async move { wire::serve(&served, Arc::new(runtime), pending()).await });
    eventually("it listens", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());
    let mode =
        |mode| std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).expect("a mode");
    let healthy = || core.runtimes().describe().into_iter().find(|r| r.name == "example.com/late");
    mode(0o666);
    core.runtimes().refresh(&dir, limit).await;
    assert!(healthy().is_none(), "a socket that everybody can reach is used");
    mode(0o600);
    core.runtimes().refresh(&dir, limit).await;
    assert!(healthy().expect("found now").healthy);
    // Opened later: it is said, where people look for it.
    mode(0o660);
    core.runtimes().refresh(&dir, limit).await;
    let now = healthy().expect("still known");
    assert!(!now.healthy && now.message.as_ref().is_some_and(|m| m.contains("mode 0660")), "{now:?}");
    // What is no socket at all is not called.
    std::fs::write(dir.join("file.sock"), b"").expect("written");
    core.runtimes().refresh(&dir, limit).await;
    assert_eq!(core.runtimes().describe().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_held_up_the_networks_of_all_others() {
    let node = Node::new();
    let core = core_without(&node, &[], None).await;
    core.keep_network(&"blue".into()).await;
    let following = core.clone();
    let following = tokio::spawn(async move { following.networks().follow().await });
    node.other.fail(Faults { hang_networks: true, ..Faults::default() });
    let (keeping, begun) = (core.clone(), Instant::now());
    let keeping = tokio::spawn(async move { keeping.keep_network(&"other".into()).await });
    for n in 2_u8..12 {
        core.world().update_networks(|world| {
            let block = block("blue", &format!("node-{n}"), &format!("10.2.{n}.0/28"));
            Arc::make_mut(&mut world.blocks).insert(format!("blue-{n}"), Arc::new(block));
        });
        // Longer than changes are gathered, and much shorter than a runtime may take.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let known = node.kernel.networks()["blue"].blocks.len();
        assert_eq!(known, usize::from(n), "{:?} after the other runtime began to hang", begun.elapsed());
    }
    // A pass waits for it, but not once for each thing that there is to do.
    let pass = tokio::time::timeout(Duration::from_secs(100), core.reconcile(&Pass::default())).await;
    assert!(pass.is_ok(), "a pass did not end");
    // When it answers again, it is told the newest.
    node.other.fail(Faults::default());
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(state(&core, "other").problem, None);
    following.abort();
    keeping.await.expect("it ended");
}

#[tokio::test]
async fn a_network_whose_runtime_is_gone_says_why_it_stays() {
    let node = Node::new();
    let core = core_without(&node, &[], None).await;
    core.keep_network(&"other".into()).await;
    node.other.fail(Faults { removals: usize::MAX, ..Faults::default() });
    core.world().update_networks(|world| drop(Arc::make_mut(&mut world.networks).remove("other")));
    core.networks().pass().await;
    let problem = state(&core, "other").problem.expect("it is still there");
    assert!(problem.message.contains("cannot be removed"), "{}", problem.message);
    node.other.fail(Faults::default());
    core.networks().pass().await;
    assert!(core.networks().states().iter().all(|state| state.name != "other"));
}

/// A node whose Network `other` is served by a runtime behind a socket with one more feature, with one pod on
/// it. No pass ever runs here.
async fn followed(node: &Node, more: &[&'static str]) -> (Core, Followers) {
    let config = node.config();
    let (ledger, _) = knit_node::files::Files::open(&config.ledger()).expect("the ledger");
    let core = Core::new(Parts {
        config,
        world: node.world.clone(),
        store: Box::new(ledger),
        proxy: None,
        policies: None,
    });
    let life = Life::default();
    let ours = FakeRuntime::new("knit.dev/linux", &node.kernel, &life);
    core.runtimes().add(Arc::new(ours)).await.expect("ours");
    let dir = core.config().runtimes_dir();
    std::fs::create_dir_all(&dir).expect("a directory");
    let socket = dir.join("other.sock");
    let (served, runtime) = (socket.clone(), FakeRuntime::new(OTHER, &node.other, &life).with(more));
    tokio::spawn(async move { wire::serve(&served, Arc::new(runtime), pending()).await });
    eventually("it listens", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());
    refresh(&core).await;
    core.attach(node.request("s1", "shop", "other"), soon()).await.expect("attached");
    assert_eq!(node.other.attachments().len(), 1);
    let mut followers = Followers::default();
    followers.keep_up(&core);
    if more.contains(&feature::WATCH) {
        eventually("it is followed", Duration::from_secs(60), || node.other.is_watched());
    }
    (core, followers)
}

async fn refresh(core: &Core) {
    core.runtimes().refresh(&core.config().runtimes_dir(), Duration::from_secs(5)).await;
}

/// Waits for something while runtimes are asked how they are, as the agent does every few seconds.
async fn eventually_asked(core: &Core, what: &str, condition: impl Fn() -> bool) {
    let asked = async || {
        refresh(core).await;
        condition()
    };
    holds_when_asked(what, asked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_began_again_and_cannot_be_watched_waited_for_a_pass() {
    let node = Node::new();
    let (core, _followers) = followed(&node, &[]).await;
    node.other.restart();
    eventually_asked(&core, "its Network is set up again", || node.other.networks().contains_key("other"))
        .await;
    eventually_asked(&core, "its interface is made again", || node.other.attachments().len() == 1).await;
    // What has all that it was told is not told again.
    let set_ups = node.other.set_ups();
    for _ in 0..20 {
        refresh(&core).await;
    }
    assert_eq!(node.other.set_ups(), set_ups);
    // It was away, and lost an interface meanwhile; its Network it still has.
    node.other.fail(Faults { unwell: Some("out of order".into()), ..Faults::default() });
    refresh(&core).await;
    let away = || core.runtimes().describe().iter().any(|r| r.name == OTHER && !r.healthy);
    eventually_asked(&core, "that is known", away).await;
    node.other.lose("s1", "net1");
    node.other.fail(Faults::default());
    eventually_asked(&core, "its interface is made again", || node.other.attachments().len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_was_not_ready_left_its_networks_ready() {
    let mut node = Node::new();
    let open = json!({"class": "other", "allowedNamespaces": {"from": "All"}});
    Arc::make_mut(&mut node.world.networks)
        .insert("second".into(), Arc::new(network("second", 5, "10.5.0.0/16", open)));
    Arc::make_mut(&mut node.world.blocks)
        .insert("second-a".into(), Arc::new(block("second", NODE, "10.5.0.0/28")));
    let (core, _followers) = followed(&node, &[]).await;
    core.attach(node.request("s2", "shop", "second"), soon()).await.expect("attached");
    let problem = |name: &str| state(&core, name).problem;
    refresh(&core).await;
    assert_eq!((problem("other"), problem("second")), (None, None));
    // One of its Networks is not ready: that one, and no other.
    let why = Some(("other".to_owned(), "its uplink is down".to_owned()));
    node.other.fail(Faults { network_unwell: why, ..Faults::default() });
    refresh(&core).await;
    let said = problem("other").expect("not ready");
    assert_eq!(said.reason, REASON_NOT_SET_UP);
    assert!(said.message.contains("its uplink is down"), "{}", said.message);
    assert_eq!(problem("second"), None);
    let refused = core.attach(node.request("s3", "shop", "other"), soon()).await.expect_err("refused");
    assert!(refused.message.contains("its uplink is down"), "{refused}");
    assert_eq!(refused.reason, Reason::NotReady);
    core.attach(node.request("s4", "shop", "second"), soon()).await.expect("attached");
    // All of it is not ready; nobody else is concerned.
    node.other.fail(Faults { unwell: Some("no licence".into()), ..Faults::default() });
    refresh(&core).await;
    for name in ["other", "second"] {
        let said = problem(name).expect("not ready");
        assert_eq!(said.reason, REASON_RUNTIME_DOWN);
        assert!(said.message.contains("no licence") && said.message.contains(OTHER), "{}", said.message);
    }
    core.attach(node.request("s5", "shop", ""), soon())
        .await
        .expect("the default Network is not its business");
    core.assess();
    core.readiness().now().expect("nor is the node");
    // Well again: nobody waits until that was noticed.
    node.other.fail(Faults::default());
    core.attach(node.request("s3", "shop", "other"), soon()).await.expect("attached");
    refresh(&core).await;
    assert_eq!((problem("other"), problem("second")), (None, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_networks_of_a_runtime_that_went_with_its_socket_were_ready() {
    let node = Node::new();
    let (core, _followers) = followed(&node, &[]).await;
    node.other.fail(Faults { unwell: Some("it is stopping".into()), ..Faults::default() });
    std::fs::remove_file(core.config().runtimes_dir().join("other.sock")).expect("removed");
    refresh(&core).await;
    assert!(core.runtimes().get(OTHER).is_none(), "it is gone");
    let said = state(&core, "other").problem.expect("not ready");
    assert_eq!(said.reason, REASON_RUNTIME_DOWN);
    assert!(said.message.contains(OTHER), "{}", said.message);
    let refused = core.attach(node.request("s2", "shop", "other"), soon()).await.expect_err("refused");
    assert_eq!(refused.reason, Reason::NotReady, "{refused}");
    assert!(refused.message.contains(OTHER), "{refused}");
}

/// One pod held the lock of the container runtime for as long as it is given, and so all pods of its node.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_hung_was_asked_again_while_every_pod_of_the_node_waited() {
    let node = Node { waits: Some(Duration::from_secs(3600)), ..Node::new() };
    let (core, _followers) = followed(&node, &[]).await;
    node.other.fail(Faults { unwell: Some("no licence".into()), ..Faults::default() });
    refresh(&core).await;
    node.other.fail(Faults { hang_status: true, ..Faults::default() });
    let request = PodRequest { door: Door::Nri, ..node.request("s2", "shop", "other") };
    let deadline = Instant::now() + Duration::from_millis(400);
    let refused = core.attach(request, deadline).await.expect_err("refused");
    // What it said last, and not that it did not answer within two seconds.
    assert!(refused.message.contains("no licence"), "{refused}");
}

/// It was told all of them at each question how it is, for as long as it ran.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_does_not_list_its_networks_is_told_them_once() {
    let node = Node::new();
    let (core, _followers) = followed(&node, &[]).await;
    node.other.fail(Faults { unlisted: true, ..Faults::default() });
    let before = node.other.set_ups();
    holds_when_asked("it is told again", async || {
        refresh(&core).await;
        node.other.set_ups() > before
    })
    .await;
    for _ in 0..50 {
        refresh(&core).await;
    }
    assert_eq!(node.other.set_ups(), before + 1);
}

#[tokio::test]
async fn a_runtime_was_asked_to_collect_garbage_that_had_not_announced_it() {
    let node = Node::new();
    for lacks in [&[][..], &[feature::COLLECT_GARBAGE]] {
        let core = core_without(&node, lacks, None).await;
        core.attach(node.request("s1", "shop", "other"), soon()).await.expect("attached");
        let runtime = core.runtimes().get(OTHER).expect("the runtime");
        let kept = runtime.collect_garbage(&[common::id("s1")]).await.expect("collected");
        assert!(kept.is_empty());
        let removed = runtime.collect_garbage(&[]).await.expect("collected");
        assert_eq!(removed.iter().map(|a| a.pod.sandbox.as_str()).collect::<Vec<_>>(), ["s1"]);
        assert!(node.other.attachments().is_empty());
        assert_eq!(node.other.garbage_calls() > 0, lacks.is_empty());
        node.other.fail(Faults::default());
        core.detach(common::id("s1"), None).await.expect("detached");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_foreign_runtime_lost_was_gone_until_the_next_pass() {
    let node = Node::new();
    let (core, _followers) = followed(&node, &[feature::WATCH]).await;
    let lost = node.other.attachments();
    node.other.lose("s1", "net1");
    eventually("it is made again", Duration::from_secs(60), || !node.other.attachments().is_empty());
    assert_eq!(node.other.attachments()[0].addresses, lost[0].addresses);
    // What the agent takes away itself stays away.
    core.detach(common::id("s1"), None).await.expect("detached");
    core.attach(node.request("s2", "shop", "other"), soon()).await.expect("attached");
    node.other.lose("s2", "net1");
    eventually("it is made again", Duration::from_secs(60), || !node.other.attachments().is_empty());
    assert_eq!(node.other.attachments()[0].pod.sandbox, common::id("s2"), "its events come in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_runtime_that_began_again_had_no_networks_until_the_next_pass() {
    let node = Node::new();
    let (core, _followers) = followed(&node, &[feature::WATCH]).await;
    node.other.restart();
    eventually("its Network is set up again", Duration::from_secs(60), || {
        node.other.networks().contains_key("other")
    });
    eventually("its interfaces are made again", Duration::from_secs(60), || {
        node.other.attachments().len() == 1
    });
    eventually("it is followed again", Duration::from_secs(60), || node.other.is_watched());
    drop(core);
}

#[tokio::test]
async fn a_socket_of_another_user_was_used() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can give a file to another user");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("theirs.sock");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    std::os::unix::fs::chown(&socket, Some(65534), None).expect("given away");
    let problem = knit_node::runtimes::closed_to_others(&socket).expect_err("refused");
    assert!(problem.contains("user 65534"), "{problem}");
}

/// Each sandbox that is gone waited for it, one after the other, and all others waited with them.
#[tokio::test(start_paused = true)]
async fn a_pass_waited_for_a_hung_runtime_once_for_each_sandbox_that_is_gone() {
    const PODS: usize = 100;
    let mut node = Node::new();
    let blocks = Arc::make_mut(&mut node.world.blocks);
    blocks.insert("default-1".into(), Arc::new(block("default", NODE, "10.1.0.0/24")));
    blocks.insert("other-1".into(), Arc::new(block("other", NODE, "10.4.0.0/24")));
    let agent = node.start().await;
    for number in 0..PODS {
        let sandbox = format!("one-{number}");
        agent.add(node.request(&sandbox, "shop", "other")).await.expect("a pod");
        std::fs::remove_file(node.netns(&sandbox)).expect("its namespace is gone");
    }
    node.other.fail(Faults { hang_detaches: true, ..Faults::default() });
    let (begun, limit) = (Instant::now(), agent.core.config().detach_deadline);
    let outcome = agent.core.reconcile(&Pass::default()).await;
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    // Nor is it asked for Networks that nobody knows.
    assert_eq!((outcome.removed, outcome.failed), (0, PODS + 1), "{outcome:?}");
    assert!(node.kernel.is_clean(), "what the other runtime made is gone");
    // It answers again: nothing is left.
    node.other.fail(Faults::default());
    agent.core.reconcile(&Pass::default()).await;
    assert!(node.is_clean());
}

#[tokio::test(start_paused = true)]
async fn recorded_dels_waited_for_a_hung_runtime_one_after_the_other() {
    const PODS: usize = 100;
    let mut node = Node::new();
    let blocks = Arc::make_mut(&mut node.world.blocks);
    blocks.insert("default-1".into(), Arc::new(block("default", NODE, "10.1.0.0/24")));
    blocks.insert("other-1".into(), Arc::new(block("other", NODE, "10.4.0.0/24")));
    let agent = node.start().await;
    let spool = knit_cni::paths::spool(&agent.core.config().run_dir);
    for number in 0..PODS {
        let sandbox = format!("one-{number}");
        agent.add(node.request(&sandbox, "shop", "other")).await.expect("a pod");
        let request = Request {
            version: PROTOCOL_VERSION,
            command: Command::Del,
            container_id: sandbox,
            netns: String::new(),
            ifname: "eth0".into(),
            args: knit_cni::Args::default(),
            path: String::new(),
            config: knit_cni::NetworkConfig { cni_version: "1.1.0".into(), ..Default::default() },
            timeout_ms: None,
        };
        knit_cni::spool::leave(&spool, &request).expect("noted");
    }
    node.other.fail(Faults { hang_detaches: true, ..Faults::default() });
    let (begun, limit) = (Instant::now(), agent.core.config().detach_deadline);
    agent.core.reconcile(&Pass::default()).await;
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    assert!(node.kernel.is_clean(), "what the other runtime made is gone");
    assert_eq!(std::fs::read_dir(&spool).expect("a folder").count(), PODS, "they are not done");
    node.other.fail(Faults::default());
    agent.core.reconcile(&Pass::default()).await;
    assert!(node.is_clean());
    assert_eq!(std::fs::read_dir(&spool).expect("a folder").count(), 0);
}
