//! PolicyPeerSlices: what nodes must know of each other's pods for the sake of policies, and no more.
//!
//! Apart from the plan of everything else: pods come and go far more often than Networks. Pods and
//! attachments are watched only while some policy asks for pods and for a while after that, each change
//! touches the slices of one node, and a slice is written at most once a second, all of them at a limited
//! rate. [`plan`] decides, [`feed`] watches, and this writes.

mod blocks;
mod concerns;
mod conditions;
mod facts;
mod feed;
mod key_slices;
mod keys;
mod needs;
pub(crate) mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use knit_api::names::{MANAGED_BY, MANAGED_BY_LABEL, NETWORK_LABEL};
use knit_api::{PolicyPeer, PolicyPeerSlice, PolicyPeerSliceSpec};
use knit_objects::{Cache, Error, EventRecorder, Key, Objects, Write};
use knit_policy::model::{Name, PolicyName};
use knit_types::fnv1a;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::leader::Leading;
use crate::rate::{self, Bucket};
use feed::Feed;
pub(crate) use feed::SharedCaches;
use key_slices::KeySlices;
pub(crate) use plan::LeftToOthers;
use plan::{NetworkAndNode, Peers};

/// A slice is written at most this often.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Changes that come right behind each other are taken together.
const GATHER_INTERVAL: Duration = Duration::from_millis(20);
/// How often all slices are compared with what they should be, and failed writes are tried again.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5);
/// So many writes are under way at once.
const CONCURRENT_WRITES: usize = 8;
/// So many pods fit into one object.
const MAX_PODS: usize = 1000;
/// And so many bytes, roughly counted: the API server takes three times that. A tenant's pod may have
/// megabytes of labels, and must not keep its neighbors' slice from being written.
const MAX_BYTES: usize = 512 * 1024;
/// Who writes slices.
const MANAGER: &str = "knit-controller";

/// Writes slices while it is polled, which is while this controller leads.
pub(crate) async fn run(
    objects: &Objects,
    small: SharedCaches,
    left: LeftToOthers,
    recorder: &EventRecorder,
    leading: &watch::Receiver<Leading>,
) {
    // Without selectors, a watch starts.
    let Ok(actual) = objects.watch::<PolicyPeerSlice>().map(|slice| Some(slice.spec)).cache() else { return };
    let writer = Writer {
        objects: objects.clone(),
        actual,
        leading: leading.clone(),
        began: Instant::now(),
        bucket: Bucket::default(),
        again: None,
        last: None,
        written: BTreeMap::new(),
        keys: KeySlices::default(),
        most_parts: BTreeMap::new(),
        failing: false,
    };
    let feed = Feed::start(objects, small, left, recorder);
    keep(feed, writer, Peers::new(left)).await;
}

async fn keep(mut feed: Feed, mut writer: Writer, mut peers: Peers) {
    let mut pending: BTreeSet<NetworkAndNode> = BTreeSet::new();
    let mut compared: Option<Instant> = None;
    loop {
        let due = writer.next_due(&pending).into_iter().chain(compared.map(|at| at + COMPARE_INTERVAL)).min();
        tokio::select! {
            told = feed.next(&mut peers) => if !told {
                return;
            },
            () = sleep_until(due) => {}
        }
        tokio::time::sleep(GATHER_INTERVAL).await;
        feed.drain(&mut peers);
        let now = writer.began.elapsed();
        feed.watch_pods_if(peers.asks_for_pods(), now, &mut peers);
        // What is not known yet is not missing: nobody loses a peer because a controller has just started.
        if !feed.is_complete() || !writer.actual.is_synced() {
            continue;
        }
        let compares = compared.is_none_or(|at| at.elapsed() >= COMPARE_INTERVAL);
        if compares {
            writer.read_keys();
        }
        pending.extend(peers.settle(now));
        writer.keys.want(peers.label_keys(), &pending);
        pending.extend(writer.keys.due().map(key_slice));
        if compares {
            compared = Some(Instant::now());
            pending.extend(peers.slices().keys().cloned());
            pending.extend(writer.places());
            feed.tell_concerns(&peers, now);
            for (name, write) in feed.status_writes(&peers, now, Timestamp::now()) {
                let done = writer.write_status(&name, &write).await;
                feed.status_written(name, done, now);
            }
        }
        writer.write(&mut pending, peers.slices()).await;
    }
}

/// Where the slice is that says which labels those of a Network tell of.
fn key_slice(network: &Name) -> NetworkAndNode {
    (network.clone(), Name::default())
}

