//! Claims of pods beside another CNI plugin: attached when their sandbox runs, by NRI.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::claims::{Api, parameters, pods};
use common::{Agent, Node, id};
use knit_kernel::testing::eventually;
use knit_ledger::Entry;
use knit_node::MainInterfaces;
use knit_node::front_door::nri::{NriDoor, Served};
use knit_nri::wire::{LinuxNamespace, LinuxPodSandbox, PodSandbox};
use knit_nri::{Plugin, Refusal, Runtime};
use knit_types::ObjectRef;
use serde_json::json;
use tokio::time::Instant;

/// A node on which another plugin makes eth0, with these pods.
fn node(with: &[(&str, &[&str])]) -> Node {
    let mut node = Node { main_interfaces: MainInterfaces::Foreign, ..Node::new() };
    pods(&mut node, with);
    node
}

/// An agent that serves claims, connected to a runtime.
async fn connect(node: &Node, api: &Api) -> (Agent, NriDoor) {
    let agent = node.start().await;
    agent.core.use_claims(Arc::new(api.clone()), false);
    let door = door(&agent);
    (agent, door)
}

fn door(agent: &Agent) -> NriDoor {
    let door = NriDoor::new(agent.core.clone(), Served::AnnotationsAndClaims);
    door.connected(&Runtime { name: "containerd".into(), version: "v2.4.2".into() });
    door
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn claim(name: &str) -> ObjectRef {
    ObjectRef { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
}

fn pod(node: &Node, sandbox: &str, annotations: &[(&str, &str)]) -> PodSandbox {
    let path = node.netns(sandbox).display().to_string();
    PodSandbox {
        id: sandbox.into(),
        name: format!("pod-{sandbox}"),
        uid: format!("uid-{sandbox}"),
        namespace: "shop".into(),
        annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        linux: Some(LinuxPodSandbox { namespaces: vec![LinuxNamespace { r#type: "network".into(), path }] }),
        ips: Vec::new(),
    }
}

fn interfaces(node: &Node) -> Vec<String> {
    node.attachments().iter().map(|a| format!("{}/{}/{}", a.pod.sandbox, a.interface, a.network)).collect()
}

async fn refused(door: &NriDoor, pod: PodSandbox) -> String {
    match door.create_container(pod, "main".into(), soon()).await {
        Err(Refusal(why)) => why,
        Ok(_) => panic!("its container is let pass"),
    }
}

#[tokio::test]
async fn a_pods_claims_are_attached_beside_another_plugin_and_free_after_it() {
    let node = node(&[("s1", &["c"]), ("s2", &["c"]), ("s3", &["lost"]), ("s4", &[])]);
    let api = Api::default();
    let (agent, door) = connect(&node, &api).await;
    api.allocate("c", &["s1"], &["blue"], json!([]));
    agent.core.prepare(claim("c"), soon()).await.expect("prepared");
    // With an annotation besides.
    let with_both = pod(&node, "s1", &[("knit.dev/networks", "other")]);
    door.run_pod_sandbox(with_both.clone(), soon()).await.expect("it runs");
    let mut found = interfaces(&node);
    found.sort();
    assert_eq!(found, ["s1/net1/blue", "s1/net2/other"]);
    door.create_container(with_both, "main".into(), soon()).await.expect("its container");
    let why = refused(&door, pod(&node, "s2", &[])).await;
    assert!(why.contains("in use by sandbox s1"), "{why}");
    door.run_pod_sandbox(pod(&node, "s4", &[]), soon()).await.expect("it has no claim");
    // One that the ledger forgot, and one that nobody allocated.
    let why = refused(&door, pod(&node, "s3", &[])).await;
    assert!(why.contains("does not exist"), "{why}");
    api.allocate("lost", &["s3"], &["blue"], json!([]));
    door.run_pod_sandbox(pod(&node, "s3", &[]), soon()).await.expect("it is prepared now");
    for sandbox in ["s1", "s3", "s4"] {
        door.stop_pod_sandbox(pod(&node, sandbox, &[]), soon()).await.expect("it stops");
    }
    for name in ["c", "lost"] {
        agent.core.release_claim(claim(name)).await.expect("released");
    }
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    assert!(node.is_clean() && content.records.is_empty());
}

#[tokio::test]
async fn containers_of_running_pods_were_refused_while_the_api_was_away_after_a_restart() {
    let mut node = node(&[("s1", &["c"]), ("s2", &["c2"])]);
    let api = Api::default();
    let (agent, door) = connect(&node, &api).await;
    api.allocate("c", &["s1"], &["blue"], json!([]));
    agent.core.prepare(claim("c"), soon()).await.expect("prepared");
    door.run_pod_sandbox(pod(&node, "s1", &[]), soon()).await.expect("it runs");
    drop((agent, door));
    // The next agent knows no pod.
    node.world.pods = Arc::default();
    *api.away.lock().expect("nobody panicked") = true;
    let (_agent, door) = connect(&node, &api).await;
    door.create_container(pod(&node, "s1", &[]), "again".into(), soon()).await.expect("it runs already");
    assert_eq!((interfaces(&node).len(), node.kernel.attaches()), (1, 1));
    // One that has nothing yet may have a claim.
    let why = refused(&door, pod(&node, "s2", &[])).await;
    assert!(why.contains("not known to the node agent yet"), "{why}");
    // Another namespace at that path is another sandbox.
    std::fs::rename(node.netns("s1"), node.dir.path().join("old")).expect("moved");
    let why = refused(&door, pod(&node, "s1", &[])).await;
    assert!(why.contains("not known to the node agent yet"), "{why}");
}

/// Its claim was prepared a second time, and its sandbox then taken for one that lacks it, until the pod was
/// deleted.
#[tokio::test]
async fn containers_of_running_pods_were_refused_after_the_ledger_had_been_lost() {
    let node = node(&[("s1", &["c"]), ("s2", &["d"])]);
    let api = Api::default();
    let (agent, door) = connect(&node, &api).await;
    api.allocate("c", &["s1"], &["blue"], parameters(json!({"interface": "data0"})));
    api.allocate("d", &["s2"], &["blue", "other"], json!([]));
    for (sandbox, name) in [("s1", "c"), ("s2", "d")] {
        agent.core.prepare(claim(name), soon()).await.expect("prepared");
        door.run_pod_sandbox(pod(&node, sandbox, &[]), soon()).await.expect("it runs");
    }
    drop((agent, door));
    let before = node.attachments();
    let attaches = node.kernel.attaches();
    std::fs::remove_file(node.config().ledger()).expect("lost");
    // A kernel keeps sandboxes only, so that it is not known whose they are.
    node.kernel.forget_pods();

    let (agent, door) = connect(&node, &api).await;
    assert_eq!(agent.outcome.adopted, 3);
    for sandbox in ["s1", "s2"] {
        door.create_container(pod(&node, sandbox, &[]), "again".into(), soon()).await.expect("it runs");
    }
    // The same by kubelet, after its own restart.
    agent.core.prepare(claim("c"), soon()).await.expect("its sandbox has it");
    assert_eq!(
        (node.attachments().len(), node.kernel.attaches()),
        (before.len(), attaches),
        "nobody noticed"
    );
    let error = agent.core.release_claim(claim("c")).await.expect_err("in use");
    assert!(error.to_string().contains("in use by sandbox s1"), "{error}");
    for (sandbox, name) in [("s1", "c"), ("s2", "d")] {
        door.stop_pod_sandbox(pod(&node, sandbox, &[]), soon()).await.expect("it stops");
        agent.core.release_claim(claim(name)).await.expect("released");
    }
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    assert!(node.is_clean() && content.records.is_empty(), "{:?}", content.records.keys());
}

/// Of a pod with another driver's claim, and of one that the agent has no record of since it has nothing.
#[tokio::test]
async fn containers_of_pods_without_claims_of_networks_were_refused_while_the_api_was_away() {
    let mut node = node(&[("s1", &["c"]), ("gpu", &["gpu"]), ("plain", &[]), ("late", &["l"])]);
    let api = Api::default();
    let (agent, door) = connect(&node, &api).await;
    api.allocate("c", &["s1"], &["blue"], json!([]));
    api.allocate("gpu", &["gpu"], &["gpu-0"], json!([]));
    api.allocate("l", &["late"], &["blue"], json!([]));
    agent.core.prepare(claim("c"), soon()).await.expect("prepared");
    for sandbox in ["s1", "gpu", "plain"] {
        door.run_pod_sandbox(pod(&node, sandbox, &[]), soon()).await.expect("it runs");
    }
    // Its sandbox started while no agent was connected.
    agent.core.prepare(claim("l"), soon()).await.expect("prepared");
    drop((agent, door));
    // The next agent knows no pod at first.
    let known = std::mem::take(&mut node.world.pods);
    *api.away.lock().expect("nobody panicked") = true;
    let (agent, door) = connect(&node, &api).await;
    let sandboxes = ["s1", "gpu", "plain", "late"];
    let listed = sandboxes.map(|sandbox| pod(&node, sandbox, &[])).into();
    door.synchronize(listed, sandboxes.map(str::to_owned).into());
    for sandbox in ["s1", "gpu", "plain"] {
        let created = door.create_container(pod(&node, sandbox, &[]), "again".into(), soon()).await;
        assert!(created.is_ok(), "{sandbox}: {created:?}");
    }
    let why = refused(&door, pod(&node, "late", &[])).await;
    assert!(why.contains("not known to the node agent yet"), "something waits for it: {why}");
    let why = refused(&door, pod(&node, "plain", &[("knit.dev/networks", "blue")])).await;
    assert!(why.contains("not known to the node agent yet"), "it asks for something: {why}");
    let why = refused(&door, pod(&node, "new", &[])).await;
    assert!(why.contains("not known to the node agent yet"), "nothing has run in it: {why}");
    // That its claim is another driver's, the API server would say.
    agent.core.world().update(|world| world.pods = known);
    let created = door.create_container(pod(&node, "gpu", &[]), "again".into(), soon()).await;
    assert!(created.is_ok(), "{created:?}");
    door.stop_pod_sandbox(pod(&node, "gpu", &[]), soon()).await.expect("it stops");
    let why = refused(&door, pod(&node, "gpu", &[])).await;
    assert!(why.contains("the API server is away"), "what was stopped is another one: {why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_was_attached_without_its_claim_was_taken_for_whole() {
    let node = node(&[("s1", &["c"])]);
    let agent = node.start().await;
    let with_other = || pod(&node, "s1", &[("knit.dev/networks", "other")]);
    // Claims are not served.
    door(&agent).run_pod_sandbox(with_other(), soon()).await.expect("it runs");
    let api = Api::default();
    api.allocate("c", &["s1"], &["blue"], json!([]));
    agent.core.use_claims(Arc::new(api), false);
    agent.core.prepare(claim("c"), soon()).await.expect("prepared");
    let door = door(&agent);
    let why = refused(&door, with_other()).await;
    assert!(why.contains("attached without claim shop/c") && why.contains("delete the pod"), "{why}");
    let _ = agent.core.report().take().await;
    door.synchronize(vec![with_other()], Default::default());
    let told = || {
        let events = futures::FutureExt::now_or_never(agent.core.report().take());
        events.is_some_and(|(_, events)| events.iter().any(|e| e.message.contains("without claim shop/c")))
    };
    eventually("repair looks at its claims, too", Duration::from_secs(20), told);
    assert_eq!(agent.core.list(Some(&id("s1"))).len(), 1, "what it has stays");
}

/// On a clock that stands still while something is done: what passes on it was waited for.
#[tokio::test(start_paused = true)]
async fn a_pod_whose_claim_is_not_known_held_up_every_pod_of_its_node() {
    let mut node = node(&[("s1", &["c"])]);
    node.waits = Some(Duration::from_secs(3600));
    let api = Api::default();
    let (agent, door) = connect(&node, &api).await;
    // What the container runtime gives, of which the most may be waited at first.
    let (limit, waited) = (Duration::from_millis(1800), Duration::from_millis(1200));
    let deadline = || Instant::now() + limit;
    *api.hangs.lock().expect("nobody panicked") = true;
    let begin = Instant::now();
    let run = door.run_pod_sandbox(pod(&node, "s1", &[]), deadline()).await;
    let Err(Refusal(why)) = run else { panic!("it has its claim") };
    assert!(why.contains("is being read"), "{why}");
    assert!(begin.elapsed() < waited, "{:?}", begin.elapsed());
    *api.hangs.lock().expect("nobody panicked") = false;
    api.allocate("c", &["s1"], &["blue"], json!([]));
    door.run_pod_sandbox(pod(&node, "s1", &[]), deadline()).await.expect("kubelet tries again");
    // A pod that nobody knows, where others have claims.
    let begin = Instant::now();
    let run = door.run_pod_sandbox(pod(&node, "s2", &[]), deadline()).await;
    assert!(run.is_err() && begin.elapsed() < waited, "{run:?} {:?}", begin.elapsed());
    assert_eq!(agent.core.list(None).len(), 1);
}
