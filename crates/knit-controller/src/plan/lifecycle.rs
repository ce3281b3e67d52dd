//! Objects that must be there, and Networks that must not go while they are in use.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::names::{DEFAULT_CLASS, DEFAULT_NETWORK, LINUX_RUNTIME, NETWORK_FINALIZER};
use knit_api::{Network, NetworkClass, NetworkClassSpec, NetworkSpec, Topology};

use super::action::{Action, Plan, subject};
use super::index::Index;
use crate::cluster::{Cluster, HIGHEST_NUMBER, Memory, Now};
use crate::config::Config;

/// The class `knit` and the Network `default`, if they are missing.
pub(super) fn make_defaults(cluster: &Cluster, config: &Config, now: Now, plan: &mut Plan) {
    if !config.make_defaults {
        return;
    }
    if !cluster.classes.contains_key(DEFAULT_CLASS) {
        let spec = NetworkClassSpec { runtime: LINUX_RUNTIME.into(), parameters: None };
        plan.actions.push(Action::MakeClass(NetworkClass::new(DEFAULT_CLASS, spec)));
    }
    if config.serves_default
        && !cluster.networks.contains_key(DEFAULT_NETWORK)
        && let Some(subnets) = default_subnets(cluster, config, now, plan)
    {
        let spec = NetworkSpec {
            class: DEFAULT_CLASS.into(),
            topology: Topology::Layer3,
            subnets,
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

/// The subnets that the default Network is made with: none where Nodes have podCIDRs, which are its blocks
/// then. Nothing while that cannot be told yet, because subnets stay what they are once they are written.
fn default_subnets(
    cluster: &Cluster,
    config: &Config,
    now: Now,
    plan: &mut Plan,
) -> Option<Vec<knit_api::Subnet>> {
    if config.default_subnets.is_empty() || cluster.nodes.values().any(|node| !node.pod_ranges.is_empty()) {
        return Some(Vec::new());
    }
    if config.pod_cidr_wait.is_zero() {
        return Some(config.default_subnets.clone());
    }
    let wait = SignedDuration::try_from(config.pod_cidr_wait).unwrap_or(SignedDuration::MAX);
    // The first Node appears as a change, and the next look follows from that.
    let oldest = cluster.nodes.values().filter_map(|node| node.created).min()?;
    let over = oldest.saturating_add(wait).unwrap_or(Timestamp::MAX);
    if now.wall < over {
        plan.again_at(now.when(over));
        return None;
    }
    Some(config.default_subnets.clone())
}

/// A Network has our finalizer while it is there; one that is being deleted loses it when nothing uses it,
/// its blocks are gone, and its number is kept from being given again.
pub(super) fn finalizers(
    cluster: &Cluster,
    index: &Index<'_>,
    memory: &mut Memory,
    config: &Config,
    now: Now,
    plan: &mut Plan,
) {
    let mut keep = 0;
    for (name, network) in &cluster.networks {
        let mut finalizers = network.object().metadata.finalizers.clone().unwrap_or_default();
        let has = finalizers.iter().any(|f| f == NETWORK_FINALIZER);
        if !network.is_being_deleted() {
            if has {
                continue;
            }
            finalizers.push(NETWORK_FINALIZER.into());
        } else {
            if !has || index.user_of(name).is_some() || index.has_blocks(name) {
                continue;
            }
            let id = network.id().unwrap_or(0);
            if id > memory.numbers.highest {
                keep = keep.max(id);
                continue;
            }
            finalizers.retain(|f| f != NETWORK_FINALIZER);
        }
        if plan.leaves_out(memory, &subject("networks", name), now) {
            continue;
        }
        let resource_version = network.resource_version().to_owned();
        plan.actions.push(Action::Finalizers { name: name.to_string(), resource_version, finalizers });
    }
    if keep > 0 {
        plan.actions.push(Action::KeepNumber(numbers(memory, config, keep)));
    }
}

/// The object that keeps the highest number. It is a Lease that nobody holds: of all kinds that have room for
/// a number, the only one that the controller may write in its namespace.
fn numbers(memory: &Memory, config: &Config, highest: u32) -> Lease {
    let mut lease = memory.numbers.kept_in.clone().unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(config.numbers_name()),
            namespace: Some(config.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: None,
    });
    let annotations = lease.metadata.annotations.get_or_insert_default();
    annotations.insert(HIGHEST_NUMBER.into(), highest.to_string());
    lease
}
