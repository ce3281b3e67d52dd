//! The rules about ports, packets, life cycle and Networks of docs/network-policy-rules.md, tried as in
//! `rules.rs`.

mod support;

use knit_policy::model::*;
use knit_policy::sets::{Change, Key};
use knit_policy::verdict::{Flow, Reason, State};
use support::lab::{Lab, attachment, cnp, pod, policy, tcp, udp};

const DENY_INGRESS: &str = "{podSelector: {}, policyTypes: [Ingress]}";
const DENY_EGRESS: &str = "{podSelector: {}, policyTypes: [Egress]}";
const NOBODY: &str = "";
const ALL_BUT_XA: &str = "x/b x/c y/a y/b y/c z/a z/b z/c";

#[test]
fn rule_19_ports_are_those_of_the_pod() {
    // A Service may have port 443; the packet that is judged has the pod's port.
    let lab =
        Lab::with(&policy("p", "{podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: 443}]}]}"));
    assert!(!lab.allows("x/a", "y/a", tcp(8443)) && lab.allows("x/a", "y/a", tcp(443)));
}

#[test]
fn rule_20_ranges_of_ports() {
    for (first, last) in [(80, 80), (80, 82), (1000, 1063), (1000, 1064), (1, 65535), (32768, 60000)] {
        let ports =
            format!("{{podSelector: {{}}, ingress: [{{ports: [{{port: {first}, endPort: {last}}}]}}]}}");
        let lab = Lab::with(&policy("p", &ports));
        for port in [1, first.max(2) - 1, first, last, last.min(65534) + 1, 65535] {
            assert_eq!(
                lab.allows("y/a", "x/a", tcp(port)),
                (first..=last).contains(&port),
                "{first}-{last}: {port}"
            );
        }
        assert!(!lab.allows("y/a", "x/a", udp(first)));
    }
    for ports in [
        "{port: 80, endPort: 79}",
        "{port: http, endPort: 81}",
        "{endPort: 81}",
        "{port: 0}",
        "{port: 70000}",
    ] {
        let lab = Lab::with(&policy("p", &format!("{{podSelector: {{}}, ingress: [{{ports: [{ports}]}}]}}")));
        assert!(!lab.allows("y/a", "x/a", tcp(80)) && lab.problems.len() == 1, "{ports}");
    }
}

#[test]
fn rule_21_a_named_port_is_what_the_destination_pod_says() {
    let rename = |lab: &mut Lab| {
        for (name, number) in [("a", 8080), ("b", 9090)] {
            lab.change("y", name, |pod| {
                pod.ports = [NamedPort { name: "web".into(), protocol: Protocol::Tcp, number }].into();
            });
        }
        lab.change("x", "a", |pod| {
            pod.ports = [NamedPort { name: "web".into(), protocol: Protocol::Tcp, number: 7070 }].into();
        });
    };
    let mut lab = Lab::with(&policy("p", "{podSelector: {}, ingress: [{ports: [{port: web}]}]}"));
    rename(&mut lab);
    assert!(
        lab.allows("y/a", "x/a", tcp(7070)) && !lab.allows("y/a", "x/a", tcp(8080)),
        "the subject's, for ingress"
    );
    assert!(!lab.allows("y/a", "x/a", udp(7070)), "name and protocol both");
    let out = |peers: &str| {
        policy(
            "p",
            &format!(
                "{{podSelector: {{}}, policyTypes: [Egress], egress: [{{{peers}ports: [{{port: web}}]}}]}}"
            ),
        )
    };
    for peers in ["", "to: [{namespaceSelector: {}}], "] {
        let mut lab = Lab::with(&out(peers));
        rename(&mut lab);
        assert!(lab.allows("x/a", "y/a", tcp(8080)) && lab.allows("x/a", "y/b", tcp(9090)));
        assert!(
            !lab.allows("x/a", "y/b", tcp(8080)) && !lab.allows("x/a", "y/a", tcp(7070)),
            "each pod's own"
        );
        assert!(!lab.allows("x/a", "y/c", tcp(8080)), "a pod without the name");
        assert!(!lab.allows("x/a", "203.0.113.9", tcp(8080)));
    }
    let mut lab = Lab::with(&out("to: [{ipBlock: {cidr: 0.0.0.0/0}}], "));
    rename(&mut lab);
    assert!(!lab.allows("x/a", "y/a", tcp(8080)), "a block names no ports");
}

