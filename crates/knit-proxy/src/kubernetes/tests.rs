//! Conversion, from objects as people write them. Rules 1 to 5, 7, 11 to 14, 17 to 19, 22, 24, 36, 39, 40,
//! 44, 54, 55, 61.

use serde_json::{Value, json};

use super::*;
use crate::model::{Affinity, Conditions, EndpointGroup, Protocol, Service, TrafficPolicy};

fn convert(object: Value) -> Converted {
    let object: k8s_openapi::api::core::v1::Service = serde_json::from_value(object).expect("a Service");
    Kubernetes::new().service(&object)
}

#[allow(clippy::needless_pass_by_value, reason = "json! in the calls reads better without a borrow")]
fn with_spec(spec: Value) -> Value {
    json!({ "metadata": { "namespace": "ns", "name": "svc" }, "spec": spec })
}

/// The service, and its problems as text.
fn served(object: Value) -> (Service, Vec<String>) {
    let converted = convert(object);
    let Event::SetService(service) = converted.event else { panic!("ignored: {:?}", converted.ignored) };
    (*service, converted.problems.iter().map(ToString::to_string).collect())
}

fn slice(object: Value) -> Converted {
    Kubernetes::new().slice(&serde_json::from_value(object).expect("an EndpointSlice"))
}

fn group(object: Value) -> (EndpointGroup, Vec<String>) {
    let converted = slice(object);
    let Event::SetGroup(group) = converted.event else { panic!("ignored: {:?}", converted.ignored) };
    (*group, converted.problems.iter().map(ToString::to_string).collect())
}

fn shown<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

#[test]
fn a_plain_service() {
    let (service, problems) = served(json!({
        "metadata": { "namespace": "ns", "name": "svc", "creationTimestamp": "2026-01-02T03:04:05Z" },
        "spec": { "clusterIP": "10.0.0.1", "ports": [
            { "name": "web", "port": 80, "targetPort": "http", "appProtocol": "h2c" },
            { "name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053 },
            { "name": "tel", "port": 99, "protocol": "SCTP" }
        ] }
    }));
    assert_eq!(problems, [""; 0]);
    assert_eq!((service.name.as_str(), service.created), ("ns/svc", 1_767_323_045));
    let ports: Vec<_> =
        service.ports.iter().map(|p| (&*p.name, p.protocol, p.port, p.node_port.map(u16::from))).collect();
    assert_eq!(
        ports,
        [
            ("web", Protocol::Tcp, 80, None),
            ("dns", Protocol::Udp, 53, Some(30053)),
            ("tel", Protocol::Sctp, 99, None)
        ]
    );
}

#[test]
fn rule_1_services_of_another_proxy() {
    let labelled = |name: Option<&str>| {
        let mut object = with_spec(json!({ "clusterIP": "10.0.0.1" }));
        if let Some(name) = name {
            object["metadata"]["labels"] = json!({ PROXY_NAME_LABEL: name });
        }
        serde_json::from_value(object).expect("a Service")
    };
    let mut plain = Kubernetes::new();
    let mut mine = Kubernetes::new().named("mine");
    assert_eq!(plain.service(&labelled(None)).ignored, None);
    assert_eq!(plain.service(&labelled(Some("mine"))).ignored, Some(Ignored::OtherProxy));
    assert_eq!(mine.service(&labelled(None)).ignored, Some(Ignored::OtherProxy));
    assert_eq!(mine.service(&labelled(Some("mine"))).ignored, None);
    assert_eq!(mine.service(&labelled(Some("yours"))).ignored, Some(Ignored::OtherProxy));
    // The label came later: the service goes.
    let gone = plain.service(&labelled(Some("mine"))).event;
    assert_eq!(gone, Event::DeleteService("ns/svc".into()));
}

#[test]
fn rules_3_4_services_without_a_cluster_ip_and_external_names() {
    for (spec, why) in [
        (json!({ "clusterIP": "None" }), Ignored::NoClusterIp),
        (json!({ "clusterIP": "None", "clusterIPs": ["None"] }), Ignored::NoClusterIp),
        (json!({ "clusterIP": "" }), Ignored::NoClusterIp),
        (json!({}), Ignored::NoClusterIp),
        (json!({ "type": "ExternalName", "clusterIP": "10.0.0.1" }), Ignored::ExternalName),
    ] {
        let converted = convert(with_spec(spec.clone()));
        assert_eq!(converted.ignored, Some(why), "{spec}");
        assert_eq!(converted.event, Event::DeleteService("ns/svc".into()));
    }
}

#[test]
fn rule_18_cluster_ips_go_by_family() {
    let ips = |spec| {
        let (service, problems) = served(with_spec(spec));
        (
            service.cluster_ip_v4.map(|a| a.to_string()),
            service.cluster_ip_v6.map(|a| a.to_string()),
            problems.len(),
        )
    };
    let v4 = || Some("10.0.0.1".to_owned());
    let v6 = || Some("fd00::1".to_owned());
    assert_eq!(ips(json!({ "clusterIP": "10.0.0.1" })), (v4(), None, 0));
    assert_eq!(ips(json!({ "clusterIP": "fd00::1", "ipFamilies": ["IPv6"] })), (None, v6(), 0));
    let both = json!({ "clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.0.0.1"],
        "ipFamilies": ["IPv6", "IPv4"] });
    assert_eq!(ips(both), (v4(), v6(), 0));
    // An address that is not of the family listed beside it is not used, and named.
    let wrong = json!({ "clusterIPs": ["10.0.0.1", "fd00::1"], "ipFamilies": ["IPv4"] });
    assert_eq!(ips(wrong), (v4(), None, 1));
}

