//! Policy rules: which packets look into which routing table.

use std::fmt;

use ipnet::IpNet;
pub use knit_types::Family;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::RouteProtocol;
use netlink_packet_route::rule::{RuleAction as Action, RuleAttribute, RuleMessage};

use crate::error::{Error, Result};
use crate::link::ip;
use crate::name::IfName;
use crate::netlink::Message;
use crate::owner;

pub(crate) const RTM_NEWRULE: u16 = 32;
pub(crate) const RTM_DELRULE: u16 = 33;
pub(crate) const RTM_GETRULE: u16 = 34;

const FRA_DST: u16 = 1;
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_PROTOCOL: u16 = 21;
const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_BLACKHOLE: u8 = 6;
const FR_ACT_UNREACHABLE: u8 = 7;
const FR_ACT_PROHIBIT: u8 = 8;

/// A policy rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// For which family.
    pub family: Family,
    /// Rules are tried from the lowest priority number on.
    pub priority: u32,
    /// Only packets from here.
    pub from: Option<IpNet>,
    /// Only packets to here.
    pub to: Option<IpNet>,
    /// Only packets that came in by this link.
    pub iif: Option<IfName>,
    /// Only packets with this mark, under this mask.
    pub fwmark: Option<(u32, u32)>,
    /// What happens to those.
    pub action: RuleAction,
    /// Who made it; [`owner::PROTOCOL`] is ours.
    pub protocol: u8,
}

/// What a rule does with a packet that it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RuleAction {
    /// Look into this routing table; if nothing is found there, go on.
    Table(u32),
    /// Drop it silently.
    Blackhole,
    /// Drop it and say that the destination is unreachable.
    Unreachable,
    /// Drop it and say that it is forbidden.
    Prohibit,
    /// Something else that was read.
    Other(u8),
}

impl Rule {
    /// A rule for all packets of a family, marked as ours.
    pub fn new(family: Family, priority: u32, action: RuleAction) -> Self {
        let protocol = owner::PROTOCOL;
        Self { family, priority, from: None, to: None, iif: None, fwmark: None, action, protocol }
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        let v6 = self.family == Family::V6;
        for prefix in [self.from, self.to].into_iter().flatten() {
            if prefix.addr().is_ipv6() != v6 {
                return Err(Error::invalid(
                    self,
                    format!("{prefix} has the other family"),
                    "create one rule per family",
                ));
            }
            if prefix.trunc() != prefix {
                let advice = format!("write {}", prefix.trunc());
                return Err(Error::invalid(self, format!("{prefix} has bits beyond its length"), advice));
            }
        }
        if let Some((mark, mask)) = self.fwmark
            && (mark & !mask != 0 || mask == 0)
        {
            let problem = format!("mark {mark:#x} can never match under mask {mask:#x}");
            return Err(Error::invalid(self, problem, "widen the mask"));
        }
        if self.action == RuleAction::Table(0) {
            return Err(Error::invalid(self, "0 is not a valid table", "name another table"));
        }
        Ok(())
    }

    pub(crate) fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        let header = &mut message.header;
        header.family = match self.family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        };
        header.dst_len = self.to.map_or(0, |to| to.prefix_len());
        header.src_len = self.from.map_or(0, |from| from.prefix_len());
        header.action = match self.action {
            RuleAction::Table(table) => {
                header.table = u8::try_from(table).unwrap_or(0);
                message.attributes.push(RuleAttribute::Table(table));
                Action::ToTable
            }
            RuleAction::Blackhole => Action::Blackhole,
            RuleAction::Unreachable => Action::Unreachable,
            RuleAction::Prohibit => Action::Prohibit,
            RuleAction::Other(number) => Action::Other(number),
        };
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Priority(self.priority));
        attributes.push(RuleAttribute::Protocol(RouteProtocol::from(self.protocol)));
        attributes.extend(self.from.map(|from| RuleAttribute::Source(from.addr())));
        attributes.extend(self.to.map(|to| RuleAttribute::Destination(to.addr())));
        attributes.extend(self.iif.as_ref().map(|iif| RuleAttribute::Iifname(iif.to_string())));
        if let Some((mark, mask)) = self.fwmark {
            attributes.push(RuleAttribute::FwMark(mark));
            attributes.push(RuleAttribute::FwMask(mask));
        }
        message
    }

    /// Reads a rule out of a message; `None` if it is something else or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWRULE && message.kind != RTM_DELRULE {
            return None;
        }
        let ([family, to_length, from_length, _, table, _, _, action, ..], attrs) =
            message.split::<12>().ok()?;
        let family = match i32::from(family) {
            libc::AF_INET => Family::V4,
            libc::AF_INET6 => Family::V6,
            _ => return None,
        };
        let mut rule = Self::new(family, 0, RuleAction::Other(action));
        rule.protocol = 0;
        let (mut table, mut mark, mut mask) = (u32::from(table), None, u32::MAX);
        for attr in attrs {
            match attr.kind {
                FRA_DST => rule.to = IpNet::new(ip(&attr)?, to_length).ok(),
                FRA_SRC => rule.from = IpNet::new(ip(&attr)?, from_length).ok(),
                FRA_IIFNAME => rule.iif = Some(IfName::reported(&attr.string())),
                FRA_PRIORITY => rule.priority = attr.u32().unwrap_or(0),
                FRA_FWMARK => mark = attr.u32().ok(),
                FRA_FWMASK => mask = attr.u32().unwrap_or(u32::MAX),
                FRA_TABLE => table = attr.u32().unwrap_or(table),
                FRA_PROTOCOL => rule.protocol = attr.u8().unwrap_or(0),
                _ => {}
            }
        }
        rule.fwmark = mark.map(|mark| (mark, mask));
        rule.action = match action {
            FR_ACT_TO_TBL => RuleAction::Table(table),
            FR_ACT_BLACKHOLE => RuleAction::Blackhole,
            FR_ACT_UNREACHABLE => RuleAction::Unreachable,
            FR_ACT_PROHIBIT => RuleAction::Prohibit,
            other => RuleAction::Other(other),
        };
        Some(rule)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} rule {}", self.family, self.priority)?;
        if let Some(from) = self.from {
            write!(f, " from {from}")?;
        }
        if let Some(to) = self.to {
            write!(f, " to {to}")?;
        }
        if let Some(iif) = &self.iif {
            write!(f, " iif {iif}")?;
        }
        if let Some((mark, mask)) = self.fwmark {
            write!(f, " fwmark {mark:#x}/{mask:#x}")?;
        }
        match self.action {
            RuleAction::Table(table) => write!(f, " lookup {table}"),
            action => write!(f, " {}", format!("{action:?}").to_lowercase()),
        }
    }
}
