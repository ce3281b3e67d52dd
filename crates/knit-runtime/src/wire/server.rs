//! The server side: any [`Runtime`] as a gRPC service.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use knit_api::kni::v1alpha1 as wire;
use wire::network_runtime_server::{NetworkRuntime, NetworkRuntimeServer};

use super::convert::{
    attachment_to_wire, invalid, network_from_wire, network_name, pod_from_wire, request_from_wire,
};
use super::error::status_from_error;
use crate::error::Error;
use crate::runtime::{Change, Runtime};
use crate::{InterfaceName, SandboxId};

/// A runtime as a gRPC service, to be added to a server.
#[must_use]
pub fn service(runtime: Arc<dyn Runtime>) -> NetworkRuntimeServer<impl NetworkRuntime> {
    NetworkRuntimeServer::new(Served(runtime))
}

struct Served(Arc<dyn Runtime>);

type Reply<T> = Result<tonic::Response<T>, tonic::Status>;

fn reply<T>(result: Result<T, Error>) -> Reply<T> {
    result.map(tonic::Response::new).map_err(|e| status_from_error(&e))
}

// === impl Served ===

impl Served {
    async fn attach(&self, request: wire::AttachRequest) -> Result<wire::AttachResponse, Error> {
        let (pod, netns) = pod_from_wire(request.pod)?;
        if request.attachments.is_empty() {
            return Err(invalid("attachments", "is empty: a runtime needs the Network and addresses"));
        }
        let requests = request
            .attachments
            .into_iter()
            .map(|a| request_from_wire(pod.clone(), netns.clone(), a))
            .collect::<Result<Vec<_>, _>>()?;
        let mut made = Vec::with_capacity(requests.len());
        for request in &requests {
            match self.0.attach(request).await {
                Ok(attachment) => made.push(attachment),
                Err(error) => {
                    // All or none: what this call made goes again. Where that fails too, the caller's Detach
                    // or CollectGarbage finds it; the first error is the one that helps.
                    for attachment in made {
                        let _ = self.0.detach(&pod, Some(&attachment.interface)).await;
                    }
                    return Err(error.on(&request.network).at(request.interface.as_str()));
                }
            }
        }
        Ok(wire::AttachResponse { attachments: made.iter().map(attachment_to_wire).collect() })
    }

    async fn detach(&self, request: wire::DetachRequest) -> Result<wire::DetachResponse, Error> {
        let (pod, _) = pod_from_wire(request.pod)?;
        if request.interfaces.is_empty() {
            self.0.detach(&pod, None).await?;
        }
        for name in request.interfaces {
            self.0.detach(&pod, Some(&InterfaceName::new(name)?)).await?;
        }
        Ok(wire::DetachResponse {})
    }

    async fn check(&self, request: wire::CheckRequest) -> Result<wire::CheckResponse, Error> {
        let (pod, netns) = pod_from_wire(request.pod)?;
        let netns = Some(netns.as_path()).filter(|path| !path.as_os_str().is_empty());
        let interface = match request.interface {
            name if name.is_empty() => None,
            name => Some(InterfaceName::new(name)?),
        };
        self.0.check(&pod, netns, interface.as_ref()).await?;
        Ok(wire::CheckResponse {})
    }
}

#[tonic::async_trait]
impl NetworkRuntime for Served {
    type WatchStream = BoxStream<'static, Result<wire::WatchEvent, tonic::Status>>;

    async fn get_capabilities(
        &self,
        _: tonic::Request<wire::GetCapabilitiesRequest>,
    ) -> Reply<wire::GetCapabilitiesResponse> {
        reply(self.0.info().await.map(|info| wire::GetCapabilitiesResponse {
            name: info.name,
            version: info.version,
            protocol_version: super::PROTOCOL_VERSION.into(),
            features: info.features,
        }))
    }

    async fn setup_network(
        &self,
        request: tonic::Request<wire::SetupNetworkRequest>,
    ) -> Reply<wire::SetupNetworkResponse> {
        let network = request.into_inner().network.ok_or_else(|| invalid("network", "is missing"));
        let result = match network.and_then(network_from_wire) {
            Ok(network) => self.0.setup_network(&network).await,
            Err(error) => Err(error),
        };
        reply(result.map(|()| wire::SetupNetworkResponse {}))
    }

