//! The thin part: objects and pods in, writes out, by the leader only.

use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use knit_api::conditions::network_attachment as reasons;
use knit_api::names::{ATTACHMENT_FINALIZER, MANAGED_BY, MANAGED_BY_LABEL};
use knit_api::{NetworkAttachment, NetworkAttachmentStatus};
use knit_objects::{Cache, Event, Key, Objects, Write};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::plan::{Asked, Order, PER_NODE, Place, Say, Whereabouts};
use super::pods::{PodEvent, PodFeed, place_of};
use crate::cluster::NodeView;
use crate::leader::Leading;
use crate::plan::condition;
use crate::rate::Bucket;

/// So many writes are under way at once.
const CONCURRENT_WRITES: usize = 8;

/// Tells users' NetworkAttachments their nodes while it is polled, which is while this controller leads.
pub(crate) async fn keep(objects: Objects, nodes: Cache<NodeView>, leading: watch::Receiver<Leading>) {
    let users = format!("{MANAGED_BY_LABEL}!={MANAGED_BY}");
    let watch = objects.watch::<NetworkAttachment>().labels(users).map(|object| Some(asked(object)));
    let mut events = watch.subscribe().expect("the selector is valid");
    let (mut feed, mut news) = PodFeed::new(objects.clone());
    let (mut known, mut bucket, began) = (Whereabouts::default(), Bucket::default(), Instant::now());
    let mut writing = FuturesUnordered::new();
    // Before all objects have been told, which of them are too many is not known.
    let mut synced = false;
    let mut followed = false;
    loop {
        if synced {
            if !followed {
                let namespaces = known.namespaces();
                if feed.follow(&namespaces, |scope| known.pods(scope)) {
                    known.forget_pods(|namespace| feed.follows(namespace));
                }
                followed = true;
            }
            let room = CONCURRENT_WRITES - writing.len();
            let is_node = |node: &str| nodes.get(&Key::cluster(node)).is_some();
            let (orders, again) = known.orders(room, &mut bucket, is_node, began.elapsed());
            for order in orders {
                let (objects, leading) = (objects.clone(), *leading.borrow());
                writing.push(async move {
                    let result = leading.fence(write(&objects, &order)).await;
                    (order, result)
                });
            }
            let again = again.map(|again| began + again);
            let later = async {
                match again {
                    Some(again) => tokio::time::sleep_until(again).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = events.next() => match event {
                    None => return,
                    Some(event) => followed &= !take(&mut known, event, &mut synced),
                },
                Some(told) = news.recv() => followed &= take_pod(&mut known, feed.take(told)),
                Some((order, result)) = writing.next() => {
                    done(&mut known, &order, result.as_ref(), began.elapsed());
                }
                () = later => {}
            }
        } else {
            let Some(event) = events.next().await else { return };
            take(&mut known, event, &mut synced);
        }
    }
}

/// Takes an event of an object; whether that may be the first or the last one of its namespace.
fn take(known: &mut Whereabouts, event: Event<Asked>, synced: &mut bool) -> bool {
    match event {
        Event::Applied(key, asked) => {
            let place = place_of(&key);
            let is_new = !known.has_namespace(&place.0);
            known.set_object(place, Some(asked));
            is_new
        }
        Event::Deleted(key) => {
            let place = place_of(&key);
            let namespace = place.0.clone();
            known.set_object(place, None);
            !known.has_namespace(&namespace)
        }
        Event::Synced => {
            *synced = true;
            true
        }
    }
}

/// Takes an event of a pod; false if it may end other watches.
fn take_pod(known: &mut Whereabouts, event: Option<PodEvent>) -> bool {
    match event {
        Some(PodEvent::Pod(pod, node)) => known.set_pod(&pod, node.as_ref()),
        Some(PodEvent::Synced) => return false,
        None => {}
    }
    true
}

fn done(
    known: &mut Whereabouts,
    order: &Order,
    result: Option<&Result<(), knit_objects::Error>>,
    now: Duration,
) {
    let (namespace, name) = (&*order.place.0, &*order.place.1);
    match result {
        Some(Ok(())) => tracing::debug!(namespace, name, "a NetworkAttachment was told its node"),
        Some(Err(error)) => {
            let error = error as &dyn std::error::Error;
            tracing::debug!(namespace, name, error, "cannot tell a NetworkAttachment its node; retrying");
        }
        None => {}
    }
    known.done(order, matches!(result, Some(Ok(()))), now);
}

/// What counts of an object.
fn asked(object: NetworkAttachment) -> Asked {
    let (metadata, status) = (object.metadata, object.status.unwrap_or_default());
    let held = metadata.finalizers.iter().flatten().any(|f| f == ATTACHMENT_FINALIZER);
    Asked {
        refused: status.node.is_none() && is_refused(&status),
        uid: metadata.uid.unwrap_or_default(),
        version: metadata.resource_version.unwrap_or_default(),
        pod: object.spec.pod.into(),
        node: status.node.map(Into::into),
        created: metadata.creation_timestamp.map(|time| time.0),
        leaving: metadata.deletion_timestamp.is_some() && !held,
    }
}

fn is_refused(status: &NetworkAttachmentStatus) -> bool {
    status.conditions.iter().any(|c| c.type_ == reasons::READY && c.reason == reasons::REASON_REFUSED)
}

/// Writes what an order says. The API server does not compare the uid when it writes a status.
async fn write(objects: &Objects, order: &Order) -> Result<(), knit_objects::Error> {
    let (namespace, name): &Place = &order.place;
    let status = match &order.what {
        Say::Node(node) => json!({ "node": **node }),
        Say::TooMany(node) => {
            let message = format!(
                "namespace {namespace} has more than {PER_NODE} NetworkAttachments for pods of node {node}: \
                 delete some of them"
            );
            let now = Timestamp::now();
            let refused = reasons::REASON_REFUSED;
            let condition = condition(&[], reasons::READY, false, refused, message, None, now);
            // It may name the node that an earlier pod was on.
            json!({ "node": null, "conditions": [condition] })
        }
    };
    let key = Key::namespaced(namespace.clone(), name.clone());
    let write = Write::merge_status::<NetworkAttachment>(key, json!({ "status": status }));
    objects.write(&write.if_version(&order.version)).await.map(drop)
}
