//! Random clusters, small enough that things meet: few labels, few addresses, few ports.

use std::net::IpAddr;

use knit_policy::model::*;
use knit_policy::sets::Engine;
use proptest::prelude::*;

#[derive(Debug, Clone)]
pub enum Event {
    SetPod(Pod),
    DeletePod(PodKey),
    SetNamespace(Namespace),
    DeleteNamespace(Name),
    SetNode(Node),
    DeleteNode(Name),
    SetPolicy(Box<Policy>),
    DeletePolicy(PolicyName),
    SetAliases(Name, Vec<Alias>),
}

pub fn tell(engine: &mut Engine, event: &Event) {
    match event {
        Event::SetPod(pod) => engine.set_pod(pod.clone()),
        Event::DeletePod(key) => engine.delete_pod(key, None),
        Event::SetNamespace(namespace) => engine.set_namespace(namespace.clone()),
        Event::DeleteNamespace(name) => engine.delete_namespace(name),
        Event::SetNode(node) => engine.set_node(node.clone()),
        Event::DeleteNode(name) => engine.delete_node(name),
        Event::SetPolicy(policy) => engine.set_policy((**policy).clone()),
        Event::DeletePolicy(name) => engine.delete_policy(name),
        Event::SetAliases(network, aliases) => engine.set_aliases(network, aliases),
    }
}

/// Which object an event is about.
pub fn about(event: &Event) -> String {
    match event {
        Event::SetPod(Pod { key, .. }) | Event::DeletePod(key) => format!("pod {key}"),
        Event::SetNamespace(Namespace { name, .. }) | Event::DeleteNamespace(name) => {
            format!("namespace {name}")
        }
        Event::SetNode(Node { name, .. }) | Event::DeleteNode(name) => format!("node {name}"),
        Event::SetPolicy(policy) => format!("policy {}", policy.name),
        Event::DeletePolicy(name) => format!("policy {name}"),
        Event::SetAliases(network, _) => format!("aliases {network}"),
    }
}

pub fn is_deletion(event: &Event) -> bool {
    matches!(
        event,
        Event::DeletePod(_) | Event::DeleteNamespace(_) | Event::DeleteNode(_) | Event::DeletePolicy(_)
    )
}

pub fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => pod().prop_map(Event::SetPod),
        2 => pod_key().prop_map(Event::DeletePod),
        2 => (word("abc"), labels()).prop_map(|(name, labels)| Event::SetNamespace(Namespace::new(&name,
            labels))),
        1 => word("abc").prop_map(Event::DeleteNamespace),
        2 => node().prop_map(Event::SetNode),
        1 => node_name().prop_map(Event::DeleteNode),
        8 => policy().prop_map(|p| Event::SetPolicy(Box::new(p))),
        2 => policy_name().prop_map(Event::DeletePolicy),
        1 => prop::collection::vec(alias(), 0..3).prop_map(|list| Event::SetAliases("blue".into(), list)),
    ]
}

fn word(letters: &'static str) -> impl Strategy<Value = Name> {
    prop::sample::select(letters.chars().map(|c| Name::from(c.to_string())).collect::<Vec<_>>())
}

fn labels() -> impl Strategy<Value = Labels> {
    prop::collection::vec((word("xy"), word("12")), 0..3).prop_map(|list| list.into_iter().collect())
}

pub fn pod_key() -> impl Strategy<Value = PodKey> {
    (word("abc"), word("pqrs")).prop_map(|(namespace, name)| PodKey::new(namespace, name))
}

fn node_name() -> impl Strategy<Value = Name> {
    prop::sample::select(vec![Name::from("n0"), Name::from("n1")])
}

/// Addresses of pods: few, so that one goes from pod to pod.
fn pod_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0_u8..8).prop_map(|n| IpAddr::from([10, 0, 0, n])),
        (0_u16..4).prop_map(|n| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n])),
    ]
}

fn node_address() -> impl Strategy<Value = IpAddr> {
    (0_u8..3).prop_map(|n| IpAddr::from([192, 168, 0, n]))
}

