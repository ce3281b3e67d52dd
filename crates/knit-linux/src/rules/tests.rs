//! The tables as people read them.

use knit_nft::{IfName, Name, TableState};
use knit_runtime::{PortMapping, Protocol};

use super::*;

#[test]
fn the_nodes_table() {
    insta::assert_snapshot!(node::layout(4789, node::Flows { each: 65_536, together: 65_536 }).to_string());
}

#[test]
fn a_routed_networks_table() {
    insta::assert_snapshot!(router::layout(router::with_ports(), 4789).to_string());
}

#[test]
fn a_switched_networks_tables() {
    let tables = [router::layout(router::without_ports(), 4789), bridge::layout()];
    insta::assert_snapshot!(tables.map(|table| table.to_string()).join("\n"));
}

#[test]
fn arp_is_kept_away() {
    insta::assert_snapshot!(port::no_arp().to_string());
}

#[test]
fn an_attachment_is_a_few_elements() {
    let mac = knit_ipam::Mac([0x0a, 1, 10, 244, 1, 5]);
    let ips = ["10.244.1.5".parse().expect("v4"), "fd44::1:5".parse().expect("v6")];
    let mapping = |host_ip: Option<&str>| PortMapping {
        protocol: Protocol::Tcp,
        host_port: 8080,
        container_port: 80,
        host_ip: host_ip.map(|text| text.parse().expect("an address")),
    };
    let mut state = node::layout(4789, node::Flows { each: 65_536, together: 65_536 });
    state.chains.clear();
    let mut wanted = source_elements("knitaaaaaaaaaaa", mac, ips);
    wanted.extend(port_elements("knitaaaaaaaaaaa", &[mapping(None), mapping(Some("192.168.7.1"))], &ips));
    let elements = Elements { wanted, owns: &|_, _| false };
    let mut state = merge(state, None, &elements);
    state.sets.retain(|_, set| !set.elements.is_empty());
    insta::assert_snapshot!(state.to_string());
}

#[test]
fn another_networks_frames_were_dropped_while_tables_of_a_version_without_checks_were_replaced() {
    let layout = || node::layout(4789, node::Flows { each: 65_536, together: 65_536 });
    let uplink = |name: &str| SetElement::new(node::uplinks::all(), Element::new(&IfName::new(name)));
    let set_up = |found: Option<&TableState>, id: u32| {
        let owns = |set: &Name, element: &Element| node::network_of(set, element) == Some(id);
        merge(layout(), found, &Elements { wanted: vec![uplink(&format!("up-{id}"))], owns: &owns })
    };
    let unchecked = |state: &TableState| -> Vec<u32> {
        let set = &state.sets["tunnel-unchecked"];
        set.elements.values().filter_map(|e| node::network_of("tunnel-unchecked", e)).collect()
    };
    let mut earlier = layout();
    earlier.sets.retain(|name, _| !name.starts_with("tunnel-"));
    let both = [uplink("up-2"), uplink("up-3")].map(|put| put.element);
    earlier.sets.get_mut("uplinks").expect("a set").extend(both);

    let first = set_up(Some(&earlier), 2);
    assert_eq!(unchecked(&first), [3], "nothing is known yet of what other nodes send there");
    let second = set_up(Some(&first), 3);
    assert_eq!(unchecked(&second), [0; 0]);
    // Where frames were checked before, or rules were flushed, nothing is taken unchecked.
    let mut flushed = first.clone();
    flushed.sets.get_mut("tunnel-unchecked").expect("a set").elements.clear();
    assert_eq!(unchecked(&set_up(Some(&flushed), 2)), [0; 0]);
    assert_eq!(unchecked(&set_up(None, 2)), [0; 0]);
}

#[test]
fn ranges_that_overlap_are_joined() {
    let nets = ["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8", "192.168.7.1/32", "fd00::/8"];
    let nets: Vec<IpNet> = nets.iter().map(|text| text.parse().expect("a prefix")).collect();
    assert_eq!(range_elements(&nets, knit_types::Family::V4).len(), 2);
    assert_eq!(range_elements(&nets, knit_types::Family::V6).len(), 1);
}

#[test]
fn host_ports_of_a_lost_record_were_lost() {
    let port = |protocol, host_port, host_ip: Option<&str>| PortMapping {
        protocol,
        host_port,
        container_port: host_port ^ 0x0180,
        host_ip: host_ip.map(|text| text.parse().expect("an address")),
    };
    let both = ["10.244.1.5".parse().expect("v4"), "fd44::1:5".parse().expect("v6")];
    let one = vec![
        port(Protocol::Tcp, 8080, None),
        port(Protocol::Udp, 53, Some("192.168.7.1")),
        port(Protocol::Sctp, 65_535, Some("fd00::7")),
    ];
    let other = vec![port(Protocol::Tcp, 1, None)];
    let mut puts = port_elements("knita", &one, &both);
    puts.extend(port_elements("knitb", &other, &both[1..]));
    // In the order in which the kernel's sets are read.
    puts.sort_by_key(|put| port_sets().iter().position(|set| *set == put.set));
    let found = ports_of(&puts);
    assert_eq!(found.len(), 2);
    assert_eq!((&found["knita"], &found["knitb"]), (&one, &other));
}
