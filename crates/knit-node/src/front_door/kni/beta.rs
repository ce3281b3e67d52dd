//! `kni.KNI`, the service of the first proof of concept, for those who built on it.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use knit_api::kni::beta as wire;
use knit_runtime::wire::status_from_error;
use knit_runtime::{Attachment, Dns, InterfaceName, Pod, PortMapping, Protocol, Reason, SandboxId};
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use wire::kni_server::Kni;

use super::pods::{CalledPod, Note, Pods};
use super::v1alpha1::MAIN;
use super::{invalid, port_number, same, to_status};
use crate::core::Core;
use crate::front_door::annotation;
use crate::request::{Door as FrontDoor, Main, MainInterface, PodRequest, Start, Wishes};

pub(super) struct Door {
    core: Core,
    pods: Pods,
}

type Reply<T> = Result<Response<T>, Status>;

// === impl Door ===

impl Door {
    pub fn new(core: Core, pods: Pods) -> Self {
        Self { core, pods }
    }

    /// Whose namespace a call is about. A sandbox that is attached says where it is.
    fn which(
        &self,
        namespace: String,
        name: String,
        sandbox: &str,
        extradata: &HashMap<String, String>,
        path: String,
    ) -> CalledPod {
        let attached = || {
            let sandbox = SandboxId::new(sandbox).ok()?;
            self.core
                .sandboxes()
                .books()
                .get(&sandbox)
                .map(|record| record.netns().path.display().to_string())
        };
        let path = Some(path).filter(|path| !path.is_empty()).or_else(attached);
        CalledPod { namespace, name, uid: extradata.get("uid").cloned(), path }
    }

    /// The sandboxes that are attached in a namespace.
    fn sandboxes_in(&self, path: &Path) -> Vec<SandboxId> {
        let books = self.core.sandboxes().books();
        let there = books.records().filter(|record| record.netns().path == path);
        there.map(|record| record.sandbox().clone()).collect()
    }

    /// The uid of the pod that has a name now, as far as its object says. One that is on its way out has it
    /// no longer.
    fn live_uid(&self, which: &CalledPod) -> Option<String> {
        let world = self.core.world().get();
        let pod = world.pods.get(&(which.namespace.clone(), which.name.clone()));
        pod.filter(|pod| !pod.ending).and_then(|pod| pod.uid.clone())
    }

    /// Of several namespaces of one name, those that an attach can be about: not another sandbox's; and if
    /// one is that of the pod that has the name now, that one.
    fn meant_by_attach(&self, mut notes: Vec<Note>, sandbox: &SandboxId, which: &CalledPod) -> Vec<Note> {
        if notes.len() > 1 {
            notes.retain(|note| {
                note.sandbox.as_deref().is_none_or(|noted| noted == sandbox.as_str())
                    && self.sandboxes_in(&note.path).iter().all(|s| s == sandbox)
            });
        }
        if notes.len() > 1
            && let Some(uid) = self.live_uid(which)
            && notes.iter().any(|note| note.uid == uid)
        {
            notes.retain(|note| note.uid == uid);
        }
        notes
    }

    /// Of several namespaces of one name, those that a delete can be about: the one where its sandbox was;
    /// and not that of the pod that has the name now.
    fn meant_by_delete(&self, mut notes: Vec<Note>, sandbox: &str, which: &CalledPod) -> Vec<Note> {
        if notes.len() > 1 && notes.iter().any(|note| note.sandbox.as_deref() == Some(sandbox)) {
            notes.retain(|note| note.sandbox.as_deref() == Some(sandbox));
        }
        if notes.len() > 1
            && let Some(uid) = self.live_uid(which)
        {
            notes.retain(|note| note.uid != uid);
        }
        notes
    }

    /// Namespaces are made and mounted by calls that block.
    async fn with_pods<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Pods) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Status> {
        let pods = self.pods.clone();
        let failed = |reason, message: String| status_from_error(&knit_runtime::Error::new(reason, message));
        match tokio::task::spawn_blocking(move || work(&pods)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => Err(invalid(error.to_string())),
            Ok(Err(error)) => Err(failed(Reason::Internal, format!("the pod's network namespace: {error}"))),
            Err(error) => Err(failed(Reason::Internal, format!("the node agent failed: {error}"))),
        }
    }
}

