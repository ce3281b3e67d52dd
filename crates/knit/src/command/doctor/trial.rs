//! A trial: a node, a Network and a pod in namespaces that only this process has, made by the reference
//! runtime, and a packet through them. It shows at once that veth, VXLAN, routes, neighbours and all
//! expressions of nftables work that the default Network needs. Everything goes with this process.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::PathBuf;

use ipnet::IpNet;
use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::link::{Bridge, Change, NewLink, Peer, Vxlan};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::{Handle, IfName, Op};
use knit_linux::{Config, LinuxRuntime};
use knit_nft::{Family, Nftables as _, Table, TableId, Transaction};
use knit_runtime::{
    Address, AttachRequest, Block, Dns, Network, NetworkId, Pod, Runtime as _, Subnet, Topology,
};

use super::{Node, chain};

type Failure = Box<dyn std::error::Error + Send + Sync>;

pub async fn look(node: &mut Node) {
    let space = match NetNs::unnamed() {
        Ok(space) => space,
        Err(error) => {
            let words = "kernel features could not be tested, because no network namespace can be created";
            return node.unknown("kernel", format!("{words}: {}; run this as root", chain(&error)));
        }
    };
    links(node, &space);
    bridge_rules(node, &space);
    match pod(&space).await {
        Ok(mtu) => {
            let words = "a trial pod got an address and answered an echo request";
            node.good("trial pod", format!("{words} (MTU {mtu})"));
        }
        Err(error) => node.wrong(
            "trial pod",
            format!("a trial pod in separate namespaces got no network: {}", chain(error.as_ref())),
            "see the checks above; if a module is missing: modprobe nf_tables nft_fib_inet nft_masq nft_nat \
             vxlan veth",
        ),
    }
}

/// Describes a link of a name, for a namespace.
type MakeLink = for<'a> fn(IfName, &'a NetNs) -> NewLink<'a>;

fn links(node: &mut Node, space: &NetNs) {
    let kinds: [(&str, MakeLink, &str); 3] = [
        (
            "veth",
            |name, space| NewLink::veth(name, Peer::new(IfName::new("trial-peer").expect("a name"), space)),
            "no pod",
        ),
        ("bridge", |name, _| NewLink::bridge(name, Bridge::default()), "no Layer2 Network"),
        ("vxlan", |name, _| NewLink::vxlan(name, Vxlan::new(0x00ff_ffff)), "no Network over several nodes"),
    ];
    for (kind, new, without) in kinds {
        let name = IfName::new(format!("trial-{kind}")).expect("a name");
        let made = Handle::open(space).and_then(|handle| {
            let made = handle.create_link(&new(name, space))?;
            handle.delete_link(made.index)
        });
        match made {
            Ok(_) => node.good("kernel", format!("{kind} links can be created")),
            Err(error) => node.wrong(
                "kernel",
                format!("a {kind} link cannot be created, so {without} works: {}", chain(&error)),
                format!("modprobe {kind}; if that fails, use a kernel that has it"),
            ),
        }
    }
}

fn bridge_rules(node: &mut Node, space: &NetNs) {
    let table = TableId::new(Family::Bridge, "knit-trial");
    let mut make = Transaction::new();
    make.add_table(Table::new(table.clone()));
    let mut unmake = Transaction::new();
    unmake.delete_table(&table);
    let tried = Kernel::open_in(space).and_then(|mut kernel| {
        kernel.commit(&make)?;
        kernel.commit(&unmake)
    });
    match tried {
        Ok(()) => node.good("kernel", "nftables supports tables of family bridge"),
        Err(error) => node.wrong(
            "kernel",
            format!(
                "nftables does not support tables of family bridge, so no Layer2 Network works: {}",
                chain(&error)
            ),
            "modprobe nf_tables; if that fails, use a kernel with CONFIG_NF_TABLES_BRIDGE",
        ),
    }
}

/// Sets a Network up in a namespace of its own, attaches a pod, and takes it away again.
async fn pod(space: &NetNs) -> Result<u32, Failure> {
    let handle = Handle::open(space)?;
    let other = NetNs::unnamed()?;
    let uplink = NewLink::veth(IfName::new("uplink")?, Peer::new(IfName::new("uplink")?, &other));
    let uplink = handle.create_link(&uplink)?.index;
    let own: IpNet = "192.0.2.1/24".parse()?;
    let lo = handle.index_of(&IfName::new("lo")?)?;
    handle.apply(&[
        Change::of(lo).up().into(),
        Change::of(uplink).up().into(),
        Op::create(LinkAddress::new(uplink, own)),
    ])?;
    let network = network()?;
    // The router directory is not used by the default Network.
    let mut config = Config::new("trial", vec![own.addr()], space.try_clone()?);
    config.router_directory = PathBuf::from("/proc/self/knit-doctor");
    let runtime = LinuxRuntime::new(config)?;
    runtime.setup_network(&network).await?;
    let inside = NetNs::unnamed()?;
    let address: IpAddr = "10.255.0.5".parse()?;
    let request = AttachRequest {
        pod: Pod { sandbox: "knit-doctor-trial".parse()?, namespace: None, name: None, uid: None },
        netns: PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), inside.as_fd().as_raw_fd())),
        network: network.name.clone(),
        interface: "eth0".parse()?,
        addresses: vec![Address { net: IpNet::from(address), gateway: network.gateway_for(address) }],
        mac: None,
        default_route: true,
        ports: Vec::new(),
        routes: Vec::new(),
        dns: Dns::default(),
    };
    // Attaching ends with an echo request to the pod.
    let attachment = runtime.attach(&request).await?;
    runtime.check(&request.pod, None, None).await?;
    runtime.detach(&request.pod, None).await?;
    Ok(attachment.mtu)
}

/// A default Network whose other node is reached through a tunnel, with masquerading.
fn network() -> Result<Network, Failure> {
    let block = |node: &str, host: &str, range: &str| -> Result<Block, Failure> {
        Ok(Block {
            node: node.into(),
            node_addresses: vec![host.parse()?],
            ipv4: Some(range.parse()?),
            ipv6: None,
        })
    };
    Ok(Network {
        name: "default".into(),
        id: NetworkId::new(1)?,
        topology: Topology::Layer3,
        subnets: vec![Subnet { cidr: "10.255.0.0/16".parse()?, gateway: Some("10.255.255.254".parse()?) }],
        mtu: None,
        primary: true,
        outside: true,
        not_outside: Vec::new(),
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: vec![
            block("trial", "192.0.2.1", "10.255.0.0/24")?,
            block("far", "198.51.100.1", "10.255.1.0/24")?,
        ],
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: None,
        parameters: serde_json::Map::new(),
    })
}
