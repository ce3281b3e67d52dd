//! Blocks that come back, with everything that may go wrong on the way: the controller's plans and what
//! agents say of their blocks are the real ones; what they see is late, what they write is late or lost,
//! and they are killed between any two steps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use knit_api::names::RECLAIM_ANNOTATION;
use knit_api::{
    AddressBlock, HeldRanges, Network, NetworkSpec, NetworkStatus, NodeNetwork, NodeNetworkSpec,
    NodeNetworkStatus, NodeNetworkStatusNetwork, Subnet,
};
use knit_controller::{Action, AgentLease, BlockView, Cluster, Config, Memory, NodeView, Now, plan};
use knit_ipam::{LeaseKey, Millis, NodeAllocator, NodeConfig, Request, Snapshot, Want};
use knit_node::networks::give_back::SpareSince;
use knit_node::world::own::OwnBlocks;
use knit_node::world::{World, WorldStore};
use knit_types::{InterfaceName, Owner, SandboxId};
use proptest::prelude::*;

const NETWORK: &str = "blue";
const NODES: [&str; 3] = ["n0", "n1", "n2"];
/// How long a block must have been spare, in milliseconds.
const GRACE: u64 = 2_000;

/// What the API server has.
#[derive(Default)]
struct Api {
    blocks: BTreeMap<String, AddressBlock>,
    said: BTreeMap<String, NodeNetworkStatus>,
    version: u64,
}

/// One node, and its agent.
struct Node {
    name: &'static str,
    // What outlives the agent.
    disk: OwnBlocks,
    ledger: Snapshot,
    /// What was written and has not arrived yet.
    sent: Vec<NodeNetworkStatus>,
    // What does not.
    store: WorldStore,
    allocator: NodeAllocator,
    since: SpareSince,
}

struct Controller {
    view: Cluster,
    memory: Memory,
    config: Config,
    /// What was planned and is not carried out yet.
    pending: Vec<Action>,
}

struct Bed {
    api: Api,
    nodes: Vec<Node>,
    controller: Controller,
    now: u64,
}

#[derive(Clone, Debug)]
enum Op {
    /// A pod comes.
    Add(usize, u8),
    /// A pod goes.
    Del(usize, u8),
    /// The Network is not used any more.
    Leave(usize),
    /// The agent hears of its blocks.
    Hear(usize),
    /// The agent keeps what it knows on disk; killed before that, in it or after it, or not at all.
    Keep(usize, Kill),
    /// The agent says what it has.
    Say(usize),
    /// Something that an agent said arrives: the first, or the last.
    Arrive(usize, bool),
    /// The agent is killed, and another one starts, which hears of nothing.
    Restart(usize),
    /// The controller hears of blocks, or of what a node says.
    SeeBlocks,
    SeeSaid(usize),
    Plan,
    /// The first write is carried out, or lost.
    Write(bool),
    /// Another controller leads, and lists everything.
    Lead,
    Wait(u16),
    /// What usually follows each other about one node, up to some step.
    Usual(usize, usize, Kept),
}

#[derive(Clone, Copy, Debug)]
enum Kept {
    OnDisk,
    No,
}

#[derive(Clone, Copy, Debug)]
enum Kill {
    Not,
    Before,
    Within,
}

fn op() -> impl Strategy<Value = Op> {
    let node = 0..NODES.len();
    prop_oneof![
        8 => (node.clone(), 0..20_u8).prop_map(|(n, pod)| Op::Add(n, pod)),
        10 => (node.clone(), 0..20_u8).prop_map(|(n, pod)| Op::Del(n, pod)),
        4 => node.clone().prop_map(Op::Leave),
        8 => node.clone().prop_map(Op::Hear),
        6 => (
            node.clone(),
            prop_oneof![4 => Just(Kill::Not), 1 => Just(Kill::Before), 1 => Just(Kill::Within)],
        )
            .prop_map(|(n, kill)| Op::Keep(n, kill)),
        8 => node.clone().prop_map(Op::Say),
        8 => (node.clone(), prop::bool::weighted(0.8)).prop_map(|(n, first)| Op::Arrive(n, first)),
        2 => node.clone().prop_map(Op::Restart),
        6 => Just(Op::SeeBlocks),
        8 => node.prop_map(Op::SeeSaid),
        8 => Just(Op::Plan),
        10 => prop::bool::weighted(0.9).prop_map(Op::Write),
        1 => Just(Op::Lead),
        6 => (0..5_000_u16).prop_map(Op::Wait),
        14 => (0..NODES.len(), 0..=usual(0).len(), prop_oneof![2 => Just(Kept::OnDisk), 1 => Just(Kept::No)])
            .prop_map(|(n, steps, kept)| Op::Usual(n, steps, kept)),
    ]
}

