//! Claims that an agent before this one left, and those that cannot be served.

use super::*;

/// A pod, and its claim as the scheduler allocated it.
fn put_claim_of_pod(node: &Node) {
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
}

/// Nobody looked at claims any more: reservations stayed, and kubelet could not end pods.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_an_earlier_agent_were_left_alone_when_the_next_one_had_dra_off() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let socket = kubelet_dir.join("plugins/knit.dev/dra.sock");
    let config = || {
        let serve = ServeClaims::ThoseLeft;
        let dra = Some(DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve, cdi_dir: None });
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
        let dra = DraConfig {
            kubelet_dir: kubelet_dir.clone(),
            instance: None,
            serve: ServeClaims::All,
            cdi_dir: None,
        };
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
    let dra = DraConfig {
        kubelet_dir: kubelet_dir.clone(),
        instance: None,
        serve: ServeClaims::All,
        cdi_dir: None,
    };
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
    put_claim_of_pod(&node);
    let dra = DraConfig { kubelet_dir, instance: None, serve: ServeClaims::All, cdi_dir: None };
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

/// As a rolling upgrade with a surge has them: the second one starts while the first one serves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_agents_kubelet_is_sent_to_the_one_that_has_the_ledger() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    put_claim_of_pod(&node);
    let config = |instance: &str| {
        let (kubelet_dir, serve) = (kubelet_dir.clone(), ServeClaims::All);
        let dra = Some(DraConfig { kubelet_dir, instance: Some(instance.to_owned()), serve, cdi_dir: None });
        AgentConfig { dra, ..node.config(Source::folder(node.path("objects"))) }
    };
    let sockets = |instance: &str| {
        let registration = kubelet_dir.join(format!("plugins_registry/knit.dev-{instance}-reg.sock"));
        (registration.exists(), kubelet_dir.join(format!("plugins/knit.dev/dra-{instance}.sock")).exists())
    };
    let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
    let soon = || tokio::time::Instant::now() + Duration::from_secs(60);
    let ledger = node.path("run").join("ledger");
    let leases = || {
        let records = knit_ledger::read::<Entry>(&ledger).expect("the ledger").0.records;
        let leases = records.values().flat_map(|entry| match entry {
            Entry::Sandbox(record) => record.leases().collect::<Vec<_>>(),
            Entry::Reservation(reservation) => reservation.leases().collect(),
        });
        leases.map(|lease| format!("{} {}", lease.network, lease.addresses)).collect::<Vec<_>>()
    };

    let first = Agent::start(config("a")).await.expect("started");
    let waiting = tokio::spawn(Agent::start(config("b")));
    first.core().prepare(claim.clone(), soon()).await.expect("prepared");
    let prepared = leases();
    assert_eq!(prepared.len(), 1, "{prepared:?}");
    // Kubelet sends claims to whoever registered last, so nobody registers who could not answer.
    assert!(!waiting.is_finished());
    assert_eq!((sockets("a"), sockets("b")), ((true, true), (false, false)));
    first.stop(Duration::from_secs(60)).await;
    let second = waiting.await.expect("no panic").expect("started");
    assert_eq!((sockets("a"), sockets("b")), ((false, false), (true, true)));

    second.core().prepare(claim.clone(), soon()).await.expect("prepared by the first one");
    assert_eq!(leases(), prepared);
    result(node.call(node.request(Command::Add, "a", "")).await);
    result(node.call(node.request(Command::Del, "a", "")).await);
    second.core().release_claim(claim).await.expect("released");
    assert_eq!(leases(), Vec::<String>::new());
    second.stop(Duration::from_secs(60)).await;
}