#[test]
fn rules_12_19_22_addresses() {
    let (service, problems) = served(json!({
        "metadata": { "namespace": "ns", "name": "svc" },
        "spec": { "type": "LoadBalancer", "clusterIP": "10.0.0.1",
                  "externalIPs": ["203.0.113.001", "fd00::9", "300.1.1.1"] },
        "status": { "loadBalancer": { "ingress": [
            { "ip": "203.0.113.2" },
            { "ip": "203.0.113.3", "ipMode": "VIP" },
            { "ip": "203.0.113.4", "ipMode": "Proxy" },
            { "hostname": "lb.example.net" },
            { "ip": "nonsense" }
        ] } }
    }));
    assert_eq!(shown(&service.external_ips), ["203.0.113.1", "fd00::9"]);
    assert_eq!(shown(&service.load_balancer_ips), ["203.0.113.2", "203.0.113.3"]);
    assert_eq!(
        problems,
        [
            "Service ns/svc: spec.externalIPs[2]: \"300.1.1.1\" is not an IP address; it is ignored",
            "Service ns/svc: status.loadBalancer.ingress[4].ip: \"nonsense\" is not an IP address; \
            it is ignored",
        ]
    );
}

#[test]
fn rule_44_source_ranges() {
    let ranges = |list: Value| {
        let (service, problems) =
            served(with_spec(json!({ "clusterIP": "10.0.0.1", "loadBalancerSourceRanges": list })));
        (service.source_ranges.map(|r| shown(&r)), problems.len())
    };
    assert_eq!(ranges(json!([])), (None, 0));
    assert_eq!(
        ranges(json!([" 192.0.2.0/24 ", "\tfd00::/8\n"])),
        (Some(vec!["192.0.2.0/24".into(), "fd00::/8".into()]), 0)
    );
    assert_eq!(ranges(json!(["192.0.2.0/24", "bad"])), (Some(vec!["192.0.2.0/24".into()]), 1));
    // Nothing could be read: it stays a restriction.
    assert_eq!(ranges(json!(["bad", "192.0.2.0/99"])), (Some(vec![]), 2));
}

