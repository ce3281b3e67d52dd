//! A folder of files as the source: what is read, how changes arrive, and what is said of objects that are
//! wrong.

use std::fs;
use std::path::Path;

use knit_objects::Objects;
use knit_proxy::model::NodeInfo;
use knit_proxy::objects::{Feed, Source};
use knit_proxy::source::Event;
use knit_proxy::view::ListKind;
use tempfile::TempDir;

const WEB: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP, name: ''}]
endpoints: [{addresses: [192.0.2.1]}]
";

async fn feed(folder: &Path) -> Feed {
    let objects = Objects::open(knit_objects::Source::folder(folder)).await.expect("a folder");
    let own = NodeInfo { addresses: vec![[192, 0, 2, 99].into()], ..NodeInfo::new("here") };
    Source::new(own).open(&objects).expect("a feed")
}

/// Reads on until an event is as wanted; answers with all events up to it.
async fn until(feed: &mut Feed, wanted: impl Fn(&Event) -> bool) -> Vec<Event> {
    let mut seen = Vec::new();
    let read = async {
        loop {
            seen.extend(feed.next().await.expect("the runtime runs"));
            if seen.iter().any(&wanted) {
                return;
            }
        }
    };
    let deadline = std::time::Duration::from_secs(60);
    tokio::time::timeout(deadline, read).await.expect("the event comes");
    seen
}

/// Reads on until all that is in the folder was told.
async fn listed(feed: &mut Feed) -> Vec<Event> {
    let mut seen = Vec::new();
    for list in [ListKind::Services, ListKind::Groups, ListKind::ServiceRanges] {
        if !seen.contains(&Event::ListDone(list)) {
            seen.extend(until(feed, |e| *e == Event::ListDone(list)).await);
        }
    }
    if !seen.iter().any(|e| matches!(e, Event::SetNode(_))) {
        seen.extend(until(feed, |e| matches!(e, Event::SetNode(_))).await);
    }
    seen
}

fn problems(events: &[Event]) -> Vec<String> {
    let problem = |event: &Event| match event {
        Event::Problem(problem) => Some(problem.to_string()),
        _ => None,
    };
    events.iter().filter_map(problem).collect()
}

#[tokio::test]
async fn rule_6_a_folder_is_listed_and_followed() {
    let folder = TempDir::new().expect("a folder");
    fs::write(folder.path().join("web.yaml"), WEB).expect("a file");
    let mut feed = feed(folder.path()).await;
    let events = listed(&mut feed).await;
    assert!(events.iter().any(|e| matches!(e, Event::SetService(s) if s.name.as_str() == "shop/web")));
    assert!(events.iter().any(|e| matches!(e, Event::SetGroup(g) if g.service.as_str() == "shop/web")));
    // There is no Node object: the machine speaks for itself.
    let node = events.iter().find_map(|e| if let Event::SetNode(node) = e { Some(node) } else { None });
    assert_eq!(node.expect("a node").addresses, [std::net::IpAddr::from([192, 0, 2, 99])]);

    fs::remove_file(folder.path().join("web.yaml")).expect("removed");
    until(&mut feed, |e| *e == Event::DeleteService("shop/web".into())).await;
}

#[tokio::test]
async fn rule_1_the_label_hands_a_service_over_and_back() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("web.yaml");
    fs::write(&file, WEB).expect("a file");
    let mut feed = feed(folder.path()).await;
    listed(&mut feed).await;
    let labelled = WEB.replacen(
        "namespace: shop}",
        "namespace: shop, labels: {service.kubernetes.io/service-proxy-name: other}}",
        1,
    );
    fs::write(&file, labelled).expect("a file");
    until(&mut feed, |e| *e == Event::DeleteService("shop/web".into())).await;
    fs::write(&file, WEB).expect("a file");
    until(&mut feed, |e| matches!(e, Event::SetService(_))).await;
}

#[tokio::test]
async fn a_problem_is_told_once_and_again_only_after_it_was_mended() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("web.yaml");
    let bad = WEB.replace("10.0.0.1, ", "10.0.0.1, externalIPs: [10.0.0.300], ");
    fs::write(&file, &bad).expect("a file");
    let mut feed = feed(folder.path()).await;
    let expected =
        ["Service shop/web: spec.externalIPs[0]: \"10.0.0.300\" is not an IP address; it is ignored"];
    assert_eq!(problems(&listed(&mut feed).await), expected);

    // It changes, and the same is still wrong.
    fs::write(&file, bad.replace("port: 80}", "port: 81}")).expect("a file");
    let events = until(&mut feed, |e| matches!(e, Event::SetService(s) if s.ports[0].port == 81)).await;
    assert!(problems(&events).is_empty(), "{events:?}");

    fs::write(&file, WEB).expect("a file");
    until(&mut feed, |e| matches!(e, Event::SetService(s) if s.ports[0].port == 80)).await;
    fs::write(&file, &bad).expect("a file");
    let events = until(&mut feed, |e| matches!(e, Event::Problem(_))).await;
    assert_eq!(problems(&events), expected);
}

#[tokio::test]
async fn rules_55_60_a_deleted_node_is_leaving_and_keeps_its_zone() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("node.yaml");
    let node =
        "apiVersion: v1\nkind: Node\nmetadata: {name: here, labels: {topology.kubernetes.io/zone: a}}\n";
    fs::write(&file, node).expect("a file");
    let mut feed = feed(folder.path()).await;
    let zone = Some("a".into());
    until(&mut feed, |e| matches!(e, Event::SetNode(n) if n.zone == zone && !n.leaving)).await;
    fs::remove_file(&file).expect("removed");
    until(&mut feed, |e| matches!(e, Event::SetNode(n) if n.zone == zone && n.leaving)).await;
}

#[tokio::test]
async fn rule_17_app_protocol_changes_nothing() {
    let folder = TempDir::new().expect("a folder");
    let set = |text: &str| fs::write(folder.path().join("web.yaml"), text).expect("a file");
    let mut told = Vec::new();
    for text in [WEB.to_owned(), WEB.replace("port: 80", "appProtocol: kubernetes.io/h2c, port: 80")] {
        set(&text);
        let events = listed(&mut feed(folder.path()).await).await;
        told.extend(events.into_iter().filter(|e| matches!(e, Event::SetService(_))));
    }
    assert_eq!(told.len(), 2);
    assert_eq!(told[0], told[1]);
}

#[tokio::test]
async fn rule_3_headless_services_are_not_asked_for() {
    let folder = TempDir::new().expect("a folder");
    let headless = WEB.replace("web", "headless").replace("10.0.0.1", "None");
    fs::write(folder.path().join("headless.yaml"), headless).expect("a file");
    fs::write(folder.path().join("web.yaml"), WEB).expect("a file");
    let mut feed = feed(folder.path()).await;
    let events = listed(&mut feed).await;
    let named = |name: &str| {
        let is = |event: &&Event| match event {
            Event::SetService(service) => service.name.as_str() == name,
            Event::DeleteService(service) => service.as_str() == name,
            _ => false,
        };
        events.iter().filter(is).count()
    };
    assert_eq!((named("shop/web"), named("shop/headless")), (1, 0));
}