#[tonic::async_trait]
impl Kni for Door {
    async fn create_network(
        &self,
        request: Request<wire::CreateNetworkRequest>,
    ) -> Reply<wire::CreateNetworkResponse> {
        let r = request.into_inner();
        let create = move |pods: &Pods| pods.create(&r.namespace, &r.name, &r.uid, &r.netns_path_prefix);
        let path = self.with_pods(create).await?;
        let netns_path = path.display().to_string();
        // Clients of the proof of concept hand extradata on as it is.
        let extradata = HashMap::from([("netns".to_owned(), netns_path.clone())]);
        Ok(Response::new(wire::CreateNetworkResponse { netns_path, extradata }))
    }

    async fn delete_network(
        &self,
        request: Request<wire::DeleteNetworkRequest>,
    ) -> Reply<wire::DeleteNetworkResponse> {
        let r = request.into_inner();
        let which = self.which(r.namespace, r.name, &r.id, &r.extradata, r.netns_path);
        let (notes, which) = self.with_pods(move |pods| Ok((pods.matching(&which)?, which))).await?;
        let Some(note) = only_one(self.meant_by_delete(notes, &r.id, &which), &which)? else {
            return Ok(Response::new(wire::DeleteNetworkResponse {}));
        };
        // What is attached there ends with it: nobody will call for it any more.
        for sandbox in self.sandboxes_in(&note.path) {
            self.core.detach(sandbox, None).await.map_err(|e| to_status(&e))?;
        }
        self.with_pods(move |pods| pods.delete(&note)).await?;
        Ok(Response::new(wire::DeleteNetworkResponse {}))
    }

    async fn attach_interface(
        &self,
        request: Request<wire::AttachInterfaceRequest>,
    ) -> Reply<wire::AttachInterfaceResponse> {
        let r = request.into_inner();
        let sandbox = SandboxId::new(r.id.as_str()).map_err(|e| status_from_error(&e.into()))?;
        let isolation = r.isolation.map(|i| i.path).filter(|path| !path.is_empty());
        let said = isolation.or_else(|| r.extradata.get("netns").cloned()).unwrap_or_default();
        let which = self.which(r.namespace.clone(), r.name.clone(), &r.id, &r.extradata, said.clone());
        let (notes, which) = self.with_pods(move |pods| Ok((pods.matching(&which)?, which))).await?;
        let note = only_one(self.meant_by_attach(notes, &sandbox, &which), &which)?;
        let netns = match (&note, said.as_str()) {
            (_, path) if path.starts_with('/') => path.into(),
            (Some(note), "") => note.path.clone(),
            (None, "") => {
                return Err(invalid(
                    "the pod's network namespace is missing: set isolation.path or extradata[\"netns\"], \
                    or call CreateNetwork first",
                ));
            }
            (_, path) => return Err(invalid(format!("network namespace {path:?} is not an absolute path"))),
        };
        if r.namespace.is_empty() != r.name.is_empty() {
            return Err(invalid("the pod has only one of namespace and name: set both or neither"));
        }
        let some = |text: String| Some(text).filter(|t| !t.is_empty());
        let dns = r.dns_config.unwrap_or_default();
        let request = PodRequest {
            pod: Pod {
                sandbox,
                namespace: some(r.namespace),
                name: some(r.name),
                uid: note.as_ref().map(|n| n.uid.clone()).or_else(|| r.extradata.get("uid").cloned()),
            },
            start: Some(Start {
                netns,
                main: Main::Ours(MainInterface {
                    interface: InterfaceName::new(MAIN).map_err(|e| status_from_error(&e.into()))?,
                    ports: r
                        .port_mappings
                        .iter()
                        .filter(|p| p.host_port != 0)
                        .map(port)
                        .collect::<Result<_, _>>()?,
                    addresses: Vec::new(),
                    mac: None,
                    dns: Dns { servers: dns.servers, searches: dns.searches, options: dns.options },
                }),
            }),
            wishes: if r.annotations.is_empty() {
                Wishes::AsThePodSays
            } else {
                annotation::wishes(&r.annotations.into_iter().collect())
            },
            claims: Vec::new(),
            door: FrontDoor::Kni,
        };
        // Which pod of that name a sandbox is of must be known also once it is detached.
        if let Some(note) = note {
            let id = r.id.clone();
            self.with_pods(move |pods| pods.claim(&note, &id)).await?;
        }
        let deadline = Instant::now() + self.core.config().request_deadline;
        let attached = self.core.attach(request.clone(), deadline).await.map_err(|e| to_status(&e))?;
        same::ensure_as_asked(&self.core, &request)?;
        let ipconfigs = ipconfigs(&attached.attachments);
        Ok(Response::new(wire::AttachInterfaceResponse { ipconfigs, extradata: HashMap::new() }))
    }

