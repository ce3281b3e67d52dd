//! Nodes join, nodes fail, and the API is away: what agents and the controller do then is counted, never
//! timed.

use knit_scale::cluster::Api;
use knit_scale::meter::{Count, Group, sum};
use knit_scale::report::Phase;
use knit_scale::run::{Options, run};
use knit_scale::scenario::Scenario;

const WHOLE: u32 = 3;
const JOINS: u32 = 12;
const FAILURES: u32 = 6;
const LEASE_SECONDS: u32 = 2;

fn of(phase: &Phase, group: Group, kind: &str) -> Count {
    phase.counts.get(&group).and_then(|kinds| kinds.get(kind)).copied().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_join_or_fail_and_an_api_that_is_away_cost_what_changed() {
    let scenario = Scenario {
        nodes: vec![24],
        whole: WHOLE,
        pods: 24,
        networks: 2,
        services: 3,
        policies: 2,
        pods_per_second: 3,
        pod_seconds: 1,
        quiet_seconds: 2,
        busy_seconds: 3,
        joins: JOINS,
        join_seconds: 3,
        failures: FAILURES,
        fail_seconds: 3,
        // Longer than a Lease holds: an agent that nobody hears is not away because of that.
        outage_seconds: 16,
        lease_seconds: LEASE_SECONDS,
        lease_hold_seconds: 12,
        ..Scenario::default()
    };
    scenario.check().expect("it can be carried out");
    let options = Options { api: Api::Embedded, controller: None, agent: None };
    let report = run(&scenario, &options, &|text| println!("{text}")).await.expect("a report");
    let [size] = report.sizes.as_slice() else { panic!("one size") };
    println!("{size:#?}");
    let names: Vec<&str> = size.phases.iter().map(|phase| phase.name).collect();
    assert_eq!(names, ["quiet", "busy", "join", "fail", "outage", "afterwards"]);
    let [_, busy, join, fail, outage, afterwards] = size.phases.as_slice() else { panic!("six phases") };
    assert_eq!((size.errors.as_slice(), size.tainted), (&[][..], 0));
    assert_eq!((busy.pods, busy.failed, join.pods, join.failed), (9, 0, 9, 0));

    // Every agent hears of every node, from slices: a write of one goes to each agent once.
    assert_eq!((join.refused, join.unfollowed), (0, 0));
    assert_eq!(join.followed.expect("nodes joined").count, JOINS as usize);
    let blocks = of(join, Group::Controller, "addressblocks").writes;
    let of_further = u64::from(2 * WHOLE);
    assert!((u64::from(JOINS)..=u64::from(JOINS) + of_further).contains(&blocks), "{blocks}: one each");
    for phase in [join, fail] {
        let name = phase.name;
        let nodes = of(phase, Group::Agents, "nodes");
        assert!(nodes.events <= u64::from(WHOLE), "{name}: {nodes:?} of other Nodes");
        for kind in ["nodeslices", "blockslices"] {
            let (written, heard) = (of(phase, Group::Controller, kind), of(phase, Group::Agents, kind));
            // A node that joins is written with its addresses and with its block, at most.
            assert!(written.writes <= 2 * u64::from(JOINS) + 2, "{name}: {written:?} of {kind}");
            let each = (heard.events).div_ceil(u64::from(WHOLE));
            assert!(each <= written.writes + 6, "{name}: {written:?} and {heard:?} of {kind}");
        }
        assert_eq!((phase.ceased_to_lead, of(phase, Group::Agents, "nodes").lists), (0, 0), "{name}");
    }
    // A Network is set up again for what changed, on the nodes that have it, and not more often.
    let changes = |count: u32| (2 * count * WHOLE) as usize;
    assert!(join.set_ups <= changes(JOINS + join.further), "{} set-ups", join.set_ups);
    assert!(fail.set_ups <= changes(FAILURES), "{} set-ups", fail.set_ups);

    // Nobody is heard while the API is away, and nobody makes up for it afterwards: no taint, no storm.
    let knit = [Group::Agents, Group::Writers, Group::Controller];
    let all = |phase: &Phase| knit.iter().map(|group| sum(&phase.counts, *group).writes).sum::<u64>();
    let leases = |phase: &Phase| of(phase, Group::Writers, "leases").writes;
    assert!(all(outage) - leases(outage) <= 40, "{:#?}", outage.counts);
    for phase in [outage, afterwards] {
        let closed = of(phase, Group::Controller, "nodes").writes;
        assert_eq!(closed, 0, "{}: no node is closed to new pods", phase.name);
    }
    // Leases of whole nodes may be due, their reports, and the controller's own Lease; those of the others
    // are as often as ever.
    let nodes = u64::from(24 + JOINS - FAILURES);
    let others = all(afterwards) - leases(afterwards);
    assert!(others <= nodes + 10 * u64::from(WHOLE) + 20, "{:#?}", afterwards.counts);
    let rounds = afterwards.seconds / f64::from(LEASE_SECONDS) + 2.0;
    assert!(leases(afterwards) as f64 <= nodes as f64 * rounds, "{:#?}", afterwards.counts);
    // Watches go on where they were: what was known is not listed again.
    let agents = sum(&afterwards.counts, Group::Agents);
    assert!(agents.lists <= 4 * u64::from(WHOLE), "{:#?}", afterwards.counts);
}
