//! What the controller reads: a cache of each kind, of which only what counts is kept, and what has changed
//! in them.

use std::sync::Arc;

use futures::future::{FutureExt, select_all};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::{NetworkPolicy, ServiceCIDR};
use knit_api::{AddressBlock, NetworkAttachment, NetworkClass, NodeNetwork};
use knit_model::{Network, service_ranges};
use knit_objects::{Cache, Key, Objects, Progress};
use tokio::sync::watch;

use crate::cluster::{AgentLease, AttachmentView, BlockView, Cluster, NamespaceView, NodeView, PolicyView};
use crate::config::Config;
use crate::plan::{Change, Indexed};

#[derive(Clone, Debug)]
pub(super) struct Caches {
    pub(super) classes: Cache<NetworkClass>,
    pub(super) networks: Cache<Network>,
    pub(super) blocks: Cache<BlockView>,
    pub(super) node_networks: Cache<NodeNetwork>,
    pub(super) nodes: Cache<NodeView>,
    pub(super) namespaces: Cache<NamespaceView>,
    pub(super) attachments: Cache<AttachmentView>,
    pub(super) service_cidrs: Cache<Vec<ipnet::IpNet>>,
    pub(super) leases: Cache<AgentLease>,
    pub(super) policies: Cache<PolicyView>,
}

// === impl Caches ===

impl Caches {
    pub(super) fn start(objects: &Objects, config: &Config) -> Self {
        // Only a selector can be wrong, and there is none here.
        let expect = "a watch without selectors starts";
        Self {
            classes: objects.watch().cache().expect(expect),
            networks: objects.watch::<knit_api::Network>().map(network).cache().expect(expect),
            blocks: objects
                .watch::<AddressBlock>()
                .map(|block| Some(BlockView::of(block)))
                .cache_of_news()
                .expect(expect),
            node_networks: objects.watch().cache().expect(expect),
            nodes: objects
                .watch::<Node>()
                .map(|node| Some(NodeView::of(&node)))
                .cache_of_news_by(NodeView::says_the_same)
                .expect(expect),
            namespaces: objects
                .watch::<Namespace>()
                .map(|n| Some(NamespaceView::of(n)))
                .cache_of_news()
                .expect(expect),
            attachments: objects
                .watch::<NetworkAttachment>()
                .map(|attachment| Some(AttachmentView::of(attachment)))
                .cache_of_news_by(AttachmentView::says_the_same)
                .expect(expect),
            service_cidrs: objects
                .watch::<ServiceCIDR>()
                .map(|s| Some(service_ranges(&s)))
                .cache_of_news()
                .expect(expect),
            leases: objects
                .watch::<Lease>()
                .namespace(config.namespace.clone())
                .map(|lease| AgentLease::of(&lease))
                .cache()
                .expect(expect),
            policies: objects.watch::<NetworkPolicy>().map(PolicyView::of).cache().expect(expect),
        }
    }

    pub(super) async fn wait_synced(&self) {
        fn synced<T>(cache: &Cache<T>) -> watch::Receiver<Progress> {
            cache.changes()
        }
        let mut all = self.changes();
        all.push(synced(&self.leases));
        for progress in &mut all {
            // The sender lives in the cache that we hold.
            let _ = progress.wait_for(|progress| progress.synced.is_some()).await;
        }
    }

    /// Changes that start a pass.
    pub(super) fn changes(&self) -> Vec<watch::Receiver<Progress>> {
        vec![
            self.classes.changes(),
            self.networks.changes(),
            self.blocks.changes(),
            self.node_networks.changes(),
            self.nodes.changes(),
            self.namespaces.changes(),
            self.attachments.changes(),
            self.service_cidrs.changes(),
        ]
    }

    /// From now on [`Self::catch_up`] finds what has changed, beginning with everything there is.
    pub(super) fn track(&self) {
        self.classes.track();
        self.networks.track();
        self.blocks.track();
        self.node_networks.track();
        self.nodes.track();
        self.namespaces.track();
        self.attachments.track();
        self.service_cidrs.track();
        self.leases.track();
        self.policies.track();
    }

    /// The Networks and the blocks, and nothing else.
    pub(super) fn networks_and_blocks(&self) -> Cluster {
        let networks = self.networks.list().into_iter();
        let blocks = self.blocks.list().into_iter();
        Cluster {
            networks: networks.map(|(_, network)| (network.name().clone(), network)).collect(),
            blocks: blocks.map(|(key, block)| (key.name().to_owned(), block)).collect(),
            ..Cluster::default()
        }
    }

    /// Takes over what has changed since the last time, and nothing else.
    pub(super) fn catch_up(&self, known: &mut Indexed) {
        fn each<T>(cache: &Cache<T>, mut take: impl FnMut(Key, Option<Arc<T>>)) {
            for (key, object) in cache.take_changed() {
                take(key, object);
            }
        }
        let name = |key: &Key| key.name().to_owned();
        let place = |key: &Key| (key.namespace().unwrap_or_default().to_owned(), key.name().to_owned());
        known.apply(Change::HearsAgents(self.leases.connection().borrow().is_connected()));
        each(&self.classes, |key, class| known.apply(Change::Class(name(&key), class)));
        each(&self.networks, |key, network| {
            // Of any other name none was read.
            if let Ok(name) = key.name().parse() {
                known.apply(Change::Network(name, network));
            }
        });
        each(&self.nodes, |key, node| known.apply(Change::Node(name(&key), node)));
        each(&self.node_networks, |key, said| known.apply(Change::NodeNetwork(name(&key), said)));
        each(&self.blocks, |key, block| known.apply(Change::Block(name(&key), block)));
        each(&self.namespaces, |key, namespace| known.apply(Change::Namespace(name(&key), namespace)));
        each(&self.attachments, |key, view| known.apply(Change::Attachment(place(&key), view)));
        each(&self.policies, |key, policy| known.apply(Change::Policy(place(&key), policy)));
        each(&self.leases, |key, lease| {
            known.apply(Change::Lease(name(&key), lease.map(|lease| (*lease).clone())));
        });
        if !self.service_cidrs.take_changed().is_empty() {
            let mut ranges: Vec<_> =
                self.service_cidrs.list().iter().flat_map(|(_, r)| r.iter().copied()).collect();
            ranges.sort_unstable();
            known.apply(Change::ServiceRanges(ranges));
        }
    }
}

fn network(object: knit_api::Network) -> Option<Network> {
    let read = Network::try_from(object);
    read.inspect_err(|error| tracing::warn!(%error, "a Network cannot be read and is left out")).ok()
}

pub(super) fn any_change(changes: &mut [watch::Receiver<Progress>]) -> futures::future::BoxFuture<'_, ()> {
    select_all(changes.iter_mut().map(|change| change.changed().map(|_| ()).boxed())).map(|_| ()).boxed()
}
