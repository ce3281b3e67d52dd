//! What the kernel must offer, apart from what the trial pod shows: sysctls, connection tracking, bridges'
//! packets.

use std::path::Path;

use super::Node;

pub fn look(node: &mut Node) {
    forwarding(node);
    conntrack(node);
    neighbours(node);
    bridged_packets(node);
    user_namespaces(node);
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The agent turns it on; somebody else may turn it off again.
fn forwarding(node: &mut Node) {
    let check = "forwarding";
    for (name, path) in [
        ("net.ipv4.ip_forward", "/proc/sys/net/ipv4/ip_forward"),
        ("net.ipv6.conf.all.forwarding", "/proc/sys/net/ipv6/conf/all/forwarding"),
    ] {
        match read(path).as_deref() {
            Some("0") if node.was_ready() => {
                let advice = format!(
                    "sysctl -w {name}=1, and find out what disabled it (often a file in \
                    /etc/sysctl.d); the agent enables it when it sets up a Network of that family"
                );
                // A node without IPv6 Networks does not need it for IPv6.
                if name.contains("ipv6") {
                    node.warning(
                        check,
                        format!("{name} is 0: IPv6 packets do not pass between pods and nodes"),
                        advice,
                    );
                } else {
                    node.wrong(
                        check,
                        format!("{name} is 0: packets do not pass between pods and nodes"),
                        advice,
                    );
                }
            }
            Some("0") => node.good(check, format!("{name} is 0; the agent enables it when it needs it")),
            Some(value) => node.good(check, format!("{name} is {value}")),
            None => {
                node.unknown(check, format!("cannot read {name}: this kernel may lack that family"));
            }
        }
    }
}

fn conntrack(node: &mut Node) {
    let check = "connection tracking";
    let number = |path: &str| read(path).and_then(|text| text.parse::<u64>().ok());
    let most = number("/proc/sys/net/netfilter/nf_conntrack_max");
    let now = number("/proc/sys/net/netfilter/nf_conntrack_count");
    match (now, most) {
        (Some(now), Some(most)) if most > 0 && now * 10 >= most * 9 => node.wrong(
            check,
            format!("{now} of {most} connections are tracked: further ones are dropped"),
            "raise it: sysctl -w net.netfilter.nf_conntrack_max=NUMBER (each takes about 300 bytes)",
        ),
        (Some(now), Some(most)) => node.good(check, format!("{now} of at most {most} connections")),
        _ => node.warning(
            check,
            "nf_conntrack is not loaded (yet)",
            "modprobe nf_conntrack; if that fails, use a kernel with CONFIG_NF_CONNTRACK",
        ),
    }
}

/// The tables of neighbours, which all namespaces of the machine share: a full one cuts the node off its own
/// gateway.
fn neighbours(node: &mut Node) {
    let check = "neighbours";
    for (family, table) in [("ipv4", "arp_cache"), ("ipv6", "ndisc_cache")] {
        let limit = read(&format!("/proc/sys/net/{family}/neigh/default/gc_thresh3"));
        let Some(most) = limit.and_then(|text| text.parse::<u64>().ok()) else {
            // Only the machine's own namespace has it.
            continue;
        };
        let now = read(&format!("/proc/net/stat/{table}")).and_then(|text| entries(&text));
        let name = format!("net.{family}.neigh.default.gc_thresh3");
        let now_text = now.map_or_else(|| "an unknown number".to_owned(), |now| now.to_string());
        let raise = format!("sysctl -w {name}=65536; the agent does so at startup if it is allowed to");
        if now.is_some_and(|now| now * 10 >= most * 8) {
            let text = format!(
                "{now_text} of {most} ({name}): when it is full, this node cannot reach new \
                neighbors"
            );
            node.wrong(check, text, raise);
        } else if most < ROOM {
            let text =
                format!("{name} is {most}: one pod of a Layer2 Network can fill it for the whole machine");
            node.warning(check, text, raise);
        } else {
            node.good(check, format!("{now_text} of at most {most} ({family})"));
        }
    }
}

/// The limit that the agent sets.
const ROOM: u64 = 65_536;

/// How many entries a table has, as `/proc/net/stat` says: in hexadecimal, the same in each processor's line.
fn entries(stat: &str) -> Option<u64> {
    u64::from_str_radix(stat.lines().nth(1)?.split_whitespace().next()?, 16).ok()
}

fn bridged_packets(node: &mut Node) {
    let check = "bridged packets";
    if Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists() {
        node.good(check, "br_netfilter is loaded: Services and network policies work on Layer2 Networks");
    } else {
        node.warning(
            check,
            "br_netfilter is not loaded: Services do not work between pods of one Layer2 Network, and pods \
             of one that a network policy selects are refused",
            "modprobe br_netfilter, and list it in /etc/modules-load.d; Layer3 Networks do not need it",
        );
    }
}

/// For the lab only.
fn user_namespaces(node: &mut Node) {
    let check = "user namespaces";
    let closed = [
        ("user.max_user_namespaces", "/proc/sys/user/max_user_namespaces", "0"),
        ("kernel.unprivileged_userns_clone", "/proc/sys/kernel/unprivileged_userns_clone", "0"),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
        ),
    ];
    let found = closed.iter().find(|(_, path, bad)| read(path).as_deref() == Some(bad));
    match found {
        // The agent does not need them, so this is nothing to repair on a node.
        Some((name, _, value)) => {
            node.good(
                check,
                format!("{name} is {value}: the lab needs root here; the agent does not need them"),
            );
        }
        None => node.good(check, "allowed: the lab runs without root"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_count_of_neighbours_is_read() {
        let stat = "entries  allocs   destroys\n0000001f 00000002 00000000\n0000001f 00000001 00000001\n";
        assert_eq!(entries(stat), Some(31));
        assert_eq!(entries("entries\n"), None);
        assert_eq!(entries(""), None);
    }
}
