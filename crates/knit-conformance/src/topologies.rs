//! What every topology must do that a runtime announces: two pods of a Network reach each other.

use knit_kernel::Handle;
use knit_kernel::handle::NeighbourFilter;
use knit_runtime::Topology;
use knit_types::Family;

use crate::bed::{Bed, address_of};
use crate::case::{Case, Profile, Verdict, ensure};
use crate::core::carries;

/// A case for each topology that there is.
pub(crate) fn cases() -> Vec<Case> {
    let case = |topology: Topology| Case {
        name: topology.conformance_case(),
        profile: Profile::Topology(topology),
        promise: match topology.has_subnet_on_link() {
            true => "pods are neighbors: each learns the other's own MAC",
            false => "pods reach each other",
        },
        run: |bed, profile| Box::pin(pods_reach_each_other(bed, profile)),
    };
    Topology::ALL.into_iter().map(case).collect()
}

async fn pods_reach_each_other(bed: &Bed, profile: Profile) -> Verdict {
    let Profile::Topology(topology) = profile else { return Ok(()) };
    let network = bed.network_of(topology).await?;
    let (one, first) = bed.attached(&network).await?;
    let (two, second) = bed.attached(&network).await?;
    for family in Family::ALL {
        carries(&one, &first, &two, &second, family).await?;
        let address = address_of(&second, family).filter(|_| topology.has_subnet_on_link());
        let Some(address) = address else { continue };
        let known = Handle::open(&one.space)?.neighbours(&NeighbourFilter::default())?;
        let mac = known.iter().find(|n| n.address == address).and_then(|n| n.mac);
        ensure!(
            mac.map(|m| m.0) == Some(second.mac.0),
            "{address} is at {mac:?} for its neighbor, but its own MAC is {}",
            second.mac
        );
    }
    Ok(())
}
