//! How the long-running commands log: to standard error, as text or as JSON.

use anyhow::{Context as _, Result};

/// What is logged, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug, trace, or a filter such as knit_node=debug
    #[arg(long, env = "KNIT_LOG", value_name = "FILTER", default_value = "info")]
    log: String,

    /// Log as JSON, one object per line
    #[arg(long, env = "KNIT_LOG_JSON")]
    log_json: bool,
}

impl LogArgs {
    /// Starts the log of a command that people watch: only this, if the environment asks for nothing else.
    pub fn start_only(filter: &str) -> Result<()> {
        let log = std::env::var("KNIT_LOG").unwrap_or_else(|_| filter.to_owned());
        Self { log, log_json: false }.start()
    }

    /// Starts the log.
    pub fn start(&self) -> Result<()> {
        let filter = tracing_subscriber::EnvFilter::try_new(&self.log).with_context(|| {
            format!("--log {:?} is not a valid log filter; write a level such as info", self.log)
        })?;
        let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        let log = log.with_ansi(colours);
        let started = if self.log_json { log.json().try_init() } else { log.try_init() };
        started.map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
    }
}
