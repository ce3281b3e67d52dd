//! A router with pods around it, policies about them, and clients that find out whether they get through.

use std::net::IpAddr;

use knit_policy::model::Traffic;
use knit_policy_nft::Router;
use knit_types::Family;

use super::cluster::{HERE, Policies};
use super::probe::reaches;
use super::world::World;

/// `a` and `b` are pods of namespace x here, `c` one of namespace y here, `far` one of x elsewhere, and `out`
/// is nobody's.
const HOSTS: [(&str, &str, &str); 5] = [
    ("a", "10.0.0.10", "fd00::10"),
    ("b", "10.0.0.11", "fd00::11"),
    ("c", "10.0.0.12", "fd00::12"),
    ("far", "10.0.1.10", "fd00:0:0:1::10"),
    ("out", "203.0.113.9", "2001:db8:9::9"),
];

/// A router with its hosts, and policies about them.
pub struct Lab {
    pub world: World,
    pub policies: Policies,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(Router::Node)
    }

    pub fn with(router: Router) -> Self {
        let world = World::routed(&HOSTS);
        world.serve();
        let mut policies = Policies::new(&world.router, router);
        for (host, who, node) in
            [("a", "x/a", HERE), ("b", "x/b", HERE), ("c", "y/c", HERE), ("far", "x/far", "there")]
        {
            policies.pod(who, node, &world.host(host).addresses);
        }
        Self { world, policies }
    }

    pub fn address(&self, host: &str, family: Family) -> IpAddr {
        self.world.host(host).addresses[usize::from(family == Family::V6)]
    }

    /// Whether a host gets through; the same in both families.
    #[track_caller]
    pub fn reaches(&mut self, from: &str, to: &str, traffic: Traffic) -> bool {
        let [v4, v6] = Family::ALL.map(|family| self.reaches_by(from, self.address(to, family), traffic));
        assert_eq!(v4, v6, "{from} to {to}, {traffic}: the families differ");
        v4
    }

    #[track_caller]
    pub fn reaches_by(&mut self, from: &str, to: IpAddr, traffic: Traffic) -> bool {
        let before = self.policies.denied();
        let Self { world, policies } = self;
        reaches(&world.host(from).space, to, traffic, || policies.denied() > before)
    }

    #[track_caller]
    pub fn expect(&mut self, allowed: &[(&str, &str, Traffic)], denied: &[(&str, &str, Traffic)]) {
        for (from, to, traffic) in allowed {
            assert!(self.reaches(from, to, *traffic), "{from} does not reach {to}, {traffic}");
        }
        for (from, to, traffic) in denied {
            assert!(!self.reaches(from, to, *traffic), "{from} reaches {to}, {traffic}");
        }
    }
}
