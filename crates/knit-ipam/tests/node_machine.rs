//! The node's allocator against a naive model: no address twice, none lost, counts exact, all or nothing,
//! over any sequence of leases, frees, blocks that come and go, restarts and time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::{
    AddressRange, Addresses, Block, BlockSize, Family, FamilyCounts, Lease, LeaseError, LeaseKey, LeaseKind,
    Mac, Millis, NodeAllocator, NodeConfig, PodRef, Pool, Removal, Request, Standing, Subnet, Want,
};
use knit_types::{InterfaceName, NetworkName, Owner, SandboxId};
use proptest::prelude::*;

const QUARANTINE: u64 = 100;
const NETWORKS: [&str; 3] = ["red", "blue", "six"];

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// red and blue are primary and overlap in IPv4; six overlaps red in IPv6 and is not primary.
fn pool(network: &str) -> Pool {
    let reserved = [AddressRange::from(net("10.0.0.32/29"))];
    let v4 = Subnet::new(net("10.0.0.0/24"), None, &reserved).unwrap();
    let v6 = |cidr: &str| Subnet::new(net(cidr), None, &[]).unwrap();
    match network {
        "red" => Pool::new("red", 1, [v4, v6("fd00::/64")]).unwrap().primary(true).with_router(true),
        "blue" => Pool::new("blue", 2, [v4, v6("fd01::/64")]).unwrap().primary(true),
        _ => Pool::new("six", 3, [v6("fd00::/64")]).unwrap().with_router(true),
    }
}

fn v6_prefix(network: &str) -> &'static str {
    if network == "blue" { "fd01::" } else { "fd00::" }
}

/// The k-th block of a Network: IPv4 counts up, IPv6 counts down, so that nothing pairs by accident.
fn block(network: &'static str, k: u8) -> Block {
    let v4 = format!("10.0.0.{}", u32::from(k) * 8).parse().unwrap();
    let v6 = format!("{}{:x}", v6_prefix(network), (5 - u32::from(k)) * 8).parse().unwrap();
    let start = if network == "six" { Addresses::V6(v6) } else { Addresses::Dual { v4, v6 } };
    Block::new(network, "n1", start, BlockSize::SMALL).unwrap()
}

fn pod(sandbox: u8) -> PodRef {
    // Two sandboxes per pod name: the next incarnation of the same pod.
    PodRef { namespace: "ns".into(), name: format!("p{}", sandbox / 2), uid: None }
}

#[derive(Clone, Debug)]
struct WantOp {
    interface: u8,
    network: u8,
    v4: Option<u8>,
    v6: Option<u8>,
    prefer: Option<u8>,
    mac: Option<u8>,
}

#[derive(Clone, Debug)]
enum Op {
    Lease { sandbox: u8, named: bool, wants: Vec<WantOp> },
    Free { sandbox: u8, interface: u8 },
    FreeSandbox(u8),
    Cancel { sandbox: u8, interface: u8 },
    AddBlock { network: u8, k: u8 },
    RemoveBlock { network: u8, k: u8 },
    WantBack { network: u8, k: u8, wanted: bool },
    Restart,
    Wait(u8),
}

fn rarely<T: std::fmt::Debug + Clone + 'static>(
    strategy: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Option<T>> {
    prop_oneof![5 => Just(None), 1 => strategy.prop_map(Some)]
}

fn want_op() -> impl Strategy<Value = WantOp> {
    (
        0..3_u8,
        prop_oneof![30 => 0..3_u8, 1 => Just(3)],
        rarely(0..56_u8),
        rarely(0..56_u8),
        rarely(0..48_u8),
        rarely(0..4_u8),
    )
        .prop_map(|(interface, network, v4, v6, prefer, mac)| WantOp {
            interface,
            network,
            v4,
            v6,
            prefer,
            mac,
        })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (0..16_u8, any::<bool>(), prop::collection::vec(want_op(), 1..4))
            .prop_map(|(sandbox, named, wants)| Op::Lease { sandbox, named, wants }),
        4 => (0..16_u8, 0..3_u8).prop_map(|(sandbox, interface)| Op::Free { sandbox, interface }),
        2 => (0..16_u8).prop_map(Op::FreeSandbox),
        1 => (0..16_u8, 0..3_u8).prop_map(|(sandbox, interface)| Op::Cancel { sandbox, interface }),
        4 => (0..3_u8, 0..6_u8).prop_map(|(network, k)| Op::AddBlock { network, k }),
        2 => (0..3_u8, 0..6_u8).prop_map(|(network, k)| Op::RemoveBlock { network, k }),
        3 => (0..3_u8, 0..6_u8, any::<bool>())
            .prop_map(|(network, k, wanted)| Op::WantBack { network, k, wanted }),
        1 => Just(Op::Restart),
        2 => (0..150_u8).prop_map(Op::Wait),
    ]
}

