//! What is to be made for one request: worked out, or refused, before anything is touched.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_ipam::pod_mac;
use knit_kernel::addr::Address;
use knit_kernel::link::{AddrGenMode, Change as LinkChange, Peer};
use knit_kernel::neigh::Neighbour;
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route as KernelRoute;
use knit_kernel::{IfName, Mtu, Op};
use knit_runtime::{AttachRequest, Error, Reason, Result, Route};
use knit_types::{ByFamily as _, Family};

use crate::fail::internal;
use crate::mark::{Mark, host_name};
use crate::port::Port;
use crate::rules;
use crate::shape::{RouterHome, Shape, check_route};

/// All that is to be made for one request.
pub(crate) struct Plan {
    pub shape: Arc<Shape>,
    pub host: IfName,
    pub mark: Mark,
    pub addresses: Vec<knit_runtime::Address>,
    pub routes: Vec<Route>,
}

impl Plan {
    /// Works out what a request needs, or says what cannot work.
    pub fn of(shape: &Arc<Shape>, request: &AttachRequest, inode: u64) -> Result<Self> {
        let invalid = |message: String| Error::new(Reason::Invalid, message);
        kernel_name(request)?;
        let mut addresses = Vec::new();
        for wanted in &request.addresses {
            let ip = wanted.net.addr();
            let address = shape.network.pod_address(ip).ok_or_else(|| {
                invalid(format!("{ip} is in no subnet of Network {}: reserve one that is", request.network))
            })?;
            let taken = address.gateway == Some(ip) || shape.network.router_addresses.contains(&ip);
            if taken {
                return Err(invalid(format!(
                    "{ip} belongs to the router of Network {}: reserve another",
                    request.network
                )));
            }
            addresses.push(address);
        }
        for family in Family::ALL {
            let given = addresses.of_family(family).count();
            if given != usize::from(shape.has(family)) {
                return Err(invalid(format!(
                    "{given} {family} addresses for Network {}: provide one per family of the Network",
                    request.network
                )));
            }
        }
        if !request.ports.is_empty() && shape.home == RouterHome::Own && !shape.network.primary {
            return Err(invalid(format!(
                "host ports are only for a pod's primary Network, which {} is not: leave them out here",
                request.network
            )));
        }
        if request.default_route && shape.network.subnets.iter().all(|subnet| subnet.gateway.is_none()) {
            return Err(invalid(format!(
                "Network {} has no gateway that a default route could lead to: give its subnets one, or move \
                 the default route to another interface",
                request.network
            )));
        }
        for route in &request.routes {
            check_route(&shape.network, route).map_err(invalid)?;
        }
        let ips: Vec<IpAddr> = addresses.iter().map(|address| address.net.addr()).collect();
        let first = ips.iter().find(|ip| ip.is_ipv4()).or(ips.first());
        let first =
            first.ok_or_else(|| invalid("no address: provide one per family of the Network".into()))?;
        let mac = request.mac.unwrap_or_else(|| pod_mac(shape.id(), *first));
        if !mac.is_unicast() {
            return Err(invalid(format!("{mac} is not a valid MAC for an interface: use a unicast one")));
        }
        let mut mark = Mark::of(request, &shape.network, mac, inode)?;
        mark.addresses = addresses.iter().map(|address| address.net).collect();
        Ok(Self {
            host: host_name(&request.pod.sandbox, &request.interface),
            routes: shape.pod_routes(request.default_route, &request.routes),
            shape: Arc::clone(shape),
            mark,
            addresses,
        })
    }

    /// The pod's end of a pair, as it is made.
    pub fn peer<'a>(&self, pod: &'a NetNs) -> Result<Peer<'a>> {
        let name = IfName::new(self.mark.interface.as_str()).map_err(internal("name the pod's interface"))?;
        let mut peer = Peer::new(name, pod);
        peer.mac = Some(self.mark.mac);
        peer.mtu = Mtu::new(self.shape.mtu).ok();
        Ok(peer)
    }

    /// Its host side.
    pub fn port(&self) -> Port<'_> {
        Port { host: &self.host, mark: &self.mark }
    }

    /// What is done inside the pod's namespace.
    pub fn pod_ops(&self, peer: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
        let lo = IfName::new("lo").expect("lo is a name");
        let mut ops: Vec<Op<'static>> = vec![
            LinkChange::named(lo).up().into(),
            LinkChange { addr_gen, ..LinkChange::of(peer).up() }.into(),
        ];
        let gateway_mac = self.shape.gateway_mac();
        for address in &self.addresses {
            ops.push(Op::create(Address::new(peer, address.net)));
            ops.extend(
                address.gateway.map(|gateway| Op::create(Neighbour::permanent(peer, gateway, gateway_mac))),
            );
            if address.net.addr().is_ipv6() {
                let own = IpNet::new(rules::link_local(self.mark.mac).into(), 64).expect("64 bits fit");
                ops.push(Op::create(Address::new(peer, own)));
            }
        }
        for route in &self.routes {
            let mut wanted = KernelRoute::to(route.destination).dev(peer);
            (wanted.gateway, wanted.onlink) = (route.via, route.via.is_some());
            ops.push(Op::create(wanted));
        }
        ops
    }
}

fn kernel_name(request: &AttachRequest) -> Result<IfName> {
    IfName::new(request.interface.as_str()).map_err(Error::from)
}
