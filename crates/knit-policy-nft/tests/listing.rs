//! Against the kernel: the table is what we think it is, and `nft` can list it.

use std::collections::BTreeMap;
use std::process::Command;

use knit_kernel::testing::{in_namespaces, namespace};
use knit_policy::model::Direction;
use knit_policy::sets::{Class, Decision, Key, TrafficKey, Value};
use knit_policy_nft::{PolicyTable, Router};
use knit_types::Protocol;

fn elements() -> BTreeMap<Key, Value> {
    let mut all = BTreeMap::new();
    for (pod, peer, first, last) in [
        ("10.0.0.1", "10.0.0.2", "192.0.2.0", "192.0.2.127"),
        ("fd00::1", "fd00::2", "2001:db8::", "2001:db8::ffff"),
    ] {
        let ip = |text: &str| text.parse().expect("an address");
        let rule = |peer: Option<u32>, traffic| Key::Rule {
            direction: Direction::Ingress,
            pod: ip(pod),
            peer: peer.map(Class),
            traffic,
        };
        let accept = Value::Decision(Decision::Accept);
        for direction in Direction::ALL {
            all.insert(Key::Subject(direction, ip(pod)), Value::Decision(Decision::Drop));
        }
        all.insert(Key::Itself(ip(pod)), Value::Member);
        all.insert(Key::Peer(ip(peer)), Value::Class(Class(2)));
        all.insert(Key::Block(ip(first), ip(last)), Value::Class(Class(3)));
        all.insert(rule(Some(2), TrafficKey::Port(Protocol::Tcp, 80)), accept);
        all.insert(rule(Some(3), TrafficKey::Range(Protocol::Udp, 1000, 2000)), accept);
        all.insert(rule(None, TrafficKey::Protocol(Protocol::Sctp)), accept);
        all.insert(rule(Some(1), TrafficKey::All), accept);
    }
    all
}

#[test]
fn nft_lists_the_table_and_a_second_look_finds_all_right() {
    in_namespaces(|| {
        let apart = Router::Apart {
            uplink: knit_types::IfName::new("uplink").expect("a name"),
            node: vec!["169.254.192.1/32".parse().expect("a range"), "fd6b::1/128".parse().expect("a range")],
        };
        for router in [Router::Node, apart] {
            let space = namespace();
            let mut table = PolicyTable::open_in(&space, router.clone()).expect("a table");
            assert!(table.sync(&elements()).expect("written").changes > 0);
            let mut again = PolicyTable::open_in(&space, router).expect("a table");
            assert_eq!(again.sync(&elements()).expect("read").changes, 0, "all was right already");
            let listed = space.run(|| Command::new("nft").args(["list", "ruleset"]).output());
            let listed = match listed.expect("entered") {
                Ok(listed) => listed,
                Err(error) => return knit_kernel::testing::skip(format_args!("nft: {error}")),
            };
            let text = String::from_utf8_lossy(&listed.stdout);
            assert!(listed.status.success(), "{}{text}", String::from_utf8_lossy(&listed.stderr));
            // It is for administrators, too.
            for words in
                ["ip saddr != @egress-subjects goto to", "ip6 saddr", ". udp . 1000-2000 :", "192.0.2.0/25"]
            {
                assert!(text.contains(words), "{words} is not in:\n{text}");
            }
            assert!(again.remove().expect("removed"));
        }
    });
}
