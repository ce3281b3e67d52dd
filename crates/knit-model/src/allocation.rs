//! What a ResourceClaim was given of Knit's devices, and with what parameters. A claim is a tenant's, its
//! allocation the scheduler's.

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use knit_api::{AttachmentConfig, ConfigError, names};
use knit_types::{ObjectRef, PodRef};

/// Where parameters of a DeviceClass come from; all others are the claim's own.
const FROM_CLASS: &str = "FromClass";

/// Says on a claim that was made from a template what its pod calls it.
const POD_CLAIM: &str = "resource.kubernetes.io/pod-claim-name";

/// What a claim has of ours.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Allocation {
    /// The claim.
    pub claim: ObjectRef,
    /// What its pod calls it, where it was made from a template. Whoever made the claim wrote this.
    pub pod_claim: Option<String>,
    /// Pods that it is reserved for.
    pub pods: Vec<PodRef>,
    /// Devices of ours, one at least.
    pub devices: Vec<Allotted>,
}

/// One device of ours that a claim has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Allotted {
    /// The request that it answers, without the name of a subrequest.
    pub request: String,
    /// The same, with the name of the subrequest.
    pub answers: String,
    /// Its pool.
    pub pool: String,
    /// The device's name.
    pub device: String,
    /// Which share of it, where several claims have it.
    pub share: Option<String>,
    /// The parameters for it.
    pub config: AttachmentConfig,
}

/// Why it cannot be told what a claim has.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocationError {
    /// The scheduler has not allocated it, or it was deallocated.
    #[error("it is not allocated: the scheduler does that when a pod uses it")]
    NotAllocated,
    /// Nothing of it is ours.
    #[error("none of its devices is of driver {}", names::DRIVER)]
    NotOurs,
    /// A request with admin access.
    #[error(
        "request {request} has adminAccess, which gives nothing more on a Network: leave it out of the claim"
    )]
    AdminAccess {
        /// The request.
        request: String,
    },
    /// Parameters cannot be understood.
    #[error("the parameters for request {request} are not valid")]
    Config {
        /// The request.
        request: String,
        /// What is wrong with them.
        #[source]
        source: ConfigError,
    },
    /// Two parameters of one origin.
    #[error("request {request} has two sets of parameters for driver {}: write one", names::DRIVER)]
    TwoConfigs {
        /// The request.
        request: String,
    },
}

// === impl Allocation ===

impl Allocation {
    /// Reads a claim.
    ///
    /// # Errors
    /// When it has nothing of ours, or what it has cannot be understood.
    pub fn of(claim: &ResourceClaim) -> Result<Self, AllocationError> {
        let status = claim.status.as_ref();
        let Some(allocation) = status.and_then(|status| status.allocation.as_ref()) else {
            return Err(AllocationError::NotAllocated);
        };
        let devices = allocation.devices.as_ref();
        let configs = devices.and_then(|d| d.config.as_deref()).unwrap_or_default();
        let results = devices.and_then(|d| d.results.as_deref()).unwrap_or_default();
        let ours: Vec<_> = results.iter().filter(|result| result.driver == names::DRIVER).collect();
        if ours.is_empty() {
            return Err(AllocationError::NotOurs);
        }
        let devices =
            ours.into_iter().map(|result| Allotted::of(result, configs)).collect::<Result<_, _>>()?;
        let metadata = claim.metadata.clone();
        let pod_claim = metadata.annotations.as_ref().and_then(|all| all.get(POD_CLAIM).cloned());
        let namespace = metadata.namespace.unwrap_or_default();
        let reserved = status.and_then(|status| status.reserved_for.as_deref()).unwrap_or_default();
        let pods = reserved.iter().filter(|by| by.resource == "pods").map(|by| PodRef {
            namespace: namespace.clone(),
            name: by.name.clone(),
            uid: Some(by.uid.clone()),
        });
        Ok(Self {
            pod_claim,
            pods: pods.collect(),
            claim: ObjectRef {
                namespace: namespace.clone(),
                name: metadata.name.unwrap_or_default(),
                uid: metadata.uid.unwrap_or_default(),
            },
            devices,
        })
    }
}

// === impl Allotted ===

