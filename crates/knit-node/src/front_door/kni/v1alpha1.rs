//! `kni.v1alpha1`, as the agent serves it: the client names the pod, the agent decides the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use knit_api::kni::v1alpha1 as wire;
use knit_api::names;
use knit_ipam::Mac;
use knit_runtime::wire::{PROTOCOL_VERSION, attachment_to_wire, status_from_error};
use knit_runtime::{Attachment, Dns, InterfaceName, Pod, PortMapping, Protocol, SandboxId, feature};
use knit_types::NetworkName;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use wire::network_runtime_server::NetworkRuntime;
use wire::watch_event::Type;

use super::{invalid, port_number, same, to_status, unsupported};
use crate::core::Core;
use crate::front_door::annotation;
use crate::request::{Asked, Door as FrontDoor, Main, MainInterface, PodRequest, Start, Wish, Wishes};

/// The main interface's name if the client gives none.
pub(super) const MAIN: &str = "eth0";

/// What a client may rely on, with topologies, if a runtime has it.
const OF_RUNTIMES: [&str; 5] =
    [feature::IPV4, feature::IPV6, feature::STATIC_ADDRESS, feature::STATIC_MAC, feature::HOST_PORTS];

pub(super) struct Door {
    core: Core,
}

type Reply<T> = Result<Response<T>, Status>;

// === impl Door ===

impl Door {
    pub fn new(core: Core) -> Self {
        Self { core }
    }
}

#[tonic::async_trait]
impl NetworkRuntime for Door {
    type WatchStream = BoxStream<'static, Result<wire::WatchEvent, Status>>;

    async fn get_capabilities(
        &self,
        _: Request<wire::GetCapabilitiesRequest>,
    ) -> Reply<wire::GetCapabilitiesResponse> {
        let runtimes = self.core.runtimes().describe();
        let has = |f: &str| runtimes.iter().any(|r| r.features.iter().any(|have| have == f));
        let mut features: Vec<String> =
            feature::topologies().chain(OF_RUNTIMES).filter(|f| has(f)).map(str::to_owned).collect();
        features.extend([feature::WATCH, feature::COLLECT_GARBAGE].map(str::to_owned));
        Ok(Response::new(wire::GetCapabilitiesResponse {
            name: "knit.dev/node".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_version: PROTOCOL_VERSION.into(),
            features,
        }))
    }

    async fn setup_network(
        &self,
        _: Request<wire::SetupNetworkRequest>,
    ) -> Reply<wire::SetupNetworkResponse> {
        Err(unsupported("Networks are objects of the Kubernetes API: create one, and the agent sets it up"))
    }

    async fn remove_network(
        &self,
        _: Request<wire::RemoveNetworkRequest>,
    ) -> Reply<wire::RemoveNetworkResponse> {
        Err(unsupported("Networks are objects of the Kubernetes API: delete it there"))
    }

    async fn attach(&self, request: Request<wire::AttachRequest>) -> Reply<wire::AttachResponse> {
        let request = pod_request(request.into_inner())?;
        let deadline = Instant::now() + self.core.config().request_deadline;
        let attached = self.core.attach(request.clone(), deadline).await.map_err(|e| to_status(&e))?;
        same::ensure_as_asked(&self.core, &request)?;
        let attachments = attached.attachments.iter().map(attachment_to_wire).collect();
        Ok(Response::new(wire::AttachResponse { attachments }))
    }

    async fn detach(&self, request: Request<wire::DetachRequest>) -> Reply<wire::DetachResponse> {
        let request = request.into_inner();
        let sandbox = sandbox(request.pod.as_ref())?;
        let there: Vec<String> =
            self.core.list(Some(&sandbox)).iter().map(|a| a.interface.to_string()).collect();
        let named = |interface: &String| request.interfaces.contains(interface);
        if !request.interfaces.is_empty() && !there.iter().all(named) {
            if !there.iter().any(named) {
                return Ok(Response::new(wire::DetachResponse {}));
            }
            let parse =
                |name: &String| InterfaceName::new(name.as_str()).map_err(|e| status_from_error(&e.into()));
            let some: BTreeSet<InterfaceName> =
                request.interfaces.iter().map(parse).collect::<Result<_, _>>()?;
            self.core.detach_some(sandbox, some).await.map_err(|e| to_status(&e))?;
            return Ok(Response::new(wire::DetachResponse {}));
        }
        self.core.detach(sandbox, None).await.map_err(|e| to_status(&e))?;
        Ok(Response::new(wire::DetachResponse {}))
    }

    async fn update(&self, _: Request<wire::UpdateRequest>) -> Reply<wire::UpdateResponse> {
        Err(unsupported("attachments cannot be changed in place: detach and attach again"))
    }

    async fn check(&self, request: Request<wire::CheckRequest>) -> Reply<wire::CheckResponse> {
        let request = request.into_inner();
        let attached = self.core.check(sandbox(request.pod.as_ref())?).await.map_err(|e| to_status(&e))?;
        let known = attached.attachments.iter().any(|a| a.interface.as_str() == request.interface);
        if !request.interface.is_empty() && !known {
            let message = format!("the pod has no interface {:?}", request.interface);
            let error = knit_runtime::Error::new(knit_runtime::Reason::AttachmentNotFound, message);
            return Err(status_from_error(&error));
        }
        Ok(Response::new(wire::CheckResponse {}))
    }

