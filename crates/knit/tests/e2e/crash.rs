//! The agent is killed, again and again, while pods come and go; its files are damaged; its objects are away.

use std::collections::BTreeMap;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use knit_kernel::testing::eventually;
use serde_json::json;

use crate::support::{Cluster, Dice, NEVER, Pod, SOON, addresses, e2e};

const WORKERS: usize = 8;

/// How many ADDs and DELs: `KNIT_E2E_OPERATIONS`, or few enough for every day.
fn operations() -> usize {
    std::env::var("KNIT_E2E_OPERATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(160)
}

#[test]
fn killed_at_random_under_adds_and_dels() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let pods_in_all = operations() / 2;
        let (started, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let retries = AtomicU64::new(0);
        let mut kills = 0;
        let kept: Vec<(Pod, serde_json::Value)> = std::thread::scope(|scope| {
            // What workers need of the node; the agent itself is the main thread's.
            let caller = cluster.a.caller();
            let workers: Vec<_> = (0..WORKERS)
                .map(|_| {
                    let (caller, started, done, retries) = (caller.clone(), &started, &done, &retries);
                    scope.spawn(move || {
                        let mut kept = Vec::new();
                        loop {
                            let number = started.fetch_add(1, Ordering::Relaxed);
                            if number >= pods_in_all {
                                return kept;
                            }
                            let networks = ["", "blue", "green"][number % 3];
                            let pod = Pod::new(&format!("pod{number}"));
                            // As kubelet does: while it fails, again.
                            let mut added = caller.cni("ADD", &pod, networks);
                            eventually("an ADD succeeds", SOON, || {
                                if !added.ok {
                                    retries.fetch_add(1, Ordering::Relaxed);
                                    added = caller.cni("ADD", &pod, networks);
                                }
                                added.ok
                            });
                            if number.is_multiple_of(8) {
                                kept.push((pod, added.json));
                            } else {
                                // While the agent is away a DEL succeeds too, and is noted. One that was cut
                                // off in the middle fails, and comes again.
                                eventually("a DEL succeeds", SOON, || caller.cni("DEL", &pod, "").ok);
                                pod.remove();
                            }
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let mut dice = Dice::new(7);
            let mut next = 3;
            while next < pods_in_all {
                eventually("pods come and go", SOON, || {
                    done.load(Ordering::Relaxed) >= next
                        || workers.iter().all(std::thread::ScopedJoinHandle::is_finished)
                });
                cluster.a.kill();
                kills += 1;
                cluster.a.start();
                next = done.load(Ordering::Relaxed) + 3 + usize::try_from(dice.below(17)).expect("small");
            }
            workers.into_iter().flat_map(|worker| worker.join().expect("a worker")).collect()
        });
        println!("{pods_in_all} pods, {kills} kills, {} ADDs again", retries.load(Ordering::Relaxed));
        assert!(kills >= 3, "{kills} kills are none");
        // What is noted in the spool is carried out by the next start at the latest.
        cluster.a.kill();
        cluster.a.start();
        let expected: BTreeMap<&str, usize> =
            kept.iter().map(|(pod, result)| (pod.sandbox.as_str(), pod.interfaces(result))).collect();
        // What cannot be done at the start, as with a namespace that is about to end, is tried again soon.
        eventually("only what stays is recorded", SOON, || cluster.a.recorded().len() == expected.len());
        cluster.a.audit(&expected);
        // Every pod that stays still works, by the answer that it got before the kills.
        let (first, _) = &kept[0];
        for (pod, result) in &kept {
            let checked = cluster.a.cni_as("CHECK", pod, &pod.sandbox, "", &json!({"prevResult": result}));
            assert!(checked.ok, "{}: {}", pod.sandbox, checked.json);
            if pod.sandbox != first.sandbox {
                assert!(first.talks(&pod.space, addresses(result, "eth0")[0], SOON), "{}", pod.sandbox);
            }
        }
        // The leases: as many as there are pods, and the router addresses.
        for (pod, _) in kept {
            cluster.a.del(&pod);
            pod.remove();
        }
        cluster.a.audit(&[].into());
        eventually("no address of the default Network is taken", SOON, || {
            cluster.a.used("default") == Some(0)
        });
    });
}

#[test]
fn a_damaged_ledger_is_rebuilt_from_the_kernel() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let (one, one_result) = cluster.a.add("one", "blue");
        let (two, two_result) = cluster.a.add("two", "");
        cluster.a.kill();
        let ledger = cluster.a.run.join("ledger");
        let mut file = std::fs::File::options().write(true).open(&ledger).expect("the ledger");
        file.seek(SeekFrom::Start(40)).expect("it is longer");
        file.write_all(b"####").expect("damaged");
        drop(file);
        cluster.a.start();
        let aside = std::fs::read_dir(&cluster.a.run).expect("a folder").flatten();
        assert!(aside.map(|e| e.file_name()).any(|n| n.to_string_lossy().contains("corrupt")), "set aside");
        cluster.a.audit(&[("one", 2), ("two", 1)].into());
        assert!(two.talks(&one.space, addresses(&one_result, "eth0")[0], SOON));
        // Nobody gets an address that is in use.
        let (three, three_result) = cluster.a.add("three", "blue");
        let taken = [addresses(&one_result, "eth0"), addresses(&two_result, "eth0")].concat();
        assert!(addresses(&three_result, "eth0").iter().all(|a| !taken.contains(a)), "{three_result}");
        assert_ne!(addresses(&three_result, "net1"), addresses(&one_result, "net1"));
        for pod in [&one, &two, &three] {
            cluster.a.del(pod);
        }
        cluster.a.audit(&[].into());
    });
}

#[test]
fn objects_that_are_away_at_start_are_known_from_before() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let (before, before_result) = cluster.a.add("before", "blue");
        let cache = cluster.a.state.join("boot-cache.log");
        eventually("the cache is on disk", SOON, || {
            std::fs::read(&cache).is_ok_and(|text| String::from_utf8_lossy(&text).contains("shop"))
        });
        // Without it nobody knows that there were no policies.
        eventually("that of policies, too", SOON, || cluster.a.state.join("policy-cache.json").exists());
        cluster.a.kill();
        // An API server that nobody listens for.
        cluster.a.away = true;
        cluster.a.start();
        let (after, after_result) = cluster.a.add("after", "blue");
        for interface in ["eth0", "net1"] {
            assert!(before.talks(&after.space, addresses(&after_result, interface)[0], SOON));
            assert!(after.talks(&before.space, addresses(&before_result, interface)[0], SOON));
        }
        cluster.a.audit(&[("after", 2), ("before", 2)].into());
        // An agent that has never seen anything says so, and gives nobody a guess.
        cluster.b.away = true;
        let mut agent = cluster.b.spawn();
        let pod = Pod::new("unlucky");
        let ran = cluster.b.cni("ADD", &pod, "");
        assert!(!ran.ok, "{}", ran.json);
        let status = cluster.b.cni("STATUS", &pod, "");
        assert!(!status.ok, "a node that was never ready is not");
        agent.kill().expect("killed");
        agent.wait().expect("gone");
        assert!(!before.talks(&pod.space, addresses(&before_result, "eth0")[0], NEVER));
    });
}
