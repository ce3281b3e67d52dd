//! On random clusters: whatever a change denies or allows that was not so before, live connections of it are
//! looked at.

#[path = "../../knit-policy/tests/support/random.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod random;

use std::net::IpAddr;

use knit_nft::Fake;
use knit_policy::model::{DEFAULT_NETWORK, Protocol, Traffic};
use knit_policy::sets::Engine;
use knit_policy_nft::live::Touched;
use knit_policy_nft::{Elements, PolicyTable, Router};
use proptest::prelude::*;

/// Everybody to everybody, as random clusters know them.
fn flows() -> Vec<(IpAddr, IpAddr, Traffic)> {
    let v4 = (0..8).map(|n| IpAddr::from([10, 0, 0, n])).chain([IpAddr::from([203, 0, 113, 9])]);
    let v6 = (0..4).map(|n| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]));
    let mut all = Vec::new();
    for family in [v4.collect::<Vec<_>>(), v6.collect()] {
        for source in &family {
            for destination in &family {
                let ports = [53, 80, 81, 8080].map(|port| Traffic::Port(Protocol::Tcp, port));
                let others = [Traffic::Port(Protocol::Udp, 80), Traffic::Other];
                all.extend(ports.into_iter().chain(others).map(|traffic| (*source, *destination, traffic)));
            }
        }
    }
    all
}

/// Who is judged otherwise, and not looked at.
fn missed(
    before: &Elements,
    after: &Elements,
    touched: &Touched,
    flows: &[(IpAddr, IpAddr, Traffic)],
) -> Option<String> {
    flows.iter().find_map(|(source, destination, traffic)| {
        let allowed = [before, after].map(|elements| elements.allow(*source, *destination, *traffic));
        let looked_at = match touched {
            Touched::All => true,
            Touched::Addresses(some) => some.contains(source) || some.contains(destination),
            Touched::Cut | Touched::Nothing => false,
        };
        let right = match allowed {
            [true, false] => looked_at,
            [false, true] => !touched.is_empty(),
            _ => true,
        };
        (!right).then(|| format!("{source} to {destination}, {traffic}: {allowed:?}, {touched:?}"))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn whoever_is_judged_otherwise_after_a_change_is_touched(
        first in prop::collection::vec(random::event(), 20..40),
        then in prop::collection::vec(random::event(), 30),
    ) {
        let flows = flows();
        let mut engine = Engine::new("n0");
        first.iter().for_each(|event| random::tell(&mut engine, event));
        engine.settle();
        let mut table = PolicyTable::over(Fake::new(), Router::Node);
        table.sync(&engine.elements(DEFAULT_NETWORK)).expect("synced");
        for event in &then {
            random::tell(&mut engine, event);
            for (_, changes) in engine.settle().iter().filter(|(network, _)| &**network == DEFAULT_NETWORK) {
                let before = table.elements().clone();
                let touched = table.apply(changes).expect("applied").touched;
                let missed = missed(&before, &table.elements(), &touched, &flows);
                prop_assert_eq!(missed, None, "{:#?}", changes);
            }
        }
    }
}