    async fn list(&self, request: Request<wire::ListRequest>) -> Reply<wire::ListResponse> {
        let sandbox = match request.into_inner().sandbox_id {
            id if id.is_empty() => None,
            id => Some(SandboxId::new(id).map_err(|e| status_from_error(&e.into()))?),
        };
        let attachments = self.core.list(sandbox.as_ref()).iter().map(attachment_to_wire).collect();
        Ok(Response::new(wire::ListResponse { attachments }))
    }

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Reply<Self::WatchStream> {
        Ok(Response::new(changes(self.core.clone()).map(Ok).boxed()))
    }

    async fn collect_garbage(
        &self,
        request: Request<wire::CollectGarbageRequest>,
    ) -> Reply<wire::CollectGarbageResponse> {
        let keep: BTreeSet<String> = request.into_inner().sandbox_ids.into_iter().collect();
        let before = self.core.list(None);
        self.core.gc(FrontDoor::Kni, keep).await.map_err(|e| to_status(&e))?;
        let after = keyed(self.core.list(None));
        let gone = before.iter().filter(|a| !after.contains_key(&key(a)));
        Ok(Response::new(wire::CollectGarbageResponse { removed: gone.map(attachment_to_wire).collect() }))
    }

    async fn status(&self, _: Request<wire::StatusRequest>) -> Reply<wire::StatusResponse> {
        let problem = self.core.readiness().now().err();
        let attachments = self.core.list(None);
        let count = |name: &str| attachments.iter().filter(|a| a.network == name).count();
        let networks = self.core.networks().states().into_iter().map(|state| wire::NetworkStatus {
            ready: state.problem.is_none(),
            message: state.problem.map(|p| p.message).unwrap_or_default(),
            attachments: u32::try_from(count(&state.name)).unwrap_or(u32::MAX),
            name: state.name.into(),
        });
        Ok(Response::new(wire::StatusResponse {
            ready: problem.is_none(),
            message: problem.unwrap_or_default(),
            networks: networks.collect(),
        }))
    }
}

/// The sandbox of a call.
fn sandbox(pod: Option<&wire::Pod>) -> Result<SandboxId, Status> {
    let pod = pod.ok_or_else(|| invalid("pod is missing"))?;
    SandboxId::new(pod.sandbox_id.as_str()).map_err(|e| status_from_error(&e.into()))
}

/// An Attach as the core takes it. The first attachment is the pod's main interface; what the client asks for
/// stands in place of what the pod's annotations say about it, and needs the same rights.
fn pod_request(request: wire::AttachRequest) -> Result<PodRequest, Status> {
    let sandbox = sandbox(request.pod.as_ref())?;
    let pod = request.pod.unwrap_or_default();
    let some = |text: String| Some(text).filter(|t| !t.is_empty());
    let netns = PathBuf::from(&pod.netns_path);
    if !netns.is_absolute() {
        return Err(invalid(format!("pod.netns_path {:?} is not an absolute path", pod.netns_path)));
    }
    let (namespace, name) = match (some(pod.namespace), some(pod.name)) {
        (Some(namespace), Some(name)) => (Some(namespace), Some(name)),
        (None, None) => (None, None),
        _ => return Err(invalid("the pod has only one of namespace and name: set both or neither")),
    };
    let mut attachments = request.attachments.into_iter();
    let main = attachments.next().unwrap_or_default();
    check_routes(&main)?;
    let primary = some(main.network);
    let further = attachments.map(|further| asked(&further)).collect::<Result<Vec<_>, Status>>()?;
    if namespace.is_none() && (primary.is_some() || !further.is_empty()) {
        return Err(invalid(
            "a pod without namespace and name gets the default Network: do not name a \
        Network",
        ));
    }
    let primary = primary.map(|name| network_name(&name)).transpose()?;
    annotation::check_number(further.len()).map_err(invalid)?;
    let annotations: BTreeMap<String, String> = pod.annotations.into_iter().collect();
    let interface = if main.interface.is_empty() { MAIN } else { main.interface.as_str() };
    let dns = main.dns.unwrap_or_default();
    Ok(PodRequest {
        pod: Pod { sandbox, namespace, name, uid: some(pod.uid) },
        start: Some(Start {
            netns,
            main: Main::Ours(MainInterface {
                interface: InterfaceName::new(interface).map_err(|e| status_from_error(&e.into()))?,
                ports: main.ports.iter().map(port).collect::<Result<_, _>>()?,
                addresses: main.addresses.iter().map(address).collect::<Result<_, _>>()?,
                mac: mac(&main.mac)?,
                dns: Dns { servers: dns.servers, searches: dns.searches, options: dns.options },
            }),
        }),
        wishes: wishes(annotations, primary, further),
        claims: Vec::new(),
        door: FrontDoor::Kni,
    })
}

