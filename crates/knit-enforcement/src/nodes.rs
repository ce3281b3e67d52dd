//! Nodes as peers: watched from when some policy asks for them by their labels.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use knit_objects::{Event, Key, Objects};
use knit_policy::kubernetes::node;

use crate::cache::KeptNode;
use crate::feed::Shared;
use crate::kinds::now_away;
use crate::worker::Told;

/// Follows nodes, forever, once they are asked for.
pub(crate) async fn follow(shared: Arc<Shared>, objects: Objects) {
    let mut summary = shared.summary.clone();
    if summary.wait_for(|summary| summary.asks_for_nodes).await.is_err() {
        return;
    }
    let before = shared.kept.before.iter().flat_map(|before| &before.nodes);
    let seed: Vec<_> = before.map(|(name, node)| (Key::cluster(name.as_str()), node.clone())).collect();
    let is_known = !seed.is_empty();
    let watch = objects.watch::<Node>().map(|object| Some(KeptNode::of(&node(&object)))).seed(seed);
    let Ok(mut events) = watch.subscribe() else { return };
    let mut away = events.away();
    let mut told = false;
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            // Those of the last run count.
            () = now_away(&mut away), if !told && is_known => {
                told = true;
                shared.tell(Told::NodesKnown);
                continue;
            }
        };
        match event {
            Some(Event::Applied(key, node)) => {
                shared.tell(Told::Node(key.name().into(), Some(Box::new(node.named(key.name())))));
                shared.kept.update(|cache| drop(cache.nodes.insert(key.name().to_owned(), node)));
            }
            Some(Event::Deleted(key)) => {
                shared.tell(Told::Node(key.name().into(), None));
                shared.kept.update(|cache| drop(cache.nodes.remove(key.name())));
            }
            Some(Event::Synced) => {
                told = true;
                shared.tell(Told::NodesKnown);
            }
            None => return,
        }
    }
}
