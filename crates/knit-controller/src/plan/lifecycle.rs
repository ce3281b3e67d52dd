//! Objects that must be there, and Networks that must not go while they are in use.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::names::{DEFAULT_CLASS, DEFAULT_NETWORK, LINUX_RUNTIME, NETWORK_FINALIZER};
use knit_api::{Network, NetworkClass, NetworkClassSpec, NetworkSpec, Topology};

use super::action::{Action, Plan};
use super::index::Index;
use crate::cluster::Cluster;
use crate::config::Config;

/// The class `knit` and the Network `default`, if they are missing.
pub(super) fn make_defaults(cluster: &Cluster, config: &Config, plan: &mut Plan) {
    if !config.make_defaults {
        return;
    }
    if !cluster.classes.contains_key(DEFAULT_CLASS) {
        let spec = NetworkClassSpec { runtime: LINUX_RUNTIME.into(), parameters: None };
        plan.actions.push(Action::MakeClass(NetworkClass::new(DEFAULT_CLASS, spec)));
    }
    if !cluster.networks.contains_key(DEFAULT_NETWORK) {
        let spec = NetworkSpec {
            class: DEFAULT_CLASS.into(),
            topology: Topology::Layer3,
            subnets: config.default_subnets.clone(),
            ..NetworkSpec::default()
        };
        let metadata = ObjectMeta {
            name: Some(DEFAULT_NETWORK.into()),
            finalizers: Some(vec![NETWORK_FINALIZER.into()]),
            ..ObjectMeta::default()
        };
        plan.actions.push(Action::MakeNetwork(Network { metadata, spec, status: None }));
    }
}

/// A Network has our finalizer while it is there; one that is being deleted loses it when nothing uses it and its
/// blocks are gone.
pub(super) fn finalizers(cluster: &Cluster, index: &Index<'_>, plan: &mut Plan) {
    for (name, network) in &cluster.networks {
        let mut finalizers = network.metadata.finalizers.clone().unwrap_or_default();
        let has = finalizers.iter().any(|f| f == NETWORK_FINALIZER);
        if network.metadata.deletion_timestamp.is_none() {
            if has {
                continue;
            }
            finalizers.push(NETWORK_FINALIZER.into());
        } else {
            if !has || index.user_of(name).is_some() || !index.blocks(name).is_empty() {
                continue;
            }
            finalizers.retain(|f| f != NETWORK_FINALIZER);
        }
        let resource_version = network.metadata.resource_version.clone().unwrap_or_default();
        plan.actions.push(Action::Finalizers { name: name.clone(), resource_version, finalizers });
    }
}
