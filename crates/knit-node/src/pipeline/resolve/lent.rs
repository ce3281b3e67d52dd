//! What is reserved for a pod's claims, and which of its interfaces gets it. A Network that a pod has anyway,
//! as its main one or by annotation, is one interface of it: a claim for the same Network reserves its
//! address. So do the claims that the scheduler makes for pods whose addresses it counts.

use std::collections::BTreeSet;

use knit_ledger::{Loan, Reservation, ReservedLease};
use knit_types::{NetworkName, Owner};

use super::{Missing, Wanted};
use crate::error::{Error, Reason};

/// One of them.
pub(super) type Lent<'r> = (&'r Owner, &'r ReservedLease);

/// Those that reserve for an interface which the pod has anyway, at most one for each Network, and those that
/// are interfaces of their own. One with a name of its own is meant as such.
pub(super) fn split<'r>(
    claimed: &'r [Reservation],
    mut networks: BTreeSet<&NetworkName>,
) -> (Vec<Lent<'r>>, Vec<Lent<'r>>) {
    let lent = claimed.iter().flat_map(|own| own.reserved().iter().map(move |lease| (own.owner(), lease)));
    lent.partition(|(_, lease)| !lease.named && networks.remove(&lease.network))
}

/// Gives an interface what is reserved for its Network.
///
/// # Errors
/// When that is not what the pod asks for.
pub(super) fn give(wanted: &mut Wanted, shared: &mut Vec<Lent<'_>>, who: &str) -> Result<(), Missing> {
    let found = shared.iter().position(|(_, lease)| lease.network == wanted.network);
    let Some((owner, lease)) = found.map(|n| shared.swap_remove(n)) else { return Ok(()) };
    let has = wanted.addresses.iter().all(|address| lease.lease.addresses.contains(*address))
        && wanted.mac.is_none_or(|mac| mac == lease.lease.mac);
    if !has {
        let message = format!(
            "{who}: {owner} has {} with MAC {} on Network {}, and the pod requests others: delete the pod so \
             that it is recreated with the addresses that it requests",
            lease.lease.addresses, lease.lease.mac, wanted.network
        );
        return Err(Missing::Error(Error::new(Reason::Refused, message)));
    }
    wanted.default_route |= lease.default_route;
    wanted.loan = Some(Loan { from: owner.clone(), interface: lease.interface.clone(), named: false });
    Ok(())
}
