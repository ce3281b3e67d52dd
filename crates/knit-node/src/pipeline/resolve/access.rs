//! Who may attach: which Network is a namespace's primary, and which others it may use.

use knit_model::{Claim, Claims, Network};
use knit_types::NetworkName;

use super::Missing;
use crate::error::{Error, Reason};
use crate::world::{Labels, World};

/// What the Networks of a snapshot claim.
#[must_use]
pub fn claims(world: &World) -> Claims {
    Claims::of(world.networks.values())
}

/// The primary Network of a namespace, whose Services are in it, by the claims of that snapshot's Networks:
/// none while that is not known, because the namespace or the Network that selects it may still be on its
/// way, or because a selector that cannot be read may have meant it. Who asks waits for the next snapshot,
/// and changes nothing meanwhile.
#[must_use]
pub fn primary_network(world: &World, claims: &Claims, namespace: &str) -> Option<NetworkName> {
    let labels = world.namespaces.get(namespace).filter(|_| world.knows_primaries())?;
    primary_of(claims, namespace, labels).ok()
}

/// The primary Network of a namespace.
pub(super) fn primary_of(claims: &Claims, namespace: &str, labels: &Labels) -> Result<NetworkName, Missing> {
    match claims.of_namespace(labels) {
        Claim::Nobody => Ok(NetworkName::default()),
        Claim::Of(network) => Ok(network.clone()),
        Claim::Unknown { network, problem } => Err(Missing::Error(Error::new(
            Reason::NotReady,
            format!(
                "Network {network} may be the primary one of namespace {namespace}, but its primaryFor is \
                not valid ({problem}): correct it"
            ),
        ))),
    }
}

/// Whether pods of a namespace may attach to a Network that is not their namespace's primary one.
pub(super) fn may_attach(network: &Network, labels: &Labels) -> Result<bool, Missing> {
    network.admits(labels).map_err(|problem| {
        let name = network.name();
        // Fail closed: a selector that cannot be understood might not have meant this namespace.
        let message = format!("a selector of Network {name} is not valid ({problem}): correct it");
        Missing::Error(Error::new(Reason::NotReady, message))
    })
}
