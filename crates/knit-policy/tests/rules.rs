//! The rules about selection, isolation and peers of docs/network-policy-rules.md, tried on a small cluster:
//! with the verdict function and the sets at once.

mod support;

use knit_policy::model::*;
use knit_policy::verdict::Reason;
use support::lab::{Lab, attachment, pod, policy, read, sctp, tcp, udp};

const DENY_INGRESS: &str = "{podSelector: {}, policyTypes: [Ingress]}";
const DENY_EGRESS: &str = "{podSelector: {}, policyTypes: [Egress]}";
const NOBODY: &str = "";
const ALL_BUT_XA: &str = "x/b x/c y/a y/b y/c z/a z/b z/c";

#[test]
fn rule_01_a_policy_acts_on_pods_of_its_namespace() {
    for spec in [DENY_INGRESS, "{policyTypes: [Ingress]}"] {
        let lab = Lab::with(&policy("deny", spec));
        assert_eq!(lab.reach("x/a", tcp(80)), NOBODY);
        assert!(lab.allows("x/a", "y/a", tcp(80)), "other namespaces are left alone");
    }
    let lab = Lab::with(&policy("deny", "{podSelector: {matchLabels: {pod: a}}}"));
    assert_eq!(lab.reach("x/a", tcp(80)), NOBODY);
    assert!(lab.allows("y/a", "x/b", tcp(80)), "other pods are left alone");
}

#[test]
fn rule_02_selectors_mean_what_kubernetes_means() {
    let from = |selector: &str| {
        format!(
            "{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{{podSelector: {selector}}}]}}]}}"
        )
    };
    for (selector, expected) in [
        ("{}", "x/b x/c"),
        ("{matchLabels: {pod: b}}", "x/b"),
        ("{matchExpressions: [{key: pod, operator: In, values: [b, c]}]}", "x/b x/c"),
        ("{matchExpressions: [{key: pod, operator: NotIn, values: [b]}]}", "x/c"),
        ("{matchExpressions: [{key: other, operator: NotIn, values: [b]}]}", "x/b x/c"),
        ("{matchExpressions: [{key: pod, operator: Exists}]}", "x/b x/c"),
        ("{matchExpressions: [{key: pod, operator: DoesNotExist}]}", NOBODY),
        ("{matchExpressions: [{key: other, operator: DoesNotExist}]}", "x/b x/c"),
        ("{matchLabels: {pod: b}, matchExpressions: [{key: pod, operator: NotIn, values: [b]}]}", NOBODY),
    ] {
        assert_eq!(Lab::with(&policy("p", &from(selector))).reach("x/a", tcp(80)), expected, "{selector}");
    }
}

/// What slices did not tell yet was taken for a label that the pod has not: `NotIn` let it in.
#[test]
fn rule_02_a_label_that_is_not_known_lets_nobody_in() {
    let partly = |lab: &mut Lab| {
        for name in ["b", "c"] {
            lab.change("x", name, |pod| {
                pod.labels = Labels::default();
                pod.known_labels = Some(["another".into()].into());
            });
        }
    };
    let from = |selector: &str| {
        format!(
            "{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{{podSelector: {selector}}}]}}]}}"
        )
    };
    for (selector, expected) in [
        ("{matchExpressions: [{key: pod, operator: NotIn, values: [b]}]}", NOBODY),
        ("{matchExpressions: [{key: pod, operator: DoesNotExist}]}", NOBODY),
        ("{matchLabels: {pod: b}}", NOBODY),
        ("{matchExpressions: [{key: another, operator: DoesNotExist}]}", "x/b x/c"),
        ("{}", "x/b x/c"),
    ] {
        let mut lab = Lab::with(&policy("p", &from(selector)));
        partly(&mut lab);
        assert_eq!(lab.reach("x/a", tcp(80)), expected, "{selector}");
    }
}

#[test]
fn rule_03_policy_types_are_filled_in_as_the_api_server_does() {
    let types = |spec: &str| {
        let policy = read(&policy("p", spec)).0.expect("a policy");
        (policy.ingress.is_some(), policy.egress.is_some())
    };
    assert_eq!(types("{podSelector: {}}"), (true, false));
    assert_eq!(types("{podSelector: {}, egress: []}"), (true, false), "an empty list isolates nothing");
    assert_eq!(types("{podSelector: {}, egress: [{}]}"), (true, true));
    assert_eq!(types("{podSelector: {}, policyTypes: []}"), (true, false));
    assert_eq!(types("{podSelector: {}, policyTypes: [Egress], ingress: [{}]}"), (false, true));
}

#[test]
fn rule_04_a_port_without_a_protocol_is_tcp() {
    let lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{ports: [{}]}]}"));
    assert!(lab.allows("y/a", "x/a", tcp(80)) && lab.allows("y/a", "x/a", tcp(1)));
    assert!(!lab.allows("y/a", "x/a", udp(80)), "all TCP ports, not all ports");
    let lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{ports: [{port: 80}]}]}"));
    assert!(lab.allows("y/a", "x/a", tcp(80)) && !lab.allows("y/a", "x/a", udp(80)));
}