#[test]
fn bad_ports_are_named_and_the_rest_is_served() {
    let (service, problems) = served(with_spec(json!({ "clusterIP": "10.0.0.1", "ports": [
        { "name": "a", "port": 0 },
        { "name": "b", "port": 65536 },
        { "name": "c", "port": 80, "protocol": "ICMP" },
        { "name": "d", "port": 80, "nodePort": 70000 },
        { "name": "e", "port": -1 },
        { "name": "f", "port": 65535, "nodePort": 0 }
    ] })));
    let ports: Vec<_> = service.ports.iter().map(|p| (&*p.name, p.port, p.node_port)).collect();
    assert_eq!(ports, [("d", 80, None), ("f", 65535, None)]);
    let fields: Vec<_> = problems.iter().map(|p| p.split(": ").nth(1).unwrap()).collect();
    assert_eq!(
        fields,
        [
            "spec.ports[0].port",
            "spec.ports[1].port",
            "spec.ports[2].protocol",
            "spec.ports[3].nodePort",
            "spec.ports[4].port"
        ]
    );
}

#[test]
fn rules_31_32_39_policies() {
    let policies = |spec| {
        let (service, _) = served(with_spec(spec));
        (service.internal_policy, service.external_policy)
    };
    use TrafficPolicy::{Cluster, Local};
    assert_eq!(policies(json!({ "clusterIP": "10.0.0.1" })), (Cluster, Cluster));
    assert_eq!(
        policies(json!({ "clusterIP": "10.0.0.1", "internalTrafficPolicy": "Local" })),
        (Local, Cluster)
    );
    let spec = |type_| json!({ "clusterIP": "10.0.0.1", "type": type_, "externalTrafficPolicy": "Local" });
    assert_eq!(policies(spec("NodePort")), (Cluster, Local));
    assert_eq!(policies(spec("LoadBalancer")), (Cluster, Local));
    assert_eq!(policies(spec("ClusterIP")), (Cluster, Cluster));
    let mut external = spec("ClusterIP");
    external["externalIPs"] = json!(["203.0.113.1"]);
    assert_eq!(policies(external), (Cluster, Local));
}

#[test]
fn rules_40_42_affinity() {
    let affinity = |spec: Value| served(with_spec(spec)).0.affinity;
    let spec = |timeout: Value| {
        json!({ "clusterIP": "10.0.0.1", "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": timeout } } })
    };
    assert_eq!(affinity(json!({ "clusterIP": "10.0.0.1", "sessionAffinity": "None" })), None);
    assert_eq!(
        affinity(json!({ "clusterIP": "10.0.0.1", "sessionAffinity": "ClientIP" })),
        Some(Affinity::default())
    );
    assert_eq!(affinity(spec(json!(60))), Some(Affinity { timeout_seconds: 60 }));
    assert_eq!(affinity(spec(json!(-5))), Some(Affinity::default()));
}

#[test]
fn rule_54_health_check_ports_need_a_load_balancer_with_local_policy() {
    let port = |type_: &str, policy: &str| {
        let spec = json!({ "clusterIP": "10.0.0.1", "type": type_, "externalTrafficPolicy": policy,
                           "healthCheckNodePort": 32000 });
        served(with_spec(spec)).0.health_check_port.map(u16::from)
    };
    assert_eq!(port("LoadBalancer", "Local"), Some(32000));
    assert_eq!(port("LoadBalancer", "Cluster"), None);
    assert_eq!(port("NodePort", "Local"), None);
}

#[test]
fn networks_go_by_namespace() {
    let mut kubernetes =
        Kubernetes::new().networks(|ns| NetworkName::from(if ns == "ns" { "blue" } else { "default" }));
    let object = serde_json::from_value(with_spec(json!({ "clusterIP": "10.0.0.1" }))).unwrap();
    let Event::SetService(service) = kubernetes.service(&object).event else { panic!("ignored") };
    assert_eq!(service.network.as_str(), "blue");
}

fn a_slice(extra: &[(&str, Value)]) -> Value {
    let mut object = json!({
        "metadata": { "namespace": "ns", "name": "svc-abc", "labels": { SERVICE_NAME_LABEL: "svc" } },
        "addressType": "IPv4",
        "ports": [{ "name": "web", "port": 8080, "protocol": "TCP" }],
        "endpoints": [{ "addresses": ["10.1.0.1", "10.1.0.2"], "nodeName": "a" }]
    });
    for (key, value) in extra {
        object[*key] = value.clone();
    }
    object
}

