//! What a change costs in elements: it follows the change and not the cluster. And large or wrong input.

mod support;

use std::net::{IpAddr, Ipv4Addr};

use knit_policy::kubernetes as k8s;
use knit_policy::model::*;
use knit_policy::sets::{Change, Engine, Key};
use knit_policy::verdict::{Flow, State};
use proptest::prelude::*;
use support::lab::{cnp, policy, read};

fn pod(namespace: &str, name: &str, node: &str, address: u32, labels: &[(&str, &str)]) -> Pod {
    let address = IpAddr::from(Ipv4Addr::from(0x0a00_0000 + address));
    Pod {
        uid: format!("{namespace}-{name}").into(),
        node: node.into(),
        labels: labels.iter().copied().collect(),
        attachments: [Attachment { network: "default".into(), primary: true, addresses: [address].into() }]
            .into(),
        ..Pod::new(namespace, name)
    }
}

/// A node with ten pods of x, in a cluster of a thousand; one policy with selectors, one with a block.
fn engine() -> Engine {
    let mut engine = Engine::new("here");
    for i in 0..10 {
        engine.set_pod(pod("x", &format!("local-{i}"), "here", i, &[("app", "web")]));
    }
    for i in 0..1000 {
        engine.set_pod(pod(
            "x",
            &format!("far-{i}"),
            "there",
            1000 + i,
            &[("app", if i % 2 == 0 { "db" } else { "cache" })],
        ));
    }
    for text in [
        policy(
            "web",
            "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: \
                db}}}], ports: [{port: 80}]}]}",
        ),
        policy(
            "net",
            "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0, except: \
                [10.0.0.0/8]}}]}]}",
        ),
    ] {
        engine.set_policy(read(&text).0.expect("a policy"));
    }
    engine.settle();
    engine
}

fn changes(engine: &mut Engine) -> Vec<Change> {
    engine.settle().into_iter().flat_map(|(_, changes)| changes).collect()
}

#[test]
fn one_remote_pod_is_one_element() {
    let mut engine = engine();
    engine.set_pod(pod("x", "new", "there", 5000, &[("app", "db"), ("hash", "f00")]));
    let added = changes(&mut engine);
    assert!(matches!(added[..], [Change { key: Key::Peer(_), old: None, new: Some(_) }]), "{added:?}");
    engine.set_pod(pod("x", "new", "there", 5000, &[("app", "db"), ("hash", "ba4")]));
    assert_eq!(changes(&mut engine), [], "a label that nobody asks for");
    engine.set_pod(pod("x", "new", "there", 5000, &[("app", "cache")]));
    assert_eq!(changes(&mut engine).len(), 1, "a label that decides");
    engine.delete_pod(&PodKey::new("x", "new"), None);
    assert_eq!(changes(&mut engine), [], "it was nobody in particular already");
    engine.set_pod(pod("y", "other", "there", 5001, &[("app", "db")]));
    assert_eq!(changes(&mut engine), [], "another namespace, that no rule asks for");
}

#[test]
fn one_local_pod_is_its_own_elements_and_no_others() {
    let mut engine = engine();
    engine.set_pod(pod("x", "new", "here", 5000, &[("app", "web")]));
    let added = changes(&mut engine);
    let address = IpAddr::from(Ipv4Addr::from(0x0a00_0000 + 5000));
    let its = |c: &&Change| match c.key {
        Key::Subject(_, a) | Key::Peer(a) | Key::Itself(a) => a == address,
        Key::Rule { pod, .. } => pod == address,
        Key::Block(..) => false,
    };
    assert_eq!(added.iter().filter(its).count(), added.len(), "{added:?}");
    assert!(added.len() <= 8, "{added:?}");
}

#[test]
fn a_policy_that_asks_what_is_asked_already_touches_only_its_pods() {
    let mut engine = engine();
    let text = policy(
        "more",
        "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: \
            db}}}], ports: [{port: 81}]}]}",
    );
    engine.set_policy(read(&text).0.expect("a policy"));
    let added = changes(&mut engine);
    assert_eq!(added.len(), 10, "one port more for each of ten pods, no matter how many peers there are");
    // A question that divides a class moves half of it; one that does not keeps every element of a peer.
    let text = policy("all", "{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{port: 9}]}]}");
    engine.set_policy(read(&text).0.expect("a policy"));
    let added = changes(&mut engine);
    let moved = added.iter().filter(|c| matches!(c.key, Key::Peer(_)) && c.old.is_some()).count();
    assert_eq!(moved, 0, "the class of app=db goes on under its number");
}

