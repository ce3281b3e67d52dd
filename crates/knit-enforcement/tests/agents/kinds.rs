//! Kinds of policies and of Networks: where they act, and where they are left to others.

use knit_enforcement::Mode;
use knit_policy::model::{Protocol, Traffic};
use knit_policy::verdict::{Flow, State};
use serde_json::{Value, json};

use crate::support::*;

fn annotated(networks: &str) -> Value {
    json!({"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": networks}})
}

#[test]
fn policies_of_a_namespace_act_in_its_primary_network_routed_and_switched() {
    with_bed(|bed| async move {
        for space in ["sky", "forest"] {
            for name in ["one", "two"] {
                bed.pod_object("a", space, &format!("{space}-{name}"), &json!({"app": name}));
            }
        }
        let node = bed.node();
        let agent = node.start().await;
        let sky = (node.pod("sky", "sky-one").await, node.pod("sky", "sky-two").await);
        let forest = (node.pod("forest", "forest-one").await, node.pod("forest", "forest-two").await);
        for (one, two) in [&sky, &forest] {
            assert!(reaches(&one.space, two.addresses[0], SOON), "{} before any policy", one.name);
        }
        for space in ["sky", "forest"] {
            let selector = json!({"matchLabels": {"app": "two"}});
            let spec = json!({"podSelector": selector, "policyTypes": ["Ingress"]});
            bed.put(&format!("deny-{space}"), &policy(space, "deny", &spec));
        }
        for (one, two) in [&sky, &forest] {
            becomes(&format!("{} is isolated", two.name), &one.space, two.addresses[0], false).await;
            assert!(!reaches(&one.space, two.addresses[1], REFUSED), "{} in both families", two.name);
            assert!(reaches(&two.space, one.addresses[0], SOON), "only one direction, and one pod");
            assert!(reaches(&node.space, two.addresses[0], SOON), "the node's probes reach {}", two.name);
        }
        agent.stop(STOP).await;
    });
}

#[test]
fn a_multi_network_policy_acts_on_the_interface_that_it_is_for() {
    with_bed(|bed| async move {
        for name in ["one", "two"] {
            bed.pod_object("a", "shop", name, &json!({"app": name}));
        }
        let node = bed.node();
        let agent = node.start().await;
        let one = node.add_with("shop", "one", &annotated("blue")).await.expect("added");
        let two = node.add_with("shop", "two", &annotated("blue")).await.expect("added");
        let further = |pod: &Pod| pod.addresses.iter().copied().find(|a| a.to_string().starts_with("10.77."));
        let default =
            |pod: &Pod| pod.addresses.iter().copied().find(|a| a.to_string().starts_with("10.244."));
        let (blue, primary) = (further(&two).expect("in blue"), default(&two).expect("in default"));
        assert!(reaches(&one.space, blue, SOON) && reaches(&one.space, primary, SOON));
        let object = |networks: &str| {
            json!({"apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
                "metadata": {"namespace": "shop", "name": "deny",
                    "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks}},
                "spec": {"podSelector": {"matchLabels": {"app": "two"}}, "policyTypes": ["Ingress"]}})
        };
        bed.put("multi", &object("blue"));
        becomes("the interface in blue is isolated", &one.space, blue, false).await;
        assert!(reaches(&one.space, primary, SOON), "and the primary one is not");
        bed.put("multi", &object("*"));
        becomes("every interface is isolated", &one.space, primary, false).await;
        assert!(!reaches(&one.space, blue, REFUSED));
        agent.stop(STOP).await;
    });
}

#[test]
fn a_cluster_network_policy_denies_whatever_policies_of_namespaces_allow() {
    with_bed(|bed| async move {
        for (space, name) in [("shop", "server"), ("other", "client")] {
            bed.pod_object("a", space, name, &json!({}));
        }
        let node = bed.node();
        let agent = node.start().await;
        let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
        let open = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]});
        bed.put("open", &policy("shop", "open", &open));
        let names = |name: &str| json!({"matchLabels": {"kubernetes.io/metadata.name": name}});
        bed.put(
            "admin",
            &json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
                "metadata": {"name": "keep-out"},
                "spec": {"tier": "Admin", "priority": 10, "subject": {"namespaces": names("shop")},
                    "ingress": [{"action": "Deny", "from": [{"namespaces": names("other")}]}]}}),
        );
        becomes("it is denied", &client.space, server.addresses[0], false).await;
        bed.remove("admin");
        becomes("it is allowed again", &client.space, server.addresses[0], true).await;
        agent.stop(STOP).await;
    });
}

