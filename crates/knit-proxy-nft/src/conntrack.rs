//! Deletes the UDP flows that a plan says are stale, with the kernel's own filters (rules 51, 52).

use std::net::SocketAddr;
use std::time::Instant;

use knit_kernel::conntrack::{Conntrack, Filter, Flow, L4, Result, TupleFilter};
use knit_proxy::backends::Cleaned;
use knit_proxy::conntrack::{Cleanup, DumpFilter, Flow as UdpFlow};
use knit_proxy::model::{Family, PerFamily, Protocol};

/// Each filter is a walk through the kernel's whole table: beyond a few, one walk that sees all is cheaper.
const MAX_FILTERS: usize = 4;

/// Deletes what is stale, and notes how many flows that was in each family that was looked at.
pub(crate) fn delete_stale(
    conntrack: &mut Conntrack,
    cleanup: &Cleanup,
    known: PerFamily<bool>,
    done: &mut Vec<Cleaned>,
) -> Result<()> {
    if cleanup.is_empty() {
        return Ok(());
    }
    let filters = cleanup.filters(MAX_FILTERS);
    for family in Family::ALL.into_iter().filter(|family| *known.get(*family)) {
        let filters: Vec<&DumpFilter> = filters.iter().filter(|filter| filter.family == family).collect();
        if filters.is_empty() {
            continue;
        }
        let start = Instant::now();
        let mut deleted = 0;
        let mut looked = Ok(());
        for filter in filters {
            looked = delete_matching(conntrack, cleanup, filter).map(|count| deleted += count);
            if looked.is_err() {
                break;
            }
        }
        done.push(Cleaned { family, deleted, took: start.elapsed(), complete: looked.is_ok() });
        looked?;
    }
    Ok(())
}

fn delete_matching(conntrack: &mut Conntrack, cleanup: &Cleanup, filter: &DumpFilter) -> Result<usize> {
    let mut flows = conntrack.list(&kernel_filter(filter))?;
    flows.retain(|flow| udp(flow).is_some_and(|flow| cleanup.is_stale(&flow)));
    if flows.is_empty() { Ok(0) } else { conntrack.delete(&flows) }
}

fn kernel_filter(filter: &DumpFilter) -> Filter {
    let mut original = TupleFilter::new().protocol(Protocol::Udp.number());
    if let Some(address) = filter.address {
        original = original.dst(address);
    }
    if let Some(port) = filter.port {
        original = original.dst_port(port);
    }
    match filter.family {
        Family::V4 => Filter::v4(),
        Family::V6 => Filter::v6(),
    }
    .original(original)
}

fn udp(flow: &Flow) -> Option<UdpFlow> {
    match (flow.original.l4, flow.reply.l4) {
        (L4::Ports { dst, .. }, L4::Ports { src, .. }) => Some(UdpFlow {
            original_destination: SocketAddr::new(flow.original.dst, dst),
            reply_source: SocketAddr::new(flow.reply.src, src),
        }),
        _ => None,
    }
}
