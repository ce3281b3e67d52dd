//! Pod set-up: one interface, all of it or nothing.
//!
//! Order: rules first, so that the port is never without them; then the pair of links in one message, the
//! pod's end directly in its namespace; then the pod's side and the router's side, each in one batch; then a
//! packet there and back for each address. If anything fails, all of it is taken away again.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_ipam::pod_mac;
use knit_kernel::addr::Address;
use knit_kernel::handle::Created;
use knit_kernel::link::{AddrGenMode, Change as LinkChange, Link, NewLink, Peer};
use knit_kernel::neigh::Neighbour;
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route as KernelRoute;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{Handle, IfName, Mtu, Op};
use knit_nft::{Family, Nftables};
use knit_runtime::{
    AttachRequest, Attachment, Change, Error, HostEnd, PortMapping, Protocol, Reason, Result, Route,
};
use knit_types::sync::ReadWrite;
use knit_types::{ByFamily as _, Family as IpFamily};

use crate::attachments::Known;
use crate::core::Core;
use crate::fail::{chain, internal};
use crate::listeners;
use crate::mark::{Mark, host_name};
use crate::moves::MovingSubject;
use crate::networks::Net;
use crate::node::Node;
use crate::port::{FoundPort, Port, is_half_made, take_elements};
use crate::rules::{self, SetElement};
use crate::shape::{RouterHome, Shape, check_route};

/// How long a new pod's kernel may take to answer. It is there already, so this is for a machine out of
/// breath.
const ECHO_TIMEOUT: Duration = Duration::from_secs(3);

/// All that is to be made for one request.
pub(crate) struct Plan {
    pub shape: Arc<Shape>,
    pub host: IfName,
    pub mark: Mark,
    pub addresses: Vec<knit_runtime::Address>,
    pub routes: Vec<Route>,
}

