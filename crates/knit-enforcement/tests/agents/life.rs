//! Policies over the life of pods and agents: in force before a pod starts, kept, repaired.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use knit_enforcement::Mode;
use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::as_stranger;
use knit_objects::Source;
use knit_testbed::echo::{connect, echo};
use serde_json::json;

use crate::support::*;

const WEB: fn() -> serde_json::Value = || json!({"app": "web"});

#[test]
fn a_new_pod_is_isolated_before_its_first_packet() {
    with_bed(|bed| async move {
        bed.put("deny", &deny("shop", "Egress"));
        for name in ["client", "server", "late"] {
            bed.pod_object("a", if name == "server" { "other" } else { "shop" }, name, &WEB());
        }
        let node = bed.node();
        let agent = node.start().await;
        let server = node.pod("other", "server").await;
        // It tries to connect from before it has an interface, and never stops: no packet may get through.
        std::fs::create_dir_all("/run/pods").expect("a directory");
        let space = NetNs::create("/run/pods/client").expect("a namespace");
        let (stop, got_through) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let target = SocketAddr::new(server.addresses[0], 8080);
        let hammer = std::thread::spawn({
            let (space, stop, got_through) =
                (space.try_clone().expect("a clone"), Arc::clone(&stop), Arc::clone(&got_through));
            move || {
                let mut tries = 0_usize;
                while !stop.load(Ordering::Relaxed) {
                    let made = space.run(|| {
                        std::net::TcpStream::connect_timeout(&target, Duration::from_millis(20)).is_ok()
                    });
                    got_through.fetch_add(usize::from(made.expect("in")), Ordering::Relaxed);
                    tries += 1;
                }
                tries
            }
        });
        let client = node.pod("shop", "client").await;
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "isolated when ADD answers");
        stop.store(true, Ordering::Relaxed);
        let tries = hammer.join().expect("it ended");
        assert!(tries > 3, "it was tried while the interface came up: {tries}");
        assert_eq!(got_through.load(Ordering::Relaxed), 0, "not one of {tries} got through");
        // The other family is no way around.
        assert!(!reaches(&client.space, server.addresses[1], REFUSED));
        assert!(reaches(&server.space, client.addresses[0], SOON), "only egress is isolated");
        bed.remove("deny");
        becomes("the policy is gone", &client.space, server.addresses[0], true).await;
        agent.stop(STOP).await;
    });
}

#[test]
fn a_pod_whose_labels_are_not_known_does_not_start_if_a_policy_may_select_it() {
    with_bed(|bed| async move {
        let selects = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]});
        bed.put("deny", &policy("shop", "deny", &selects));
        let node = bed.node();
        let agent = node.start().await;
        // Nobody can select it: it does not wait.
        let other = node.pod("other", "other-pod").await;
        let plain = json!({"io.kubernetes.cri.pod-annotations": {}});
        let error = node.add_with("shop", "unknown", &plain).await.expect_err("it is not admitted");
        assert!(error.contains("labels have not arrived"), "{error}");
        bed.pod_object("a", "shop", "unknown", &WEB());
        let pod = node.pod("shop", "unknown").await;
        assert!(!reaches(&other.space, pod.addresses[0], REFUSED));
        // Its labels change, and with them what policies say.
        bed.pod_object("a", "shop", "unknown", &json!({"app": "db"}));
        becomes("it is not selected any more", &other.space, pod.addresses[0], true).await;
        bed.pod_object("a", "shop", "unknown", &WEB());
        becomes("it is selected again", &other.space, pod.addresses[0], false).await;
        agent.stop(STOP).await;
    });
}

#[test]
fn what_is_in_force_outlives_the_agent_and_is_repaired_when_somebody_flushes_it() {
    with_bed(|bed| async move {
        bed.put("deny", &deny("shop", "Ingress"));
        bed.pod_object("a", "shop", "server", &WEB());
        bed.pod_object("a", "other", "client", &WEB());
        let node = bed.node();
        let agent = node.start().await;
        let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
        assert!(!reaches(&client.space, server.addresses[0], REFUSED));
        let node_space = node.space.try_clone().expect("a clone");
        assert!(reaches(&node_space, server.addresses[0], SOON), "the node's own probes always arrive");
        agent.stop(STOP).await;
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "without an agent");
        let agent = node.start().await;
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "with the next one");
        // As `nft flush ruleset`.
        flush(&node.space);
        becomes("it is repaired", &client.space, server.addresses[0], false).await;
        let text = agent.core().metrics_text();
        assert!(text.contains("knit_policies 1"), "{text}");
        agent.stop(STOP).await;
    });
}

