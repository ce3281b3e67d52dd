//! The door of claims, as kubelet uses it: registration, both versions of the calls, and pods that start with
//! what was prepared; whatever dies in between.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::claims::{Api, parameters, pods};
use common::{Agent, Node};
use futures::StreamExt as _;
use knit_api::kubelet::registration::registration_client::RegistrationClient;
use knit_api::kubelet::registration::{InfoRequest, RegistrationStatus};
use knit_api::kubelet::v1::dra_plugin_client::DraPluginClient;
use knit_api::kubelet::v1::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use knit_api::kubelet::{health_v1, v1beta1};
use knit_ledger::Entry;
use knit_node::front_door::dra::{DraConfig, DraDoor, ServeClaims};
use knit_node::testing::Life;
use knit_node::world::PodView;
use knit_node::{PodClaim, PodRequest, Reason};
use serde_json::json;
use tonic::transport::{Channel, Endpoint};

fn kubelet_dir(node: &Node) -> PathBuf {
    let path = node.dir.path().join("kubelet");
    std::fs::create_dir_all(path.join("plugins_registry")).expect("a folder");
    path
}

fn config(node: &Node, instance: &str) -> DraConfig {
    let serve = ServeClaims::All;
    DraConfig { kubelet_dir: kubelet_dir(node), instance: Some(instance.into()), serve, cdi_dir: None }
}

fn channel(socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).expect("an endpoint");
    endpoint.connect_lazy()
}

/// Serves claims; until the task ends.
fn serve(node: &Node, agent: &Agent, api: &Api) -> (tokio::task::JoinHandle<()>, Channel) {
    agent.core.use_claims(Arc::new(api.clone()), false);
    let door = DraDoor::open(&config(node, "u1")).expect("a door");
    let served = tokio::spawn(door.serve(agent.core.clone()));
    (served, channel(&kubelet_dir(node).join("plugins/knit.dev/dra-u1.sock")))
}

fn claims(names: &[&str]) -> Vec<Claim> {
    let claim = |name: &&str| Claim {
        namespace: "shop".into(),
        name: (*name).to_owned(),
        uid: format!("uid-{name}"),
    };
    names.iter().map(claim).collect()
}

async fn prepare(channel: &Channel, names: &[&str]) -> BTreeMap<String, NodePrepareResourceResponse> {
    let request = NodePrepareResourcesRequest { claims: claims(names) };
    let answer = DraPluginClient::new(channel.clone()).node_prepare_resources(request).await;
    answer.expect("an answer").into_inner().claims.into_iter().collect()
}

async fn unprepare(channel: &Channel, name: &str) -> String {
    let request = NodeUnprepareResourcesRequest { claims: claims(&[name]) };
    let answer = DraPluginClient::new(channel.clone()).node_unprepare_resources(request).await;
    let mut answers = answer.expect("an answer").into_inner().claims;
    answers.remove(&format!("uid-{name}")).expect("one for each claim").error
}

/// Whose each address is, of Network blue.
fn owners(node: &Node) -> BTreeSet<String> {
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    let leases = content.records.values().flat_map(|entry| match entry {
        Entry::Sandbox(record) => record.leases().collect::<Vec<_>>(),
        Entry::Reservation(reservation) => reservation.leases().collect(),
    });
    leases.filter(|l| l.network == "blue").map(|l| format!("{} {}", l.addresses, l.key)).collect()
}

fn request(node: &Node, sandbox: &str) -> PodRequest {
    node.request(sandbox, "shop", "")
}

fn interfaces(attached: &knit_node::Attached) -> Vec<(&str, &str)> {
    attached.attachments.iter().map(|a| (a.interface.as_str(), a.network.as_str())).collect()
}

