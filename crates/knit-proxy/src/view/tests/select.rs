//! Which endpoints are chosen: rules 8, 9, 11, 16, 30 to 32, 35, 38, 39.

use super::*;
use crate::model::{Conditions, TrafficPolicy};

const NOT_READY: Conditions = Conditions::NOT_READY;
const DRAINING: Conditions = Conditions::SERVING_TERMINATING;
const GONE: Conditions = Conditions::TERMINATING;

/// Which external policy, if the service is externally accessible.
type External = Option<TrafficPolicy>;

struct Case {
    name: &'static str,
    internal: TrafficPolicy,
    external: External,
    endpoints: Vec<Endpoint>,
    /// The last number of each address that is wanted: 10.1.0.N.
    cluster: &'static [u8],
    local: &'static [u8],
    reachable: &'static [u8],
    /// What happens to traffic to the cluster IP, and to the node port from outside.
    inside: Action,
    outside: Option<Action>,
}

fn ep(n: u8) -> Endpoint {
    Endpoint::new(ip(&format!("10.1.0.{n}"))).on("elsewhere")
}

fn here(n: u8) -> Endpoint {
    ep(n).on("here")
}

fn in_zone(n: u8, zone: &str) -> Endpoint {
    ep(n).hints(&[], &[zone])
}

fn to_node(n: u8, node: &str) -> Endpoint {
    ep(n).hints(&[node], &[])
}

fn numbers(targets: &[Target]) -> Vec<u8> {
    targets.iter().map(|t| t.address.to_string().rsplit('.').next().unwrap().parse().unwrap()).collect()
}

