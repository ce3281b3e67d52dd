//! NetworkAttachments that the agent publishes: what they look like, and which there should be.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use knit_api::{
    AttachedAddress, Family, HostInterface, NamespaceReference, NetworkAttachment, NetworkAttachmentSpec,
    NetworkAttachmentStatus, Route, conditions, names,
};
use knit_ledger::SandboxRecord;
use knit_runtime::Attachment;

use crate::request::Door;
use crate::world::{World, announced};

/// The status of an attachment that is there.
#[must_use]
pub fn status(node: &str, attachment: &Attachment, announced: bool) -> NetworkAttachmentStatus {
    let address = |a: &knit_runtime::Address| AttachedAddress {
        family: Family::of(a.net.addr()),
        address: a.net.addr().to_string(),
        prefix: a.net.prefix_len(),
        gateway: a.gateway.map(|g| g.to_string()),
    };
    let route = |r: &knit_runtime::Route| Route {
        destination: r.destination.to_string(),
        via: r.via.map(|via| via.to_string()),
    };
    let ready = conditions::network_attachment::REASON_ATTACHED;
    NetworkAttachmentStatus {
        conditions: vec![condition(true, ready, "attached and verified")],
        node: Some(node.to_owned()),
        announced,
        sandbox_id: Some(attachment.pod.sandbox.to_string()),
        interface: Some(attachment.interface.to_string()),
        addresses: attachment.addresses.iter().map(address).collect(),
        mac: Some(attachment.mac.to_string()),
        mtu: Some(attachment.mtu),
        routes: attachment.routes.iter().map(route).collect(),
        host_interface: (!attachment.host.name.is_empty()).then(|| HostInterface {
            name: attachment.host.name.clone(),
            index: attachment.host.index,
            namespace: NamespaceReference {
                path: attachment.host.netns_path.as_ref().map(|p| p.display().to_string()),
                inode: attachment.host.netns_inode,
            },
        }),
        pod_namespace: Some(NamespaceReference { path: None, inode: attachment.pod_netns_inode }),
    }
}

/// The status of one that could not be made.
#[must_use]
pub fn failure(node: &str, reason: &str, message: &str) -> NetworkAttachmentStatus {
    NetworkAttachmentStatus {
        conditions: vec![condition(false, reason, message)],
        node: Some(node.to_owned()),
        ..NetworkAttachmentStatus::default()
    }
}

/// The objects that there should be for a sandbox, with their statuses.
#[must_use]
pub fn desired(world: &World, node: &str, record: &SandboxRecord) -> Vec<NetworkAttachment> {
    let Some(pod) = record.pod() else { return Vec::new() };
    let mut objects = Vec::new();
    for entry in record.attachments() {
        let users = matches!(entry.details().door, Door::Object(_));
        let Some(attachment) = entry.made().filter(|_| !users) else { continue };
        let addresses: Vec<IpAddr> = attachment.addresses.iter().map(|a| a.net.addr()).collect();
        let announced = announced::is_needed(world, &attachment.network, node, &addresses, attachment.mac);
        if !announced && !is_published(world, &attachment.network) {
            continue;
        }
        let name = object_name(&pod.name, attachment.interface.as_str());
        let spec = NetworkAttachmentSpec {
            pod: pod.name.clone(),
            network: attachment.network.to_string(),
            // Users cannot ask for it, so the schema does not allow it.
            interface: Some(attachment.interface.to_string()).filter(|i| i != "eth0"),
            ..NetworkAttachmentSpec::default()
        };
        let mut object = NetworkAttachment::new(&name, spec);
        object.metadata.namespace = Some(pod.namespace.clone());
        let mut labels = BTreeMap::from([
            (names::MANAGED_BY_LABEL.to_owned(), names::MANAGED_BY.to_owned()),
            (names::NODE_LABEL.to_owned(), label_value(node)),
            (names::NETWORK_LABEL.to_owned(), attachment.network.to_string()),
        ]);
        if announced {
            labels.insert(names::ANNOUNCED_LABEL.to_owned(), "true".to_owned());
        }
        object.metadata.labels = Some(labels);
        // A static pod's uid is not its mirror pod's: only the API's own uid owns anything.
        let known = world.pods.get(&(pod.namespace.clone(), pod.name.clone()));
        object.metadata.owner_references = known.and_then(|p| p.uid.clone()).map(|uid| {
            vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Pod".into(),
                name: pod.name.clone(),
                uid,
                ..OwnerReference::default()
            }]
        });
        object.status = Some(status(node, attachment, announced));
        objects.push(object);
    }
    objects
}

