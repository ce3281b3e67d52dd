//! Flows and filters to ctnetlink attributes and back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::{Filter, Flow, L4, Status, Tuple, TupleFilter};
use crate::netlink::attr::{Reader, Writer};

/// `NFNL_SUBSYS_CTNETLINK` in the upper byte, `IPCTNL_MSG_CT_*` in the lower.
pub(super) const NEW: u16 = 1 << 8;
pub(super) const GET: u16 = 1 << 8 | 1;
pub(super) const DELETE: u16 = 1 << 8 | 2;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_TIMEOUT: u16 = 7;
const CTA_MARK: u16 = 8;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_MARK_MASK: u16 = 21;
const CTA_FILTER: u16 = 25;
const CTA_STATUS_MASK: u16 = 26;

const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;

const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;

const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_PROTO_ICMP_ID: u16 = 4;
const CTA_PROTO_ICMP_TYPE: u16 = 5;
const CTA_PROTO_ICMP_CODE: u16 = 6;
const CTA_PROTO_ICMPV6_ID: u16 = 7;
const CTA_PROTO_ICMPV6_TYPE: u16 = 8;
const CTA_PROTO_ICMPV6_CODE: u16 = 9;

const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;

const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;

/// Which parts of a tuple a filter compares (`CTA_FILTER_F_*`).
mod part {
    pub const IP_SRC: u32 = 1 << 0;
    pub const IP_DST: u32 = 1 << 1;
    pub const PROTO_NUM: u32 = 1 << 3;
    pub const PROTO_SRC_PORT: u32 = 1 << 4;
    pub const PROTO_DST_PORT: u32 = 1 << 5;
}

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

fn family(tuple: &Tuple) -> u8 {
    if tuple.src.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 }
}

/// A request to list what the filter says.
pub(super) fn put_filter(w: &mut Writer<'_>, filter: &Filter) {
    w.fixed(&[filter.family.unwrap_or(libc::AF_UNSPEC as u8), 0, 0, 0]);
    let (original, reply) = (for_kernel(&filter.original), for_kernel(&filter.reply));
    if !original.is_empty() || !reply.is_empty() {
        w.nested(CTA_FILTER, |w| {
            w.u32(CTA_FILTER_ORIG_FLAGS, parts(&original));
            w.u32(CTA_FILTER_REPLY_FLAGS, parts(&reply));
        });
        put_tuple_filter(w, CTA_TUPLE_ORIG, &original);
        put_tuple_filter(w, CTA_TUPLE_REPLY, &reply);
    }
    if let Some((value, mask)) = filter.mark {
        w.u32_be(CTA_MARK, value).u32_be(CTA_MARK_MASK, mask);
    }
    if let Some((value, mask)) = filter.status {
        w.u32_be(CTA_STATUS, value).u32_be(CTA_STATUS_MASK, mask);
    }
    if let Some(zone) = filter.zone {
        w.u16_be(CTA_ZONE, zone);
    }
}

/// What the kernel can be trusted with. Kernel 6.18 compares IPv6 addresses the wrong way round and leaves
/// out exactly the flows that match, so those are compared here, after listing.
fn for_kernel(tuple: &TupleFilter) -> TupleFilter {
    let v4 = |address: Option<IpAddr>| address.filter(IpAddr::is_ipv4);
    TupleFilter { src: v4(tuple.src), dst: v4(tuple.dst), ..tuple.clone() }
}

fn parts(tuple: &TupleFilter) -> u32 {
    let part = |is: bool, flag: u32| if is { flag } else { 0 };
    part(tuple.src.is_some(), part::IP_SRC)
        | part(tuple.dst.is_some(), part::IP_DST)
        | part(tuple.protocol.is_some(), part::PROTO_NUM)
        | part(tuple.src_port.is_some(), part::PROTO_SRC_PORT)
        | part(tuple.dst_port.is_some(), part::PROTO_DST_PORT)
}

