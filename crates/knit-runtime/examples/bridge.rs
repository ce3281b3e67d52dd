//! A network runtime on a screen or two: every Network is a bridge in a namespace of its own, every pod a
//! port of it.
//!
//!     cargo run -p knit-runtime --example bridge -- /run/knit/runtimes/bridge.sock
//!
//! The agent finds it by that socket, and a NetworkClass with `runtime: example.com/bridge` uses it. What it
//! does not do: cross nodes, reach the outside, keep pods apart, remember anything after its end. Its
//! namespaces end with it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use knit_kernel::addr::Address as KernelAddress;
use knit_kernel::handle::Created;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::route::Route as KernelRoute;
use knit_kernel::{Handle, IfName, Mac as KernelMac, Mtu, NetNs, Op};
use knit_runtime::{
    AttachRequest, Attachment, Error, HostEnd, Info, InterfaceName, Network, NetworkName, NetworkStatus, Pod,
    Reason, Result, Route, Runtime, SandboxId, Status, Topology, feature, wire,
};

/// The runtime; all calls take turns.
#[derive(Default)]
pub struct BridgeRuntime(Mutex<State>);

#[derive(Default)]
struct State {
    networks: BTreeMap<NetworkName, Home>,
    made: BTreeMap<(SandboxId, InterfaceName), (AttachRequest, Attachment)>,
    ports: u32,
}

/// Where a Network lives.
struct Home {
    network: Network,
    namespace: NetNs,
    bridge: u32,
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let socket = std::env::args_os().nth(1).map(PathBuf::from);
    let Some(socket) = socket else {
        return Err(std::io::Error::other("give the path of a socket to listen on"));
    };
    let stop = async { drop(tokio::signal::ctrl_c().await) };
    wire::serve(&socket, Arc::new(BridgeRuntime::default()), stop).await
}

#[async_trait::async_trait]
impl Runtime for BridgeRuntime {
    async fn info(&self) -> Result<Info> {
        let features = [
            feature::NETWORK_SETUP,
            feature::LAYER2,
            feature::IPV4,
            feature::IPV6,
            feature::STATIC_ADDRESS,
            feature::STATIC_MAC,
            feature::MTU,
            feature::ROUTES,
            feature::COLLECT_GARBAGE,
        ];
        let version = env!("CARGO_PKG_VERSION").into();
        Ok(Info { name: "example.com/bridge".into(), version, features: features.map(Into::into).into() })
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        if network.topology != Topology::Layer2 {
            return Err(Error::new(
                Reason::Unsupported,
                "this runtime has bridges only: use topology Layer2",
            ));
        }
        let mut state = self.state();
        if let Some(home) = state.networks.get_mut(&network.name) {
            home.network = network.clone();
            return Ok(());
        }
        let namespace = NetNs::unnamed().map_err(failed)?;
        let handle = Handle::open(&namespace).map_err(failed)?;
        let bridge = NewLink { up: true, ..NewLink::bridge(name("bridge")?, Bridge::default()) };
        let bridge = handle.create_link(&bridge).map_err(failed)?.index;
        for subnet in &network.subnets {
            let Some(gateway) = subnet.gateway else { continue };
            let gateway = ipnet::IpNet::new(gateway, subnet.cidr.prefix_len()).map_err(failed)?;
            handle.ensure(KernelAddress::new(bridge, gateway)).map_err(failed)?;
        }
        state.networks.insert(network.name.clone(), Home { network: network.clone(), namespace, bridge });
        Ok(())
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        let mut state = self.state();
        if state.made.values().any(|(_, a)| a.network == name) {
            return Err(Error::new(Reason::InUse, "pods are attached: detach them first").on(name));
        }
        state.networks.remove(name);
        Ok(())
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        if request.addresses.is_empty() {
            return Err(Error::new(Reason::Invalid, "no address: the agent chooses one per family"));
        }
        let mut state = self.state();
        let key = (request.pod.sandbox.clone(), request.interface.clone());
        let pod = NetNs::open(&request.netns).map_err(|e| {
            Error::new(Reason::NamespaceGone, "the pod's namespace cannot be opened").because(e)
        })?;
        if let Some((before, attachment)) = state.made.get(&key) {
            let same_space = attachment.pod_netns_inode == pod.id().ino;
            return if before == request && same_space {
                Ok(attachment.clone())
            } else {
                Err(Error::new(Reason::Conflict, "the interface already exists and differs: detach it"))
            };
        }
        state.ports += 1;
        let port = state.ports;
        let Some(home) = state.networks.get(&request.network) else {
            return Err(Error::new(Reason::NetworkNotFound, "the Network is not set up").on(&request.network));
        };
        let attachment = home.plug(request, &pod, port)?;
        state.made.insert(key, (request.clone(), attachment.clone()));
        Ok(attachment)
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        let mut state = self.state();
        for key in state.keys(&pod.sandbox, interface) {
            state.unplug(&key)?;
        }
        Ok(())
    }

