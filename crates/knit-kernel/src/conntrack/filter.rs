//! Which flows a listing is about.

use std::fmt;
use std::net::IpAddr;

use super::{Flow, Status, Tuple};

/// Which flows; an empty filter is all flows of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub(super) family: Option<u8>,
    pub(super) original: TupleFilter,
    pub(super) reply: TupleFilter,
    pub(super) mark: Option<(u32, u32)>,
    pub(super) status: Option<(u32, u32)>,
    pub(super) zone: Option<u16>,
}

/// What one direction of a flow must look like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TupleFilter {
    pub(super) src: Option<IpAddr>,
    pub(super) dst: Option<IpAddr>,
    pub(super) protocol: Option<u8>,
    pub(super) src_port: Option<u16>,
    pub(super) dst_port: Option<u16>,
}

impl Filter {
    /// All flows.
    pub fn all() -> Self {
        Self::default()
    }

    /// IPv4 flows.
    pub fn v4() -> Self {
        Self { family: Some(libc::AF_INET as u8), ..Self::default() }
    }

    /// IPv6 flows.
    pub fn v6() -> Self {
        Self { family: Some(libc::AF_INET6 as u8), ..Self::default() }
    }

    /// Flows of an address's family.
    pub fn family_of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::v4() } else { Self::v6() }
    }

    /// Whose original direction looks like this.
    pub fn original(mut self, tuple: TupleFilter) -> Self {
        self.original = tuple;
        self
    }

    /// Whose answers look like this.
    pub fn reply(mut self, tuple: TupleFilter) -> Self {
        self.reply = tuple;
        self
    }

    /// Whose mark has `value` in the bits of `mask`.
    pub fn mark(mut self, value: u32, mask: u32) -> Self {
        self.mark = Some((value, mask));
        self
    }

    /// Whose status has all of these bits.
    pub fn status(mut self, bits: Status) -> Self {
        self.status = Some((bits.0, bits.0));
        self
    }

    /// In this zone.
    pub fn zone(mut self, zone: u16) -> Self {
        self.zone = Some(zone);
        self
    }

    /// Whether a flow matches.
    pub fn matches(&self, flow: &Flow) -> bool {
        let family = if flow.original.src.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        self.family.is_none_or(|wanted| i32::from(wanted) == family)
            && self.original.matches(&flow.original)
            && self.reply.matches(&flow.reply)
            && self.mark.is_none_or(|(value, mask)| flow.mark & mask == value & mask)
            && self.status.is_none_or(|(value, mask)| flow.status.0 & mask == value & mask)
            && self.zone.is_none_or(|zone| flow.zone == zone)
    }

    /// What is wrong with it.
    pub(super) fn fault(&self) -> Option<&'static str> {
        let tuples = [&self.original, &self.reply];
        if self.family.is_none() && tuples.iter().any(|tuple| !tuple.is_empty()) {
            return Some("addresses and ports need a family: begin with Filter::v4 or Filter::v6");
        }
        let v6 = self.family == Some(libc::AF_INET6 as u8);
        let other_family = |tuple: &&TupleFilter| {
            [tuple.src, tuple.dst].into_iter().flatten().any(|address| address.is_ipv6() != v6)
        };
        if tuples.iter().any(other_family) {
            return Some("an address is of the other family");
        }
        let portless = |tuple: &&TupleFilter| {
            (tuple.src_port.is_some() || tuple.dst_port.is_some()) && tuple.protocol.is_none()
        };
        tuples.iter().any(portless).then_some("a port needs a protocol")
    }
}

impl TupleFilter {
    /// Any tuple.
    pub fn new() -> Self {
        Self::default()
    }

    /// From this address.
    pub fn src(mut self, address: IpAddr) -> Self {
        self.src = Some(address);
        self
    }

    /// To this address.
    pub fn dst(mut self, address: IpAddr) -> Self {
        self.dst = Some(address);
        self
    }

    /// Of this transport protocol.
    pub fn protocol(mut self, protocol: u8) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// From this port.
    pub fn src_port(mut self, port: u16) -> Self {
        self.src_port = Some(port);
        self
    }

    /// To this port.
    pub fn dst_port(mut self, port: u16) -> Self {
        self.dst_port = Some(port);
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn matches(&self, tuple: &Tuple) -> bool {
        let ports = tuple.l4.ports();
        self.src.is_none_or(|src| src == tuple.src)
            && self.dst.is_none_or(|dst| dst == tuple.dst)
            && self.protocol.is_none_or(|protocol| protocol == tuple.l4.protocol())
            && self.src_port.is_none_or(|port| ports.is_some_and(|(src, _)| src == port))
            && self.dst_port.is_none_or(|port| ports.is_some_and(|(_, dst)| dst == port))
    }
}

impl fmt::Display for TupleFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sep = "";
        let mut item = |f: &mut fmt::Formatter<'_>, name: &str, value: Option<&dyn fmt::Display>| match value
        {
            Some(value) => write!(f, "{}{name} {value}", std::mem::replace(&mut sep, " ")),
            None => Ok(()),
        };
        item(f, "src", self.src.as_ref().map(|v| v as _))?;
        item(f, "dst", self.dst.as_ref().map(|v| v as _))?;
        item(f, "protocol", self.protocol.as_ref().map(|v| v as _))?;
        item(f, "sport", self.src_port.as_ref().map(|v| v as _))?;
        item(f, "dport", self.dst_port.as_ref().map(|v| v as _))
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.family {
            None => "any family",
            Some(family) if i32::from(family) == libc::AF_INET => "IPv4",
            Some(_) => "IPv6",
        })?;
        if !self.original.is_empty() {
            write!(f, ", original {}", self.original)?;
        }
        if !self.reply.is_empty() {
            write!(f, ", reply {}", self.reply)?;
        }
        if let Some((value, mask)) = self.mark {
            write!(f, ", mark 0x{value:x}/0x{mask:x}")?;
        }
        if let Some((value, _)) = self.status {
            write!(f, ", status 0x{value:x}")?;
        }
        self.zone.map_or(Ok(()), |zone| write!(f, ", zone {zone}"))
    }
}
