//! The thin part: events in, writes out, by the leader only.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use knit_api::{AddressBlock, BlockSlice, Network, NetworkAttachment, NodeSlice, SliceNode, names};
use knit_objects::{Cache, Error, Event, Key, Objects, Progress, Subscription, Write};
use kube::Resource as _;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::announced::{Announced, Announcements};
use super::keeper::{Keeper, Kept, Order};
use super::kinds::{BlockItem, Blocks, Nodes, SliceKey, SliceKind, further_items, slice_block, slice_node};
use crate::leader::Leading;
use crate::rate::{self, Bucket};

/// So many writes are under way at once.
const CONCURRENT_WRITES: usize = 8;

/// Everything that slices are made of, as it was before anything arrives.
struct Start {
    nodes: Vec<(Key, Vec<SliceNode>)>,
    blocks: Vec<(Key, (String, BlockItem))>,
    networks: Vec<(Key, ())>,
    node_slices: Vec<(Kept, NodeSlice)>,
    block_slices: Vec<(Kept, BlockSlice)>,
}

struct Watches {
    nodes: Subscription<Vec<SliceNode>>,
    blocks: Subscription<(String, BlockItem)>,
    networks: Subscription<()>,
    announced: AnnouncedFeed,
    node_slices: Subscription<(Kept, NodeSlice)>,
    block_slices: Subscription<(Kept, BlockSlice)>,
}

