use knit_ipam::Standing;
use knit_types::chain;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn network(name: &str, spec: &Value) -> Network {
    let mut whole = json!({"topology": "Layer3"});
    let fields = spec.as_object().expect("fields").clone();
    whole.as_object_mut().expect("fields").extend(fields);
    let object: knit_api::Network = serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name}, "spec": whole,
    }))
    .expect("a Network");
    object.try_into().expect("a name")
}

#[test]
fn what_is_wrong_with_subnets_and_routes_names_the_field() {
    for (spec, expected) in [
        (json!({"subnets": [{"cidr": "ten"}]}), "spec.subnets[0].cidr: \"ten\" is not a valid CIDR: "),
        (
            json!({"subnets": [{"cidr": "fd77::/64"}, {"cidr": "10.77.0.0/16", "gateway": "x"}]}),
            "spec.subnets[1].gateway: \"x\" is not a valid IP address: ",
        ),
        (
            json!({"subnets": [{"cidr": "10.77.0.0/16", "reserved": ["10.77.0.0/28", "y"]}]}),
            "spec.subnets[0].reserved: \"y\" is not a valid CIDR: ",
        ),
        (
            json!({"subnets": [{"cidr": "10.77.0.1/16"}]}),
            "spec.subnets[0] cannot be used: subnet 10.77.0.1/16 has host bits set: ",
        ),
        (
            json!({"subnets": [{"cidr": "10.77.0.0/16"}, {"cidr": "10.78.0.0/16"}]}),
            "spec.subnets cannot be used: Network blue has two IPv4 subnets: ",
        ),
        (json!({}), "spec.subnets cannot be used: Network blue has no subnet: "),
    ] {
        let network = network("blue", &spec);
        let error = network.pool().expect_err("a wrong Network");
        assert!(chain(error).starts_with(expected), "{spec}: {}", chain(error));
    }
    for (route, expected) in [
        (json!({"destination": "z"}), "spec.routes[0].destination: \"z\" is not a valid CIDR: "),
        (
            json!({"destination": "192.0.2.0/24", "via": "w"}),
            "spec.routes[0].via: \"w\" is not a valid IP address: ",
        ),
    ] {
        let network = network("blue", &json!({"subnets": [{"cidr": "10.77.0.0/16"}], "routes": [route]}));
        let error = network.routes().expect_err("a wrong route");
        assert!(error.to_string().starts_with(expected), "{error}");
        network.pool().expect("its subnets are right").expect("a pool");
    }
}

#[test]
fn what_a_network_leaves_out_is_another_for_the_default_one() {
    let (default, blue) = (network("default", &json!({})), network("blue", &json!({})));
    let all = |network: &Network| {
        [
            network.is_primary(),
            network.reaches_outside(),
            network.serves_external_ips(),
            !network.publishes_attachments(),
            network.pool().is_ok(),
        ]
    };
    assert_eq!((all(&default), all(&blue)), ([true; 5], [false; 5]));
    let services: Vec<_> = blue.cluster_services().collect();
    assert_eq!(services, [("default", "kubernetes"), ("kube-system", "kube-dns")]);
    assert_eq!(network("blue", &json!({"clusterServices": []})).cluster_services().count(), 0);
    let said = json!({"primaryFor": {}, "outside": "Closed", "publishAttachments": false,
        "services": {"externalIPs": "Allow", "nodeAddresses": "Allow"},
        "clusterServices": [{"namespace": "a", "name": "b"}]});
    let red = network("red", &said);
    assert!(red.is_primary() && !red.reaches_outside() && !red.publishes_attachments());
    assert!(red.serves_external_ips() && red.serves_node_addresses());
    assert_eq!(red.cluster_services().collect::<Vec<_>>(), [("a", "b")]);
}

#[test]
fn what_services_may_take_is_closed_unless_it_is_said_except_for_the_default_network() {
    let says = |name: &str, services: Value| {
        let network = network(name, &json!({"services": services}));
        (network.serves_external_ips(), network.serves_node_addresses())
    };
    assert_eq!(says("blue", Value::Null), (false, false));
    assert_eq!(says("blue", json!({})), (false, false));
    assert_eq!(says("default", Value::Null), (true, false));
    assert_eq!(says("default", json!({"externalIPs": "Deny"})), (false, false));
    assert_eq!(says("blue", json!({"externalIPs": "Allow", "nodeAddresses": "Allow"})), (true, true));
}

