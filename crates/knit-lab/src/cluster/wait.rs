//! Waiting until a lab does what its manifests promise: pods are ready, Services answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use knit_kernel::netns::NetNs;
use tokio::time::Instant;

use super::Lab;
use super::controllers::is_ready;
use super::error::{Error, Result};
use super::objects::{self, DEPLOYMENT, POD, SERVICE, selects};
use knit_apiserver::object::Object;

/// How long one attempt to reach a Service may take.
const ATTEMPT: Duration = Duration::from_millis(300);
/// The pause between two rounds of attempts.
const PAUSE: Duration = Duration::from_millis(50);

impl Lab {
    /// Waits until all pods are ready, or through; `tell` hears of each that becomes so.
    pub async fn wait_for_pods(&self, limit: Duration, mut tell: impl FnMut(&str)) -> Result<()> {
        let end = Instant::now() + limit;
        let mut changes = objects::Changes::of(self.store(), &[POD, DEPLOYMENT]);
        let mut told = BTreeSet::new();
        loop {
            let pods = objects::list(self.store(), POD);
            for pod in pods.iter().filter(|pod| is_ready(pod)) {
                if !told.contains(pod.uid()) {
                    told.insert(pod.uid().to_owned());
                    tell(&format!("{}/{}", pod.namespace(), pod.name()));
                }
            }
            let through = |pod: &Object| pod.value["status"]["phase"] == "Succeeded";
            let waiting: Vec<_> = pods.iter().filter(|pod| !is_ready(pod) && !through(pod)).collect();
            let deployments = objects::list(self.store(), DEPLOYMENT);
            let complete = deployments.iter().all(|d| {
                d.value["status"]["readyReplicas"].as_u64().unwrap_or(0)
                    >= d.value["spec"]["replicas"].as_u64().unwrap_or(1)
            });
            if waiting.is_empty() && complete {
                return Ok(());
            }
            if tokio::time::timeout_at(end, changes.wait()).await.is_err() {
                let describe = |pod: &&Arc<Object>| {
                    let status = &pod.value["status"];
                    let why = status["message"]
                        .as_str()
                        .or_else(|| status["containerStatuses"][0]["state"]["waiting"]["message"].as_str());
                    format!("\n  {}/{}: {}", pod.namespace(), pod.name(), why.unwrap_or("no status yet"))
                };
                return Err(Error::TooLate {
                    seconds: limit.as_secs(),
                    what: "some pods are not ready".to_owned(),
                    details: waiting.iter().map(describe).collect(),
                });
            }
        }
    }

    /// Waits until every Service with ready pods answers to its namespace's pods, asked from one on each
    /// node: a proxy programs endpoints a moment after pods are ready. Only TCP can be asked.
    pub async fn wait_for_services(&self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        let mut open = self.questions();
        loop {
            let asked = tokio::task::spawn_blocking(move || {
                open.retain(|question| !question.is_answered());
                open
            });
            open = asked
                .await
                .map_err(|error| Error::io("cannot query Services")(std::io::Error::other(error)))?;
            if open.is_empty() {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(Error::TooLate {
                    seconds: limit.as_secs(),
                    what: "some Services do not answer".to_owned(),
                    details: open.iter().map(|question| format!("\n  {}", question.words)).collect(),
                });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn questions(&self) -> Vec<Question> {
        let pods = objects::list(self.store(), POD);
        // One pod for each namespace and node; one that has another primary Network is not served here.
        let mut askers: BTreeMap<(String, String), (String, Arc<NetNs>)> = BTreeMap::new();
        for pod in pods.iter().filter(|pod| is_ready(pod)) {
            let annotations = &pod.value["metadata"]["annotations"];
            if annotations.get(knit_api::names::PRIMARY_ANNOTATION).is_some() {
                continue;
            }
            if let Some(running) = self.pods().find(pod.namespace(), pod.name())
                && let Some(netns) = running.netns
            {
                let name = format!("{}/{}", running.namespace, running.name);
                askers.entry((running.namespace, running.node)).or_insert((name, netns));
            }
        }
        let mut questions = Vec::new();
        for service in objects::list(self.store(), SERVICE) {
            let spec = &service.value["spec"];
            let served = pods
                .iter()
                .filter(|pod| pod.namespace() == service.namespace() && is_ready(pod))
                .any(|pod| selects(&spec["selector"], &pod.value["metadata"]["labels"]));
            if !served {
                continue;
            }
            let addresses = spec["clusterIPs"].as_array().into_iter().flatten();
            let addresses: Vec<IpAddr> = addresses.filter_map(|ip| ip.as_str()?.parse().ok()).collect();
            let ports = spec["ports"].as_array().into_iter().flatten();
            let ports = ports.filter(|port| port["protocol"].as_str().unwrap_or("TCP") == "TCP");
            let ports: Vec<u16> =
                ports.filter_map(|port| u16::try_from(port["port"].as_u64()?).ok()).collect();
            for ((_, node), (asker, netns)) in
                askers.iter().filter(|((namespace, _), _)| namespace == service.namespace())
            {
                for (address, port) in
                    addresses.iter().flat_map(|ip| ports.iter().map(move |port| (*ip, *port)))
                {
                    let to = SocketAddr::new(address, port);
                    let (namespace, name) = (service.namespace(), service.name());
                    let words = format!("Service {namespace}/{name} ({to}), asked by pod {asker} on {node}");
                    questions.push(Question { to, netns: Arc::clone(netns), words });
                }
            }
        }
        questions
    }
}

/// Whether a Service answers somebody.
struct Question {
    to: SocketAddr,
    netns: Arc<NetNs>,
    words: String,
}

impl Question {
    fn is_answered(&self) -> bool {
        self.netns.run(|| TcpStream::connect_timeout(&self.to, ATTEMPT)).is_ok_and(|answer| answer.is_ok())
    }
}
