//! What others do between two pods of a node: a bare veth pair, a bridge, and routes, the latter two with
//! connection tracking.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::namespace;
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_nft::{
    Chain, ChainKind, CtState, Family, Hook, Nftables as _, Rule, Table, TableId, TableState, field,
};

/// Two pods, and what joins them, which goes with the value.
pub struct Pair {
    pub client: NetNs,
    pub server: NetNs,
    /// The server's addresses, IPv4 and IPv6.
    pub addresses: [IpAddr; 2],
    between: Option<NetNs>,
}

const CLIENT: [&str; 2] = ["10.1.0.2", "fd01::2"];
const SERVER: [&str; 2] = ["10.1.0.3", "fd01::3"];
const GATEWAY: [&str; 2] = ["10.1.0.1", "fd01::1"];
const ON_LINK: [u8; 2] = [24, 64];
const ALONE: [u8; 2] = [32, 128];
const OF_A_CONNECTION: CtState = CtState(CtState::ESTABLISHED.0 | CtState::RELATED.0);

/// Neighbour discovery is not tracked.
const BEGINS_ONE: CtState = CtState(CtState::NEW.0 | CtState::UNTRACKED.0);

/// The limit: two namespaces with nothing in between.
pub fn bare() -> Result<Pair> {
    let pair = Pair::new(None)?;
    let link = NewLink::veth(IfName::new("eth0")?, Peer::new(IfName::new("eth0")?, &pair.server));
    Handle::open(&pair.client)?.create_link(&link)?;
    dress(&pair.client, &CLIENT, &ON_LINK)?;
    dress(&pair.server, &SERVER, &ON_LINK)?;
    Ok(pair)
}

/// A bridge whose packets pass the hooks of IP, as kube-proxy asks for, with one rule that looks at a
/// connection's state.
pub fn bridged() -> Result<Pair> {
    let node = namespace();
    let handle = Handle::open(&node)?;
    let mut bridge = NewLink::bridge(IfName::new("bridge")?, Bridge::default());
    bridge.up = true;
    let master = handle.create_link(&bridge)?.index;
    for call in [Sysctl::bridge_nf_call_iptables(), Sysctl::bridge_nf_call_ip6tables()] {
        Sysctls::of(&node)?.set(&call, 1)?;
    }
    track(&node)?;
    let pair = Pair::new(Some(node))?;
    for (port, pod) in [("client", &pair.client), ("server", &pair.server)] {
        let mut link = NewLink::veth(IfName::new(port)?, Peer::new(IfName::new("eth0")?, pod));
        (link.master, link.up) = (Some(master), true);
        handle.create_link(&link)?;
    }
    dress(&pair.client, &CLIENT, &ON_LINK)?;
    dress(&pair.server, &SERVER, &ON_LINK)?;
    Ok(pair)
}

/// A route to each pod, with the same rule.
pub fn routed() -> Result<Pair> {
    let node = namespace();
    let handle = Handle::open(&node)?;
    for forwarding in [Sysctl::ipv4_forwarding(), Sysctl::ipv6_forwarding()] {
        Sysctls::of(&node)?.set(&forwarding, 1)?;
    }
    track(&node)?;
    let pair = Pair::new(Some(node))?;
    for (port, pod, addresses) in [("client", &pair.client, CLIENT), ("server", &pair.server, SERVER)] {
        let link = NewLink::veth(IfName::new(port)?, Peer::new(IfName::new("eth0")?, pod));
        let outside = handle.create_link(&link)?.index;
        let mut ops = vec![Change::of(outside).up().into()];
        for family in 0..2 {
            let gateway = IpNet::new(GATEWAY[family].parse()?, ALONE[family])?;
            ops.push(Op::create(Address::new(outside, gateway)));
            let to = IpNet::new(addresses[family].parse()?, ALONE[family])?;
            ops.push(Op::create(Route::to(to).dev(outside)));
        }
        handle.apply(&ops)?;
        let eth0 = dress(pod, &addresses, &ALONE)?;
        let mut inside = Vec::new();
        for (family, default) in [Route::default_v4(), Route::default_v6()].into_iter().enumerate() {
            let gateway: IpAddr = GATEWAY[family].parse()?;
            inside.push(Op::create(Route::to(IpNet::from(gateway)).dev(eth0)));
            inside.push(Op::create(default.dev(eth0).via(gateway)));
        }
        Handle::open(pod)?.apply(&inside)?;
    }
    Ok(pair)
}

impl Pair {
    fn new(between: Option<NetNs>) -> Result<Self> {
        let addresses = [SERVER[0].parse()?, SERVER[1].parse()?];
        Ok(Self { client: namespace(), server: namespace(), addresses, between })
    }

    /// What joins the two, where that is a namespace.
    pub fn between(&self) -> Result<&NetNs> {
        self.between.as_ref().context("nothing is between these two")
    }
}

/// Gives `eth0` its addresses, and sets it up.
fn dress(pod: &NetNs, addresses: &[&str; 2], lengths: &[u8; 2]) -> Result<u32> {
    let handle = Handle::open(pod)?;
    let eth0 = handle.index_of(&IfName::new("eth0")?)?;
    let mut ops = vec![Change::of(eth0).up().into()];
    for (address, length) in addresses.iter().zip(lengths) {
        ops.push(Op::create(Address::new(eth0, IpNet::new(address.parse()?, *length)?)));
    }
    handle.apply(&ops)?;
    Ok(eth0)
}

/// The one rule set that there is: what belongs to a connection passes, and so does what begins one.
fn track(node: &NetNs) -> Result<()> {
    let forward = Chain::base("forward", ChainKind::Filter, Hook::Forward, 0);
    let state = TableState::new(Table::new(TableId::new(Family::Inet, "peer"))).chain(
        forward,
        [
            Rule::new().any_of(field::ct_state(), &OF_A_CONNECTION).accept(),
            Rule::new().any_of(field::ct_state(), &BEGINS_ONE).accept(),
            Rule::new().drop(),
        ],
    );
    Kernel::open_in(node)?.apply(&state)?;
    Ok(())
}