#[test]
fn rule_22_replies_and_errors_pass() {
    let lab = Lab::with(&policy("deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
    let flow = |state| Flow {
        network: "default".into(),
        source: [10, 0, 1, 10].into(),
        destination: [10, 0, 0, 10].into(),
        traffic: tcp(40000),
        state,
    };
    assert!(!lab.judge(&flow(State::New)).allowed());
    assert!(lab.judge(&flow(State::Established)).allowed() && lab.judge(&flow(State::Related)).allowed());
}

#[test]
fn rule_23_protocols_without_ports_need_a_rule_without_ports() {
    let from = "from: [{namespaceSelector: {matchLabels: {ns: y}}}]";
    let lab = Lab::with(&policy("p", &format!("{{podSelector: {{}}, ingress: [{{{from}}}]}}")));
    assert!(lab.allows("y/a", "x/a", Traffic::Other) && !lab.allows("z/a", "x/a", Traffic::Other));
    let lab = Lab::with(&policy(
        "p",
        &format!(
            "{{podSelector: {{}}, ingress: [{{{from}, ports: [{{}}, {{protocol: UDP}}, {{protocol: \
                SCTP}}]}}]}}"
        ),
    ));
    assert!(!lab.allows("y/a", "x/a", Traffic::Other) && lab.allows("y/a", "x/a", udp(9)));
}

#[test]
fn rule_24_neighbour_discovery_always_passes() {
    let lab = Lab::with(&policy("deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
    for kind in (130..=137).chain([143]) {
        assert!(lab.allows("fd00:1::a", "fd00::a", Traffic::Icmpv6(kind)), "{kind}");
    }
    assert!(!lab.allows("fd00:1::a", "fd00::a", Traffic::Icmpv6(128)), "an echo is not discovery");
}

#[test]
fn rule_25_the_own_node_always_comes_in() {
    let lab = Lab::with(
        &(policy("deny", DENY_INGRESS)
            + &cnp(
                "deny",
                "{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: \
                    [{namespaces: {}}]}]}",
            )),
    );
    assert!(lab.allows("node/n0", "x/a", tcp(80)), "probes");
    assert_eq!(lab.verdict("node/n0", "x/a", tcp(80)).ingress.reason, Reason::OwnNode);
    assert!(!lab.allows("node/n1", "x/a", tcp(80)), "no other node");
}

#[test]
fn rule_26_egress_to_the_own_node_is_judged() {
    let lab = Lab::with(&policy("deny", DENY_EGRESS));
    assert!(!lab.allows("x/a", "node/n0", tcp(10250)) && !lab.allows("x/a", "node/n1", tcp(10250)));
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 192.168.0.1/32}}]}]}",
    ));
    assert!(lab.allows("x/a", "node/n0", tcp(10250)) && !lab.allows("x/a", "node/n1", tcp(10250)));
}

#[test]
fn rule_27_pods_in_the_nodes_namespace_are_the_node() {
    let mut lab = Lab::with(
        &(policy("deny", DENY_INGRESS)
            + &policy("p", "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}")),
    );
    lab.change("x", "b", |pod| {
        pod.host_network = true;
        pod.attachments[0].addresses = [[192, 168, 0, 2].into()].into();
    });
    assert!(lab.allows("y/a", "node/n1", tcp(80)), "not selected as a subject");
    assert!(!lab.allows("node/n1", "x/a", tcp(80)), "not selected as a peer");
    assert!(lab.allows("x/c", "x/a", tcp(80)));
}