impl Core {
    /// Makes one interface, or finds it there as asked for.
    pub fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        let about = |error: Error| error.on(request.network.as_str()).at(request.interface.as_str());
        let (net, shape) = self.networks.ready(&request.network).map_err(about)?;
        let pod = open_pod(request).map_err(about)?;
        check_ports(request, self.node.config.vxlan_port).map_err(about)?;
        let plan = Plan::of(&shape, request, pod.id().ino).map_err(about)?;
        // Until all of it is known: what is compared meanwhile is half made.
        let _moving = self.moves.begin(MovingSubject::port(&net.name, &plan.mark));
        let had_ipv6_on = self.has_ipv6_on(&plan);
        // Asked first: replacing a damaged one forgets it.
        let before = self.known_as(&plan);
        // What was there and cannot be made again is lost, and stays known as that.
        let failed = |error: Error| {
            let still = before.clone().map(|known| (plan.host.to_string(), known));
            self.attachments.known().extend(still);
            about(error)
        };
        let (link, new) = {
            let _together = net.gate.reading();
            match self.existing(&net, &plan, request).map_err(about)? {
                Some(link) => {
                    self.open_ports_again(&plan, request).map_err(about)?;
                    (link, false)
                }
                None => {
                    // A pod keeps the ports that it was given: a program that came later is no reason to
                    // refuse the repair.
                    if before.is_none() && !self.attachments.has_lost(&plan.host, &request.ports) {
                        listeners::check(request, self.node.space.namespace()).map_err(about)?;
                    }
                    (self.make(&net, &plan, request, &pod).map_err(failed)?, true)
                }
            }
        };
        let attachment = self.answer(&net, &plan, request, &link);
        if new {
            // Without the gate: a pod that does not answer must not hold up the Network.
            shape.driver().verify(&net, &plan).map_err(|error| {
                let _together = net.gate.reading();
                self.undo(&net, &plan);
                failed(error)
            })?;
            self.tell(Change::Added(attachment.clone()));
        }
        let known = Known {
            network: net.name.clone(),
            mark: plan.mark.clone(),
            ports: request.ports.clone(),
            answer: Some(attachment.clone()),
            netns: Some(request.netns.clone()),
            mtu: link.mtu,
            ipv6_on: self.attachments.take_switched_on(&plan.host) || (!new && had_ipv6_on),
        };
        self.attachments.known().insert(plan.host.to_string(), known);
        self.attachments.forget_lost(&plan.host);
        Ok(attachment)
    }

    /// What is known of this attachment, if it was made here before, with the same ports of the node.
    fn known_as(&self, plan: &Plan) -> Option<Known> {
        let known = self.attachments.known();
        known.get(plan.host.as_str()).filter(|known| known.mark.digest == plan.mark.digest).cloned()
    }

    /// Whether IPv6 was switched on for this attachment when it was made.
    fn has_ipv6_on(&self, plan: &Plan) -> bool {
        self.attachments.known().get(plan.host.as_str()).is_some_and(|known| known.ipv6_on)
    }

    /// What is there under this attachment's name: as asked for, or in the way, or of a sandbox that is no
    /// more.
    fn existing(&self, net: &Net, plan: &Plan, request: &AttachRequest) -> Result<Option<Link>> {
        let conflict = |message: String| Err(Error::new(Reason::Conflict, message));
        let driver = plan.shape.driver();
        let Some((link, there)) = driver.find(self, net, plan)? else { return Ok(None) };
        let whole = link.up && there.inode == plan.mark.inode;
        if whole && there.digest != plan.mark.digest {
            return conflict(format!(
                "sandbox {} already has interface {}, with other properties: detach it first",
                there.sandbox, there.interface
            ));
        }
        if whole && driver.inspect(net, &link, &there).is_ok() {
            return Ok(Some(link));
        }
        tracing::info!(sandbox = %there.sandbox, interface = %request.interface, "replacing a damaged \
            attachment");
        self.unmake(net, Some(&link), &there)?;
        Ok(None)
    }

    /// What is there under the name of a plan's host end; what was half made goes.
    pub fn find_port(&self, net: &Net, plan: &Plan) -> Result<Option<(Link, Mark)>> {
        let being_made = self.attachments.making().contains(plan.host.as_str());
        let handle = net.space.links()?;
        match plan.port().find(&*handle, being_made)? {
            FoundPort::Nothing => Ok(None),
            FoundPort::HalfMade(index) => {
                tracing::info!(link = %plan.host, "removing a link whose creation was interrupted");
                handle.delete_link(index).map_err(internal("delete an incomplete link"))?;
                Ok(None)
            }
            FoundPort::Ours(found) => Ok(Some(*found)),
        }
    }

    /// Whether a link is an attachment's that a killed runtime did not finish.
    pub fn is_half_made(&self, link: &Link) -> bool {
        is_half_made(link, self.attachments.making().contains(link.name.as_str()))
    }

    /// Makes it, and takes everything away again if it does not work.
    fn make(&self, net: &Net, plan: &Plan, request: &AttachRequest, pod: &NetNs) -> Result<Link> {
        self.attachments.making().insert(plan.host.to_string());
        let opened = self.node.open_ports(plan, request);
        let made = opened.and_then(|()| plan.shape.driver().make(self, net, plan, request, pod));
        self.attachments.making().remove(plan.host.as_str());
        if made.is_err() {
            self.attachments.take_switched_on(&plan.host);
            self.undo(net, plan);
        }
        made
    }

    /// Brings the ports of the node that lead to an attachment which is there to what was asked for: somebody
    /// closed some of them, changed where they lead, or added others.
    fn open_ports_again(&self, plan: &Plan, request: &AttachRequest) -> Result<()> {
        let (host, table) = (plan.host.as_str(), rules::table(Family::Inet));
        let ips: Vec<IpAddr> = plan.mark.ips().collect();
        let wanted = rules::port_elements(host, &request.ports, &ips);
        let there = self.node.port_elements(&|_| true)?;
        let is_anothers = |owner: &str| {
            owner != host
                && (self.attachments.known().contains_key(owner) || self.attachments.making().contains(owner))
        };
        let in_the_way = |put: &&SetElement| {
            let owner = put.element.comment.as_deref();
            let same_key = |wanted: &SetElement| {
                wanted.set.name == put.set.name && wanted.element.key == put.element.key
            };
            let ours = owner == Some(host);
            let is_wanted = wanted.iter().any(|wanted| rules::is_same(wanted, put));
            !is_wanted && (ours || (wanted.iter().any(same_key) && !owner.is_some_and(is_anothers)))
        };
        let gone: Vec<SetElement> = there.iter().filter(in_the_way).cloned().collect();
        let missing = |put: &&SetElement| !there.iter().any(|there| rules::is_same(put, there));
        let missing: Vec<SetElement> = wanted.iter().filter(missing).cloned().collect();
        if gone.is_empty() && missing.is_empty() {
            return Ok(());
        }
        let mut rules = self.node.space.rules()?;
        take_elements(&mut *rules, &gone, &table)?;
        rules.commit(&SetElement::add(&missing, &table)).map_err(internal("open ports of the node again"))
    }

    /// Takes away what was made for a request that failed.
    fn undo(&self, net: &Net, plan: &Plan) {
        let left = plan.shape.driver().leftover(net, plan);
        let undone = left.and_then(|link| self.unmake(net, link.as_ref(), &plan.mark));
        if let Err(error) = undone {
            tracing::error!(error = chain(&error), host = %plan.host, "a failed attachment could not be \
                undone");
        }
    }

    /// Makes a pair of links between pod and router, with all that is on them.
    pub fn make_port(&self, net: &Net, plan: &Plan, request: &AttachRequest, pod: &NetNs) -> Result<Link> {
        let handle = net.space.links()?;
        let addr_gen = self.node.addr_gen(&plan.shape);
        let mut link = NewLink::veth(plan.host.clone(), plan.peer(pod)?);
        link.mac = Some(plan.shape.gateway_mac());
        link.mtu = Mtu::new(plan.shape.mtu).ok();
        link.alias = Some(plan.mark.alias());
        link.addr_gen = addr_gen;
        link.up = true;
        if let Some(master) = plan.shape.driver().master() {
            let name = IfName::new(master.name).expect("a driver gives its link a name that is one");
            let index =
                handle.index_of(&name).map_err(internal(format!("find link {name} in the router")))?;
            (link.master, link.port) = (Some(index), Some(master.pod_port));
        }
        let pod_side = |created: Created| {
            let peer = created.peer.ok_or_else(|| {
                let message = format!("the kernel did not report where the other end of {} is", plan.host);
                Error::new(Reason::Internal, message)
            })?;
            self.pod_side(plan, pod, &|| plan.shape.driver().pod_side(plan, peer, addr_gen))
        };
        let created = plan.port().make(&*handle, &mut *net.space.rules()?, &link, pod_side)?;
        net.node_side(plan)?;
        let link = handle.link(created.index).map_err(internal("read the new link"))?;
        link.ok_or_else(|| {
            let message = format!(
                "the namespace of sandbox {} disappeared in the \
            meantime",
                request.pod.sandbox
            );
            Error::new(Reason::NamespaceGone, message)
        })
    }

    /// What is done inside the pod's namespace, in one batch.
    pub fn pod_side(&self, plan: &Plan, pod: &NetNs, ops: &dyn Fn() -> Vec<Op<'static>>) -> Result<()> {
        let handle = Handle::open(pod).map_err(internal("open a socket in the pod's namespace"))?;
        let attempt = handle.apply(&ops());
        let Err(error) = attempt else { return Ok(()) };
        if !plan.shape.has(IpFamily::V6) {
            return Err(internal("configure the pod's interface")(error));
        }
        // Some runtimes switch IPv6 off in new namespaces.
        let name = IfName::new(plan.mark.interface.as_str()).map_err(Error::from)?;
        let off = Sysctl::ipv6_disabled(Scope::Link(&name));
        let sysctls = Sysctls::of(pod).map_err(internal("open the pod's sysctls"))?;
        if !sysctls.get(&off).is_ok_and(|value| value == "1") {
            return Err(internal("configure the pod's interface")(error));
        }
        sysctls.set(&off, 0).map_err(internal("enable IPv6 in the pod"))?;
        let ops: Vec<Op<'_>> = ops().into_iter().map(again).collect();
        handle.apply(&ops).map_err(internal("configure the pod's interface"))?;
        self.attachments.switched_on(&plan.host);
        Ok(())
    }

    /// The answer.
    fn answer(&self, net: &Net, plan: &Plan, request: &AttachRequest, link: &Link) -> Attachment {
        Attachment {
            pod: request.pod.clone(),
            network: request.network.clone(),
            interface: request.interface.clone(),
            addresses: plan.addresses.clone(),
            mac: plan.mark.mac,
            // That which it was made with, if the Network's has changed since.
            mtu: link.mtu,
            routes: plan.routes.clone(),
            dns: request.dns.clone(),
            host: plan.mark.driver().host_end(net, link),
            pod_netns_inode: plan.mark.inode,
            ports: request.ports.clone(),
        }
    }
}

