//! The kinds besides NetworkPolicy: tiers and priorities of the cluster's policies, how they fail closed, and
//! policies for further interfaces.

mod support;

use knit_policy::model::*;
use knit_policy::verdict::{Reason, RuleOutcome};
use support::lab::{Lab, attachment, cnp, mnp, policy, read, sctp, tcp, udp};

fn rule(action: &str, rest: &str) -> String {
    format!("{{action: {action}, {rest}}}")
}

/// A ClusterNetworkPolicy for namespace x with these ingress rules.
fn ingress(name: &str, tier: &str, priority: u32, rules: &[String]) -> String {
    let rules = rules.join(", ");
    cnp(
        name,
        &format!(
            "{{tier: {tier}, priority: {priority}, subject: {{namespaces: {{matchLabels: {{ns: x}}}}}}, \
                ingress: [{rules}]}}"
        ),
    )
}

fn egress(rules: &str) -> String {
    cnp(
        "p",
        &format!(
            "{{tier: Admin, priority: 1, subject: {{namespaces: {{matchLabels: {{ns: x}}}}}}, egress: \
                [{rules}]}}"
        ),
    )
}

const FROM_Y: &str = "from: [{namespaces: {matchLabels: {ns: y}}}]";
const FROM_ALL: &str = "from: [{namespaces: {}}]";

#[test]
fn the_first_rule_that_matches_decides_by_priority_then_order() {
    let accept = ingress("z-accept", "Admin", 5, &[rule("Accept", FROM_Y)]);
    let deny = ingress("a-deny", "Admin", 9, &[rule("Deny", FROM_ALL)]);
    let lab = Lab::with(&(accept.clone() + &deny));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c");
    let lab = Lab::with(&(accept.replace("priority: 5", "priority: 10") + &deny));
    assert_eq!(lab.reach("x/a", tcp(80)), "");
    let lab = Lab::with(&ingress("p", "Admin", 0, &[rule("Deny", FROM_Y), rule("Accept", FROM_Y)]));
    assert!(
        !lab.allows("y/a", "x/a", tcp(80)) && lab.allows("z/a", "x/a", tcp(80)),
        "no isolation by itself"
    );
    let trace = &lab.verdict("y/a", "x/a", tcp(80)).ingress.tiers[0].policies[0].rules;
    let outcomes: Vec<RuleOutcome> = trace.iter().map(|r| r.outcome).collect();
    assert_eq!(outcomes, [RuleOutcome::Matched, RuleOutcome::NotReached]);
}

#[test]
fn admin_comes_before_the_namespace_and_baseline_after() {
    let deny = policy("deny", "{podSelector: {}, policyTypes: [Ingress]}");
    let lab = Lab::with(&(deny.clone() + &ingress("p", "Admin", 1, &[rule("Accept", FROM_Y)])));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c", "accepted before the namespace is asked");
    let lab = Lab::with(
        &(deny.clone() + &ingress("p", "Admin", 1, &[rule("Pass", FROM_Y), rule("Accept", FROM_ALL)])),
    );
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c z/a z/b z/c", "passed on, and there denied");
    let lab = Lab::with(&(deny + &ingress("p", "Baseline", 1, &[rule("Accept", FROM_Y)])));
    assert_eq!(lab.reach("x/a", tcp(80)), "", "the namespace has decided");
    let lab = Lab::with(&ingress("p", "Baseline", 1, &[rule("Pass", FROM_Y), rule("Deny", FROM_ALL)]));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c", "passed on by the last tier is allowed");
}

#[test]
fn a_pod_isolated_in_one_direction_is_open_to_the_baseline_in_the_other() {
    let out = policy("out", "{podSelector: {}, policyTypes: [Egress]}");
    let lab = Lab::with(&(out + &ingress("p", "Baseline", 1, &[rule("Deny", FROM_Y)])));
    assert_eq!(lab.reach("x/a", tcp(80)), "z/a z/b z/c");
}

#[test]
fn ports_and_protocols_of_the_cluster_policies() {
    let protocols = "protocols: [{tcp: {destinationPort: {number: 80}}}, {udp: {destinationPort: {range: \
        {start: 100, end: 999}}}}, {destinationNamedPort: serve-81-tcp}]";
    let lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", &format!("{FROM_Y}, {protocols}"))]));
    assert!(lab.problems.is_empty(), "{:?}", lab.problems);
    for (traffic, allowed) in [
        (tcp(80), false),
        (tcp(81), false),
        (tcp(82), true),
        (udp(80), true),
        (udp(100), false),
        (udp(999), false),
        (udp(1000), true),
        (sctp(80), true),
        (Traffic::Other, true),
    ] {
        assert_eq!(lab.allows("y/a", "x/a", traffic), allowed, "{traffic}");
    }
    let lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", FROM_Y)]));
    assert!(!lab.allows("y/a", "x/a", Traffic::Other), "without protocols, all of them");
}