fn interface(n: u8) -> InterfaceName {
    InterfaceName::new(format!("eth{n}")).unwrap()
}

fn owner(sandbox: u8) -> Owner {
    Owner::Sandbox(SandboxId::new(format!("s{sandbox}")).unwrap())
}

fn request(sandbox: u8, named: bool, wants: &[WantOp]) -> Request {
    let wants = wants.iter().map(|w| {
        let network = NETWORKS.get(usize::from(w.network)).copied().unwrap_or("unknown");
        // Now and then two of one family.
        let v4 = w.v4.into_iter().flat_map(|n| [n, n ^ 9]).take(1 + usize::from(w.interface == 2));
        let v4 = v4.map(|n| format!("10.0.0.{n}").parse().unwrap());
        let v6 = w.v6.map(|n| format!("{}{n:x}", v6_prefix(network)).parse().unwrap());
        Want {
            interface: interface(w.interface),
            network: network.into(),
            addresses: v4.chain(v6).collect(),
            prefer: w.prefer.map(|n| format!("{}{n:x}", v6_prefix(network)).parse().unwrap()),
            mac: w.mac.map(|n| Mac([2, 0, 0, 0, 0, n])),
        }
    });
    Request { owner: owner(sandbox), pod: named.then(|| pod(sandbox)), wants: wants.collect() }
}

/// What must be true, kept as naively as possible.
#[derive(Default)]
struct Model {
    leases: BTreeMap<LeaseKey, Lease>,
    blocks: Vec<(Block, bool)>,
    /// Those that are wanted back.
    back: Vec<Block>,
    freed: BTreeMap<(NetworkName, IpAddr), u64>,
    now: u64,
}

impl Model {
    fn holders<'a>(&'a self, network: &str, addresses: &'a Addresses) -> impl Iterator<Item = &'a Lease> {
        let network = network.to_owned();
        let both_primary = move |other: &str| network != "six" && other != "six" || network == other;
        self.leases
            .values()
            .filter(move |l| both_primary(&l.network) && l.addresses.iter().any(|a| addresses.contains(a)))
    }

    fn quarantined(&self, network: &str, pair: &Addresses) -> bool {
        pair.iter()
            .filter_map(|a| self.freed.get(&(network.parse().unwrap(), a)))
            .any(|at| self.now < at + QUARANTINE)
    }

    fn slot(&self, network: &str, address: IpAddr) -> Option<(&Block, bool, u32)> {
        let mut blocks = self.blocks.iter().filter(|(b, _)| b.network() == network);
        blocks.find_map(|(b, withdrawn)| Some((b, *withdrawn, b.index_of(address)?)))
    }

    fn free(&mut self, key: &LeaseKey, cooled: bool) {
        let Some(lease) = self.leases.remove(key) else { return };
        if cooled {
            for address in lease.addresses.iter() {
                self.freed.insert((lease.network.clone(), address), self.now);
            }
        }
        let in_use = |b: &Block| {
            self.leases
                .values()
                .any(|l| l.network == b.network() && l.addresses.iter().any(|a| b.index_of(a).is_some()))
        };
        self.blocks.retain(|(b, withdrawn)| !withdrawn || in_use(b));
        self.forget_what_is_gone();
    }

    fn forget_what_is_gone(&mut self) {
        self.back.retain(|back| self.blocks.iter().any(|(block, _)| block == back));
    }

    /// Counts from first principles: each index of each block is looked at on its own.
    fn counts(&self, network: &str, family: Family) -> FamilyCounts {
        let pool = pool(network);
        let mut counts = FamilyCounts::default();
        for (block, withdrawn) in self.blocks.iter().filter(|(b, _)| b.network() == network) {
            let mut router_wanted = pool.has_router();
            for pair in (0..8).map(|i| block.at(i).unwrap()) {
                let ordinary = pair.iter().all(|a| pool.standing(a) == Standing::Ordinary);
                let router = ordinary && router_wanted;
                router_wanted &= !router;
                let used = self
                    .leases
                    .values()
                    .any(|l| l.network == network && l.addresses.iter().any(|a| pair.contains(a)));
                counts.total += 1;
                let place = if used {
                    &mut counts.used
                } else if router {
                    &mut counts.router
                } else if !ordinary {
                    &mut counts.reserved
                } else if self.quarantined(network, &pair) {
                    &mut counts.quarantined
                } else if *withdrawn
                    || self.back.contains(block)
                    || self.holders(network, &pair).next().is_some()
                {
                    &mut counts.blocked
                } else {
                    &mut counts.free
                };
                *place += 1;
            }
        }
        let own = self.leases.values().filter(|l| l.network == network);
        counts.outside = own
            .flat_map(|l| l.addresses.of_family(family))
            .filter(|a| self.slot(network, *a).is_none())
            .count() as u64;
        counts
    }