/// Whether an object that is there says all that it should. If it says the same of a condition, that one's
/// time stays what it was.
#[must_use]
pub fn is_told(wanted: &mut NetworkAttachment, found: &NetworkAttachment) -> bool {
    if let (Some(status), Some(before)) = (&mut wanted.status, &found.status) {
        keep_times(status, before);
    }
    let labels = |object: &NetworkAttachment| -> Vec<Option<String>> {
        let all = object.metadata.labels.clone().unwrap_or_default();
        [names::MANAGED_BY_LABEL, names::NODE_LABEL, names::NETWORK_LABEL, names::ANNOUNCED_LABEL]
            .iter()
            .map(|label| all.get(*label).cloned())
            .collect()
    };
    let owners = |object: &NetworkAttachment| -> Vec<String> {
        object.metadata.owner_references.iter().flatten().map(|owner| owner.uid.clone()).collect()
    };
    found.metadata.deletion_timestamp.is_none()
        && found.spec == wanted.spec
        && found.status == wanted.status
        && labels(found) == labels(wanted)
        && owners(found) == owners(wanted)
}

/// A condition's time is that of its last change.
fn keep_times(status: &mut NetworkAttachmentStatus, before: &NetworkAttachmentStatus) {
    for condition in &mut status.conditions {
        let same = |c: &&Condition| c.type_ == condition.type_ && c.status == condition.status;
        if let Some(before) = before.conditions.iter().find(same) {
            condition.last_transition_time = before.last_transition_time.clone();
        }
    }
}

/// Whether attachments of a Network are written to the API.
fn is_published(world: &World, network: &str) -> bool {
    let published = world.networks.get(network).map(|network| network.publishes_attachments());
    published.unwrap_or(network != names::DEFAULT_NETWORK)
}

fn object_name(pod: &str, interface: &str) -> String {
    let interface =
        interface.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-");
    let room = 252 - interface.len();
    let pod: String = pod.chars().take(room).collect();
    format!("{}-{}", pod.trim_end_matches(['-', '.']), interface.trim_matches('-'))
}

/// A label's value has at most 63 characters; a node's name may have more.
#[must_use]
pub fn label_value(text: &str) -> String {
    let value: String = text.chars().take(63).collect();
    value.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

fn condition(ready: bool, reason: &str, message: &str) -> Condition {
    Condition {
        type_: conditions::network_attachment::READY.to_owned(),
        status: if ready { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message: message.chars().take(4096).collect(),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(address: &str, second: i64) -> NetworkAttachment {
        let spec = NetworkAttachmentSpec { pod: "web".into(), network: "blue".into(), ..Default::default() };
        let mut object = NetworkAttachment::new("web-net1", spec);
        object.metadata.labels = Some([(names::NODE_LABEL.to_owned(), "n1".to_owned())].into());
        let mut ready =
            condition(true, conditions::network_attachment::REASON_ATTACHED, "attached and verified");
        ready.last_transition_time = Time(Timestamp::from_second(second).expect("a time"));
        let address =
            AttachedAddress { family: Family::V4, address: address.into(), prefix: 24, gateway: None };
        object.status = Some(NetworkAttachmentStatus {
            conditions: vec![ready],
            node: Some("n1".into()),
            addresses: vec![address],
            ..NetworkAttachmentStatus::default()
        });
        object
    }

    #[test]
    fn an_attachment_is_not_written_again_because_the_agent_started() {
        let mut found = object("10.2.0.5", 1_000);
        found.metadata.resource_version = Some("7".into());
        found.metadata.labels.get_or_insert_default().insert("a-users".into(), "own".into());
        let mut wanted = object("10.2.0.5", 2_000);
        assert!(is_told(&mut wanted, &found));
        // Another address: written, and the time of what did not change stays.
        let mut wanted = object("10.2.0.6", 2_000);
        assert!(!is_told(&mut wanted, &found));
        let time = |object: &NetworkAttachment| {
            object.status.as_ref().expect("a status").conditions[0].last_transition_time.clone()
        };
        assert_eq!(time(&wanted), time(&found));
        // What others need to know, and did not.
        let mut wanted = object("10.2.0.5", 2_000);
        let announced = (names::ANNOUNCED_LABEL.to_owned(), "true".to_owned());
        wanted.metadata.labels.get_or_insert_default().extend([announced]);
        assert!(!is_told(&mut wanted, &found));
        let mut leaving = found.clone();
        leaving.metadata.deletion_timestamp = Some(Time(Timestamp::now()));
        assert!(!is_told(&mut object("10.2.0.5", 2_000), &leaving));
    }
}
