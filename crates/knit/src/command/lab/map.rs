//! A map of a lab: in the terminal, and as a picture.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use knit_lab::cluster::{Lab, RunningPod};
use owo_colors::OwoColorize as _;
use serde_json::Value;

/// What is drawn: nodes, on each its routers, on each its pods.
struct Map {
    nodes: Vec<(String, String, BTreeMap<String, Vec<String>>)>,
    networks: Vec<String>,
}

const COLOURS: [&str; 6] = ["#d64545", "#2f6fde", "#2e8b57", "#b8860b", "#8e44ad", "#008b8b"];
const WIDTH: usize = 44;

impl Map {
    fn of(lab: &Lab, pods: &[RunningPod]) -> Self {
        let primaries = primaries(lab);
        let network =
            |pod: &RunningPod| primaries.get(&pod.namespace).cloned().unwrap_or_else(|| "default".into());
        let nodes = lab.nodes();
        let nodes = nodes.iter().map(|node| {
            let mut routers: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for pod in pods.iter().filter(|pod| pod.node == node.name) {
                let address = pod.addresses.first().map(ToString::to_string).unwrap_or_default();
                routers
                    .entry(network(pod))
                    .or_default()
                    .push(format!("{}/{} {address}", pod.namespace, pod.name));
            }
            (node.name.clone(), node.addresses()[0].to_string(), routers)
        });
        let networks: BTreeSet<String> = pods.iter().map(network).collect();
        Self { nodes: nodes.collect(), networks: networks.into_iter().collect() }
    }

    fn colour(&self, network: &str) -> &'static str {
        match network {
            "red" => COLOURS[0],
            "blue" => COLOURS[1],
            _ => {
                let place = self.networks.iter().position(|n| n == network).unwrap_or(0);
                COLOURS[(place + 2) % COLOURS.len()]
            }
        }
    }
}

/// Which namespaces have another primary Network than the default one, by labels that are equal.
fn primaries(lab: &Lab) -> BTreeMap<String, String> {
    let list = |api: &str, kind: &str| {
        let found = lab.store().kind(api, kind).and_then(|kind| lab.store().list(&kind, &Default::default()));
        found.map(|list| list.items).unwrap_or_default()
    };
    let mut primaries = BTreeMap::new();
    for network in list("knit.dev/v1alpha1", "Network") {
        let Some(labels) = network.value["spec"]["primaryFor"]["matchLabels"].as_object().cloned() else {
            continue;
        };
        for namespace in list("v1", "Namespace") {
            let has = &namespace.value["metadata"]["labels"];
            if labels.iter().all(|(key, value): (&String, &Value)| has.get(key) == Some(value)) {
                primaries.insert(namespace.name().to_owned(), network.name().to_owned());
            }
        }
    }
    primaries
}

/// The map for a terminal: two nodes beside each other.
pub fn text(lab: &Lab, pods: &[RunningPod]) -> String {
    let map = Map::of(lab, pods);
    let mut text = String::new();
    for pair in map.nodes.chunks(2) {
        let boxes: Vec<Vec<(String, Option<&str>)>> = pair
            .iter()
            .map(|(name, address, routers)| {
                let mut lines = vec![(format!("{name}  {address}"), None)];
                for (network, pods) in routers {
                    lines.push((format!("  router {network}"), Some(network.as_str())));
                    lines.extend(pods.iter().map(|pod| (format!("    {pod}"), Some(network.as_str()))));
                }
                lines
            })
            .collect();
        let height = boxes.iter().map(Vec::len).max().unwrap_or(0);
        let edge = |left: &str, right: &str| {
            let one = format!("{left}{}{right}", "─".repeat(WIDTH));
            pair.iter().map(|_| one.clone()).collect::<Vec<_>>().join("  ")
        };
        let _ = writeln!(text, "{}", edge("┌", "┐"));
        for row in 0..height {
            let cells: Vec<String> = boxes
                .iter()
                .map(|lines| {
                    let (line, network) =
                        lines.get(row).map_or(("", None), |(line, network)| (line.as_str(), *network));
                    let padded = format!(" {line:<width$}", width = WIDTH - 1);
                    let padded = match network {
                        Some("red") => padded.red().to_string(),
                        Some("blue") => padded.blue().to_string(),
                        Some(_) => padded.green().to_string(),
                        None => padded.bold().to_string(),
                    };
                    format!("│{padded}│")
                })
                .collect();
            let _ = writeln!(text, "{}", cells.join("  "));
        }
        let _ = writeln!(text, "{}", edge("└", "┘"));
    }
    let width = map.nodes.len().min(2) * (WIDTH + 4) - 2;
    let _ = writeln!(text, "{}", "═".repeat(width));
    let _ = writeln!(text, "{:^width$}", "wire 172.20.0.0/16; red and blue cross it in tunnels of their own");
    text
}

/// The map as a picture.
pub fn svg(lab: &Lab, pods: &[RunningPod]) -> String {
    const BOX: usize = 380;
    const GAP: usize = 40;
    const LINE: usize = 26;
    let map = Map::of(lab, pods);
    let rows =
        |routers: &BTreeMap<String, Vec<String>>| routers.values().map(|pods| pods.len() + 2).sum::<usize>();
    let height = map.nodes.iter().map(|(_, _, routers)| rows(routers)).max().unwrap_or(0) * LINE + 60;
    let width = map.nodes.len() * (BOX + GAP) + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {total}\" width=\"{width}\" height=\"{total}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"14\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        total = height + 130
    );
    for (place, (name, address, routers)) in map.nodes.iter().enumerate() {
        let x = GAP + place * (BOX + GAP);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"30\" width=\"{BOX}\" height=\"{height}\" rx=\"10\" fill=\"#f6f7f9\" stroke=\"#8a93a2\"/>\n\
             <text x=\"{}\" y=\"56\" font-weight=\"bold\">{name}</text><text x=\"{}\" y=\"56\" text-anchor=\"end\" fill=\"#555\">{address}</text>",
            x + 16,
            x + BOX - 16
        );
        let mut y = 72;
        for (network, pods) in routers {
            let colour = map.colour(network);
            let tall = (pods.len() + 1) * LINE + 8;
            let _ = writeln!(
                svg,
                "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{tall}\" rx=\"8\" fill=\"{colour}\" fill-opacity=\"0.10\" stroke=\"{colour}\"/>\n\
                 <text x=\"{}\" y=\"{}\" fill=\"{colour}\" font-weight=\"bold\">router of Network {network}</text>",
                x + 12,
                BOX - 24,
                x + 24,
                y + 20
            );
            for (row, pod) in pods.iter().enumerate() {
                let _ = writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{}\" font-family=\"monospace\">{pod}</text>",
                    x + 40,
                    y + 20 + (row + 1) * LINE
                );
            }
            y += tall + 12;
        }
        let middle = x + BOX / 2;
        let _ = writeln!(
            svg,
            "<line x1=\"{middle}\" y1=\"{}\" x2=\"{middle}\" y2=\"{}\" stroke=\"#444\" stroke-width=\"3\"/>",
            height + 30,
            height + 70
        );
    }
    let wire = height + 70;
    let _ = writeln!(
        svg,
        "<line x1=\"{GAP}\" y1=\"{wire}\" x2=\"{}\" y2=\"{wire}\" stroke=\"#444\" stroke-width=\"6\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#444\">wire 172.20.0.0/16: each Network crosses it in a tunnel of its own</text>",
        width - GAP,
        width / 2,
        wire + 30
    );
    svg.push_str("</svg>\n");
    svg
}