#[test]
fn rules_2_5_slices_that_are_not_ours() {
    let labels = |labels: Value| json!({ "namespace": "ns", "name": "svc-abc", "labels": labels });
    for (field, value, why) in [
        ("addressType", json!("FQDN"), Ignored::NotIp),
        ("metadata", labels(json!({})), Ignored::NoServiceName),
        (
            "metadata",
            labels(json!({ SERVICE_NAME_LABEL: "svc", HEADLESS_LABEL: "" })),
            Ignored::HeadlessLabel,
        ),
    ] {
        let converted = slice(a_slice(&[(field, value)]));
        assert_eq!(converted.ignored, Some(why));
        assert_eq!(converted.event, Event::DeleteGroup("ns/svc-abc".into()));
    }
    // The service is the label's, not the slice's name.
    assert_eq!(group(a_slice(&[])).0.service.as_str(), "ns/svc");
}

#[test]
fn rules_12_13_14_endpoints() {
    let (group, problems) = group(a_slice(&[(
        "endpoints",
        json!([
            { "addresses": ["10.1.0.1", "10.1.0.99"] },
            { "addresses": ["10.1.0.02"], "conditions": { "ready": false } },
            { "addresses": ["10.1.0.3"],
              "conditions": { "ready": true, "serving": false, "terminating": true } },
            { "addresses": ["fd00::1"] },
            { "addresses": ["bad"] },
            { "addresses": [] }
        ]),
    )]));
    let found: Vec<_> = group.endpoints.iter().map(|e| (e.address.to_string(), e.conditions)).collect();
    let state = |ready, serving, terminating| Conditions { ready, serving, terminating };
    assert_eq!(
        found,
        [
            ("10.1.0.1".into(), state(true, true, false)),
            ("10.1.0.2".into(), state(false, true, false)),
            ("10.1.0.3".into(), state(true, false, true)),
        ]
    );
    assert_eq!(problems.len(), 3);
    assert!(
        problems[0].starts_with("EndpointSlice ns/svc-abc: endpoints[3].addresses[0]: fd00::1"),
        "{problems:?}"
    );
}

#[test]
fn rule_11_slice_ports() {
    let (group, problems) = group(a_slice(&[(
        "ports",
        json!([
            { "name": "a", "port": 8080 },
            { "port": 8081 },
            { "name": "c" },
            { "name": "d", "port": 0 },
            { "name": "e", "port": 99999 }
        ]),
    )]));
    let ports: Vec<_> = group.ports.iter().map(|p| (&*p.name, p.number)).collect();
    assert_eq!(ports, [("a", 8080), ("", 8081)]);
    assert_eq!(problems.len(), 1);
}

#[test]
fn rules_35_36_61_hints_and_trigger_time() {
    let mut object = a_slice(&[(
        "endpoints",
        json!([
            { "addresses": ["10.1.0.1"],
              "hints": { "forZones": [{ "name": "z1" }], "forNodes": [{ "name": "n1" }, { "name": "n2" }] } },
            { "addresses": ["10.1.0.2"], "hints": { "forZones": [] } }
        ]),
    )]);
    object["metadata"]["annotations"] = json!({ TRIGGER_ANNOTATION: "2026-01-02T03:04:05.678Z" });
    let (group, _) = group(object);
    let hints = group.endpoints[0].hints.as_ref().unwrap();
    assert_eq!((hints.zones.len(), hints.nodes.len()), (1, 2));
    assert_eq!(group.endpoints[1].hints, None);
    assert_eq!(group.triggered_ms, Some(1_767_323_045_678));
}