    async fn check(&self, pod: &Pod, _netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let state = self.state();
        let keys = state.keys(&pod.sandbox, interface);
        if keys.is_empty() {
            return Err(Error::new(Reason::AttachmentNotFound, "nothing is attached"));
        }
        keys.iter().try_for_each(|key| look(&state.made[key]).map_err(|e| e.at(key.1.as_str())))
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        let state = self.state();
        let wanted = state.made.iter().filter(|(key, _)| sandbox.is_none_or(|s| *s == key.0));
        Ok(wanted.map(|(_, (_, attachment))| attachment.clone()).collect())
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        let mut state = self.state();
        let unused: Vec<_> = state.made.keys().filter(|key| !keep.contains(&key.0)).cloned().collect();
        unused.iter().filter_map(|key| state.unplug(key).transpose()).collect()
    }

    async fn status(&self) -> Result<Status> {
        let state = self.state();
        let count = |name: &NetworkName| state.made.values().filter(|(_, a)| a.network == *name).count();
        let network = |name: &NetworkName| NetworkStatus {
            name: name.clone(),
            ready: true,
            message: String::new(),
            attachments: count(name) as u32,
        };
        Ok(Status {
            ready: true,
            message: String::new(),
            networks: state.networks.keys().map(network).collect(),
        })
    }
}

impl BridgeRuntime {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn keys(
        &self,
        sandbox: &SandboxId,
        interface: Option<&InterfaceName>,
    ) -> Vec<(SandboxId, InterfaceName)> {
        let wanted =
            |key: &&(SandboxId, InterfaceName)| key.0 == *sandbox && interface.is_none_or(|i| *i == key.1);
        self.made.keys().filter(wanted).cloned().collect()
    }

    fn unplug(&mut self, key: &(SandboxId, InterfaceName)) -> Result<Option<Attachment>> {
        let Some((_, attachment)) = self.made.get(key) else { return Ok(None) };
        if let Some(home) = self.networks.get(&attachment.network) {
            // Gone already, with the pod's namespace, is fine.
            Handle::open(&home.namespace)
                .and_then(|h| h.delete_link(attachment.host.index))
                .map_err(failed)?;
        }
        Ok(self.made.remove(key).map(|(_, attachment)| attachment))
    }
}

impl Home {
    fn plug(&self, request: &AttachRequest, pod: &NetNs, port: u32) -> Result<Attachment> {
        let mtu = Mtu::new(self.network.mtu.map_or(1500, u32::from)).map_err(failed)?;
        let mut peer = Peer::new(name(request.interface.as_str())?, pod);
        peer.mac = request.mac.map(|mac| KernelMac(mac.0));
        peer.mtu = Some(mtu);
        let mut link = NewLink::veth(name(&format!("port{port}"))?, peer);
        (link.mtu, link.master, link.up) = (Some(mtu), Some(self.bridge), true);
        let handle = Handle::open(&self.namespace).map_err(failed)?;
        let made = handle.create_link(&link).map_err(failed)?;
        self.configure(request, pod, made, port).inspect_err(|_| {
            // The first error is the one that helps; a port that stays is gone with the namespace.
            let _ = handle.delete_link(made.index);
        })
    }

