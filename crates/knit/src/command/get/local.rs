//! The attachments of this node, from its agent's ledger. It is read without its lock, while the agent goes
//! on.

use std::path::Path;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use knit_api::{
    AttachedAddress, Family, NamespaceReference, NetworkAttachment, NetworkAttachmentSpec,
    NetworkAttachmentStatus, conditions,
};
use knit_ledger::{AttachmentState, Entry, SandboxRecord, Scan};
use knit_node::report::attachments;
use knit_output::Note;

/// All attachments of the ledger, in the shape that the API has them in.
pub fn attachments(run_dir: &Path) -> Result<Vec<NetworkAttachment>> {
    let path = run_dir.join("ledger");
    let (content, scan) = knit_ledger::read::<Entry>(&path).with_context(|| {
        format!("cannot read {}: run this on the node as root, or specify its --run-dir", path.display())
    })?;
    match scan {
        Scan::Whole | Scan::TornTail { .. } => {}
        Scan::Corrupt { why, .. } => {
            knit_output::note(
                Note::Warning,
                format_args!("the ledger is damaged ({why}): this is what precedes the damage"),
            );
        }
        Scan::Newer { version } => {
            anyhow::bail!(
                "the ledger has format {version}, which this version of knit does not support: use \
                the agent's version"
            );
        }
    }
    for record in content.unreadable.values() {
        knit_output::note(
            Note::Warning,
            format_args!("the record of sandbox {} cannot be read: {}", record.key(), record.why()),
        );
    }
    Ok(content.records.values().filter_map(Entry::sandbox).flat_map(of_record).collect())
}

fn of_record(record: &SandboxRecord) -> Vec<NetworkAttachment> {
    let pod = record.pod();
    let entries = record.attachments().iter().map(|entry| {
        let plan = entry.plan();
        let pod_name = pod.map_or_else(|| record.sandbox().to_string(), |pod| pod.name.clone());
        let spec = NetworkAttachmentSpec {
            pod: pod_name.clone(),
            network: plan.network.to_string(),
            interface: Some(plan.interface.to_string()),
            ..NetworkAttachmentSpec::default()
        };
        let mut object = NetworkAttachment::new(&format!("{pod_name}-{}", plan.interface), spec);
        object.metadata.namespace = Some(pod.map(|pod| pod.namespace.clone()).unwrap_or_default());
        // Records count from boot.
        let ago = knit_node::clock::now().0.saturating_sub(record.created_at());
        let made_at = Timestamp::now().checked_sub(std::time::Duration::from_millis(ago));
        object.metadata.creation_timestamp = made_at.ok().map(Time);
        object.status = Some(status(record, entry));
        object
    });
    entries.collect()
}

fn status(record: &SandboxRecord, entry: &knit_ledger::Attachment) -> NetworkAttachmentStatus {
    let plan = entry.plan();
    let (ready, reason, message, made) = match entry.state() {
        AttachmentState::Planned => (false, "Planned", "it is being attached", None),
        AttachmentState::Attached(made) => {
            (true, conditions::network_attachment::REASON_ATTACHED, "attached and verified", Some(made))
        }
        AttachmentState::Detaching(made) => (false, "Detaching", "it is being detached", made.as_ref()),
    };
    let mut status = match made {
        Some(made) => attachments::status("", made, false),
        None => NetworkAttachmentStatus {
            sandbox_id: Some(record.sandbox().to_string()),
            interface: Some(plan.interface.to_string()),
            addresses: plan.lease.iter().flat_map(|lease| lease.addresses.iter()).map(address).collect(),
            mac: plan.lease.as_ref().map(|lease| lease.mac.to_string()),
            ..NetworkAttachmentStatus::default()
        },
    };
    status.node = None;
    status.pod_namespace = Some(NamespaceReference {
        path: Some(record.netns().path.display().to_string()),
        inode: record.netns().inode,
    });
    status.conditions = vec![Condition {
        type_: conditions::network_attachment::READY.to_owned(),
        status: if ready { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    }];
    status
}

fn address(address: std::net::IpAddr) -> AttachedAddress {
    AttachedAddress {
        family: Family::of(address),
        address: address.to_string(),
        prefix: if address.is_ipv4() { 32 } else { 128 },
        gateway: None,
    }
}