#[test]
fn rule_28_a_pod_reaches_itself_through_a_service() {
    let deny = policy("deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}");
    let lab = Lab::with(&deny);
    let verdict = lab.verdict("x/a", "x/a", tcp(80));
    assert!(verdict.allowed() && verdict.ingress.reason == Reason::Itself);
    assert!(!lab.allows("x/b", "x/a", tcp(80)), "and nobody else");
    let admin = "{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: \
        [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {pod: a}}}}]}]}";
    let lab = Lab::with(&(deny + &cnp("deny", admin)));
    assert!(!lab.allows("x/a", "x/a", tcp(80)), "a policy of the cluster applies");
    assert!(lab.allows("x/b", "x/b", tcp(80)), "where it matches");
}

#[test]
fn rule_29_service_addresses_are_nobody() {
    // What is judged is the backend; a rule for the Service's own address never meets a packet to it.
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.96.0.1/32}}], ports: \
            [{port: 443}]}]}",
    ));
    assert!(!lab.allows("x/a", "node/n1", tcp(6443)), "the API server is its endpoint");
    let lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 192.168.0.2/32}}], \
            ports: [{port: 6443}]}]}",
    ));
    assert!(lab.allows("x/a", "node/n1", tcp(6443)));
}

#[test]
fn rule_30_a_masqueraded_client_is_a_node() {
    let lab =
        Lab::with(&policy("p", "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 203.0.113.0/24}}]}]}"));
    assert!(lab.allows("203.0.113.9", "x/a", tcp(80)), "externalTrafficPolicy: Local keeps the client");
    assert!(!lab.allows("node/n1", "x/a", tcp(80)), "Cluster hides it behind the node that it came to");
}

#[test]
fn rule_31_default_deny_cuts_dns_until_it_is_allowed() {
    let mut lab = Lab::with(&policy("deny", DENY_EGRESS));
    assert!(!lab.allows("x/a", "169.254.20.10", udp(53)));
    lab.apply(&policy(
        "dns",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: \
        {}}], ports: [{protocol: UDP, port: 53}]}]}",
    ));
    assert!(!lab.allows("x/a", "169.254.20.10", udp(53)), "a node-local cache is not a pod");
    lab.apply(&policy(
        "local",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: \
        169.254.20.10/32}}], ports: [{protocol: UDP, port: 53}]}]}",
    ));
    assert!(lab.allows("x/a", "169.254.20.10", udp(53)));
}

#[test]
fn rule_32_a_new_pod_is_isolated_in_the_batch_that_makes_it_known() {
    let mut lab = Lab::with(&policy("deny", DENY_INGRESS));
    let engine = lab.engines.get_mut("n0").expect("an engine");
    let late =
        Pod { attachments: [attachment("default", true, &[[10, 0, 0, 77].into()])].into(), ..pod("x", "d") };
    engine.set_pod(late);
    let batches = engine.settle();
    let [(_, changes)] = &batches[..] else { panic!("one batch: {batches:?}") };
    let isolates = |c: &&Change| c.key == Key::Subject(Direction::Ingress, [10, 0, 0, 77].into());
    assert_eq!(changes.iter().filter(isolates).count(), 1);
}

#[test]
fn rule_33_a_policy_takes_hold_of_pods_that_run() {
    let mut lab = Lab::new();
    assert_eq!(lab.reach("x/a", tcp(80)), ALL_BUT_XA);
    lab.apply(&policy("deny", DENY_INGRESS));
    assert_eq!(lab.reach("x/a", tcp(80)), NOBODY);
}