    fn check(&self, real: &NodeAllocator) {
        let leases: Vec<&Lease> = real.leases().collect();
        assert_eq!(leases, self.leases.values().collect::<Vec<_>>(), "none lost, none invented");
        let mut seen = BTreeSet::new();
        let mut macs = BTreeSet::new();
        for lease in &leases {
            for address in lease.addresses.iter() {
                let scope = if lease.network == "six" { "six" } else { "primary" };
                assert!(seen.insert((scope, address)), "{address} twice");
                assert_eq!(real.holder(&lease.network, address), Some(*lease));
            }
            assert!(macs.insert((&lease.network, lease.mac)), "{} twice in {}", lease.mac, lease.network);
        }
        for network in NETWORKS {
            let counts = real.counts(network, Millis(self.now)).unwrap();
            for family in pool(network).families() {
                let counts = counts.get(family).unwrap();
                assert_eq!(counts, self.counts(network, family), "{network} {family}");
            }
            let router = real.router(network).map(|(addresses, _)| addresses);
            for address in router.iter().flat_map(Addresses::iter) {
                assert_eq!(real.holder(network, address), None, "a pod has the router's address");
            }
        }
    }

    /// Whether a lease that was just given is one that could be given before.
    fn check_new(&self, lease: &Lease, want: &Want, pod: Option<&PodRef>, also_asked: bool) {
        let pool = pool(&lease.network);
        for address in lease.addresses.iter() {
            assert!(!matches!(pool.standing(address), Standing::Never(_) | Standing::Outside), "{address}");
            let block = self.slot(&lease.network, address).map(|(block, ..)| block);
            let is_wanted_back = block.is_some_and(|block| self.back.contains(block));
            assert!(!is_wanted_back || pool.standing(address) == Standing::Reserved, "{address}");
            if let Some((block, _, index)) = self.slot(&lease.network, address) {
                let pair = block.at(index).unwrap();
                let mut others = self.leases.values().filter(|l| l.network == lease.network);
                assert!(!others.any(|l| l.addresses.iter().any(|a| pair.contains(a))), "{pair} is shared");
            }
        }
        assert_eq!(lease.addresses.v4().is_some(), pool.subnet(Family::V4).is_some());
        assert_eq!(lease.addresses.v6().is_some(), pool.subnet(Family::V6).is_some());
        assert!(want.is_met_by(lease));
        if lease.kind == LeaseKind::Dynamic {
            assert_eq!(lease.mac, pool.mac(lease.addresses.firsts()));
            let (block, withdrawn, index) = self.slot(&lease.network, lease.addresses.first()).unwrap();
            assert_eq!(lease.addresses, block.at(index).unwrap(), "paired by index");
            assert!(!withdrawn && !self.back.contains(block));
            let sticky = pod.is_some() && want.prefer.is_some_and(|a| lease.addresses.contains(a));
            assert!(sticky || !self.quarantined(&lease.network, lease.addresses.firsts()), "reused too soon");
        } else {
            assert!(also_asked);
        }
    }
}