impl Node {
    /// Opens the ports of the node that lead to it.
    pub fn open_ports(&self, plan: &Plan, request: &AttachRequest) -> Result<()> {
        let host = plan.host.as_str();
        let table = rules::table(Family::Inet);
        let ips: Vec<IpAddr> = plan.mark.ips().collect();
        let ports = rules::port_elements(host, &request.ports, &ips);
        // A port of the node that another pod has is refused here.
        if !ports.is_empty() {
            let mut transaction = knit_nft::Transaction::new();
            for put in &ports {
                transaction.create_elements(&table, &put.set, vec![put.element.clone()]);
            }
            let mut committed = self.space.rules()?.commit(&transaction);
            if committed.as_ref().is_err_and(knit_nft::Error::is_exists) {
                // They may be this one's own, from before its link went without us.
                self.close_ports(&|owner| owner == host)?;
                committed = self.space.rules()?.commit(&transaction);
            }
            committed.map_err(|error| {
                if error.is_exists() {
                    let message = "a port of the node is taken";
                    return Error::new(Reason::Conflict, message).because(error);
                }
                internal("open ports of the node")(error)
            })?;
        }
        Ok(())
    }
}

impl Net {
    /// What a failed making left under a plan's name. Another's link of that name is not ours to delete.
    pub fn left_of_port(&self, plan: &Plan) -> Result<Option<Link>> {
        let link =
            self.space.links()?.link_by_name(&plan.host).map_err(internal("look for what was created"))?;
        Ok(link.filter(|link| link.owner().is_none_or(|owner| Mark::parse(owner).is_some())))
    }