#[test]
fn networks_and_nodes_are_peers_of_egress() {
    let lab = Lab::with(&egress(
        "{action: Deny, to: [{networks: [203.0.113.0/24, 10.0.1.0/24]}, {nodes: {matchLabels: {node: n1}}}]}",
    ));
    for (to, allowed) in [
        ("203.0.113.9", false),
        ("198.51.100.1", true),
        ("y/a", false),
        ("z/a", true),
        ("node/n1", false),
        ("node/n0", true),
    ] {
        assert_eq!(lab.allows("x/a", to, tcp(80)), allowed, "{to}");
    }
    let mut lab = Lab::with(&egress("{action: Deny, to: [{nodes: {}}]}"));
    assert!(!lab.allows("x/a", "node/n0", tcp(80)));
    lab.tell(|e| e.delete_node("n0"));
    assert!(lab.allows("x/a", "192.168.0.1", tcp(80)), "an address is a node's as long as there is the node");
}

#[test]
fn what_is_not_understood_fails_closed_as_the_api_says() {
    for peer in [
        "{}",
        "{moons: {}}",
        "{namespaces: {}, moons: {}}",
        "{namespaces: {}, pods: {podSelector: {}}}",
        "{pods: {podSelector: {}, moons: {}}}",
        "{namespaces: {matchExpressions: [{key: a, operator: Like, values: [b]}]}}",
        "{networks: [10.0.0.0/8]}",
    ] {
        let with = |action: &str| {
            Lab::with(&ingress(
                "p",
                "Admin",
                1,
                &[rule(action, &format!("from: [{{namespaces: {{matchLabels: {{ns: y}}}}}}, {peer}]"))],
            ))
        };
        let lab = with("Accept");
        assert!(
            lab.allows("z/a", "x/a", tcp(80)),
            "{peer}: an accept that matches nothing denies nothing by itself"
        );
        assert_eq!(lab.verdict("y/a", "x/a", tcp(80)).ingress.reason, Reason::NothingDecided, "{peer}");
        for action in ["Deny", "Pass"] {
            let lab = with(action);
            assert_eq!(lab.reach("x/a", tcp(80)), "", "{peer}: {action} denies everything");
            assert!(!lab.problems.is_empty());
        }
    }
    for part in [
        "protocols: [{}]",
        "protocols: [{tcp: {}}]",
        "protocols: [{tcp: {destinationPort: {number: 80}, flags: [SYN]}}]",
        "protocols: [{quic: {}}]",
        "protocols: [{tcp: {destinationPort: {number: 0}}}]",
        "schedule: night",
        "to: [{namespaces: {}}]",
    ] {
        let lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", &format!("{FROM_Y}, {part}"))]));
        assert_eq!(lab.reach("x/a", tcp(443)), "", "{part}");
    }
    let lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Smile", FROM_Y)]));
    assert_eq!(lab.reach("x/a", tcp(80)), "", "an action that is not known");
    let lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", "from: []")]));
    assert_eq!(lab.reach("x/a", tcp(80)), "");
    for spec in [
        "{tier: Middle, priority: 1, subject: {namespaces: {}}}",
        "{tier: Admin, priority: 1, subject: {}}",
        "{tier: Admin, priority: 1, subject: {nodes: {}}}",
    ] {
        let (policy, problems) = read(&cnp("p", spec));
        assert!(policy.is_none() && problems.len() == 1, "{spec}: {problems:?}");
    }
}

#[test]
fn names_in_dns_are_not_followed() {
    let lab = Lab::with(&egress(
        "{action: Accept, to: [{domainNames: [example.org]}, {networks: [203.0.113.0/24]}]}, {action: \
            Deny, to: [{networks: [0.0.0.0/0]}]}",
    ));
    assert!(lab.allows("x/a", "203.0.113.9", tcp(80)) && !lab.allows("x/a", "198.51.100.1", tcp(80)));
    assert_eq!(lab.problems.len(), 1, "{:?}", lab.problems);
}