/// A node says what it has, and the controller acts on it; twice, since a block goes back in two steps.
fn usual(n: usize) -> Vec<Op> {
    let said = [Op::Hear(n), Op::Keep(n, Kill::Not), Op::Say(n), Op::Wait(2_500), Op::Say(n)];
    let heard =
        [Op::Arrive(n, false), Op::SeeSaid(n), Op::SeeBlocks, Op::Plan, Op::Write(true), Op::Write(true)];
    let once = || said.iter().chain(&heard).cloned();
    once().chain(once()).collect()
}

fn network() -> Network {
    let spec = NetworkSpec {
        class: "knit".into(),
        subnets: vec![Subnet { cidr: "10.77.0.0/25".into(), ..Subnet::default() }],
        ..NetworkSpec::default()
    };
    let mut network = Network::new(NETWORK, spec);
    network.metadata.uid = Some("uid".into());
    network.metadata.resource_version = Some("1".into());
    network.status = Some(NetworkStatus { id: Some(7), ..NetworkStatus::default() });
    network
}

fn parsed() -> knit_model::Network {
    network().try_into().expect("a Network")
}

fn key(pod: u8) -> LeaseKey {
    let sandbox = SandboxId::new(format!("s{pod}")).expect("a sandbox");
    LeaseKey::new(Owner::Sandbox(sandbox), InterfaceName::new("net1").expect("a name"))
}

// === impl Api ===

impl Api {
    fn next_version(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    /// Carries out what a controller writes, if it is allowed to.
    fn write(&mut self, action: &Action, now: Timestamp) {
        match action {
            Action::GiveBlock(block) => {
                let name = block.metadata.name.clone().expect("a name");
                let version = self.next_version();
                let mut block = block.clone();
                block.metadata.uid = Some(version.clone());
                block.metadata.resource_version = Some(version);
                block.metadata.creation_timestamp = Some(Time(now));
                self.blocks.entry(name).or_insert(block);
            }
            Action::WantBlock { name, resource_version, reclaim, .. } => {
                let version = self.next_version();
                let Some(block) = self.blocks.get_mut(name) else { return };
                if block.metadata.resource_version.as_ref() == Some(resource_version) {
                    let wish = reclaim.clone().map(|wish| (RECLAIM_ANNOTATION.to_owned(), wish));
                    block.metadata.annotations = Some(wish.into_iter().collect());
                    block.metadata.resource_version = Some(version);
                }
            }
            Action::ReleaseBlock { name, uid, resource_version, .. } => {
                let is_it = |block: &AddressBlock| {
                    let same = block.metadata.resource_version == *resource_version;
                    block.metadata.uid.as_ref() == Some(uid) && (resource_version.is_none() || same)
                };
                if self.blocks.get(name).is_some_and(is_it) {
                    self.blocks.remove(name);
                }
            }
            _ => {}
        }
    }
}

// === impl Node ===

impl Node {
    fn new(name: &'static str) -> Self {
        let ledger = Snapshot { leases: Vec::new(), cooling: Vec::new() };
        let (disk, sent) = (OwnBlocks::new(), Vec::new());
        let allocator = NodeAllocator::new(name, NodeConfig::default());
        let (store, since) = (WorldStore::default(), SpareSince::default());
        let mut node = Self { name, disk, ledger, sent, store, allocator, since };
        node.start();
        node
    }

    /// An agent starts, with what an earlier one left.
    fn start(&mut self) {
        let blocks = self.disk.iter().map(|(name, own)| (name.clone(), Arc::clone(&own.block))).collect();
        let wishes = self.disk.iter().filter_map(|(name, own)| Some((name.clone(), own.reclaim.clone()?)));
        self.store = WorldStore::new(World {
            networks: Arc::new([(NETWORK.into(), Arc::new(parsed()))].into()),
            blocks: Arc::new(blocks),
            reclaimed: Arc::new(wishes.collect()),
            ..World::default()
        });
        self.store.kept().may_be(Arc::new(self.disk.clone()));
        self.since = SpareSince::default();
        let config = NodeConfig::default();
        self.allocator = NodeAllocator::restore(self.name, config, [], [], self.ledger.clone()).allocator;
        if !self.ledger.leases.is_empty() {
            self.set_up();
        }
    }

