//! A map of a lab: what is drawn, and how it looks in a terminal. [`super::picture`] draws the same as a
//! picture.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use knit_lab::cluster::{Lab, RunningPod};
use owo_colors::OwoColorize as _;
use serde_json::Value;

/// What is drawn: nodes, on each its routers, on each its pods.
#[derive(Debug, Default)]
pub struct Map {
    pub nodes: Vec<Node>,
    pub networks: Vec<Network>,
}

#[derive(Debug)]
pub struct Node {
    pub name: String,
    pub address: String,
    /// The pods of each Network that has some here.
    pub routers: BTreeMap<String, Vec<Pod>>,
}

#[derive(Debug)]
pub struct Pod {
    pub name: String,
    pub address: String,
    /// Whether a pod of another Network has the same address.
    pub twin: bool,
}

#[derive(Debug)]
pub struct Network {
    pub name: String,
    pub topology: String,
    pub subnets: Vec<String>,
    /// Its Services, each with its address.
    pub services: Vec<(String, String)>,
}

const WIDTH: usize = 44;

impl Map {
    /// What these pods of a lab are on.
    pub fn of(lab: &Lab, pods: &[RunningPod]) -> Self {
        let primaries = primaries(lab);
        let network = |namespace: &str| primaries.get(namespace).cloned().unwrap_or_else(|| "default".into());
        let address = |pod: &RunningPod| pod.addresses.first().map(ToString::to_string).unwrap_or_default();
        let drawn = |pod: &RunningPod| Pod {
            name: format!("{}/{}", pod.namespace, pod.name),
            address: address(pod),
            twin: pods.iter().any(|other| {
                network(&other.namespace) != network(&pod.namespace) && address(other) == address(pod)
            }),
        };
        let nodes = lab.nodes().into_iter().map(|node| {
            let mut routers: BTreeMap<String, Vec<Pod>> = BTreeMap::new();
            for pod in pods.iter().filter(|pod| pod.node == node.name) {
                routers.entry(network(&pod.namespace)).or_default().push(drawn(pod));
            }
            Node { name: node.name.clone(), address: node.addresses()[0].to_string(), routers }
        });
        let used: BTreeSet<String> = pods.iter().map(|pod| network(&pod.namespace)).collect();
        let networks =
            list(lab, "knit.dev/v1alpha1", "Network").into_iter().filter(|n| used.contains(n.name()));
        let services = list(lab, "v1", "Service");
        let networks = networks.map(|object| {
            let spec = &object.value["spec"];
            let subnets = spec["subnets"].as_array().into_iter().flatten();
            let of = services.iter().filter(|service| service.value["spec"]["selector"].is_object());
            let of = of.filter(|service| network(service.namespace()) == object.name());
            Network {
                name: object.name().to_owned(),
                topology: spec["topology"].as_str().unwrap_or_default().to_owned(),
                subnets: subnets.filter_map(|subnet| subnet["cidr"].as_str().map(str::to_owned)).collect(),
                services: of
                    .map(|service| {
                        let ip = service.value["spec"]["clusterIP"].as_str().unwrap_or_default();
                        (format!("{}/{}", service.namespace(), service.name()), ip.to_owned())
                    })
                    .collect(),
            }
        });
        Self { nodes: nodes.collect(), networks: networks.collect() }
    }

    /// The map for a terminal: two nodes beside each other.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for pair in self.nodes.chunks(2) {
            let boxes: Vec<Vec<(String, Option<&str>)>> = pair.iter().map(Node::lines).collect();
            let height = boxes.iter().map(Vec::len).max().unwrap_or(0);
            let edge = |left: &str, right: &str| {
                let one = format!("{left}{}{right}", "─".repeat(WIDTH));
                pair.iter().map(|_| one.clone()).collect::<Vec<_>>().join("  ")
            };
            let _ = writeln!(text, "{}", edge("┌", "┐"));
            for row in 0..height {
                let cells: Vec<String> = boxes.iter().map(|lines| cell(lines.get(row))).collect();
                let _ = writeln!(text, "{}", cells.join("  "));
            }
            let _ = writeln!(text, "{}", edge("└", "┘"));
        }
        let width = self.nodes.len().min(2) * (WIDTH + 4) - 2;
        let _ = writeln!(text, "{}", "═".repeat(width));
        let _ = writeln!(text, "{:^width$}", "wire 172.20.0.0/16; each Network crosses it in its own tunnel");
        text
    }
}

impl Node {
    fn lines(&self) -> Vec<(String, Option<&str>)> {
        let mut lines = vec![(format!("{}  {}", self.name, self.address), None)];
        for (network, pods) in &self.routers {
            lines.push((format!("  router {network}"), Some(network.as_str())));
            lines.extend(
                pods.iter().map(|pod| (format!("    {} {}", pod.name, pod.address), Some(network.as_str()))),
            );
        }
        lines
    }
}

/// One line of one node's box.
fn cell(line: Option<&(String, Option<&str>)>) -> String {
    let (line, network) = line.map_or(("", None), |(line, network)| (line.as_str(), *network));
    let padded = format!(" {line:<width$}", width = WIDTH - 1);
    let padded = match network {
        Some("red") => padded.red().to_string(),
        Some("blue") => padded.blue().to_string(),
        Some(_) => padded.green().to_string(),
        None => padded.bold().to_string(),
    };
    format!("│{padded}│")
}

fn list(lab: &Lab, api: &str, kind: &str) -> Vec<std::sync::Arc<knit_apiserver::object::Object>> {
    let found = lab.store().kind(api, kind).and_then(|kind| lab.store().list(&kind, &Default::default()));
    found.map(|list| list.items).unwrap_or_default()
}

/// Which namespaces have another primary Network than the default one, by labels that are equal.
fn primaries(lab: &Lab) -> BTreeMap<String, String> {
    let mut primaries = BTreeMap::new();
    for network in list(lab, "knit.dev/v1alpha1", "Network") {
        let Some(labels) = network.value["spec"]["primaryFor"]["matchLabels"].as_object().cloned() else {
            continue;
        };
        for namespace in list(lab, "v1", "Namespace") {
            let has = &namespace.value["metadata"]["labels"];
            if labels.iter().all(|(key, value): (&String, &Value)| has.get(key) == Some(value)) {
                primaries.insert(namespace.name().to_owned(), network.name().to_owned());
            }
        }
    }
    primaries
}