#[test]
fn ten_thousand_blocks_with_overlaps_and_exceptions() {
    let block = |i: u32| {
        let base = Ipv4Addr::from(0x0a00_0000 + (i % 5000) * 256);
        let hole = Ipv4Addr::from(u32::from(base) + 16);
        format!("{{ipBlock: {{cidr: {base}/{}, except: [{hole}/30]}}}}", if i < 5000 { 24 } else { 25 })
    };
    let peers: Vec<String> = (0..10_000).map(block).collect();
    let (large, problems) = read(&policy(
        "large",
        &format!("{{podSelector: {{}}, ingress: [{{from: [{}]}}]}}", peers.join(", ")),
    ));
    assert_eq!(problems, []);
    let mut engine = engine();
    engine.set_policy(large.expect("a policy"));
    let added = changes(&mut engine);
    let blocks = added.iter().filter(|c| matches!(c.key, Key::Block(..)) && c.new.is_some()).count();
    assert!(blocks <= 10_010, "{blocks} pieces: what overlaps is merged");
    let allowed = |last: u32| {
        let flow = Flow {
            network: "default".into(),
            source: Ipv4Addr::from(0x0a00_0000 + last).into(),
            destination: Ipv4Addr::from(0x0a00_0000).into(),
            traffic: Traffic::Other,
            state: State::New,
        };
        engine.cluster().judge(&flow).allowed()
    };
    assert!(allowed(300) && !allowed(256 + 17), "an exception of both blocks that hold it");
}

#[test]
fn names_that_nobody_has_and_large_selectors_are_no_trouble() {
    let values: Vec<String> = (0..5000).map(|i| format!("v{i}")).collect();
    let text = policy(
        "p",
        &format!(
            "{{podSelector: {{matchExpressions: [{{key: app, operator: NotIn, values: [{}]}}]}}, ingress: \
                [{{ports: [{{port: nobody}}]}}]}}",
            values.join(", ")
        ),
    );
    let (policy, problems) = read(&text);
    assert_eq!(problems, []);
    let mut engine = engine();
    engine.set_policy(policy.expect("a policy"));
    assert_eq!(changes(&mut engine), [], "the pods are isolated already, and nothing more is allowed");
}

#[test]
fn problems_are_named_by_object_and_field_and_capped() {
    let peers = "{ipBlock: {cidr: what}}, ".repeat(500);
    let (policy, problems) =
        read(&policy("p", &format!("{{podSelector: {{}}, ingress: [{{from: [{peers}]}}]}}")));
    assert_eq!(problems.len(), 100);
    assert_eq!(
        problems[0].to_string(),
        "NetworkPolicy x/p: spec.ingress[0].from[0].ipBlock.cidr: \"what\" is not a valid CIDR such \
        as 10.0.0.0/8; it is ignored"
    );
    assert!(policy.expect("a policy").ingress.expect("rules")[0].peers.as_ref().expect("a list").is_empty());
}