fn run(ops: Vec<Op>) {
    let config = NodeConfig { quarantine: Millis(QUARANTINE), low_percent: 25 };
    let mut real = NodeAllocator::new("n1", config);
    let mut model = Model::default();
    for network in NETWORKS {
        real.set_network(pool(network));
    }
    for op in ops {
        let now = Millis(model.now);
        match op {
            Op::Lease { sandbox, named, wants } => {
                let request = request(sandbox, named, &wants);
                let before = real.snapshot(now);
                match real.lease(&request, now) {
                    Ok(leases) => {
                        assert_eq!(leases.len(), request.wants.len());
                        for (lease, want) in leases.iter().zip(&request.wants) {
                            if !model.leases.contains_key(&lease.key) {
                                let asked = !want.addresses.is_empty() || want.mac.is_some();
                                model.check_new(lease, want, request.pod.as_ref(), asked);
                            }
                        }
                        for lease in &leases {
                            model.leases.insert(lease.key.clone(), lease.clone());
                        }
                        assert_eq!(real.lease(&request, now).as_ref(), Ok(&leases), "the same again");
                    }
                    Err(error) => {
                        assert_eq!(real.snapshot(now), before, "nothing was leased: {error}");
                        if let (LeaseError::Exhausted { network, counts, next_free_at, .. }, [_]) =
                            (&error, request.wants.as_slice())
                        {
                            let family = pool(network).families().next().unwrap();
                            assert_eq!(**counts, model.counts(network, family));
                            // A pod that asks for one half of the only free index gets no other index.
                            let spare = request.wants[0].addresses.len() as u64;
                            assert!(counts.free <= spare, "{error}, yet {} are free", counts.free);
                            assert_eq!(
                                next_free_at.is_some(),
                                counts.quarantined > 0 && next_free_at.is_some()
                            );
                        }
                    }
                }
            }
            Op::Free { sandbox, interface } => {
                let key = LeaseKey::new(owner(sandbox), self::interface(interface));
                assert_eq!(real.free(&key, now).as_ref(), model.leases.get(&key));
                model.free(&key, true);
            }
            Op::FreeSandbox(sandbox) => {
                let owner = owner(sandbox);
                let keys: Vec<_> = model.leases.keys().filter(|k| k.owner == owner).cloned().collect();
                let freed = real.free_owner(&owner, now);
                assert_eq!(freed.iter().map(|l| &l.key).collect::<Vec<_>>(), keys.iter().collect::<Vec<_>>());
                keys.iter().for_each(|key| model.free(key, true));
            }
            Op::Cancel { sandbox, interface } => {
                let key = LeaseKey::new(owner(sandbox), self::interface(interface));
                real.cancel(&key);
                model.free(&key, false);
            }
            Op::AddBlock { network, k } => {
                let block = block(NETWORKS[usize::from(network)], k);
                real.add_block(block.clone()).unwrap();
                model.blocks.retain(|(b, _)| *b != block);
                model.blocks.push((block, false));
            }
            Op::RemoveBlock { network, k } => {
                let block = block(NETWORKS[usize::from(network)], k);
                let used = model.leases.values().any(|l| {
                    l.network == block.network() && l.addresses.iter().any(|a| block.index_of(a).is_some())
                });
                let known = model.blocks.iter().position(|(b, _)| *b == block);
                match real.remove_block(block.network(), &block.start()) {
                    Removal::Removed => {
                        assert!(!used);
                        model.blocks.remove(known.unwrap());
                    }
                    Removal::Draining { leased } => {
                        assert!(used && leased > 0);
                        model.blocks[known.unwrap()].1 = true;
                    }
                    Removal::Unknown => assert_eq!(known, None),
                }
                model.forget_what_is_gone();
            }
            Op::WantBack { network, k, wanted } => {
                let block = block(NETWORKS[usize::from(network)], k);
                real.set_wanted_back(block.network(), &block.start(), wanted);
                model.back.retain(|back| *back != block);
                if wanted && model.blocks.iter().any(|(known, _)| *known == block) {
                    model.back.push(block);
                }
            }
            Op::Restart => {
                // The API no longer lists what was taken back.
                model.blocks.retain(|(_, withdrawn)| !withdrawn);
                // Who told the allocator what is wanted back tells it again.
                model.back.clear();
                let text = serde_json::to_string(&real.snapshot(now)).unwrap();
                let snapshot = serde_json::from_str(&text).unwrap();
                let blocks = model.blocks.iter().map(|(b, _)| b.clone());
                let restored = NodeAllocator::restore("n1", config, NETWORKS.map(pool), blocks, snapshot);
                assert_eq!(restored.clashing, []);
                assert_eq!(restored.refused, []);
                real = restored.allocator;
            }
            Op::Wait(millis) => model.now += u64::from(millis),
        }
        model.check(&real);
        for knit_ipam::Spare { block, .. } in real.spare_blocks(Millis(model.now)) {
            let used = model.leases.values().any(|l| {
                l.network == block.network() && l.addresses.iter().any(|a| block.index_of(a).is_some())
            });
            assert!(!used, "a block that pods use is not spare");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_sequence(ops in prop::collection::vec(op(), 1..120)) {
        run(ops);
    }
}
