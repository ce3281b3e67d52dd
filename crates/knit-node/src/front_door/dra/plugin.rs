//! What kubelet asks: claims are prepared and freed, each on its own. One that cannot be prepared has an
//! error of its own and keeps no other from being prepared.

use std::collections::HashMap;
use std::time::Duration;

use futures::future::join_all;
use knit_api::kubelet::{v1, v1beta1};
use knit_types::ObjectRef;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::claims::Prepared;
use crate::core::Core;
use crate::error::{Error, Reason, Result};

/// How long a claim may take: less than kubelet waits, so that it hears why.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(40);

/// The most claims of one call: a pod has far fewer.
const MAX_CLAIMS: usize = 256;

/// Answers kubelet.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    core: Core,
}

// === impl Plugin ===

impl Plugin {
    pub(super) fn new(core: Core) -> Self {
        Self { core }
    }

    async fn prepare(&self, claims: Vec<ObjectRef>) -> Vec<(String, Result<Vec<Prepared>>)> {
        let deadline = Instant::now() + CLAIM_TIMEOUT;
        let work = claims.into_iter().map(|claim| async move {
            let result = match check(&claim) {
                Ok(()) => self.core.prepare(claim.clone(), deadline).await,
                Err(error) => Err(error),
            };
            if let Err(error) = &result {
                tracing::warn!(%claim, reason = error.reason.as_str(), "not prepared: {}", error.chain());
            }
            (claim.uid, result)
        });
        join_all(work).await
    }

    async fn release(&self, claims: Vec<ObjectRef>) -> Vec<(String, Result<()>)> {
        let work = claims.into_iter().map(|claim| async move {
            let result = self.core.release_claim(claim.clone()).await;
            if let Err(error) = &result {
                tracing::warn!(%claim, reason = error.reason.as_str(), "not released: {}", error.chain());
            }
            (claim.uid, result)
        });
        join_all(work).await
    }
}

/// Kubelet says all three.
fn check(claim: &ObjectRef) -> Result<()> {
    if claim.namespace.is_empty() || claim.name.is_empty() || claim.uid.is_empty() {
        return Err(Error::new(Reason::Invalid, "a claim needs a namespace, a name and a uid"));
    }
    Ok(())
}

fn check_number(claims: usize) -> Result<(), Status> {
    if claims > MAX_CLAIMS {
        return Err(Status::invalid_argument(format!("{claims} claims in one call: at most {MAX_CLAIMS}")));
    }
    Ok(())
}

fn text<T>(result: &Result<T>) -> String {
    result.as_ref().err().map(Error::chain).unwrap_or_default()
}

/// The same service in two versions, which differ in one field.
macro_rules! serve {
    ($version:ident, |$prepared:ident| $device:expr) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Plugin {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims;
                check_number(claims.len())?;
                let claims = claims.into_iter().map(|c| ObjectRef {
                    namespace: c.namespace,
                    name: c.name,
                    uid: c.uid,
                });
                let mut answers = HashMap::new();
                for (uid, result) in self.prepare(claims.collect()).await {
                    let error = text(&result);
                    let devices = result.unwrap_or_default().into_iter().map(|$prepared| $device).collect();
                    answers.insert(uid, $version::NodePrepareResourceResponse { devices, error });
                }
                Ok(Response::new($version::NodePrepareResourcesResponse { claims: answers }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims;
                check_number(claims.len())?;
                let claims = claims.into_iter().map(|c| ObjectRef {
                    namespace: c.namespace,
                    name: c.name,
                    uid: c.uid,
                });
                let answers = self.release(claims.collect()).await.into_iter();
                let answers = answers.map(|(uid, result)| {
                    (uid, $version::NodeUnprepareResourceResponse { error: text(&result) })
                });
                Ok(Response::new($version::NodeUnprepareResourcesResponse { claims: answers.collect() }))
            }
        }
    };
}

serve!(v1, |prepared| v1::Device {
    request_names: vec![prepared.request],
    pool_name: prepared.pool,
    device_name: prepared.device,
    cdi_device_ids: prepared.cdi,
    share_id: prepared.share,
});

serve!(v1beta1, |prepared| v1beta1::Device {
    request_names: vec![prepared.request],
    pool_name: prepared.pool,
    device_name: prepared.device,
    cdi_device_ids: prepared.cdi,
});
