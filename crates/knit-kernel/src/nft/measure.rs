//! What the largest operations cost: to be called by benchmarks, in a namespace of their own.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use knit_nft::encode::Encoded;
use knit_nft::{
    Chain, ChainKind, Element, Family, Hook, L4Proto, Mark, Nftables, Port, Result, Rule, Set, TableId,
    Transaction, Verdict, field,
};

use super::Kernel;

/// Times of one run of [`service_maps`].
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Building the typed elements.
    pub build: Duration,
    /// Encoding the whole transaction.
    pub encode: Duration,
    /// Bytes of the batch.
    pub bytes: usize,
    /// Committing it, with the encoding.
    pub commit: Duration,
    /// Batches that were needed.
    pub batches: usize,
    /// Replacing one endpoint (delete and add in one transaction): median of a hundred.
    pub replace: Duration,
    /// Reading the whole table back.
    pub list: Duration,
    /// Deleting the table.
    pub delete: Duration,
}

/// Loads `services` services of `endpoints` endpoints each as one dispatch map and one endpoint map, replaces
/// single endpoints, reads everything back and deletes it.
pub fn service_maps(kernel: &mut Kernel, services: u32, endpoints: u32) -> Result<Timings> {
    let id = TableId::new(Family::Ip, "knit-measure");
    let dispatch = Set::verdict_map::<(Ipv4Addr, L4Proto, Port)>("service-ips");
    let slots = Set::map::<(Ipv4Addr, L4Proto, Port, Mark), (Ipv4Addr, Port)>("endpoints");
    let chain: knit_nft::Name = format!("lb-{endpoints}").into();
    let slot = |service: u32, slot: u32, port: u16| {
        let key = (Ipv4Addr::from(0x0a60_0000 + service), L4Proto::TCP, Port(80), Mark(slot));
        Element::new(&key).value(&(Ipv4Addr::from(0x0af0_0000 + service * endpoints + slot), Port(port)))
    };

    let start = Instant::now();
    let mut backends = Vec::with_capacity((services * endpoints) as usize);
    let mut frontends = Vec::with_capacity(services as usize);
    for service in 0..services {
        let key = (Ipv4Addr::from(0x0a60_0000 + service), L4Proto::TCP, Port(80));
        frontends.push(Element::new(&key).verdict(Verdict::Goto(chain.clone())));
        backends.extend((0..endpoints).map(|index| slot(service, index, 8080)));
    }
    let service = (field::ip_daddr(), field::l4proto(), field::th_dport());
    let picked = (field::ip_daddr(), field::l4proto(), field::th_dport(), field::numgen_random(endpoints));
    let mut tx = Transaction::new();
    tx.create_table(id.clone())
        .add_chain(&id, Chain::regular(chain.clone()))
        .add_set(&id, slots.clone())
        .add_set(&id, dispatch.clone())
        .add_rule(&id, chain.clone(), Rule::new().dnat_map(Family::Ip, &picked, "endpoints"))
        .add_elements(&id, &slots, backends)
        .add_elements(&id, &dispatch, frontends)
        .add_chain(&id, Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, -100))
        .add_rule(&id, "prerouting", Rule::new().vmap(&service, "service-ips"));
    let build = start.elapsed();

    let start = Instant::now();
    let mut encoded = Encoded::begin(None);
    for (index, op) in tx.ops().iter().enumerate() {
        // What is measured is valid; a mistake would show at once in the commit below.
        let _ = encoded.op(index, op);
    }
    let (encode, bytes) = (start.elapsed(), encoded.batch.bytes());
    drop(encoded);

    let start = Instant::now();
    let batches = kernel.commit_chunked(&tx)?;
    let commit = start.elapsed();

    let mut times = Vec::with_capacity(100);
    for round in 0..100u32.min(services) {
        let mut tx = Transaction::new();
        tx.delete_elements(&id, &slots, vec![slot(round, 0, 8080)]);
        tx.add_elements(&id, &slots, vec![slot(round, 0, 9090)]);
        let start = Instant::now();
        kernel.commit(&tx)?;
        times.push(start.elapsed());
    }
    times.sort();
    let replace = times.get(times.len() / 2).copied().unwrap_or_default();

    let start = Instant::now();
    kernel.table(&id)?;
    let list = start.elapsed();

    let mut tx = Transaction::new();
    tx.delete_table(&id);
    let start = Instant::now();
    kernel.commit(&tx)?;
    Ok(Timings { build, encode, bytes, commit, batches, replace, list, delete: start.elapsed() })
}
