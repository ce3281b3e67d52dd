//! What a node costs does not grow with the cluster: the same things happen in a small one and in one four
//! times as large, and counts are compared, never times. Agents learn of other nodes from slices.

use knit_scale::cluster::Api;
use knit_scale::meter::{Group, sum};
use knit_scale::report::{Phase, Size};
use knit_scale::run::{Options, run};
use knit_scale::scenario::Scenario;

const SMALL: u32 = 125;
const LARGE: u32 = 500;

fn scenario() -> Scenario {
    Scenario {
        nodes: vec![SMALL, LARGE],
        whole: 4,
        networks: 3,
        services: 20,
        policies: 10,
        pods_per_second: 5,
        pod_seconds: 2,
        quiet_seconds: 6,
        busy_seconds: 6,
        ..Scenario::default()
    }
}

fn phase<'a>(size: &'a Size, name: &str) -> &'a Phase {
    size.phases.iter().find(|phase| phase.name == name).expect("a phase")
}

/// Events of one kind that one agent got, and of all kinds.
fn events(phase: &Phase, whole: u32, kind: Option<&str>) -> f64 {
    let kinds = phase.counts.get(&Group::Agents).into_iter().flatten();
    let counted = kinds.filter(|(name, _)| kind.is_none_or(|kind| *name == kind));
    counted.map(|(_, count)| count.events as f64).sum::<f64>() / f64::from(whole)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_costs_does_not_grow_with_the_cluster() {
    let scenario = scenario();
    let options = Options { api: Api::Embedded, controller: None, agent: None };
    let report = run(&scenario, &options, &|text| println!("{text}")).await.expect("a report");
    let [small, large] = report.sizes.as_slice() else { panic!("two sizes") };
    for size in [small, large] {
        for phase in &size.phases {
            println!(
                "{} nodes, {}: {:?}, {} failed, slowest plan {:?}\n{:#?}",
                size.nodes,
                phase.name,
                phase.per_agent,
                phase.failed,
                phase.slowest_plan_seconds,
                phase.counts
            );
        }
        let busy = phase(size, "busy");
        assert_eq!((busy.failed, size.tainted), (0, 0), "{} nodes", size.nodes);
        assert_eq!(busy.pods, 30);
        let written = |kind: &str| busy.counts[&Group::Agents].get(kind).map_or(0, |count| count.writes);
        // Half of the pods are on whole nodes for certain, and a third of those have a further Network.
        let attachments = written("networkattachments") + written("networkattachments/status");
        assert!(attachments <= 4 * u64::from(busy.pods), "{attachments} writes for {} pods", busy.pods);
        // Of the default Network's pods nothing is written but counts, once in a minute: what else changes is
        // whether a Network is ready and whether a block is wanted, and how many there are.
        let changes = 2 * u64::from(busy.further_whole) + 4 * 4 + 8;
        let reports = written("nodenetworks/status");
        assert!(reports <= changes, "{reports} reports for {} pods", busy.on_whole);
        // A pod that goes takes its attachment with it, so its agent may ask for one that is not there.
        let kinds = busy.counts[&Group::Agents].iter().filter(|(kind, _)| *kind != "networkattachments");
        let refused: u64 = kinds.map(|(_, count)| count.refused).sum();
        assert_eq!(refused, 0, "{:?}", busy.counts);
    }
    let times = f64::from(LARGE / SMALL);
    for name in ["quiet", "busy"] {
        let (small, large) = (phase(small, name), phase(large, name));
        let grown = |kind: Option<&str>| (events(small, 4, kind), events(large, 4, kind));
        let (few, many) = grown(None);
        assert!(many <= 1.5 * few + 25.0, "{name}: {few} and {many} events to an agent");
        // An agent hears of its own Node only: of a heartbeat each five minutes.
        let (few, many) = grown(Some("nodes"));
        assert!(few <= 2.0 && many <= 2.0, "{name}: {few} and {many} events of Nodes to an agent");
        // What nodes do by themselves is written by each of them once, and no more.
        let writes = |phase: &Phase| phase.knit_writes() * phase.seconds;
        let (few, many) = (writes(small), writes(large));
        assert!(many <= 1.3 * times * few + 40.0, "{name}: {few} and {many} writes");
        // The controller hears of each change once.
        let heard = |phase: &Phase| sum(&phase.counts, Group::Controller).events as f64;
        assert!(heard(large) <= 1.5 * times * heard(small) + 60.0, "{} {}", heard(small), heard(large));
    }
}
