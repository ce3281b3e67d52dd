//! What is written for which change, against nftables in memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use knit_kernel::nft::{
    Error, Fake, Family, Generation, Nftables, Op, Result, TableId, TableState, Transaction,
};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{Endpoint, EndpointGroup, NodeInfo, Protocol, Service, ServicePort, TrafficPolicy};
use knit_proxy::view::{LocalTraffic, View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend, remove_table};

/// nftables in memory that test and backend share.
#[derive(Clone, Default)]
struct Shared {
    fake: Arc<Mutex<Fake>>,
    /// Transactions that mention this text are refused, as by a kernel that does not like an element.
    refuse: Arc<Mutex<Option<String>>>,
    /// Everything about this family is refused, as by a kernel that does not have it.
    without: Arc<Mutex<Option<Family>>>,
    /// Somebody else commits after each look, as on a node where other programs are busy.
    busy: Arc<Mutex<bool>>,
    /// Chains are not deleted together with elements that led there, as by kernels before 6.2.
    old: Arc<Mutex<bool>>,
    /// How often a whole table was read: a full sync does, and a change does not.
    reads: Arc<AtomicUsize>,
}

const OTHERS: &str = "somebody-elses";

impl Shared {
    fn with<T>(&self, f: impl FnOnce(&mut Fake) -> T) -> T {
        f(&mut self.fake.lock().unwrap())
    }

    fn check(&self, tx: &Transaction) -> Result<()> {
        if let Some(family) = *self.without.lock().unwrap()
            && tx.ops().iter().any(|op| op.to_string().contains(&format!(" {family} knit-proxy")))
        {
            // A table that is not there is refused in much the same way.
            let mut wrong = Transaction::new();
            wrong.delete_table(&TableId::new(family, "missing"));
            return self.with(|fake| fake.commit(&wrong));
        }
        let deletes = |what: &str| tx.ops().iter().any(|op| op.to_string().starts_with(what));
        if *self.old.lock().unwrap() && deletes("delete chain") && tx.to_string().contains(" actions") {
            // A chain that something still leads to.
            let mut wrong = Transaction::new();
            wrong.delete_chain(&TableId::new(Family::Ip, "knit-proxy"), "services");
            return self.with(|fake| fake.commit(&wrong));
        }
        let Some(bad) = self.refuse.lock().unwrap().clone() else { return Ok(()) };
        for op in tx.ops() {
            if let Op::AddElements { shape, elements, table, .. } = op
                && let Some(element) = elements.iter().find(|e| format!("{:?}", e.key).contains(&bad))
            {
                // A set that is not there makes the fake refuse the element, and name it.
                let mut shape = shape.clone();
                shape.set = "missing".into();
                let mut wrong = Transaction::new();
                wrong.push(Op::AddElements {
                    table: table.clone(),
                    shape,
                    elements: vec![element.clone()],
                    if_exists: knit_kernel::nft::IfExists::Keep,
                });
                return self.with(|fake| fake.commit(&wrong));
            }
        }
        Ok(())
    }

    fn table(&self, family: Family) -> TableState {
        let id = TableId::new(family, "knit-proxy");
        self.with(|fake| fake.table(&id)).expect("a listing").expect("the table is there")
    }

    /// How many elements a set has.
    fn count(&self, set: &str) -> usize {
        self.table(Family::Ip).sets[set].elements.len()
    }

    fn commits(&self) -> usize {
        self.with(|fake| fake.committed().len())
    }

    /// How often a whole table was read.
    fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }

    /// The last transaction, as text.
    fn last(&self) -> String {
        self.with(|fake| fake.committed().last().expect("something was committed").to_string())
    }
}

impl Nftables for Shared {
    fn commit(&mut self, tx: &Transaction) -> Result<()> {
        self.check(tx)?;
        self.with(|fake| fake.commit(tx))
    }

    fn commit_if(&mut self, generation: Generation, tx: &Transaction) -> Result<()> {
        self.check(tx)?;
        self.with(|fake| fake.commit_if(generation, tx))
    }

    fn commit_chunked(&mut self, tx: &Transaction) -> Result<usize> {
        self.check(tx)?;
        self.with(|fake| fake.commit_chunked(tx))
    }

    fn generation(&mut self) -> Result<Generation> {
        self.with(Nftables::generation)
    }

    fn tables(&mut self) -> Result<Vec<TableId>> {
        self.with(Nftables::tables)
    }

    fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let found = self.with(|fake| fake.snapshot(table))?;
        if *self.busy.lock().unwrap() {
            let mut tx = Transaction::new();
            tx.add_table(TableId::new(Family::Inet, OTHERS));
            self.with(|fake| fake.commit(&tx))?;
        }
        Ok(found)
    }
}

struct Setup {
    nft: Shared,
    view: View,
    backend: NftBackend,
}

fn group(service: &str, addresses: &[&str]) -> EndpointGroup {
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    EndpointGroup::of_addresses(format!("{service}-1").as_str(), service, Protocol::Tcp, 8080, &addresses)
}

fn web(name: &str, ip: &str) -> Service {
    Service::new(name).cluster_ip(ip.parse().unwrap()).port(Protocol::Tcp, 80)
}

impl Setup {
    fn new() -> Self {
        let nft = Shared::default();
        let node = NodeInfo { addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeInfo::new("node") };
        let pods = LocalTraffic::Sources(vec!["10.1.0.0/16".parse().unwrap()]);
        let config = ViewConfig { local_traffic: pods, ..ViewConfig::default() };
        let backend = NftBackend::over(nft.clone(), Config::default());
        Self { nft, view: View::new(config, node), backend }
    }

    fn sync(&mut self) {
        self.view.take_changes();
        assert_eq!(self.backend.sync(self.view.current()), Outcome::Done);
    }

    fn apply(&mut self) {
        let changes = self.view.take_changes();
        assert_eq!(self.backend.apply(&changes, self.view.current()), Outcome::Done);
    }

    /// What a backend that is started now would change: nothing, if all is right.
    fn settled(&mut self) {
        let before = self.nft.commits();
        let mut again = NftBackend::over(self.nft.clone(), Config::default());
        assert_eq!(again.sync(self.view.current()), Outcome::Done);
        let text = if self.nft.commits() > before { self.nft.last() } else { String::new() };
        assert_eq!(text.trim(), "", "a restart changes nothing");
    }
}