fn put_tuple_filter(w: &mut Writer<'_>, attribute: u16, tuple: &TupleFilter) {
    if tuple.is_empty() {
        return;
    }
    w.nested(attribute, |w| {
        if tuple.src.is_some() || tuple.dst.is_some() {
            w.nested(CTA_TUPLE_IP, |w| {
                for (address, attributes) in
                    [(tuple.src, (CTA_IP_V4_SRC, CTA_IP_V6_SRC)), (tuple.dst, (CTA_IP_V4_DST, CTA_IP_V6_DST))]
                {
                    if let Some(address) = address {
                        put_address(w, attributes, address);
                    }
                }
            });
        }
        if let Some(protocol) = tuple.protocol {
            w.nested(CTA_TUPLE_PROTO, |w| {
                w.u8(CTA_PROTO_NUM, protocol);
                if let Some(port) = tuple.src_port {
                    w.u16_be(CTA_PROTO_SRC_PORT, port);
                }
                if let Some(port) = tuple.dst_port {
                    w.u16_be(CTA_PROTO_DST_PORT, port);
                }
            });
        }
    });
}

fn put_address(w: &mut Writer<'_>, (v4, v6): (u16, u16), address: IpAddr) {
    match address {
        IpAddr::V4(address) => w.bytes(v4, &address.octets()),
        IpAddr::V6(address) => w.bytes(v6, &address.octets()),
    };
}

fn put_tuple(w: &mut Writer<'_>, attribute: u16, tuple: &Tuple) {
    w.nested(attribute, |w| {
        w.nested(CTA_TUPLE_IP, |w| {
            put_address(w, (CTA_IP_V4_SRC, CTA_IP_V6_SRC), tuple.src);
            put_address(w, (CTA_IP_V4_DST, CTA_IP_V6_DST), tuple.dst);
        });
        w.nested(CTA_TUPLE_PROTO, |w| {
            w.u8(CTA_PROTO_NUM, tuple.l4.protocol());
            match tuple.l4 {
                L4::Ports { src, dst, .. } => {
                    w.u16_be(CTA_PROTO_SRC_PORT, src).u16_be(CTA_PROTO_DST_PORT, dst);
                }
                L4::Icmp { protocol: ICMPV6, id, kind, code } => {
                    w.u16_be(CTA_PROTO_ICMPV6_ID, id);
                    w.u8(CTA_PROTO_ICMPV6_TYPE, kind).u8(CTA_PROTO_ICMPV6_CODE, code);
                }
                L4::Icmp { id, kind, code, .. } => {
                    w.u16_be(CTA_PROTO_ICMP_ID, id);
                    w.u8(CTA_PROTO_ICMP_TYPE, kind).u8(CTA_PROTO_ICMP_CODE, code);
                }
                L4::Other { .. } => {}
            }
        });
    });
}

/// A request to delete exactly this flow. The tuple is always there: without one the kernel would delete all
/// flows.
pub(super) fn put_delete(w: &mut Writer<'_>, flow: &Flow) {
    w.fixed(&[family(&flow.original), 0, 0, 0]);
    put_tuple(w, CTA_TUPLE_ORIG, &flow.original);
    if flow.zone != 0 {
        w.u16_be(CTA_ZONE, flow.zone);
    }
    if let Some(id) = flow.id {
        w.u32_be(CTA_ID, id);
    }
}

/// A request to set the bits of `mask` in the mark of exactly this flow. Without the flag to create, nothing
/// is made where there is none.
pub(super) fn put_mark(w: &mut Writer<'_>, flow: &Flow, value: u32, mask: u32) {
    w.fixed(&[family(&flow.original), 0, 0, 0]);
    put_tuple(w, CTA_TUPLE_ORIG, &flow.original);
    if flow.zone != 0 {
        w.u16_be(CTA_ZONE, flow.zone);
    }
    w.u32_be(CTA_MARK, value & mask).u32_be(CTA_MARK_MASK, mask);
}