#[test]
fn policies_are_left_to_others_in_a_network_or_on_a_node() {
    with_bed(|bed| async move {
        bed.put("deny", &deny("shop", "Ingress"));
        for name in ["one", "two"] {
            bed.pod_object("a", "shop", name, &json!({}));
        }
        let node = bed.node();
        let agent = node.start().await;
        let (one, two) = (node.pod("shop", "one").await, node.pod("shop", "two").await);
        assert!(!reaches(&one.space, two.addresses[0], REFUSED));
        let subnets = json!([{"cidr": "10.244.0.0/16"}, {"cidr": "fd44::/64"}]);
        let settings = |who: &str| json!({"enforcement": who});
        write_network(&bed.objects, "default", 1, "Layer3", &subnets, &settings("Others"));
        becomes("the Network leaves it to others", &one.space, two.addresses[0], true).await;
        write_network(&bed.objects, "default", 1, "Layer3", &subnets, &settings("Knit"));
        becomes("the Network does not", &one.space, two.addresses[0], false).await;
        agent.stop(STOP).await;
        let agent = node.start_with(Mode::Off).await;
        becomes("the agent leaves it to others", &one.space, two.addresses[0], true).await;
        agent.stop(STOP).await;
    });
}

#[test]
fn a_cluster_service_that_a_network_reaches_over_its_uplink_is_judged_by_its_endpoints() {
    with_bed(|bed| async move {
        bed.pod_object("a", "kube-system", "dns", &json!({"k8s-app": "kube-dns"}));
        bed.pod_object("a", "sky", "client", &json!({}));
        let node = bed.node();
        let agent = node.start().await;
        let (dns, client) = (node.pod("kube-system", "dns").await, node.pod("sky", "client").await);
        bed.service("kube-dns", "10.96.0.10", &dns);
        let target = std::net::SocketAddr::from(([10, 96, 0, 10], 80));
        let becomes = async |what: &str, reachable: bool| {
            knit_testbed::wait::eventually(what, SOON, || {
                let found = reaches_port(&client.space, target, REFUSED);
                if found == reachable { Ok(()) } else { Err(format!("reachable: {found}")) }
            })
            .await;
        };
        becomes("it is served over the uplink", true).await;
        bed.put("deny", &deny("sky", "Egress"));
        becomes("it is denied", false).await;
        // By what is behind it: its pods, and their own port.
        let to = |labels: Value| {
            let names = json!({"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}});
            let to = json!([{"namespaceSelector": names, "podSelector": {"matchLabels": labels}}]);
            let egress = json!([{"to": to, "ports": [{"port": 8080}]}]);
            policy("sky", "dns", &json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": egress}))
        };
        bed.put("dns", &to(json!({"k8s-app": "kube-dns"})));
        becomes("its pods are allowed", true).await;
        bed.put("dns", &to(json!({"k8s-app": "another"})));
        becomes("other pods are allowed", false).await;
        agent.stop(STOP).await;
    });
}

#[test]
fn pods_of_a_network_keep_cluster_services_if_the_next_agent_starts_while_the_api_is_away() {
    with_bed(|bed| async move {
        bed.pod_object("a", "kube-system", "dns", &json!({"k8s-app": "kube-dns"}));
        bed.pod_object("a", "sky", "client", &json!({}));
        let node = bed.node();
        let agent = node.start().await;
        let (dns, client) = (node.pod("kube-system", "dns").await, node.pod("sky", "client").await);
        bed.service("kube-dns", "10.96.0.10", &dns);
        let names = json!({"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}});
        let egress = json!([{"to": [{"namespaceSelector": names}], "ports": [{"port": 8080}]}]);
        let spec = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": egress});
        bed.put("dns", &policy("sky", "dns", &spec));
        let target = std::net::SocketAddr::from(([10, 96, 0, 10], 80));
        let state = node.dir.join("state");
        knit_testbed::wait::eventually("all of it is on disk, and in force", SOON, || {
            let read = |file: &str| match std::fs::read(state.join(file)) {
                Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
                Err(error) => Err(error.to_string()),
            };
            let (text, boot) = (read("policy-cache.json")?, read("boot-cache.log")?);
            let kept = text.contains("sky/dns") && text.contains("10.96.0.10") && text.contains("kube-dns");
            match kept && boot.contains("10.96.0.10") && reaches_port(&client.space, target, REFUSED) {
                true => Ok(()),
                false => Err(text),
            }
        })
        .await;
        agent.stop(STOP).await;
        let nobody = knit_objects::Source::Url("http://127.0.0.1:9".to_owned());
        let policies = node.enforcement(Mode::On);
        let agent = node.start_enforced(nobody, std::sync::Arc::clone(&policies)).await;
        knit_testbed::wait::eventually("policies are in force", SOON, || {
            let states = agent.core().networks().states();
            let blue = states.into_iter().find(|state| state.name == "blue").and_then(|s| s.policies);
            match blue {
                Some(state) if state.newest.is_some() && state.problem.is_none() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        let flow = Flow {
            network: "blue".into(),
            source: client.addresses[0],
            destination: target.ip(),
            traffic: Traffic::Port(Protocol::Tcp, target.port()),
            state: State::New,
        };
        let (answer, verdict) = std::sync::mpsc::channel();
        policies.ask(move |engine| {
            let _ = answer.send(engine.cluster().judge(&flow));
        });
        let verdict = verdict.recv().expect("an answer");
        assert!(verdict.egress.pod.is_some() && verdict.allowed(), "{verdict:?}");
        assert!(reaches_port(&client.space, target, SOON), "what its policy allows");
        agent.stop(STOP).await;
    });
}
