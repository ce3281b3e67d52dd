//! Requests that come twice, too late, for nothing, or when there is nothing left.

use std::time::Instant;

use knit_cni::code;
use knit_kernel::testing::eventually;
use serde_json::{Value, json};

use crate::support::{Cluster, Pod, SOON, addresses, block, e2e};

#[test]
fn two_adds_at_once_are_one() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let pod = Pod::new("twice");
        let results: Vec<Value> = std::thread::scope(|scope| {
            let adds: Vec<_> = (0..4).map(|_| scope.spawn(|| node.cni("ADD", &pod, "blue"))).collect();
            adds.into_iter()
                .map(|add| {
                    let ran = add.join().expect("a thread");
                    assert!(ran.ok, "{}", ran.json);
                    ran.json
                })
                .collect()
        });
        assert!(results.iter().all(|result| *result == results[0]), "{results:#?}");
        node.audit(&[("twice", 2)].into());
        let checked = node.cni_as("CHECK", &pod, "twice", "blue", &json!({"prevResult": results[0]}));
        assert!(checked.ok, "{}", checked.json);
        node.del(&pod);
        node.audit(&[].into());
    });
}

#[test]
fn a_pod_comes_back_and_its_del_never_came() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let old = Pod::new("old");
        assert!(node.cni_as("ADD", &old, "web", "blue", &json!({})).ok);
        // The same pod in a new sandbox, while the old one's namespace is still there.
        let new = Pod::new("new");
        let added = node.cni_as("ADD", &new, "web", "blue", &json!({}));
        assert!(added.ok, "{}", added.json);
        node.audit(&[("new", 2)].into());
        // The DEL of the old one, when it comes after all, and again, takes nothing from the new one.
        for _ in 0..2 {
            assert!(node.cni_as("DEL", &old, "web", "", &json!({})).ok);
        }
        let checked = node.cni_as("CHECK", &new, "web", "blue", &json!({"prevResult": added.json}));
        assert!(checked.ok, "{}", checked.json);

        // One path, another namespace: a sandbox whose id comes again.
        let path = new.path.clone();
        new.remove();
        let again = Pod::new("new");
        assert_eq!(again.path, path);
        let added = node.cni_as("ADD", &again, "web", "", &json!({}));
        assert!(added.ok, "{}", added.json);
        node.audit(&[("new", 1)].into());
    });
}

#[test]
fn dels_of_what_is_gone_succeed() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        node.del(&Pod::new("never-seen"));
        // The namespace goes under us, with the pod's ends of all interfaces.
        let (pod, _) = node.add("gone", "blue");
        let late = Pod {
            sandbox: pod.sandbox.clone(),
            space: pod.space.try_clone().expect("a clone"),
            path: pod.path.clone(),
        };
        pod.remove();
        let Pod { sandbox, space, path } = late;
        drop(space);
        let ran = crate::support::run_shim(
            "DEL",
            &sandbox,
            &path,
            "gone",
            &json!({"cniVersion": "1.1.0", "name": "knit", "type": "knit-cni", "socket": node.socket()}),
        );
        assert!(ran.ok, "{}", ran.json);
        node.audit(&[].into());

        // Nobody sends a DEL at all: the next start clears it away.
        let (pod, _) = node.add("forgotten", "green");
        pod.remove();
        let node = &mut cluster.a;
        node.replace();
        // What it cannot clear away at its start, as with a namespace that is about to end, it tries again
        // soon.
        eventually("the next start clears it away", SOON, || node.recorded().is_empty());
        node.audit(&[].into());
    });
}

#[test]
fn an_empty_pool_refuses_and_keeps() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let mut pods = Vec::new();
        let refused = loop {
            let pod = Pod::new(&format!("p{}", pods.len()));
            // Longer than the agent waits for a further block, so that it is the one that gives up.
            let ran = node.cni_as("ADD", &pod, &pod.sandbox, "tiny", &json!({"timeoutSeconds": 60}));
            if !ran.ok {
                break (pod, ran.json);
            }
            pods.push((pod, ran.json));
            assert!(pods.len() < 9, "a block of eight gives out nine");
        };
        assert!(pods.len() >= 4, "{} pods of a block of eight", pods.len());
        let (pod, error) = refused;
        assert_eq!(error["code"], code::TRY_AGAIN, "{error}");
        assert!(error["msg"].as_str().is_some_and(|m| m.contains("tiny")), "{error}");
        // All or nothing: no default Network either.
        let count = pods.len();
        let all: Vec<(String, usize)> = pods.iter().map(|(pod, _)| (pod.sandbox.clone(), 2)).collect();
        node.audit(&all.iter().map(|(s, n)| (s.as_str(), *n)).collect());
        // A node is not closed for it.
        assert!(node.serves());
        // A further block, and the same request works.
        let mut more = block("tiny", "a", "10.99.0.16/29", "fd99::10/125");
        more["metadata"]["name"] = "tiny-a-2".into();
        cluster.put(&more);
        let start = Instant::now();
        eventually("the pod gets an address of the further block", SOON, || node.cni("ADD", &pod, "tiny").ok);
        println!("{count} pods, then a further block within {:?}", start.elapsed());
        // A pod that stays keeps what it has.
        let (kept, before) = &pods[0];
        let again = node.cni("ADD", kept, "tiny");
        assert_eq!(addresses(&again.json, "net1"), addresses(before, "net1"));
    });
}

#[test]
fn another_plugin_may_follow_ours() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let (pod, result) = node.add("web", "");
        // What the plugin behind ours made of the result, as libcni hands it back to all of them.
        let mut grown = result.clone();
        let interfaces = grown["interfaces"].as_array_mut().expect("interfaces");
        interfaces.push(json!({"name": "tuned0", "mac": "02:00:00:00:00:42", "sandbox": pod.path}));
        let index = interfaces.len() - 1;
        let ips = grown["ips"].as_array_mut().expect("addresses");
        ips.push(json!({"address": "203.0.113.7/32", "interface": index}));
        let more = json!({"prevResult": grown});
        let checked = node.cni_as("CHECK", &pod, "web", "", &more);
        assert!(checked.ok, "{}", checked.json);
        // None may come before ours: what it made is not in our record.
        let first = Pod::new("first");
        let refused = node.cni_as("ADD", &first, "first", "", &more);
        assert!(!refused.ok && refused.json["code"] == 7, "{}", refused.json);
        let deleted = node.cni_as("DEL", &pod, "web", "", &more);
        assert!(deleted.ok, "{}", deleted.json);
        node.audit(&[].into());
    });
}
