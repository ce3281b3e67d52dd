//! Against the kernel: what others do to the table of steering is found by comparing, without a notification,
//! and repaired.

use std::collections::{BTreeMap, BTreeSet};

use knit_kernel::testing::{in_namespaces, namespace, table_damages};
use knit_linux::{Config, LinuxRuntime};
use knit_nft::{Family, TableId};
use knit_runtime::routers::{Chosen, Entrance, Steered, Way};
use knit_runtime::{Protocol, Runtime as _};
use knit_testbed::tables::{commit_as_stranger, elsewhere_in_the_rule_set, read};

fn steering() -> TableId {
    TableId::new(Family::Inet, "knit-steer")
}

#[test]
fn damage_to_the_table_of_steering_is_found_by_comparing_and_counted() {
    in_namespaces(|| {
        let space = namespace();
        let runtime = LinuxRuntime::new(Config::new("a", Vec::new(), space.try_clone().expect("a clone")));
        let routers = runtime.expect("a runtime").routers().expect("routers");
        let mut table = routers.steering().expect("a table");
        let place = |port| Entrance { address: [192, 0, 2, 1].into(), protocol: Protocol::Tcp, port };
        let to = |port: u16| Steered {
            to: Way::Router(([169, 254, 192, 2], port).into()),
            near: None,
            sources: None,
            chosen: Chosen::ByOperator,
        };
        let mut wanted = BTreeMap::from([(place(30080), to(30080)), (place(30090), to(30090))]);
        let (none, all) = (BTreeSet::new(), wanted.keys().copied().collect());
        table.set(&wanted, &all).expect("written");
        let before = read(&space, &steering());
        for (what, damage) in table_damages(&space, &steering(), "node", "steer") {
            assert!(table.is_intact(), "before {what}");
            commit_as_stranger(&space, &damage);
            assert!(!table.is_intact(), "{what}");
            table.look_again();
            table.set(&wanted, &none).expect("repaired");
            assert_eq!(read(&space, &steering()), before, "{what}");
            assert!(table.take_repairs() > 0, "{what}");
        }
        // What is wanted besides is no repair.
        wanted.insert(place(30100), to(30100));
        commit_as_stranger(&space, &elsewhere_in_the_rule_set("firewall"));
        table.look_again();
        table.set(&wanted, &BTreeSet::from([place(30100)])).expect("written");
        assert_eq!(table.take_repairs(), 0);
        assert!(read(&space, &steering()).contains("30100"));
    });
}
