//! Pods whose main interface another CNI plugin makes: what they may ask for besides it.

use knit_api::names;
use knit_ledger::Reservation;
use knit_runtime::InterfaceName;

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
        "{who} asks for the pod's default route on Network {}, but that belongs to another CNI plugin on \
         this node: leave defaultRoute out, and give the Network routes",
        wanted.network
    );
    Err(Missing::Error(Error::new(Reason::Refused, message)))
}

/// What such a pod cannot have is refused: nothing is given instead.
pub(super) fn check(
    name: &InterfaceName,
    wish: &Wish,
    claimed: &[Reservation],
    own_primary: &str,
    namespace: &str,
    who: &str,
) -> Result<(), Missing> {
    let refused = |message: String| Err(Missing::Error(Error::new(Reason::Refused, message)));
    if let Some(network) = &wish.primary {
        return refused(format!(
            "{who} asks for Network {network} as its main one, but another CNI plugin gives pods of this \
             node their main interface: write it in the annotation {} instead",
            names::NETWORKS_ANNOTATION
        ));
    }
    if own_primary != names::DEFAULT_NETWORK {
        return refused(format!(
            "{who}: Network {own_primary} is the primary one of namespace {namespace}, but another CNI \
             plugin gives pods of this node their main interface: remove the Network's primaryFor"
        ));
    }
    let lent = claimed.iter().flat_map(Reservation::reserved).map(|lease| lease.network.as_str());
    let mut networks = wish.further.iter().map(|asked| asked.network.as_str()).chain(lent);
    if networks.any(|network| network == names::DEFAULT_NETWORK) {
        return refused(format!(
            "{who} asks for Network {}, which is not served where another CNI plugin gives pods their main \
             interface: ask for another",
            names::DEFAULT_NETWORK
        ));
    }
    if wish.further.iter().any(|asked| asked.interface.as_ref() == Some(name)) {
        return refused(format!(
            "{who} asks for interface {name}, which another CNI plugin makes: use another name"
        ));
    }
    let route = wish.further.iter().any(|asked| asked.default_route)
        || claimed.iter().flat_map(Reservation::reserved).any(|lease| lease.default_route);
    if route {
        return refused(format!(
            "{who} asks for its default route on a further interface, but the one on {name} belongs to \
             another CNI plugin: leave default-route out, and give the Network routes"
        ));
    }
    Ok(())
}