#[test]
fn rule_05_only_the_spec_means_something() {
    let mut lab = Lab::with(&policy("deny", DENY_INGRESS));
    let again =
        policy("deny", DENY_INGRESS).replace("namespace: x}", "namespace: x, generation: 7, labels: {a: b}}");
    let (again, _) = read(&again);
    for engine in lab.engines.values_mut() {
        engine.set_policy(again.clone().expect("a policy"));
        assert_eq!(engine.settle(), [], "nothing is written for it");
    }
}

#[test]
fn rule_06_without_a_policy_everything_is_allowed_and_directions_are_apart() {
    let lab = Lab::new();
    assert!(lab.allows("x/a", "y/b", tcp(80)) && lab.allows("203.0.113.9", "x/a", Traffic::Other));
    assert_eq!(lab.verdict("x/a", "y/b", tcp(80)).ingress.reason, Reason::NotSelected);
    assert_eq!(lab.elements(), 0, "and costs nothing");
    let lab = Lab::with(&policy("deny", DENY_INGRESS));
    assert!(lab.allows("x/a", "y/b", tcp(80)), "isolated for ingress says nothing of egress");
    let lab = Lab::with(&policy("deny", DENY_EGRESS));
    assert!(lab.allows("y/b", "x/a", tcp(80)) && !lab.allows("x/a", "y/b", tcp(80)));
}

#[test]
fn rule_07_rules_of_all_policies_add_up() {
    let allow = |pod: &str| {
        format!(
            "{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{{podSelector: {{matchLabels: \
                {{pod: {pod}}}}}}}]}}]}}"
        )
    };
    let lab =
        Lab::with(&(policy("b", &allow("b")) + &policy("c", &allow("c")) + &policy("deny", DENY_INGRESS)));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c");
    let Reason::Rule(by) = lab.verdict("x/c", "x/a", tcp(80)).ingress.reason else { panic!("by a rule") };
    assert_eq!((by.policy.to_string().as_str(), by.index), ("NetworkPolicy x/c", 0));
    let Reason::Isolated(by) = lab.verdict("y/c", "x/a", tcp(80)).ingress.reason else { panic!("isolated") };
    assert_eq!(by.len(), 3);
    let lab = Lab::with(&(policy("deny", DENY_INGRESS) + &policy("all", "{podSelector: {}, ingress: [{}]}")));
    assert_eq!(lab.reach("x/a", tcp(80)), ALL_BUT_XA, "nothing takes precedence over an allow");
}

#[test]
fn rule_08_both_sides_must_allow() {
    let mut lab = Lab::with(&policy("deny", DENY_EGRESS));
    lab.apply(&policy("in", "{podSelector: {}, policyTypes: [Ingress], ingress: [{}]}"));
    assert!(!lab.allows("x/a", "x/b", tcp(80)), "allowed in, and not out");
    lab.apply(&policy("out", "{podSelector: {}, policyTypes: [Egress], egress: [{}]}"));
    assert!(lab.allows("x/a", "x/b", tcp(80)));
    lab.apply(&policy("in", DENY_INGRESS));
    let verdict = lab.verdict("x/a", "x/b", tcp(80));
    assert!(verdict.egress.allowed && !verdict.ingress.allowed);
}

#[test]
fn rule_09_no_rules_isolate_and_an_empty_rule_allows_everything() {
    let lab = Lab::with(&policy("deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
    assert!(!lab.allows("y/a", "x/a", tcp(80)) && !lab.allows("x/a", "y/a", Traffic::Other));
    let lab = Lab::with(&policy("all", "{podSelector: {}, ingress: [{}], egress: [{}]}"));
    for traffic in [tcp(1), udp(9), sctp(7), Traffic::Other, Traffic::Icmpv6(128)] {
        assert!(lab.allows("y/a", "x/a", traffic) && lab.allows("x/a", "203.0.113.9", traffic), "{traffic}");
    }
}

#[test]
fn rule_10_a_rule_needs_a_port_and_a_peer() {
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: y}}}, \
            {namespaceSelector: {matchLabels: {ns: z}}}], ports: [{port: 80}, {port: 81}]}]}",
    ));
    assert!(lab.allows("y/a", "x/a", tcp(80)) && lab.allows("z/a", "x/a", tcp(81)));
    assert!(!lab.allows("y/a", "x/a", tcp(82)) && !lab.allows("x/b", "x/a", tcp(80)));
    let lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{from: [], ports: []}]}"));
    assert!(lab.allows("y/a", "x/a", tcp(82)), "empty lists are wildcards");
}

