//! Bridges and what their ports do.

use netlink_packet_route::link::{BridgeStpState, InfoBridge, InfoBridgePort, InfoData};

use crate::error::Difference;
use crate::netlink::attr::Reader;

const IFLA_BR_AGEING_TIME: u16 = 4;
const IFLA_BR_STP_STATE: u16 = 5;
const IFLA_BR_MCAST_SNOOPING: u16 = 23;
const IFLA_BRPORT_MODE: u16 = 4;
const IFLA_BRPORT_LEARNING: u16 = 8;
const IFLA_BRPORT_UNICAST_FLOOD: u16 = 9;
const IFLA_BRPORT_MCAST_FLOOD: u16 = 27;
const IFLA_BRPORT_BCAST_FLOOD: u16 = 30;
const IFLA_BRPORT_NEIGH_SUPPRESS: u16 = 32;
const IFLA_BRPORT_ISOLATED: u16 = 33;
/// The kernel counts a bridge's times in hundredths of a second.
const PER_SECOND: u32 = 100;

/// A bridge's own options. VLAN filtering stays off, and so does the spanning tree unless asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bridge {
    /// After how many seconds a learned address is forgotten.
    pub ageing_seconds: u32,
    /// Whether the kernel's spanning tree runs. A port then needs half a minute until it forwards.
    pub stp: bool,
    /// Whether multicast is sent only where it was asked for. Without a querier on the segment that breaks
    /// IPv6 neighbour discovery after a while, so it is off.
    pub multicast_snooping: bool,
}

impl Default for Bridge {
    fn default() -> Self {
        Self { ageing_seconds: 300, stp: false, multicast_snooping: false }
    }
}

impl Bridge {
    pub(super) fn data(&self) -> InfoData {
        let stp = if self.stp { BridgeStpState::KernelStp } else { BridgeStpState::Disabled };
        InfoData::Bridge(vec![
            InfoBridge::AgeingTime(self.ageing_seconds.saturating_mul(PER_SECOND)),
            InfoBridge::StpState(stp),
            InfoBridge::MulticastSnooping(self.multicast_snooping),
        ])
    }

    pub(super) fn parse(data: Reader<'_>) -> Self {
        let mut bridge = Self { ageing_seconds: 0, stp: false, multicast_snooping: false };
        for attr in data {
            match attr.kind {
                IFLA_BR_AGEING_TIME => bridge.ageing_seconds = attr.u32().unwrap_or(0) / PER_SECOND,
                IFLA_BR_STP_STATE => bridge.stp = attr.u32().is_ok_and(|state| state != 0),
                IFLA_BR_MCAST_SNOOPING => bridge.multicast_snooping = attr.u8().is_ok_and(|on| on != 0),
                _ => {}
            }
        }
        bridge
    }

    pub(super) fn compare(&self, found: &Self, differences: &mut Vec<Difference>) {
        Difference::check(differences, "ageing_seconds", &self.ageing_seconds, &found.ageing_seconds);
        Difference::check(differences, "stp", &self.stp, &found.stp);
        Difference::check(
            differences,
            "multicast_snooping",
            &self.multicast_snooping,
            &found.multicast_snooping,
        );
    }
}

/// What a bridge's port does. The default is the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortFlags {
    /// Isolated ports do not talk to each other, only to ports that are not isolated.
    pub isolated: bool,
    /// Frames may leave through the port that they came in by. Needed where DNAT sends a pod's packet back to
    /// itself.
    pub hairpin: bool,
    /// The bridge answers ARP and neighbour solicitations for what it knows, instead of flooding them to this
    /// port.
    pub neigh_suppress: bool,
    /// Source addresses of frames that come in by this port are learned.
    pub learning: bool,
    /// Frames to unknown addresses are sent to this port.
    pub flood: bool,
    /// Multicast that nobody asked for is sent to this port.
    pub multicast_flood: bool,
    /// Broadcasts are sent to this port.
    pub broadcast_flood: bool,
}

impl Default for PortFlags {
    fn default() -> Self {
        Self {
            isolated: false,
            hairpin: false,
            neigh_suppress: false,
            learning: true,
            flood: true,
            multicast_flood: true,
            broadcast_flood: true,
        }
    }
}

impl PortFlags {
    pub(super) fn data(self) -> Vec<InfoBridgePort> {
        vec![
            InfoBridgePort::Isolated(self.isolated),
            InfoBridgePort::HairpinMode(self.hairpin),
            InfoBridgePort::NeighSupress(self.neigh_suppress),
            InfoBridgePort::Learning(self.learning),
            InfoBridgePort::UnicastFlood(self.flood),
            InfoBridgePort::MulticastFlood(self.multicast_flood),
            InfoBridgePort::BroadcastFlood(self.broadcast_flood),
        ]
    }

    pub(crate) fn parse(data: Reader<'_>) -> Self {
        let mut port = Self::default();
        for attr in data {
            let on = attr.u8().is_ok_and(|on| on != 0);
            match attr.kind {
                IFLA_BRPORT_ISOLATED => port.isolated = on,
                IFLA_BRPORT_MODE => port.hairpin = on,
                IFLA_BRPORT_NEIGH_SUPPRESS => port.neigh_suppress = on,
                IFLA_BRPORT_LEARNING => port.learning = on,
                IFLA_BRPORT_UNICAST_FLOOD => port.flood = on,
                IFLA_BRPORT_MCAST_FLOOD => port.multicast_flood = on,
                IFLA_BRPORT_BCAST_FLOOD => port.broadcast_flood = on,
                _ => {}
            }
        }
        port
    }
}
