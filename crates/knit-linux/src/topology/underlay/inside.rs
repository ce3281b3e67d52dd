//! What is done inside a pod's namespace for an interface on a segment of others: nobody else may have its
//! addresses before it uses them, and everybody hears of them afterwards.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::Op;
use knit_kernel::addr::Address;
use knit_kernel::link::{AddrGenMode, Change, Link};
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_runtime::{Error, Network, Reason, Result};

use crate::duplicate;
use crate::fail::{chain, internal};
use crate::networks::Net;
use crate::plan::Plan;
use crate::pod_side;
use crate::rules;
use crate::topology::lo;

/// An interface that has just been made in a pod.
pub(super) struct Inside<'a> {
    pub net: &'a Net,
    pub plan: &'a Plan,
    pub pod: &'a NetNs,
    pub interface: u32,
    pub addr_gen: Option<AddrGenMode>,
}

impl Inside<'_> {
    /// Gives it all that it is to have. `own` are the addresses of the link that it is on.
    pub fn fill(&self, parent: &Link, own: &dyn Fn() -> Result<Vec<Address>>) -> Result<()> {
        let Self { net, plan, pod, interface, addr_gen } = *self;
        self.announce_when_up();
        let patience = duplicate_check(&plan.shape.network);
        if patience.is_zero() {
            return pod_side::apply(net, plan, pod, &|| all_at_once(plan, interface, addr_gen));
        }
        // A parent does not hear its own children, nor they it.
        let own = own()?;
        let taken = plan.mark.ips().find(|ip| own.iter().any(|there| there.address.addr() == *ip));
        if let Some(ip) = taken {
            return Err(in_use(plan, ip, &format!("link {} of this node itself", parent.name)));
        }
        pod_side::apply(net, plan, pod, &|| without_addresses(plan, interface, addr_gen))?;
        let ips: Vec<IpAddr> = plan.mark.ips().collect();
        let found = duplicate::find(pod, interface, plan.mark.mac, &ips, patience);
        let found = found.map_err(internal("ask whether somebody else has the pod's addresses"))?;
        if let Some((ip, mac)) = found {
            return Err(in_use(plan, ip, &format!("{mac} on the segment of link {}", parent.name)));
        }
        pod_side::apply(net, plan, pod, &|| only_addresses(plan, interface))?;
        if let Err(error) = duplicate::announce(pod, interface, plan.mark.mac, &ips) {
            let error = chain(&error);
            tracing::debug!(error, sandbox = %plan.mark.sandbox, "addresses are not announced");
        }
        Ok(())
    }

    /// Has the kernel announce addresses whenever the interface comes up: switches and hosts on the wire may
    /// still know somebody else by them. Without that they learn of it by and by.
    fn announce_when_up(&self) {
        let name = &self.plan.mark.interface;
        let all = [format!("net/ipv4/conf/{name}/arp_notify"), format!("net/ipv6/conf/{name}/ndisc_notify")];
        for setting in all {
            let set = || -> knit_kernel::Result<()> {
                Sysctls::of(self.pod)?.set(&Sysctl::new(setting.as_str())?, 1)
            };
            if let Err(error) = set() {
                tracing::debug!(error = chain(&error), setting, "new addresses are not announced");
            }
        }
    }
}

/// Its addresses come before it is up, so that the kernel announces them.
pub(super) fn all_at_once(plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
    let up = Change::of(interface).up().into();
    let parts =
        [prepared(plan, interface, addr_gen), addresses(plan, interface), vec![up], routes(plan, interface)];
    parts.into_iter().flatten().collect()
}

/// Up, and able to ask, but with nothing that anybody could take for its address.
fn without_addresses(plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
    let up = Change::of(interface).up().into();
    prepared(plan, interface, addr_gen).into_iter().chain([up]).collect()
}

fn only_addresses(plan: &Plan, interface: u32) -> Vec<Op<'static>> {
    addresses(plan, interface).into_iter().chain(routes(plan, interface)).collect()
}

/// Its mark first, so that it can be found.
fn prepared(plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
    let mut ops: Vec<Op<'static>> = vec![
        Change { alias: Some(plan.mark.alias()), ..Change::of(interface) }.into(),
        Change::named(lo()).up().into(),
    ];
    if addr_gen.is_some() {
        ops.push(Change { addr_gen, ..Change::of(interface) }.into());
    }
    ops
}

fn addresses(plan: &Plan, interface: u32) -> Vec<Op<'static>> {
    let mut ops = Vec::new();
    for address in &plan.addresses {
        ops.push(Op::create(Address::new(interface, address.net)));
        if address.net.addr().is_ipv6() {
            let own = IpNet::new(rules::link_local(plan.mark.mac).into(), 64).expect("64 bits fit");
            ops.push(Op::create(Address::new(interface, own)));
        }
    }
    ops
}

fn routes(plan: &Plan, interface: u32) -> Vec<Op<'static>> {
    let route = |route: &knit_runtime::Route| {
        let mut wanted = Route::to(route.destination).dev(interface);
        (wanted.gateway, wanted.onlink) = (route.via, route.via.is_some());
        Op::create(wanted)
    };
    plan.routes.iter().map(route).collect()
}

/// How long to ask whether somebody else has a pod's addresses.
fn duplicate_check(network: &Network) -> Duration {
    network.underlay.as_ref().map(|underlay| underlay.duplicate_check).unwrap_or_default()
}

fn in_use(plan: &Plan, ip: IpAddr, who: &str) -> Error {
    let message = format!(
        "address {ip} is already in use by {who}: add what other hosts have to spec.subnets[].reserved of \
         Network {}, or take the address from that host",
        plan.shape.network.name
    );
    Error::new(Reason::AddressInUse, message)
}