#[allow(clippy::too_many_lines, reason = "it is a table")]
fn cases() -> Vec<Case> {
    use Action::{Drop, Endpoints, Reject};
    use TrafficPolicy::{Cluster, Local};
    let all = Endpoints(Scope::Cluster);
    let own = Endpoints(Scope::Local);
    let case = |name, internal, external, endpoints, sets: [&'static [u8]; 3], inside, outside| Case {
        name,
        internal,
        external,
        endpoints,
        cluster: sets[0],
        local: sets[1],
        reachable: sets[2],
        inside,
        outside,
    };
    vec![
        case("nothing at all", Cluster, None, vec![], [&[], &[], &[]], Reject, None),
        case("no hints", Cluster, None, vec![ep(1), ep(2)], [&[1, 2], &[], &[1, 2]], all, None),
        case(
            "zone hints, all of them, one for us",
            Cluster,
            None,
            vec![in_zone(1, "zone-a"), in_zone(2, "zone-b"), in_zone(3, "zone-a")],
            [&[1, 3], &[], &[1, 3]],
            all,
            None,
        ),
        case(
            "zone hints, one is missing",
            Cluster,
            None,
            vec![in_zone(1, "zone-a"), ep(2), in_zone(3, "zone-b")],
            [&[1, 2, 3], &[], &[1, 2, 3]],
            all,
            None,
        ),
        case(
            "zone hints, none for us",
            Cluster,
            None,
            vec![in_zone(1, "zone-b"), in_zone(2, "zone-c")],
            [&[1, 2], &[], &[1, 2]],
            all,
            None,
        ),
        case(
            "the one without a hint is not ready, so it does not count",
            Cluster,
            None,
            vec![in_zone(1, "zone-a"), in_zone(2, "zone-b"), ep(3).state(NOT_READY)],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "our zone's endpoint is not ready, so hints are not used",
            Cluster,
            None,
            vec![in_zone(1, "zone-a").state(NOT_READY), in_zone(2, "zone-b")],
            [&[2], &[], &[2]],
            all,
            None,
        ),
        case(
            "an empty list of hints is no hint",
            Cluster,
            None,
            vec![in_zone(1, "zone-a"), ep(2).hints(&[], &[])],
            [&[1, 2], &[], &[1, 2]],
            all,
            None,
        ),
        case(
            "several zones in one hint",
            Cluster,
            None,
            vec![ep(1).hints(&[], &["zone-b", "zone-a"]), in_zone(2, "zone-b")],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "node hints, all of them, one for us",
            Cluster,
            None,
            vec![to_node(1, "here"), to_node(2, "there")],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "node hints go before zone hints",
            Cluster,
            None,
            vec![ep(1).hints(&["here"], &["zone-b"]), ep(2).hints(&["there"], &["zone-a"])],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "node hints for others only, so zones decide",
            Cluster,
            None,
            vec![ep(1).hints(&["there"], &["zone-a"]), ep(2).hints(&["there"], &["zone-b"])],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "node hints missing on one, so zones decide",
            Cluster,
            None,
            vec![ep(1).hints(&["here"], &["zone-b"]), ep(2).hints(&[], &["zone-a"])],
            [&[2], &[], &[2]],
            all,
            None,
        ),
        case(
            "a node hint is not the node it runs on",
            Cluster,
            None,
            vec![here(1).hints(&["there"], &[]), to_node(2, "here")],
            [&[2], &[], &[2]],
            all,
            None,
        ),
        case("internal Local, one here", Local, None, vec![here(1), ep(2)], [&[], &[1], &[1]], own, None),
        case("internal Local, none here", Local, None, vec![ep(1), ep(2)], [&[], &[], &[]], Drop, None),
        case("internal Local, no endpoints", Local, None, vec![], [&[], &[], &[]], Reject, None),
        case(
            "internal Local ignores hints",
            Local,
            None,
            vec![here(1).hints(&[], &["zone-b"]), in_zone(2, "zone-a")],
            [&[], &[1], &[1]],
            own,
            None,
        ),
        case(
            "the external policy does not count without an external way in",
            Cluster,
            None,
            vec![here(1), ep(2)],
            [&[1, 2], &[], &[1, 2]],
            all,
            None,
        ),
        case(
            "external Local, some here",
            Cluster,
            Some(Local),
            vec![here(1), ep(2)],
            [&[1, 2], &[1], &[1, 2]],
            all,
            Some(own),
        ),
        case(
            "external Local, none here",
            Cluster,
            Some(Local),
            vec![ep(1), ep(2)],
            [&[1, 2], &[], &[1, 2]],
            all,
            Some(Drop),
        ),
        case(
            "external Local, none anywhere",
            Cluster,
            Some(Local),
            vec![],
            [&[], &[], &[]],
            Reject,
            Some(Reject),
        ),
        case(
            "both Local still needs all for the short way",
            Local,
            Some(Local),
            vec![here(1), ep(2)],
            [&[1, 2], &[1], &[1, 2]],
            own,
            Some(own),
        ),
        case(
            "internal Local, external Cluster",
            Local,
            Some(Cluster),
            vec![here(1), ep(2)],
            [&[1, 2], &[1], &[1, 2]],
            own,
            Some(all),
        ),
        case(
            "hints and localness disagree, so the two are merged",
            Cluster,
            Some(Local),
            vec![here(1).hints(&[], &["zone-b"]), in_zone(2, "zone-a")],
            [&[2], &[1], &[1, 2]],
            all,
            Some(own),
        ),
        case(
            "all terminating, those that answer are used",
            Cluster,
            None,
            vec![ep(1).state(DRAINING), ep(2).state(GONE)],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "terminating ones are not used while one is ready",
            Cluster,
            None,
            vec![ep(1).state(DRAINING), ep(2)],
            [&[2], &[], &[2]],
            all,
            None,
        ),
        case(
            "none answers",
            Cluster,
            Some(Local),
            vec![ep(1).state(GONE), here(2).state(NOT_READY)],
            [&[], &[], &[]],
            Reject,
            Some(Reject),
        ),
        case(
            "ready elsewhere, terminating here: scopes decide for themselves",
            Cluster,
            Some(Local),
            vec![here(1).state(DRAINING), ep(2)],
            [&[2], &[1], &[1, 2]],
            all,
            Some(own),
        ),
        case(
            "terminating elsewhere only, external Local",
            Cluster,
            Some(Local),
            vec![ep(1).state(DRAINING)],
            [&[1], &[], &[1]],
            all,
            Some(Drop),
        ),
        case(
            "ready and terminating here",
            Local,
            Some(Local),
            vec![here(1).state(DRAINING), here(2), ep(3).state(DRAINING)],
            [&[2], &[2], &[2]],
            own,
            Some(own),
        ),
        case(
            "terminating everywhere, both Local",
            Local,
            Some(Local),
            vec![here(1).state(DRAINING), ep(2).state(DRAINING), here(3).state(GONE)],
            [&[1, 2], &[1], &[1, 2]],
            own,
            Some(own),
        ),
        case(
            "serving but neither ready nor terminating is never used",
            Cluster,
            None,
            vec![ep(1).state(Conditions { ready: false, serving: true, terminating: false })],
            [&[], &[], &[]],
            Reject,
            None,
        ),
        case(
            "ready is trusted even where it does not serve",
            Cluster,
            None,
            vec![ep(1).state(Conditions { ready: true, serving: false, terminating: true })],
            [&[1], &[], &[1]],
            all,
            None,
        ),
        case(
            "terminating endpoints' hints do not count",
            Cluster,
            None,
            vec![in_zone(1, "zone-a").state(DRAINING), in_zone(2, "zone-b").state(DRAINING)],
            [&[1, 2], &[], &[1, 2]],
            all,
            None,
        ),
    ]
}

