//! The container runtime's door, beside another CNI plugin: what pods get, what is refused, and what is made
//! up for after the agent or the runtime was away.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Agent, Node, id};
use knit_kernel::testing::eventually;
use knit_node::MainInterfaces;
use knit_node::front_door::nri::{NriDoor, Served};
use knit_node::testing::Faults;
use knit_nri::wire::{LinuxNamespace, LinuxPodSandbox, PodSandbox};
use knit_nri::{Plugin, Refusal, Runtime};
use tokio::time::Instant;

/// A node on which another plugin makes eth0.
fn node() -> Node {
    Node { main_interfaces: MainInterfaces::Foreign, ..Node::new() }
}

/// An agent, connected to a runtime of this version.
async fn connect(node: &Node, version: &str) -> (Agent, NriDoor) {
    let agent = node.start().await;
    let door = NriDoor::new(agent.core.clone(), Served::AnnotationsAndClaims);
    door.connected(&Runtime { name: "containerd".into(), version: version.into() });
    (agent, door)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A sandbox of this namespace, with these annotations.
fn pod(node: &Node, sandbox: &str, namespace: &str, annotations: &[(&str, &str)]) -> PodSandbox {
    let path = node.netns(sandbox).display().to_string();
    let linux = LinuxPodSandbox { namespaces: vec![LinuxNamespace { r#type: "network".into(), path }] };
    PodSandbox {
        id: sandbox.into(),
        name: format!("pod-{sandbox}"),
        uid: format!("uid-{sandbox}"),
        namespace: namespace.into(),
        annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        linux: Some(linux),
        ips: vec!["192.0.2.77".into()],
    }
}

fn blue(node: &Node, sandbox: &str) -> PodSandbox {
    pod(node, sandbox, "shop", &[("knit.dev/networks", "blue")])
}

/// The interfaces of all sandboxes.
fn interfaces(node: &Node) -> Vec<String> {
    node.attachments().iter().map(|a| format!("{}/{}/{}", a.pod.sandbox, a.interface, a.network)).collect()
}

#[tokio::test]
async fn a_pod_gets_its_further_networks_and_never_a_main_one() {
    let node = node();
    let (agent, door) = connect(&node, "v2.4.2").await;
    door.run_pod_sandbox(blue(&node, "a"), soon()).await.expect("it runs");
    assert_eq!(interfaces(&node), ["a/net1/blue"]);
    assert!(!node.kernel.networks().contains_key("default"), "another plugin's network is left alone");
    agent.core.readiness().now().expect("ready without the Network default");
    // Each container finds it as it is.
    for name in ["init", "main"] {
        let made = door.create_container(blue(&node, "a"), name.into(), soon()).await;
        assert_eq!(made, Ok(None));
    }
    assert_eq!(node.kernel.attaches(), 1);
    door.stop_pod_sandbox(blue(&node, "a"), soon()).await.expect("it stops");
    door.remove_pod_sandbox(blue(&node, "a"), soon()).await.expect("it is removed");
    assert!(node.is_clean() && agent.core.list(None).is_empty());
}

#[tokio::test]
async fn a_pod_that_asks_for_nothing_leaves_no_trace() {
    let node = node();
    let (agent, door) = connect(&node, "v2.4.2").await;
    let plain = || pod(&node, "a", "shop", &[("other.example/x", "y")]);
    // Not even its namespace must be known.
    let stranger = pod(&node, "b", "nobody-has-heard-of-it", &[]);
    let host = PodSandbox { linux: None, ..blue(&node, "c") };
    for pod in [plain(), stranger, host] {
        door.run_pod_sandbox(pod.clone(), soon()).await.expect("it runs");
        door.create_container(pod.clone(), "main".into(), soon()).await.expect("its container");
        door.stop_pod_sandbox(pod, soon()).await.expect("it stops");
    }
    assert_eq!((node.kernel.attaches(), agent.core.list(None).len()), (0, 0));
}

#[tokio::test]
async fn what_cannot_be_had_is_refused_and_nothing_is_left() {
    let node = node();
    let (agent, door) = connect(&node, "v2.4.2").await;
    let of =
        |namespace: &str, annotation: &str, text: &str| pod(&node, "a", namespace, &[(annotation, text)]);
    let route = r#"[{"name":"blue","default-route":["10.2.0.1"]}]"#;
    let cases = [
        (of("shop", "knit.dev/networks", "nowhere"), "does not exist"),
        (of("shop", "knit.dev/networks", "blue@eth0"), "eth0"),
        (of("shop", "knit.dev/networks", "a b"), "knit.dev/networks"),
        (of("shop", "knit.dev/networks", "green"), "allowedNamespaces"),
        (of("shop", "knit.dev/networks", "default"), "default"),
        (of("shop", "knit.dev/networks", route), "default-route"),
        (of("shop", "knit.dev/primary", "blue"), "another CNI plugin"),
        // Its namespace was promised another primary Network than it would have.
        (of("forest", "other", "x"), "primaryFor"),
    ];
    for (pod, words) in cases {
        let Err(Refusal(why)) = door.run_pod_sandbox(pod.clone(), soon()).await else {
            panic!("{:?} is let pass", pod.annotations)
        };
        assert!(why.contains(words), "{:?}: {why}", pod.annotations);
        let container = door.create_container(pod.clone(), "main".into(), soon()).await;
        assert!(container.is_err(), "{:?}", pod.annotations);
        assert!(node.is_clean() && agent.core.list(None).is_empty());
    }
}

#[tokio::test]
async fn a_main_interface_is_refused_to_every_other_door() {
    let node = node();
    let (agent, _) = connect(&node, "v2.4.2").await;
    let error = agent.add(node.request("a", "shop", "blue")).await.expect_err("not the agent's to make");
    assert!(error.chain().contains("another CNI plugin"), "{}", error.chain());
    assert!(node.is_clean());
}

#[tokio::test]
async fn where_a_refused_sandbox_leaks_its_containers_are_refused_until_it_is_whole() {
    let node = node();
    let (_agent, door) = connect(&node, "v2.1.4").await;
    let internal = Faults { attach: Some((0, knit_runtime::Reason::Internal)), ..Faults::default() };
    node.kernel.fail(internal.clone());
    door.run_pod_sandbox(blue(&node, "a"), soon()).await.expect("refusing it would break the runtime");
    assert!(node.is_clean());
    node.kernel.fail(internal.clone());
    let refused = door.create_container(blue(&node, "a"), "main".into(), soon()).await;
    assert!(refused.is_err(), "it has no network");
    node.kernel.fail(Faults::default());
    door.create_container(blue(&node, "a"), "main".into(), soon()).await.expect("kubelet tries again");
    assert_eq!(interfaces(&node), ["a/net1/blue"]);

    // A runtime that removes what is refused is told at once.
    door.connected(&Runtime { name: "containerd".into(), version: "v2.4.2".into() });
    node.kernel.fail(internal);
    assert!(door.run_pod_sandbox(blue(&node, "b"), soon()).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_connection_what_runs_is_attached_and_what_is_gone_is_removed() {
    let node = node();
    let (agent, door) = connect(&node, "v2.4.2").await;
    for sandbox in ["kept", "gone"] {
        door.run_pod_sandbox(blue(&node, sandbox), soon()).await.expect("it runs");
    }
    // The runtime restarts; one sandbox ends and one begins meanwhile, and nobody is told. A stopped one is
    // listed without its namespace being there.
    door.disconnected();
    assert!(agent.core.readiness().now().expect_err("not connected").contains("NRI"));
    std::fs::remove_file(node.netns("gone")).expect("removed");
    let (late, stopped) = (blue(&node, "late"), blue(&node, "stopped"));
    std::fs::remove_file(node.netns("stopped")).expect("removed");
    door.connected(&Runtime { name: "containerd".into(), version: "v2.4.2".into() });
    let listed = vec![blue(&node, "kept"), late, stopped, pod(&node, "plain", "shop", &[])];
    door.synchronize(listed, Default::default());
    eventually("what runs is attached, and nothing else", Duration::from_secs(60), || {
        let mut found = interfaces(&node);
        found.sort();
        found == ["kept/net1/blue", "late/net1/blue"]
    });
    assert_eq!(agent.core.list(Some(&id("gone"))), []);
    agent.core.readiness().now().expect("connected again");
}

#[tokio::test]
async fn an_agent_that_is_killed_finds_its_sandboxes_again() {
    let node = node();
    let (agent, door) = connect(&node, "v2.4.2").await;
    door.run_pod_sandbox(blue(&node, "a"), soon()).await.expect("it runs");
    let before = agent.core.list(None);
    drop((door, agent));
    let (agent, door) = connect(&node, "v2.4.2").await;
    door.synchronize(vec![blue(&node, "a")], Default::default());
    door.create_container(blue(&node, "a"), "next".into(), soon()).await.expect("its next container");
    assert_eq!(agent.core.list(None), before);
    assert_eq!(node.kernel.attaches(), 1, "nothing was made again");
    // CRI-O removes the namespace before it says that the sandbox stops.
    std::fs::remove_file(node.netns("a")).expect("removed");
    door.stop_pod_sandbox(blue_without_namespace(), soon()).await.expect("it stops");
    assert!(node.is_clean() && agent.core.list(None).is_empty());
}

fn blue_without_namespace() -> PodSandbox {
    PodSandbox { id: "a".into(), name: "pod-a".into(), namespace: "shop".into(), ..PodSandbox::default() }
}

#[tokio::test]
async fn many_pods_at_once_get_one_address_each() {
    let node = Arc::new(node());
    let (_agent, door) = connect(&node, "v2.4.2").await;
    let run = |n: usize| {
        let (door, pod) = (door.clone(), blue(&node, &format!("s{n}")));
        async move { door.run_pod_sandbox(pod, soon()).await }
    };
    let results = futures::future::join_all((0..8).map(run)).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let mut addresses: Vec<String> =
        node.attachments().iter().map(|a| a.addresses[0].net.to_string()).collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 8);
}

/// On a clock that stands still while something is done: what passes on it was waited for.
#[tokio::test(start_paused = true)]
async fn a_pod_that_waits_for_something_held_up_every_pod_of_its_node() {
    let mut node = Node { waits: Some(Duration::from_secs(3600)), ..node() };
    let block = Arc::make_mut(&mut node.world.blocks).remove("blue-1").expect("a block");
    let (agent, door) = connect(&node, "v2.4.2").await;
    let nowhere = pod(&node, "a", "shop", &[("knit.dev/networks", "nowhere")]);
    let begin = Instant::now();
    for n in 0..50 {
        for (pod, words) in [(&nowhere, "does not exist"), (&blue(&node, "b"), "no AddressBlock")] {
            let (began, deadline) = (Instant::now(), Instant::now() + Duration::from_millis(1800));
            let Err(Refusal(why)) = door.run_pod_sandbox(pod.clone(), deadline).await else {
                panic!("it has its network: {words}")
            };
            assert!(why.contains(words), "{why}");
            let limit = if n == 0 { Duration::from_secs(2) } else { Duration::from_millis(250) };
            assert!(n < 2 || began.elapsed() < limit, "{words}: {:?}", began.elapsed());
        }
    }
    // What was saved up, and 100 ms each.
    assert!(begin.elapsed() < Duration::from_secs(3 + 10 + 2), "{:?}", begin.elapsed());
    agent.core.world().update_networks(|world| {
        Arc::make_mut(&mut world.blocks).insert("blue-1".into(), block);
    });
    door.run_pod_sandbox(blue(&node, "b"), soon()).await.expect("kubelet tries again");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_pod_of_a_network_waits_for_its_block_and_starts_at_once() {
    // What a request may always wait is long here: this is not about how slow the machine is.
    let mut node = node();
    let block = Arc::make_mut(&mut node.world.blocks).remove("blue-1").expect("a block");
    let (agent, door) = connect(&node, "v2.4.2").await;
    let first = {
        let (door, pod) = (door.clone(), blue(&node, "a"));
        tokio::spawn(async move { door.run_pod_sandbox(pod, soon()).await })
    };
    let asked = || agent.core.networks().states().iter().any(|n| n.name == "blue" && n.problem.is_some());
    eventually("the Network is wanted", Duration::from_secs(60), asked);
    agent.core.world().update_networks(|world| {
        Arc::make_mut(&mut world.blocks).insert("blue-1".into(), block);
    });
    first.await.expect("no panic").expect("it starts at the first try");
    assert_eq!(interfaces(&node), ["a/net1/blue"]);
}
