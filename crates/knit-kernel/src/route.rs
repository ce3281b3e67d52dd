//! Routes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType, RouteVia,
};

use crate::addr::family;
use crate::error::{Difference, Error, Result};
use crate::link::ip;
use crate::netlink::Message;
use crate::netlink::attr::Attr;
use crate::owner;

pub(crate) const RTM_NEWROUTE: u16 = 24;
pub(crate) const RTM_DELROUTE: u16 = 25;
pub(crate) const RTM_GETROUTE: u16 = 26;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
pub(crate) const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
const RTNH_F_ONLINK: u32 = 4;
/// What the kernel takes for an IPv6 metric that was not given.
const DEFAULT_METRIC_V6: u32 = 1024;

/// A route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Where to; `0.0.0.0/0` and `::/0` are the default routes.
    pub destination: IpNet,
    /// What happens to packets.
    pub action: RouteAction,
    /// The next hop. An IPv6 one may serve an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// The link that packets leave by.
    pub interface: Option<u32>,
    /// The gateway is taken to be on the link, even if no address says so.
    pub onlink: bool,
    /// The source address for packets of our own.
    pub source: Option<IpAddr>,
    /// The table.
    pub table: u32,
    /// The metric; `None` is the kernel's (0 for IPv4, 1024 for IPv6).
    pub metric: Option<u32>,
    /// Who made it; [`owner::PROTOCOL`] is ours.
    pub protocol: u8,
}

/// What a route does with packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouteAction {
    /// Forward them.
    Unicast,
    /// Take them in.
    Local,
    /// Drop them silently.
    Blackhole,
    /// Drop them and say that the destination is unreachable.
    Unreachable,
    /// Drop them and say that it is forbidden.
    Prohibit,
    /// Go on with the next rule.
    Throw,
    /// Something else that was read.
    Other(u8),
}

impl Route {
    /// The main table.
    pub const MAIN: u32 = 254;
    /// The kernel's own table of local addresses.
    pub const LOCAL: u32 = 255;

    /// A route to `destination` in the main table, marked as ours; where it leads is still to be said.
    pub fn to(destination: IpNet) -> Self {
        Self {
            destination,
            action: RouteAction::Unicast,
            gateway: None,
            interface: None,
            onlink: false,
            source: None,
            table: Self::MAIN,
            metric: None,
            protocol: owner::PROTOCOL,
        }
    }

    /// The IPv4 default route.
    pub fn default_v4() -> Self {
        Self::to(Ipv4Net::default().into())
    }

    /// The IPv6 default route.
    pub fn default_v6() -> Self {
        Self::to(Ipv6Net::default().into())
    }

    /// Directly out of this link.
    pub fn dev(self, interface: u32) -> Self {
        Self { interface: Some(interface), ..self }
    }

    /// By this gateway.
    pub fn via(self, gateway: IpAddr) -> Self {
        Self { gateway: Some(gateway), ..self }
    }

    /// Take the gateway to be on the link.
    pub fn onlink(self) -> Self {
        Self { onlink: true, ..self }
    }

    /// In this table.
    pub fn table(self, table: u32) -> Self {
        Self { table, ..self }
    }

    /// With this metric.
    pub fn metric(self, metric: u32) -> Self {
        Self { metric: Some(metric), ..self }
    }

    /// Do this with packets.
    pub fn action(self, action: RouteAction) -> Self {
        Self { action, ..self }
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        let v6 = self.destination.addr().is_ipv6();
        let forwards = self.action == RouteAction::Unicast;
        if self.destination.trunc() != self.destination {
            let advice = format!("write {}", self.destination.trunc());
            return Err(Error::invalid(self, "bits are set beyond the prefix length", advice));
        }
        if forwards && self.gateway.is_none() && self.interface.is_none() {
            return Err(Error::invalid(
                self,
                "it leads nowhere",
                "give a gateway, a link, or an action that drops",
            ));
        }
        if v6 && self.gateway.is_some_and(|gateway| gateway.is_ipv4()) {
            return Err(Error::invalid(self, "an IPv4 gateway for IPv6", "use an IPv6 gateway"));
        }
        if self.source.is_some_and(|source| source.is_ipv6() != v6) {
            return Err(Error::invalid(
                self,
                "the source has the other family",
                "use one of the destination's",
            ));
        }
        if self.onlink && (self.gateway.is_none() || self.interface.is_none()) {
            return Err(Error::invalid(
                self,
                "onlink needs a gateway and a link",
                "give both, or leave onlink out",
            ));
        }
        Ok(())
    }

