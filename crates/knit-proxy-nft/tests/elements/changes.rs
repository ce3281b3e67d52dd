//! What is written for which change.

use knit_nft::{Family, Nftables};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{Endpoint, Protocol, Service, ServicePort, TrafficPolicy};
use knit_proxy::view::View;
use knit_proxy_nft::{Config, NftBackend, remove_table};

use crate::support::*;

#[test]
fn rule_57_endpoint_changes_are_a_few_elements_whatever_the_size() {
    let mut s = Setup::new();
    for n in 0..50 {
        s.view.set_service(web(&format!("ns/s{n}"), &format!("10.96.0.{n}")));
        s.view.set_group(group(&format!("ns/s{n}"), &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    }
    s.sync();
    assert_eq!((s.nft.count("frontends"), s.nft.count("endpoints")), (50, 150));
    // Replaced: one slot written.
    s.view.set_group(group("ns/s7", &["10.1.0.1", "10.1.0.9", "10.1.0.3"]));
    s.apply();
    assert_eq!(
        s.nft.last(),
        "delete 1 element(s) of map ip knit-proxy endpoints\ncreate 1 element(s) to map ip knit-proxy \
         endpoints\n"
    );
    // One more: a slot, and the frontend goes to the chain of four, which was made ahead of time.
    for service in ["ns/s7", "ns/s8"] {
        s.view.set_group(group(service, &["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4"]));
        if service == "ns/s7" {
            s.view.set_group(group(service, &["10.1.0.1", "10.1.0.9", "10.1.0.3", "10.1.0.4"]));
        }
        s.apply();
        assert_eq!(
            s.nft.last(),
            "create 1 element(s) to map ip knit-proxy endpoints\n\
             delete 1 element(s) of map ip knit-proxy frontends\n\
             create 1 element(s) to map ip knit-proxy frontends\n"
        );
    }
    // Many more: a chain that nobody had.
    let many: Vec<String> = (1..=9).map(|n| format!("10.1.0.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    s.view.set_group(group("ns/s7", &many));
    s.apply();
    let text = s.nft.last();
    assert!(text.contains("add chain ip knit-proxy cluster-9-masquerade-unless-pod"), "{text}");
    s.view.set_group(group("ns/s7", &many[..4]));
    s.apply();
    // One less, from the middle: the last one moves there.
    s.view.set_group(group("ns/s8", &["10.1.0.1", "10.1.0.3", "10.1.0.4"]));
    s.apply();
    assert_eq!(
        s.nft.last(),
        "delete 1 element(s) of map ip knit-proxy endpoints\n\
         create 1 element(s) to map ip knit-proxy endpoints\n\
         delete 1 element(s) of map ip knit-proxy frontends\n\
         create 1 element(s) to map ip knit-proxy frontends\n\
         delete 1 element(s) of map ip knit-proxy endpoints\n"
    );
    // All gone.
    s.view.delete_service(&"ns/s9".into());
    s.apply();
    assert_eq!((s.nft.count("frontends"), s.nft.count("cluster-ips")), (49, 49));
    assert_eq!(s.nft.count("endpoints"), 49 * 3 + 1);
}

#[test]
fn rule_58_a_restart_finds_everything_as_it_is() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    let mut b = web("ns/b", "10.96.0.2").add_port(ServicePort::new("n", Protocol::Udp, 53).node_port(30053));
    b.external_policy = TrafficPolicy::Local;
    b.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(b);
    s.view.set_group(group("ns/b", &["10.1.0.4"]));
    s.sync();
    s.settled();
    // After changes the slots are not in the order of addresses; they stay where they are all the same.
    s.view.set_group(group("ns/a", &["10.1.0.2", "10.1.0.3", "10.1.0.9"]));
    s.apply();
    s.view.set_group(group("ns/a", &["10.1.0.3", "10.1.0.9"]));
    s.apply();
    // Counts that nobody has any more leave a chain behind, which a sync removes.
    s.sync();
    s.settled();
}

#[test]
fn chains_that_nobody_uses_are_removed_after_a_while() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.sync();
    let all: Vec<String> = (1..=100).map(|n| format!("10.1.0.{n}")).collect();
    for count in 1..=100 {
        let some: Vec<&str> = all[..count].iter().map(String::as_str).collect();
        s.view.set_group(group("ns/a", &some));
        s.apply();
    }
    let chains = s.nft.table(Family::Ip).chains.len();
    assert!(chains < 50, "{chains} chains");
    s.sync();
    // What is used stays, and of the others those that are near it.
    let names: Vec<_> =
        s.nft.table(Family::Ip).chains.into_keys().filter(|n| n.starts_with("cluster")).collect();
    assert!(names.contains(&"cluster-100-masquerade-unless-pod".into()), "{names:?}");
    for name in &names {
        let count: u32 = name.split('-').nth(1).unwrap().parse().unwrap();
        assert!((96..=104).contains(&count), "{name}");
    }
}

#[test]
fn sctp_and_source_ranges_are_written_as_they_should() {
    let mut s = Setup::new();
    let mut service = Service::new("ns/a").cluster_ip("10.96.0.1".parse().unwrap()).port(Protocol::Sctp, 80);
    service.load_balancer_ips = Box::new(["198.51.100.1".parse().unwrap()]);
    // Rule 44: one of them holds the node's address, so the load balancer's own address may come back too.
    service.source_ranges = Some(Box::new(["10.0.0.0/8".parse().unwrap(), "192.0.2.0/24".parse().unwrap()]));
    s.view.set_service(service);
    s.sync();
    let table = s.nft.table(Family::Ip);
    // Address, protocol 132, port.
    let keys: Vec<String> = table.sets["frontends"].elements.keys().map(|k| format!("{k:?}")).collect();
    assert_eq!(keys, ["0x0a6000018400000000500000", "0xc63364018400000000500000"]);
    let sources: Vec<String> = table.sets["sources"]
        .elements
        .values()
        .map(|e| format!("{:?}-{:?}", &e.key.as_slice()[12..], &e.last_key().as_slice()[12..]))
        .collect();
    assert_eq!(
        sources,
        [
            "[10, 0, 0, 0]-[10, 255, 255, 255]",
            "[192, 0, 2, 0]-[192, 0, 2, 255]",
            "[198, 51, 100, 1]-[198, 51, 100, 1]"
        ]
    );
    s.settled();
}

#[test]
fn rule_62_tables_that_are_not_wanted_any_more_go() {
    let mut s = Setup::new();
    s.sync();
    assert_eq!(s.nft.with(Nftables::tables).unwrap().len(), 2);
    let mut config = s.view.config().clone();
    config.families.v6 = false;
    s.view = View::new(config, s.view.node().clone());
    s.sync();
    assert_eq!(s.nft.with(Nftables::tables).unwrap().len(), 1);
    assert!(remove_table(&mut s.nft, "knit-proxy").unwrap());
    assert!(!remove_table(&mut s.nft, "knit-proxy").unwrap());
    assert_eq!(s.nft.with(Nftables::tables).unwrap(), []);
}

#[test]
fn rule_64_names_stay_within_limits() {
    let mut s = Setup::new();
    let long = "a".repeat(63);
    let name = format!("{long}/{long}");
    let mut service = Service::new(name.as_str()).cluster_ip("10.96.0.1".parse().unwrap());
    service = service.add_port(ServicePort::new(&"p".repeat(15), Protocol::Tcp, 80).node_port(30080));
    service.external_policy = TrafficPolicy::Local;
    service.affinity = Some(knit_proxy::model::Affinity::default());
    service.load_balancer_ips = Box::new(["198.51.100.1".parse().unwrap()]);
    service.source_ranges = Some(Box::new(["10.0.0.0/8".parse().unwrap()]));
    s.view.set_service(service);
    let mut group = group(&name, &[]);
    group.ports = Box::new([knit_proxy::model::GroupPort {
        name: "p".repeat(15).as_str().into(),
        protocol: Protocol::Tcp,
        number: 8080,
    }]);
    group.endpoints = (0..200u8)
        .map(|n| Endpoint::new([10, 1, 0, n].into()).on(if n % 2 == 0 { "node" } else { "other" }))
        .collect();
    s.view.set_group(group);
    s.sync();
    let longest = s.nft.table(Family::Ip).chains.into_keys().map(|n| n.len()).max().unwrap();
    assert!(longest < 255, "{longest}");
    s.settled();
}

#[test]
fn rule_50_ports_of_masqueraded_connections_are_random_and_the_bit_is_the_configured_one() {
    use knit_nft::{Expr, Mark, Scalar};
    let mut s = Setup::new();
    s.sync();
    let table = s.nft.table(Family::Ip);
    let exprs = |chain: &str| -> Vec<Expr> {
        table.chains[chain].rules.iter().flat_map(|rule| rule.rule.exprs.clone()).collect()
    };
    let post = exprs("postrouting");
    let flags: Vec<bool> = post
        .iter()
        .filter_map(|expr| match expr {
            Expr::Masquerade { flags, .. } => Some(flags.fully_random),
            _ => None,
        })
        .collect();
    assert_eq!(flags, [true, true]);
    let masks = |exprs: &[Expr]| -> Vec<u32> {
        let mask = |expr: &Expr| match expr {
            Expr::Bitwise { mask, .. } => Some(u32::from_ne_bytes(mask.as_slice().try_into().ok()?)),
            _ => None,
        };
        exprs.iter().filter_map(mask).collect()
    };
    assert_eq!(Mark(0x4000).bytes().as_slice(), 0x4000u32.to_ne_bytes());
    assert!(masks(&post).contains(&0x4000), "the default");
    let config = Config { masquerade_bit: 1 << 3, ..Config::default() };
    let mut other = NftBackend::over(s.nft.clone(), config);
    assert_eq!(other.sync(s.view.current()), Outcome::Done);
    let post: Vec<Expr> = s.nft.table(Family::Ip).chains["postrouting"]
        .rules
        .iter()
        .flat_map(|rule| rule.rule.exprs.clone())
        .collect();
    assert!(masks(&post).contains(&(1 << 3)) && !masks(&post).contains(&0x4000));
}

#[test]
fn rule_41_who_is_remembered_stays_with_an_endpoint_that_changes_its_slot() {
    let mut s = Setup::new();
    let mut service = web("ns/a", "10.96.0.1");
    service.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(service);
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    s.sync();
    // Number by endpoint, and the numbers that can be drawn.
    let look = |s: &Setup| {
        let table = s.nft.table(Family::Ip);
        let value = |element: &knit_nft::Element| match &element.value {
            knit_nft::ElementValue::Data(data) => data.clone(),
            _ => panic!("a map of values"),
        };
        let members: std::collections::BTreeMap<Vec<u8>, Vec<u8>> = (table.sets["members"].elements.values())
            .map(|e| (value(e).as_slice().to_vec(), e.key.as_slice()[8..].to_vec()))
            .collect();
        let mut drawn: Vec<Vec<u8>> =
            table.sets["slots"].elements.values().map(|e| value(e).as_slice().to_vec()).collect();
        drawn.sort();
        let mut known: Vec<Vec<u8>> = members.values().cloned().collect();
        known.sort();
        assert_eq!(drawn, known, "each endpoint can be drawn, and nobody else");
        members
    };
    let before = look(&s);
    assert_eq!(before.len(), 3);
    // The first goes, and the last takes its slot; its number stays.
    s.view.set_group(group("ns/a", &["10.1.0.2", "10.1.0.3"]));
    s.apply();
    let after = look(&s);
    assert_eq!(after.len(), 2);
    assert!(after.iter().all(|(endpoint, number)| before[endpoint] == *number));
    // A sync finds the numbers again.
    s.sync();
    assert_eq!(look(&s), after);
    s.settled();
    // Affinity goes: nothing of it is left. It comes back: everything is there again.
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.apply();
    assert_eq!((s.nft.count("members"), s.nft.count("slots"), s.nft.count("services")), (0, 0, 0));
    assert_eq!(s.nft.count("endpoints"), 2);
    let mut service = web("ns/a", "10.96.0.1");
    service.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(service);
    s.apply();
    assert_eq!((s.nft.count("endpoints"), look(&s).len()), (0, 2));
    s.sync();
    s.settled();
}

#[test]
fn rules_21_24_who_takes_a_node_ports_address_and_goes_leaves_the_node_port_as_it_was() {
    let mut s = Setup::new();
    let node_port = ServicePort::new("", Protocol::Tcp, 80).node_port(30080);
    let a = Service { created: 1, ..Service::new("ns/a").cluster_ip("10.96.0.1".parse().unwrap()) };
    s.view.set_service(a.add_port(node_port));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    let (frontends, endpoints) = (s.nft.count("frontends"), s.nft.count("endpoints"));
    let b = Service {
        created: 2,
        external_ips: Box::new(["192.0.2.1".parse().unwrap()]),
        ..Service::new("zzz/b").cluster_ip("10.96.0.2".parse().unwrap()).port(Protocol::Tcp, 30080)
    };
    s.view.set_service(b);
    s.view.set_group(group("zzz/b", &["10.1.0.2"]));
    let (commits, reads) = (s.nft.commits(), s.nft.reads());
    s.apply();
    assert_eq!((s.nft.commits(), s.nft.reads()), (commits + 1, reads), "a change, and no full sync");
    s.settled();
    s.view.delete_service(&"zzz/b".into());
    s.apply();
    assert_eq!((s.nft.count("frontends"), s.nft.count("endpoints")), (frontends, endpoints));
    s.settled();
}

#[test]
fn rule_43_narrower_source_ranges_are_a_few_elements() {
    let mut s = Setup::new();
    let lb = |range: &str| Service {
        load_balancer_ips: Box::new(["198.51.100.1".parse().unwrap()]),
        source_ranges: Some(Box::new([range.parse().unwrap()])),
        ..web("ns/a", "10.96.0.1")
    };
    s.view.set_service(lb("10.0.0.0/16"));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    for range in ["10.0.1.0/24", "10.0.0.0/16", "10.0.128.0/17"] {
        s.view.set_service(lb(range));
        let (commits, reads) = (s.nft.commits(), s.nft.reads());
        s.apply();
        let after = (s.nft.commits(), s.nft.reads());
        assert_eq!(after, (commits + 1, reads), "{range}: a change, and no full sync");
        let text = s.nft.last();
        assert!(text.lines().count() <= 2, "{range}: {text}");
        s.settled();
    }
}
