//! Claims that an agent before this one left, and those that cannot be served.

use super::*;

/// Nobody looked at claims any more: reservations stayed, and kubelet could not end pods.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_an_earlier_agent_were_left_alone_when_the_next_one_had_dra_off() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let socket = kubelet_dir.join("plugins/knit.dev/dra.sock");
    let config = || {
        let serve = ServeClaims::ThoseLeft;
        let dra = Some(DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve });
        AgentConfig { dra, ..node.config(Source::folder(node.path("objects"))) }
    };
    let agent = Agent::start(config()).await.expect("started");
    assert!(!socket.exists(), "there is no claim");
    let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
    let blue = Asked { network: "blue".into(), ..Asked::default() };
    let request = ClaimRequest { claim: claim.clone(), networks: vec![blue], pod: None };
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    agent.core().prepare_claim(request, soon).await.expect("reserved");
    agent.stop(Duration::from_secs(60)).await;

    let agent = Agent::start(config()).await.expect("started");
    assert!(socket.exists(), "kubelet can free it");
    // The folder has no such claim.
    let ledger = node.path("run").join("ledger");
    let records = || knit_ledger::read::<Entry>(&ledger).expect("the ledger").0.records.len();
    holds("it is freed, since it is gone", || records() == 0).await;
    agent.stop(Duration::from_secs(60)).await;
    let agent = Agent::start(config()).await.expect("started");
    assert!(!socket.exists(), "there is none any more");
    agent.stop(Duration::from_secs(60)).await;

    // Where kubelet's directory is not mounted, it starts all the same.
    // Work that went to another thread may hold the ledger for a moment after the agent has stopped.
    let open = || Files::open(&ledger);
    let (mut files, _) = eventually("the ledger", Duration::from_secs(60), open).await;
    let left = Reservation::new(Owner::claim(claim), 1).expect("a reservation");
    files.commit(Batch::new().put(left.into())).expect("recorded");
    drop(files);
    std::fs::remove_dir_all(&kubelet_dir).expect("removed");
    std::fs::write(&kubelet_dir, b"").expect("in the way");
    Agent::start(config()).await.expect("started").stop(Duration::from_secs(60)).await;
}

/// Kubelet takes a claim for prepared, the ledger was moved away, and the pod has not arrived yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_started_without_its_claim_after_the_ledger_had_been_moved_away() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let config = || {
        let dra = DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve: ServeClaims::All };
        AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) }
    };
    let agent = Agent::start(config()).await.expect("started");
    result(node.call(node.request(Command::Add, "a", "")).await);
    agent.stop(Duration::from_secs(60)).await;

    let ledger = node.path("run").join("ledger");
    std::fs::remove_file(&ledger).expect("moved away");
    let agent = Agent::start(config()).await.expect("started");
    let refused = node.call(node.request(Command::Add, "b", "")).await;
    assert!(format!("{refused:?}").contains("not known to the node agent yet"), "{refused:?}");
    // The pod that runs is not asked for.
    result(node.call(node.request(Command::Add, "a", "")).await);
    agent.stop(Duration::from_secs(60)).await;

    // After a reboot there is no ledger either, and nothing that had one.
    std::fs::remove_file(&ledger).expect("gone");
    node.kernel.restart();
    let agent = Agent::start(config()).await.expect("started");
    result(node.call(node.request(Command::Add, "b", "")).await);
    agent.stop(Duration::from_secs(60)).await;
}

/// Kubelet's directory was not there, or its path too long: the node had no network at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_did_not_start_since_claims_could_not_be_served() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::write(&kubelet_dir, b"").expect("in the way");
    let dra = DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve: ServeClaims::All };
    let config = AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) };
    let agent = Agent::start(config).await.expect("started");
    result(node.call(node.request(Command::Add, "a", "")).await);
    let status = node.path("objects").join("status");
    holds("the event", || contains(&status, "ClaimsNotServed")).await;
    std::fs::remove_file(&kubelet_dir).expect("removed");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let socket = kubelet_dir.join("plugins_registry/knit.dev-reg.sock");
    holds("claims are served", || socket.exists()).await;
    agent.stop(Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_said_nothing_while_its_pod_could_not_be_attached() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let result_of =
        json!({"request": "nic", "driver": "knit.dev", "pool": "knit-networks", "device": "blue"});
    node.put(
        "claim",
        &json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "shop", "uid": "u-c"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [result_of]}},
                "reservedFor": [{"resource": "pods", "name": "pod-a", "uid": "uid-a"}]}}),
    );
    node.put(
        "pod",
        &json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "pod-a", "namespace": "shop", "uid": "uid-a"},
            "spec": {"nodeName": "node-1", "containers": [],
                "resourceClaims": [{"name": "net", "resourceClaimName": "c"}]}}),
    );
    let dra = DraConfig { kubelet_dir, instance: None, serve: ServeClaims::All };
    let config = AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) };
    let agent = Agent::start(config).await.expect("started");
    let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    agent.core().prepare(claim, soon).await.expect("prepared");
    node.kernel.fail(Faults { attach: Some((0, knit_runtime::Reason::Internal)), ..Faults::default() });
    error_code(&node.call(node.request(Command::Add, "a", "")).await);
    let status = node.path("objects").join("status");
    holds("why it is not ready", || contains(&status, "told to fail")).await;
    result(node.call(node.request(Command::Add, "a", "")).await);
    holds("that it is", || contains(&status, "verified") && !contains(&status, "told to fail")).await;
    agent.stop(Duration::from_secs(60)).await;
}
