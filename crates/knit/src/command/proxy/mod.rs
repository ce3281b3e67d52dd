//! `knit proxy`: a service proxy for this node, in kube-proxy's place.
//!
//! [`config`] reads kube-proxy's configuration file, [`settings`] joins it with the flags, [`serve`] runs the
//! proxy; [`show`] is `get` and `explain`. Everything that decides about Services is in the crate
//! `knit-proxy`.

mod config;
mod conntrack;
mod duration;
mod listen;
mod node;
mod print;
mod report;
mod serve;
mod settings;
mod show;
mod socket;
mod tell;
mod watchers;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};

use self::settings::Settings;

/// Implement the node's Services: a drop-in replacement for kube-proxy.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  \
        knit proxy --config /var/lib/kube-proxy/config.conf\n  \
        knit proxy --from-files ./services\n  \
        knit proxy --backend stream --node-name node-a --stream-address 192.0.2.1:9090\n  \
        knit proxy --from-stream http://192.0.2.1:9090\n  \
        knit proxy get services --from-files ./services\n  \
        knit proxy explain shop/web --from-files ./services"
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    serve: ServeArgs,
}

/// What `knit proxy` does besides serving.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show what this node does for each Service
    Get(GetArgs),
    /// Explain which rule gave a Service which endpoints, and why
    Explain(ExplainArgs),
}

/// Where objects come from, and which node is meant.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct SourceArgs {
    /// kube-proxy's configuration file (KubeProxyConfiguration, YAML or JSON); flags take precedence
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read Services and EndpointSlices from the YAML and JSON files in a folder, and follow their changes
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    from_files: Option<PathBuf>,
    /// Read them from the cluster of this kubeconfig
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The name of this node [default: the host name]
    #[arg(long, alias = "hostname-override", value_name = "NAME")]
    node_name: Option<String>,
    /// Serve the Services with this name in their label service.kubernetes.io/service-proxy-name
    #[arg(long, value_name = "NAME")]
    service_proxy_name: Option<String>,
    /// The ranges of pod addresses, to distinguish pods from other clients
    #[arg(long, value_name = "CIDR,...")]
    cluster_cidr: Option<String>,
    /// On which of the node's addresses node ports answer: primary, all, or ranges
    #[arg(long, value_name = "WHICH", value_delimiter = ',')]
    nodeport_addresses: Option<Vec<String>>,
    /// The node's own address, if its Node object has another or none
    #[arg(long, value_name = "IP")]
    bind_address: Option<IpAddr>,
    /// Masquerade all clients of cluster IPs
    #[arg(long)]
    masquerade_all: bool,
    /// Do not serve spec.externalIPs of Services
    #[arg(long)]
    deny_external_ips: bool,
    /// Where a running proxy answers `get` and `explain`
    #[arg(long, value_name = "PATH", default_value = socket::DEFAULT_PATH)]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct ServeArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// What implements the Services
    #[arg(long, value_enum, default_value_t = BackendKind::Nftables)]
    backend: BackendKind,
    /// Follow the decisions of another proxy that runs with --backend stream: http://HOST:PORT, or unix:PATH
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["from_files", "kubeconfig"])]
    from_stream: Option<String>,
    /// Where --backend stream listens: IP:PORT, or unix:PATH
    #[arg(long, value_name = "ADDRESS", default_value = "unix:/run/knit/proxy-stream.sock")]
    stream_address: String,
    /// Where /healthz and /livez are served [default: 0.0.0.0:10256]
    #[arg(long, value_name = "ADDRESS")]
    healthz_bind_address: Option<String>,
    /// Where /metrics is served [default: 127.0.0.1:10249]
    #[arg(long, value_name = "ADDRESS")]
    metrics_bind_address: Option<String>,
    /// Run although kube-proxy's rules are on this node, and keep them
    #[arg(long, conflicts_with = "takeover")]
    beside_kube_proxy: bool,
    /// Remove kube-proxy's nftables tables once this proxy's rules are in force
    #[arg(long)]
    takeover: bool,
    /// Remove what this proxy created on this node, and exit
    #[arg(long)]
    cleanup: bool,
    /// Explain which rule gave a Service which endpoints, and exit
    #[arg(long, value_name = "SERVICE")]
    explain: Option<String>,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// Log more; twice: everything. KNIT_LOG accepts filters, such as knit_proxy=debug
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// What implements Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendKind {
    /// The kernel, through nftables
    Nftables,
    /// Nothing: prints what it would do to standard output
    Print,
    /// Other processes, which follow the node view over gRPC at --stream-address
    Stream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  knit proxy get services\n  \
    knit proxy get endpoints shop/web -o wide --from-files ./services\n  \
    knit proxy get watchers")]
struct GetArgs {
    /// What to show
    #[arg(value_enum)]
    what: show::What,
    /// Only this Service: NAMESPACE/NAME, or a name in the namespace default
    service: Option<String>,
    #[command(flatten)]
    source: SourceArgs,
    /// How to show it
    #[arg(short, long, value_enum, default_value_t = show::Output::Table)]
    output: show::Output,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  knit proxy explain shop/web --from-files ./services")]
struct ExplainArgs {
    /// NAMESPACE/NAME, or a name in the namespace default
    service: String,
    #[command(flatten)]
    source: SourceArgs,
}

pub fn run(args: Args) -> Result<ExitCode> {
    match (args.command, args.serve.explain.clone()) {
        (Some(Command::Get(get)), _) => show::get(&get.source, get.what, get.service.as_deref(), get.output),
        (Some(Command::Explain(explain)), _) => show::explain(&explain.source, &explain.service),
        (None, Some(service)) => show::explain(&args.serve.source, &service),
        (None, None) if args.serve.cleanup => serve::clean_up(&args.serve.source),
        (None, None) => serve::serve(&Settings::of(&args.serve)?, &args.serve),
    }
}