#[test]
fn a_pool_is_primary_and_has_a_router_by_the_networks_own_rules() {
    let subnets = json!([{"cidr": "10.77.0.0/16"}]);
    let flags = |name: &str, spec: Value| {
        let network = network(name, &spec);
        let pool = network.pool().expect("right").expect("a pool");
        (pool.is_primary(), pool.has_router())
    };
    assert_eq!(flags("default", json!({"subnets": subnets})), (true, false));
    assert_eq!(flags("blue", json!({"subnets": subnets})), (false, true));
    assert_eq!(flags("blue", json!({"subnets": subnets, "primaryFor": {}})), (true, true));
}

#[test]
fn an_edited_network_is_read_again() {
    let mut network = network("blue", &json!({"subnets": [{"cidr": "ten"}]}));
    let before = network.clone();
    network.edit(|object| object.spec.subnets[0].cidr = "10.77.0.0/16".into());
    assert!(before.pool().is_err() && network.pool().is_ok());
    assert_ne!(network, before);
    assert_eq!(network.ranges(), ["10.77.0.0/16".parse::<IpNet>().expect("a range")]);
}

/// Texts of which about half are what they should be.
fn texts() -> impl Strategy<Value = String> {
    let good = prop::sample::select(vec!["10.77.0.0/16", "10.77.0.0/28", "fd77::/64", "fd77::/120"]);
    prop_oneof![good.prop_map(str::to_owned), "[0-9a-f:./]{0,12}"]
}

proptest! {
    #[test]
    fn whatever_subnets_say_a_pool_has_all_of_them_or_there_is_none(
        cidrs in prop::collection::vec(texts(), 0..3),
        reserved in prop::collection::vec(texts(), 0..2),
        gateway in prop::option::of("(10\\.77\\.0\\.[0-9]|fd77::[0-9]|[a-z]{1,3})"),
    ) {
        let subnet = |cidr: &String| match &gateway {
            Some(gateway) => json!({"cidr": cidr, "reserved": reserved, "gateway": gateway}),
            None => json!({"cidr": cidr, "reserved": reserved}),
        };
        let subnets: Vec<Value> = cidrs.iter().map(subnet).collect();
        let network = network("blue", &json!({"subnets": subnets}));
        prop_assert_eq!(network.has_subnets(), !cidrs.is_empty());
        match network.pool() {
            Ok(pool) => {
                let pool = pool.expect("only the default Network has none");
                prop_assert_eq!(pool.families().count(), cidrs.len());
                prop_assert_eq!(network.ranges().len(), cidrs.len());
                for range in network.ranges() {
                    let first = range.network();
                    prop_assert!(matches!(pool.standing(first), Standing::Never(_)), "{}", first);
                    let set_aside = reserved.iter().filter_map(|r| r.parse::<IpNet>().ok());
                    for range in set_aside {
                        prop_assert!(pool.standing(range.addr()) != Standing::Ordinary);
                    }
                }
            }
            Err(error) => prop_assert!(error.to_string().starts_with("spec.subnets"), "{}", error),
        }
    }

    #[test]
    fn who_is_selected_may_attach_and_nobody_else(
        primary in prop::option::of("[ab]"), from in prop::sample::select(vec!["None", "All", "Selector"]),
        selected in "[ab]", team in "[abc]",
    ) {
        let selector = |team: &str| json!({"matchLabels": {"team": team}});
        let mut spec = json!({"allowedNamespaces": {"from": from}});
        if from == "Selector" {
            spec["allowedNamespaces"]["selector"] = selector(&selected);
        }
        if let Some(primary) = &primary {
            spec["primaryFor"] = selector(primary);
        }
        let blue = network("blue", &spec);
        let labels = Labels::from([("team".to_owned(), team.clone())]);
        let expected =
            primary.as_ref() == Some(&team) || from == "All" || (from == "Selector" && selected == team);
        prop_assert_eq!(blue.admits(&labels), Ok(expected));
        let wrong = json!({"primaryFor": {"matchExpressions": [{"key": "team", "operator": "Is"}]}});
        spec.as_object_mut().expect("fields").extend(wrong.as_object().expect("fields").clone());
        prop_assert!(network("blue", &spec).admits(&labels).is_err());
    }
}
