//! What kubelet is told of the health of devices: a Network that this node cannot set up is not healthy here.

use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt as _};
use jiff::Timestamp;
use knit_api::kubelet::{health_v1, health_v1alpha1};
use knit_api::names;
use tonic::{Request, Response, Status};

use crate::core::Core;

/// How often it is said again: kubelet forgets what it has not heard for 30 seconds.
const HEALTH_INTERVAL: Duration = Duration::from_secs(20);

/// The pause between two changes: many Networks may change at once.
const HEALTH_CHANGES_DELAY: Duration = Duration::from_secs(1);

/// Tells kubelet.
#[derive(Clone, Debug)]
pub(super) struct Health {
    core: Core,
}

/// A device's health, in no version's words.
struct HealthOfDevice {
    device: String,
    problem: Option<String>,
}

// === impl Health ===

impl Health {
    pub(super) fn new(core: Core) -> Self {
        Self { core }
    }

    /// Everything, now and again.
    fn told(&self) -> BoxStream<'static, Vec<HealthOfDevice>> {
        let (core, shown) = (self.core.clone(), self.core.shown());
        stream::unfold((core, shown, true), |(core, mut shown, first)| async move {
            if !first {
                // That it did not change is worth saying, too.
                if let Ok(Err(_)) = tokio::time::timeout(HEALTH_INTERVAL, shown.changed()).await {
                    return None;
                }
                tokio::time::sleep(HEALTH_CHANGES_DELAY).await;
            }
            shown.borrow_and_update();
            let told = core.networks().states().into_iter().map(|state| HealthOfDevice {
                device: names::device_of(&state.name),
                problem: state.problem.map(|problem| problem.message.chars().take(1000).collect()),
            });
            let told: Vec<HealthOfDevice> = told.collect();
            Some((told, (core, shown, false)))
        })
        .boxed()
    }
}

/// The same service in two versions.
macro_rules! serve {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Health {
            type NodeWatchResourcesStream =
                BoxStream<'static, Result<$version::NodeWatchResourcesResponse, Status>>;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let stream = self.told().map(|told| {
                    let now = Timestamp::now().as_second();
                    let devices = told.into_iter().map(|told| $version::DeviceHealth {
                        device: Some($version::DeviceIdentifier {
                            pool_name: names::NETWORK_POOL.to_owned(),
                            device_name: told.device,
                        }),
                        health: match told.problem {
                            None => $version::HealthStatus::Healthy,
                            Some(_) => $version::HealthStatus::Unhealthy,
                        }
                        .into(),
                        last_updated_time: now,
                        health_check_timeout_seconds: 0,
                        message: told.problem.unwrap_or_default(),
                    });
                    Ok($version::NodeWatchResourcesResponse { devices: devices.collect() })
                });
                Ok(Response::new(stream.boxed()))
            }
        }
    };
}

serve!(health_v1);
serve!(health_v1alpha1);
