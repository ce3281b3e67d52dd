//! The seam to the service proxy: one instance per router, started when a Network is set up.

use std::fmt::Debug;
use std::path::PathBuf;

use async_trait::async_trait;
use knit_runtime::Network;

/// Starts service proxies.
#[async_trait]
pub trait ServiceProxy: Send + Sync {
    /// Starts the proxy of a Network's router; `router` is the path of its namespace, none for the node's own.
    ///
    /// # Errors
    /// When it cannot start; the agent logs it, and the Network works without Services.
    async fn start(&self, router: Option<PathBuf>, network: &Network)
    -> Result<Box<dyn Running>, ProxyError>;
}

/// A proxy that runs until it is dropped.
pub trait Running: Debug + Send + Sync {}

/// A proxy that did not start.
#[derive(Debug, thiserror::Error)]
#[error("the service proxy of Network {network} did not start")]
pub struct ProxyError {
    /// The Network.
    pub network: String,
    /// Why.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}