impl Allotted {
    fn of(
        result: &DeviceRequestAllocationResult,
        configs: &[DeviceAllocationConfiguration],
    ) -> Result<Self, AllocationError> {
        let base = base(&result.request).to_owned();
        if result.admin_access == Some(true) {
            return Err(AllocationError::AdminAccess { request: base });
        }
        let (mut class, mut own) = (None, None);
        for config in configs {
            let requests = config.requests.as_deref().unwrap_or_default();
            let is_meant = requests.is_empty() || requests.iter().any(|r| *r == result.request || *r == base);
            let Some(opaque) = config.opaque.as_ref().filter(|o| is_meant && o.driver == names::DRIVER)
            else {
                continue;
            };
            let read = AttachmentConfig::read(&opaque.parameters.0)
                .map_err(|source| AllocationError::Config { request: base.clone(), source })?;
            let place = if config.source == FROM_CLASS { &mut class } else { &mut own };
            if place.replace(read).is_some() {
                return Err(AllocationError::TwoConfigs { request: base });
            }
        }
        let own: AttachmentConfig = own.unwrap_or_default();
        let config = own
            .with_class(class.unwrap_or_default())
            .map_err(|source| AllocationError::Config { request: base.clone(), source })?;
        Ok(Self {
            request: base,
            answers: result.request.clone(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share: result.share_id.clone(),
            config,
        })
    }
}

/// A request's name without that of a subrequest.
fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    fn claim(results: Value, config: Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "shop", "uid": "u1"},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results, "config": config}},
                "reservedFor": [{"resource": "pods", "name": "web", "uid": "p1"}],
            },
        }))
        .expect("a claim")
    }

    fn result(request: &str, driver: &str, device: &str) -> Value {
        json!({"request": request, "driver": driver, "pool": "knit-networks", "device": device})
    }

    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    fn config(source: &str, requests: &[&str], fields: Value) -> Value {
        let mut parameters = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AttachmentConfig"});
        let map = parameters.as_object_mut().expect("an object");
        map.extend(fields.as_object().expect("an object").clone());
        json!({"source": source, "requests": requests,
            "opaque": {"driver": "knit.dev", "parameters": parameters}})
    }

    #[test]
    fn parameters_go_to_the_request_that_they_are_for() {
        let claim = claim(
            json!([
                result("nic/fast", "knit.dev", "blue"),
                result("more", "knit.dev", "green"),
                result("gpu", "gpu.example.com", "gpu-0"),
            ]),
            json!([
                config("FromClass", &[], json!({"defaultRoute": false})),
                config("FromClaim", &["nic"], json!({"interface": "data0"})),
                config("FromClaim", &["nic/slow"], json!({"interface": "other0"})),
                {"source": "FromClaim", "requests": ["gpu"],
                    "opaque": {"driver": "gpu.example.com", "parameters": {"any": "thing"}}},
            ]),
        );
        let read = Allocation::of(&claim).expect("an allocation");
        let seen: Vec<_> = read
            .devices
            .iter()
            .map(|d| {
                (
                    d.request.as_str(),
                    d.device.as_str(),
                    d.config.interface.as_ref().map(knit_types::InterfaceName::as_str),
                )
            })
            .collect();
        assert_eq!(seen, [("nic", "blue", Some("data0")), ("more", "green", None)]);
        assert!(read.devices.iter().all(|d| d.config.default_route == Some(false)));
        assert_eq!(read.pods[0].name, "web");
    }

    #[test]
    fn what_cannot_be_right_is_refused() {
        let one = || json!([result("nic", "knit.dev", "blue")]);
        let mut none = claim(one(), json!([]));
        none.status.as_mut().expect("a status").allocation = None;
        assert_eq!(Allocation::of(&none), Err(AllocationError::NotAllocated));
        let foreign = claim(json!([result("gpu", "gpu.example.com", "gpu-0")]), json!([]));
        assert_eq!(Allocation::of(&foreign), Err(AllocationError::NotOurs));
        let mut admin = result("nic", "knit.dev", "blue");
        admin["adminAccess"] = json!(true);
        let admin = Allocation::of(&claim(json!([admin]), json!([])));
        assert!(matches!(admin, Err(AllocationError::AdminAccess { .. })), "{admin:?}");
        let twice = json!([config("FromClaim", &[], json!({})), config("FromClaim", &["nic"], json!({}))]);
        let twice = Allocation::of(&claim(one(), twice));
        assert!(matches!(twice, Err(AllocationError::TwoConfigs { .. })), "{twice:?}");
        let unknown = json!([config("FromClaim", &[], json!({"mtu": 1400}))]);
        let unknown = Allocation::of(&claim(one(), unknown));
        assert!(matches!(unknown, Err(AllocationError::Config { .. })), "{unknown:?}");
        // One whose parameters are wrong is ours all the same: it must not be taken for another driver's.
        assert_ne!(unknown, Err(AllocationError::NotOurs));
    }
}