    pub(crate) fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let header = &mut message.header;
        header.address_family = family(self.destination.addr());
        header.destination_prefix_length = self.destination.prefix_len();
        header.table = u8::try_from(self.table).unwrap_or(0);
        header.protocol = RouteProtocol::from(self.protocol);
        header.kind = self.action.kind();
        header.scope = match (self.action, self.gateway, self.destination) {
            (RouteAction::Local, _, _) => RouteScope::Host,
            (RouteAction::Unicast, None, IpNet::V4(_)) => RouteScope::Link,
            _ => RouteScope::Universe,
        };
        if self.onlink {
            header.flags = RouteFlags::Onlink;
        }
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Table(self.table));
        if self.destination.prefix_len() != 0 {
            attributes.push(RouteAttribute::Destination(RouteAddress::from(self.destination.addr())));
        }
        attributes.extend(self.gateway.map(|gateway| match (self.destination, gateway) {
            (IpNet::V4(_), IpAddr::V6(gateway)) => RouteAttribute::Via(RouteVia::Inet6(gateway)),
            _ => RouteAttribute::Gateway(RouteAddress::from(gateway)),
        }));
        attributes.extend(self.interface.map(RouteAttribute::Oif));
        attributes.extend(self.source.map(|source| RouteAttribute::PrefSource(RouteAddress::from(source))));
        attributes.extend(self.metric.map(RouteAttribute::Priority));
        message
    }

    /// Reads a route out of a message; `None` if it is something else or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWROUTE && message.kind != RTM_DELROUTE {
            return None;
        }
        let ([family, prefix, _, _, table, protocol, _, kind, a, b, c, d], attrs) =
            message.split::<12>().ok()?;
        let unspecified: IpAddr = match i32::from(family) {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
            _ => return None,
        };
        let mut route = Self::to(IpNet::new(unspecified, prefix).ok()?);
        route.action = RouteAction::from_number(kind);
        route.onlink = u32::from_ne_bytes([a, b, c, d]) & RTNH_F_ONLINK != 0;
        (route.table, route.protocol) = (u32::from(table), protocol);
        for attr in attrs {
            match attr.kind {
                RTA_DST => route.destination = IpNet::new(ip(&attr)?, prefix).ok()?,
                RTA_OIF => route.interface = attr.u32().ok(),
                RTA_GATEWAY => route.gateway = ip(&attr),
                RTA_VIA => route.gateway = via(&attr),
                RTA_PRIORITY => route.metric = attr.u32().ok(),
                RTA_PREFSRC => route.source = ip(&attr),
                RTA_TABLE => route.table = attr.u32().unwrap_or(route.table),
                _ => {}
            }
        }
        Some(route)
    }

    /// The metric that the kernel has for it.
    fn effective_metric(&self) -> u32 {
        let default = if self.destination.addr().is_ipv6() { DEFAULT_METRIC_V6 } else { 0 };
        self.metric.filter(|metric| *metric != 0).unwrap_or(default)
    }

    pub(crate) fn same_key(&self, other: &Self) -> bool {
        (self.destination, self.table, self.effective_metric())
            == (other.destination, other.table, other.effective_metric())
    }

    pub(crate) fn differences(&self, found: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        let into = &mut differences;
        Difference::check(into, "action", &self.action, &found.action);
        Difference::check(into, "gateway", &self.gateway, &found.gateway);
        if self.interface.is_some() {
            Difference::check(into, "interface", &self.interface, &found.interface);
        }
        if self.source.is_some() {
            Difference::check(into, "source", &self.source, &found.source);
        }
        Difference::check(into, "protocol", &self.protocol, &found.protocol);
        differences
    }
}

impl RouteAction {
    fn kind(self) -> RouteType {
        match self {
            Self::Unicast => RouteType::Unicast,
            Self::Local => RouteType::Local,
            Self::Blackhole => RouteType::BlackHole,
            Self::Unreachable => RouteType::Unreachable,
            Self::Prohibit => RouteType::Prohibit,
            Self::Throw => RouteType::Throw,
            Self::Other(number) => RouteType::from(number),
        }
    }

    fn from_number(number: u8) -> Self {
        match RouteType::from(number) {
            RouteType::Unicast => Self::Unicast,
            RouteType::Local => Self::Local,
            RouteType::BlackHole => Self::Blackhole,
            RouteType::Unreachable => Self::Unreachable,
            RouteType::Prohibit => Self::Prohibit,
            RouteType::Throw => Self::Throw,
            _ => Self::Other(number),
        }
    }
}

/// A gateway of the other family: two bytes of family, then the address.
fn via(attr: &Attr<'_>) -> Option<IpAddr> {
    ip(&Attr { kind: attr.kind, value: attr.value.get(2..)? })
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.action {
            RouteAction::Unicast => write!(f, "route to {}", self.destination)?,
            action => write!(f, "{} route to {}", format!("{action:?}").to_lowercase(), self.destination)?,
        }
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(interface) = self.interface {
            write!(f, " on link {interface}")?;
        }
        if self.table != Self::MAIN {
            write!(f, " in table {}", self.table)?;
        }
        Ok(())
    }
}