/// JSON made of the words that policies are made of, in any arrangement.
fn json() -> impl Strategy<Value = serde_json::Value> {
    let word = prop::sample::select(vec![
        "Accept",
        "Allow",
        "Deny",
        "Pass",
        "Admin",
        "Baseline",
        "TCP",
        "In",
        "Exists",
        "10.0.0.0/8",
        "::/0",
        "x",
        "*",
        "80",
    ]);
    let leaf = prop_oneof![
        word.prop_map(Into::into),
        prop::sample::select(vec![0_i64, 1, 80, 65535, 65536, -1, i64::MAX]).prop_map(Into::into),
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
    ];
    leaf.prop_recursive(8, 64, 6, |inner| {
        let key = prop::sample::select(vec![
            "metadata",
            "spec",
            "name",
            "namespace",
            "annotations",
            "k8s.v1.cni.cncf.io/policy-for",
            "tier",
            "priority",
            "subject",
            "namespaces",
            "pods",
            "namespaceSelector",
            "podSelector",
            "matchLabels",
            "matchExpressions",
            "key",
            "operator",
            "values",
            "ingress",
            "egress",
            "from",
            "to",
            "action",
            "ports",
            "protocols",
            "tcp",
            "destinationPort",
            "number",
            "range",
            "start",
            "end",
            "ipBlock",
            "cidr",
            "except",
            "port",
            "endPort",
            "networks",
            "nodes",
            "portNumber",
            "portRange",
            "namedPort",
            "policyTypes",
            "unknown",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::vec((key, inner), 0..6).prop_map(|list| list
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v))
                .collect::<serde_json::Map<_, _>>()
                .into()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Whatever a tenant writes is a policy, a problem or refused, and nothing worse.
    #[test]
    fn anything_that_is_read_can_be_used(value in json(), spec in json(), name in "[a-z]{1,3}") {
        let object = serde_json::json!({"metadata": {"name": name}, "spec": spec});
        let mut engine = Engine::new("here");
        engine.set_pod(pod("default", "a", "here", 1, &[("x", "x")]));
        for value in [value, object] {
            let policies = [
                serde_json::from_value(value.clone()).ok().map(|o| k8s::network_policy(&o)),
                serde_json::from_value(value.clone()).ok().map(|o| k8s::multi_network_policy(&o)),
                serde_json::from_value(value.clone()).ok().map(|o| k8s::cluster_network_policy(&o)),
                serde_json::from_value(value.clone()).ok().map(|o| k8s::admin_network_policy(&o)),
                serde_json::from_value(value).ok().map(|o| k8s::baseline_admin_network_policy(&o)),
            ];
            for converted in policies.into_iter().flatten() {
                prop_assert!(converted.object.is_some() || !converted.problems.is_empty());
                if let Some(policy) = converted.object {
                    engine.set_policy(policy);
                }
            }
        }
        engine.settle();
    }
}

#[test]
fn a_priority_that_cannot_be_is_named() {
    let (policy, problems) = read(&cnp("p", "{tier: Admin, priority: 2000, subject: {namespaces: {}}}"));
    assert!(policy.is_some() && problems[0].field == "spec.priority");
}

/// One tenant's rules became millions of elements in the sets of all.
#[test]
fn a_policy_that_is_too_large_isolates_and_allows_nothing() {
    let ports = |count: u32, width: u32| -> String {
        let one = |n: u32| match width {
            1 => format!("{{port: {}}}", n * 2 + 1),
            _ => format!("{{port: {}, endPort: {}}}", n * 8 + 1, n * 8 + width),
        };
        (0..count).map(one).collect::<Vec<_>>().join(", ")
    };
    let everybody = |ports: &str| format!("[{{ports: [{ports}]}}]");
    let nested = |rules: u32| -> String {
        let rule = |n: u32| {
            let ports = (0..100).map(|p| format!("{{port: {}}}", n * 200 + p * 2 + 1)).collect::<Vec<_>>();
            format!("{{from: [{{ipBlock: {{cidr: 11.0.0.0/{}}}}}], ports: [{}]}}", 8 + n, ports.join(", "))
        };
        format!("[{}]", (0..rules).map(rule).collect::<Vec<_>>().join(", "))
    };
    for (rules, elements) in [
        (everybody(&ports(8000, 2)), Some(8000)),
        (everybody(&ports(9000, 1)), Some(9000)),
        (everybody(&ports(20_000, 1)), None),
        // And the other policy says something of each of the ten parts.
        (nested(10), Some(100 * (1..=10).sum::<usize>() + 10)),
        (nested(20), None),
    ] {
        let name = &rules[..60];
        let (large, problems) = read(&policy("large", &format!("{{podSelector: {{}}, ingress: {rules}}}")));
        assert_eq!(problems.is_empty(), elements.is_some(), "{name}: {problems:?}");
        let mut engine = engine();
        engine.set_policy(large.expect("it isolates"));
        let added = changes(&mut engine);
        let per_pod =
            added.iter().filter(|c| matches!(c.key, Key::Rule { .. }) && c.new.is_some()).count() / 10;
        assert_eq!(per_pod, elements.unwrap_or_default(), "{name}");
    }
}
