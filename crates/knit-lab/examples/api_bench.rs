//! How fast the embedded API is, over HTTP on loopback: `cargo run --release -p knit-lab --example api_bench`.
//! Prints writes per second, watch events per second over several watches, and the memory of the empty server.

use std::error::Error;
use std::time::{Duration, Instant};

use futures::{StreamExt as _, future::try_join_all};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use knit_lab::api::{Config, Server, StoreOptions};
use kube::api::{Api, Patch, PatchParams, PostParams, WatchParams};
use kube::{Client, Config as ClientConfig};
use serde_json::json;

const WRITERS: usize = 8;
const WRITES: usize = 500;
const WATCHES: usize = 20;

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server =
        Server::start(Config { store: StoreOptions::with_crds(&knit_api::crds())?, ..Config::default() })
            .await?;
    println!("empty server with Knit's CRDs: {} KiB resident", resident_kib());
    let config = ClientConfig::new(server.url().parse()?);
    let client = || Client::try_from(config.clone());

    let started = Instant::now();
    try_join_all((0..WRITERS).map(|writer| {
        let client = client();
        async move {
            let pods: Api<Pod> = Api::namespaced(client?, "default");
            for index in 0..WRITES {
                let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("p-{writer}-{index}"), "labels": {"app": "bench"}},
                    "spec": {"containers": [{"name": "c", "image": "bench:1", "ports": [{"containerPort": 80}]}]}});
                pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
                let patch = json!({"status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}});
                pods.patch_status(&format!("p-{writer}-{index}"), &PatchParams::default(), &Patch::Strategic(patch)).await?;
            }
            Ok::<_, Box<dyn Error>>(())
        }
    }))
    .await?;
    let rate = (WRITERS * WRITES * 2) as f64 / started.elapsed().as_secs_f64();
    println!("pod creates and status patches by {WRITERS} writers: {rate:.0} writes/s");

    let mut readers = Vec::new();
    for _ in 0..WATCHES {
        let configs: Api<ConfigMap> = Api::namespaced(client()?, "default");
        let mut stream = configs.watch(&WatchParams::default(), "0").await?.boxed();
        readers.push(tokio::spawn(async move {
            let mut seen = 0;
            while seen < WRITES {
                match tokio::time::timeout(Duration::from_secs(60), stream.next()).await {
                    Ok(Some(Ok(_))) => seen += 1,
                    other => return Err(format!("a watch ended after {seen} events: {other:?}")),
                }
            }
            Ok(())
        }));
    }
    let started = Instant::now();
    for index in 0..WRITES {
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": format!("c-{index}"), "namespace": "default"}, "data": {"k": "v"}});
        server.store().create_object(object)?;
        tokio::task::yield_now().await;
    }
    for reader in readers {
        reader.await??;
    }
    let rate = (WATCHES * WRITES) as f64 / started.elapsed().as_secs_f64();
    println!("{WRITES} objects seen by {WATCHES} watches, decoded: {rate:.0} events/s");
    println!("with {} pods: {} KiB resident", WRITERS * WRITES, resident_kib());
    server.shutdown().await;
    Ok(())
}