fn is_key_slice((_, node): &NetworkAndNode) -> bool {
    node.is_empty()
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Makes slices in the API what they should be.
struct Writer {
    objects: Objects,
    actual: Cache<PolicyPeerSliceSpec>,
    leading: watch::Receiver<Leading>,
    /// Where the steady clock begins.
    began: Instant,
    bucket: Bucket,
    /// When more may be written, if enough was for now.
    again: Option<Instant>,
    /// The place that was written last: the others have their turn first.
    last: Option<NetworkAndNode>,
    written: BTreeMap<NetworkAndNode, Instant>,
    /// Which labels slices of each Network tell of.
    keys: KeySlices,
    /// How many objects a place has had at most.
    most_parts: BTreeMap<NetworkAndNode, usize>,
    /// A write failed, and that was said.
    failing: bool,
}

impl Writer {
    /// Writes what the status of a policy says; whether that was done.
    async fn write_status(&self, policy: &PolicyName, write: &Write) -> bool {
        let leading = *self.leading.borrow();
        match leading.fence(self.objects.write(write)).await {
            // A policy that is gone has no status.
            Some(Ok(_) | Err(Error::NotFound { .. })) => true,
            Some(Err(error)) => {
                let error = error.with_causes();
                tracing::debug!(%policy, %error, "the status of a policy could not be written; retrying");
                false
            }
            None => false,
        }
    }

    /// The places that slices in the API are about.
    fn places(&self) -> Vec<NetworkAndNode> {
        let all = self.actual.list().into_iter();
        all.map(|(_, spec)| (Name::from(spec.network.as_str()), Name::from(spec.node.as_str()))).collect()
    }

    /// Reads which labels the slices in the API are said to tell of.
    fn read_keys(&mut self) {
        let mut found: BTreeMap<Name, BTreeSet<Name>> =
            self.keys.networks().map(|network| (network.clone(), BTreeSet::new())).collect();
        self.actual.for_each(|key, spec| {
            let place = key_slice(&spec.network.as_str().into());
            // One of another name is no list of ours.
            if spec.node.is_empty() && key.name() == slice_name(&place, 0) {
                let keys = spec.label_keys.iter().flatten().map(|key| key.as_str().into());
                found.insert(place.0, keys.collect());
            }
        });
        for (network, keys) in found {
            self.keys.read(&network, keys);
        }
    }

    /// Whether a place has to wait for what its Network's slices are said to tell of.
    fn is_blocked(&self, place: &NetworkAndNode) -> bool {
        !is_key_slice(place) && self.keys.blocks(&place.0)
    }

    /// When the next of these may be written.
    fn next_due(&self, pending: &BTreeSet<NetworkAndNode>) -> Option<Instant> {
        let now = Instant::now();
        let places = pending.iter().filter(|place| !self.is_blocked(place));
        let next = places.map(|place| due(self.written.get(place).copied(), now)).min()?;
        Some(self.again.map_or(next, |again| next.max(again)))
    }

    /// Writes those of the pending slices that may be written now. What fails stays pending.
    async fn write(
        &mut self,
        pending: &mut BTreeSet<NetworkAndNode>,
        wanted: &BTreeMap<NetworkAndNode, Vec<PolicyPeer>>,
    ) {
        let now = Instant::now();
        self.written.retain(|_, at| at.elapsed() < WRITE_INTERVAL);
        let mut due: Vec<NetworkAndNode> = pending
            .iter()
            .filter(|p| !self.written.contains_key(*p) && !self.is_blocked(p))
            .cloned()
            .collect();
        rate::take_turns(&mut due, |place| self.last.as_ref().is_some_and(|last| place <= last));
        self.again = None;
        let (mut writes, mut keys_sent) = (Vec::new(), BTreeMap::new());
        for place in due {
            let pods = wanted.get(&place).map(Vec::as_slice).unwrap_or_default();
            let of_place = match is_key_slice(&place) {
                true => self.key_writes(&place, &mut keys_sent),
                false => self.writes(&place, pods),
            };
            match of_place.is_empty() {
                true => {
                    pending.remove(&place);
                    self.keys.written(&place);
                }
                false => {
                    let steady = now.duration_since(self.began);
                    if let Err(next) = self.bucket.take(rate::PEER_SLICES, steady) {
                        self.again = Some(self.began + next);
                        break;
                    }
                    // The objects of one place go together, and the next place waits for what they cost.
                    let further = (1..of_place.len()).map(|_| self.bucket.take(rate::PEER_SLICES, steady));
                    further.take_while(Result::is_ok).for_each(drop);
                    self.last = Some(place.clone());
                    let most = self.most_parts.entry(place.clone()).or_default();
                    *most = (*most).max(of_place.len());
                    writes.extend(of_place.into_iter().map(|write| (place.clone(), write)));
                }
            }
        }
        let attempts = writes.into_iter().map(|(place, write)| {
            let (objects, leading) = (self.objects.clone(), self.leading.clone());
            async move {
                let leading = *leading.borrow();
                (place, leading.fence(async { objects.write(&write).await.map(drop) }).await)
            }
        });
        let results: Vec<_> = futures::stream::iter(attempts).buffered(CONCURRENT_WRITES).collect().await;
        let (mut failed, mut tried) = (BTreeSet::new(), BTreeSet::new());
        for (place, result) in results {
            self.written.insert(place.clone(), now);
            tried.insert(place.clone());
            match result {
                // One that is gone already is gone.
                Some(Ok(()) | Err(Error::NotFound { .. })) => {}
                Some(Err(error)) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        let error = error.with_causes();
                        tracing::warn!(%error, "a PolicyPeerSlice could not be written; retrying");
                    }
                    failed.insert(place);
                }
                None => {
                    failed.insert(place);
                }
            }
        }
        if failed.is_empty() {
            self.failing = false;
        }
        for place in tried.difference(&failed) {
            if !wanted.contains_key(place) {
                self.most_parts.remove(place);
            }
            match keys_sent.remove(&place.0).filter(|_| is_key_slice(place)) {
                Some(keys) => self.keys.sent(&place.0, keys),
                None => self.keys.written(place),
            }
        }
        pending.retain(|place| failed.contains(place) || !tried.contains(place));
    }

    /// What has to be written about the labels that slices of a Network tell of.
    fn key_writes(
        &mut self,
        place: &NetworkAndNode,
        sent: &mut BTreeMap<Name, BTreeSet<Name>>,
    ) -> Vec<Write> {
        let Some(keys) = self.keys.send(&place.0) else { return Vec::new() };
        sent.insert(place.0.clone(), keys.clone());
        if keys.is_empty() {
            return vec![Write::delete::<PolicyPeerSlice>(Key::cluster(slice_name(place, 0)))];
        }
        let label_keys = Some(keys.iter().map(|key| key.as_ref().to_owned()).collect());
        let network = place.0.as_ref().to_owned();
        let spec = PolicyPeerSliceSpec { network, label_keys, ..PolicyPeerSliceSpec::default() };
        vec![apply(place, 0, spec)]
    }

    /// What has to be written about a place.
    fn writes(&self, place: &NetworkAndNode, pods: &[PolicyPeer]) -> Vec<Write> {
        let mut writes = Vec::new();
        let mut part = 0;
        for (index, pods) in parts(pods).into_iter().enumerate() {
            part = index + 1;
            let (network, node) = (place.0.as_ref().to_owned(), place.1.as_ref().to_owned());
            // Which labels it tells of says the Network's slice for that.
            let label_keys = Some(Vec::new());
            let spec = PolicyPeerSliceSpec { network, node, label_keys, pods: pods.to_vec() };
            let actual = self.actual.get(&Key::cluster(slice_name(place, index)));
            // What is read may be older than what was written: nothing that is waited for goes by it.
            if self.keys.waits_for(place) || actual.is_none_or(|actual| *actual != spec) {
                writes.push(apply(place, index, spec));
            }
        }
        let waits = self.keys.waits_for(place);
        let maybe = self.most_parts.get(place).copied().filter(|_| waits).unwrap_or_default();
        loop {
            let key = Key::cluster(slice_name(place, part));
            if part >= maybe && self.actual.get(&key).is_none() {
                return writes;
            }
            writes.push(Write::delete::<PolicyPeerSlice>(key));
            part += 1;
        }
    }
}

