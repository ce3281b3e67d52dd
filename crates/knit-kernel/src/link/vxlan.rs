//! VXLAN devices.
//!
//! One is made in the node's namespace and then moved into a router: its outer packets go on using the node's
//! addresses and routes, while the inner ones are seen only in the router.

use std::net::IpAddr;

use netlink_packet_route::link::{InfoData, InfoVxlan};

use super::ip;
use crate::error::{Difference, Error, Result};
use crate::netlink::attr::Reader;

const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_LINK: u16 = 3;
const IFLA_VXLAN_LOCAL: u16 = 4;
const IFLA_VXLAN_TTL: u16 = 5;
const IFLA_VXLAN_LEARNING: u16 = 7;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_LOCAL6: u16 = 17;

/// A VXLAN device's own options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vxlan {
    /// The network identifier (VNI), 24 bits.
    pub id: u32,
    /// The UDP port that it listens on and sends to.
    pub port: u16,
    /// The source address of outer packets, and their family; `None` lets the routes decide, for IPv4.
    pub local: Option<IpAddr>,
    /// The link that outer packets leave by; `None` lets the routes decide.
    pub underlay: Option<u32>,
    /// Whether remote addresses are learned from what comes in. Off where a control plane writes them.
    pub learning: bool,
    /// Time to live of outer packets; 0 is the route's.
    pub ttl: u8,
}

impl Vxlan {
    /// The port that IANA gave VXLAN.
    pub const PORT: u16 = 4789;

    /// A device for this network, with learning off.
    pub fn new(id: u32) -> Self {
        Self { id, port: Self::PORT, local: None, underlay: None, learning: false, ttl: 0 }
    }

    pub(super) fn validate(&self, object: &str) -> Result<()> {
        if self.id >= 1 << 24 {
            let problem = format!("VXLAN id {} does not fit 24 bits", self.id);
            return Err(Error::invalid(object, problem, "use an id below 16777216"));
        }
        if self.port == 0 {
            return Err(Error::invalid(object, "VXLAN port 0", "use 4789 or another free UDP port"));
        }
        Ok(())
    }

    pub(super) fn data(&self) -> InfoData {
        let mut data = vec![
            InfoVxlan::Id(self.id),
            InfoVxlan::Port(self.port),
            InfoVxlan::Learning(self.learning),
            InfoVxlan::Ttl(self.ttl),
        ];
        data.extend(self.local.map(|local| match local {
            IpAddr::V4(local) => InfoVxlan::Local(local),
            IpAddr::V6(local) => InfoVxlan::Local6(local),
        }));
        data.extend(self.underlay.map(InfoVxlan::Link));
        InfoData::Vxlan(data)
    }

    pub(super) fn parse(data: Reader<'_>) -> Self {
        let mut vxlan = Self { id: 0, port: 0, local: None, underlay: None, learning: false, ttl: 0 };
        for attr in data {
            match attr.kind {
                IFLA_VXLAN_ID => vxlan.id = attr.u32().unwrap_or(0),
                IFLA_VXLAN_PORT => vxlan.port = attr.u16_be().unwrap_or(0),
                IFLA_VXLAN_LOCAL | IFLA_VXLAN_LOCAL6 => vxlan.local = ip(&attr),
                IFLA_VXLAN_LINK => vxlan.underlay = attr.u32().ok().filter(|index| *index != 0),
                IFLA_VXLAN_LEARNING => vxlan.learning = attr.u8().is_ok_and(|on| on != 0),
                IFLA_VXLAN_TTL => vxlan.ttl = attr.u8().unwrap_or(0),
                _ => {}
            }
        }
        vxlan
    }

    pub(super) fn compare(&self, found: &Self, differences: &mut Vec<Difference>) {
        Difference::check(differences, "id", &self.id, &found.id);
        Difference::check(differences, "port", &self.port, &found.port);
        Difference::check(differences, "local", &self.local, &found.local);
        Difference::check(differences, "underlay", &self.underlay, &found.underlay);
        Difference::check(differences, "learning", &self.learning, &found.learning);
        Difference::check(differences, "ttl", &self.ttl, &found.ttl);
    }
}
