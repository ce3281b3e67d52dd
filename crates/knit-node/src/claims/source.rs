//! Where claims are read: the Kubernetes API, one at a time and when they are needed.

use async_trait::async_trait;
use k8s_openapi::api::resource::v1::ResourceClaim;
use knit_objects::{Key, Objects};

use crate::error::{Error, Reason, Result};

/// Where claims are read.
#[async_trait]
pub trait ClaimSource: Send + Sync {
    /// A claim as it is now; none if there is none of that name.
    ///
    /// # Errors
    /// When it cannot be told.
    async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>>;
}

#[async_trait]
impl ClaimSource for Objects {
    async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>> {
        let key = Key::namespaced(namespace, name);
        Self::get::<ResourceClaim>(self, &key).await.map_err(|error| {
            let message = format!("claim {namespace}/{name} cannot be read; it will be retried");
            Error::new(Reason::NotReady, message).because(error)
        })
    }
}
