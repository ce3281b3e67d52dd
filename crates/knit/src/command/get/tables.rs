//! The columns of each kind, in the manner of `kubectl get`. Those marked wide show with `-o wide` only.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_api::{AddressBlock, AddressCounts, Network, NetworkAttachment, NodeNetwork, conditions};
use knit_objects::Object;
use knit_output::{Cell, Table, Tone};

/// A column: its name, whether it is a wide one, and what it shows.
pub struct Column<K>(&'static str, bool, fn(&K) -> Cell);

/// A kind that can be shown as a table.
pub trait Columns: Sized {
    /// Its columns, between name and age.
    fn columns() -> Vec<Column<Self>>;
}

const WIDE: bool = true;
const ALWAYS: bool = false;

/// The table of some objects.
pub fn table<K: Columns + Object>(objects: &[K], wide: bool) -> Table {
    let columns: Vec<Column<K>> = K::columns().into_iter().filter(|c| wide || !c.1).collect();
    let namespaced = objects.iter().any(|o| o.meta().namespace.is_some());
    let mut header: Vec<&str> = if namespaced { vec!["NAMESPACE", "NAME"] } else { vec!["NAME"] };
    header.extend(columns.iter().map(|c| c.0));
    header.push("AGE");
    let mut table = Table::new(&header);
    let now = Timestamp::now();
    for object in objects {
        let meta = object.meta();
        let mut row: Vec<Cell> = Vec::with_capacity(header.len());
        if namespaced {
            row.push(meta.namespace.clone().unwrap_or_default().into());
        }
        row.push(meta.name.clone().unwrap_or_default().into());
        row.extend(columns.iter().map(|c| c.2(object)));
        let made = meta.creation_timestamp.as_ref();
        row.push(made.map(|made| age(now.as_second() - made.0.as_second())).unwrap_or_default().into());
        table.row(row);
    }
    table
}

impl Columns for Network {
    fn columns() -> Vec<Column<Self>> {
        vec![
            Column("TOPOLOGY", ALWAYS, |n| format!("{:?}", n.spec.topology).into()),
            Column("SUBNETS", ALWAYS, |n| joined(n.spec.subnets.iter().map(|s| s.cidr.clone()))),
            Column("CLASS", WIDE, |n| n.spec.class.clone().into()),
            Column("MTU", WIDE, |n| text(n.spec.mtu)),
            Column("ID", WIDE, |n| text(n.status.as_ref().and_then(|s| s.id))),
            Column("PRIMARY-IN", ALWAYS, |n| text(n.status.as_ref().and_then(|s| s.primary_namespaces))),
            Column("USED", ALWAYS, |n| counts(n.status.as_ref().map(|s| s.addresses.as_slice()), |c| c.used)),
            Column("FREE", ALWAYS, |n| counts(n.status.as_ref().map(|s| s.addresses.as_slice()), |c| c.free)),
            Column("READY", ALWAYS, |n| {
                ready(n.status.as_ref().map(|s| s.conditions.as_slice()), conditions::network::READY)
            }),
            Column("REASON", WIDE, |n| {
                reason(n.status.as_ref().map(|s| s.conditions.as_slice()), conditions::network::READY)
            }),
        ]
    }
}

impl Columns for NetworkAttachment {
    fn columns() -> Vec<Column<Self>> {
        let ready_type = conditions::network_attachment::READY;
        debug_assert_eq!(ready_type, "Ready");
        vec![
            Column("POD", ALWAYS, |a| a.spec.pod.clone().into()),
            Column("NETWORK", ALWAYS, |a| a.spec.network.clone().into()),
            Column("INTERFACE", ALWAYS, |a| {
                let status = a.status.as_ref().and_then(|s| s.interface.clone());
                text(status.or_else(|| a.spec.interface.clone()))
            }),
            Column("ADDRESSES", ALWAYS, |a| {
                joined(a.status.iter().flat_map(|s| &s.addresses).map(|a| a.address.clone()))
            }),
            Column("MAC", WIDE, |a| text(a.status.as_ref().and_then(|s| s.mac.clone()))),
            Column("MTU", WIDE, |a| text(a.status.as_ref().and_then(|s| s.mtu))),
            Column("HOST-INTERFACE", WIDE, |a| {
                text(a.status.as_ref().and_then(|s| s.host_interface.as_ref()).map(|h| h.name.clone()))
            }),
            Column("SANDBOX", WIDE, |a| text(a.status.as_ref().and_then(|s| s.sandbox_id.clone()))),
            Column("NODE", ALWAYS, |a| text(a.status.as_ref().and_then(|s| s.node.clone()))),
            Column("READY", ALWAYS, |a| {
                let conditions = a.status.as_ref().map(|s| s.conditions.as_slice());
                ready(conditions, conditions::network_attachment::READY)
            }),
            Column("REASON", WIDE, |a| {
                let conditions = a.status.as_ref().map(|s| s.conditions.as_slice());
                reason(conditions, conditions::network_attachment::READY)
            }),
        ]
    }
}

impl Columns for AddressBlock {
    fn columns() -> Vec<Column<Self>> {
        vec![
            Column("NETWORK", ALWAYS, |b| b.spec.network.clone().into()),
            Column("NODE", ALWAYS, |b| b.spec.node.clone().into()),
            Column("IPV4", ALWAYS, |b| text(b.spec.ipv4.clone())),
            Column("IPV6", ALWAYS, |b| text(b.spec.ipv6.clone())),
        ]
    }
}

impl Columns for NodeNetwork {
    fn columns() -> Vec<Column<Self>> {
        vec![
            Column("AGENT", ALWAYS, |n| text(n.status.as_ref().and_then(|s| s.agent_version.clone()))),
            Column("RUNTIMES", ALWAYS, |n| {
                let runtimes = n.status.iter().flat_map(|s| &s.runtimes);
                let sick = runtimes.clone().any(|r| !r.healthy);
                let names: Vec<String> = runtimes
                    .map(|r| if r.healthy { r.name.clone() } else { format!("{} (not healthy)", r.name) })
                    .collect();
                Cell::new(names.join(","), if sick { Tone::Bad } else { Tone::Plain })
            }),
            Column("NETWORKS", ALWAYS, |n| text(n.status.as_ref().map(|s| s.network_count))),
            Column("NOT-READY", ALWAYS, |n| {
                let count = n.status.as_ref().map(|s| s.not_ready_count);
                Cell::new(
                    count.map(|c| c.to_string()).unwrap_or_default(),
                    if count.unwrap_or(0) > 0 { Tone::Bad } else { Tone::Plain },
                )
            }),
            Column("ATTACHMENTS", ALWAYS, |n| {
                text(n.status.as_ref().map(|s| s.networks.iter().map(|n| n.attachments).sum::<i32>()))
            }),
            Column("PROBLEMS", WIDE, |n| {
                let sick = n.status.iter().flat_map(|s| &s.networks).filter(|n| !n.ready);
                let words = sick.map(|n| format!("{}: {}", n.name, n.reason)).collect::<Vec<_>>().join(", ");
                Cell::new(&words, if words.is_empty() { Tone::Plain } else { Tone::Bad })
            }),
        ]
    }
}

fn text(value: Option<impl ToString>) -> Cell {
    value.map(|v| v.to_string()).unwrap_or_default().into()
}

fn joined(values: impl Iterator<Item = String>) -> Cell {
    values.collect::<Vec<_>>().join(",").into()
}

fn counts(addresses: Option<&[AddressCounts]>, count: fn(&AddressCounts) -> i64) -> Cell {
    // Families are counted apart, and the smaller one is what runs out first; both show.
    joined(addresses.unwrap_or_default().iter().map(|c| count(c).to_string()))
}

fn find<'a>(conditions: Option<&'a [Condition]>, kind: &str) -> Option<&'a Condition> {
    conditions?.iter().find(|c| c.type_ == kind)
}

fn ready(conditions: Option<&[Condition]>, kind: &str) -> Cell {
    match find(conditions, kind).map(|c| c.status.as_str()) {
        Some("True") => Cell::new("True", Tone::Good),
        Some(other) => Cell::new(other, Tone::Bad),
        None => "".into(),
    }
}

fn reason(conditions: Option<&[Condition]>, kind: &str) -> Cell {
    text(find(conditions, kind).map(|c| c.reason.clone()))
}

/// How long ago, in the two largest units at most, as kubectl says it.
pub fn age(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 if seconds % 60 > 0 => format!("{minutes}m{}s", seconds % 60),
        120..10800 => format!("{minutes}m"),
        10800..28800 if minutes % 60 > 0 => format!("{hours}h{}m", minutes % 60),
        10800..172_800 => format!("{hours}h"),
        172_800..691_200 if hours % 24 > 0 => format!("{days}d{}h", hours % 24),
        _ => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        for (seconds, expected) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (150, "2m30s"),
            (660, "11m"),
            (11000, "3h3m"),
            (700_000, "8d"),
        ] {
            assert_eq!(age(seconds), expected);
        }
    }
}