fn service_address() -> impl Strategy<Value = IpAddr> {
    (0_u8..2).prop_map(|n| IpAddr::from([10, 96, 0, n]))
}

pub fn any_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        10 => pod_address(),
        2 => node_address(),
        2 => service_address(),
        1 => Just(IpAddr::from([203, 0, 113, 9])),
        1 => Just(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 9])),
    ]
}

pub fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

fn port() -> impl Strategy<Value = u16> {
    prop::sample::select(vec![53_u16, 80, 81, 200, 8080, 65535])
}

pub fn traffic() -> impl Strategy<Value = Traffic> {
    prop_oneof![
        8 => (protocol(), port()).prop_map(|(protocol, port)| Traffic::Port(protocol, port)),
        1 => prop::sample::select(vec![128_u8, 135]).prop_map(Traffic::Icmpv6),
        1 => Just(Traffic::Other),
    ]
}

fn pod() -> impl Strategy<Value = Pod> {
    let port = (word("hm"), protocol(), port());
    let port = port.prop_map(|(name, protocol, number)| NamedPort { name, protocol, number });
    let addresses = prop::collection::vec(pod_address(), 0..3);
    let attachment = (prop::sample::select(vec!["default", "blue"]), any::<bool>(), addresses);
    let attachment = attachment.prop_map(|(network, primary, addresses)| Attachment {
        network: network.into(),
        primary,
        addresses: addresses.into(),
    });
    (
        pod_key(),
        (0_i64..3, 0_u8..3),
        node_name(),
        labels(),
        prop::collection::vec(port, 0..3),
        prop::collection::vec(attachment, 0..3),
        (prop::bool::weighted(0.1), prop::bool::weighted(0.1), prop::bool::weighted(0.2)),
    )
        .prop_map(
            |(key, (created, uid), node, labels, ports, attachments, (host_network, finished, partly))| {
                // One that slices tell of.
                let (labels, known_labels) = match partly {
                    true => {
                        let known = labels.iter().filter(|(key, _)| ***key == *"x");
                        (known.map(|(k, v)| (k.clone(), v.clone())).collect(), Some(["x".into()].into()))
                    }
                    false => (labels, None),
                };
                Pod {
                    uid: format!("{key}-{uid}").into(),
                    key,
                    created,
                    node,
                    labels,
                    known_labels,
                    ports: ports.into(),
                    attachments: attachments.into(),
                    host_network,
                    finished,
                }
            },
        )
}

fn node() -> impl Strategy<Value = Node> {
    (node_name(), labels(), prop::collection::vec(node_address(), 0..3))
        .prop_map(|(name, labels, addresses)| Node { name, labels, addresses: addresses.into() })
}

fn alias() -> impl Strategy<Value = Alias> {
    let endpoint = (any_address(), port()).prop_map(|(address, port)| AliasEndpoint { address, port });
    (service_address(), protocol(), port(), prop::collection::vec(endpoint, 0..3)).prop_map(
        |(address, protocol, port, endpoints)| Alias { address, protocol, port, endpoints: endpoints.into() },
    )
}

fn selector() -> impl Strategy<Value = Selector> {
    let operator = prop::sample::select(vec![
        Operator::In,
        Operator::In,
        Operator::NotIn,
        Operator::Exists,
        Operator::DoesNotExist,
    ]);
    let one = (word("xy"), operator, prop::collection::vec(word("12"), 0..2))
        .prop_map(|(key, operator, values)| Requirement::new(key, operator, values));
    prop::collection::vec(one, 0..3).prop_map(|list| list.into_iter().collect())
}

fn subject() -> impl Strategy<Value = Subject> {
    let namespaces = prop_oneof![
        word("abc").prop_map(NamespaceMatch::Named),
        selector().prop_map(NamespaceMatch::Selected),
    ];
    (namespaces, selector()).prop_map(|(namespaces, pods)| Subject { namespaces, pods })
}

