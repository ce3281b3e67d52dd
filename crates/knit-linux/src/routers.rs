//! What the agent's services have of this runtime's routers.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_runtime::routers::{Routers, Steering};
use knit_runtime::{IfName, Protocol, Result};

use crate::fail::internal;
use crate::router::router_end;
use crate::steering::SteerTable;
use crate::uplink::{self, NODE_END_PREFIX};

/// The routers of one node.
#[derive(Debug)]
pub(crate) struct LinuxRouters {
    /// The node's own namespace.
    pub node: NetNs,
    /// The UDP port of tunnels.
    pub vxlan_port: u16,
}

impl Routers for LinuxRouters {
    fn uplink(&self, router: BorrowedFd<'_>) -> Result<Vec<IpAddr>> {
        let router = router.try_clone_to_owned().map_err(internal("open a router's namespace again"))?;
        let router = NetNs::from_fd(router).map_err(internal("open a router's namespace again"))?;
        uplink::router_uplink(&router).map_err(internal("read the addresses of a router"))
    }

    fn uplink_ranges(&self) -> Vec<IpNet> {
        let (v4, v6) = uplink::ranges();
        vec![v4.into(), v6.into()]
    }

    fn uplink_in_router(&self) -> IfName {
        router_end()
    }

    fn uplink_prefix(&self) -> String {
        NODE_END_PREFIX.to_owned()
    }

    fn reserved_ports(&self) -> Vec<(Protocol, u16)> {
        vec![(Protocol::Udp, self.vxlan_port)]
    }

    fn steering(&self) -> Result<Box<dyn Steering>> {
        Ok(Box::new(SteerTable::new_in(&self.node)?))
    }
}
