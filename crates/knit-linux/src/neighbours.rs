//! The kernel's neighbour tables, which all namespaces of a machine share: room in them, and who does not fill them.
//!
//! Whoever can send to addresses that nobody has makes an entry for each. The table of a family has a limit for the whole
//! machine (1024 unless raised), and when it is reached, nobody gets a new entry: not the node for its own gateway either.
//! Entries that are permanent do not count, and all of ours are.

use knit_kernel::sysctl::{Sysctl, Sysctls};

use crate::space::Space;

/// From how many entries on the kernel looks for stale ones, looks harder, and refuses new ones.
pub(crate) const ROOM: [u64; 3] = [4096, 16_384, 65_536];

/// Raises the limits of both families where they are lower. Only the machine's own namespace has them, and only who may
/// change them there can: elsewhere it is not our table to care for.
pub(crate) fn make_room(node: &Space) {
    for family in ["ipv4", "ipv6"] {
        match raise(node, family) {
            Ok(Some(before)) => {
                tracing::info!(family, ?before, now = ?ROOM, "room for more neighbours");
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(
                error = crate::fail::chain(&error),
                family,
                "the kernel's limit of neighbours stays as it is, and one pod of a switched Network may fill it for the \
                 whole machine: set net.{family}.neigh.default.gc_thresh1 to 3 to 4096, 16384 and 65536"
            ),
        }
    }
}

/// What the limits were before, if they were raised.
fn raise(node: &Space, family: &str) -> knit_kernel::Result<Option<[u64; 3]>> {
    let sysctls = Sysctls::of(node.namespace())?;
    let name = |place: usize| Sysctl::new(format!("net/{family}/neigh/default/gc_thresh{}", place + 1));
    let mut before = [0; 3];
    for (place, value) in before.iter_mut().enumerate() {
        let Ok(text) = sysctls.get(&name(place)?) else { return Ok(None) };
        *value = text.parse().unwrap_or(u64::MAX);
    }
    let Some(wanted) = wanted(before) else { return Ok(None) };
    // From the highest on: at no time is a lower one above a higher one.
    for place in (0..3).rev() {
        if wanted[place] != before[place] {
            sysctls.set(&name(place)?, wanted[place])?;
        }
    }
    Ok(Some(before))
}

/// The limits to set, if any is lower than it should be. None is lowered.
fn wanted(found: [u64; 3]) -> Option<[u64; 3]> {
    let mut wanted = ROOM;
    for (wanted, found) in wanted.iter_mut().zip(found) {
        *wanted = found.max(*wanted);
    }
    (wanted != found).then_some(wanted)
}

/// The settings by which a link of a router would ask who has an address.
pub(crate) fn wrong_sysctls(router: &Space, link: &str) -> knit_kernel::Result<Vec<Sysctl>> {
    let sysctls = Sysctls::of(router.namespace())?;
    let mut wrong = Vec::new();
    for family in ["ipv4", "ipv6"] {
        for kind in ["mcast_solicit", "ucast_solicit", "app_solicit"] {
            let name = Sysctl::new(format!("net/{family}/neigh/{link}/{kind}"))?;
            // A kernel without IPv6 has no such table.
            if sysctls.get(&name).is_ok_and(|found| found != "0") {
                wrong.push(name);
            }
        }
    }
    Ok(wrong)
}

/// Keeps a link of a router from asking who has an address: everybody that it can reach there is a permanent neighbour.
/// A packet to any other address is dropped at once, and the entry that the kernel makes can go at once, too.
pub(crate) fn ask_nobody(router: &Space, link: &str) {
    let set = || -> knit_kernel::Result<()> {
        let sysctls = Sysctls::of(router.namespace())?;
        wrong_sysctls(router, link)?.iter().try_for_each(|name| sysctls.set(name, 0))
    };
    if let Err(error) = set() {
        tracing::warn!(
            error = crate::fail::chain(&error),
            link,
            "the router asks for addresses that nobody has, and its pods may fill the machine's table of neighbours"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_raised_and_never_lowered() {
        assert_eq!(wanted([128, 512, 1024]), Some(ROOM));
        assert_eq!(wanted([128, 100_000, 200_000]), Some([4096, 100_000, 200_000]));
        assert_eq!(wanted([80_000, 90_000, 100_000]), None);
        assert_eq!(wanted(ROOM), None);
    }
}
