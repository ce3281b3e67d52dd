//! `cargo xtask bench policy`: what the model of policies costs, without decoding of objects and without a
//! kernel.
//!
//! 10,000 pods, 1,000 policies, 100 pods of this node. "Spread" has a hundred namespaces with ten policies
//! each, one of them a default deny; in "one namespace" all pods and policies are in one, and every policy
//! selects every pod of this node. Each change is told and settled alone, as by one event of a watch.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use knit_kernel::testing::cpu_time;
use knit_policy::model::{
    Action, AddressRanges, Attachment, Kind, Labels, Name, NamedPort, Namespace, NamespaceMatch, Peer, Pod,
    Policy, PolicyName, PortMatch, PortRanges, Ports, Protocol, Rule, Scope, Selector, Subject, Tier,
};
use knit_policy::sets::Engine;

use super::{Goal, Row};

const BENCH: &str = "policy";
const PODS: u32 = 10_000;
const POLICIES: u32 = 1_000;
const LOCAL: u32 = 100;
const ROUNDS: u32 = 1_000;

/// How pods and policies are divided.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Spread,
    OneNamespace,
}

pub fn run() -> Result<Vec<Row>> {
    let mut rows = of(Shape::Spread)?;
    rows.extend(of(Shape::OneNamespace)?);
    Ok(rows)
}

/// What is done in a round.
type Change<'a> = Box<dyn FnMut(&mut Engine, u32) + 'a>;

fn of(shape: Shape) -> Result<Vec<Row>> {
    let name = match shape {
        Shape::Spread => "100 namespaces",
        Shape::OneNamespace => "one namespace, all policies on all pods",
    };
    let row = |what: &str, metric: &str, value: f64, unit: &str| {
        Row::new(BENCH, format!("{name}: {what}"), metric, value, unit)
    };
    let pods: Vec<Pod> = (0..PODS).map(|i| pod(shape, i)).collect();
    let policies: Vec<Policy> = (0..POLICIES).map(|i| policy(shape, i)).collect();
    let (before, memory) = (cpu_time().0, resident()?);
    let mut engine = Engine::new("here");
    for namespace in 0..100 {
        let labels: Labels = [("team", format!("t{}", namespace % 10))].into_iter().collect();
        engine.set_namespace(Namespace::new(&format!("ns-{namespace}"), labels));
    }
    for pod in &pods {
        engine.set_pod(pod.clone());
    }
    for policy in &policies {
        engine.set_policy(policy.clone());
    }
    let elements: usize = engine.settle().iter().map(|(_, changes)| changes.len()).sum();
    let load = (cpu_time().0 - before).as_secs_f64();
    let mut rows = vec![
        row("first load", "cpu", load, "s").goal(Goal::AtMost(0.5)),
        row("first load", "elements", elements as f64, ""),
        row("first load", "memory", resident()?.saturating_sub(memory) as f64 / 1024.0, "MiB")
            .goal(Goal::AtMost(30.0)),
    ];
    // A limit for each change, and for each element that is written for it.
    let mut measured = |what: &str, limit: Option<(f64, f64)>, mut change: Change<'_>| {
        let (before, mut written) = (cpu_time().0, 0);
        for round in 0..ROUNDS {
            change(&mut engine, round);
            written += engine.settle().iter().map(|(_, changes)| changes.len()).sum::<usize>();
        }
        let each = (cpu_time().0 - before).as_secs_f64() * 1e3 / f64::from(ROUNDS);
        let elements = written as f64 / f64::from(ROUNDS);
        let cpu = row(what, "cpu", each, "ms");
        rows.push(match limit {
            Some((change, element)) => cpu.goal(Goal::AtMost(change + element * elements)),
            None => cpu,
        });
        rows.push(row(what, "elements", elements, ""));
    };
    let remote = |i: u32| Pod { node: "there".into(), ..pod(shape, PODS + i) };
    measured("one remote pod more", Some((0.05, 0.0)), Box::new(move |e, i| e.set_pod(remote(i))));
    measured(
        "a label that nobody asks for",
        Some((0.05, 0.0)),
        Box::new(move |e, i| {
            let pod = remote(i);
            e.set_pod(Pod { labels: pod.labels.clone().with("hash", "changed"), ..pod });
        }),
    );
    measured(
        "one remote pod less",
        Some((0.05, 0.0)),
        Box::new(move |e, i| e.delete_pod(&remote(i).key, None)),
    );
    let local = move |i: u32| Pod { node: "here".into(), ..pod(shape, PODS + i) };
    measured(
        "a local pod comes, and goes",
        None,
        Box::new(
            move |e, i| if i % 2 == 0 { e.set_pod(local(i)) } else { e.delete_pod(&local(i - 1).key, None) },
        ),
    );
    let late = move |i: u32| {
        let mut policy = policy(shape, i % 100);
        policy.name.name = "late".into();
        for rule in policy.ingress.iter_mut().chain(&mut policy.egress).flat_map(|rules| rules.iter_mut()) {
            rule.ports =
                Some([PortMatch::Numbers(Ports::of(Protocol::Tcp, PortRanges::range(9000, 9000)))].into());
        }
        policy
    };
    measured(
        "a policy comes, and goes",
        Some((2.0, 0.002)),
        Box::new(
            move |e, i| if i % 2 == 0 { e.set_policy(late(i)) } else { e.delete_policy(&late(i - 1).name) },
        ),
    );
    Ok(rows)
}