#[test]
fn a_remote_pod_is_let_in_once_its_slice_has_arrived_and_its_address_serves_another_later() {
    with_bed(|bed| async move {
        let from = json!([{"podSelector": {"matchLabels": {"role": "client"}}}]);
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": from}]});
        bed.put("allow", &policy("shop", "allow", &spec));
        bed.pod_object("a", "shop", "server", &WEB());
        bed.pod_object("b", "shop", "client", &json!({"role": "client"}));
        let (a, b) = (&bed.nodes[0], &bed.nodes[1]);
        let agents = [a.start().await, b.start().await];
        let (server, client) = (a.pod("shop", "server").await, b.pod("shop", "client").await);
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "nobody has told node a of it");
        bed.slice("default", "b", &[(&client, "uid-client", &json!({"role": "client"}))]);
        becomes("the slice has arrived", &client.space, server.addresses[0], true).await;
        assert!(reaches(&client.space, server.addresses[1], SOON), "both families");
        // Another pod has the address, and not the label.
        bed.slice("default", "b", &[(&client, "uid-another", &json!({}))]);
        becomes("the address is another pod's", &client.space, server.addresses[0], false).await;
        // Labels of a namespace: of the peer.
        let from = json!([{"namespaceSelector": {"matchLabels": {"open": "yes"}}}]);
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": from}]});
        bed.put("allow", &policy("shop", "allow", &spec));
        bed.namespace("shop", &json!({"team": "none", "open": "yes"}));
        becomes("the namespace is let in", &client.space, server.addresses[0], true).await;
        bed.namespace("shop", &json!({"team": "none"}));
        becomes("the namespace is not let in", &client.space, server.addresses[0], false).await;
        for agent in agents {
            agent.stop(STOP).await;
        }
    });
}

#[test]
fn a_live_connection_is_cut_when_policies_no_longer_allow_it_unless_its_network_keeps_them() {
    with_bed(|bed| async move {
        for (namespace, name) in [("sky", "server"), ("sky", "client"), ("shop", "kept"), ("shop", "keeper")]
        {
            bed.pod_object("a", namespace, name, &WEB());
        }
        let subnets = json!([{"cidr": "10.244.0.0/16"}, {"cidr": "fd44::/64"}]);
        write_network(&bed.objects, "default", 1, "Layer3", &subnets, &json!({"liveConnections": "Keep"}));
        let node = bed.node();
        let agent = node.start().await;
        let (server, client) = (node.pod("sky", "server").await, node.pod("sky", "client").await);
        let (kept, keeper) = (node.pod("shop", "kept").await, node.pod("shop", "keeper").await);
        let to = |pod: &Pod| pod.addresses[0].to_string();
        let (mut cut, _) = connect(&client.space, (&to(&server), 8080), SOON).expect("connected");
        let (mut stays, _) = connect(&keeper.space, (&to(&kept), 8080), SOON).expect("connected");
        bed.put("deny-sky", &deny("sky", "Ingress"));
        bed.put("deny-shop", &deny("shop", "Ingress"));
        becomes("new ones are refused", &client.space, server.addresses[0], false).await;
        becomes("here too", &keeper.space, kept.addresses[0], false).await;
        cut.set_read_timeout(Some(REFUSED)).expect("set");
        knit_testbed::wait::eventually("the connection is cut", SOON, || match echo(&mut cut) {
            Ok(()) => Err("it still answers"),
            Err(_) => Ok(()),
        })
        .await;
        echo(&mut stays).expect("this one is left alone");
        agent.stop(STOP).await;
    });
}

#[test]
fn an_agent_that_starts_while_the_api_is_away_goes_on_with_what_the_last_one_knew() {
    with_bed(|bed| async move {
        let selects = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]});
        bed.put("deny", &policy("shop", "deny", &selects));
        bed.pod_object("a", "shop", "server", &WEB());
        bed.pod_object("a", "other", "client", &json!({}));
        let node = bed.node();
        let agent = node.start().await;
        let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
        assert!(!reaches(&client.space, server.addresses[0], REFUSED));
        let cache = node.dir.join("state").join("policy-cache.json");
        knit_testbed::wait::eventually("it is on disk", SOON, || {
            let text = std::fs::read_to_string(&cache).map_err(|e| e.to_string())?;
            match text.contains("deny") && text.contains("server") && text.contains("client") {
                true => Ok(()),
                false => Err(text),
            }
        })
        .await;
        agent.stop(STOP).await;
        flush(&node.space);
        assert!(reaches(&client.space, server.addresses[0], SOON), "nothing is in force after a flush");
        let nobody = Source::Url("http://127.0.0.1:9".to_owned());
        let agent = node.start_from(nobody, Mode::On).await;
        becomes("it is in force again", &client.space, server.addresses[0], false).await;
        // A new sandbox of a pod that was known before.
        node.del(&server).await;
        let server = node.pod("shop", "server").await;
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "by the labels that are known");
        // One that nobody has heard of is not guessed about.
        let plain = json!({"io.kubernetes.cri.pod-annotations": {}});
        let error = node.add_with("shop", "stranger", &plain).await.expect_err("it is not admitted");
        assert!(error.contains("labels have not arrived"), "{error}");
        agent.stop(STOP).await;
    });
}

