//! The door of claims: kubelet's plugin for dynamic resources (DRA). It makes itself known on a socket in
//! kubelet's registry, and is asked on another one to prepare claims before their pods' sandboxes, and to
//! free them after.
//!
//! Sockets carry the uid of the agent's pod in their names. Two agents never serve at once, since one has the
//! ledger; but one that ends must not remove the sockets of the one that replaces it.

mod health;
mod plugin;
mod sockets;

use std::path::PathBuf;

use knit_api::kubelet::registration::registration_server::{Registration, RegistrationServer};
use knit_api::kubelet::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use knit_api::kubelet::{health_v1, health_v1alpha1, v1, v1beta1};
use knit_api::names;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

pub use sockets::{DraDoorError, Sockets};

use crate::core::Core;

/// What the door is told.
#[derive(Clone, Debug)]
pub struct DraConfig {
    /// Kubelet's directory, with `plugins` and `plugins_registry` in it.
    pub kubelet_dir: PathBuf,
    /// What tells this agent's sockets from those of another one on this node: its pod's uid.
    pub instance: Option<String>,
    /// Which claims it is opened for.
    pub serve: ServeClaims,
    /// Where the container runtime looks for CDI specifications. Containers get files that say what their
    /// claim has, if this is given.
    pub cdi_dir: Option<PathBuf>,
}

/// Which claims the door is opened for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServeClaims {
    /// All.
    All,
    /// None, unless an earlier agent left some: kubelet cannot end their pods without the door.
    ThoseLeft,
}

/// The services of the socket, the most wanted first.
const SERVICES: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// The open door.
#[derive(Debug)]
pub struct DraDoor {
    sockets: Sockets,
}

/// What is said to kubelet's registry.
struct KubeletRegistration {
    endpoint: String,
}

// === impl DraDoor ===

impl DraDoor {
    /// Opens its sockets. Needs a tokio runtime.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn open(config: &DraConfig) -> Result<Self, DraDoorError> {
        Ok(Self { sockets: Sockets::open(config)? })
    }

    /// Serves forever. Its sockets are gone when it ends.
    pub async fn serve(self, core: Core) {
        let Sockets { plugin, registration, paths } = self.sockets;
        let endpoint = paths.plugin.display().to_string();
        let asked = plugin::Plugin::new(core.clone());
        let health = health::Health::new(core);
        let service = Server::builder()
            .add_service(v1::dra_plugin_server::DraPluginServer::new(asked.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(asked))
            .add_service(health_v1::dra_resource_health_server::DraResourceHealthServer::new(health.clone()))
            .add_service(health_v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(health))
            .serve_with_incoming(plugin);
        let registry = Server::builder()
            .add_service(RegistrationServer::new(KubeletRegistration { endpoint }))
            .serve_with_incoming(registration);
        let ended = tokio::select! {
            ended = service => ended,
            ended = registry => ended,
        };
        if let Err(error) = ended {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "claims are no longer served");
        }
        drop(paths);
    }
}

// === impl KubeletRegistration ===

#[tonic::async_trait]
impl Registration for KubeletRegistration {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: names::DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            tracing::info!(driver = names::DRIVER, "registered with kubelet: claims are served");
        } else {
            tracing::error!(
                driver = names::DRIVER,
                error,
                "kubelet did not register the driver; it will retry"
            );
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