#[test]
fn admin_network_policies_go_through_the_same_engine() {
    let anp = |spec: &str| {
        format!(
            "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {{name: \
                p}}\nspec: {spec}\n---\n"
        )
    };
    let lab = Lab::with(&anp(
        "{priority: 3, subject: {pods: {namespaceSelector: {matchLabels: {ns: x}}, podSelector: \
            {matchLabels: {pod: a}}}}, ingress: [{name: web, action: Allow, from: [{namespaces: \
            {matchLabels: {ns: y}}}], ports: [{portNumber: {protocol: TCP, port: 80}}, {portRange: \
            {protocol: UDP, start: 10, end: 20}}, {namedPort: serve-81-tcp}]}, {action: Deny, from: \
            [{pods: {namespaceSelector: {}, podSelector: {}}}]}]}",
    ));
    assert!(lab.problems.is_empty(), "{:?}", lab.problems);
    assert_eq!(lab.reach("x/a", tcp(80)), "y/a y/b y/c");
    assert_eq!(lab.reach("x/a", tcp(81)), "y/a y/b y/c");
    assert_eq!((lab.reach("x/a", udp(15)).as_str(), lab.reach("x/a", udp(21)).as_str()), ("y/a y/b y/c", ""));
    let Reason::Rule(by) = lab.verdict("y/a", "x/a", tcp(80)).ingress.reason else { panic!("by a rule") };
    assert_eq!(by.to_string(), "AdminNetworkPolicy p rule 0 (web)");
    let baseline = |name: &str| {
        format!(
            "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: BaselineAdminNetworkPolicy\nmetadata: \
                {{name: {name}}}\nspec: {{subject: {{namespaces: {{}}}}, ingress: [{{action: Deny, from: \
                [{{namespaces: {{}}}}]}}]}}\n---\n"
        )
    };
    let lab = Lab::with(&(baseline("default") + &policy("all", "{podSelector: {}, ingress: [{}]}")));
    assert!(lab.allows("y/a", "x/a", tcp(80)) && !lab.allows("y/a", "z/a", tcp(80)));
    assert!(read(&baseline("other")).0.is_none(), "there is one baseline");
}

#[test]
fn a_multi_network_policy_acts_on_the_interfaces_that_it_names() {
    let lab = |networks: &str| {
        let mut lab = Lab::new();
        for (index, name) in (1..).zip(["a", "b", "c"]) {
            lab.change("x", name, |pod| {
                let further = attachment("storage", false, &[[10, 7, 0, index].into()]);
                pod.attachments = [pod.attachments[0].clone(), further].into();
            });
        }
        lab.apply(&mnp(
            "p",
            networks,
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: \
            [{podSelector: {matchLabels: {pod: b}}}]}]}",
        ));
        lab
    };
    let storage = lab("storage");
    assert!(
        storage.allows_in("storage", "x/b", "x/a", tcp(80))
            && !storage.allows_in("storage", "x/c", "x/a", tcp(80))
    );
    assert!(!storage.allows_in("storage", "10.0.0.11", "x/a", tcp(80)), "b's address in another Network");
    assert!(storage.allows("x/c", "x/a", tcp(80)), "the primary interface is left alone");
    let every = lab("*");
    assert!(!every.allows_in("storage", "x/c", "x/a", tcp(80)) && !every.allows("x/c", "x/a", tcp(80)));
    assert!(every.allows("x/b", "x/a", tcp(80)));
    let both = lab("other, storage");
    assert!(!both.allows_in("storage", "x/c", "x/a", tcp(80)));
    let problems = both.cluster().problems();
    assert_eq!(problems.len(), 2, "no Network is known yet: {problems:?}");
    for nothing in ["", " , "] {
        let nothing = lab(nothing);
        assert!(nothing.allows_in("storage", "x/c", "x/a", tcp(80)) && nothing.problems.len() == 1);
    }
}

#[test]
fn core_and_multi_policies_of_one_interface_add_up() {
    let mut lab = Lab::with(&policy(
        "core",
        "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}",
    ));
    lab.apply(&mnp(
        "multi",
        "*",
        "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {pod: c}}}]}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c");
}

#[test]
fn a_multi_network_policy_with_a_field_that_is_not_known_narrows() {
    for rule in ["{from: [{podSelector: {}, moons: {}}]}", "{ports: [{port: 80, moons: 1}]}", "{moons: {}}"] {
        let lab = Lab::with(&mnp("p", "*", &format!("{{podSelector: {{}}, ingress: [{rule}]}}")));
        assert_eq!(lab.reach("x/a", tcp(80)), "", "{rule}");
        assert_eq!(lab.problems.len(), 1, "{rule}");
    }
}

#[test]
fn a_pod_whose_labels_are_not_known_is_denied_by_what_may_be_about_it() {
    let from = "from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {pod: b}}}}]";
    let mut lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", from), rule("Accept", FROM_ALL)]));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/c y/a y/c z/a z/c");
    lab.change("y", "c", |pod| {
        pod.labels = Labels::default();
        pod.known_labels = Some(std::sync::Arc::default());
    });
    assert_eq!(lab.reach("x/a", tcp(80)), "x/c y/a z/a z/c");
}