#[test]
fn rule_57_endpoint_changes_are_a_few_elements_whatever_the_size() {
    let mut s = Setup::new();
    for n in 0..50 {
        s.view.set_service(web(&format!("ns/s{n}"), &format!("10.96.0.{n}")));
        s.view.set_group(group(&format!("ns/s{n}"), &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    }
    s.sync();
    assert_eq!((s.nft.count("frontends"), s.nft.count("endpoints")), (50, 150));
    // Replaced: one slot written.
    s.view.set_group(group("ns/s7", &["10.1.0.1", "10.1.0.9", "10.1.0.3"]));
    s.apply();
    assert_eq!(
        s.nft.last(),
        "delete 1 element(s) of map ip knit-proxy endpoints\ncreate 1 element(s) to map ip knit-proxy endpoints\n"
    );
    // One more: a slot, and the frontend goes to the chain of four, which was made ahead of time.
    for service in ["ns/s7", "ns/s8"] {
        s.view.set_group(group(service, &["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4"]));
        if service == "ns/s7" {
            s.view.set_group(group(service, &["10.1.0.1", "10.1.0.9", "10.1.0.3", "10.1.0.4"]));
        }
        s.apply();
        assert_eq!(
            s.nft.last(),
            "create 1 element(s) to map ip knit-proxy endpoints\n\
             delete 1 element(s) of map ip knit-proxy frontends\n\
             create 1 element(s) to map ip knit-proxy frontends\n"
        );
    }
    // Many more: a chain that nobody had.
    let many: Vec<String> = (1..=9).map(|n| format!("10.1.0.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    s.view.set_group(group("ns/s7", &many));
    s.apply();
    let text = s.nft.last();
    assert!(text.contains("add chain ip knit-proxy cluster-9-masquerade-unless-pod"), "{text}");
    s.view.set_group(group("ns/s7", &many[..4]));
    s.apply();
    // One less, from the middle: the last one moves there.
    s.view.set_group(group("ns/s8", &["10.1.0.1", "10.1.0.3", "10.1.0.4"]));
    s.apply();
    assert_eq!(
        s.nft.last(),
        "delete 1 element(s) of map ip knit-proxy endpoints\n\
         create 1 element(s) to map ip knit-proxy endpoints\n\
         delete 1 element(s) of map ip knit-proxy frontends\n\
         create 1 element(s) to map ip knit-proxy frontends\n\
         delete 1 element(s) of map ip knit-proxy endpoints\n"
    );
    // All gone.
    s.view.delete_service(&"ns/s9".into());
    s.apply();
    assert_eq!((s.nft.count("frontends"), s.nft.count("cluster-ips")), (49, 49));
    assert_eq!(s.nft.count("endpoints"), 49 * 3 + 1);
}

#[test]
fn rule_58_a_restart_finds_everything_as_it_is() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    let mut b = web("ns/b", "10.96.0.2").add_port(ServicePort::new("n", Protocol::Udp, 53).node_port(30053));
    b.external_policy = TrafficPolicy::Local;
    b.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(b);
    s.view.set_group(group("ns/b", &["10.1.0.4"]));
    s.sync();
    s.settled();
    // After changes the slots are not in the order of addresses; they stay where they are all the same.
    s.view.set_group(group("ns/a", &["10.1.0.2", "10.1.0.3", "10.1.0.9"]));
    s.apply();
    s.view.set_group(group("ns/a", &["10.1.0.3", "10.1.0.9"]));
    s.apply();
    // Counts that nobody has any more leave a chain behind, which a sync removes.
    s.sync();
    s.settled();
}

#[test]
fn chains_that_nobody_uses_are_removed_after_a_while() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.sync();
    let all: Vec<String> = (1..=100).map(|n| format!("10.1.0.{n}")).collect();
    for count in 1..=100 {
        let some: Vec<&str> = all[..count].iter().map(String::as_str).collect();
        s.view.set_group(group("ns/a", &some));
        s.apply();
    }
    let chains = s.nft.table(Family::Ip).chains.len();
    assert!(chains < 50, "{chains} chains");
    s.sync();
    // What is used stays, and of the others those that are near it.
    let names: Vec<_> =
        s.nft.table(Family::Ip).chains.into_keys().filter(|n| n.starts_with("cluster")).collect();
    assert!(names.contains(&"cluster-100-masquerade-unless-pod".into()), "{names:?}");
    for name in &names {
        let count: u32 = name.split('-').nth(1).unwrap().parse().unwrap();
        assert!((96..=104).contains(&count), "{name}");
    }
}

#[test]
fn sctp_and_source_ranges_are_written_as_they_should() {
    let mut s = Setup::new();
    let mut service = Service::new("ns/a").cluster_ip("10.96.0.1".parse().unwrap()).port(Protocol::Sctp, 80);
    service.load_balancer_ips = Box::new(["198.51.100.1".parse().unwrap()]);
    // Rule 44: one of them holds the node's address, so the load balancer's own address may come back too.
    service.source_ranges = Some(Box::new(["10.0.0.0/8".parse().unwrap(), "192.0.2.0/24".parse().unwrap()]));
    s.view.set_service(service);
    s.sync();
    let table = s.nft.table(Family::Ip);
    // Address, protocol 132, port.
    let keys: Vec<String> = table.sets["frontends"].elements.keys().map(|k| format!("{k:?}")).collect();
    assert_eq!(keys, ["0x0a6000018400000000500000", "0xc63364018400000000500000"]);
    let sources: Vec<String> = table.sets["sources"]
        .elements
        .values()
        .map(|e| format!("{:?}-{:?}", &e.key.as_slice()[12..], &e.last_key().as_slice()[12..]))
        .collect();
    assert_eq!(
        sources,
        [
            "[10, 0, 0, 0]-[10, 255, 255, 255]",
            "[192, 0, 2, 0]-[192, 0, 2, 255]",
            "[198, 51, 100, 1]-[198, 51, 100, 1]"
        ]
    );
    s.settled();
}

#[test]
fn a_service_that_is_refused_does_not_take_others_down() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/good", "10.96.0.1"));
    s.view.set_group(group("ns/good", &["10.1.0.1"]));
    s.sync();
    *s.nft.refuse.lock().unwrap() = Some("0a60000206".to_owned());
    s.view.set_service(web("ns/bad", "10.96.0.2"));
    s.view.set_service(web("ns/later", "10.96.0.3"));
    let changes = s.view.take_changes();
    let Outcome::Partly(failures) = s.backend.apply(&changes, s.view.current()) else {
        panic!("one is refused")
    };
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].key.service.as_str(), "ns/bad");
    assert!(failures[0].reason.contains("element"), "{}", failures[0].reason);
    assert_eq!(s.nft.count("frontends"), 2);
    // Once the kernel takes it, it is tried again.
    *s.nft.refuse.lock().unwrap() = None;
    s.sync();
    assert_eq!(s.nft.count("frontends"), 3);
}

