//! Every rule is in the list, and every test that the list names exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::engine::{Engine, EngineConfig, SystemClock};
use knit_proxy::health::Health;
use knit_proxy::model::{
    Endpoint, EndpointGroup, Family, NodeInfo, Protocol, Service, ServicePort, TrafficPolicy,
};
use knit_proxy::source::Event;
use knit_proxy::view::{ListKind, NodeView};

const RULES: u32 = 64;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// The last column of each rule's row.
fn rows(page: &str) -> BTreeMap<u32, String> {
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, _, proven] = cells.as_slice() else { continue };
        let Ok(number) = number.parse() else { continue };
        assert!(rows.insert(number, (*proven).to_owned()).is_none(), "rule {number} is there twice");
    }
    rows
}

/// The names of all test functions of the workspace.
fn test_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![root().join("crates"), root().join("xtask")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).expect("a file");
                let functions = text.lines().filter_map(|line| line.split_once("fn ")?.1.split_once('('));
                names.extend(functions.map(|(name, _)| name.to_owned()));
            }
        }
    }
    names
}

/// Whether a file of packet-flow cases has one for this rule.
fn case_file_names(file: &str, rule: u32) -> bool {
    let path = root().join("crates/knit-proxy-testkit/cases").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lists = text.lines().filter_map(|line| line.trim().strip_prefix("rules: [")?.strip_suffix(']'));
    lists.flat_map(|list| list.split(',')).any(|number| number.trim().parse() == Ok(rule))
}

#[test]
fn every_rule_is_proven_or_says_why_not() {
    let page = std::fs::read_to_string(root().join("docs/service-proxy-rules.md")).expect("the list");
    let rows = rows(&page);
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), (1..=RULES).collect::<Vec<_>>());
    let known = test_names();
    for (number, proven) in rows {
        let named: Vec<&str> = proven.split('`').skip(1).step_by(2).collect();
        assert!(
            !named.is_empty() || proven.strip_prefix("no test").is_some_and(|why| why.len() > 20),
            "rule {number}: name a test, or say \"no test: \" and why"
        );
        for name in named {
            if name.ends_with(".yaml") {
                assert!(case_file_names(name, number), "rule {number}: no case in {name} is for it");
                continue;
            }
            assert!(known.contains(name), "rule {number}: there is no test {name}");
        }
    }
}

#[test]
fn tests_name_only_rules_that_exist() {
    for name in test_names() {
        let Some(numbers) = name.strip_prefix("rule_").or_else(|| name.strip_prefix("rules_")) else {
            continue;
        };
        for number in numbers.split('_').map_while(|part| part.parse::<u32>().ok()) {
            assert!((1..=RULES).contains(&number), "{name}: there is no rule {number}");
        }
    }
}

/// Makes nothing.
struct Nothing;

impl Backend for Nothing {
    fn sync(&mut self, _: &NodeView) -> Outcome {
        Outcome::Done
    }
}

#[test]
fn rule_56_a_node_that_leaves_still_answers_for_its_services() {
    let health = Health::new(Duration::from_secs(60));
    let mut engine =
        Engine::new(EngineConfig::default(), NodeInfo::new("here"), Nothing).observed_by(health.observer());
    let mut service = Service::new("shop/web").cluster_ip([10, 0, 0, 1].into());
    service = service.add_port(ServicePort::new("", Protocol::Tcp, 80));
    service.load_balancer_ips = Box::new([[198, 51, 100, 1].into()]);
    service.external_policy = TrafficPolicy::Local;
    service.health_check_port = std::num::NonZeroU16::new(31000);
    let mut group = EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &[]);
    group.endpoints = Box::new([Endpoint::new([192, 0, 2, 1].into()).on("here")]);
    let now = Instant::now();
    let node = NodeInfo { leaving: true, ..NodeInfo::new("here") };
    for event in [
        Event::SetService(Box::new(service)),
        Event::SetGroup(Box::new(group)),
        Event::SetNode(Box::new(node)),
        Event::ListDone(ListKind::Services),
        Event::ListDone(ListKind::Groups),
    ] {
        engine.handle(event, now);
    }
    engine.poll(&SystemClock);
    let now = Instant::now();
    assert!(!health.proxy(now).node_eligible);
    assert!(health.check("shop/web", Family::V4, now).expect("a health check").ok());
}
