//! A table of pods, and what each gets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use knit_api::{NetworkSpec, NetworkStatus};
use knit_runtime::{Dns, InterfaceName, Pod, SandboxId};
use serde_json::{Value, json};

use super::*;
use crate::front_door::annotation::wishes;
use crate::request::{Door, Main, MainInterface, Start};
use crate::world::{Before, PodView, Synced};

/// Annotations of a pod.
type Notes<'a> = &'a [(&'a str, &'a str)];

fn world() -> World {
    let network = |name: &str, extra: Value| {
        let mut spec = json!({"topology": "Layer3"});
        spec.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let spec: NetworkSpec = serde_json::from_value(spec).expect("a spec");
        let network = Network::try_from(knit_api::Network::new(name, spec)).expect("a name");
        (network.name().clone(), Arc::new(network))
    };
    let subnet = |cidr: &str| json!([{"cidr": cidr}]);
    let mut refused =
        network("refused", json!({"subnets": subnet("10.9.0.0/16"), "allowedNamespaces": {"from": "All"}}));
    let status: NetworkStatus = serde_json::from_value(json!({"conditions": [{
        "type": "Accepted", "status": "False", "reason": "SubnetOverlap", "message": "it overlaps the nodes",
        "lastTransitionTime": "2026-01-01T00:00:00Z"
    }]}))
    .expect("a status");
    Arc::make_mut(&mut refused.1).edit(|network| network.status = Some(status));
    let mut leaving =
        network("leaving", json!({"subnets": subnet("10.8.0.0/16"), "allowedNamespaces": {"from": "All"}}));
    let then = serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("a time");
    Arc::make_mut(&mut leaving.1).edit(|network| network.metadata.deletion_timestamp = Some(then));
    let team = |name: &str| json!({"matchLabels": {"team": name}});
    let networks = [
        network("default", json!({"subnets": subnet("10.1.0.0/16")})),
        network("open", json!({"subnets": subnet("10.2.0.0/16"), "allowedNamespaces": {"from": "All"}})),
        network("same", json!({"subnets": subnet("10.2.128.0/17"), "allowedNamespaces": {"from": "All"}})),
        network("closed", json!({"subnets": subnet("10.3.0.0/16")})),
        network(
            "picky",
            json!({"subnets": subnet("10.4.0.0/16"), "allowedNamespaces": {"from": "Selector",
                "selector": {"matchExpressions": [{"key": "tier", "operator": "In", "values": ["front"]}]}}}),
        ),
        network("red", json!({"subnets": subnet("10.5.0.0/16"), "primaryFor": team("red")})),
        network("twin-1", json!({"subnets": subnet("10.6.0.0/16"), "primaryFor": team("twins")})),
        network("twin-2", json!({"subnets": subnet("10.7.0.0/16"), "primaryFor": team("twins")})),
        network(
            "foreign",
            json!({"class": "nobody", "subnets": subnet("10.10.0.0/16"),
                "allowedNamespaces": {"from": "All"}}),
        ),
        network(
            "extra-primary",
            json!({"subnets": subnet("10.11.0.0/16"), "primaryFor": team("x"),
                "allowedNamespaces": {"from": "All"}}),
        ),
        refused,
        leaving,
    ];
    let labels = |pairs: &[(&str, &str)]| -> Arc<Labels> {
        Arc::new(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    };
    World {
        networks: Arc::new(networks.into_iter().collect()),
        namespaces: Arc::new(BTreeMap::from([
            ("plain".to_owned(), labels(&[])),
            ("front".to_owned(), labels(&[("tier", "front")])),
            ("reds".to_owned(), labels(&[("team", "red")])),
            ("twins".to_owned(), labels(&[("team", "twins")])),
        ])),
        synced: Synced { networks: true, namespaces: true, ..Synced::default() },
        ..World::default()
    }
}

fn notes(pairs: Notes<'_>) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn request(namespace: Option<&str>, annotations: Option<Notes<'_>>) -> PodRequest {
    PodRequest {
        pod: Pod {
            sandbox: SandboxId::new("s").expect("an id"),
            namespace: namespace.map(str::to_owned),
            name: namespace.map(|_| "web".to_owned()),
            uid: None,
        },
        start: Some(Start {
            netns: PathBuf::from("/run/netns/s"),
            main: Main::Ours(MainInterface {
                interface: InterfaceName::new("eth0").expect("a name"),
                ports: Vec::new(),
                addresses: Vec::new(),
                mac: None,
                dns: Dns::default(),
            }),
        }),
        wishes: annotations.map_or(Wishes::AsThePodSays, |pairs| wishes(&notes(pairs))),
        claims: Vec::new(),
        door: Door::Cni("knit".into()),
    }
}

/// For a pod without claims.
fn resolve(world: &World, request: &PodRequest, has: &[Held]) -> Result<Vec<Wanted>, Missing> {
    super::resolve(world, request, has, &[])
}

/// One more for a pod that runs.
fn plug(namespace: &str, network: &'static str, interface: Option<&str>) -> PodRequest {
    let interface = interface.map(|i| InterfaceName::new(i).expect("a name"));
    let asked = Asked { network: network.into(), interface, ..Asked::default() };
    PodRequest { start: None, wishes: Wishes::further(vec![asked]), ..request(Some(namespace), None) }
}

/// `network@interface`, with `*` where the default route goes out.
fn shown(wanted: &[Wanted]) -> String {
    let one = |w: &Wanted| format!("{}@{}{}", w.network, w.interface, if w.default_route { "*" } else { "" });
    wanted.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_each_pod_gets() {
    let world = world();
    let networks = |text: &'static str| vec![("knit.dev/networks", text)];
    let primary = |text: &'static str| vec![("knit.dev/primary", text)];
    let cases = vec![
        (None, vec![], "default@eth0*"),
        (Some("plain"), vec![], "default@eth0*"),
        (Some("reds"), vec![], "red@eth0*"),
        // Of those that select it, the oldest; of one age, the first by name.
        (Some("twins"), vec![], "twin-1@eth0*"),
        (Some("plain"), networks("open"), "default@eth0* open@net1"),
        (Some("plain"), networks("open@net1"), "default@eth0* open@net1"),
        (Some("front"), networks("open,picky"), "default@eth0* open@net1 picky@net2"),
        (Some("front"), networks("open,picky@net1"), "default@eth0* open@net2 picky@net1"),
        (
            Some("plain"),
            networks(r#"[{"name":"open","default-route":["10.2.0.1"]}]"#),
            "default@eth0 open@net1*",
        ),
        (Some("plain"), primary("extra-primary"), "extra-primary@eth0*"),
        (Some("plain"), primary("default"), "default@eth0*"),
        (Some("reds"), primary("red"), "red@eth0*"),
        (Some("plain"), networks("  "), "default@eth0*"),
    ];
    for (namespace, annotations, expected) in cases {
        let request = request(namespace, Some(&annotations));
        let wanted =
            resolve(&world, &request, &[]).unwrap_or_else(|e| panic!("{namespace:?} {annotations:?}: {e:?}"));
        assert_eq!(shown(&wanted), expected, "{namespace:?} {annotations:?}");
    }
}

#[test]
fn what_no_pod_gets() {
    let world = world();
    let cases: &[(&str, Notes<'_>, Reason, &str)] = &[
        ("plain", &[("knit.dev/networks", "closed")], Reason::NotAllowed, "allowedNamespaces"),
        ("plain", &[("knit.dev/networks", "picky")], Reason::NotAllowed, "allowedNamespaces"),
        ("plain", &[("knit.dev/networks", "red")], Reason::NotAllowed, "allowedNamespaces"),
        ("plain", &[("knit.dev/primary", "red")], Reason::NotAllowed, "allowedNamespaces"),
        ("reds", &[("knit.dev/primary", "default")], Reason::NotAllowed, "Network default"),
        ("reds", &[("knit.dev/networks", "default")], Reason::NotAllowed, "Network default"),
        ("plain", &[("knit.dev/primary", "open")], Reason::Refused, "primaryFor"),
        ("plain", &[("knit.dev/primary", "../etc")], Reason::Refused, "knit.dev/primary"),
        ("plain", &[("knit.dev/networks", "a b")], Reason::Refused, "knit.dev/networks"),
        ("plain", &[("knit.dev/networks", "open@eth0")], Reason::Refused, "twice"),
        ("plain", &[("knit.dev/networks", "open,open@net5")], Reason::Refused, "twice"),
        ("plain", &[("knit.dev/networks", "open,same")], Reason::Refused, "overlap"),
        ("plain", &[("knit.dev/networks", "default")], Reason::Refused, "twice"),
        (
            "plain",
            &[("knit.dev/networks", r#"[{"name":"open","ips":["10.2.0.4","10.2.0.5"]}]"#)],
            Reason::Refused,
            "per family",
        ),
        ("plain", &[("knit.dev/networks", "refused")], Reason::NotReady, "it overlaps the nodes"),
        ("plain", &[("knit.dev/networks", "leaving")], Reason::NotReady, "being deleted"),
    ];
    for (namespace, annotations, reason, words) in cases {
        let request = request(Some(namespace), Some(annotations));
        match resolve(&world, &request, &[]) {
            Err(Missing::Error(error)) => {
                assert_eq!(error.reason, *reason, "{namespace} {annotations:?}: {error}");
                assert!(error.chain().contains(words), "{namespace} {annotations:?}: {}", error.chain());
            }
            other => panic!("{namespace} {annotations:?}: {other:?}"),
        }
    }
}

#[test]
fn what_a_pod_waits_for() {
    let mut world = world();
    let cases: [(&str, Option<Notes<'_>>, &str); 4] = [
        ("new", Some(&[]), "namespace new"),
        ("plain", Some(&[("knit.dev/networks", "coming")]), "Network coming"),
        ("plain", Some(&[("knit.dev/networks", "foreign")]), "NetworkClass nobody"),
        ("plain", None, "pod plain/web"),
    ];
    for (namespace, annotations, words) in cases {
        match resolve(&world, &request(Some(namespace), annotations), &[]) {
            Err(Missing::Wait(error)) => assert!(error.chain().contains(words), "{}", error.chain()),
            other => panic!("{namespace} {annotations:?}: {other:?}"),
        }
    }
    // Once the pod is there, its object says it.
    let pod = PodView { wishes: wishes(&notes(&[("knit.dev/networks", "open")])), ..PodView::default() };
    world.pods = Arc::new(BTreeMap::from([(("plain".to_owned(), "web".to_owned()), Arc::new(pod))]));
    let wanted = resolve(&world, &request(Some("plain"), None), &[]).expect("the pod is known");
    assert_eq!(shown(&wanted), "default@eth0* open@net1");
}

/// The namespace's own Network, or its label, may be the next to arrive: the default one is no answer
/// meanwhile.
#[test]
fn nobody_gets_the_default_network_because_a_list_was_late() {
    let late = |change: &dyn Fn(&mut World)| {
        let mut world = world();
        // What has arrived so far, in the order of names.
        Arc::make_mut(&mut world.networks).retain(|name, _| name.as_str() <= "open");
        change(&mut world);
        world
    };
    let kept = Before { kept: true, ..Before::default() };
    let away = Before { networks_away: true, namespaces_away: true, ..Before::default() };
    let worlds = [
        ("nothing synced", late(&|w| w.synced = Synced::default())),
        ("no Networks", late(&|w| w.synced.networks = false)),
        ("no namespaces", late(&|w| w.synced.namespaces = false)),
        (
            "kept, and the API not known to be away",
            late(&|w| (w.synced, w.before) = (Synced::default(), kept)),
        ),
        ("nothing kept, and the API away", late(&|w| (w.synced, w.before) = (Synced::default(), away))),
        (
            "kept, and only one list away",
            late(&|w| (w.synced, w.before) = (Synced::default(), Before { networks_away: true, ..kept })),
        ),
    ];
    for (what, world) in worlds {
        for namespace in ["plain", "reds"] {
            match resolve(&world, &request(Some(namespace), Some(&[])), &[]) {
                Err(Missing::Wait(error)) => assert!(error.retryable(), "{what}: {error}"),
                other => panic!("{what}: {other:?}"),
            }
            let more = resolve(&world, &plug(namespace, "open", None), &[]);
            assert!(matches!(more, Err(Missing::Wait(_))), "{what}");
        }
        // Who has no namespace has no other Network that could be meant.
        resolve(&world, &request(None, Some(&[])), &[]).expect("the default Network");
    }
    // What was kept was whole, and nobody can say more now.
    let mut world = world();
    (world.synced, world.before) = (Synced::default(), Before { kept: true, ..away });
    let wanted = resolve(&world, &request(Some("reds"), Some(&[])), &[]).expect("known from before");
    assert_eq!(shown(&wanted), "red@eth0*");
}

#[test]
fn a_running_pod_gets_one_more() {
    let world = world();
    let held = |interface: &str, network: &'static str| Held {
        interface: interface.into(),
        network: Some(network.into()),
    };
    let has = [held("eth0", "default"), held("net1", "picky")];
    let more = |network: &'static str, interface: Option<&str>| {
        let mut wanted = resolve(&world, &plug("plain", network, interface), &has)?;
        assert_eq!(wanted.len(), 1);
        Ok(wanted.remove(0))
    };
    let open = more("open", None).unwrap_or_else(|e: Missing| panic!("allowed: {e:?}"));
    assert_eq!((open.interface.as_str(), open.main, open.default_route), ("net2", false, false));
    assert!(matches!(more("open", Some("eth0")), Err(Missing::Error(e)) if e.reason == Reason::Refused));
    assert!(matches!(more("closed", None), Err(Missing::Error(e)) if e.reason == Reason::NotAllowed));
    assert!(matches!(more("default", None), Err(Missing::Error(e)) if e.reason == Reason::Refused));
}

#[test]
fn services_of_a_namespace_that_is_not_known_were_taken_for_the_default_networks() {
    let mut world = world();
    let network = |world: &World, namespace| primary_network(world, &claims(world), namespace);
    assert_eq!(network(&world, "plain").as_deref(), Some("default"));
    assert_eq!(network(&world, "reds").as_deref(), Some("red"));
    assert_eq!(
        network(&world, "twins").as_deref(),
        Some("twin-1"),
        "of one age: by name, as the controller does"
    );
    assert_eq!(network(&world, "comes-later"), None, "it may be another Network's");
    world.synced.networks = false;
    assert_eq!(network(&world, "plain"), None, "the Network that selects it may still come");
}

#[test]
fn one_networks_selector_that_cannot_be_read_stopped_every_namespace() {
    let mut world = world();
    let wrong = json!({"topology": "Layer3", "primaryFor":
        {"matchExpressions": [{"key": "team", "operator": "Equals", "values": ["green"]}]}});
    let mut wrong = knit_api::Network::new("wrong", serde_json::from_value(wrong).expect("a spec"));
    wrong.status = world.networks["refused"].status().cloned();
    Arc::make_mut(&mut world.networks)
        .insert("wrong".into(), Arc::new(wrong.clone().try_into().expect("a name")));
    for (namespace, network) in [("plain", "default@eth0*"), ("reds", "red@eth0*")] {
        let wanted = resolve(&world, &request(Some(namespace), Some(&[])), &[]).expect("as ever");
        assert_eq!(shown(&wanted), network);
    }
    // Before the controller has refused it, nobody gets the default Network who may be meant; who has another
    // has it.
    wrong.status = None;
    Arc::make_mut(&mut world.networks).insert("wrong".into(), Arc::new(wrong.try_into().expect("a name")));
    resolve(&world, &request(Some("reds"), Some(&[])), &[]).expect("as ever");
    match resolve(&world, &request(Some("plain"), Some(&[])), &[]) {
        Err(Missing::Error(error)) => {
            assert!(error.retryable() && error.chain().contains("wrong"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_got_the_annotations_of_another_one_of_its_name() {
    let shown_as = |uid: Option<&str>, mirror: bool| {
        let mut world = world();
        let wishes = wishes(&notes(&[("knit.dev/networks", "open")]));
        let uid = uid.map(ToOwned::to_owned);
        let pod = PodView { uid, mirror, wishes, ..PodView::default() };
        let mut asked = request(Some("plain"), None);
        asked.pod.uid = Some("asked".into());
        let name = asked.pod.name.clone().expect("a name");
        world.pods = Arc::new(BTreeMap::from([(("plain".to_owned(), name), Arc::new(pod))]));
        resolve(&world, &asked, &[]).map(|wanted| shown(&wanted))
    };
    assert_eq!(shown_as(Some("asked"), false).expect("the pod"), "default@eth0* open@net1");
    assert_eq!(shown_as(Some("hash"), true).expect("a static pod"), "default@eth0* open@net1");
    assert_eq!(shown_as(None, false).expect("a pod out of a file"), "default@eth0* open@net1");
    assert!(matches!(shown_as(Some("another"), false), Err(Missing::Wait(_))));
}