#[test]
fn rule_62_tables_that_are_not_wanted_any_more_go() {
    let mut s = Setup::new();
    s.sync();
    assert_eq!(s.nft.with(Nftables::tables).unwrap().len(), 2);
    let mut config = s.view.config().clone();
    config.families.v6 = false;
    s.view = View::new(config, s.view.node().clone());
    s.sync();
    assert_eq!(s.nft.with(Nftables::tables).unwrap().len(), 1);
    assert!(remove_table(&mut s.nft, "knit-proxy").unwrap());
    assert!(!remove_table(&mut s.nft, "knit-proxy").unwrap());
    assert_eq!(s.nft.with(Nftables::tables).unwrap(), []);
}

#[test]
fn rule_57_somebody_deletes_the_table_and_the_next_change_brings_it_back() {
    let mut s = Setup::new();
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    remove_table(&mut s.nft, "knit-proxy").unwrap();
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2"]));
    s.apply();
    assert_eq!((s.nft.count("frontends"), s.nft.count("endpoints")), (1, 2));
}

#[test]
fn rule_64_names_stay_within_limits() {
    let mut s = Setup::new();
    let long = "a".repeat(63);
    let name = format!("{long}/{long}");
    let mut service = Service::new(name.as_str()).cluster_ip("10.96.0.1".parse().unwrap());
    service = service.add_port(ServicePort::new(&"p".repeat(15), Protocol::Tcp, 80).node_port(30080));
    service.external_policy = TrafficPolicy::Local;
    service.affinity = Some(knit_proxy::model::Affinity::default());
    service.load_balancer_ips = Box::new(["198.51.100.1".parse().unwrap()]);
    service.source_ranges = Some(Box::new(["10.0.0.0/8".parse().unwrap()]));
    s.view.set_service(service);
    let mut group = group(&name, &[]);
    group.ports = Box::new([knit_proxy::model::GroupPort {
        name: "p".repeat(15).as_str().into(),
        protocol: Protocol::Tcp,
        number: 8080,
    }]);
    group.endpoints = (0..200u8)
        .map(|n| Endpoint::new([10, 1, 0, n].into()).on(if n % 2 == 0 { "node" } else { "other" }))
        .collect();
    s.view.set_group(group);
    s.sync();
    let longest = s.nft.table(Family::Ip).chains.into_keys().map(|n| n.len()).max().unwrap();
    assert!(longest < 255, "{longest}");
    s.settled();
}

#[test]
fn errors_name_the_element() {
    let mut fake = Fake::new();
    let mut tx = Transaction::new();
    let set = knit_kernel::nft::Set::of::<knit_kernel::nft::Mark>("none");
    let id = TableId::new(Family::Ip, "none");
    tx.add_elements(&id, &set, vec![knit_kernel::nft::Element::new(&knit_kernel::nft::Mark(1))]);
    let error: Error = fake.commit(&tx).unwrap_err();
    assert!(error.is_not_found());
    // There is no table, so it is not about the element.
    assert_eq!(error.element(), None);
    let mut tx = Transaction::new();
    tx.add_table(id.clone()).add_elements(
        &id,
        &set,
        vec![knit_kernel::nft::Element::new(&knit_kernel::nft::Mark(1))],
    );
    let error: Error = fake.commit(&tx).unwrap_err();
    assert_eq!(error.element().map(|key| key.as_slice().to_vec()), Some(1u32.to_ne_bytes().to_vec()));
}

