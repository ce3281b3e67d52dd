//! Whether a second request for a sandbox asks for what the sandbox has. KNI promises CONFLICT where it does
//! not; an old answer to a new question would be taken for the new one's.

use std::collections::BTreeSet;
use std::net::IpAddr;

use knit_ipam::Mac;
use knit_ledger::SandboxRecord;
use knit_runtime::wire::status_from_error;
use tonic::Status;

use super::invalid;
use crate::core::Core;
use crate::request::{MainInterface, PodRequest, Wish, Wishes};

/// What a sandbox has is what the request asks for. To be called once the request is carried out: of one that
/// was new this is true.
pub(super) fn ensure_as_asked(core: &Core, request: &PodRequest) -> Result<(), Status> {
    let Some(record) = core.sandboxes().books().get(&request.pod.sandbox).cloned() else { return Ok(()) };
    let Some(start) = request.start.as_ref().and_then(|start| start.main.ours()) else { return Ok(()) };
    if let Wishes::Wrong(problem) = &request.wishes {
        return Err(invalid(problem.as_str()));
    }
    match difference(&record, start, &request.wishes) {
        None => Ok(()),
        Some(what) => {
            let message = format!(
                "sandbox {} is already attached, and {what}: detach it first, or request what it has",
                request.pod.sandbox
            );
            let error = knit_runtime::Error::new(knit_runtime::Reason::Conflict, message);
            Err(status_from_error(&error.at(start.interface.as_str())))
        }
    }
}

fn difference(record: &SandboxRecord, start: &MainInterface, wishes: &Wishes) -> Option<String> {
    let main = &start.interface;
    let Some(entry) = record.attachment(main) else {
        return Some(format!("has no interface {main}"));
    };
    let nothing = Wish::default();
    let wish = match wishes {
        Wishes::Said(wish) => wish,
        Wishes::Wrong(_) | Wishes::AsThePodSays => &nothing,
    };
    if let Some(network) = &wish.primary
        && entry.plan().network != *network
    {
        return Some(format!("its {main} is on Network {}, not {network}", entry.plan().network));
    }
    if let Some(what) = other_lease(entry, &start.addresses, start.mac) {
        return Some(what);
    }
    let ports: BTreeSet<String> = start.ports.iter().map(|p| format!("{p:?}")).collect();
    let has = &entry.details().ports;
    if has.iter().map(|p| format!("{p:?}")).collect::<BTreeSet<_>>() != ports {
        return Some("its host ports differ".to_owned());
    }
    for asked in &wish.further {
        let mut of_network = record
            .attachments()
            .iter()
            .filter(|a| a.plan().network == asked.network && a.plan().interface != *main);
        let found = match &asked.interface {
            Some(name) => of_network.find(|a| a.plan().interface == *name),
            None => of_network.next(),
        };
        let Some(found) = found else {
            let name = asked.interface.as_ref().map(|name| format!(" as {name}")).unwrap_or_default();
            return Some(format!("is not on Network {}{name}", asked.network));
        };
        if let Some(what) = other_lease(found, &asked.addresses, asked.mac) {
            return Some(what);
        }
    }
    None
}

/// An address or a MAC that is asked for, and is not what the interface has.
fn other_lease(entry: &knit_ledger::Attachment, addresses: &[IpAddr], mac: Option<Mac>) -> Option<String> {
    let plan = entry.plan();
    let has: Vec<IpAddr> = plan.lease.iter().flat_map(|lease| lease.addresses.iter()).collect();
    if let Some(other) = addresses.iter().find(|address| !has.contains(address)) {
        return Some(format!("its {} does not have address {other}", plan.interface));
    }
    let own = plan.lease.as_ref().map(|lease| lease.mac);
    let mac = mac.filter(|mac| own.is_some_and(|own| own != *mac))?;
    Some(format!("its {} does not have MAC {mac}", plan.interface))
}