    fn hear(&mut self, api: &Api) {
        let own = || api.blocks.iter().filter(|(_, block)| block.spec.node == self.name);
        let blocks = own().map(|(name, block)| {
            let block = knit_model::AddressBlock::of(&block.spec).expect("a block");
            (name.clone(), Arc::new(block))
        });
        let wishes = own().filter_map(|(name, block)| {
            let wish = block.metadata.annotations.as_ref()?.get(RECLAIM_ANNOTATION)?;
            Some((name.clone(), wish.clone()))
        });
        self.store.update(|world| {
            (world.blocks, world.reclaimed) = (Arc::new(blocks.collect()), Arc::new(wishes.collect()));
        });
        if self.allocator.pool(NETWORK).is_some() {
            self.set_up();
        }
    }

    /// As `Networks::take_addresses` does it.
    fn set_up(&mut self) {
        let network = parsed();
        self.allocator.set_network(network.pool().expect("a pool").expect("a pool").clone());
        let own = self.store.get().own_blocks(self.name);
        let known: Vec<_> = self.allocator.blocks(NETWORK).cloned().collect();
        for gone in known.iter().filter(|known| own.values().all(|own| own.block.block() != *known)) {
            self.allocator.remove_block(NETWORK, &gone.start());
        }
        for own in own.values() {
            self.allocator.add_block(own.block.block().clone()).expect("a block");
            let start = own.block.block().start();
            self.allocator.set_wanted_back(NETWORK, &start, own.reclaim.is_some());
        }
    }

    fn add(&mut self, pod: u8, now: Millis) -> bool {
        self.set_up();
        let key = key(pod);
        let want = Want::new(key.interface.clone(), NETWORK);
        let request = Request { owner: key.owner, pod: None, wants: vec![want] };
        let leased = self.allocator.lease(&request, now).is_ok();
        self.ledger = self.allocator.snapshot(now);
        leased
    }

    fn del(&mut self, pod: u8, now: Millis) {
        self.allocator.free(&key(pod), now);
        self.ledger = self.allocator.snapshot(now);
    }

    fn keep(&mut self, kill: Kill) {
        let own = Arc::new(self.store.get().own_blocks(self.name));
        self.store.kept().may_be(Arc::clone(&own));
        match kill {
            Kill::Not => {
                self.disk = (*own).clone();
                self.store.kept().is(own);
            }
            Kill::Before => self.start(),
            Kill::Within => {
                self.disk = (*own).clone();
                self.start();
            }
        }
    }

    fn say(&mut self, now: Millis) {
        let said = self.since.look(&self.store, &self.allocator, self.name, (Millis(GRACE), now));
        let mut networks = Vec::new();
        if self.allocator.pool(NETWORK).is_some() {
            networks.push(NodeNetworkStatusNetwork {
                name: NETWORK.into(),
                ready: true,
                reason: "Ready".into(),
                message: None,
                attachments: 0,
                addresses: Vec::new(),
                blocks: i32::try_from(self.allocator.blocks(NETWORK).count()).expect("few"),
                wants_block: !self.allocator.wants_more(now).is_empty(),
                policies: None,
            });
        }
        let held = said.held.into_iter().map(|(network, ranges)| HeldRanges {
            network: network.to_string(),
            ranges: ranges.iter().map(ToString::to_string).collect(),
        });
        let held_ranges = held.collect();
        let status = NodeNetworkStatus {
            networks,
            held_ranges,
            spare_blocks: said.spare,
            ..NodeNetworkStatus::default()
        };
        self.sent.push(status);
    }

    /// The addresses that pods have, whether or not there is an agent.
    fn leased(&self) -> impl Iterator<Item = IpAddr> {
        self.ledger.leases.iter().flat_map(|lease| lease.addresses.iter().collect::<Vec<_>>())
    }
}

// === impl Controller ===

impl Controller {
    fn see_blocks(&mut self, api: &Api) {
        let view =
            |(name, block): (&String, &AddressBlock)| (name.clone(), Arc::new(BlockView::of(block.clone())));
        self.view.blocks = api.blocks.iter().map(view).collect();
    }

    fn see_said(&mut self, api: &Api, node: &str) {
        let Some(status) = api.said.get(node) else { return };
        let metadata = ObjectMeta { name: Some(node.into()), ..ObjectMeta::default() };
        let object = NodeNetwork { metadata, spec: NodeNetworkSpec {}, status: Some(status.clone()) };
        self.view.node_networks.insert(node.to_owned(), Arc::new(object));
    }

