//! Garbage collection by the container runtime's list of sandboxes, with a runtime that also fails, hangs,
//! and forgets.

mod common;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Agent, Node, id, in_namespace, netns_of};
use knit_api::cri::v1 as wire;
use knit_node::reconcile::{Outcome, Pass};
use knit_node::{Door, Wishes};
use knit_types::sync::Locked;
use tokio::net::UnixListener;
use tonic::{Request, Response, Status};
use wire::runtime_service_server::{RuntimeService, RuntimeServiceServer};

/// How the container runtime answers.
#[derive(Clone, Debug)]
enum Mood {
    Lists(Vec<(String, bool)>),
    Fails,
    Hangs,
}

/// A container runtime that only lists.
#[derive(Clone)]
struct FakeCri(Arc<Mutex<Mood>>);

#[tonic::async_trait]
impl RuntimeService for FakeCri {
    async fn list_pod_sandbox(
        &self,
        _: Request<wire::ListPodSandboxRequest>,
    ) -> Result<Response<wire::ListPodSandboxResponse>, Status> {
        let mood = self.0.locked().clone();
        match mood {
            Mood::Lists(sandboxes) => {
                let items = sandboxes.into_iter().map(|(id, ready)| sandbox(id, ready)).collect();
                Ok(Response::new(wire::ListPodSandboxResponse { items }))
            }
            Mood::Fails => Err(Status::unknown("server is not initialized yet")),
            Mood::Hangs => std::future::pending().await,
        }
    }
}

fn sandbox(id: String, ready: bool) -> wire::PodSandbox {
    let state =
        if ready { wire::PodSandboxState::SandboxReady } else { wire::PodSandboxState::SandboxNotready };
    wire::PodSandbox {
        metadata: Some(wire::PodSandboxMetadata {
            name: format!("pod-{id}"),
            uid: format!("uid-{id}"),
            namespace: "shop".into(),
        }),
        id,
        state: state.into(),
    }
}