/// Rules 30 to 33, 35, 38, 39, as one table.
#[test]
fn rules_30_31_32_33_35_38_39_which_endpoints() {
    for case in cases() {
        let mut service = if case.external.is_some() { everywhere() } else { service() };
        service.internal_policy = case.internal;
        service.external_policy = case.external.unwrap_or(TrafficPolicy::Local);
        let view = view_of(ViewConfig::default(), service, &[group(&case.endpoints)]);
        let port = port(&view);
        assert_eq!(numbers(&port.cluster), case.cluster, "{}: cluster", case.name);
        assert_eq!(numbers(&port.local), case.local, "{}: local", case.name);
        assert_eq!(numbers(&port.reachable()), case.reachable, "{}: reachable", case.name);
        assert_eq!(
            frontend(port, FrontendKind::ClusterIp).route.action,
            case.inside,
            "{}: inside",
            case.name
        );
        for kind in [FrontendKind::NodePort, FrontendKind::ExternalIp, FrontendKind::LoadBalancerIp] {
            let outside = port.frontends.iter().find(|f| f.kind == kind).map(|f| f.route.action);
            assert_eq!(outside, case.outside, "{}: {kind}", case.name);
        }
    }
}

#[test]
fn rule_35_without_a_zone_zone_hints_are_not_used() {
    let mut view =
        view_of(ViewConfig::default(), service(), &[group(&[in_zone(1, "zone-a"), in_zone(2, "zone-b")])]);
    assert_eq!(numbers(&port(&view).cluster), [1]);
    view.set_node(NodeInfo { zone: None, ..node() });
    view.take_changes();
    assert_eq!(numbers(&port(&view).cluster), [1, 2]);
}

#[test]
fn rule_37_a_new_zone_recomputes_everything() {
    let mut view =
        view_of(ViewConfig::default(), service(), &[group(&[in_zone(1, "zone-a"), in_zone(2, "zone-b")])]);
    view.set_node(NodeInfo { zone: Some("zone-b".into()), ..node() });
    let changes = view.take_changes();
    assert_eq!(changes.ports.len(), 1);
    assert_eq!(numbers(&port(&view).cluster), [2]);
}

#[test]
fn rule_8_groups_are_merged_and_duplicates_count_once() {
    let groups = [
        named_group("ns/b", &[("", Protocol::Tcp, 8080)], &[ep(2), ep(3)]),
        named_group("ns/a", &[("", Protocol::Tcp, 8080)], &[ep(1), ep(2)]),
    ];
    let view = view_of(ViewConfig::default(), service(), &groups);
    assert_eq!(text(&port(&view).cluster), ["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"]);
}

#[test]
fn rule_9_of_two_with_one_address_the_one_that_stays_counts() {
    for (a, b) in [(GONE, Conditions::READY), (Conditions::READY, GONE), (DRAINING, Conditions::READY)] {
        let groups = [
            named_group("ns/a", &[("", Protocol::Tcp, 8080)], &[ep(1).state(a)]),
            named_group("ns/b", &[("", Protocol::Tcp, 8080)], &[ep(1).state(b)]),
        ];
        let view = view_of(ViewConfig::default(), service(), &groups);
        assert_eq!(numbers(&port(&view).cluster), [1], "{a:?} and {b:?}");
    }
    // Not ready, but staying, goes before terminating and answering.
    let groups = [
        named_group("ns/a", &[("", Protocol::Tcp, 8080)], &[ep(1).state(DRAINING)]),
        named_group("ns/b", &[("", Protocol::Tcp, 8080)], &[ep(1).state(NOT_READY)]),
    ];
    let view = view_of(ViewConfig::default(), service(), &groups);
    assert_eq!(numbers(&port(&view).cluster), [0u8; 0]);
}

