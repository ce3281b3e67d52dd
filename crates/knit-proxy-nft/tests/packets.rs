//! The project's own packet-flow cases, against real nftables, with real packets.

use knit_kernel::testing::in_namespaces;
use knit_proxy_nft::{Config, NftBackend};
use knit_proxy_testkit::{FILES, World, read, run};

fn run_file(name: &str) {
    let (_, text) = FILES.iter().find(|(file, _)| *file == name).expect("a file of that name");
    let cases = read(text).expect("the cases are right");
    let world = World::new().expect("a world");
    let open = |node: &knit_kernel::NetNs| NftBackend::new_in(node, Config::default()).expect("a backend");
    let wrong = run(&world, &cases, open).expect("the cases run");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn cluster_ip() {
    in_namespaces(|| run_file("cluster-ip"));
}

#[test]
fn policies() {
    in_namespaces(|| run_file("policies"));
}

#[test]
fn masquerade() {
    in_namespaces(|| run_file("masquerade"));
}

#[test]
fn frontends() {
    in_namespaces(|| run_file("frontends"));
}

#[test]
fn changes() {
    in_namespaces(|| run_file("changes"));
}