impl FakeCri {
    /// Serves on a socket until the test ends.
    fn serve(socket: &Path) -> Self {
        let fake = Self(Arc::new(Mutex::new(Mood::Fails)));
        let listener = UnixListener::bind(socket).expect("a socket");
        let clients = futures::stream::unfold(listener, |listener| async {
            let client = listener.accept().await.map(|(client, _)| client);
            Some((client, listener))
        });
        let service = RuntimeServiceServer::new(fake.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(async move { server.serve_with_incoming(Box::pin(clients)).await.expect("served") });
        fake
    }

    fn set(&self, mood: Mood) {
        *self.0.locked() = mood;
    }

    fn lists(&self, ids: &[&str]) {
        self.set(Mood::Lists(ids.iter().map(|id| ((*id).to_owned(), true)).collect()));
    }
}

/// A node with a container runtime, and an agent that asks it.
async fn start() -> (Node, FakeCri, Agent) {
    let mut node = Node::new();
    let socket = node.dir.path().join("cri.sock");
    node.cri_socket = Some(socket.clone());
    let cri = FakeCri::serve(&socket);
    let agent = node.start().await;
    (node, cri, agent)
}

async fn pass(agent: &Agent) -> Outcome {
    agent.core.reconcile(&Pass::default()).await
}

fn has(agent: &Agent, sandbox: &str) -> bool {
    !agent.core.list(Some(&id(sandbox))).is_empty()
}

#[tokio::test]
async fn what_the_container_runtime_no_longer_has_is_removed_though_its_namespace_is_there() {
    let (node, cri, agent) = start().await;
    for name in ["gone", "stays"] {
        agent.add(node.request(name, "shop", "blue")).await.expect("attached");
    }
    // A KNI client's pod, and a namespace that somebody attached by hand: neither is in the list.
    let mut other_door = node.request("kni", "shop", "");
    other_door.door = Door::Kni;
    agent.add(other_door).await.expect("attached");
    let mut by_hand = node.request("hand", "shop", "");
    (by_hand.pod.namespace, by_hand.pod.name, by_hand.wishes) = (None, None, Wishes::AsThePodSays);
    agent.add(by_hand).await.expect("attached");
    // This very process is in the namespace, so it lives whatever the list says.
    let inhabited = in_namespace(node.request("inhabited", "shop", ""), "/proc/self/ns/net");
    agent.add(inhabited).await.expect("attached");

    cri.lists(&["stays", "unknown-to-us"]);
    assert_eq!(pass(&agent).await.removed, 0, "one answer is not enough");
    assert!(has(&agent, "gone"));
    assert_eq!(pass(&agent).await.removed, 1);
    assert!(!has(&agent, "gone"));
    for name in ["stays", "kni", "hand", "inhabited"] {
        assert!(has(&agent, name), "{name}");
    }
    assert_eq!(pass(&agent).await, Outcome::default(), "and then all is well");
    assert_eq!(node.attachments().len(), 5, "two of `stays`, one of each other");
}

#[tokio::test]
async fn failing_hanging_and_empty_answers_remove_nothing() {
    let (node, cri, agent) = start().await;
    agent.add(node.request("a", "shop", "")).await.expect("attached");
    agent.add(node.request("b", "shop", "")).await.expect("attached");
    for mood in [Mood::Fails, Mood::Lists(Vec::new())] {
        cri.set(mood.clone());
        for _ in 0..4 {
            assert_eq!(pass(&agent).await, Outcome::default(), "{mood:?}");
        }
    }
    // One that says nothing holds a pass up for a moment, and nobody's request.
    cri.set(Mood::Hangs);
    let started = Instant::now();
    let (outcome, added) = tokio::join!(pass(&agent), agent.add(node.request("c", "shop", "")));
    added.expect("attached meanwhile");
    assert_eq!(outcome, Outcome::default());
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    // An answer, a restart of the runtime, another answer: never two in a row.
    for _ in 0..3 {
        cri.lists(&["b", "c"]);
        assert_eq!(pass(&agent).await.removed, 0);
        cri.set(Mood::Lists(Vec::new()));
        assert_eq!(pass(&agent).await.removed, 0);
    }
    assert_eq!(node.attachments().len(), 3);
}

#[tokio::test]
async fn a_runtime_that_was_never_there_changes_nothing() {
    let mut node = Node::new();
    node.cri_socket = Some(node.dir.path().join("nobody.sock"));
    let agent = node.start().await;
    let request = node.request("a", "shop", "");
    agent.add(request.clone()).await.expect("attached");
    assert_eq!(pass(&agent).await, Outcome::default());
    std::fs::remove_file(netns_of(&request)).expect("gone");
    assert_eq!(pass(&agent).await.removed, 1, "a namespace that is gone still counts");
}

#[tokio::test]
async fn a_sandbox_that_runs_keeps_its_network_though_its_namespace_is_not_to_be_seen() {
    let (node, cri, agent) = start().await;
    let request = node.request("a", "shop", "");
    agent.add(request.clone()).await.expect("attached");
    std::fs::remove_file(netns_of(&request)).expect("hidden");
    cri.lists(&["a"]);
    let outcome = pass(&agent).await;
    assert_eq!((outcome.removed, outcome.failed), (0, 1), "kept, and said");
    assert!(has(&agent, "a"));
    cri.set(Mood::Lists(vec![("a".into(), false)]));
    assert_eq!(pass(&agent).await.removed, 1, "it runs no longer");
    assert!(node.is_clean());
}

#[tokio::test]
async fn after_a_lost_ledger_pods_have_their_names_again_and_go_when_nothing_is_left() {
    let (node, cri, agent) = start().await;
    for name in ["named", "nameless"] {
        agent.add(node.request(name, "shop", "")).await.expect("attached");
    }
    drop(agent);
    std::fs::remove_dir_all(node.dir.path().join("run")).expect("the ledger is lost");
    // Their namespaces are mounted somewhere that the agent does not look.
    std::fs::rename(node.dir.path().join("netns"), node.dir.path().join("elsewhere")).expect("moved");
    node.kernel.forget_pods();
    cri.lists(&["named"]);
    let agent = node.start().await;
    assert_eq!(agent.outcome.adopted, 2);
    let objects = agent.core.list(Some(&id("named")));
    assert_eq!(objects.len(), 1);
    assert_eq!(agent.core.sandboxes().pod(&id("named")).and_then(|p| p.name), Some("pod-named".into()));
    assert_eq!(agent.core.sandboxes().pod(&id("nameless")).and_then(|p| p.name), None);

    assert_eq!(pass(&agent).await.removed, 0, "it may live");
    // Its namespace ends, and its interface with it.
    node.kernel.lose("nameless", "eth0");
    cri.set(Mood::Fails);
    assert_eq!(pass(&agent).await.removed, 1);
    assert!(!has(&agent, "nameless") && has(&agent, "named"));
}