#[test]
fn rule_50_ports_of_masqueraded_connections_are_random_and_the_bit_is_the_configured_one() {
    use knit_kernel::nft::{Expr, Mark, Scalar};
    let mut s = Setup::new();
    s.sync();
    let table = s.nft.table(Family::Ip);
    let exprs = |chain: &str| -> Vec<Expr> {
        table.chains[chain].rules.iter().flat_map(|rule| rule.rule.exprs.clone()).collect()
    };
    let post = exprs("postrouting");
    let flags: Vec<bool> = post
        .iter()
        .filter_map(|expr| match expr {
            Expr::Masquerade { flags, .. } => Some(flags.fully_random),
            _ => None,
        })
        .collect();
    assert_eq!(flags, [true, true]);
    let masks = |exprs: &[Expr]| -> Vec<u32> {
        let mask = |expr: &Expr| match expr {
            Expr::Bitwise { mask, .. } => Some(u32::from_ne_bytes(mask.as_slice().try_into().ok()?)),
            _ => None,
        };
        exprs.iter().filter_map(mask).collect()
    };
    assert_eq!(Mark(0x4000).bytes().as_slice(), 0x4000u32.to_ne_bytes());
    assert!(masks(&post).contains(&0x4000), "the default");
    let config = Config { masquerade_bit: 1 << 3, ..Config::default() };
    let mut other = NftBackend::over(s.nft.clone(), config);
    assert_eq!(other.sync(s.view.current()), Outcome::Done);
    let post: Vec<Expr> = s.nft.table(Family::Ip).chains["postrouting"]
        .rules
        .iter()
        .flat_map(|rule| rule.rule.exprs.clone())
        .collect();
    assert!(masks(&post).contains(&(1 << 3)) && !masks(&post).contains(&0x4000));
}

#[test]
fn rule_41_who_is_remembered_stays_with_an_endpoint_that_changes_its_slot() {
    let mut s = Setup::new();
    let mut service = web("ns/a", "10.96.0.1");
    service.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(service);
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2", "10.1.0.3"]));
    s.sync();
    // Number by endpoint, and the numbers that can be drawn.
    let look = |s: &Setup| {
        let table = s.nft.table(Family::Ip);
        let value = |element: &knit_kernel::nft::Element| match &element.value {
            knit_kernel::nft::ElementValue::Data(data) => data.clone(),
            _ => panic!("a map of values"),
        };
        let members: std::collections::BTreeMap<Vec<u8>, Vec<u8>> = (table.sets["members"].elements.values())
            .map(|e| (value(e).as_slice().to_vec(), e.key.as_slice()[8..].to_vec()))
            .collect();
        let mut drawn: Vec<Vec<u8>> =
            table.sets["slots"].elements.values().map(|e| value(e).as_slice().to_vec()).collect();
        drawn.sort();
        let mut known: Vec<Vec<u8>> = members.values().cloned().collect();
        known.sort();
        assert_eq!(drawn, known, "each endpoint can be drawn, and nobody else");
        members
    };
    let before = look(&s);
    assert_eq!(before.len(), 3);
    // The first goes, and the last takes its slot; its number stays.
    s.view.set_group(group("ns/a", &["10.1.0.2", "10.1.0.3"]));
    s.apply();
    let after = look(&s);
    assert_eq!(after.len(), 2);
    assert!(after.iter().all(|(endpoint, number)| before[endpoint] == *number));
    // A sync finds the numbers again.
    s.sync();
    assert_eq!(look(&s), after);
    s.settled();
    // Affinity goes: nothing of it is left. It comes back: everything is there again.
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.apply();
    assert_eq!((s.nft.count("members"), s.nft.count("slots"), s.nft.count("services")), (0, 0, 0));
    assert_eq!(s.nft.count("endpoints"), 2);
    let mut service = web("ns/a", "10.96.0.1");
    service.affinity = Some(knit_proxy::model::Affinity::default());
    s.view.set_service(service);
    s.apply();
    assert_eq!((s.nft.count("endpoints"), look(&s).len()), (0, 2));
    s.sync();
    s.settled();
}

#[test]
fn rules_21_24_who_takes_a_node_ports_address_and_goes_leaves_the_node_port_as_it_was() {
    let mut s = Setup::new();
    let node_port = ServicePort::new("", Protocol::Tcp, 80).node_port(30080);
    let a = Service { created: 1, ..Service::new("ns/a").cluster_ip("10.96.0.1".parse().unwrap()) };
    s.view.set_service(a.add_port(node_port));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    let (frontends, endpoints) = (s.nft.count("frontends"), s.nft.count("endpoints"));
    let b = Service {
        created: 2,
        external_ips: Box::new(["192.0.2.1".parse().unwrap()]),
        ..Service::new("zzz/b").cluster_ip("10.96.0.2".parse().unwrap()).port(Protocol::Tcp, 30080)
    };
    s.view.set_service(b);
    s.view.set_group(group("zzz/b", &["10.1.0.2"]));
    let (commits, reads) = (s.nft.commits(), s.nft.reads());
    s.apply();
    assert_eq!((s.nft.commits(), s.nft.reads()), (commits + 1, reads), "a change, and no full sync");
    s.settled();
    s.view.delete_service(&"zzz/b".into());
    s.apply();
    assert_eq!((s.nft.count("frontends"), s.nft.count("endpoints")), (frontends, endpoints));
    s.settled();
}