/// Keeps the slices right, for as long as it is polled.
pub(crate) async fn keep(objects: Objects, leading: watch::Receiver<Leading>) {
    // Only a selector can be wrong, and there is none here.
    let expect = "a watch without selectors starts";
    let mut watches = Watches {
        nodes: objects.watch::<Node>().map(|node| slice_node(&node)).subscribe().expect(expect),
        blocks: objects.watch::<AddressBlock>().map(slice_block).subscribe().expect(expect),
        networks: objects.watch::<Network>().map(|_| Some(())).subscribe().expect(expect),
        announced: AnnouncedFeed::start(&objects),
        node_slices: objects.watch::<NodeSlice>().map(found).subscribe().expect(expect),
        block_slices: objects.watch::<BlockSlice>().map(found).subscribe().expect(expect),
    };
    let Some(start) = first(&mut watches).await else { return };
    let items =
        start.nodes.into_iter().flat_map(|(_, items)| items).map(|item| (String::new(), item)).collect();
    let mut nodes = Keeper::<Nodes>::begin(start.node_slices, items);
    nodes.want("", true);
    let networks: BTreeSet<String> = start.networks.iter().map(|(key, ())| key.name().to_owned()).collect();
    let mut items: Vec<_> = start.blocks.into_iter().map(|(_, block)| block).collect();
    for (_, announced) in watches.announced.take() {
        let there = announced.filter(|one| networks.contains(&one.network));
        items.extend(there.map(|one| (one.network, BlockItem::Announced(one.interface))));
    }
    let mut blocks = Keeper::<Blocks>::begin(start.block_slices, items);
    for network in networks {
        blocks.want(&network, true);
    }
    let began = Instant::now();
    let writing = Writing { objects, leading, began };
    let (mut bucket, mut last_nodes, mut last_blocks) = (Bucket::default(), None, None);
    loop {
        let again = [
            writing.carry_out(&mut nodes, &mut bucket, &mut last_nodes).await,
            writing.carry_out(&mut blocks, &mut bucket, &mut last_blocks).await,
        ];
        let next = again.into_iter().flatten().min();
        let later = async {
            match next {
                Some(next) => tokio::time::sleep_until(began + next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = watches.nodes.next() => match event {
                None => return,
                Some(event) => take_node(&mut nodes, event),
            },
            event = watches.blocks.next() => match event {
                None => return,
                Some(event) => take_block(&mut blocks, event),
            },
            event = watches.networks.next() => match event {
                None => return,
                Some(event) => take_network(&mut blocks, &watches.announced, event),
            },
            () = watches.announced.changed() => {
                for (name, announced) in watches.announced.take() {
                    take_announced(&mut blocks, &name, announced);
                }
            }
            event = watches.node_slices.next() => match event {
                None => return,
                Some(event) => take_slice(&mut nodes, event),
            },
            event = watches.block_slices.next() => match event {
                None => return,
                Some(event) => take_slice(&mut blocks, event),
            },
            () = later => {}
        }
        // What is there already is taken together.
        while let Some(Some(event)) = futures::FutureExt::now_or_never(watches.nodes.next()) {
            take_node(&mut nodes, event);
        }
        while let Some(Some(event)) = futures::FutureExt::now_or_never(watches.blocks.next()) {
            take_block(&mut blocks, event);
        }
    }
}

fn take_node(nodes: &mut Keeper<Nodes>, event: Event<Vec<SliceNode>>) {
    let (key, items) = match event {
        Event::Applied(key, items) => (key, items),
        Event::Deleted(key) => {
            nodes.remove(key.name());
            (key, Vec::new())
        }
        Event::Synced => return,
    };
    // What it had more before.
    for name in further_items(key.name()).skip(items.len().saturating_sub(1)) {
        nodes.remove(&name);
    }
    for item in items {
        nodes.put("", item);
    }
}

fn take_block(blocks: &mut Keeper<Blocks>, event: Event<(String, BlockItem)>) {
    match event {
        Event::Applied(_, (network, block)) => blocks.put(&network, block),
        Event::Deleted(key) => blocks.remove(key.name()),
        Event::Synced => {}
    }
}

fn take_network(blocks: &mut Keeper<Blocks>, announced: &AnnouncedFeed, event: Event<()>) {
    match event {
        Event::Applied(key, ()) if !blocks.wants(key.name()) => {
            blocks.want(key.name(), true);
            for interface in announced.all.of_network(key.name()) {
                blocks.put(key.name(), BlockItem::Announced(interface));
            }
        }
        Event::Applied(..) => {}
        Event::Deleted(key) => {
            // They would keep its slices.
            for interface in announced.all.of_network(key.name()) {
                blocks.remove(&interface.attachment);
            }
            blocks.want(key.name(), false);
        }
        Event::Synced => {}
    }
}

/// An interface is told in the slices of its Network, if that is there: slices of one that is not would be
/// nobody's.
fn take_announced(blocks: &mut Keeper<Blocks>, name: &str, announced: Option<Announced>) {
    match announced {
        Some(one) if blocks.wants(&one.network) => {
            blocks.put(&one.network, BlockItem::Announced(one.interface));
        }
        _ => blocks.remove(name),
    }
}

fn take_slice<S: SliceKind>(keeper: &mut Keeper<S>, event: Event<(Kept, S::Object)>) {
    match event {
        Event::Applied(_, (kept, object)) => keeper.seen(kept, &object),
        Event::Deleted(key) => keeper.lost(key.name()),
        Event::Synced => {}
    }
}

fn found<O: knit_objects::Object>(object: O) -> Option<(Kept, O)> {
    let metadata = object.meta();
    let kept = Kept {
        name: metadata.name.clone()?,
        uid: metadata.uid.clone().unwrap_or_default(),
        version: metadata.resource_version.clone().unwrap_or_default(),
    };
    Some((kept, object))
}

/// Follows what agents say of interfaces that do not follow from blocks.
struct AnnouncedFeed {
    by_status: Cache<Announced>,
    /// Those of agents of earlier versions, which say it by a label.
    by_label: Cache<Announced>,
    changes: [watch::Receiver<Progress>; 2],
    all: Announcements,
}

impl AnnouncedFeed {
    fn start(objects: &Objects) -> Self {
        let label =
            format!("{}=true,{}={}", names::ANNOUNCED_LABEL, names::MANAGED_BY_LABEL, names::MANAGED_BY);
        let watch = || objects.watch::<NetworkAttachment>();
        // Who patches an object a thousand times changes nothing of what is told.
        let by_status = watch().fields("status.announced=true").map(Announced::of).cache_of_news();
        let by_label = watch().labels(label).map(Announced::of).cache_of_news();
        let [by_status, by_label] = [by_status, by_label].map(|cache| cache.expect("the selector is valid"));
        by_status.track();
        by_label.track();
        let changes = [by_status.changes(), by_label.changes()];
        Self { by_status, by_label, changes, all: Announcements::default() }
    }

    /// Waits for the lists.
    async fn synced(&mut self) {
        for progress in &mut self.changes {
            // The sender lives in the cache that we hold.
            let _ = progress.wait_for(|progress| progress.synced.is_some()).await;
        }
    }

    /// Waits for a change.
    async fn changed(&mut self) {
        let [by_status, by_label] = &mut self.changes;
        let _ = futures::future::select(Box::pin(by_status.changed()), Box::pin(by_label.changed())).await;
    }

    /// What is to be told, or is not any more.
    fn take(&mut self) -> Vec<super::announced::Change> {
        let touched = [&self.by_status, &self.by_label].map(Cache::take_changed);
        let keys: BTreeSet<Key> = touched.into_iter().flatten().map(|(key, _)| key).collect();
        let mut changes = Vec::new();
        for key in keys {
            let now = self.by_status.get(&key).or_else(|| self.by_label.get(&key));
            changes.extend(self.all.set(&key.to_string(), now.map(|now| (*now).clone())));
        }
        changes
    }
}

/// All lists, whole. Nothing if the runtime shuts down.
async fn first(watches: &mut Watches) -> Option<Start> {
    async fn list<T>(events: &mut Subscription<T>) -> Option<Vec<(Key, T)>> {
        let mut all = std::collections::BTreeMap::new();
        loop {
            match events.next().await? {
                Event::Applied(key, value) => drop(all.insert(key, value)),
                Event::Deleted(key) => drop(all.remove(&key)),
                Event::Synced => return Some(all.into_iter().collect()),
            }
        }
    }
    let second = |list: Vec<(Key, (Kept, NodeSlice))>| list.into_iter().map(|(_, slice)| slice).collect();
    let third = |list: Vec<(Key, (Kept, BlockSlice))>| list.into_iter().map(|(_, slice)| slice).collect();
    Some(Start {
        nodes: list(&mut watches.nodes).await?,
        blocks: list(&mut watches.blocks).await?,
        networks: {
            watches.announced.synced().await;
            list(&mut watches.networks).await?
        },
        node_slices: second(list(&mut watches.node_slices).await?),
        block_slices: third(list(&mut watches.block_slices).await?),
    })
}

/// What writing takes.
struct Writing {
    objects: Objects,
    leading: watch::Receiver<Leading>,
    /// Where the steady clock begins.
    began: Instant,
}

impl Writing {
    /// Writes what is due, as far as there are tokens, beginning behind the slice that was written last; when
    /// there will be more.
    async fn carry_out<S: SliceKind>(
        &self,
        keeper: &mut Keeper<S>,
        bucket: &mut Bucket,
        last: &mut Option<SliceKey>,
    ) -> Option<Duration> {
        // Writing one slice may make the next one due: the last one of a set says that it is complete.
        for _ in 0..4 {
            let now = self.began.elapsed();
            let (mut orders, again) = keeper.orders(now);
            if orders.is_empty() {
                return again;
            }
            rate::take_turns(&mut orders, |order| last.as_ref().is_some_and(|last| order.place() <= last));
            let mut next = Ok(());
            let allowed = orders.iter().take_while(|_| {
                next = bucket.take(rate::SLICES, now);
                next.is_ok()
            });
            let allowed = allowed.count();
            orders.truncate(allowed);
            if let Some(order) = orders.last() {
                *last = Some(order.place().clone());
            }
            self.write_all(keeper, orders).await;
            if let Err(next) = next {
                return Some(again.map_or(next, |again| again.min(next)));
            }
        }
        Some(self.began.elapsed())
    }

    async fn write_all<S: SliceKind>(&self, keeper: &mut Keeper<S>, orders: Vec<Order<S::Object>>) {
        let writes = orders.into_iter().map(|order| {
            let (objects, leading) = (self.objects.clone(), *self.leading.borrow());
            async move {
                let result = leading.fence(write::<S>(&objects, &order)).await;
                (order, result)
            }
        });
        let results: Vec<_> =
            futures::stream::iter(writes).buffer_unordered(CONCURRENT_WRITES).collect().await;
        for (order, result) in results {
            let now = self.began.elapsed();
            match result {
                Some(Ok(kept)) => keeper.done(order.place(), kept, now),
                Some(Err(error)) => {
                    keeper.failed(order.place(), now);
                    // Another version is there, of which the watch will tell.
                    let stale = matches!(error, Error::Conflict { .. } | Error::AlreadyExists { .. });
                    if !stale {
                        if is_about_this_one(&error) {
                            keeper.refused(order.place());
                        }
                        tracing::warn!(
                            error = &error as &dyn std::error::Error,
                            "cannot write a slice; retrying"
                        );
                    }
                }
                None => keeper.failed(order.place(), now),
            }
        }
    }
}

/// Whether a write failed for what is in it, as far as one can tell: the API server is there, and has time.
fn is_about_this_one(error: &Error) -> bool {
    match error {
        Error::Unreachable { .. } | Error::Timeout { .. } => false,
        Error::Api { source, .. } => ![429, 503, 504].contains(&source.code),
        _ => true,
    }
}

async fn write<S: SliceKind>(objects: &Objects, order: &Order<S::Object>) -> Result<Option<Kept>, Error> {
    match order {
        Order::Create(_, object) => objects.write(&Write::create(&**object)).await.map(|v| kept(&v)),
        Order::Replace(_, found, object) => {
            let mut object = (**object).clone();
            object.meta_mut().resource_version = Some(found.version.clone());
            objects.write(&Write::replace(&object)).await.map(|v| kept(&v))
        }
        Order::Delete(_, found) => {
            let delete =
                Write::delete_uid::<S::Object>(Key::cluster(found.name.as_str()), found.uid.as_str());
            objects.write(&delete).await.map(|_| None)
        }
    }
}

fn kept(value: &Value) -> Option<Kept> {
    let text = |field: &str| value["metadata"][field].as_str().map(str::to_owned);
    Some(Kept { name: text("name")?, uid: text("uid")?, version: text("resourceVersion")? })
}