    /// Sends a packet to each address and waits for the answer.
    pub fn asks(&self, plan: &Plan) -> Result<()> {
        for address in plan.mark.ips() {
            let from = plan.shape.echo_source(IpFamily::of(address));
            let asked = self.space.echo(IpFamily::of(address), from)?.ask(address, ECHO_TIMEOUT);
            asked.map_err(|error| {
                let message = format!(
                    "{} of sandbox {} was created with {address}, but nothing answers there: check \
                    for rules or sysctls of other programs that drop packets between {} and the pod",
                    plan.mark.interface, plan.mark.sandbox, plan.host
                );
                Error::new(Reason::Internal, message).because(error)
            })?;
        }
        Ok(())
    }
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
        for family in IpFamily::ALL {
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
    fn port(&self) -> Port<'_> {
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

/// The same operation for a second attempt: what the first one made is fine.
fn again(op: Op<'static>) -> Op<'static> {
    match op {
        Op::Create(object) => Op::Replace(object),
        other => other,
    }
}

/// The other end of an attachment's interface.
pub(crate) fn host_end(net: &Net, link: &Link) -> HostEnd {
    HostEnd {
        name: link.name.to_string(),
        index: link.index,
        netns_path: (net.home == RouterHome::Own).then(|| net.path.clone()),
        netns_inode: net.space.namespace().id().ino,
    }
}

fn kernel_name(request: &AttachRequest) -> Result<IfName> {
    IfName::new(request.interface.as_str()).map_err(Error::from)
}

/// A port of the node that would take frames of other nodes away from the tunnels.
fn check_ports(request: &AttachRequest, tunnels: u16) -> Result<()> {
    let taken = |port: &PortMapping| port.protocol == Protocol::Udp && port.host_port == tunnels;
    if !request.ports.iter().any(taken) {
        return Ok(());
    }
    let message = format!(
        "host port {tunnels}/UDP is reserved for the VXLAN tunnels between nodes: give sandbox {} another \
         host port",
        request.pod.sandbox
    );
    Err(Error::new(Reason::Invalid, message))
}

fn open_pod(request: &AttachRequest) -> Result<NetNs> {
    NetNs::open(&request.netns).map_err(|error| {
        let message = format!(
            "cannot use the network namespace {} of sandbox {}",
            request.netns.display(),
            request.pod.sandbox
        );
        Error::new(Reason::NamespaceGone, message).because(error)
    })
}