/// What the annotations ask for, and in their place what the client asks for itself. Where neither says
/// anything, the agent looks at the pod: never a guess.
fn wishes(
    mut annotations: BTreeMap<String, String>,
    primary: Option<NetworkName>,
    further: Vec<Asked>,
) -> Wishes {
    if annotations.is_empty() && primary.is_none() && further.is_empty() {
        return Wishes::AsThePodSays;
    }
    if primary.is_some() {
        annotations.remove(names::PRIMARY_ANNOTATION);
    }
    if !further.is_empty() {
        annotations.remove(names::NETWORKS_ANNOTATION);
    }
    match annotation::wishes(&annotations) {
        Wishes::Said(said) => Wishes::Said(Wish {
            primary: primary.or(said.primary),
            further: if further.is_empty() { said.further } else { further },
        }),
        wrong => wrong,
    }
}

fn asked(wanted: &wire::AttachmentRequest) -> Result<Asked, Status> {
    check_routes(wanted)?;
    if wanted.network.is_empty() {
        return Err(invalid("an additional attachment does not name a Network"));
    }
    let network = network_name(&wanted.network)?;
    if !wanted.ports.is_empty() {
        return Err(invalid("host ports lead to the pod's main interface: set them on the first attachment"));
    }
    if wanted.default_route {
        return Err(invalid("the default route uses the main interface: request it on the first attachment"));
    }
    let name = |name: &str| InterfaceName::new(name).map_err(|e| status_from_error(&e.into()));
    Ok(Asked {
        interface: Some(wanted.interface.as_str()).filter(|i| !i.is_empty()).map(name).transpose()?,
        addresses: wanted.addresses.iter().map(address).collect::<Result<_, _>>()?,
        mac: mac(&wanted.mac)?,
        default_route: false,
        network,
    })
}

fn network_name(text: &str) -> Result<NetworkName, Status> {
    annotation::network_name(text).map_err(|problem| invalid(format!("attachment.network: {problem}")))
}

fn mac(text: &str) -> Result<Option<Mac>, Status> {
    let mac = Some(text).filter(|text| !text.is_empty()).map(str::parse).transpose();
    mac.map_err(|e: knit_ipam::ParseMacError| invalid(format!("attachment.mac: {e}")))
}

fn check_routes(wanted: &wire::AttachmentRequest) -> Result<(), Status> {
    if wanted.routes.is_empty() {
        Ok(())
    } else {
        Err(invalid(
            "routes belong to the Network: set them \
    there",
        ))
    }
}

fn address(address: &wire::Address) -> Result<std::net::IpAddr, Status> {
    address.ip.parse().map_err(|_| invalid(format!("address.ip {:?} is not valid", address.ip)))
}

fn port(port: &wire::PortMapping) -> Result<PortMapping, Status> {
    Ok(PortMapping {
        protocol: match port.protocol() {
            wire::Protocol::Tcp => Protocol::Tcp,
            wire::Protocol::Udp => Protocol::Udp,
            wire::Protocol::Sctp => Protocol::Sctp,
            wire::Protocol::Unspecified => return Err(invalid("port.protocol is missing")),
        },
        host_port: port_number("port.host_port", port.host_port)?,
        container_port: port_number("port.container_port", port.container_port)?,
        host_ip: match port.host_ip.as_str() {
            "" => None,
            ip => Some(ip.parse().map_err(|_| invalid(format!("port.host_ip {ip:?} is not valid")))?),
        },
    })
}

type Key = (SandboxId, InterfaceName);

fn key(attachment: &Attachment) -> Key {
    (attachment.pod.sandbox.clone(), attachment.interface.clone())
}

fn keyed(attachments: Vec<Attachment>) -> BTreeMap<Key, Attachment> {
    attachments.into_iter().map(|a| (key(&a), a)).collect()
}

/// What is there, SYNCED, and then the difference whenever the core says that something changed.
fn changes(core: Core) -> impl futures::Stream<Item = wire::WatchEvent> + Send {
    let event = |kind: Type, attachment: Option<&Attachment>| wire::WatchEvent {
        r#type: kind.into(),
        attachment: attachment.map(attachment_to_wire),
    };
    // Subscribed before the first look, so that nothing is missed in between.
    let shown = core.shown();
    let there = keyed(core.list(None));
    let mut first: Vec<_> = there.values().map(|a| event(Type::Added, Some(a))).collect();
    first.push(event(Type::Synced, None));
    let later = stream::unfold((core, shown, there), move |(core, mut shown, before)| async move {
        // The core ends: so does the stream.
        shown.changed().await.ok()?;
        let now = keyed(core.list(None));
        let mut events = Vec::new();
        for (key, gone) in before.iter().filter(|(key, _)| !now.contains_key(*key)) {
            tracing::debug!(sandbox = %key.0, "notifying KNI clients that it is gone");
            events.push(event(Type::Removed, Some(gone)));
        }
        for (key, attachment) in &now {
            match before.get(key) {
                None => events.push(event(Type::Added, Some(attachment))),
                Some(old) if old != attachment => events.push(event(Type::Modified, Some(attachment))),
                Some(_) => {}
            }
        }
        Some((stream::iter(events), (core, shown, now)))
    });
    stream::iter(first).chain(later.flatten())
}
