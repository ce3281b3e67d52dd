//! A map of a lab as a picture: nodes side by side, each Network a band across them, a tunnel where it
//! crosses.

use std::fmt::Write as _;

use super::map::{Map, Network, Node};

const MARGIN: usize = 32;
const CARD: usize = 400;
/// Between two nodes, where tunnels are seen.
const GAP: usize = 96;
const TITLE: usize = 64;
const HEAD: usize = 52;
const PANEL_HEAD: usize = 58;
const ROW: usize = 36;
const PANEL_GAP: usize = 14;
const WIRE: usize = 64;

const INK: &str = "#1f2733";
const FAINT: &str = "#667085";
/// The outline of pods whose address another Network has, too.
const TWIN: &str = "#e0a100";
const OTHERS: [&str; 4] = ["#2e8b57", "#b8860b", "#8e44ad", "#008b8b"];

/// Draws a map as SVG.
pub fn svg(map: &Map) -> String {
    let bands = bands(map);
    let cards: usize = HEAD + bands.iter().map(|band| band.height + PANEL_GAP).sum::<usize>() + 4;
    let width = 2 * MARGIN + map.nodes.len() * CARD + map.nodes.len().saturating_sub(1) * GAP;
    let height = TITLE + cards + WIRE + MARGIN + if has_twins(map) { 54 } else { 34 };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" \
         font-family=\"Inter, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\" font-size=\"13\" \
         fill=\"{INK}\">\n\
         <title>A Knit lab</title>\n<rect width=\"{width}\" height=\"{height}\" rx=\"16\" \
         fill=\"#ffffff\"/>\n\
         <text x=\"{MARGIN}\" y=\"40\" font-size=\"19\" font-weight=\"700\">{}</text>\n",
        escape(&title(map)),
    );
    for (place, node) in map.nodes.iter().enumerate() {
        let x = MARGIN + place * (CARD + GAP);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{TITLE}\" width=\"{CARD}\" height=\"{cards}\" rx=\"14\" fill=\"#f5f7fa\" \
             stroke=\"#cbd3df\"/>\n\
             <text x=\"{}\" y=\"{}\" font-size=\"16\" font-weight=\"700\">{}</text>\n{}",
            x + 20,
            TITLE + 33,
            escape(&node.name),
            mono(x + CARD - 20, TITLE + 33, &node.address, FAINT, "end"),
        );
        for band in &bands {
            panel(&mut svg, x, band, node);
            if place > 0 {
                tunnel(&mut svg, x, band);
            }
        }
        let middle = x + CARD / 2;
        let _ = writeln!(
            svg,
            "<path d=\"M{middle} {} V{}\" stroke=\"#8793a5\" stroke-width=\"4\" stroke-linecap=\"round\"/>\n\
             <circle cx=\"{middle}\" cy=\"{}\" r=\"5\" fill=\"#8793a5\"/>",
            TITLE + cards,
            TITLE + cards + WIRE,
            TITLE + cards,
        );
    }
    let wire = TITLE + cards + WIRE;
    let _ = writeln!(
        svg,
        "<path d=\"M{MARGIN} {wire} H{}\" stroke=\"#8793a5\" stroke-width=\"6\" stroke-linecap=\"round\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{FAINT}\">the wire between the nodes, \
         172.20.0.0/16: each Network crosses it in its own tunnel</text>",
        width - MARGIN,
        width / 2,
        wire + 28,
    );
    if has_twins(map) {
        let _ = writeln!(
            svg,
            "<rect x=\"{MARGIN}\" y=\"{}\" width=\"26\" height=\"16\" rx=\"5\" fill=\"#ffffff\" \
             stroke=\"{TWIN}\" \
             stroke-width=\"2\"/>\n<text x=\"{}\" y=\"{}\" fill=\"{FAINT}\" font-size=\"12\">a pod of \
             another Network has \
             the same address</text>",
            wire + 46,
            MARGIN + 36,
            wire + 58,
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn has_twins(map: &Map) -> bool {
    map.nodes.iter().flat_map(|node| node.routers.values().flatten()).any(|pod| pod.twin)
}

/// One Network across all nodes.
struct Band<'a> {
    network: &'a Network,
    colour: &'static str,
    y: usize,
    height: usize,
}

fn bands(map: &Map) -> Vec<Band<'_>> {
    let mut y = TITLE + HEAD;
    let mut bands = Vec::new();
    for (place, network) in map.networks.iter().enumerate() {
        let pods = map.nodes.iter().map(|node| node.routers.get(&network.name).map_or(0, Vec::len)).max();
        let rows = pods.unwrap_or(0) + network.services.len();
        let height = PANEL_HEAD + rows * ROW + 10;
        let colour = match network.name.as_str() {
            "red" => "#d2453f",
            "blue" => "#2f6fde",
            _ => OTHERS[place % OTHERS.len()],
        };
        bands.push(Band { network, colour, y, height });
        y += height + PANEL_GAP;
    }
    bands
}

