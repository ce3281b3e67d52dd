//! Kernels that refuse something, and neighbours that change something: what goes on all the same.

use knit_nft::{Error, Fake, Family, Nftables, TableId, Transaction};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy_nft::{Config, NftBackend, remove_table};

use crate::support::*;

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
fn errors_name_the_element() {
    let mut fake = Fake::new();
    let mut tx = Transaction::new();
    let set = knit_nft::Set::of::<knit_nft::Mark>("none");
    let id = TableId::new(Family::Ip, "none");
    tx.add_elements(&id, &set, vec![knit_nft::Element::new(&knit_nft::Mark(1))]);
    let error: Error = fake.commit(&tx).unwrap_err();
    assert!(error.is_not_found());
    // There is no table, so it is not about the element.
    assert_eq!(error.element(), None);
    let mut tx = Transaction::new();
    tx.add_table(id.clone()).add_elements(&id, &set, vec![knit_nft::Element::new(&knit_nft::Mark(1))]);
    let error: Error = fake.commit(&tx).unwrap_err();
    assert_eq!(error.element().map(|key| key.as_slice().to_vec()), Some(1u32.to_ne_bytes().to_vec()));
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
        "delete 1 element(s) of map ip knit-proxy endpoints\ncreate 1 element(s) to map ip knit-proxy \
         endpoints\n"
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
        // A full sync reads and writes everything; this is a change, and the chains that are left from
        // before.
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
    // A full sync has no way around it either, and finds one: a start that finds chains of what is gone.
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    s.view.set_group(group("ns/a", &all));
    s.apply();
    let many = "cluster-100-masquerade-unless-pod";
    assert!(s.nft.table(Family::Ip).chains.contains_key(many), "a chain that only many endpoints need");
    s.view.delete_group(&"ns/a-1".into());
    s.view.delete_service(&"ns/a".into());
    s.backend = NftBackend::over(s.nft.clone(), Config::default());
    s.sync();
    // Nothing leads there any more, so the next one deletes it.
    s.sync();
    let left = s.nft.table(Family::Ip);
    assert!(!left.chains.contains_key(many), "{:?}", left.chains.keys());
    s.settled();
}