#[test]
fn rule_34_labels_namespaces_policies_and_addresses_are_looked_at_again() {
    let mut lab = Lab::with(&policy(
        "p",
        "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \
            y}}, podSelector: {matchLabels: {pod: b}}}]}]}",
    ));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/b");
    lab.change("y", "c", |pod| pod.labels = [("pod", "b")].into_iter().collect());
    assert_eq!(lab.reach("x/a", tcp(80)), "y/b y/c", "a peer's label");
    lab.tell(|e| e.set_namespace(Namespace::new("z", [("ns", "y")].into_iter().collect())));
    assert_eq!(lab.reach("x/a", tcp(80)), "y/b y/c z/b", "a namespace's label");
    lab.change("y", "b", |pod| pod.attachments[0].addresses = [[10, 0, 1, 99].into()].into());
    assert!(
        lab.allows("10.0.1.99", "x/a", tcp(80)) && !lab.allows("10.0.1.11", "x/a", tcp(80)),
        "an address"
    );
    lab.change("x", "a", |pod| pod.labels = [("pod", "other")].into_iter().collect());
    assert!(lab.allows("z/a", "x/a", tcp(80)), "the subject's label");
    lab.apply(&policy("p", DENY_INGRESS));
    assert!(!lab.allows("y/c", "x/a", tcp(80)), "the policy");
    lab.delete(Kind::Network, "x", "p");
    assert!(lab.allows("z/a", "x/a", tcp(80)) && lab.elements() == 0, "its end");
}

#[test]
fn rule_35_an_address_belongs_to_the_pod_that_runs() {
    let mut lab = Lab::with(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}",
    ));
    assert!(lab.allows("x/b", "x/a", tcp(80)));
    // The pod has ended, and another one has its address.
    lab.change("x", "b", |pod| pod.finished = true);
    assert!(!lab.allows("10.0.0.11", "x/a", tcp(80)));
    let heir =
        Pod { uid: "new".into(), created: 9, attachments: pod("x", "b").attachments, ..pod("y", "heir") };
    lab.set_pod(&heir);
    assert!(!lab.allows("10.0.0.11", "x/a", tcp(80)));
    // Not told that it has ended: the younger of two counts, and the deletion of the old one takes nothing
    // away.
    lab.change("x", "b", |pod| pod.finished = false);
    assert!(!lab.allows("10.0.0.11", "x/a", tcp(80)));
    lab.change("y", "heir", |pod| pod.labels = [("pod", "b")].into_iter().collect());
    lab.apply(&policy(
        "p",
        "{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: \
        {matchLabels: {pod: b}}}]}]}",
    ));
    lab.tell(|e| e.delete_pod(&PodKey::new("x", "b"), None));
    assert!(lab.allows("10.0.0.11", "x/a", tcp(80)));
    lab.tell(|e| e.delete_pod(&PodKey::new("y", "heir"), Some("an-earlier-one")));
    assert!(lab.allows("10.0.0.11", "x/a", tcp(80)), "a late word about an earlier pod of that name");
}

#[test]
fn rule_36_a_live_connection_can_be_judged_again_and_a_restart_changes_nothing() {
    let mut lab = Lab::new();
    let flow = Flow {
        network: "default".into(),
        source: [10, 0, 1, 10].into(),
        destination: [10, 0, 0, 10].into(),
        traffic: tcp(80),
        state: State::New,
    };
    assert!(lab.judge(&flow).allowed());
    lab.apply(&policy("deny", DENY_INGRESS));
    assert!(
        lab.judge(&Flow { state: State::Established, ..flow.clone() }).allowed(),
        "as a packet it passes"
    );
    assert!(
        !lab.judge(&flow).allowed(),
        "as a connection it would be refused: whoever wants to cut it knows"
    );
    // An engine that starts again comes to the same elements.
    let again = Lab::with(&policy("deny", DENY_INGRESS));
    for (node, engine) in &lab.engines {
        assert_eq!(engine.elements("default"), again.engines[node].elements("default"));
    }
}

#[test]
fn rule_37_policies_act_in_the_primary_network_and_its_pods_are_the_peers() {
    let mut lab = Lab::new();
    lab.move_to("x", "blue");
    lab.move_to("y", "blue");
    lab.apply(&policy("p", "{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}"));
    assert!(lab.allows_in("blue", "y/a", "x/a", tcp(80)));
    assert!(!lab.allows_in("blue", "10.0.2.10", "x/a", tcp(80)), "z/a has this address, in another Network");
    // A further interface is none of a core policy's business.
    lab.change("x", "a", |pod| {
        pod.attachments =
            [pod.attachments[0].clone(), attachment("green", false, &[[10, 9, 0, 1].into()])].into();
    });
    assert!(lab.allows_in("green", "203.0.113.9", "x/a", tcp(80)));
    // One pod may have another primary Network than its namespace.
    lab.change("x", "c", |pod| pod.attachments = [attachment("red", true, &[[10, 8, 0, 1].into()])].into());
    assert!(!lab.allows_in("red", "203.0.113.9", "x/c", tcp(80)));
}

