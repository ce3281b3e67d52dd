//! Who follows this proxy's stream, and what they report of their work: for `get watchers` and for metrics.

use knit_output::{Cell, Table, Tone};
use knit_proxy::grpc::{Stream, Watcher};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;
use serde::{Deserialize, Serialize};

/// One watcher of the stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatcherRow {
    pub watcher: String,
    /// The last state that it worked on; left out before its first report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// The newest state.
    pub newest: u64,
    /// Why it could make nothing of it true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken: Option<String>,
    /// The service ports that it could not make true, and why.
    pub failed: Vec<String>,
}

impl WatcherRow {
    pub fn all(stream: &Stream) -> Vec<Self> {
        let newest = stream.revision();
        stream.watchers().iter().map(|watcher| Self::of(watcher, newest)).collect()
    }

    fn of(watcher: &Watcher, newest: u64) -> Self {
        Self {
            watcher: watcher.name.clone(),
            revision: watcher.revision,
            newest,
            broken: watcher.broken.clone(),
            failed: watcher.failed.iter().map(ToString::to_string).collect(),
        }
    }

    /// What of it an operator should look at.
    pub fn problems(&self) -> impl Iterator<Item = String> + '_ {
        let broken = self.broken.iter().map(|why| format!("nothing is in force: {why}"));
        let told = broken.chain(self.failed.iter().cloned());
        told.map(|problem| format!("watcher {}: {problem}", self.watcher))
    }
}

pub fn table(rows: &[WatcherRow]) -> Table {
    let mut table = Table::new(&["WATCHER", "STATE", "FAILED", "REASON"]);
    for row in rows {
        let state = match row.revision {
            None => Cell::new("no report yet", Tone::Warning),
            Some(revision) if revision >= row.newest => Cell::new("up to date", Tone::Good),
            Some(revision) => Cell::new(format!("at {revision} of {}", row.newest), Tone::Warning),
        };
        let failed = match (&row.broken, row.failed.len()) {
            (Some(_), _) => Cell::new("all", Tone::Bad),
            (None, 0) => Cell::new(0, Tone::Good),
            (None, count) => Cell::new(count, Tone::Bad),
        };
        let reason = row.broken.as_ref().or(row.failed.first()).cloned().unwrap_or_default();
        table.row(vec![row.watcher.as_str().into(), state, failed, reason.into()]);
    }
    table
}

/// The watchers, as numbers.
pub struct Numbers(pub Stream);

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Numbers")
    }
}

impl Collector for Numbers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let rows = WatcherRow::all(&self.0);
        let mut gauge = |name: &str, help: &str, value: usize| {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let kind = prometheus_client::encoding::EncodeMetric::metric_type(&gauge);
            gauge.encode(encoder.encode_descriptor(name, help, None, kind)?)
        };
        // Not one series for each watcher: there may be thousands, and `get watchers` names them.
        let behind = |row: &&WatcherRow| row.revision.is_none_or(|revision| revision < row.newest);
        let failing = |row: &&WatcherRow| row.broken.is_some() || !row.failed.is_empty();
        gauge("knit_proxy_stream_watchers", "Watchers of the stream that gave a name", rows.len())?;
        gauge(
            "knit_proxy_stream_watchers_behind",
            "Watchers that have not reported the newest state",
            rows.iter().filter(behind).count(),
        )?;
        gauge(
            "knit_proxy_stream_watchers_failing",
            "Watchers that report service ports they could not apply",
            rows.iter().filter(failing).count(),
        )
    }
}
