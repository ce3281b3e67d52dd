//! Which block a node gets next: sizes, order, exhaustion, and no overlap whatever is there already.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::{
    AddressRange, Addresses, Block, BlockQuery, BlockSize, Family, Growth, Millis, NextBlockError,
    NodeAllocator, NodeConfig, Pool, Request, Standing, Subnet, Want, next_block,
};
use knit_types::{InterfaceName, Owner, SandboxId};
use proptest::prelude::*;

fn range(text: &str) -> AddressRange {
    AddressRange::from(text.parse::<IpNet>().unwrap())
}

fn pool(network: &'static str, subnets: &[(&str, &[&str])]) -> Pool {
    let subnets = subnets.iter().map(|(cidr, reserved)| {
        let reserved: Vec<_> = reserved.iter().map(|r| range(r)).collect();
        Subnet::new(cidr.parse().unwrap(), None, &reserved).unwrap()
    });
    Pool::new(network, 7, subnets).unwrap()
}

fn query<'a>(pool: &'a Pool, node: &'a str, existing: &'a [Block]) -> BlockQuery<'a> {
    BlockQuery { pool, node, existing, other_primaries: &[], avoid: &[], growth: Growth::default() }
}

fn take(pool: &Pool, node: &str, blocks: &mut Vec<Block>) -> String {
    let block = next_block(&query(pool, node, blocks)).unwrap();
    blocks.push(block);
    blocks.last().unwrap().to_string()
}

#[test]
fn blocks_double_with_use() {
    let pool = pool("blue", &[("10.77.0.0/16", &[]), ("fd77::/64", &[])]);
    let mut blocks = Vec::new();
    let mut given = Vec::new();
    for _ in 0..9 {
        given.push(take(&pool, "n1", &mut blocks));
    }
    let sizes: Vec<u32> = blocks.iter().map(|b| b.size().addresses()).collect();
    assert_eq!(sizes, [8, 8, 16, 32, 64, 128, 256, 256, 256]);
    assert_eq!(given[0], "10.77.0.0/29,fd77::/125");
    assert_eq!(given[3], "10.77.0.32/27,fd77::20/123");
    assert_eq!(take(&pool, "n2", &mut blocks), "10.77.4.0/29,fd77::400/125", "another node starts small");
}

#[test]
fn a_small_subnet_is_shared_out_in_small_blocks() {
    let pool = pool("small", &[("10.0.0.0/24", &[])]);
    let mut blocks = Vec::new();
    for _ in 0..6 {
        take(&pool, "n1", &mut blocks);
    }
    assert!(blocks.iter().all(|b| b.size().addresses() <= 16), "a sixteenth of 256 at most: {blocks:?}");
}

#[test]
fn exhaustion_says_which_family_and_how_much_there_was() {
    let pool = pool("tiny", &[("10.0.0.0/28", &[]), ("fd77::/64", &[])]).with_router(true);
    let mut blocks = Vec::new();
    take(&pool, "n1", &mut blocks);
    take(&pool, "n2", &mut blocks);
    let error = next_block(&query(&pool, "n3", &blocks)).unwrap_err();
    let expected = NextBlockError::Exhausted {
        network: "tiny".into(),
        node: "n3".into(),
        family: Family::V4,
        blocks: 2,
        in_blocks: 16,
        addresses: 16,
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "Network tiny has no IPv4 block left for node n3: 2 blocks hold 16 of 16 addresses; create a \
        Network with a larger subnet, or delete blocks of nodes that no longer exist"
    );
}

#[test]
fn what_is_only_reserved_is_no_block() {
    // A reserved range of 2^63 addresses is stepped over, not walked through.
    let pool =
        pool("blue", &[("10.77.0.0/16", &["10.77.0.0/27", "10.77.0.32/30"]), ("fd77::/64", &["fd77::/120"])]);
    let mut blocks = Vec::new();
    assert_eq!(take(&pool, "n1", &mut blocks), "10.77.0.32/29,fd77::100/125");
    let six = self::pool("six", &[("fd77::/60", &["fd77::/90"])]);
    assert_eq!(take(&six, "n1", &mut Vec::new()), "fd77::40:0:0/125");
}

#[test]
fn nothing_is_left_of_a_subnet_reserved_as_a_whole() {
    let pool = pool("static", &[("10.0.0.0/24", &["10.0.0.0/24"])]);
    assert!(matches!(
        next_block(&query(&pool, "n1", &[])),
        Err(NextBlockError::Exhausted { family: Family::V4, .. })
    ));
    // Beyond the first 2^40 addresses MACs would not be unique.
    let six = self::pool("six", &[("fd77::/64", &["fd77::/88"])]);
    assert!(next_block(&query(&six, "n1", &[])).is_err());
}

#[test]
fn primaries_do_not_overlap_on_one_node() {
    let red = pool("red", &[("10.0.0.0/16", &[])]).primary(true);
    let blue = pool("blue", &[("10.0.0.0/16", &[])]).primary(true);
    let theirs = [next_block(&query(&red, "n1", &[])).unwrap(), next_block(&query(&red, "n2", &[])).unwrap()];
    let avoid: [IpAddr; 1] = ["10.0.0.9".parse().unwrap()];
    let ask = |node, pool| BlockQuery { other_primaries: &theirs, avoid: &avoid, ..query(pool, node, &[]) };
    assert_eq!(next_block(&ask("n1", &blue)).unwrap().to_string(), "10.0.0.16/29");
    let secondary = blue.clone().primary(false);
    assert_eq!(next_block(&ask("n1", &secondary)).unwrap().to_string(), "10.0.0.0/29");
    let elsewhere = BlockQuery { avoid: &[], ..ask("n3", &blue) };
    assert_eq!(next_block(&elsewhere).unwrap().to_string(), "10.0.0.0/29", "other nodes do not matter");
}

