//! How full the kernel's tables are that everybody on a node shares: connections, and neighbours of each
//! family.

use std::path::Path;

/// A table of the kernel's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KernelTable {
    /// What it is called in metrics.
    pub name: &'static str,
    /// How many entries it has.
    pub entries: u64,
    /// From how many on it takes no more.
    pub limit: u64,
}

/// The tables that are to be seen below `/proc`, given as `proc`: those of neighbours only in the machine's
/// own namespace.
#[must_use]
pub fn read(proc: &Path) -> Vec<KernelTable> {
    let text = |path: &str| std::fs::read_to_string(proc.join(path)).ok();
    let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
    let neighbours = |stat: &str, limit: &str| {
        // In hexadecimal, the same in each processor's line.
        let stat = text(stat)?;
        let entries = u64::from_str_radix(stat.lines().nth(1)?.split_whitespace().next()?, 16).ok()?;
        Some((entries, number(limit)?))
    };
    let connections = || {
        let entries = number("sys/net/netfilter/nf_conntrack_count")?;
        Some((entries, number("sys/net/netfilter/nf_conntrack_max")?))
    };
    let tables = [
        ("connections", connections()),
        ("neighbours-ipv4", neighbours("net/stat/arp_cache", "sys/net/ipv4/neigh/default/gc_thresh3")),
        ("neighbours-ipv6", neighbours("net/stat/ndisc_cache", "sys/net/ipv6/neigh/default/gc_thresh3")),
    ];
    let seen =
        tables.into_iter().filter_map(|(name, found)| found.map(|(entries, limit)| (name, entries, limit)));
    seen.map(|(name, entries, limit)| KernelTable { name, entries, limit }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_seen_is_read_and_the_rest_left_out() {
        let proc = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = proc.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        write("sys/net/netfilter/nf_conntrack_count", "12\n");
        write("sys/net/netfilter/nf_conntrack_max", "262144\n");
        write("net/stat/arp_cache", "entries  allocs\n0000001f 00000002\n0000001f 00000001\n");
        write("sys/net/ipv4/neigh/default/gc_thresh3", "65536\n");
        write("net/stat/ndisc_cache", "entries  allocs\n");
        let table = |name, entries, limit| KernelTable { name, entries, limit };
        assert_eq!(
            read(proc.path()),
            [table("connections", 12, 262_144), table("neighbours-ipv4", 31, 65_536)]
        );
    }
}
