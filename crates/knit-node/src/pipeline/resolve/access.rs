//! Who may attach: which Network is a namespace's primary, and which others it may use.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use knit_api::claims::{self, Claim, Claims};
use knit_api::{AllowedNamespacesFrom, Network, conditions, names};
use kube::core::SelectorExt;

use super::Missing;
use crate::error::{Error, Reason};
use crate::world::{Labels, World};

/// What the Networks of a snapshot claim.
#[must_use]
pub fn claims(world: &World) -> Claims {
    Claims::of(world.networks.iter().map(|(name, network)| (name.as_str(), &**network)))
}

/// The primary Network of a namespace, whose Services are in it, by the claims of that snapshot's Networks:
/// none while that is not known, because the namespace or the Network that selects it may still be on its
/// way, or because a selector that cannot be read may have meant it. Who asks waits for the next snapshot,
/// and changes nothing meanwhile.
#[must_use]
pub fn primary_network(world: &World, claims: &Claims, namespace: &str) -> Option<String> {
    let labels = world.namespaces.get(namespace).filter(|_| world.knows_primaries())?;
    primary_of(claims, namespace, labels).ok()
}

/// The primary Network of a namespace.
pub(super) fn primary_of(claims: &Claims, namespace: &str, labels: &Labels) -> Result<String, Missing> {
    match claims.of_namespace(labels) {
        Claim::Nobody => Ok(names::DEFAULT_NETWORK.to_owned()),
        Claim::Of(network) => Ok(network.to_owned()),
        Claim::Unknown { network, problem } => Err(Missing::Error(Error::new(
            Reason::NotReady,
            format!(
                "Network {network} may be the primary one of namespace {namespace}, but its primaryFor \
                 cannot be \
                 understood ({problem}): correct it"
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
    let selector = claims::read(selector).map_err(|problem| {
        let name = network.metadata.name.as_deref().unwrap_or_default();
        // Fail closed: a selector that cannot be understood might not have meant this namespace.
        let message = format!("a selector of Network {name} cannot be understood ({problem}): correct it");
        Missing::Error(Error::new(Reason::NotReady, message))
    })?;
    Ok(selector.matches(labels))
}
