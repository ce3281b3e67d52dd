//! What was found, over the size of the cluster, as a picture: a chart per figure, with a line per phase.

use std::fmt::Write as _;

use crate::report::{Phase, Report, Size};

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 240.0;
const GAP: f64 = 28.0;
const COLUMNS: usize = 2;
const HEAD: f64 = 92.0;
const INK: &str = "#1f2733";
const FAINT: &str = "#667085";
const LINES: [&str; 5] = ["#2563eb", "#c2410c", "#15803d", "#7e22ce", "#0e7490"];

/// One figure: its title, its unit, and its value in a phase.
type Figure = (&'static str, &'static str, fn(&Size, &Phase) -> Option<f64>);

const FIGURES: [Figure; 6] = [
    ("Events to one agent", "per second", |size, phase| Some(phase.per_agent(size.whole).events)),
    ("Bytes to one agent", "KB per second", |size, phase| Some(phase.per_agent(size.whole).bytes / 1e3)),
    ("Writes of Knit in all", "per second", |_, phase| Some(phase.knit_writes())),
    ("Scheduled to attached, p99", "seconds", |_, phase| phase.attached.map(|times| times.p99)),
    ("Controller", "share of a processor", |_, phase| phase.controller.map(|load| load.cpu)),
    ("One agent", "MiB", |_, phase| phase.agent.map(|load| load.memory_bytes as f64 / f64::from(1 << 20))),
];

/// Draws a report.
#[must_use]
pub fn svg(report: &Report) -> String {
    let shown: Vec<&Figure> = FIGURES.iter().filter(|figure| !series(report, figure).is_empty()).collect();
    let rows = shown.len().div_ceil(COLUMNS).max(1);
    let width = GAP + (WIDTH + GAP) * COLUMNS as f64;
    let height = HEAD + (HEIGHT + GAP) * rows as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" font-family=\"Inter, 'Segoe UI', 'DejaVu Sans', sans-serif\" \
         font-size=\"12\" fill=\"{INK}\">\n<title>What Knit costs over the size of a cluster</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{GAP}\" y=\"38\" font-size=\"19\" font-weight=\"700\">What Knit costs over the size of a \
         cluster</text>\n"
    );
    for (place, name) in phases(report).iter().enumerate() {
        let x = GAP + 110.0 * place as f64;
        let color = LINES[place % LINES.len()];
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"62\" x2=\"{}\" y2=\"62\" stroke=\"{color}\" stroke-width=\"3\"/>\
             <text x=\"{}\" y=\"66\">{name}</text>",
            x + 22.0,
            x + 28.0
        );
    }
    for (place, figure) in shown.into_iter().enumerate() {
        let x = GAP + (WIDTH + GAP) * (place % COLUMNS) as f64;
        let y = HEAD + (HEIGHT + GAP) * (place / COLUMNS) as f64;
        chart(&mut svg, report, figure, x, y);
    }
    svg + "</svg>\n"
}

fn phases(report: &Report) -> Vec<&'static str> {
    let mut names = Vec::new();
    for phase in report.sizes.iter().flat_map(|size| &size.phases) {
        if !names.contains(&phase.name) {
            names.push(phase.name);
        }
    }
    names
}

/// A line per phase: its place among the phases, and points of size and value.
fn series(report: &Report, (_, _, value): &Figure) -> Vec<(usize, Vec<(f64, f64)>)> {
    let lines = phases(report).into_iter().enumerate().map(|(place, name)| {
        let points = report.sizes.iter().filter_map(|size| {
            let phase = size.phases.iter().find(|phase| phase.name == name)?;
            Some((f64::from(size.nodes), value(size, phase)?))
        });
        (place, points.collect::<Vec<_>>())
    });
    lines.filter(|(_, points)| !points.is_empty()).collect()
}

fn chart(svg: &mut String, report: &Report, figure: &Figure, left: f64, top: f64) {
    let (title, unit, _) = figure;
    let lines = series(report, figure);
    let points = || lines.iter().flat_map(|(_, points)| points);
    let widest = points().map(|point| point.0).fold(1.0, f64::max);
    let highest = round_up(points().map(|point| point.1).fold(0.0, f64::max));
    let (x0, y0, w, h) = (left + 56.0, top + 44.0, WIDTH - 76.0, HEIGHT - 84.0);
    let place = |(size, value): (f64, f64)| (x0 + w * size / widest, y0 + h - h * value / highest);
    let _ = writeln!(
        svg,
        "<g><rect x=\"{left}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"10\" fill=\"#f8fafc\" \
         stroke=\"#dbe2ea\"/><text x=\"{}\" y=\"{}\" font-weight=\"700\">{title}</text>\
         <text x=\"{}\" y=\"{}\" fill=\"{FAINT}\" text-anchor=\"end\">{unit}</text>",
        left + 16.0,
        top + 24.0,
        left + WIDTH - 16.0,
        top + 24.0
    );
    for part in 0..=4 {
        let value = highest * f64::from(part) / 4.0;
        let (_, y) = place((0.0, value));
        let _ = writeln!(
            svg,
            "<line x1=\"{x0}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#e4e9f0\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{FAINT}\" text-anchor=\"end\">{}</text>",
            x0 + w,
            x0 - 8.0,
            y + 4.0,
            number(value)
        );
    }
    for size in &report.sizes {
        let (x, _) = place((f64::from(size.nodes), 0.0));
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.1}\" fill=\"{FAINT}\" text-anchor=\"middle\">{}</text>",
            y0 + h + 18.0,
            size.nodes
        );
    }
    for (phase, points) in &lines {
        let color = LINES[phase % LINES.len()];
        let placed: Vec<(f64, f64)> = points.iter().map(|point| place(*point)).collect();
        let path: Vec<String> = placed.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2.5\"/>",
            path.join(" ")
        );
        for ((x, y), (size, value)) in placed.iter().zip(points) {
            let _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{color}\"><title>{size} nodes: {} \
                 {unit}</title></circle>",
                number(*value)
            );
        }
    }
    svg.push_str("</g>\n");
}

/// The next round number: 1, 2 or 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power).find(|round| *round >= value).unwrap_or(value)
}

fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v >= 10.0 => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::meter::{Count, Counts, Group};
    use crate::scenario::Scenario;

    #[test]
    fn a_picture_has_a_line_per_phase_and_only_figures_that_were_found() {
        let size = |nodes: u32| {
            let kinds = BTreeMap::from([("nodes".to_owned(), Count { events: 100, ..Count::default() })]);
            let phase = |name| Phase {
                name,
                seconds: 10.0,
                counts: Counts::from([(Group::Agents, kinds.clone())]),
                ..Phase::default()
            };
            let phases = vec![phase("quiet"), phase("busy")];
            Size { nodes, whole: 10, phases, ..Size::default() }
        };
        let report = Report { scenario: Scenario::default(), sizes: vec![size(100), size(500)] };
        let drawn = svg(&report);
        assert_eq!(drawn.matches("<polyline").count(), 3 * 2, "three figures, two phases");
        assert!(drawn.contains("Events to one agent") && !drawn.contains("Scheduled to attached"));
        assert_eq!((round_up(0.0), round_up(3.2), round_up(51.0)), (1.0, 5.0, 100.0));
    }
}
