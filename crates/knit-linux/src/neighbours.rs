//! The kernel's neighbour tables, which all namespaces of a machine share: room in them, and who does not
//! fill them.
//!
//! Whoever can send to addresses that nobody has makes an entry for each. The table of a family has a limit
//! for the whole machine (1024 unless raised), and when it is reached, nobody gets a new entry: not the node
//! for its own gateway either. Entries that are permanent do not count, and all of ours are.

use std::sync::atomic::{AtomicBool, Ordering};

use knit_kernel::sysctl::{Sysctl, Sysctls};

use crate::space::NamespaceSockets;

const FAMILIES: [&str; 2] = ["ipv4", "ipv6"];

/// From how many entries on the kernel looks for stale ones, looks harder, and refuses new ones.
pub(crate) const ROOM: [u64; 3] = [4096, 16_384, 65_536];

/// Whether the limits can be raised: what the kernel refused once is not tried, and not told, again.
#[derive(Debug, Default)]
pub(crate) struct NeighbourRoom {
    refused: AtomicBool,
}

/// Where limits are read and written: a namespace's sysctls, or a test's.
trait Limits {
    fn get(&self, name: &Sysctl) -> Option<u64>;
    fn set(&mut self, name: &Sysctl, value: u64) -> knit_kernel::Result<()>;
}

impl Limits for Sysctls {
    fn get(&self, name: &Sysctl) -> Option<u64> {
        Sysctls::get(self, name).ok().map(|text| text.parse().unwrap_or(u64::MAX))
    }

    fn set(&mut self, name: &Sysctl, value: u64) -> knit_kernel::Result<()> {
        Sysctls::set(self, name, value)
    }
}

impl NeighbourRoom {
    /// Raises the limits of both families where they are lower. Only the machine's own namespace has them,
    /// and only who may change them there can: elsewhere it is not our table to care for.
    pub fn make(&self, node: &NamespaceSockets) {
        if self.refused.load(Ordering::Relaxed) {
            return;
        }
        match Sysctls::of(node.namespace()) {
            Ok(mut sysctls) => self.make_in(&mut sysctls),
            Err(error) => tracing::warn!(error = crate::fail::chain(&error), "cannot read sysctls"),
        }
    }

    fn make_in(&self, limits: &mut impl Limits) {
        for family in FAMILIES {
            match raise(limits, family) {
                Ok(Some(before)) => {
                    tracing::info!(family, ?before, now = ?ROOM, "raised the limits of neighbor tables");
                }
                Ok(None) => {}
                Err(error) => {
                    self.refused.store(true, Ordering::Relaxed);
                    tracing::warn!(
                        error = crate::fail::chain(&error),
                        family,
                        "the kernel's neighbor limit cannot be raised, and one pod of a switched \
                        Network may fill the table for the whole machine: set \
                        net.{family}.neigh.default.gc_thresh1 to 3 to 4096, \
                         16384 and 65536"
                    );
                }
            }
        }
    }

    /// The families whose limits somebody lowered again, unless they cannot be raised.
    pub fn lacking(&self, node: &NamespaceSockets) -> Vec<&'static str> {
        if self.refused.load(Ordering::Relaxed) {
            return Vec::new();
        }
        Sysctls::of(node.namespace()).map(|sysctls| Self::lacking_in(&sysctls)).unwrap_or_default()
    }

    fn lacking_in(limits: &impl Limits) -> Vec<&'static str> {
        FAMILIES.into_iter().filter(|family| read(limits, family).and_then(wanted).is_some()).collect()
    }
}

fn name(family: &str, place: usize) -> knit_kernel::Result<Sysctl> {
    Sysctl::new(format!("net/{family}/neigh/default/gc_thresh{}", place + 1))
}

/// The limits of a family; none where they are not to be seen.
fn read(limits: &impl Limits, family: &str) -> Option<[u64; 3]> {
    let mut found = [0; 3];
    for (place, value) in found.iter_mut().enumerate() {
        *value = limits.get(&name(family, place).ok()?)?;
    }
    Some(found)
}

/// What the limits were before, if they were raised.
fn raise(limits: &mut impl Limits, family: &str) -> knit_kernel::Result<Option<[u64; 3]>> {
    let Some(before) = read(limits, family) else { return Ok(None) };
    let Some(wanted) = wanted(before) else { return Ok(None) };
    // From the highest on: at no time is a lower one above a higher one.
    for place in (0..3).rev() {
        if wanted[place] != before[place] {
            limits.set(&name(family, place)?, wanted[place])?;
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

    /// A machine's limits; one that lets nobody change them is `fixed`.
    #[derive(Default)]
    struct Machine {
        values: std::collections::BTreeMap<String, u64>,
        fixed: bool,
    }

    impl Limits for Machine {
        fn get(&self, name: &Sysctl) -> Option<u64> {
            self.values.get(&name.to_string()).copied()
        }

        fn set(&mut self, name: &Sysctl, value: u64) -> knit_kernel::Result<()> {
            if self.fixed {
                let source = std::io::Error::from_raw_os_error(13);
                let (attempted, namespace) = (format!("set sysctl {name}"), "net:[1]".into());
                return Err(knit_kernel::Error::Sysctl { attempted, namespace, source });
            }
            self.values.insert(name.to_string(), value);
            Ok(())
        }
    }

    fn machine() -> Machine {
        let mut machine = Machine::default();
        for family in FAMILIES {
            for (place, value) in [128, 512, 1024].into_iter().enumerate() {
                machine.values.insert(name(family, place).expect("a name").to_string(), value);
            }
        }
        machine
    }

    #[test]
    fn limits_that_somebody_lowered_again_are_found_and_raised_again() {
        let (room, mut machine) = (NeighbourRoom::default(), machine());
        assert_eq!(NeighbourRoom::lacking_in(&machine), ["ipv4", "ipv6"]);
        room.make_in(&mut machine);
        assert!(NeighbourRoom::lacking_in(&machine).is_empty());
        machine.values.insert("net/ipv6/neigh/default/gc_thresh3".into(), 1024);
        assert_eq!(NeighbourRoom::lacking_in(&machine), ["ipv6"]);
        room.make_in(&mut machine);
        assert_eq!(read(&machine, "ipv6"), Some(ROOM));
        // A namespace that does not show them has none of its own.
        assert!(NeighbourRoom::lacking_in(&Machine::default()).is_empty());
    }

    #[test]
    fn limits_that_cannot_be_raised_are_told_once() {
        let (room, mut machine) = (NeighbourRoom::default(), Machine { fixed: true, ..machine() });
        room.make_in(&mut machine);
        assert!(room.refused.load(Ordering::Relaxed));
    }
}