#[tokio::test]
async fn kubelet_is_told_who_is_there_and_where() {
    let node = Node::new();
    let agent = node.start().await;
    let registry = kubelet_dir(&node).join("plugins_registry");
    // What a killed agent left, what another one listens on, and what is not ours.
    let (left, other) = (registry.join("knit.dev-u0-reg.sock"), registry.join("knit.dev-u2-reg.sock"));
    drop(std::os::unix::net::UnixListener::bind(&left).expect("a socket"));
    let _listening = std::os::unix::net::UnixListener::bind(&other).expect("a socket");
    let foreign = registry.join("knit.device-reg.sock");
    drop(std::os::unix::net::UnixListener::bind(&foreign).expect("a socket"));
    let (served, plugin) = serve(&node, &agent, &Api::default());
    assert!(!left.exists() && other.exists() && foreign.exists());

    let socket = registry.join("knit.dev-u1-reg.sock");
    let mut client = RegistrationClient::new(channel(&socket));
    let info = client.get_info(InfoRequest {}).await.expect("an answer").into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", "knit.dev"));
    assert_eq!(info.supported_versions[0], "v1.DRAPlugin");
    assert!(Path::new(&info.endpoint).is_absolute() && Path::new(&info.endpoint).exists(), "{info:?}");
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    client.notify_registration_status(status).await.expect("an answer");

    let mut health = health_v1::dra_resource_health_client::DraResourceHealthClient::new(plugin);
    let watch = health.node_watch_resources(health_v1::NodeWatchResourcesRequest {}).await;
    watch.expect("a stream").into_inner().next().await.expect("a first one").expect("told");

    served.abort();
    let _ = served.await;
    assert!(!socket.exists() && !Path::new(&info.endpoint).exists(), "kubelet is told that it is gone");
    assert!(other.exists());
    let bad = DraConfig { instance: Some("../x".into()), ..config(&node, "") };
    DraDoor::open(&bad).expect_err("not a socket's name");
}

#[tokio::test]
async fn each_claim_has_its_own_answer_and_the_same_again_changes_nothing() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["good"]), ("s2", &[])]);
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    api.allocate("good", &["s1"], &["blue", "gpu-0"], parameters(json!({"interface": "data0"})));
    api.allocate("closed", &["s1"], &["green"], json!([]));
    api.allocate("wrong", &["s1"], &["blue"], parameters(json!({"mtu": 9000})));
    api.allocate("other", &["s1"], &["blue"], parameters(json!({"network": "green"})));
    api.allocate("main", &["s1"], &["blue"], parameters(json!({"interface": "eth0"})));
    api.allocate("shared", &["s1", "s2"], &["blue"], json!([]));
    api.allocate("none", &["s1"], &["nowhere"], json!([]));
    let said = [
        ("good", ""),
        ("closed", "may not use Network green"),
        ("wrong", "mtu is not supported yet"),
        ("other", "parameters are for Network green"),
        ("main", "eth0 is the pod's main interface"),
        ("shared", "ResourceClaimTemplate"),
        ("none", "no Network for device nowhere"),
        ("missing", "does not exist"),
    ];
    let names: Vec<&str> = said.iter().map(|(name, _)| *name).collect();
    let answers = prepare(&plugin, &names).await;
    assert_eq!(answers.len(), said.len());
    for (name, says) in said {
        let answer = &answers[&format!("uid-{name}")];
        assert!(
            answer.error.contains(says) && answer.error.is_empty() == says.is_empty(),
            "{name}: {answer:?}"
        );
        assert_eq!(answer.devices.len(), usize::from(says.is_empty()), "{name}");
    }
    let device = &answers["uid-good"].devices[0];
    assert_eq!((device.request_names[0].as_str(), device.device_name.as_str()), ("r0", "blue"));
    assert_eq!(device.share_id.as_deref(), Some("share-0"));
    let before = owners(&node);
    assert_eq!(before.len(), 1, "{before:?}");
    assert_eq!(prepare(&plugin, &["good"]).await["uid-good"], answers["uid-good"]);

    // The older version of the calls.
    let claim = v1beta1::Claim { namespace: "shop".into(), name: "good".into(), uid: "uid-good".into() };
    let mut older = v1beta1::dra_plugin_client::DraPluginClient::new(plugin.clone());
    let again = v1beta1::NodePrepareResourcesRequest { claims: vec![claim.clone()] };
    let again = older.node_prepare_resources(again).await.expect("an answer").into_inner();
    assert_eq!(again.claims["uid-good"].devices[0].device_name, "blue");
    assert_eq!(owners(&node), before);
    let free = v1beta1::NodeUnprepareResourcesRequest { claims: vec![claim] };
    let freed = older.node_unprepare_resources(free).await.expect("an answer").into_inner();
    assert_eq!(freed.claims["uid-good"].error, "");
    assert_eq!(unprepare(&plugin, "good").await, "", "nothing prepared is success");
    assert_eq!(owners(&node), BTreeSet::new());

    // Another claim of the same name, and one whose object is another by now.
    let renamed = NodePrepareResourcesRequest {
        claims: vec![Claim { uid: "old".into(), ..claims(&["good"]).remove(0) }],
    };
    let answer = DraPluginClient::new(plugin).node_prepare_resources(renamed).await.expect("an answer");
    assert!(answer.into_inner().claims["old"].error.contains("recreated"));
}