    async fn remove_network(
        &self,
        request: tonic::Request<wire::RemoveNetworkRequest>,
    ) -> Reply<wire::RemoveNetworkResponse> {
        let result = match network_name("name", &request.into_inner().name) {
            Ok(name) => self.0.remove_network(&name).await,
            Err(error) => Err(error),
        };
        reply(result.map(|()| wire::RemoveNetworkResponse {}))
    }

    async fn attach(&self, request: tonic::Request<wire::AttachRequest>) -> Reply<wire::AttachResponse> {
        reply(self.attach(request.into_inner()).await)
    }

    async fn detach(&self, request: tonic::Request<wire::DetachRequest>) -> Reply<wire::DetachResponse> {
        reply(self.detach(request.into_inner()).await)
    }

    async fn update(&self, request: tonic::Request<wire::UpdateRequest>) -> Reply<wire::UpdateResponse> {
        let request = request.into_inner();
        let parsed = pod_from_wire(request.pod).and_then(|(pod, netns)| {
            let attachment = request.attachment.ok_or_else(|| invalid("attachment", "is missing"))?;
            request_from_wire(pod, netns, attachment)
        });
        let result = match parsed {
            Ok(request) => self.0.update(&request).await,
            Err(error) => Err(error),
        };
        reply(result.map(|a| wire::UpdateResponse { attachment: Some(attachment_to_wire(&a)) }))
    }

    async fn check(&self, request: tonic::Request<wire::CheckRequest>) -> Reply<wire::CheckResponse> {
        reply(self.check(request.into_inner()).await)
    }

    async fn list(&self, request: tonic::Request<wire::ListRequest>) -> Reply<wire::ListResponse> {
        let sandbox = match request.into_inner().sandbox_id {
            id if id.is_empty() => None,
            id => Some(SandboxId::new(id).map_err(|e| status_from_error(&e.into()))?),
        };
        let list = self.0.list(sandbox.as_ref()).await;
        reply(list.map(|l| wire::ListResponse { attachments: l.iter().map(attachment_to_wire).collect() }))
    }

    async fn watch(&self, _: tonic::Request<wire::WatchRequest>) -> Reply<Self::WatchStream> {
        use wire::watch_event::Type;
        let changes = self.0.watch().await.map_err(|e| status_from_error(&e))?;
        let events = changes.map(|change| {
            let (kind, attachment) = match change.map_err(|e| status_from_error(&e))? {
                Change::Added(a) => (Type::Added, Some(a)),
                Change::Modified(a) => (Type::Modified, Some(a)),
                Change::Removed(a) => (Type::Removed, Some(a)),
                Change::Synced => (Type::Synced, None),
            };
            Ok(wire::WatchEvent {
                r#type: kind.into(),
                attachment: attachment.as_ref().map(attachment_to_wire),
            })
        });
        Ok(tonic::Response::new(events.boxed()))
    }

    async fn collect_garbage(
        &self,
        request: tonic::Request<wire::CollectGarbageRequest>,
    ) -> Reply<wire::CollectGarbageResponse> {
        let keep =
            request.into_inner().sandbox_ids.into_iter().map(SandboxId::new).collect::<Result<Vec<_>, _>>();
        let result = match keep {
            Ok(keep) => self.0.collect_garbage(&keep).await,
            Err(error) => Err(error.into()),
        };
        reply(result.map(|gone| wire::CollectGarbageResponse {
            removed: gone.iter().map(attachment_to_wire).collect(),
        }))
    }

    async fn status(&self, _: tonic::Request<wire::StatusRequest>) -> Reply<wire::StatusResponse> {
        reply(self.0.status().await.map(|status| {
            wire::StatusResponse {
                ready: status.ready,
                message: status.message,
                networks: status
                    .networks
                    .into_iter()
                    .map(|n| wire::NetworkStatus {
                        name: n.name.into(),
                        ready: n.ready,
                        message: n.message,
                        attachments: n.attachments,
                    })
                    .collect(),
            }
        }))
    }
}
