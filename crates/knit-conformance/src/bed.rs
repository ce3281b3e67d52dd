//! What the cases stand on: the runtime, Networks of the suite's own, and pods in namespaces that it makes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use ipnet::{Ipv4Net, Ipv6Net};
use knit_api::kni::v1alpha1 as wire;
use knit_kernel::addr::Address as KernelAddress;
use knit_kernel::link::{Change, Link, Macvlan, MacvlanMode, NewLink};
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_runtime::wire::RemoteRuntime;
use knit_runtime::{
    Address, AttachRequest, Attachment, Block, Dns, Info, InterfaceName, Network, NetworkId, NetworkName,
    Pod, Route, Runtime, SandboxId, Subnet, Topology, Underlay, UnderlayKind, UnderlayMode, feature,
};
use knit_types::sync::Locked;
use knit_types::{ByFamily as _, Family};
use tonic::transport::{Channel, Endpoint};
use wire::network_runtime_client::NetworkRuntimeClient;

use crate::Error;
use crate::case::{Problem, Profile, chain};

/// Pods' numbers start here in every block of the suite, and there are this many.
const FIRST_POD: u32 = 10;
const PODS: u32 = 200;

/// What the suite is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// The runtime's socket.
    pub socket: PathBuf,
    /// How long a call may take.
    pub deadline: Duration,
    /// Where pods' namespaces are mounted; the runtime must see them at the same path.
    pub directory: PathBuf,
    /// The node's name, as the runtime knows it.
    pub node: String,
    /// The node's addresses, for blocks and for ports of the node.
    pub node_addresses: Vec<IpAddr>,
    /// A link of the node for Underlay Networks: none of its users has addresses of the suite's.
    pub underlay_parent: Option<String>,
    /// A Network that is there, for a runtime that does not set up any.
    pub network: Option<ExistingNetwork>,
}

/// A Network that is set up already.
#[derive(Clone, Debug)]
pub struct ExistingNetwork {
    /// The Network's name.
    pub name: NetworkName,
    /// Addresses that nobody uses, with prefix and gateway, at least [`ADDRESSES`] of each family that it
    /// has. They say what the Network is, too: in a routed one an address is alone in its prefix.
    pub addresses: Vec<Address>,
}

/// How many addresses per family an existing Network must have free: as many pods as are attached at once,
/// and more.
pub const ADDRESSES: usize = 10;

/// What the cases stand on.
pub(crate) struct Bed {
    pub options: Options,
    pub runtime: RemoteRuntime,
    pub client: NetworkRuntimeClient<Channel>,
    info: Info,
    run: u32,
    next: AtomicU32,
    pods: Mutex<Vec<(Pod, PathBuf)>>,
    networks: Mutex<BTreeMap<NetworkName, Network>>,
}

/// A pod of the suite: a namespace, and nothing in it.
pub(crate) struct TestPod {
    pub pod: Pod,
    pub path: PathBuf,
    pub space: NetNs,
    number: u32,
}

// === impl Bed ===

impl Bed {
    pub async fn new(options: Options) -> Result<Self, Error> {
        let socket = options.socket.display().to_string();
        let who = |source| Error::Runtime { socket: socket.clone(), source };
        let runtime = RemoteRuntime::new(&options.socket, options.deadline).map_err(who)?;
        let info = runtime.info().await.map_err(who)?;
        let endpoint = Endpoint::from_shared(format!("unix://{socket}")).map_err(|e| {
            who(knit_runtime::Error::new(knit_runtime::Reason::Invalid, "no socket's path").because(e))
        })?;
        let client = NetworkRuntimeClient::new(endpoint.timeout(options.deadline).connect_lazy());
        let sets_up = info.features.iter().any(|f| f == feature::NETWORK_SETUP);
        match &options.network {
            None if !sets_up => return Err(Error::NoNetwork),
            // Its Networks are removed on the way: never one of somebody else.
            Some(existing) if sets_up => return Err(Error::SetsUp { network: existing.name.clone() }),
            Some(existing) => existing.check()?,
            None => {}
        }
        let has = |feature: &str| info.features.iter().any(|f| f == feature);
        let mut announced = Topology::ALL.into_iter().filter(|topology| has(topology.as_str())).peekable();
        let only_on_links = announced.peek().is_some() && announced.all(Topology::is_on_host_link);
        if only_on_links && options.network.is_none() && options.underlay_parent.is_none() {
            return Err(Error::NoParent);
        }
        let directory = options.directory.display().to_string();
        std::fs::create_dir_all(&options.directory)
            .map_err(|source| Error::Directory { directory: directory.clone(), source })?;
        // Whether namespaces can be made is a matter of this machine, not of the runtime.
        let probe = options.directory.join(format!("probe-{}", std::process::id()));
        NetNs::create(&probe)
            .and_then(|_| NetNs::delete(&probe))
            .map_err(|source| Error::Namespaces { directory, source })?;
        Ok(Self {
            options,
            runtime,
            client,
            info,
            run: std::process::id(),
            next: AtomicU32::new(0),
            pods: Mutex::default(),
            networks: Mutex::default(),
        })
    }