fn namespace_of(shape: Shape, i: u32) -> Name {
    match shape {
        Shape::Spread => format!("ns-{}", i % 100).into(),
        Shape::OneNamespace => "ns-0".into(),
    }
}

fn pod(shape: Shape, i: u32) -> Pod {
    let app = match shape {
        Shape::Spread => i / 100 % 10,
        Shape::OneNamespace => i % 1000,
    };
    let address = IpAddr::from(Ipv4Addr::from(0x0a00_0000 + i));
    Pod {
        uid: format!("uid-{i}").into(),
        // One of each namespace, or the first ones.
        node: if i < LOCAL { "here".into() } else { "there".into() },
        labels: [("app", format!("app-{app}")), ("pod-template-hash", format!("{i:x}"))]
            .into_iter()
            .collect(),
        ports: [NamedPort { name: "http".into(), protocol: Protocol::Tcp, number: 8080 }].into(),
        attachments: [Attachment { network: "default".into(), primary: true, addresses: [address].into() }]
            .into(),
        ..Pod::new(&namespace_of(shape, i), &format!("pod-{i}"))
    }
}

/// Selects one app, or all: lets in another app of the namespace and a team, on two ports; lets out to a
/// block.
fn policy(shape: Shape, i: u32) -> Policy {
    let namespace = namespace_of(shape, i);
    let app = |n: u32| Selector::labels([("app", format!("app-{n}"))]);
    let (number, everything) = match shape {
        Shape::Spread => (i / 100, i / 100 == 9),
        Shape::OneNamespace => (i, true),
    };
    let pods = |selector| {
        Peer::Pods(Subject { namespaces: NamespaceMatch::Named(namespace.clone()), pods: selector })
    };
    let team = Selector::labels([("team", format!("t{}", i % 10))]);
    let team = Peer::Pods(Subject { namespaces: NamespaceMatch::Selected(team), pods: app(number) });
    let ports = [80, 443].map(|n| PortMatch::Numbers(Ports::of(Protocol::Tcp, PortRanges::range(n, n))));
    let block = ipnet::IpNet::V4(ipnet::Ipv4Net::new_assert(Ipv4Addr::from(0xcb00_0000 + i * 256), 24));
    let rule = |peers: Vec<Peer>| Rule {
        name: None,
        action: Action::Accept,
        peers: Some(peers.into()),
        ports: Some(ports.to_vec().into()),
    };
    let deny = shape == Shape::Spread && everything;
    let ingress = if deny { Vec::new() } else { vec![rule(vec![pods(app(number + 1)), team])] };
    let egress = (!deny)
        .then(|| vec![rule(vec![pods(app(number)), Peer::Addresses(AddressRanges::block(block, &[]))])]);
    Policy {
        name: PolicyName { kind: Kind::Network, namespace: namespace.clone(), name: format!("p-{i}").into() },
        tier: Tier::Namespace,
        scope: Scope::Primary,
        subject: Subject {
            namespaces: NamespaceMatch::Named(namespace),
            pods: if everything { Selector::everything() } else { app(number) },
        },
        ingress: Some(ingress.into()),
        egress: egress.map(Into::into),
    }
}

/// What this process holds of memory, in KiB.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
