//! Claims as the scheduler allocates them, and pods that use them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use k8s_openapi::api::resource::v1::ResourceClaim;
use knit_node::world::PodView;
use knit_node::{ClaimSource, Error, PodClaim, Reason, Result};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::Node;

/// The API server's claims, in memory.
#[derive(Clone, Default)]
pub struct Api {
    pub claims: Arc<Mutex<BTreeMap<String, ResourceClaim>>>,
    pub asked: Arc<AtomicUsize>,
    pub away: Arc<Mutex<bool>>,
    /// It takes questions and answers none.
    pub hangs: Arc<Mutex<bool>>,
    /// It answers one question for each time that this is notified.
    pub gate: Arc<Mutex<Option<Arc<Notify>>>>,
}

#[async_trait]
impl ClaimSource for Api {
    async fn get(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if *self.hangs.lock().expect("nobody panicked") {
            std::future::pending::<()>().await;
        }
        let gate = self.gate.lock().expect("nobody panicked").clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        if *self.away.lock().expect("nobody panicked") {
            return Err(Error::new(Reason::NotReady, "the API server is away"));
        }
        Ok(self.claims.lock().expect("nobody panicked").get(&format!("{namespace}/{name}")).cloned())
    }
}

impl Api {
    /// A claim of pod `pod-SANDBOX` that was given these devices, with these parameters.
    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    pub fn allocate(&self, name: &str, sandboxes: &[&str], devices: &[&str], config: Value) {
        let results: Vec<Value> = devices
            .iter()
            .enumerate()
            .map(|(n, device)| match device.strip_prefix("gpu") {
                Some(_) => {
                    json!({"request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": device})
                }
                None => json!({"request": format!("r{n}"), "driver": "knit.dev", "pool": "knit-networks",
                    "device": device, "shareID": format!("share-{n}")}),
            })
            .collect();
        let pods: Vec<Value> = sandboxes
            .iter()
            .map(|s| json!({"resource": "pods", "name": format!("pod-{s}"), "uid": format!("uid-{s}")}))
            .collect();
        let claim = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}")}, "spec": {},
            "status": {
                "allocation": {"devices": {"results": results, "config": config}}, "reservedFor": pods
            },
        }));
        let claim = claim.expect("a claim");
        self.claims.lock().expect("nobody panicked").insert(format!("shop/{name}"), claim);
    }

    pub fn delete(&self, name: &str) {
        self.claims.lock().expect("nobody panicked").remove(&format!("shop/{name}"));
    }

    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
pub fn parameters(fields: Value) -> Value {
    let mut all = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AttachmentConfig"});
    let map = all.as_object_mut().expect("an object");
    map.extend(fields.as_object().expect("an object").clone());
    json!([{"source": "FromClaim", "opaque": {"driver": "knit.dev", "parameters": all}}])
}

/// The pods that the agent has heard of, with their claims.
pub fn pods(node: &mut Node, pods: &[(&str, &[&str])]) {
    let views = pods.iter().map(|(sandbox, claims)| {
        let view = PodView {
            uid: Some(format!("uid-{sandbox}")),
            claims: claims.iter().map(|c| PodClaim::Named((*c).to_owned())).collect(),
            ..PodView::default()
        };
        (("shop".to_owned(), format!("pod-{sandbox}")), Arc::new(view))
    });
    node.world.pods = Arc::new(views.collect());
}
