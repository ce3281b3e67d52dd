//! Pods of other nodes: the slices of the Networks that have a router here, and of no other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use knit_api::{PolicyPeer, PolicyPeerSlice, PolicyPeerSliceSpec, names};
use knit_objects::{Event, Key, Objects};
use knit_policy::kubernetes::parse_ip;
use knit_policy::model::{Attachment, Name, NamedPort, Pod, Protocol};

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use crate::feed::Shared;
use crate::kinds::now_away;
use crate::worker::Told;

/// What is to be followed.
#[derive(Debug)]
pub(crate) enum Command {
    /// The slices of this Network, which has a router.
    Follow { id: u64, network: Name },
    /// That router is gone.
    Stop { id: u64 },
}

/// Follows the slices of the Networks that have routers, forever.
pub(crate) async fn follow_all(
    shared: Arc<Shared>,
    objects: Objects,
    mut inbox: mpsc::UnboundedReceiver<Command>,
) {
    let mut tasks = JoinSet::new();
    let mut followed: BTreeMap<u64, AbortHandle> = BTreeMap::new();
    while let Some(command) = inbox.recv().await {
        match command {
            Command::Follow { id, network } => {
                let task = tasks.spawn(follow(Arc::clone(&shared), objects.clone(), network));
                followed.insert(id, task);
            }
            Command::Stop { id } => {
                if let Some(task) = followed.remove(&id) {
                    task.abort();
                }
            }
        }
        // Those that have ended are let go of.
        while tasks.try_join_next().is_some() {}
    }
}

/// Follows the slices of one Network, for as long as it is polled.
async fn follow(shared: Arc<Shared>, objects: Objects, network: Name) {
    let before = shared.kept.before.as_ref();
    let known = before.and_then(|before| before.slices.get(&*network)).into_iter().flatten();
    let seed: Vec<_> = known.map(|(name, spec)| (Key::cluster(name.as_str()), spec.clone())).collect();
    // What the last run knew of other Networks is of no use before they have a router.
    let watch = objects
        .watch::<PolicyPeerSlice>()
        .labels(format!("{}={network}", names::NETWORK_LABEL))
        .map(|slice| Some(slice.spec))
        .seed(seed)
        .subscribe();
    let mut events = match watch {
        Ok(events) => events,
        Err(error) => {
            tracing::error!(
                %network,
                error = &error as &dyn std::error::Error,
                "cannot read the pods of other nodes for policies"
            );
            return;
        }
    };
    let mut away = events.away();
    let (mut told, mut keys) = (false, Arc::default());
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = now_away(&mut away), if !told && before.is_some() => {
                told = true;
                shared.tell(Told::PeersKnown(network.clone()));
                continue;
            }
        };
        let Some(event) = event else { return };
        take(&shared, &network, event, &mut told, &mut keys);
    }
}

fn take(
    shared: &Shared,
    network: &Name,
    event: Event<PolicyPeerSliceSpec>,
    told: &mut bool,
    keys: &mut Arc<[Name]>,
) {
    let at = Instant::now();
    match event {
        Event::Applied(key, spec) => {
            let slice: Name = key.name().into();
            let pods = pods_of(network, &spec, shared.core.node(), keys);
            shared.tell_at(at, Told::Slice((network.clone(), slice), pods));
            shared.kept.update_slices(|slices| {
                let slices = slices.entry(network.as_ref().to_owned()).or_default();
                slices.insert(key.name().to_owned(), spec);
            });
        }
        Event::Deleted(key) => {
            shared.tell_at(at, Told::Slice((network.clone(), key.name().into()), Vec::new()));
            shared.kept.update_slices(|slices| {
                if let Some(slices) = slices.get_mut(&**network) {
                    slices.remove(key.name());
                }
            });
        }
        Event::Synced => {
            *told = true;
            shared.tell(Told::PeersKnown(network.clone()));
        }
    }
}

/// The pods that a slice tells of. Those of this node are known better here, and a slice that says it is for
/// another Network than its label does says nothing. Slices of one Network say the same keys of labels: those
/// of the last one are shared, by all its pods.
fn pods_of(network: &Name, spec: &PolicyPeerSliceSpec, own: &str, last: &mut Arc<[Name]>) -> Vec<Pod> {
    if spec.network != **network || spec.node == own {
        return Vec::new();
    }
    let known = spec.label_keys.as_ref().map(|keys| {
        let keys: BTreeSet<&str> = keys.iter().map(String::as_str).collect();
        if !keys.iter().copied().eq(last.iter().map(|key| &**key)) {
            *last = keys.into_iter().map(Name::from).collect();
        }
        Arc::clone(last)
    });
    let pod = |peer| Pod { known_labels: known.clone(), ..pod_of(network, &spec.node, peer) };
    spec.pods.iter().map(pod).collect()
}

fn pod_of(network: &Name, node: &str, peer: &PolicyPeer) -> Pod {
    let addresses = peer.addresses.iter().filter_map(|text| parse_ip(text)).collect();
    let port = |port: &knit_api::PolicyPeerPort| {
        let protocol = Protocol::parse(&port.protocol)?;
        Some(NamedPort { name: port.name.as_str().into(), protocol, number: port.port })
    };
    Pod {
        uid: peer.uid.as_str().into(),
        created: peer.created,
        node: node.into(),
        labels: peer.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
        ports: peer.ports.iter().filter_map(port).collect(),
        attachments: [Attachment { network: network.clone(), primary: false, addresses }].into(),
        ..Pod::new(&peer.namespace, &peer.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_of_another_network_or_of_this_node_says_nothing() {
        let peer = PolicyPeer {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u1".into(),
            addresses: vec!["10.0.0.5".into(), "not an address".into()],
            ..PolicyPeer::default()
        };
        let label_keys = Some(vec!["role".into(), "app".into()]);
        let spec =
            PolicyPeerSliceSpec { network: "blue".into(), node: "b".into(), label_keys, pods: vec![peer] };
        let keys = &mut Arc::default();
        let found = pods_of(&"blue".into(), &spec, "a", keys);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].attachments[0].addresses.len(), 1, "what is no address is left out");
        assert!(found[0].knows_label(&"app".into()) && !found[0].knows_label(&"secret".into()));
        assert!(pods_of(&"green".into(), &spec, "a", keys).is_empty());
        assert!(pods_of(&"blue".into(), &spec, "b", keys).is_empty());
    }
    #[test]
    fn every_pod_had_a_copy_of_all_keys_of_labels() {
        let peer = |name: &str| PolicyPeer { name: name.into(), ..PolicyPeer::default() };
        let slice = |node: &str, pods: &[&str]| PolicyPeerSliceSpec {
            network: "blue".into(),
            node: node.into(),
            label_keys: Some(vec!["role".into(), "app".into()]),
            pods: pods.iter().map(|name| peer(name)).collect(),
        };
        let keys = &mut Arc::default();
        let mut found = pods_of(&"blue".into(), &slice("b", &["web", "db"]), "a", keys);
        found.extend(pods_of(&"blue".into(), &slice("c", &["job"]), "a", keys));
        let of = |pod: &Pod| pod.known_labels.clone().expect("it is said");
        assert_eq!(found.len(), 3);
        assert!(found.iter().all(|pod| Arc::ptr_eq(&of(pod), &of(&found[0]))), "all share one list");
    }
}