#[test]
fn rules_35_55_nodes() {
    let node = |extra: Value| {
        let mut object = json!({
            "metadata": { "name": "a", "labels": { ZONE_LABEL: "z1" } },
            "spec": { "podCIDRs": ["10.1.0.0/24", "bad"] },
            "status": { "addresses": [
                { "type": "Hostname", "address": "a" },
                { "type": "ExternalIP", "address": "203.0.113.1" },
                { "type": "InternalIP", "address": "192.0.2.1" },
                { "type": "InternalIP", "address": "fd00::1" }
            ] }
        });
        if let Value::Object(extra) = extra {
            for (path, value) in extra {
                *object.pointer_mut(&path).expect("a place") = value;
            }
        }
        Kubernetes::new().node(&serde_json::from_value(object).expect("a Node"))
    };
    let (info, problems) = node(json!({}));
    assert_eq!((&*info.name, info.zone.as_deref(), info.leaving), ("a", Some("z1"), false));
    assert_eq!(shown(&info.addresses), ["192.0.2.1", "fd00::1", "203.0.113.1"]);
    assert_eq!(shown(&info.pod_ranges), ["10.1.0.0/24"]);
    assert_eq!(problems[0].field, "spec.podCIDRs[1]");
    let taint = json!({ "/spec": { "taints": [{ "key": LEAVING_TAINT, "effect": "NoSchedule" }] } });
    assert!(node(taint).0.leaving);
    let deleted = json!({ "/metadata": { "name": "a", "deletionTimestamp": "2026-01-02T03:04:05Z" } });
    assert!(node(deleted).0.leaving);
}

#[test]
fn rule_27_service_cidrs() {
    let object = json!({ "metadata": { "name": "kubernetes" }, "spec": { "cidrs": ["10.96.0.0/12", "x"] } });
    let converted = Kubernetes::new().service_cidr(&serde_json::from_value(object).unwrap());
    let ranges = vec!["10.96.0.0/12".parse().unwrap()];
    assert_eq!(converted.event, Event::SetServiceRanges { name: "kubernetes".into(), ranges });
    assert_eq!(converted.problems.len(), 1);
    assert_eq!(converted.into_events().count(), 2);
}

/// Whatever stands in an object, it is served or named, and never a reason to end. (The fuzz target
/// `proxy_objects` does the same for longer.)
mod anything {
    use proptest::prelude::*;

    use super::*;
    use crate::model::NodeInfo;
    use crate::view::{View, ViewConfig};

    fn text() -> impl Strategy<Value = String> {
        let known = [
            "",
            " ",
            "None",
            "10.0.0.1",
            "010.000.00.01",
            "10.0.0.1/8",
            "::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "fe80::1%eth0",
            "0.0.0.0/0",
            " 192.0.2.0/24 ",
            "1.2.3",
            "Local",
            "Cluster",
            "ClientIP",
            "TCP",
            "UDP",
            "SCTP",
            "QUIC",
            "VIP",
            "Proxy",
            "LoadBalancer",
            "ExternalName",
            "NodePort",
            "IPv4",
            "IPv6",
            "FQDN",
            "a/b",
            "web",
        ];
        prop_oneof![3 => prop::sample::select(known.to_vec()).prop_map(str::to_owned), 1 => "\\PC{0,12}"]
    }

    fn number() -> impl Strategy<Value = i32> {
        prop_oneof![any::<i32>(), 0..70_000i32, Just(80), Just(-1)]
    }