fn title(map: &Map) -> String {
    let count = |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let same = if has_twins(map) { ", the same addresses" } else { "" };
    format!("{}, {}{same}", count(map.nodes.len(), "node"), count(map.networks.len(), "Network"))
}

/// The part of a Network on one node: its router, its pods, its Services.
fn panel(svg: &mut String, card: usize, band: &Band<'_>, node: &Node) {
    let Band { network, colour, y, height } = band;
    let Some(pods) = node.routers.get(&network.name) else { return };
    let (x, width) = (card + 14, CARD - 28);
    let subnets = network.subnets.join("  ");
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"10\" fill=\"{colour}\" \
         fill-opacity=\"0.08\" \
         stroke=\"{colour}\" stroke-opacity=\"0.55\"/>\n\
         <text x=\"{}\" y=\"{}\" font-size=\"14\" font-weight=\"700\" fill=\"{colour}\">router of Network \
         {}</text>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"{FAINT}\" font-size=\"12\">{}</text>\n{}",
        x + 16,
        y + 25,
        escape(&network.name),
        x + width - 16,
        y + 25,
        escape(&network.topology),
        mono(x + 16, y + 45, &subnets, FAINT, "start"),
    );
    let mut top = y + PANEL_HEAD;
    for pod in pods {
        let outline = if pod.twin { (TWIN, "2") } else { ("#d5dbe5", "1") };
        row(svg, (x, top, width), ("pod", &pod.name, &pod.address), outline);
        top += ROW;
    }
    // Below the pods of the node that has the most, so that they stand in one line across nodes.
    let mut top = y + height - 10 - network.services.len() * ROW;
    for (name, address) in &network.services {
        row(svg, (x, top, width), ("Service", name, address), (colour, "1"));
        top += ROW;
    }
}

fn row(
    svg: &mut String,
    (x, y, width): (usize, usize, usize),
    (kind, name, address): (&str, &str, &str),
    outline: (&str, &str),
) {
    let _ = writeln!(
        svg,
        "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#ffffff\" stroke=\"{}\" \
         stroke-width=\"{}\"/>\n\
         <text x=\"{}\" y=\"{}\" fill=\"{FAINT}\" font-size=\"12\">{kind}</text>\n\
         <text x=\"{}\" y=\"{}\" font-weight=\"600\">{}</text>\n{}",
        x + 12,
        width - 24,
        ROW - 7,
        outline.0,
        outline.1,
        x + 26,
        y + 19,
        x + 84,
        y + 19,
        escape(name),
        mono(x + width - 26, y + 19, address, INK, "end"),
    );
}

/// Between this node and the one before it.
fn tunnel(svg: &mut String, card: usize, band: &Band<'_>) {
    let (colour, y) = (band.colour, band.y + 24);
    let (from, to) = (card - GAP - 14, card + 14);
    let _ = writeln!(
        svg,
        "<path d=\"M{from} {y} H{to}\" stroke=\"{colour}\" stroke-width=\"3\" stroke-dasharray=\"7 5\"/>\n\
         <circle cx=\"{from}\" cy=\"{y}\" r=\"5\" fill=\"{colour}\"/>\n<circle cx=\"{to}\" cy=\"{y}\" \
         r=\"5\" fill=\"{colour}\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{colour}\" font-size=\"12\">tunnel</text>",
        card - GAP / 2,
        y - 9,
    );
}

fn mono(x: usize, y: usize, text: &str, colour: &str, anchor: &str) -> String {
    format!(
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"{colour}\" font-size=\"12.5\" \
         font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, monospace\" xml:space=\"preserve\">{}</text>",
        escape(text)
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::map::Pod;
    use super::*;

    #[test]
    fn every_pod_network_and_service_is_drawn() {
        let pod = |name: &str, address: &str| Pod { name: name.into(), address: address.into(), twin: true };
        let node = |name: &str, pods: Vec<Pod>| Node {
            name: name.into(),
            address: "172.20.0.1".into(),
            routers: [("red".to_owned(), pods)].into(),
        };
        let red = Network {
            name: "red".into(),
            topology: "Layer3".into(),
            subnets: vec!["10.77.0.0/24".into()],
            services: vec![("red/web".into(), "10.96.1.1".into())],
        };
        let nodes = vec![
            node("node-1", vec![pod("red/a", "10.77.0.3"), pod("red/<b>", "10.77.0.4")]),
            node("node-2", vec![]),
        ];
        let svg = svg(&Map { nodes, networks: vec![red] });
        for part in [
            "node-1",
            "node-2",
            "red/a",
            "red/&lt;b&gt;",
            "10.77.0.4",
            "Network red",
            "red/web",
            "10.96.1.1",
            "tunnel",
        ] {
            assert!(svg.contains(part), "{part} is missing: {svg}");
        }
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }
}
