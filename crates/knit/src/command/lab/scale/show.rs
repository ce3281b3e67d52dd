//! The report of `knit lab scale` as a table: a row per size and phase.

use knit_output::{Cell, Table, Tone};
use knit_scale::report::{Load, Phase, Quantiles, Report, Size};

const COLUMNS: [&str; 12] = [
    "NODES",
    "PHASE",
    "SECONDS",
    "EVENTS/S",
    "KB/S",
    "WRITES/S",
    "PODS",
    "ATTACHED",
    "REACHABLE",
    "FOLLOWED",
    "CONTROLLER",
    "AGENT",
];

/// Events and bytes are those of one agent, writes those of all of Knit; times are p50 and p99.
pub fn table(report: &Report) -> Table {
    let mut table = Table::new(&COLUMNS);
    for size in &report.sizes {
        for phase in &size.phases {
            table.row(row(size, phase));
        }
    }
    table
}

fn row(size: &Size, phase: &Phase) -> [Cell; 12] {
    let plain = |text: String| Cell::new(text, Tone::Plain);
    let pods = match (phase.pods, phase.failed) {
        (0, _) => plain(String::new()),
        (pods, 0) => plain(pods.to_string()),
        (pods, failed) => Cell::new(format!("{pods}, {failed} failed"), Tone::Bad),
    };
    let followed = match (phase.refused + phase.unfollowed, phase.followed) {
        (0, times) => plain(times.map(quantiles).unwrap_or_default()),
        (missed, _) => Cell::new(format!("{missed} missed"), Tone::Bad),
    };
    [
        plain(size.nodes.to_string()),
        plain(phase.name.to_owned()),
        plain(format!("{:.0}", phase.seconds)),
        plain(format!("{:.2}", phase.per_agent.events)),
        plain(format!("{:.2}", phase.per_agent.bytes / 1e3)),
        plain(format!("{:.1}", phase.writes_per_second)),
        pods,
        plain(phase.attached.map(quantiles).unwrap_or_default()),
        plain(phase.reachable.map(quantiles).unwrap_or_default()),
        followed,
        plain(phase.controller.map(load).unwrap_or_default()),
        plain(phase.agent.map(load).unwrap_or_default()),
    ]
}

fn quantiles(times: Quantiles) -> String {
    format!("{} {}", duration(times.p50), duration(times.p99))
}

fn duration(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0}ms", seconds * 1e3) } else { format!("{seconds:.1}s") }
}

fn load(load: Load) -> String {
    format!("{:.1}% {:.0}MiB", load.cpu * 100.0, load.memory_bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use knit_scale::scenario::Scenario;

    use super::*;

    #[test]
    fn a_row_has_what_was_found_and_nothing_else() {
        let times = Quantiles { count: 3, p50: 0.004, p99: 1.25 };
        let phase = Phase {
            name: "busy",
            seconds: 20.0,
            pods: 40,
            failed: 2,
            attached: Some(times),
            agent: Some(Load { cpu: 0.015, memory_bytes: 40 << 20 }),
            ..Phase::default()
        };
        let size = Size { nodes: 500, whole: 10, phases: vec![phase], ..Size::default() };
        let text = table(&Report { scenario: Scenario::default(), sizes: vec![size] }).to_string();
        for words in ["500", "busy", "40, 2 failed", "4ms 1.2s", "1.5% 40MiB"] {
            assert!(text.contains(words), "{words} in:\n{text}");
        }
    }
}