    fn lead(&mut self, api: &Api) {
        self.memory = Memory::default();
        self.see_blocks(api);
        NODES.iter().for_each(|node| self.see_said(api, node));
    }

    fn plan(&mut self, now: Now) {
        let own = AgentLease { version: format!("own {}", now.wall), holds: Duration::from_secs(15) };
        self.view.leases.insert(self.config.lease_name.clone(), own);
        let planned = plan(&self.view, &mut self.memory, &self.config, now);
        let of_blocks = planned.actions.into_iter().filter(|action| {
            matches!(action, Action::GiveBlock(_) | Action::WantBlock { .. } | Action::ReleaseBlock { .. })
        });
        self.pending.extend(of_blocks);
    }
}

// === impl Bed ===

impl Bed {
    fn new() -> Self {
        let mut view = Cluster { hears_agents: true, ..Cluster::default() };
        view.networks.insert(NETWORK.into(), Arc::new(parsed()));
        for (n, node) in NODES.iter().enumerate() {
            let node_view = NodeView {
                resource_version: "1".into(),
                addresses: vec![format!("192.0.2.{n}").parse().expect("an address")],
                ..NodeView::default()
            };
            view.nodes.insert((*node).to_owned(), Arc::new(node_view));
        }
        let (memory, pending) = (Memory::default(), Vec::new());
        let controller = Controller { view, memory, config: Config::new("test"), pending };
        Self { api: Api::default(), nodes: NODES.map(Node::new).into(), controller, now: 1_000_000 }
    }

    fn clock(&self) -> Now {
        let millis = i64::try_from(self.now).expect("a time");
        let wall = Timestamp::UNIX_EPOCH + SignedDuration::from_millis(millis);
        Now { wall, steady: Duration::from_millis(self.now) }
    }

    fn run(&mut self, op: &Op) {
        let (now, clock) = (Millis(self.now), self.clock());
        match *op {
            Op::Add(n, pod) => _ = self.nodes[n].add(pod, now),
            Op::Del(n, pod) => self.nodes[n].del(pod, now),
            // Fails while pods have addresses.
            Op::Leave(n) => _ = self.nodes[n].allocator.remove_network(NETWORK),
            Op::Hear(n) => self.nodes[n].hear(&self.api),
            Op::Keep(n, kill) => self.nodes[n].keep(kill),
            Op::Say(n) => self.nodes[n].say(now),
            Op::Arrive(n, first) => {
                let node = &mut self.nodes[n];
                let at = if first { 0 } else { node.sent.len().saturating_sub(1) };
                if at < node.sent.len() {
                    self.api.said.insert(node.name.to_owned(), node.sent.remove(at));
                }
            }
            Op::Restart(n) => self.nodes[n].start(),
            Op::SeeBlocks => self.controller.see_blocks(&self.api),
            Op::SeeSaid(n) => self.controller.see_said(&self.api, NODES[n]),
            Op::Plan => self.controller.plan(clock),
            Op::Write(arrives) => {
                if !self.controller.pending.is_empty() {
                    let action = self.controller.pending.remove(0);
                    if arrives {
                        self.api.write(&action, clock.wall);
                    }
                }
            }
            Op::Lead => self.controller.lead(&self.api),
            Op::Wait(millis) => self.now += u64::from(millis),
            Op::Usual(n, steps, kept) => {
                for op in usual(n).iter().take(steps) {
                    if !matches!((op, kept), (Op::Keep(..), Kept::No)) {
                        self.run(op);
                        self.check();
                    }
                }
            }
        }
    }

    fn check(&self) {
        let mut seen = BTreeSet::new();
        for node in &self.nodes {
            for address in node.leased() {
                assert!(seen.insert(address), "{address} is on {} and on another node", node.name);
                let is_in = |block: &&AddressBlock| {
                    let block = knit_model::AddressBlock::of(&block.spec).expect("a block");
                    block.node() == node.name && block.block().index_of(address).is_some()
                };
                assert!(
                    self.api.blocks.values().any(|b| is_in(&b)),
                    "{address} of {} lost its block",
                    node.name
                );
            }
        }
        let blocks: Vec<_> =
            self.api.blocks.values().map(|b| knit_model::AddressBlock::of(&b.spec)).collect();
        let blocks: Vec<_> =
            blocks.into_iter().map(|block| block.expect("a block").block().clone()).collect();
        for (i, one) in blocks.iter().enumerate() {
            assert!(blocks[i + 1..].iter().all(|other| !one.overlaps(other)), "{one} overlaps");
        }
    }