    pub fn info(&self) -> &Info {
        &self.info
    }

    pub fn has(&self, feature: &str) -> bool {
        self.info.features.iter().any(|f| f == feature)
    }

    pub fn announces(&self, profile: Profile) -> bool {
        profile.feature().is_none_or(|feature| self.has(feature))
    }

    /// The Network that most cases use: set up if the runtime does that, the existing one otherwise.
    pub async fn network(&self) -> Result<Network, Problem> {
        self.network_of(self.topology()).await
    }

    /// What the Network of most cases is.
    pub fn topology(&self) -> Topology {
        match &self.options.network {
            Some(existing) => existing.topology(),
            None => {
                let mut announced = Topology::ALL.into_iter().filter(|topology| self.has(topology.as_str()));
                announced.next().unwrap_or_default()
            }
        }
    }

    pub async fn network_of(&self, topology: Topology) -> Result<Network, Problem> {
        let name = format!("knit-conformance-{}", topology.as_str().to_lowercase());
        let name = NetworkName::new(name).expect("topologies have short names");
        let number = u8::try_from(topology.number()).expect("there are few topologies");
        self.network_with(name, number, topology, None).await
    }

    /// Sets a Network up. Each has a number of its own, which its addresses follow from: those of most cases
    /// have their topologies' numbers, others begin at 33.
    pub async fn network_with(
        &self,
        name: impl Into<NetworkName>,
        number: u8,
        topology: Topology,
        mtu: Option<u16>,
    ) -> Result<Network, Problem> {
        if let Some(existing) = &self.options.network {
            return existing_network(existing, topology);
        }
        self.set_up(self.describe(name, number, topology, mtu)?).await
    }

    /// Sets a Network up, unless it is already.
    pub async fn set_up(&self, network: Network) -> Result<Network, Problem> {
        if self.networks().get(&network.name) != Some(&network) {
            self.runtime.setup_network(&network).await?;
            self.networks().insert(network.name.clone(), network.clone());
        }
        Ok(network)
    }

    /// A Network as an agent would describe it, with one block, which is this node's.
    pub fn describe(
        &self,
        name: impl Into<NetworkName>,
        number: u8,
        topology: Topology,
        mtu: Option<u16>,
    ) -> Result<Network, Problem> {
        let v4 = self.has(feature::IPV4).then(|| Ipv4Addr::new(198, 18, number * 2, 0));
        let v6 = self
            .has(feature::IPV6)
            .then(|| Ipv6Addr::new(0xfd4b, 0x6e69, 0x7400, u16::from(number), 0, 0, 0, 0));
        let underlay = match (topology.is_on_host_link(), &self.options.underlay_parent) {
            (false, _) => None,
            (true, Some(parent)) => Some(Underlay {
                parent: parent.clone(),
                mode: UnderlayMode::Bridge,
                kind: UnderlayKind::Macvlan,
                duplicate_check: Duration::ZERO,
            }),
            (true, None) => {
                return Err(Problem::Skipped("no link of the node is named: see --underlay-parent".into()));
            }
        };
        let fail = |e: ipnet::PrefixLenError| Problem::Failed(e.to_string());
        let (mut subnets, mut router_addresses) = (Vec::new(), Vec::new());
        let mut block = Block {
            node: self.options.node.clone(),
            node_addresses: self.options.node_addresses.clone(),
            ipv4: None,
            ipv6: None,
        };
        if let Some(v4) = v4 {
            let at = |n| Ipv4Addr::from_bits(v4.to_bits() + n);
            subnets.push(Subnet {
                cidr: Ipv4Net::new(v4, 23).map_err(fail)?.into(),
                gateway: Some(at(1).into()),
            });
            block.ipv4 = Some(Ipv4Net::new(at(0x100), 24).map_err(fail)?);
            router_addresses.push(at(0x101).into());
        }
        if let Some(v6) = v6 {
            let at = |n| Ipv6Addr::from_bits(v6.to_bits() + n);
            subnets.push(Subnet {
                cidr: Ipv6Net::new(v6, 64).map_err(fail)?.into(),
                gateway: Some(at(1).into()),
            });
            block.ipv6 = Some(Ipv6Net::new(at(0x100), 120).map_err(fail)?);
            router_addresses.push(at(0x101).into());
        }
        if !topology.has_router() {
            router_addresses.clear();
        }
        Ok(Network {
            name: name.into(),
            id: NetworkId::new(0x00c0_0000 + u32::from(number))?,
            topology,
            subnets,
            mtu,
            primary: false,
            outside: false,
            not_outside: Vec::new(),
            cluster_service_ips: Vec::new(),
            routes: Vec::new(),
            blocks: vec![block],
            router_addresses,
            announced: Vec::new(),
            underlay,
            parameters: Default::default(),
        })
    }

