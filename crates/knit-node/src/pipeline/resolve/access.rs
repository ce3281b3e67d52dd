//! Who may attach: which Network is a namespace's primary, and which others it may use.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use knit_api::{AllowedNamespacesFrom, Network, conditions, names};
use kube::core::{Selector, SelectorExt};

use super::Missing;
use crate::error::{Error, Reason};
use crate::world::{Labels, World};

/// The primary Network of a namespace, whose Services are in it: none while that is not known, because the namespace or the
/// Network that selects it may still be on its way, and none where two Networks claim it. Who asks waits for the next snapshot.
#[must_use]
pub fn primary_network(world: &World, namespace: &str) -> Option<String> {
    let labels = world.namespaces.get(namespace).filter(|_| world.knows_primaries())?;
    primary_of(world, namespace, labels).ok()
}

/// The primary Network of a namespace.
pub(super) fn primary_of(world: &World, namespace: &str, labels: &Labels) -> Result<String, Missing> {
    let mut selecting = Vec::new();
    for (name, network) in &*world.networks {
        if is_primary_for(network, labels)? {
            selecting.push((name.as_str(), &**network));
        }
    }
    // Where two Networks claim a namespace, the controller refuses the later one.
    if selecting.len() > 1 {
        selecting.retain(|(_, network)| {
            refusal(network).is_none_or(|(reason, _)| reason != conditions::network::REASON_PRIMARY_CONFLICT)
        });
    }
    match selecting[..] {
        [] => Ok(names::DEFAULT_NETWORK.to_owned()),
        [(name, _)] => Ok(name.to_owned()),
        [(first, _), (second, _), ..] => Err(Missing::Error(Error::new(
            Reason::NotReady,
            format!(
                "namespace {namespace} is selected by primaryFor of Networks {first} and {second}: change one of them"
            ),
        ))),
    }
}

/// Whether pods of a namespace may attach to a Network that is not their namespace's primary one.
pub(super) fn may_attach(network: &Network, labels: &Labels) -> Result<bool, Missing> {
    if is_primary_for(network, labels)? {
        return Ok(true);
    }
    let Some(allowed) = &network.spec.allowed_namespaces else { return Ok(false) };
    match allowed.from {
        AllowedNamespacesFrom::None => Ok(false),
        AllowedNamespacesFrom::All => Ok(true),
        AllowedNamespacesFrom::Selector => {
            allowed.selector.as_ref().map_or(Ok(false), |selector| matches(network, selector, labels))
        }
    }
}

/// Why the controller refuses a Network, if it does.
pub(super) fn refusal(network: &Network) -> Option<(&str, &str)> {
    let conditions = &network.status.as_ref()?.conditions;
    let accepted = conditions.iter().find(|c| c.type_ == conditions::network::ACCEPTED)?;
    (accepted.status == "False").then_some((accepted.reason.as_str(), accepted.message.as_str()))
}

fn is_primary_for(network: &Network, labels: &Labels) -> Result<bool, Missing> {
    network.spec.primary_for.as_ref().map_or(Ok(false), |selector| matches(network, selector, labels))
}

fn matches(network: &Network, selector: &LabelSelector, labels: &Labels) -> Result<bool, Missing> {
    let selector = Selector::try_from(selector.clone()).map_err(|error| {
        let name = network.metadata.name.as_deref().unwrap_or_default();
        // Fail closed: a selector that cannot be understood might have meant this namespace.
        let message = format!("a selector of Network {name} cannot be understood: correct it");
        Missing::Error(Error::new(Reason::NotReady, message).because(error))
    })?;
    Ok(selector.matches(labels))
}