#[tokio::test]
async fn a_pod_starts_with_its_claims_or_not_at_all() {
    let mut node = Node::new();
    let with: &[(&str, &[&str])] =
        &[("s1", &["c", "gpu"]), ("s2", &["c"]), ("s3", &[]), ("s4", &["lost"]), ("s5", &["mine"])];
    pods(&mut node, with);
    let host = PodView { uid: Some("uid-h".into()), host_network: true, ..PodView::default() };
    Arc::make_mut(&mut node.world.pods).insert(("shop".into(), "pod-h".into()), Arc::new(host));
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    // Nobody has a claim: a pod that is not known does not wait to be, and nobody is asked.
    agent.add(request(&node, "new")).await.expect("attached");
    assert_eq!(api.asked(), 0);

    api.allocate(
        "c",
        &["s1"],
        &["blue"],
        parameters(json!({"interface": "data0", "addresses": ["10.2.0.9"]})),
    );
    api.allocate("gpu", &["s1"], &["gpu-0"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    let attached = agent.add(request(&node, "s1")).await.expect("attached");
    assert_eq!(interfaces(&attached), [("eth0", "default"), ("data0", "blue")]);
    assert_eq!(attached.attachments[1].addresses[0].net.addr().to_string(), "10.2.0.9");
    assert_eq!(agent.add(request(&node, "s1")).await.expect("again").attachments, attached.attachments);
    let asked = api.asked();
    assert!(unprepare(&plugin, "c").await.contains("in use by sandbox s1"));
    agent.del("s1").await.expect("detached");
    agent.add(request(&node, "s1")).await.expect("the next sandbox");
    assert_eq!(api.asked(), asked, "another driver's claim is asked for once");

    // A second pod with the same claim, one that is not known, one without claims.
    let error = agent.add(request(&node, "s2")).await.expect_err("in use");
    assert!(error.to_string().contains("in use by sandbox s1"), "{error}");
    let error = agent.add(request(&node, "unknown")).await.expect_err("it may have a claim");
    assert!(error.to_string().contains("pods of its namespace have claims") && error.retryable(), "{error}");
    agent.add(request(&node, "s3")).await.expect("attached");

    // The ledger forgot it, and kubelet does not have it prepared again.
    api.allocate("lost", &["s4"], &["blue"], json!([]));
    let attached = agent.add(request(&node, "s4")).await.expect("attached");
    assert_eq!(interfaces(&attached)[1].1, "blue");
    agent.del("s4").await.expect("detached");
    assert_eq!(unprepare(&plugin, "lost").await, "");
    // Nobody can say whether it is ours; then it is another's; then it is allowed to nobody.
    *api.away.lock().expect("nobody panicked") = true;
    let error = agent.add(request(&node, "s5")).await.expect_err("the API server is away");
    assert!(error.retryable(), "{error}");
    *api.away.lock().expect("nobody panicked") = false;
    api.allocate("mine", &["s9"], &["blue"], json!([]));
    let error = agent.add(request(&node, "s5")).await.expect_err("another pod's");
    assert!(error.to_string().contains("not reserved for it"), "{error}");
    api.allocate("mine", &["s5"], &["green"], json!([]));
    let error = agent.add(request(&node, "s5")).await.expect_err("not for this namespace");
    assert_eq!(error.reason, Reason::NotAllowed, "{error}");
    // Nobody would ever attach what it has.
    api.allocate("host", &["h"], &["blue"], json!([]));
    assert!(prepare(&plugin, &["host"]).await["uid-host"].error.contains("hostNetwork"));
    assert_eq!(owners(&node).len(), 1, "{:?}", owners(&node));
}

#[tokio::test]
async fn a_network_of_other_nodes_is_refused_whatever_admission_or_the_scheduler_did() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"]), ("s2", &[])]);
    let racks = json!({"nodeSelector": {"matchLabels": {"rack": "a"}}, "allowedNamespaces": {"from": "All"}});
    let limited = common::network("blue", 2, "10.2.0.0/16", racks);
    Arc::make_mut(&mut node.world.networks).insert("blue".into(), Arc::new(limited));
    let api = Api::default();
    api.allocate("c", &["s1"], &["blue"], json!([]));
    let agent = node.start().await;
    let (_served, plugin) = serve(&node, &agent, &api);
    assert!(prepare(&plugin, &["c"]).await["uid-c"].error.contains("does not match node node-1"));
    let error = agent.add(node.request("s2", "shop", "blue")).await.expect_err("by annotation, too");
    assert_eq!(error.reason, Reason::Refused, "{error}");
    assert!(node.is_clean() && owners(&node).is_empty());
    agent.core.world().update(|world| {
        let nodes = Arc::make_mut(&mut world.nodes);
        let view = Arc::make_mut(nodes.get_mut(common::NODE).expect("a node"));
        view.labels.insert("rack".into(), "a".into());
    });
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    agent.add(node.request("s2", "shop", "blue")).await.expect("attached");
}

#[tokio::test]
async fn what_kubelet_forgot_is_freed_and_what_was_allocated_anew_is_reserved_anew() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"])]);
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    *api.away.lock().expect("nobody panicked") = true;
    assert_eq!(agent.core.sweep_claims().await, 0, "nothing is freed on a guess");
    *api.away.lock().expect("nobody panicked") = false;
    assert_eq!(agent.core.sweep_claims().await, 0, "it is there");
    api.allocate("c", &["s1"], &["other"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    assert_eq!(owners(&node), BTreeSet::new(), "it has another Network now");
    api.allocate("c", &["s1"], &["blue"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    assert_eq!(owners(&node).len(), 1);
    api.delete("c");
    assert_eq!(agent.core.sweep_claims().await, 1);
    assert_eq!(owners(&node), BTreeSet::new());
}

#[tokio::test]
async fn a_claim_that_was_given_to_another_pod_brought_it_the_network_of_the_one_before() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"]), ("s2", &["c"])]);
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    agent.add(request(&node, "s1")).await.expect("attached");
    // The first pod is deleted by force: the same claim is free for another one while its sandbox still runs.
    api.allocate("c", &["s2"], &["other"], json!([]));
    let error = prepare(&plugin, &["c"]).await.remove("uid-c").expect("an answer").error;
    assert!(error.contains("in use by sandbox s1"), "{error}");
    agent.del("s1").await.expect("detached");
    // Kubelet takes it for prepared and does not ask again.
    let attached = agent.add(request(&node, "s2")).await.expect("attached");
    assert_eq!(interfaces(&attached)[1].1, "other");
    assert_eq!(owners(&node), BTreeSet::new(), "what the first one had of blue is free");
    agent.del("s2").await.expect("detached");
    // The same Network for the next one: what is reserved is for that pod then.
    api.allocate("c", &["s1"], &["other"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    let asked = api.asked();
    agent.add(request(&node, "s1")).await.expect("attached");
    assert_eq!(api.asked(), asked, "it was known whose it is");
}

#[tokio::test]
async fn a_claim_of_a_sandbox_that_is_gone_was_not_freed_before_the_next_pass() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"])]);
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    agent.add(request(&node, "s1")).await.expect("attached");
    assert!(unprepare(&plugin, "c").await.contains("in use by sandbox s1"), "its namespace is there");
    std::fs::remove_file(node.netns("s1")).expect("removed");
    assert_eq!(unprepare(&plugin, "c").await, "");
    assert!(owners(&node).is_empty() && node.is_clean());
}

/// The API server was slow; kubelet gave up, deleted the pod and released its claim meanwhile.
#[tokio::test]
async fn what_was_prepared_after_its_release_was_reserved_until_the_claim_was_gone() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"])]);
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    api.allocate("c", &["s1"], &["blue"], json!([]));
    let slow = Arc::new(tokio::sync::Notify::new());
    let gate = |gate| *api.gate.lock().expect("nobody panicked") = gate;
    gate(Some(Arc::clone(&slow)));
    let asked = async |times: usize| {
        while api.asked() < times {
            tokio::task::yield_now().await;
        }
    };

    let (preparing, channel) = (plugin.clone(), ["c"]);
    let preparing = tokio::spawn(async move { prepare(&preparing, &channel).await });
    asked(1).await;
    assert_eq!(unprepare(&plugin, "c").await, "");
    slow.notify_one();
    let error = preparing.await.expect("an answer").remove("uid-c").expect("one for each claim").error;
    assert!(error.contains("was released while it was being prepared"), "{error}");
    assert_eq!(owners(&node), BTreeSet::new());

    // The same of a sandbox, which may take as long to find the claim.
    let (core, start) = (agent.core.clone(), request(&node, "s1"));
    let a_minute = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    let attaching = tokio::spawn(async move { core.attach(start, a_minute).await });
    asked(2).await;
    assert_eq!(unprepare(&plugin, "c").await, "");
    slow.notify_one();
    let error = attaching.await.expect("an answer").expect_err("its claim is released");
    assert!(error.retryable() && error.to_string().contains("was released"), "{error}");
    assert!(node.is_clean() && owners(&node).is_empty());

    gate(None);
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "", "kubelet asks again");
    assert_eq!(owners(&node).len(), 1);
}

#[tokio::test]
async fn a_pod_on_its_nodes_network_that_shares_a_claim_was_told_nothing() {
    let mut node = Node::new();
    pods(&mut node, &[("s1", &["c"])]);
    let claims = vec![PodClaim::Named("c".into())];
    let host = PodView { uid: Some("uid-h".into()), host_network: true, claims, ..PodView::default() };
    Arc::make_mut(&mut node.world.pods).insert(("shop".into(), "pod-h".into()), Arc::new(host));
    let agent = node.start().await;
    let api = Api::default();
    let (_served, plugin) = serve(&node, &agent, &api);
    agent.core.tell_host_pods();
    api.allocate("c", &["s1"], &["blue"], json!([]));
    assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "");
    agent.core.tell_host_pods();
    let (_, events) = agent.core.report().take().await;
    let told: Vec<_> = events.iter().filter(|event| event.reason == "ClaimNotAttached").collect();
    assert_eq!(told.len(), 1, "{events:?}");
    assert_eq!(told[0].pod.name.as_deref(), Some("pod-h"));
}

#[test]
fn killed_at_every_step_between_kubelets_calls_nothing_is_lost_or_leaked() {
    let mut kill_at = 0;
    let (mut prepared, mut attached) = (0, 0);
    loop {
        let mut node = Node::new();
        pods(&mut node, &[("s1", &["c"])]);
        let api = Api::default();
        api.allocate("c", &["s1"], &["blue"], json!([]));
        let life = Life::new(Some(kill_at));
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime().block_on(async {
            let scenario = async {
                let agent = node.start_with(&life).await;
                let (_served, plugin) = serve(&node, &agent, &api);
                let request = NodePrepareResourcesRequest { claims: claims(&["c"]) };
                let _ = DraPluginClient::new(plugin.clone()).node_prepare_resources(request).await;
                let _ = agent.add(request_of(&node)).await;
                let _ = agent.del("s1").await;
                let request = NodeUnprepareResourcesRequest { claims: claims(&["c"]) };
                let _ = DraPluginClient::new(plugin).node_unprepare_resources(request).await;
            };
            tokio::select! {
                () = life.over() => {}
                () = scenario => {}
            }
        });
        let completed = !life.is_over();
        runtime().block_on(async {
            let before = owners(&node);
            assert!(before.len() <= 1, "killed at {kill_at}: {before:?}");
            let agent = node.start().await;
            let (_served, plugin) = serve(&node, &agent, &api);
            let after = owners(&node);
            assert!(before.is_empty() || after.len() == 1, "killed at {kill_at}: {before:?} {after:?}");
            prepared += usize::from(after.iter().any(|o| o.contains("claim")));
            attached += usize::from(after.iter().any(|o| o.contains("sandbox")));
            // What kubelet does next: the pod's sandbox is gone, and it starts it again.
            agent.del("s1").await.expect("detached");
            assert_eq!(prepare(&plugin, &["c"]).await["uid-c"].error, "", "killed at {kill_at}");
            let has = agent.add(request_of(&node)).await.expect("attached");
            assert_eq!(interfaces(&has)[1].1, "blue", "killed at {kill_at}");
            agent.del("s1").await.expect("detached");
            assert_eq!(unprepare(&plugin, "c").await, "", "killed at {kill_at}");
            assert!(owners(&node).is_empty() && node.is_clean(), "killed at {kill_at}");
        });
        if completed {
            break;
        }
        kill_at += 1;
    }
    assert!(prepared > 3 && attached > 1, "{kill_at} steps: {prepared} {attached}");
}

fn request_of(node: &Node) -> PodRequest {
    request(node, "s1")
}