    /// Takes a Network away again.
    pub async fn remove_network(&self, name: &NetworkName) -> knit_runtime::Result<()> {
        self.runtime.remove_network(name).await?;
        self.networks().remove(name);
        Ok(())
    }

    /// A new pod, with nothing attached.
    pub fn pod(&self) -> Result<TestPod, Problem> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let sandbox = format!("knit-conformance-{}-{number}", self.run);
        let path = self.options.directory.join(&sandbox);
        let space = NetNs::create(&path)?;
        let pod = Pod {
            sandbox: SandboxId::new(sandbox.as_str())?,
            namespace: Some("knit-conformance".into()),
            name: Some(format!("pod-{number}")),
            uid: Some(sandbox),
        };
        self.lock().push((pod.clone(), path.clone()));
        Ok(TestPod { pod, path, space, number: number % PODS })
    }

    /// A new pod with one interface.
    pub async fn attached(&self, network: &Network) -> Result<(TestPod, Attachment), Problem> {
        let pod = self.pod()?;
        let attachment = self.runtime.attach(&self.request(&pod, network)).await?;
        Ok((pod, attachment))
    }

    /// What an agent would ask for.
    pub fn request(&self, pod: &TestPod, network: &Network) -> AttachRequest {
        AttachRequest {
            pod: pod.pod.clone(),
            netns: pod.path.clone(),
            network: network.name.clone(),
            interface: eth0(),
            addresses: self.addresses(pod.number, network),
            mac: None,
            default_route: true,
            ports: Vec::new(),
            routes: Vec::new(),
            dns: Dns::default(),
        }
    }

    /// The addresses of a number in a Network.
    pub fn addresses(&self, number: u32, network: &Network) -> Vec<Address> {
        if let Some(existing) = &self.options.network {
            let of = |family| {
                let all: Vec<_> = existing.addresses.of_family(family).collect();
                (!all.is_empty()).then(|| *all[number as usize % all.len()])
            };
            return Family::ALL.into_iter().filter_map(of).collect();
        }
        let at = |subnet: &Subnet| {
            let index = 0x100 + FIRST_POD + number % PODS;
            let address = match subnet.cidr.addr() {
                IpAddr::V4(v4) => IpAddr::from(Ipv4Addr::from_bits(v4.to_bits() + index)),
                IpAddr::V6(v6) => IpAddr::from(Ipv6Addr::from_bits(v6.to_bits() + u128::from(index))),
            };
            network.pod_address(address).expect("the suite's subnets are large enough for its pods")
        };
        network.subnets.iter().map(at).collect()
    }

    /// A host on the link of an Underlay Network that is no pod, with addresses that no pod has.
    pub fn neighbour(&self, network: &Network) -> Result<(TestPod, Vec<Address>), Problem> {
        let parent = network.underlay.as_ref().map(|underlay| underlay.parent.as_str());
        let node = Handle::open(&NetNs::current()?)?;
        let parent = node.index_of(&IfName::new(parent.unwrap_or_default())?)?;
        let host = self.pod()?;
        let child = Macvlan { parent, mode: MacvlanMode::Bridge, namespace: Some(&host.space) };
        let link = match node.create_link(&NewLink::macvlan(IfName::new("eth0")?, child)) {
            Ok(created) => created.index,
            // The runtime has it in another way, as ipvlan or as a port of a bridge.
            Err(error) if error.is_busy() => {
                return Err(Problem::Skipped(format!("no host of the suite's can be there: {error}")));
            }
            Err(error) => return Err(error.into()),
        };
        let addresses = self.addresses(host.number, network);
        let mut ops: Vec<Op<'_>> = vec![Change::of(link).up().into()];
        ops.extend(addresses.iter().map(|address| Op::create(KernelAddress::new(link, address.net))));
        Handle::open(&host.space)?.apply(&ops)?;
        Ok((host, addresses))
    }

    /// Addresses that no pod of the suite has.
    pub fn other_addresses(&self, network: &Network) -> Vec<Address> {
        self.addresses(self.next.fetch_add(1, Ordering::Relaxed), network)
    }

    /// Takes all pods away.
    pub async fn tidy(&self) -> Result<(), Problem> {
        let pods = std::mem::take(&mut *self.lock());
        let mut result = Ok(());
        for (pod, path) in pods {
            if let Err(error) = self.runtime.detach(&pod, None).await {
                let words = format!("after it, pod {} cannot be detached: {}", pod.sandbox, chain(&error));
                result = Err(Problem::Failed(words));
            }
            if let Err(error) = NetNs::delete(&path) {
                result = result.and(Err(error.into()));
            }
        }
        result
    }

    /// Takes the Networks away. What cannot be taken away was a case's finding already.
    pub async fn close(self) {
        let names: Vec<NetworkName> = self.networks().keys().cloned().collect();
        for name in names {
            let _ = self.runtime.remove_network(&name).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Pod, PathBuf)>> {
        self.pods.locked()
    }

    fn networks(&self) -> MutexGuard<'_, BTreeMap<NetworkName, Network>> {
        self.networks.locked()
    }
}