#[test]
fn rule_38_a_cluster_service_on_the_uplink_is_judged_as_its_endpoints() {
    let mut lab = Lab::new();
    lab.move_to("x", "blue");
    let dns = Alias {
        address: [10, 96, 0, 10].into(),
        protocol: Protocol::Udp,
        port: 53,
        endpoints: [AliasEndpoint { address: [10, 0, 1, 10].into(), port: 5353 }].into(),
    };
    let api = Alias {
        address: [10, 96, 0, 1].into(),
        protocol: Protocol::Tcp,
        port: 443,
        endpoints: [AliasEndpoint { address: [192, 168, 0, 2].into(), port: 6443 }].into(),
    };
    lab.tell(|e| e.set_aliases("blue", &[dns.clone(), api.clone()]));
    let allows = |lab: &Lab| {
        (
            lab.allows_in("blue", "x/a", "10.96.0.10", udp(53)),
            lab.allows_in("blue", "x/a", "10.96.0.1", tcp(443)),
        )
    };
    assert_eq!(allows(&lab), (true, true));
    lab.apply(&policy("deny", DENY_EGRESS));
    assert_eq!(allows(&lab), (false, false));
    lab.apply(&policy(
        "dns",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: \
        {matchLabels: {ns: y}}}], ports: [{protocol: UDP, port: 5353}]}]}",
    ));
    assert_eq!(allows(&lab), (true, false), "y/a is no pod of this Network, and yet the endpoint");
    lab.apply(&policy(
        "api",
        "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: \
        192.168.0.0/24}}], ports: [{port: 6443}]}]}",
    ));
    assert_eq!(allows(&lab), (true, true));
    assert!(
        !lab.allows_in("blue", "x/a", "10.96.0.10", udp(5353)),
        "the service's own port, not the endpoint's"
    );
    lab.tell(|e| {
        let more = [
            AliasEndpoint { address: [10, 0, 1, 10].into(), port: 5353 },
            AliasEndpoint { address: [10, 0, 2, 10].into(), port: 5353 },
        ];
        e.set_aliases("blue", &[Alias { endpoints: more.into(), ..dns.clone() }, api.clone()]);
    });
    assert_eq!(allows(&lab), (false, true), "every endpoint must be allowed");
    lab.tell(|e| e.set_aliases("blue", &[Alias { endpoints: [].into(), ..dns.clone() }, api.clone()]));
    assert_eq!(allows(&lab), (false, true), "and one must be known");
}

#[test]
fn a_pod_stays_subject_to_policies_on_its_node_whoever_claims_its_address_elsewhere() {
    let mut lab = Lab::new();
    lab.apply(&policy("deny", "{podSelector: {}, policyTypes: [Ingress]}"));
    let subjects = |lab: &Lab| {
        let elements = lab.engines["n0"].elements("default");
        elements.keys().filter(|key| matches!(key, Key::Subject(..))).copied().collect::<Vec<_>>()
    };
    let before = subjects(&lab);
    assert!(!before.is_empty());
    // Another node tells of a younger pod with the address of x/a: a fixed address that was handed on, or a
    // node that lies.
    let addresses = pod("x", "a").attachments;
    let liar = Pod { node: "n1".into(), created: 99, attachments: addresses, ..Pod::new("z", "liar") };
    lab.tell(|e| e.set_pod(liar.clone()));
    assert_eq!(subjects(&lab), before, "the pod is still on this node, and isolated");
    lab.tell(|e| e.delete_pod(&liar.key, None));
    assert_eq!(subjects(&lab), before);
}
