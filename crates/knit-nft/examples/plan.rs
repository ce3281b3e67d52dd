//! Prints a table as `nft list table` does, and the plan that leads from it to another one.
//!
//!     cargo run -p knit-nft --example plan

use std::net::Ipv4Addr;

use knit_nft::{
    Chain, ChainKind, Element, Fake, Family, Hook, L4Proto, Nftables as _, Port, Rule, Set, TableId,
    TableState, Verdict, diff, field,
};

/// A table that leads a port of an address to one of several chains, each of which translates to one server.
fn balanced(servers: &[Ipv4Addr]) -> TableState {
    let service = (Ipv4Addr::new(192, 0, 2, 80), L4Proto::TCP, Port(80));
    let ports = Set::verdict_map::<(Ipv4Addr, L4Proto, Port)>("ports");
    let to_servers = Element::new(&service).verdict(Verdict::Goto("web".into()));
    let key = (field::ip_daddr(), field::l4proto(), field::th_dport());
    let number = |at: usize| knit_nft::Mark(u32::try_from(at).unwrap_or(u32::MAX));
    let chain_of = |server: &Ipv4Addr| format!("to-{server}");
    let choice: Vec<_> = servers
        .iter()
        .enumerate()
        .map(|(at, server)| (number(at), Verdict::Goto(chain_of(server).into())))
        .collect();
    let count = u32::try_from(servers.len()).unwrap_or(u32::MAX);
    let state = TableState::new(TableId::new(Family::Ip, "balance"))
        .set(ports, [to_servers])
        .chain(
            Chain::base("arriving", ChainKind::Nat, Hook::Prerouting, -100),
            [Rule::new().vmap(&key, "ports")],
        )
        .chain(Chain::regular("web"), [Rule::new().vmap_of(&field::numgen_random(count), &choice)]);
    servers.iter().fold(state, |state, server| {
        let translate = Rule::new().counter().dnat_to((*server).into(), Some(Port(8080)));
        state.chain(Chain::regular(chain_of(server)), [translate])
    })
}

fn main() -> knit_nft::Result<()> {
    let two = balanced(&[Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)]);
    // As it is read back: rules have handles then, by which they are replaced and deleted.
    let mut nft = Fake::new();
    nft.apply(&two)?;
    let found = nft.table(two.id())?;
    let other_two = balanced(&[Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 3)]);
    println!("{two}");
    println!("To exchange the second server:\n\n{}\n", diff(found.as_ref(), &other_two));
    println!("And where nothing is there yet:\n\n{}", diff(None, &other_two));
    Ok(())
}