#[test]
fn rule_18_one_familys_failure_leaves_the_other_with_its_changes() {
    let mut s = Setup::new();
    *s.nft.without.lock().unwrap() = Some(Family::Ip6);
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.2"]));
    s.view.take_changes();
    let broken = |outcome: Outcome| match outcome {
        Outcome::FamilyFailed { family, failures, .. } => {
            assert_eq!((family, failures.len()), (knit_proxy::model::Family::V6, 0));
        }
        other => panic!("{other:?}"),
    };
    broken(s.backend.sync(s.view.current()));
    s.view.set_group(group("ns/a", &["10.1.0.1", "10.1.0.9"]));
    let changes = s.view.take_changes();
    let commits = s.nft.commits();
    broken(s.backend.apply(&changes, s.view.current()));
    assert_eq!(s.nft.commits(), commits + 1);
    assert_eq!(
        s.nft.last(),
        "delete 1 element(s) of map ip knit-proxy endpoints\ncreate 1 element(s) to map ip knit-proxy endpoints\n"
    );
    // IPv6 comes by itself once it is asked for again.
    *s.nft.without.lock().unwrap() = None;
    let mut changes = s.view.take_changes();
    broken(s.backend.apply(&changes, s.view.current()));
    changes.retry = Some(knit_proxy::model::Family::V6);
    assert_eq!(s.backend.apply(&changes, s.view.current()), Outcome::Done);
    s.settled();
}

#[test]
fn rule_57_where_others_commit_all_the_time_a_full_sync_still_gets_through() {
    let mut s = Setup::new();
    *s.nft.busy.lock().unwrap() = true;
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    assert_eq!(s.nft.count("frontends"), 1);
}

#[test]
fn rule_43_narrower_source_ranges_are_a_few_elements() {
    let mut s = Setup::new();
    let lb = |range: &str| Service {
        load_balancer_ips: Box::new(["198.51.100.1".parse().unwrap()]),
        source_ranges: Some(Box::new([range.parse().unwrap()])),
        ..web("ns/a", "10.96.0.1")
    };
    s.view.set_service(lb("10.0.0.0/16"));
    s.view.set_group(group("ns/a", &["10.1.0.1"]));
    s.sync();
    for range in ["10.0.1.0/24", "10.0.0.0/16", "10.0.128.0/17"] {
        s.view.set_service(lb(range));
        let (commits, reads) = (s.nft.commits(), s.nft.reads());
        s.apply();
        let after = (s.nft.commits(), s.nft.reads());
        assert_eq!(after, (commits + 1, reads), "{range}: a change, and no full sync");
        let text = s.nft.last();
        assert!(text.lines().count() <= 2, "{range}: {text}");
        s.settled();
    }
}

#[test]
fn before_linux_6_2_chains_go_after_what_led_there() {
    let mut s = Setup::new();
    *s.nft.old.lock().unwrap() = true;
    s.view.set_service(web("ns/a", "10.96.0.1"));
    s.sync();
    let all: Vec<String> = (1..=100).map(|n| format!("10.1.0.{n}")).collect();
    for count in 1..=100 {
        let some: Vec<&str> = all[..count].iter().map(String::as_str).collect();
        s.view.set_group(group("ns/a", &some));
        let (commits, reads) = (s.nft.commits(), s.nft.reads());
        s.apply();
        // A full sync reads and writes everything; this is a change, and the chains that are left from before.
        assert!(s.nft.commits() <= commits + 2, "{count}");
        assert_eq!(s.nft.reads(), reads, "{count}: no full sync");
    }
    let chains = s.nft.table(Family::Ip).chains.len();
    assert!(chains < 60, "{chains} chains");
    // Those that are wanted again have their rules once.
    for count in (1..=100).rev() {
        let some: Vec<&str> = all[..count].iter().map(String::as_str).collect();
        s.view.set_group(group("ns/a", &some));
        s.apply();
    }
    let table = s.nft.table(Family::Ip);
    let rules = |name: &str| table.chains.get(name).map(|chain| chain.rules.len());
    assert_eq!(rules("cluster-1-masquerade-unless-pod"), Some(2));
    // A full sync has no way around it either, and finds one.
    s.sync();
    s.sync();
    s.settled();
}