    /// Everybody hears everything, and does what is to be done.
    fn round(&mut self) {
        for n in 0..NODES.len() {
            for op in [Op::Hear(n), Op::Keep(n, Kill::Not), Op::Say(n)] {
                self.run(&op);
            }
            while !self.nodes[n].sent.is_empty() {
                self.run(&Op::Arrive(n, true));
            }
            self.run(&Op::SeeSaid(n));
        }
        self.run(&Op::SeeBlocks);
        self.run(&Op::Plan);
        while !self.controller.pending.is_empty() {
            self.run(&Op::Write(true));
        }
        self.check();
        self.run(&Op::Wait(10_000));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_address_is_in_two_places_and_no_live_one_loses_its_block(
        ops in prop::collection::vec(op(), 1..120)
    ) {
        let mut bed = Bed::new();
        for op in &ops {
            bed.run(op);
            bed.check();
        }
        // All pods go, and with them in the end all blocks.
        for n in 0..NODES.len() {
            (0..20).for_each(|pod| bed.run(&Op::Del(n, pod)));
            bed.run(&Op::Wait(60_000));
            bed.run(&Op::Leave(n));
        }
        for _ in 0..20 {
            bed.round();
        }
        prop_assert_eq!(bed.api.blocks.keys().collect::<Vec<_>>(), Vec::<&String>::new());
        prop_assert!(bed.nodes.iter().all(|node| node.disk.is_empty()));
        // The room is there for those who come.
        let mut attached = 0;
        for _ in 0..12 {
            attached += (0..20).filter(|pod| bed.nodes[0].add(*pod, Millis(bed.now))).count();
            bed.round();
        }
        prop_assert!(attached >= 20, "{} pods were attached", attached);
    }
}

/// Where many pods came and most of them went, few blocks stay.
#[test]
fn blocks_that_became_empty_go_back_while_others_are_in_use() {
    let mut bed = Bed::new();
    for _ in 0..12 {
        (0..40).for_each(|pod| _ = bed.nodes[0].add(pod, Millis(bed.now)));
        bed.round();
    }
    let all = bed.api.blocks.len();
    assert!(all >= 3, "{all}");
    // Those that are left are in the oldest block, as they came first.
    (3..40).for_each(|pod| bed.run(&Op::Del(0, pod)));
    bed.run(&Op::Wait(60_000));
    for _ in 0..20 {
        bed.round();
    }
    assert!(bed.api.blocks.len() < all, "{} of {all} blocks are left", bed.api.blocks.len());
    assert_eq!(bed.nodes[0].leased().count(), 3);
}

/// The agent is killed behind any step, with and without what it knew on disk, and a pod comes to the next
/// one before that hears of anything; the controller goes on with what it has.
#[test]
fn a_pod_that_comes_to_a_restarted_agent_finds_no_block_that_was_given_up() {
    let mut given_up = 0;
    for kept in [Kept::OnDisk, Kept::No] {
        for steps in 0..=usual(0).len() {
            let mut bed = Bed::new();
            while !bed.nodes[0].add(0, Millis(bed.now)) {
                bed.round();
            }
            bed.round();
            for op in [Op::Del(0, 0), Op::Wait(60_000), Op::Leave(0), Op::Usual(0, steps, kept)] {
                bed.run(&op);
            }
            let spare = bed.nodes[0].sent.iter().chain(bed.api.said.get("n0")).flat_map(|s| &s.spare_blocks);
            given_up += usize::from(spare.into_iter().any(|spare| spare.given_up.is_some()));
            for op in [Op::Restart(0), Op::Add(0, 1), Op::Arrive(0, false), Op::SeeSaid(0), Op::SeeBlocks] {
                bed.run(&op);
                bed.check();
            }
            for round in 0..6_u8 {
                for op in [Op::Plan, Op::Write(true), Op::Write(true), Op::SeeBlocks] {
                    bed.run(&op);
                    bed.check();
                }
                (0..20).for_each(|pod| bed.run(&Op::Add(1, 100 + round * 20 + pod)));
                bed.run(&Op::Usual(1, usual(1).len(), Kept::OnDisk));
                bed.check();
            }
        }
    }
    assert!(given_up > 0, "no block was given up");
}