/// A request to make this flow.
pub(super) fn put_flow(w: &mut Writer<'_>, flow: &Flow) {
    w.fixed(&[family(&flow.original), 0, 0, 0]);
    put_tuple(w, CTA_TUPLE_ORIG, &flow.original);
    put_tuple(w, CTA_TUPLE_REPLY, &flow.reply);
    w.u32_be(CTA_STATUS, flow.status.0);
    w.u32_be(
        CTA_TIMEOUT,
        flow.timeout.map_or(0, |timeout| u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX)),
    );
    w.u32_be(CTA_MARK, flow.mark);
    if flow.zone != 0 {
        w.u16_be(CTA_ZONE, flow.zone);
    }
    if let Some(state) = flow.tcp_state {
        w.nested(CTA_PROTOINFO, |w| {
            w.nested(CTA_PROTOINFO_TCP, |w| {
                w.u8(CTA_PROTOINFO_TCP_STATE, state);
            });
        });
    }
}

/// The flow in a message; none if it makes no sense.
pub(super) fn flow(attrs: &Reader<'_>) -> Option<Flow> {
    let number = |attribute: u16| attrs.get(attribute).and_then(|attr| attr.u32_be().ok());
    let tcp = attrs.get(CTA_PROTOINFO).and_then(|info| info.nested().get(CTA_PROTOINFO_TCP));
    Some(Flow {
        original: tuple(&attrs.get(CTA_TUPLE_ORIG)?.nested())?,
        reply: tuple(&attrs.get(CTA_TUPLE_REPLY)?.nested())?,
        status: Status(number(CTA_STATUS).unwrap_or(0)),
        mark: number(CTA_MARK).unwrap_or(0),
        zone: attrs.get(CTA_ZONE).and_then(|attr| attr.u16_be().ok()).unwrap_or(0),
        timeout: number(CTA_TIMEOUT).map(|seconds| Duration::from_secs(u64::from(seconds))),
        id: number(CTA_ID),
        tcp_state: tcp.and_then(|tcp| tcp.nested().get(CTA_PROTOINFO_TCP_STATE)?.u8().ok()),
    })
}

fn tuple(attrs: &Reader<'_>) -> Option<Tuple> {
    let ip = attrs.get(CTA_TUPLE_IP)?.nested();
    let address = |v4: u16, v6: u16| -> Option<IpAddr> {
        match ip.get(v4) {
            Some(attr) => attr.array::<4>().ok().map(|octets| Ipv4Addr::from(octets).into()),
            None => ip.get(v6)?.array::<16>().ok().map(|octets| Ipv6Addr::from(octets).into()),
        }
    };
    let (src, dst) = (address(CTA_IP_V4_SRC, CTA_IP_V6_SRC)?, address(CTA_IP_V4_DST, CTA_IP_V6_DST)?);
    let proto = attrs.get(CTA_TUPLE_PROTO)?.nested();
    let protocol = proto.get(CTA_PROTO_NUM)?.u8().ok()?;
    let word = |attribute: u16| proto.get(attribute).and_then(|attr| attr.u16_be().ok());
    let byte = |attribute: u16| proto.get(attribute).and_then(|attr| attr.u8().ok());
    let l4 = match protocol {
        ICMP => L4::Icmp {
            protocol,
            id: word(CTA_PROTO_ICMP_ID)?,
            kind: byte(CTA_PROTO_ICMP_TYPE)?,
            code: byte(CTA_PROTO_ICMP_CODE)?,
        },
        ICMPV6 => L4::Icmp {
            protocol,
            id: word(CTA_PROTO_ICMPV6_ID)?,
            kind: byte(CTA_PROTO_ICMPV6_TYPE)?,
            code: byte(CTA_PROTO_ICMPV6_CODE)?,
        },
        _ => match (word(CTA_PROTO_SRC_PORT), word(CTA_PROTO_DST_PORT)) {
            (Some(src), Some(dst)) => L4::Ports { protocol, src, dst },
            _ => L4::Other { protocol },
        },
    };
    (src.is_ipv4() == dst.is_ipv4()).then_some(Tuple { src, dst, l4 })
}