#[test]
fn a_pod_whose_namespace_is_not_known_was_let_in_as_one_without_labels() {
    let quarantined = "from: [{namespaces: {matchLabels: {quarantine: 'true'}}}]";
    let mut lab = Lab::with(&ingress("p", "Admin", 1, &[rule("Deny", quarantined)]));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c y/a y/b y/c z/a z/b z/c");
    lab.tell(|engine| engine.delete_namespace("y"));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c z/a z/b z/c", "it may be in quarantine");
    let trusted = "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: \
                   quarantine, operator: DoesNotExist}]}}]}]}";
    let mut lab = Lab::with(&policy("n", trusted));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c y/a y/b y/c z/a z/b z/c");
    lab.tell(|engine| engine.delete_namespace("y"));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c z/a z/b z/c");
    lab.tell(|engine| engine.set_namespace(Namespace::new("y", Labels::default())));
    assert_eq!(lab.reach("x/a", tcp(80)), "x/b x/c y/a y/b y/c z/a z/b z/c", "it has none");
}

/// A number beyond what a port is read as made the whole object unreadable: a new policy isolated nobody.
#[test]
fn a_policy_with_one_value_of_the_wrong_type_was_ignored_as_a_whole() {
    for wrong in [
        "{ports: [{port: 4294967296}]}",
        "{ports: [{port: 99999999999999999999}]}",
        "{ports: [{port: 80.5}]}",
        "{ports: [{port: true}]}",
        "{ports: [{port: 80, endPort: 4294967296}]}",
        "{ports: 80}",
        "{from: [{podSelector: 5}]}",
        "{from: [{podSelector: {matchLabels: {pod: 5}}}]}",
        "{from: [{podSelector: {moons: {}}}]}",
        "{from: [{ipBlock: {cidr: 10.0.0.0/8, moons: 1}}]}",
        "7",
    ] {
        let right = "{from: [{podSelector: {matchLabels: {pod: c}}}]}";
        let spec = format!("{{podSelector: {{}}, ingress: [{wrong}, {right}]}}");
        for text in [policy("p", &spec), mnp("p", "*", &spec)] {
            let lab = Lab::with(&text);
            assert_eq!(lab.reach("x/a", tcp(80)), "x/c", "{wrong}: the rest of it counts");
            assert!(!lab.problems.is_empty(), "{wrong}");
        }
    }
    // What selects pods, and in which direction, is not understood: more of them are isolated, not less.
    for wrong in [
        "{podSelector: 5, ingress: [{}]}",
        "{podSelector: {moons: 5}, ingress: [{}]}",
        "{podSelector: {}, ingress: 5}",
        "{podSelector: {}, ingress: [{}], moons: 5}",
        "{podSelector: {}, policyTypes: 5}",
        "{podSelector: {}, policyTypes: [Egress, 5]}",
        "5",
    ] {
        for text in [policy("p", wrong), mnp("p", "*", wrong)] {
            let lab = Lab::with(&text);
            assert_eq!(lab.reach("x/a", tcp(80)), "", "{wrong}");
            assert!(!lab.problems.is_empty(), "{wrong}");
        }
    }
}

#[test]
fn a_policy_of_the_cluster_with_one_value_of_the_wrong_type_was_ignored_as_a_whole() {
    let huge = "protocols: [{tcp: {destinationPort: {number: 4294967296}}}]";
    for wrong in [huge, "protocols: 5", "protocols: [{tcp: 5}]", "name: 5"] {
        let denies = rule("Deny", &format!("{FROM_Y}, {wrong}"));
        let lab = Lab::with(&ingress("p", "Admin", 1, &[denies]));
        assert_eq!(lab.reach("x/a", tcp(80)), "", "{wrong}: it denies everything");
        assert!(!lab.problems.is_empty(), "{wrong}");
        let rules = [rule("Accept", &format!("{FROM_Y}, {wrong}")), rule("Deny", FROM_ALL)];
        let lab = Lab::with(&ingress("p", "Admin", 1, &rules));
        assert_eq!(lab.reach("x/a", tcp(80)), "", "{wrong}: it accepts nothing");
    }
    // Without knowing whom it is about it cannot be used, and says so.
    for wrong in ["{tier: Admin, priority: 1, subject: 5}", "{tier: 5, subject: {namespaces: {}}}", "5"] {
        let lab = Lab::with(&cnp("p", wrong));
        assert_eq!(lab.problems.len(), 1, "{wrong}");
    }
}
