//! The client side: a runtime in another process, seen through the same trait.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use knit_api::kni::v1alpha1 as wire;
use tonic::transport::{Channel, Endpoint};
use wire::network_runtime_client::NetworkRuntimeClient;

use super::convert::{attachment_from_wire, invalid, network_to_wire, pod_to_wire, request_to_wire};
use super::error::error_from_status;
use crate::error::{Error, Reason, Result};
use crate::runtime::{Change, Changes, Info, NetworkStatus, Runtime, Status};
use crate::{AttachRequest, Attachment, InterfaceName, Network, NetworkName, Pod, SandboxId};

/// A runtime behind a unix socket. It connects when it is first asked, and again after the runtime restarted.
#[derive(Clone, Debug)]
pub struct RemoteRuntime {
    socket: PathBuf,
    client: NetworkRuntimeClient<Channel>,
}

// === impl RemoteRuntime ===

impl RemoteRuntime {
    /// The runtime that listens on this socket. `deadline` bounds every call but `watch`.
    ///
    /// # Errors
    /// When the path cannot be a socket's address.
    pub fn new(socket: &Path, deadline: Duration) -> Result<Self> {
        let cannot = || {
            let message = format!(
                "{} is not a valid path for a runtime's socket: use an absolute \
            path",
                socket.display()
            );
            Error::new(Reason::Invalid, message)
        };
        let text = socket.to_str().filter(|_| socket.is_absolute()).ok_or_else(cannot)?;
        let endpoint = Endpoint::from_shared(format!("unix://{text}"))
            .map_err(|e| cannot().because(e))?
            .connect_timeout(deadline)
            .timeout(deadline);
        Ok(Self { socket: socket.to_owned(), client: NetworkRuntimeClient::new(endpoint.connect_lazy()) })
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn client(&self) -> NetworkRuntimeClient<Channel> {
        self.client.clone()
    }

    fn failed(&self, status: &tonic::Status) -> Error {
        let error = error_from_status(status);
        // A transport error says nothing of where; the answer of a runtime does.
        if status.details().is_empty() && status.code() == tonic::Code::Unavailable {
            let message = format!(
                "the runtime at {} does not answer: check that its pod is running on this node",
                self.socket.display()
            );
            return Error::new(Reason::NotReady, message).because(error);
        }
        error
    }
}

#[async_trait]
impl Runtime for RemoteRuntime {
    async fn info(&self) -> Result<Info> {
        let request = wire::GetCapabilitiesRequest { client_version: super::PROTOCOL_VERSION.into() };
        let answer = self.client().get_capabilities(request).await.map_err(|s| self.failed(&s))?.into_inner();
        if answer.protocol_version != super::PROTOCOL_VERSION {
            let message = format!(
                "the runtime at {} speaks KNI {:?}, but this agent speaks {}: upgrade the older one",
                self.socket.display(),
                answer.protocol_version,
                super::PROTOCOL_VERSION
            );
            return Err(Error::new(Reason::Unsupported, message));
        }
        Ok(Info { name: answer.name, version: answer.version, features: answer.features })
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        let request = wire::SetupNetworkRequest { network: Some(network_to_wire(network)) };
        self.client().setup_network(request).await.map_err(|s| self.failed(&s))?;
        Ok(())
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        let request = wire::RemoveNetworkRequest { name: name.to_string() };
        self.client().remove_network(request).await.map_err(|s| self.failed(&s))?;
        Ok(())
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        let message = wire::AttachRequest {
            pod: Some(pod_to_wire(&request.pod, Some(&request.netns))),
            attachments: vec![request_to_wire(request)],
        };
        let answer = self.client().attach(message).await.map_err(|s| self.failed(&s))?.into_inner();
        let [attachment] = <[_; 1]>::try_from(answer.attachments).map_err(|all| {
            invalid("the runtime's answer", &format!("has {} attachments instead of one", all.len()))
        })?;
        attachment_from_wire(attachment)
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        let request = wire::DetachRequest {
            pod: Some(pod_to_wire(pod, None)),
            interfaces: interface.map(ToString::to_string).into_iter().collect(),
        };
        self.client().detach(request).await.map_err(|s| self.failed(&s))?;
        Ok(())
    }

    async fn update(&self, request: &AttachRequest) -> Result<Attachment> {
        let message = wire::UpdateRequest {
            pod: Some(pod_to_wire(&request.pod, Some(&request.netns))),
            attachment: Some(request_to_wire(request)),
        };
        let answer = self.client().update(message).await.map_err(|s| self.failed(&s))?.into_inner();
        let attachment =
            answer.attachment.ok_or_else(|| invalid("the runtime's answer", "has no attachment"))?;
        attachment_from_wire(attachment)
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let request = wire::CheckRequest {
            pod: Some(pod_to_wire(pod, netns)),
            interface: interface.map(ToString::to_string).unwrap_or_default(),
        };
        self.client().check(request).await.map_err(|s| self.failed(&s))?;
        Ok(())
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        let request = wire::ListRequest { sandbox_id: sandbox.map(ToString::to_string).unwrap_or_default() };
        let answer = self.client().list(request).await.map_err(|s| self.failed(&s))?.into_inner();
        answer.attachments.into_iter().map(attachment_from_wire).collect()
    }

    async fn watch(&self) -> Result<Changes> {
        use wire::watch_event::Type;
        let mut request = tonic::Request::new(wire::WatchRequest {});
        // A watch has no end; the deadline of the other calls is not for it.
        request.set_timeout(Duration::from_secs(u64::from(u32::MAX)));
        let stream = self.client().watch(request).await.map_err(|s| self.failed(&s))?.into_inner();
        let this = self.clone();
        let changes = stream.map(move |event| {
            let event = event.map_err(|s| this.failed(&s))?;
            let kind = event.r#type();
            let attachment = event.attachment.map(attachment_from_wire).transpose()?;
            match (kind, attachment) {
                (Type::Synced, _) => Ok(Change::Synced),
                (Type::Added, Some(a)) => Ok(Change::Added(a)),
                (Type::Modified, Some(a)) => Ok(Change::Modified(a)),
                (Type::Removed, Some(a)) => Ok(Change::Removed(a)),
                (kind, _) => Err(invalid("the runtime's event", &format!("{kind:?} has no attachment"))),
            }
        });
        Ok(changes.boxed())
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        let request =
            wire::CollectGarbageRequest { sandbox_ids: keep.iter().map(ToString::to_string).collect() };
        let answer = self.client().collect_garbage(request).await.map_err(|s| self.failed(&s))?.into_inner();
        answer.removed.into_iter().map(attachment_from_wire).collect()
    }

    async fn status(&self) -> Result<Status> {
        let answer =
            self.client().status(wire::StatusRequest {}).await.map_err(|s| self.failed(&s))?.into_inner();
        Ok(Status {
            ready: answer.ready,
            message: answer.message,
            // Of what no Network is called it can be no Network of this cluster's.
            networks: answer
                .networks
                .into_iter()
                .filter_map(|n| {
                    Some(NetworkStatus {
                        name: n.name.parse().ok()?,
                        ready: n.ready,
                        message: n.message,
                        attachments: n.attachments,
                    })
                })
                .collect(),
        })
    }
}
