//! `knit node`: the node agent.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use knit_kernel::netns::NetNs;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_node::proxy::ServiceProxy;
use knit_objects::{FolderOptions, Source};
use knit_proxy_nft::Limits;
use knit_runtime::Runtime;

use super::log::LogArgs;
use super::stop::Stop;

/// Run the node agent: it gives the pods of this node their networks
///
/// It reads Networks and what belongs to them from the Kubernetes API or from a folder of files, serves the
/// CNI shim through a socket, and keeps everything as it should be. Stopping it changes nothing for running
/// pods.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # On a node of a cluster, with the credentials of its pod
  knit node --node-name worker-1

  # With another kubeconfig, metrics on loopback
  knit node --node-name worker-1 --kubeconfig /etc/kubernetes/kubelet.conf --metrics-addr 127.0.0.1:9469

  # Without Kubernetes, from files of Networks, AddressBlocks, Namespaces and Nodes
  knit node --node-name this --node-ip 192.0.2.10 --objects-from ./objects --run-dir /run/knit")]
pub struct Args {
    /// This node's name, as its Node object has it
    #[arg(long, env = "KNIT_NODE_NAME", value_name = "NAME")]
    node_name: String,

    /// This node's address, one per family; what its Node object says if left out
    #[arg(long, env = "KNIT_NODE_IP", value_name = "ADDRESS", value_delimiter = ',')]
    node_ip: Vec<IpAddr>,

    /// Read objects from the files of this folder, in place of a cluster
    #[arg(long, env = "KNIT_OBJECTS_FROM", value_name = "FOLDER", conflicts_with_all = ["kubeconfig",
        "api_url"])]
    objects_from: Option<PathBuf>,

    /// Write statuses and events to this folder [default: FOLDER/status]
    #[arg(long, env = "KNIT_OBJECTS_TO", value_name = "FOLDER", requires = "objects_from")]
    objects_to: Option<PathBuf>,

    /// The cluster of this kubeconfig; the usual one, or that of this pod, if left out
    #[arg(long, env = "KNIT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// An API server that asks for no credentials, such as the lab's
    #[arg(long, env = "KNIT_API_URL", value_name = "URL", conflicts_with = "kubeconfig")]
    api_url: Option<String>,

    /// The directory for ledger and sockets, which a reboot empties
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    /// The directory for what outlives a reboot
    #[arg(long, env = "KNIT_STATE_DIR", value_name = "DIR", default_value = "/var/lib/knit")]
    state_dir: PathBuf,

    /// The socket for the CNI shim [default: cni.sock in the run-time directory]
    #[arg(long, env = "KNIT_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Serve /healthz, /readyz and /metrics here, such as 127.0.0.1:9469 or :9469; nowhere if left out
    #[arg(long, env = "KNIT_METRICS_ADDR", value_name = "ADDRESS:PORT", value_parser = super::http::address)]
    metrics_addr: Option<SocketAddr>,

    /// Where the container runtime mounts the network namespaces of pods
    #[arg(
        long,
        env = "KNIT_NETNS_DIRS",
        value_name = "DIR",
        value_delimiter = ',',
        default_value = "/run/netns,/var/run/netns"
    )]
    netns_dirs: Vec<PathBuf>,

    /// Ask the container runtime at this socket which sandboxes there are; networks of those that it no
    /// longer has are removed, those that it lists are kept
    #[arg(long, env = "KNIT_CRI_SOCKET", value_name = "PATH")]
    cri_socket: Option<PathBuf>,

    /// Who serves Services
    #[arg(long, env = "KNIT_SERVICES", value_name = "WHO", value_enum, default_value_t = Services::Auto)]
    services: Services,

    /// Where /healthz of the service proxy is answered, which load balancers outside ask; as kube-proxy, and
    /// only while the default Network's Services are served here
    #[arg(long, env = "KNIT_SERVICES_HEALTHZ_ADDR", value_name = "ADDRESS:PORT",
        default_value_t = knit_services::HEALTHZ)]
    services_healthz_addr: SocketAddr,

    /// Where /metrics and /proxyMode of the service proxy are answered; as kube-proxy, and only while it
    /// serves the default Network
    #[arg(long, env = "KNIT_SERVICES_METRICS_ADDR", value_name = "ADDRESS:PORT",
        default_value_t = knit_services::METRICS)]
    services_metrics_addr: SocketAddr,

    /// The most connections, about, that the pods of one Network may have through this node at once; 0 for as
    /// many as the kernel has room for. The default Network has no limit of its own
    #[arg(long, env = "KNIT_NETWORK_CONNECTIONS", value_name = "NUMBER",
        default_value_t = knit_linux::Config::UPLINK_CONNECTIONS)]
    network_connections: u32,

    /// Seconds between two passes that compare everything with what it should be
    #[arg(long, env = "KNIT_PASS_EVERY", value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    pass_every: u64,

    /// Seconds to wait for an agent that is being replaced
    #[arg(long, env = "KNIT_REPLACE_WAIT", value_name = "SECONDS", default_value_t = 60)]
    replace_wait: u64,

    #[command(flatten)]
    log: LogArgs,
}

/// Who serves Services on this node.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Services {
    /// Knit, in every Network's own router; where kube-proxy is on the node, the default Network's are left
    /// to it
    Auto,
    /// Knit, whatever else is on the node
    #[value(alias = "knit")]
    On,
    /// Nobody here
    #[value(alias = "none")]
    Off,
}

/// How long requests that run may take to end when the agent stops.
const STOP: Duration = Duration::from_secs(20);