#[test]
fn what_is_in_force_stays_if_the_api_is_away_and_the_last_run_had_not_kept_a_pods_labels() {
    with_bed(|bed| async move {
        let selects = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]});
        bed.put("deny", &policy("shop", "deny", &selects));
        bed.pod_object("a", "shop", "server", &WEB());
        bed.pod_object("a", "other", "client", &json!({}));
        let node = bed.node();
        let agent = node.start().await;
        let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
        assert!(!reaches(&client.space, server.addresses[0], REFUSED));
        let cache = node.dir.join("state").join("policy-cache.json");
        knit_testbed::wait::eventually("it is on disk", SOON, || {
            let text = std::fs::read_to_string(&cache).map_err(|e| e.to_string())?;
            if text.contains("deny") && text.contains("server") { Ok(()) } else { Err(text) }
        })
        .await;
        agent.stop(STOP).await;
        // As if it had been killed right after the pod was made.
        forget_pods(&cache);
        let nobody = Source::Url("http://127.0.0.1:9".to_owned());
        let agent = node.start_from(nobody, Mode::On).await;
        let plain = json!({"io.kubernetes.cri.pod-annotations": {}});
        let error = node.add_with("shop", "stranger", &plain).await.expect_err("it is not admitted");
        assert!(error.contains("has not received all policies"), "{error}");
        assert!(!reaches(&client.space, server.addresses[0], REFUSED), "nobody took it away");
        agent.stop(STOP).await;
        // With the API, labels are known.
        let agent = node.start().await;
        let _late = node.pod("other", "late").await;
        assert!(!reaches(&client.space, server.addresses[0], REFUSED));
        agent.stop(STOP).await;
    });
}

#[test]
fn a_pod_is_isolated_as_long_as_its_sandbox_is_there_whatever_its_status_says() {
    with_bed(|bed| async move {
        let selects = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]});
        bed.put("deny", &policy("shop", "deny", &selects));
        let selects = json!({"podSelector": {"matchLabels": {"done": "yes"}}, "policyTypes": ["Egress"]});
        bed.put("done", &policy("shop", "done", &selects));
        bed.pod_object("a", "shop", "job", &WEB());
        let node = bed.node();
        let agent = node.start().await;
        let (job, other) = (node.pod("shop", "job").await, node.pod("other", "plain").await);
        assert!(reaches(&job.space, other.addresses[0], SOON));
        // Its deadline is over, and it takes its time to end.
        let object = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "shop", "name": "job", "uid": "uid-job",
                "labels": {"app": "web", "done": "yes"}},
            "spec": {"nodeName": "a", "containers": [{"name": "c"}]}, "status": {"phase": "Failed"}});
        bed.put("pod-shop-job", &object);
        becomes("its new label counts", &job.space, other.addresses[0], false).await;
        assert!(!reaches(&other.space, job.addresses[0], REFUSED));
        agent.stop(STOP).await;
    });
}

#[test]
fn an_agent_whose_policies_nobody_looks_after_any_more_is_neither_healthy_nor_ready() {
    with_bed(|bed| async move {
        let node = bed.node();
        let policies = node.enforcement(Mode::On);
        let agent = node.start_enforced(node.objects(), Arc::clone(&policies)).await;
        let http = agent.http().expect("it is served");
        knit_testbed::wait::eventually("it is ready", SOON, || {
            agent.core().assess();
            agent.core().readiness().now()
        })
        .await;
        assert!(get(http, "/healthz").contains(" 200 "));
        policies.ask(|_| panic!("a bug that a test asked for"));
        // Nobody asks for readiness: who waits for it hears of it.
        knit_testbed::wait::eventually("it is not ready", SOON, || match agent.core().readiness().now() {
            Err(problem) if problem.contains("policy enforcement has stopped") => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        let answer = get(http, "/healthz");
        assert!(answer.contains(" 503 ") && answer.contains("policy enforcement has stopped"), "{answer}");
        agent.stop(STOP).await;
    });
}

/// What the agent answers.
fn get(at: SocketAddr, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(at).expect("connected");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Takes pods out of the file of the last run.
fn forget_pods(cache: &std::path::Path) {
    let file = knit_ledger::DurableFile::<serde_json::Value>::new(cache.to_owned());
    let mut value = file.load().expect("the file").value.expect("a value");
    value["pods"] = json!([]);
    file.store(&value).expect("written");
}

/// As `nft flush ruleset`, for the tables of policies.
fn flush(space: &NetNs) {
    as_stranger(|| {
        let mut kernel = Kernel::open_in(space).expect("nftables");
        assert!(knit_policy_nft::remove_table(&mut kernel).expect("removed"), "they were there");
    });
}
