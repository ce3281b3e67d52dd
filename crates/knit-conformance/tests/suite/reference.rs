//! Knit's own runtime keeps every promise that it makes.

use std::net::IpAddr;
use std::sync::Arc;

use knit_kernel::addr::Address;
use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::testing::{in_namespaces, namespace};
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_linux::{Config, LinuxRuntime};

use crate::{Options, examine_with, failed};

#[test]
fn the_reference_runtime_passes() {
    in_namespaces(|| {
        let name = |text: &str| IfName::new(text).expect("a name");
        let (node, neighbour) = (NetNs::current().expect("this namespace"), namespace());
        let handle = Handle::open(&node).expect("a handle");
        let uplink = NewLink::veth(name("eth0"), Peer::new(name("eth0"), &neighbour));
        let uplink = handle.create_link(&uplink).expect("an uplink").index;
        let other = Handle::open(&neighbour).expect("a handle");
        other.apply(&[Change::named(name("eth0")).up().into()]).expect("the other end is up");
        let addresses: Vec<IpAddr> =
            ["192.0.2.7", "2001:db8:2::7"].map(|a| a.parse().expect("an address")).into();
        let mut ops: Vec<Op<'_>> = vec![Change::of(uplink).up().into()];
        for text in ["192.0.2.7/24", "2001:db8:2::7/64"] {
            ops.push(Op::create(Address::new(uplink, text.parse().expect("an address"))));
        }
        handle.apply(&ops).expect("the node has addresses");
        let mut config = Config::new("node", addresses.clone(), node);
        config.router_directory = "/run/routers".into();
        std::fs::create_dir_all(&config.router_directory).expect("a directory");
        let parent = NewLink::veth(name("eth1"), Peer::new(name("eth1"), &neighbour));
        let parent = handle.create_link(&parent).expect("another link").index;
        handle.apply(&[Change::of(parent).up().into()]).expect("up");
        other.apply(&[Change::named(name("eth1")).up().into()]).expect("the other end is up");
        let runtime = Arc::new(LinuxRuntime::new(config).expect("a runtime"));
        let report = examine_with(runtime, |options| Options {
            node_addresses: addresses,
            underlay_parent: Some("eth1".into()),
            ..options
        });
        let report = report.expect("the suite runs");
        assert_eq!(failed(&report), Vec::<&str>::new());
        for profile in &report.profiles {
            // Everything that it announces was really looked at.
            let announced =
                profile.name == "Core" || report.runtime.features.iter().any(|f| f == profile.name);
            assert_eq!(profile.skipped == 0, announced, "{}: {:?}", profile.name, profile.cases);
        }
    });
}