/// Writes one object of a place.
fn apply(place: &NetworkAndNode, part: usize, spec: PolicyPeerSliceSpec) -> Write {
    let mut slice = PolicyPeerSlice::new(&slice_name(place, part), spec);
    let labels = [(NETWORK_LABEL, &*place.0), (MANAGED_BY_LABEL, MANAGED_BY)];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    slice.metadata.labels = Some(labels.into());
    Write::apply(&slice, MANAGER)
}

/// When a slice may be written: the first change after a quiet time at once.
fn due(written: Option<Instant>, now: Instant) -> Instant {
    written.map_or(now, |at| now.max(at + WRITE_INTERVAL))
}

/// The pods of a place, by the objects that hold them. One that is too large for any has one of its own.
fn parts(pods: &[PolicyPeer]) -> Vec<&[PolicyPeer]> {
    let (mut parts, mut rest, mut count, mut bytes) = (Vec::new(), pods, 0, 0);
    for pod in pods {
        let more = size(pod);
        if count > 0 && (count == MAX_PODS || bytes + more > MAX_BYTES) {
            let (part, behind) = rest.split_at(count);
            parts.push(part);
            (rest, count, bytes) = (behind, 0, 0);
        }
        (count, bytes) = (count + 1, bytes + more);
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

/// About how many bytes a pod takes as JSON.
fn size(pod: &PolicyPeer) -> usize {
    const NAMES: usize = 128;
    const EACH: usize = 8;
    let labels = pod.labels.iter().map(|(key, value)| key.len() + value.len() + EACH);
    let addresses = pod.addresses.iter().map(|address| address.len() + EACH);
    let ports = pod.ports.iter().map(|port| port.name.len() + 6 * EACH);
    let names = pod.namespace.len() + pod.name.len() + pod.uid.len() + NAMES;
    names + labels.chain(addresses).chain(ports).sum::<usize>()
}

/// What the slice about a place is called, whoever names it. Names of Networks and nodes may hold whatever
/// could stand between them, so that only a number tells two places apart.
pub(crate) fn slice_name((network, node): &NetworkAndNode, part: usize) -> String {
    let number = fnv1a(network.bytes().chain([0]).chain(node.bytes()));
    match part {
        0 => format!("{network}-{number:016x}"),
        part => format!("{network}-{number:016x}-{part}"),
    }
}