#[test]
fn rule_10_an_endpoint_that_moves_to_another_group_is_never_lost() {
    let one = |name: &str, endpoints: &[Endpoint]| named_group(name, &[("", Protocol::Tcp, 8080)], endpoints);
    let mut view = view_of(ViewConfig::default(), service(), &[one("ns/a", &[ep(1)])]);
    view.set_group(one("ns/b", &[ep(1)]));
    assert!(view.take_changes().ports.is_empty());
    view.set_group(one("ns/a", &[]));
    assert!(view.take_changes().ports.is_empty());
    assert_eq!(numbers(&port(&view).cluster), [1]);
    // Taken out of the one before it is in the other, both within one batch: no change either.
    view.set_group(one("ns/b", &[]));
    view.set_group(one("ns/a", &[ep(1)]));
    assert!(view.take_changes().ports.is_empty());
}

#[test]
fn rule_11_ports_match_by_name_and_protocol_and_the_number_is_the_groups() {
    let mut service = service();
    service.ports = Box::new([
        ServicePort::new("web", Protocol::Tcp, 80),
        ServicePort::new("web", Protocol::Udp, 80),
        ServicePort::new("other", Protocol::Tcp, 81),
    ]);
    let groups = [
        named_group("ns/a", &[("web", Protocol::Tcp, 8080), ("other", Protocol::Udp, 9)], &[ep(1)]),
        named_group("ns/b", &[("web", Protocol::Tcp, 9090)], &[ep(2)]),
    ];
    let view = view_of(ViewConfig::default(), service, &groups);
    let cluster = |name, protocol| text(&view.current().ports[&key(name, protocol, Family::V4)].cluster);
    assert_eq!(cluster("web", Protocol::Tcp), ["10.1.0.1:8080", "10.1.0.2:9090"]);
    assert_eq!(cluster("web", Protocol::Udp), [""; 0]);
    assert_eq!(cluster("other", Protocol::Tcp), [""; 0]);
}

#[test]
fn rule_16_only_the_port_without_endpoints_rejects() {
    let mut service = service();
    service.ports =
        Box::new([ServicePort::new("a", Protocol::Tcp, 80), ServicePort::new("b", Protocol::Tcp, 81)]);
    let view = view_of(
        ViewConfig::default(),
        service,
        &[named_group("ns/a", &[("a", Protocol::Tcp, 8080)], &[ep(1)])],
    );
    let action = |name| {
        frontend(&view.current().ports[&key(name, Protocol::Tcp, Family::V4)], FrontendKind::ClusterIp)
            .route
            .action
    };
    assert_eq!(action("a"), Action::Endpoints(Scope::Cluster));
    assert_eq!(action("b"), Action::Reject);
}

#[test]
fn rule_15_local_is_by_node_name() {
    let view =
        view_of(ViewConfig::default(), service(), &[group(&[here(1), ep(2), Endpoint::new(ip("10.1.0.3"))])]);
    let local: Vec<bool> = port(&view).cluster.iter().map(|t| t.local).collect();
    assert_eq!(local, [true, false, false]);
}

#[test]
fn rule_51_udp_ports_carry_everything_that_serves() {
    let service = Service::new("ns/svc").cluster_ip(ip("10.0.0.1")).port(Protocol::Udp, 53);
    let endpoints =
        [in_zone(1, "zone-a"), in_zone(2, "zone-b"), ep(3).state(DRAINING), ep(4).state(NOT_READY)];
    let view = view_of(
        ViewConfig::default(),
        service,
        &[named_group("ns/a", &[("", Protocol::Udp, 5353)], &endpoints)],
    );
    let port = &view.current().ports[&key("", Protocol::Udp, Family::V4)];
    assert_eq!(numbers(&port.serving), [1, 2, 3]);
}