fn cidr() -> impl Strategy<Value = ipnet::IpNet> {
    prop_oneof![
        (0_u8..8, 28_u8..=32).prop_map(|(n, length)| (IpAddr::from([10, 0, 0, n]), length)),
        (any_address(), prop::sample::select(vec![0_u8, 8, 24, 32])),
    ]
    .prop_map(|(address, length)| ipnet::IpNet::new(address, length).expect("a CIDR"))
}

fn peer() -> impl Strategy<Value = Peer> {
    prop_oneof![
        3 => subject().prop_map(Peer::Pods),
        2 => (cidr(), prop::collection::vec(cidr(), 0..3))
            .prop_map(|(cidr, except)| Peer::Addresses(AddressRanges::block(cidr, &except))),
        1 => selector().prop_map(Peer::Nodes),
    ]
}

fn port_match() -> impl Strategy<Value = PortMatch> {
    let range = (protocol(), port(), port());
    let range =
        range.prop_map(|(p, a, b)| PortMatch::Numbers(Ports::of(p, PortRanges::range(a.min(b), a.max(b)))));
    prop_oneof![
        2 => (protocol(), port()).prop_map(|(p, n)| PortMatch::Numbers(Ports::of(p, PortRanges::range(n,
            n)))),
        1 => protocol().prop_map(|p| PortMatch::Numbers(Ports::of(p, PortRanges::all()))),
        1 => range,
        1 => (word("hm"), prop::option::of(protocol())).prop_map(|(name, protocol)| PortMatch::Named(name,
            protocol)),
    ]
}

fn rule(actions: &'static [Action]) -> impl Strategy<Value = Rule> {
    let some = |strategy| prop::option::weighted(0.7, prop::collection::vec(strategy, 0..3));
    (
        prop::sample::select(actions),
        some(peer().boxed()),
        prop::option::weighted(0.6, prop::collection::vec(port_match(), 0..3)),
    )
        .prop_map(|(action, peers, ports)| Rule {
            name: None,
            action,
            peers: peers.map(Into::into),
            ports: ports.map(Into::into),
        })
}

fn policy_name() -> impl Strategy<Value = PolicyName> {
    let namespaced = (prop::sample::select(vec![Kind::Network, Kind::Multi]), word("abc"), word("uvw"));
    let cluster =
        (prop::sample::select(vec![Kind::Cluster, Kind::Admin]), Just(Name::default()), word("uvw"));
    prop_oneof![2 => namespaced, 1 => cluster].prop_map(|(kind, namespace, name)| PolicyName {
        kind,
        namespace,
        name,
    })
}

pub fn policy() -> impl Strategy<Value = Policy> {
    let networks =
        prop::collection::vec(prop::sample::select(vec!["default", "blue"]).prop_map(Name::from), 0..3);
    let scope = prop_oneof![Just(Scope::Every), networks.prop_map(|list| Scope::Networks(list.into()))];
    const ACCEPT: &[Action] = &[Action::Accept];
    const ALL: &[Action] = &[Action::Accept, Action::Deny, Action::Deny, Action::Pass];
    let rules = |actions| prop::option::weighted(0.7, prop::collection::vec(rule(actions), 0..4));
    let tier = prop_oneof![(0..3).prop_map(Tier::Admin), (0..3).prop_map(Tier::Baseline)];
    policy_name().prop_flat_map(move |name| {
        let own = name.kind == Kind::Network || name.kind == Kind::Multi;
        let actions = if own { ACCEPT } else { ALL };
        (Just(name), tier.clone(), scope.clone(), subject(), rules(actions), rules(actions)).prop_map(
            move |(name, tier, scope, subject, ingress, egress)| Policy {
                tier: if own { Tier::Namespace } else { tier },
                scope: if name.kind == Kind::Multi { scope } else { Scope::Primary },
                subject: if own {
                    Subject { namespaces: NamespaceMatch::Named(name.namespace.clone()), ..subject }
                } else {
                    subject
                },
                name,
                ingress: ingress.map(Into::into),
                egress: egress.map(Into::into),
            },
        )
    })
}