// === impl TestPod ===

impl TestPod {
    /// An interface, if it is there.
    pub fn link(&self, interface: &InterfaceName) -> Result<Option<Link>, Problem> {
        let name = IfName::new(interface.as_str())?;
        Ok(Handle::open(&self.space)?.link_by_name(&name)?)
    }

    /// What an attachment says must be in the namespace, is.
    pub fn has(&self, attachment: &Attachment) -> Result<(), Problem> {
        let fail = |words: String| Err(Problem::Failed(words));
        let name = &attachment.interface;
        let Some(link) = self.link(name)? else { return fail(format!("there is no {name} in the pod")) };
        if !link.up {
            return fail(format!("{name} is down"));
        }
        if link.mac.map(|m| m.0) != Some(attachment.mac.0) {
            return fail(format!("{name} has MAC {:?}, but the answer has {}", link.mac, attachment.mac));
        }
        if link.mtu != attachment.mtu {
            return fail(format!("{name} has MTU {}, but the answer has {}", link.mtu, attachment.mtu));
        }
        let there = Handle::open(&self.space)?.addresses(Some(link.index))?;
        for address in &attachment.addresses {
            match there.iter().find(|a| a.address == address.net) {
                Some(found) if found.tentative => {
                    return fail(format!("{} of {name} is still tentative", address.net));
                }
                Some(_) => {}
                None => return fail(format!("{name} does not have address {}", address.net)),
            }
        }
        let local = |ip: IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let asked = |ip: IpAddr| attachment.addresses.iter().any(|a| a.net.addr() == ip);
        match there.iter().map(|a| a.address.addr()).find(|ip| !local(*ip) && !asked(*ip)) {
            Some(extra) => fail(format!("{name} also has address {extra}, which the answer does not have")),
            None => Ok(()),
        }
    }

    /// Whether a route is in the namespace.
    pub fn has_route(&self, route: &Route) -> Result<bool, Problem> {
        let routes = Handle::open(&self.space)?.routes(&knit_kernel::handle::RouteFilter::default())?;
        Ok(routes
            .iter()
            .any(|r| r.destination == route.destination && (route.via.is_none() || r.gateway == route.via)))
    }
}

/// The usual interface.
pub(crate) fn eth0() -> InterfaceName {
    InterfaceName::new("eth0").expect("a name")
}

/// The first address of a family.
pub(crate) fn address_of(attachment: &Attachment, family: Family) -> Option<IpAddr> {
    attachment.addresses.first_of(family).map(|address| address.net.addr())
}

// === impl ExistingNetwork ===

impl ExistingNetwork {
    /// Whether it has addresses enough.
    fn check(&self) -> Result<(), Error> {
        for family in Family::ALL {
            let given: BTreeSet<IpAddr> = self.addresses.of_family(family).map(|a| a.net.addr()).collect();
            if (1..ADDRESSES).contains(&given.len()) {
                return Err(Error::FewAddresses {
                    network: self.name.clone(),
                    family: family.as_str(),
                    given: given.len(),
                });
            }
        }
        let routed = |a: &&Address| a.net.prefix_len() == a.net.max_prefix_len();
        let of_routed = self.addresses.iter().filter(routed).count();
        if self.addresses.is_empty() || (of_routed != 0 && of_routed != self.addresses.len()) {
            return Err(Error::MixedAddresses { network: self.name.clone() });
        }
        Ok(())
    }

    fn topology(&self) -> Topology {
        let routed = self.addresses.iter().all(|a| a.net.prefix_len() == a.net.max_prefix_len());
        if routed { Topology::Layer3 } else { Topology::Layer2 }
    }
}

fn existing_network(existing: &ExistingNetwork, topology: Topology) -> Result<Network, Problem> {
    if existing.topology() != topology {
        let words = format!("Network {} is not of topology {topology:?}", existing.name);
        return Err(Problem::Skipped(words));
    }
    Ok(Network {
        name: existing.name.clone(),
        id: NetworkId::new(1)?,
        topology,
        subnets: Vec::new(),
        mtu: None,
        primary: false,
        outside: false,
        not_outside: Vec::new(),
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: Vec::new(),
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: None,
        parameters: Default::default(),
    })
}