#[test]
fn rule_11_what_cannot_be_done_narrows() {
    let lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{ports: [{port: no-such-name}]}]}"));
    assert!(!lab.allows("y/a", "x/a", tcp(80)), "an unknown name is not every port");
    let lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{ports: [{port: 80, protocol: SCTP}]}]}"));
    assert!(!lab.allows("y/a", "x/a", tcp(80)) && lab.allows("y/a", "x/a", sctp(80)));
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{ports: [{port: 80, protocol: QUIC}]}, {from: [{}]}, {from: \
            [{ipBlock: {cidr: 10.0.0.0/99}}]}, {from: [{ipBlock: {cidr: 0.0.0.0/0, except: [what]}}]}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), NOBODY);
    assert_eq!(lab.problems.len(), 5, "{:#?}", lab.problems);
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {matchExpressions: [{key: a, operator: Like, values: [b]}]}, ingress: [{}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), NOBODY, "whom it selects is not known: all are isolated");
}

#[test]
fn rule_12_a_peer_that_matches_nobody_is_not_everybody() {
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {pod: none}}}]}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), NOBODY);
    assert!(!lab.allows("203.0.113.9", "x/a", tcp(80)));
}

#[test]
fn rule_13_selectors_of_one_peer_are_both_needed() {
    let from = |peers: &str| format!("{{podSelector: {{}}, ingress: [{{from: [{peers}]}}]}}");
    let y = "namespaceSelector: {matchLabels: {ns: y}}";
    let b = "podSelector: {matchLabels: {pod: b}}";
    for (peers, expected) in [
        (format!("{{{b}}}"), "x/b"),
        (format!("{{{y}}}"), "y/a y/b y/c"),
        (format!("{{{y}, {b}}}"), "y/b"),
        (format!("{{{y}}}, {{{b}}}"), "x/b y/a y/b y/c"),
        (format!("{{{b}, ipBlock: {{cidr: 10.0.0.0/8}}}}"), NOBODY),
    ] {
        assert_eq!(Lab::with(&policy("p", &from(&peers))).reach("x/a", tcp(80)), expected, "{peers}");
    }
}

#[test]
fn rule_14_selectors_stand_for_pods_of_both_families_and_for_nothing_else() {
    let mut lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}], egress: [{to: \
            [{namespaceSelector: {}}]}], policyTypes: [Ingress, Egress]}",
    ));
    assert!(lab.allows("y/b", "x/a", tcp(80)) && lab.allows("fd00:1::b", "fd00::a", tcp(80)));
    lab.change("z", "b", |pod| pod.host_network = true);
    lab.change("z", "b", |pod| pod.attachments[0].addresses = [[192, 168, 0, 2].into()].into());
    for other in ["node/n1", "203.0.113.9", "10.96.0.1"] {
        assert!(!lab.allows("x/a", other, tcp(80)) && !lab.allows(other, "x/a", tcp(80)), "{other}");
    }
}

#[test]
fn rule_15_every_namespace_has_its_name_as_a_label() {
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: \
            {kubernetes.io/metadata.name: y}}}]}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c");
    let mut lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: \
            {kubernetes.io/metadata.name: w}}}]}]}",
    ));
    lab.set_pod(&Pod {
        attachments: [attachment("default", true, &[[10, 0, 7, 1].into()])].into(),
        ..pod("w", "a")
    });
    assert!(lab.allows("w/a", "x/a", tcp(80)), "also before anything else is known of it");
}

#[test]
fn rule_16_blocks_may_be_written_sloppily() {
    let lab =
        Lab::with(&policy("p", "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 010.0.1.77/24}}]}]}"));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c");
    let (_, problems) = read(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.1.0/24, except: [10.0.0.0/8]}}]}]}",
    ));
    assert!(problems[0].message.contains("is not strictly inside"), "{problems:?}");
}

#[test]
fn rule_17_an_exception_narrows_its_own_block_only() {
    let except = "{ipBlock: {cidr: 10.0.0.0/16, except: [10.0.1.0/24]}}";
    let lab = Lab::with(&policy("p", &format!("{{podSelector: {{}}, ingress: [{{from: [{except}]}}]}}")));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c z/a z/b z/c");
    let lab = Lab::with(&policy(
        "p",
        &format!(
            "{{podSelector: {{}}, ingress: [{{from: [{except}, {{ipBlock: {{cidr: 10.0.1.11/32}}}}]}}]}}"
        ),
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c y/b z/a z/b z/c", "another peer allows it again");
    let other = policy("other", "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.1.12/32}}]}]}");
    let lab = Lab::with(
        &(policy("p", &format!("{{podSelector: {{}}, ingress: [{{from: [{except}]}}]}}")) + &other),
    );
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c y/c z/a z/b z/c", "and so does another policy");
}

#[test]
fn rule_18_blocks_match_pods_and_nodes_too_and_one_family() {
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}",
    ));
    for to in ["y/a", "node/n1", "203.0.113.9"] {
        assert!(lab.allows("x/a", to, tcp(80)), "{to}");
    }
    assert!(!lab.allows("fd00::a", "fd00:1::a", tcp(80)), "0.0.0.0/0 says nothing of IPv6");
}