    async fn detach_interface(
        &self,
        request: Request<wire::DetachInterfaceRequest>,
    ) -> Reply<wire::DetachInterfaceResponse> {
        let sandbox = SandboxId::new(request.into_inner().id).map_err(|e| status_from_error(&e.into()))?;
        self.core.detach(sandbox, None).await.map_err(|e| to_status(&e))?;
        Ok(Response::new(wire::DetachInterfaceResponse {}))
    }

    async fn query_pod_network(
        &self,
        request: Request<wire::QueryPodNetworkRequest>,
    ) -> Reply<wire::QueryPodNetworkResponse> {
        let sandbox = SandboxId::new(request.into_inner().id).map_err(|e| status_from_error(&e.into()))?;
        let attachments = self.core.list(Some(&sandbox));
        if attachments.is_empty() {
            let message = format!("sandbox {sandbox} has no interfaces: attach it first");
            return Err(status_from_error(&knit_runtime::Error::new(Reason::AttachmentNotFound, message)));
        }
        let ipconfigs = ipconfigs(&attachments);
        Ok(Response::new(wire::QueryPodNetworkResponse { ipconfigs, extradata: HashMap::new() }))
    }

    async fn setup_node_network(
        &self,
        _: Request<wire::SetupNodeNetworkRequest>,
    ) -> Reply<wire::SetupNodeNetworkResponse> {
        // The agent sets its node up by itself; a client that asks for it hears whether it is.
        match self.core.readiness().now() {
            Ok(()) => Ok(Response::new(wire::SetupNodeNetworkResponse {})),
            Err(problem) => Err(status_from_error(&knit_runtime::Error::new(Reason::NotReady, problem))),
        }
    }

    async fn query_node_networks(
        &self,
        _: Request<wire::QueryNodeNetworksRequest>,
    ) -> Reply<wire::QueryNodeNetworksResponse> {
        let network = |state: crate::networks::NetworkState| wire::Network {
            ready: state.problem.is_none(),
            extradata: state.problem.map(|p| ("message".to_owned(), p.message)).into_iter().collect(),
            name: state.name.into(),
        };
        let networks = self.core.networks().states().into_iter().map(network).collect();
        Ok(Response::new(wire::QueryNodeNetworksResponse { networks, extradata: HashMap::new() }))
    }
}

/// The namespace that a call is about, if there is one.
fn only_one(mut notes: Vec<Note>, which: &CalledPod) -> Result<Option<Note>, Status> {
    if notes.len() > 1 {
        // Two pods of one name, one of them on its way out: which one is meant is not guessed.
        let mut uids: Vec<&str> = notes.iter().map(|note| note.uid.as_str()).collect();
        uids.sort_unstable();
        return Err(invalid(format!(
            "pods {} all have the name {}/{} and a network namespace: identify one by its path or by \
            extradata[\"uid\"]",
            uids.join(" and "),
            which.namespace,
            which.name
        )));
    }
    Ok(notes.pop())
}

fn ipconfigs(attachments: &[Attachment]) -> HashMap<String, wire::IpConfig> {
    let config = |a: &Attachment| wire::IpConfig {
        ip: a.addresses.iter().map(|address| address.net.addr().to_string()).collect(),
        mac: a.mac.to_string(),
        extradata: HashMap::from([("network".to_owned(), a.network.to_string())]),
    };
    attachments.iter().map(|a| (a.interface.to_string(), config(a))).collect()
}

fn port(port: &wire::PortMapping) -> Result<PortMapping, Status> {
    Ok(PortMapping {
        protocol: match port.protocol() {
            wire::Protocol::Tcp => Protocol::Tcp,
            wire::Protocol::Udp => Protocol::Udp,
            wire::Protocol::Sctp => Protocol::Sctp,
        },
        host_port: port_number("host_port", port.host_port)?,
        container_port: port_number("container_port", port.container_port)?,
        host_ip: match port.host_ip.as_str() {
            "" | "0.0.0.0" | "::" => None,
            ip => Some(ip.parse().map_err(|_| invalid(format!("host_ip {ip:?} is not valid")))?),
        },
    })
}
