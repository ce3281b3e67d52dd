//! Pods of other nodes: the slices of the Networks that have a router here, and of no other.
//!
//! One slice of a Network says which labels the others tell of. What a list says is taken in as a whole, and
//! a change in its order: between the two, a label that a slice does not have is not known to be absent.

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
use crate::worker::{SliceContent, Told};

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
        .subscribe_batches();
    let mut batches = match watch {
        Ok(batches) => batches,
        Err(error) => {
            tracing::error!(
                %network,
                error = &error as &dyn std::error::Error,
                "cannot read the pods of other nodes for policies"
            );
            return;
        }
    };
    let mut away = batches.away();
    let mut told = false;
    loop {
        let batch = tokio::select! {
            batch = batches.next() => batch,
            () = now_away(&mut away), if !told && before.is_some() => {
                told = true;
                shared.tell(Told::PeersKnown(network.clone()));
                continue;
            }
        };
        let Some(batch) = batch else { return };
        take(&shared, &network, batch, &mut told);
    }
}

/// Takes in what was told together.
fn take(shared: &Shared, network: &Name, batch: Vec<Event<PolicyPeerSliceSpec>>, told: &mut bool) {
    let at = Instant::now();
    let is_synced = batch.contains(&Event::Synced);
    let own = shared.core.node();
    let news = batch.iter().filter_map(|event| match event {
        Event::Applied(key, spec) => Some((key.name().into(), content_of(network, spec, own))),
        Event::Deleted(key) => Some((key.name().into(), SliceContent::default())),
        Event::Synced => None,
    });
    shared.tell_at(at, Told::Slices(network.clone(), news.collect()));
    shared.kept.update_slices(|slices| {
        let slices = slices.entry(network.as_ref().to_owned()).or_default();
        for event in batch {
            match event {
                Event::Applied(key, spec) => drop(slices.insert(key.name().to_owned(), spec)),
                Event::Deleted(key) => drop(slices.remove(key.name())),
                Event::Synced => {}
            }
        }
    });
    if is_synced {
        *told = true;
        shared.tell(Told::PeersKnown(network.clone()));
    }
}

/// What a slice tells. The pods of this node are known better here, and a slice that says it is for another
/// Network than its label does says nothing.
fn content_of(network: &Name, spec: &PolicyPeerSliceSpec, own: &str) -> SliceContent {
    let keys = || {
        let keys = spec.label_keys.as_deref()?.iter();
        let keys: BTreeSet<Name> = keys.map(|key| key.as_str().into()).collect();
        Some(keys.into_iter().collect())
    };
    if spec.network != **network || spec.node == own {
        return SliceContent::default();
    }
    if spec.node.is_empty() {
        return SliceContent { pods: Vec::new(), of_network: keys() };
    }
    let known = keys();
    let pod = |peer| Pod { known_labels: known.clone(), ..pod_of(network, &spec.node, peer) };
    SliceContent { pods: spec.pods.iter().map(pod).collect(), of_network: None }
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
        let found = content_of(&"blue".into(), &spec, "a").pods;
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].attachments[0].addresses.len(), 1, "what is no address is left out");
        assert!(found[0].knows_label(&"app".into()) && !found[0].knows_label(&"secret".into()));
        for (network, own) in [("green", "a"), ("blue", "b")] {
            assert_eq!(content_of(&network.into(), &spec, own), SliceContent::default());
        }
    }

    #[test]
    fn the_slice_without_a_node_says_which_labels_the_others_tell_of() {
        let label_keys = Some(vec!["role".into(), "app".into(), "role".into()]);
        let spec = PolicyPeerSliceSpec { network: "blue".into(), label_keys, ..Default::default() };
        let found = content_of(&"blue".into(), &spec, "a");
        assert_eq!(found.of_network.as_deref(), Some(&["app".into(), "role".into()][..]), "sorted");
        assert!(found.pods.is_empty());
        assert_eq!(content_of(&"green".into(), &spec, "a"), SliceContent::default());
    }
}
