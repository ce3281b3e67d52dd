//! Pods whose main interface another CNI plugin makes: what they may ask for besides it.

use knit_api::names;
use knit_ledger::Reservation;
use knit_runtime::{InterfaceName, NetworkName};

use super::{Missing, Wanted, access, claims};
use crate::error::{Error, Reason};
use crate::request::{PodRequest, Wish, Wishes};
use crate::world::World;

/// Whether a pod wants nothing of the agent, as far as is known: it does not wait for lists then. A namespace
/// whose primary Network is known to be one of the agent's promises its pods something.
pub(super) fn asks_for_nothing(world: &World, request: &PodRequest, namespace: &str) -> bool {
    let nothing = matches!(&request.wishes, Wishes::Said(wish) if wish.is_empty());
    let primary = || access::primary_network(world, &claims(world), namespace);
    nothing && request.claims.is_empty() && primary().is_none_or(|name| name == names::DEFAULT_NETWORK)
}

/// What a claim asks for that no pod here can have is refused before there is a pod: it would stay in the way
/// of its sandbox forever.
pub(super) fn check_claim(wanted: &[Wanted], who: &str) -> Result<(), Missing> {
    let Some(wanted) = wanted.iter().find(|wanted| wanted.default_route) else { return Ok(()) };
    let message = format!(
        "{who} requests the pod's default route on Network {}, but the default route belongs to another CNI \
         plugin on this node: leave defaultRoute out, and add routes to the Network",
        wanted.network
    );
    Err(Missing::Error(Error::new(Reason::Refused, message)))
}

/// What such a pod cannot have is refused: nothing is given instead.
pub(super) fn check(
    name: &InterfaceName,
    wish: &Wish,
    claimed: &[Reservation],
    own_primary: &NetworkName,
    namespace: &str,
    who: &str,
) -> Result<(), Missing> {
    let refused = |message: String| Err(Missing::Error(Error::new(Reason::Refused, message)));
    if let Some(network) = &wish.primary {
        return refused(format!(
            "{who} requests Network {network} as its main Network, but another CNI plugin provides the main \
             interface of pods on this node: use the annotation {} instead",
            names::NETWORKS_ANNOTATION
        ));
    }
    if !own_primary.is_default() {
        return refused(format!(
            "{who}: Network {own_primary} is the primary Network of namespace {namespace}, but another CNI \
             plugin provides the main interface of pods on this node: remove the Network's primaryFor"
        ));
    }
    let lent = claimed.iter().flat_map(Reservation::reserved).map(|lease| lease.network.as_str());
    let mut networks = wish.further.iter().map(|asked| asked.network.as_str()).chain(lent);
    if networks.any(|network| network == names::DEFAULT_NETWORK) {
        return refused(format!(
            "{who} requests Network {}, which is not available where another CNI plugin provides the main \
             interface of pods: request another Network",
            names::DEFAULT_NETWORK
        ));
    }
    if wish.further.iter().any(|asked| asked.interface.as_ref() == Some(name)) {
        return refused(format!(
            "{who} requests interface {name}, which another CNI plugin creates: use another name"
        ));
    }
    let route = wish.further.iter().any(|asked| asked.default_route)
        || claimed.iter().flat_map(Reservation::reserved).any(|lease| lease.default_route);
    if route {
        return refused(format!(
            "{who} requests its default route on an additional interface, but the default route on {name} \
             belongs to another CNI plugin: leave default-route out, and add routes to the Network"
        ));
    }
    Ok(())
}