pub fn run(args: Args) -> Result<ExitCode> {
    args.log.start()?;
    // The work is short and mostly the kernel's: two threads keep memory small.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the async runtime does not start")?;
    runtime.block_on(serve(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(args: Args) -> Result<()> {
    let mut stop = Stop::listen()?;
    let agent = tokio::select! {
        agent = Agent::start(config(args)?) => agent?,
        () = stop.asked() => return Ok(()),
    };
    stop.asked().await;
    agent.stop(STOP).await;
    Ok(())
}

fn config(args: Args) -> Result<AgentConfig> {
    let namespace = NetNs::current().context("this process's network namespace cannot be opened")?;
    let proxy = service_proxy(&args, &namespace)?;
    let source = if let Some(path) = args.objects_from {
        Source::Folder(FolderOptions { output: args.objects_to, ..FolderOptions::new(path) })
    } else if let Some(url) = args.api_url {
        Source::Url(url)
    } else if let Some(path) = args.kubeconfig {
        Source::Kubeconfig { path, context: None }
    } else {
        Source::Infer
    };
    let run_dir = std::path::absolute(&args.run_dir).context("the run-time directory cannot be named")?;
    let socket = args.socket.unwrap_or_else(|| knit_cni::paths::socket(&run_dir));
    let (node, routers) = (args.node_name.clone(), run_dir.join("netns"));
    let connections = args.network_connections;
    let make = move |addresses| -> knit_runtime::Result<Arc<dyn Runtime>> {
        let mut config = knit_linux::Config::new(node, addresses, namespace);
        config.router_directory = routers;
        if connections != 0 {
            config.uplinks_together = half_of_the_table(&config.namespace);
            config.uplink_connections = share(connections, config.uplinks_together);
        } else {
            config.uplink_connections = 0;
        }
        Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
    };
    let mut core = CoreConfig::new(args.node_name, run_dir, args.state_dir);
    core.reconcile_every = Duration::from_secs(args.pass_every);
    core.cri_socket = args.cri_socket.as_deref().map(absolute_socket).transpose()?;
    Ok(AgentConfig {
        core,
        socket,
        source,
        node_addresses: args.node_ip,
        http: args.metrics_addr,
        lock_wait: Duration::from_secs(args.replace_wait),
        netns_dirs: args.netns_dirs,
        runtime: Box::new(make),
        proxy,
    })
}

/// Half of the kernel's table of connections: of what it is now, or of what a service proxy makes of it if
/// that is less.
fn half_of_the_table(namespace: &NetNs) -> u32 {
    const MOST: &str = "net/netfilter/nf_conntrack_max";
    let now = || Sysctls::of(namespace).ok()?.get(&Sysctl::new(MOST).ok()?).ok()?.trim().parse::<u64>().ok();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let planned = Limits::default().plan(cores).into_iter().find(|(name, _)| *name == MOST);
    let least = planned.map(|(_, most)| most).into_iter().chain(now()).min().unwrap_or_default();
    u32::try_from(least / 2).unwrap_or(u32::MAX)
}

/// How many connections one Network may have: it must leave room for others within what all of them may have.
fn share(wanted: u32, together: u32) -> u32 {
    wanted.min(together / 4).max(1)
}

/// A socket's path; `unix://` before it, as other tools have it, is fine.
fn absolute_socket(path: &Path) -> Result<PathBuf> {
    let path = path.strip_prefix("unix:").map_or_else(|_| path.into(), |rest| Path::new("/").join(rest));
    std::path::absolute(&path).with_context(|| format!("--cri-socket {} is not a valid path", path.display()))
}

fn service_proxy(args: &Args, namespace: &NetNs) -> Result<Option<Arc<dyn ServiceProxy>>> {
    let mode = match args.services {
        Services::Auto => knit_services::Mode::Auto,
        Services::On => knit_services::Mode::On,
        Services::Off => return Ok(None),
    };
    let namespace =
        namespace.try_clone().context("this process's network namespace cannot be opened again")?;
    let config = knit_services::Config {
        node: args.node_name.clone(),
        namespace,
        mode,
        healthz: Some(args.services_healthz_addr),
        metrics: Some(args.services_metrics_addr),
        backends: Arc::new(knit_proxy_nft::NftBackends),
    };
    Ok(Some(Arc::new(knit_services::Services::new(config))))
}

#[cfg(test)]
mod tests {
    use clap::Args as _;

    const PAGE: &str = include_str!("../../../../docs/agent.md");

    #[test]
    fn every_flag_of_the_page_is_there_and_in_the_environment() {
        let command = super::Args::augment_args(clap::Command::new("node"));
        let rows = PAGE.lines().filter(|line| line.starts_with("| `--"));
        let flags: Vec<&str> = rows
            .flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`'))
            .filter_map(|w| w.strip_prefix("--"))
            .collect();
        assert!(flags.len() > 8, "the page has lost its table: {flags:?}");
        for flag in flags {
            let found = command.get_arguments().find(|a| a.get_long() == Some(flag));
            let found = found.unwrap_or_else(|| panic!("there is no --{flag}"));
            assert!(found.get_env().is_some(), "--{flag} cannot be given in the environment");
        }
    }

    #[test]
    fn one_network_at_its_limit_shut_out_all_others() {
        // A node of four cores: half of 131,072 connections is for Networks.
        assert_eq!(super::share(65_536, 65_536), 16_384);
        assert_eq!(super::share(1_000, 65_536), 1_000);
        assert_eq!(super::share(65_536, 0), 1);
    }
}
