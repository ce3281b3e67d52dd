//! What is in force about a pod of which the agent knows less than it did: its record cannot be read, or the
//! ledger is lost.

use knit_ledger::{Batch, Ledger, Record};
use knit_testbed::wait::eventually;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::*;

/// A record as it is written down, whatever is in it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
struct Raw(Value);

impl Record for Raw {
    const FORMAT: u32 = u32::MAX;

    fn key(&self) -> &str {
        self.0["sandbox"].as_str().unwrap_or_default()
    }
}

/// Changes what the ledger of a stopped agent has of a sandbox in one place.
async fn damage(node: &Node, sandbox: &str, field: &str, value: &Value) {
    let path = node.dir.join("run").join("ledger");
    eventually("the agent has let go of its ledger", SOON, || {
        let mut ledger = Ledger::<Raw>::open(&path).map_err(|error| error.to_string())?.ledger;
        let mut record = ledger.get(sandbox).expect("it is recorded").clone();
        record.0[field] = value.clone();
        ledger.commit(Batch::new().put(record)).map_err(|error| error.to_string())
    })
    .await;
}

#[test]
fn a_pod_stays_isolated_if_the_next_agent_cannot_read_its_record() {
    // Of a newer agent; of nobody.
    for (field, value) in [("format", json!(99)), ("pod", json!(7))] {
        with_bed(|bed| async move {
            bed.put("deny", &deny("shop", "Ingress"));
            for (namespace, name) in [("shop", "server"), ("shop", "late"), ("other", "client")] {
                bed.pod_object("a", namespace, name, &json!({}));
            }
            let node = bed.node();
            let agent = node.start().await;
            let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
            assert!(!reaches(&client.space, server.addresses[0], REFUSED));
            agent.stop(STOP).await;
            damage(node, "server", field, &value).await;
            let agent = node.start().await;
            let plain = json!({"io.kubernetes.cri.pod-annotations": {}});
            let late = node.add_with("shop", "late", &plain).await;
            assert!(!reaches(&client.space, server.addresses[0], REFUSED), "{field}: it is isolated");
            if field == "format" {
                assert!(!reaches(&client.space, late.expect("added").addresses[0], REFUSED));
            } else {
                let error = late.expect_err("nothing is changed, so that it cannot be isolated");
                assert!(error.contains("does not name its pod"), "{error}");
                // Its DEL ends that.
                node.del(&server).await;
                let late = node.add_with("shop", "late", &plain).await.expect("added");
                assert!(!reaches(&client.space, late.addresses[0], REFUSED));
            }
            agent.stop(STOP).await;
        });
    }
}

/// The pod's object with the addresses that its kubelet tells.
fn with_addresses(bed: &Bed, pod: &Pod, labels: &Value) {
    let ips: Vec<Value> = pod.addresses.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
    let object = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": format!("uid-{}", pod.name),
            "labels": labels},
        "spec": {"nodeName": "a", "containers": [{"name": "c"}]},
        "status": {"phase": "Running", "podIPs": ips}});
    bed.put(&format!("pod-{}-{}", pod.namespace, pod.name), &object);
}

#[test]
fn a_pod_stays_isolated_if_the_ledger_is_lost() {
    for told in [true, false] {
        with_bed(|bed| async move {
            let app = json!({"app": "web"});
            let selects = json!({"podSelector": {"matchLabels": app}, "policyTypes": ["Ingress"]});
            bed.put("deny", &policy("shop", "deny", &selects));
            for (namespace, name) in [("shop", "server"), ("shop", "late"), ("other", "client")] {
                bed.pod_object("a", namespace, name, &app);
            }
            let node = bed.node();
            let agent = node.start().await;
            let (server, client) = (node.pod("shop", "server").await, node.pod("other", "client").await);
            assert!(!reaches(&client.space, server.addresses[0], REFUSED));
            agent.stop(STOP).await;
            if told {
                with_addresses(&bed, &server, &app);
                with_addresses(&bed, &client, &app);
            }
            let ledger = node.dir.join("run").join("ledger");
            eventually("the agent has let go of its ledger", SOON, || {
                Ledger::<Raw>::open(&ledger).map(drop).map_err(|error| error.to_string())
            })
            .await;
            std::fs::remove_file(&ledger).expect("removed");
            let agent = node.start().await;
            let plain = json!({"io.kubernetes.cri.pod-annotations": {}});
            if !told {
                let error = node.add_with("shop", "late", &plain).await.expect_err("nothing can be changed");
                assert!(error.contains("does not name its pod"), "{error}");
                assert!(!reaches(&client.space, server.addresses[0], REFUSED), "nobody took it away");
                // Its kubelet tells its address at last.
                with_addresses(&bed, &server, &app);
                with_addresses(&bed, &client, &app);
                eventually("it has arrived", SOON, || {
                    let world = agent.core().world().get();
                    let told = world.pods.values().filter(|pod| !pod.addresses.is_empty()).count();
                    if told == 2 { Ok(()) } else { Err(told) }
                })
                .await;
                agent.core().reconcile(&knit_node::reconcile::Pass::default()).await;
            }
            let late = node.add_with("shop", "late", &plain).await.expect("added");
            assert!(!reaches(&client.space, late.addresses[0], REFUSED));
            assert!(!reaches(&client.space, server.addresses[0], REFUSED), "it is known again who it is");
            // Not only because nobody has touched it.
            bed.remove("deny");
            becomes("the policy is gone", &client.space, server.addresses[0], true).await;
            agent.stop(STOP).await;
        });
    }
}