    fn texts() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec(text(), 0..4)
    }

    fn service() -> impl Strategy<Value = Value> {
        let port = (text(), number(), number(), text()).prop_map(|(name, port, node, protocol)| {
            json!({"name": name, "port": port, "nodePort": node, "protocol": protocol})
        });
        let ports = prop::collection::vec(port, 0..4);
        let ingress = prop::collection::vec((text(), text()), 0..3).prop_map(|list| {
            list.into_iter().map(|(ip, mode)| json!({"ip": ip, "ipMode": mode})).collect::<Vec<_>>()
        });
        let rest = (text(), text(), text(), text(), number(), number());
        (texts(), texts(), texts(), texts(), ports, ingress, rest).prop_map(
            |(ips, families, external, ranges, ports, ingress, rest)| {
                let (kind, policy, affinity, first, timeout, check) = rest;
                json!({
                    "metadata": {"namespace": "ns", "name": "svc"},
                    "spec": {
                        "clusterIP": first, "clusterIPs": ips, "ipFamilies": families,
                        "externalIPs": external, "loadBalancerSourceRanges": ranges, "ports": ports,
                        "type": kind,
                        "externalTrafficPolicy": policy, "internalTrafficPolicy": policy,
                        "sessionAffinity": affinity,
                        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": timeout}},
                        "healthCheckNodePort": check,
                    },
                    "status": {"loadBalancer": {"ingress": ingress}},
                })
            },
        )
    }

    fn endpoint_slice() -> impl Strategy<Value = Value> {
        let endpoint = (texts(), any::<Option<bool>>(), any::<Option<bool>>(), text(), texts()).prop_map(
            |(addresses, ready, terminating, node, zones)| {
                let zones: Vec<Value> = zones.into_iter().map(|zone| json!({"name": zone})).collect();
                json!({"addresses": addresses, "conditions": {"ready": ready, "terminating": terminating},
                       "nodeName": node, "hints": {"forZones": zones}})
            },
        );
        let port = (text(), number(), text())
            .prop_map(|(name, port, protocol)| json!({"name": name, "port": port, "protocol": protocol}));
        (prop::collection::vec(endpoint, 0..5), prop::collection::vec(port, 0..3), text()).prop_map(
            |(endpoints, ports, kind)| {
                json!({"metadata": {"namespace": "ns", "name": "svc-1",
                           "labels": {"kubernetes.io/service-name": "svc"}},
                       "addressType": kind, "endpoints": endpoints, "ports": ports})
            },
        )
    }

    proptest! {
        #[test]
        fn rule_12_objects_with_anything_in_them_are_served_or_named(
            service in service(),
            slices in prop::collection::vec(endpoint_slice(), 0..3),
        ) {
            let mut view = View::new(ViewConfig::default(), NodeInfo::new("web"));
            let mut convert = Kubernetes::new();
            let mut named = 0;
            let converted = convert.service(&serde_json::from_value(service).unwrap());
            named += converted.problems.len() + usize::from(converted.ignored.is_some());
            let mut served = false;
            if let Event::SetService(service) = converted.event {
                served = true;
                prop_assert!(service.ports.iter().all(|port| port.port != 0));
                view.set_service(*service);
            }
            for slice in slices {
                if let Event::SetGroup(group) = convert.slice(&serde_json::from_value(slice).unwrap()).event {
                    prop_assert!(group.ports.iter().all(|port| port.number != 0));
                    view.set_group(*group);
                }
            }
            prop_assert!(served || named > 0);
            let changes = view.take_changes();
            for change in &changes.ports {
                let port = change.new.as_ref().unwrap();
                for frontend in &port.frontends {
                    // A route to endpoints has some.
                    if let crate::view::Action::Endpoints(scope) = frontend.route.action {
                        prop_assert!(!port.targets(scope).is_empty());
                    }
                }
            }
        }
    }
}

#[test]
fn rule_12_addresses_are_read_sloppily_and_made_canonical() {
    for (text, wanted) in [
        ("10.0.0.1", Some("10.0.0.1")),
        ("010.000.00.1", Some("10.0.0.1")),
        ("0172.016.0.08", Some("172.16.0.8")),
        ("::ffff:10.0.0.1", Some("10.0.0.1")),
        ("FD00:0:0::1", Some("fd00::1")),
        ("10.0.0", None),
        ("10.0.0.1.2", None),
        ("10.0.0.256", None),
        ("10.0.0.+1", None),
        ("10.0..1", None),
        ("None", None),
        ("", None),
    ] {
        assert_eq!(parse_ip(text).map(|a| a.to_string()).as_deref(), wanted, "{text:?}");
    }
}

#[test]
fn rules_12_44_ranges() {
    for (text, wanted) in [
        (" 10.1.2.3/8 ", Some("10.0.0.0/8")),
        ("010.0.0.0/08", Some("10.0.0.0/8")),
        ("fd00::1/64", Some("fd00::/64")),
        ("0.0.0.0/0", Some("0.0.0.0/0")),
        ("10.0.0.0/33", None),
        ("10.0.0.0/-1", None),
        ("10.0.0.0/", None),
        ("10.0.0.0", None),
    ] {
        assert_eq!(parse_net(text.trim()).map(|a| a.to_string()).as_deref(), wanted, "{text:?}");
    }
}
