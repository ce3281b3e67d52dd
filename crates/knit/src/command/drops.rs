//! `knit drops`: what policies drop on this node, live.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use jiff::tz::TimeZone;
use knit_drops::Dropped;
use knit_drops::socket::{self, Line, Request};
use knit_output::{Note, Table, note};

/// Show what network policies drop on this node: who, to whom, and which policy decided
///
/// Asks the agent of this node, as root; elsewhere run it in the agent's pod. The kernel passes on a few
/// packets a second of each pod, so an entry shows that something is dropped, not how often. An entry is kept
/// until newer ones of the same pod take its place, or the agent restarts.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # Recent drops on this node
  knit drops

  # On another node, in its agent's pod
  kubectl exec -n knit-system ds/knit-node -- knit drops

  # New drops of one pod, as they happen
  knit drops --pod shop/web --follow

  # For scripts: one JSON object per line
  knit drops -o json | jq -r .reason")]
pub struct Args {
    /// Keep printing new drops
    #[arg(short, long)]
    follow: bool,

    /// Only packets that this pod sends or receives
    #[arg(long, value_name = "NAMESPACE/POD")]
    pod: Option<String>,

    /// Only drops in this Network
    #[arg(long, value_name = "NETWORK")]
    network: Option<String>,

    /// How to print it [default: table on a terminal, json otherwise]
    #[arg(short, long, value_enum)]
    output: Option<Output>,

    /// The agent's runtime directory
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Output {
    /// A table; with --follow, a line for each
    Table,
    /// One JSON object per line
    Json,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let default = if io::stdout().is_terminal() { Output::Table } else { Output::Json };
    let output = args.output.unwrap_or(default);
    let path = args.run_dir.join(socket::NAME);
    let mut rows: Vec<Dropped> = Vec::new();
    let asked = socket::ask(&path, Request { follow: args.follow }, |line| {
        match line {
            Line::LeftOut(lines) => note(Note::Warning, format_args!("{lines} lines were omitted")),
            Line::Dropped(dropped) if !args.wants(&dropped) => {}
            Line::Dropped(dropped) => match output {
                Output::Json => return say(&serde_json::to_string(&dropped)?),
                Output::Table if args.follow => return say(&sentence(&dropped)),
                Output::Table => rows.push(*dropped),
            },
        }
        Ok(true)
    });
    asked.with_context(|| {
        format!(
            "no agent that enforces policies answers at {}: run this on a node as root, or in the pod of its \
             agent (kubectl exec -n knit-system ds/knit-node -- knit drops), or specify its --run-dir",
            path.display()
        )
    })?;
    if output == Output::Table && !args.follow {
        if rows.is_empty() {
            note(Note::Info, "policies have dropped nothing here since the agent started");
        } else {
            knit_output::print(&format!("{}\n", table(&rows)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a line at once. Says whether there is still a reader.
fn say(line: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

impl Args {
    fn wants(&self, dropped: &Dropped) -> bool {
        let is_of_pod =
            |pod: &String| [&dropped.from, &dropped.to].iter().any(|end| end.name.as_ref() == Some(pod));
        self.pod.as_ref().is_none_or(is_of_pod)
            && self.network.as_ref().is_none_or(|network| *network == dropped.network)
    }
}

fn time(dropped: &Dropped) -> String {
    dropped.last.to_zoned(TimeZone::UTC).strftime("%H:%M:%S").to_string()
}

/// Everything of one entry in one line, for those who follow.
fn sentence(dropped: &Dropped) -> String {
    format!(
        "{} {} {} {} -> {} {}: {}",
        time(dropped),
        dropped.network,
        dropped.direction,
        dropped.from,
        dropped.to,
        dropped.service(),
        dropped.reason
    )
}

fn table(rows: &[Dropped]) -> Table {
    let mut table = Table::new(&["LAST (UTC)", "SEEN", "NETWORK", "DIRECTION", "FROM", "TO", "PORT", "WHY"]);
    for dropped in rows {
        table.row([
            time(dropped),
            dropped.seen.to_string(),
            dropped.network.to_string(),
            dropped.direction.clone(),
            dropped.from.to_string(),
            dropped.to.to_string(),
            dropped.service(),
            dropped.reason.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dropped() -> Dropped {
        serde_json::from_str(
            r#"{"first":"2026-01-02T03:04:05Z","last":"2026-01-02T03:04:06Z","seen":3,"network":"blue",
            "direction":"egress","from":{"name":"shop/web","address":"10.0.0.1"},"to":{"address":"fd00::2"},
            "protocol":"TCP","port":5432,"policies":["NetworkPolicy shop/deny"],
            "reason":"isolated by NetworkPolicy shop/deny, and no rule allows this"}"#,
        )
        .expect("what the agent sends")
    }

    #[test]
    fn an_entry_is_a_row_and_a_line() {
        let dropped = dropped();
        assert_eq!(
            sentence(&dropped),
            "03:04:06 blue egress shop/web (10.0.0.1) -> fd00::2 TCP 5432: isolated by NetworkPolicy \
             shop/deny, and no rule allows this"
        );
        let text = table(&[dropped]).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].contains("LAST (UTC)"), "{text}");
        for cell in ["03:04:06", "3", "blue", "egress", "shop/web (10.0.0.1)", "fd00::2", "TCP 5432"] {
            assert!(lines[1].contains(cell), "{cell} is missing: {text}");
        }
    }

    #[test]
    fn only_what_is_asked_for_is_shown() {
        let args = |pod: Option<&str>, network: Option<&str>| Args {
            follow: false,
            pod: pod.map(str::to_owned),
            network: network.map(str::to_owned),
            output: None,
            run_dir: PathBuf::new(),
        };
        let dropped = dropped();
        assert!(args(None, None).wants(&dropped));
        assert!(args(Some("shop/web"), Some("blue")).wants(&dropped));
        assert!(!args(Some("shop/db"), None).wants(&dropped));
        assert!(!args(None, Some("default")).wants(&dropped));
    }
}