    /// Everything inside the pod.
    fn configure(
        &self,
        request: &AttachRequest,
        pod: &NetNs,
        made: Created,
        port: u32,
    ) -> Result<Attachment> {
        let inside = Handle::open(pod).map_err(failed)?;
        let index = inside.index_of(&name(request.interface.as_str())?).map_err(failed)?;
        let mut routes: Vec<Route> = self.network.routes.iter().chain(&request.routes).copied().collect();
        if request.default_route {
            let all = |a: &knit_runtime::Address| if a.net.addr().is_ipv4() { "0.0.0.0/0" } else { "::/0" };
            let defaults =
                request.addresses.iter().map(|a| Ok(Route { destination: all(a).parse()?, via: a.gateway }));
            routes.extend(defaults.collect::<Result<Vec<_>, ipnet::AddrParseError>>().map_err(failed)?);
        }
        let mut ops: Vec<Op<'_>> = vec![Change::of(index).up().into()];
        ops.extend(request.addresses.iter().map(|a| Op::create(KernelAddress::new(index, a.net))));
        for route in &mut routes {
            route.via = route.via.or_else(|| self.network.gateway_for(route.destination.addr()));
            let kernel = KernelRoute::to(route.destination).dev(index);
            ops.push(Op::create(route.via.map_or(kernel, |via| kernel.via(via))));
        }
        inside.apply(&ops).map_err(failed)?;
        let link = inside.link(index).map_err(failed)?.ok_or_else(|| failed("the interface went away"))?;
        let fd = self.namespace.as_fd().as_raw_fd();
        Ok(Attachment {
            pod: request.pod.clone(),
            network: request.network.clone(),
            interface: request.interface.clone(),
            addresses: request.addresses.clone(),
            mac: link.mac.unwrap_or(KernelMac::ZERO),
            mtu: link.mtu,
            routes,
            dns: request.dns.clone(),
            host: HostEnd {
                name: format!("port{port}"),
                index: made.index,
                netns_path: Some(
                    Path::new("/proc").join(std::process::id().to_string()).join(format!("fd/{fd}")),
                ),
                netns_inode: self.namespace.id().ino,
            },
            pod_netns_inode: pod.id().ino,
            ports: Vec::new(),
        })
    }
}

/// Whether an interface is as it was made.
fn look((request, made): &(AttachRequest, Attachment)) -> Result<()> {
    let damaged = |what: String| Error::new(Reason::Damaged, format!("{what}: detach and attach again"));
    let pod =
        NetNs::open(&request.netns).map_err(|e| damaged("the pod's namespace is gone".into()).because(e))?;
    if pod.id().ino != made.pod_netns_inode {
        return Err(Error::new(Reason::NamespaceGone, "another namespace is at the pod's path: detach it"));
    }
    let inside = Handle::open(&pod).map_err(failed)?;
    let link = inside.link_by_name(&name(request.interface.as_str())?).map_err(failed)?;
    let link =
        link.filter(|l| l.up && l.running).ok_or_else(|| damaged("the interface is gone or down".into()))?;
    let there = inside.addresses(Some(link.index)).map_err(failed)?;
    match request.addresses.iter().find(|a| !there.iter().any(|t| t.address == a.net)) {
        Some(missing) => Err(damaged(format!("the interface has lost its address {}", missing.net))),
        None => Ok(()),
    }
}

fn name(text: &str) -> Result<IfName> {
    IfName::new(text).map_err(|e| Error::new(Reason::Invalid, "no interface can have that name").because(e))
}

fn failed(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(Reason::Internal, "the kernel refused").because(cause)
}