#[test]
fn the_end_of_the_address_space_is_no_overflow() {
    let pool =
        pool("end", &[("255.255.255.0/28", &[]), ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0/124", &[])]);
    let mut blocks = Vec::new();
    take(&pool, "n1", &mut blocks);
    take(&pool, "n2", &mut blocks);
    assert!(next_block(&query(&pool, "n3", &blocks)).is_err());
}

/// A pool with some reserved ranges, small enough to run out.
fn any_pool() -> impl Strategy<Value = Pool> {
    let reserved = prop::collection::vec((0..64_u32, 0..24_u32), 0..4);
    (reserved.clone(), reserved, 0..3_u8, any::<bool>(), any::<bool>()).prop_map(
        |(r4, r6, families, primary, router)| {
            let v4 = |n: u32| IpAddr::from([10, 0, 0, n as u8]);
            let v6 = |n: u32| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n as u16]);
            let ranges = |list: &[(u32, u32)], to: &dyn Fn(u32) -> IpAddr| -> Vec<_> {
                list.iter()
                    .map(|(at, len)| AddressRange::new(to(*at), to((at + len).min(63))).unwrap())
                    .collect()
            };
            let four = Subnet::new("10.0.0.0/26".parse().unwrap(), None, &ranges(&r4, &v4)).unwrap();
            let six = Subnet::new("fd00::/122".parse().unwrap(), None, &ranges(&r6, &v6)).unwrap();
            let subnets = match families {
                0 => vec![four],
                1 => vec![six],
                _ => vec![four, six],
            };
            Pool::new("net", 1, subnets).unwrap().primary(primary).with_router(router)
        },
    )
}

proptest! {
    /// Until the pool is empty: no overlap, inside the subnets, aligned, and a pod can be served from each
    /// block.
    #[test]
    fn any_pool_is_cut_up_soundly(pool in any_pool(), nodes in prop::collection::vec(0..4_u8, 1..40),
        drops in prop::collection::vec(0..40_usize, 0..10)) {
        let mut blocks: Vec<Block> = Vec::new();
        for (round, node) in nodes.iter().enumerate() {
            if drops.contains(&round) && !blocks.is_empty() {
                blocks.remove(round % blocks.len());
            }
            let node = format!("n{node}");
            let Ok(block) = next_block(&query(&pool, &node, &blocks)) else {
                // Truly none: no aligned range of eight is free and has room for a pod.
                prop_assert!(!naive_fits(&pool, &blocks), "there was room among {blocks:?}");
                continue;
            };
            prop_assert!(blocks.iter().all(|b| !b.overlaps(&block)), "{block} overlaps");
            prop_assert!(block.size() >= BlockSize::SMALL && block.size() <= BlockSize::LARGE);
            for family in Family::ALL {
                prop_assert_eq!(block.start().get(family).is_some(), pool.subnet(family).is_some());
            }
            let mut allocator = NodeAllocator::new(node, NodeConfig::default());
            allocator.set_network(pool.clone());
            allocator.add_block(block.clone()).unwrap();
            let owner = Owner::Sandbox(SandboxId::new("s").unwrap());
            let wants = vec![Want::new(InterfaceName::new("eth0").unwrap(), "net")];
            let request = Request { owner, pod: None, wants };
            prop_assert!(allocator.lease(&request, Millis(0)).is_ok(), "{block} serves no pod");
            prop_assert_eq!(allocator.router("net").is_some(), pool.has_router());
            blocks.push(block);
        }
    }
}

/// Tries every pair of aligned ranges of eight.
fn naive_fits(pool: &Pool, blocks: &[Block]) -> bool {
    let starts = |family| -> Vec<Option<IpAddr>> {
        let Some(subnet) = pool.subnet(family) else { return vec![None] };
        let number = |n: u32| match subnet.range().first() {
            IpAddr::V4(a) => IpAddr::from((a.to_bits() + n).to_be_bytes()),
            IpAddr::V6(a) => IpAddr::from((a.to_bits() + u128::from(n)).to_be_bytes()),
        };
        (0..8).map(|k| Some(number(k * 8))).collect()
    };
    let need = 1 + usize::from(pool.has_router());
    starts(Family::V4).iter().any(|a| {
        starts(Family::V6).iter().any(|b| {
            let list: Vec<IpAddr> = a.iter().chain(b.iter()).copied().collect();
            let start = Addresses::from_list(&list).unwrap();
            let block = Block::new("net", "n", start, BlockSize::SMALL).unwrap();
            let ordinary =
                |i: &u32| block.at(*i).unwrap().iter().all(|a| pool.standing(a) == Standing::Ordinary);
            blocks.iter().all(|b| !b.overlaps(&block)) && (0..8).filter(ordinary).count() >= need
        })
    })
}
