//! `knit node`: the node agent.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use knit_api::names;
use knit_kernel::netns::NetNs;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_node::front_door::dra::{DraConfig, ServeClaims};
use knit_node::front_door::nri::{self, NriConfig, Served};
use knit_node::policy::PolicyEnforcer;
use knit_node::proxy::ServiceProxy;
use knit_objects::{FolderOptions, Kinds, Source};
use knit_proxy_nft::Limits;
use knit_runtime::Runtime;

use super::log::LogArgs;
use super::stop::Stop;

/// Run the node agent: it sets up the networks of this node's pods
///
/// It reads Networks and related objects from the Kubernetes API or from a folder of files, serves the CNI
/// shim through a socket, and repairs what others change. Stopping it changes nothing for running pods.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # On a node of a cluster, with the credentials of its pod
  knit node --node-name worker-1

  # With another kubeconfig, metrics on loopback
  knit node --node-name worker-1 --kubeconfig /etc/kubernetes/kubelet.conf --metrics-addr 127.0.0.1:9469

  # Without Kubernetes, from files of Networks, AddressBlocks, Namespaces and Nodes
  knit node --node-name this --node-ip 192.0.2.10 --objects-from ./objects --run-dir /run/knit")]
pub struct Args {
    /// This node's name, as in its Node object
    #[arg(long, env = "KNIT_NODE_NAME", value_name = "NAME")]
    node_name: String,

    /// This node's address, one per family [default: those of its Node object]
    #[arg(long, env = "KNIT_NODE_IP", value_name = "ADDRESS", value_delimiter = ',')]
    node_ip: Vec<IpAddr>,

    /// The namespace of the agents' Leases: that of the controller
    #[arg(long, env = "KNIT_NAMESPACE", value_name = "NAME", default_value = names::SYSTEM_NAMESPACE)]
    namespace: String,

    /// Read objects from the files in this folder instead of a cluster
    #[arg(long, env = "KNIT_OBJECTS_FROM", value_name = "FOLDER", conflicts_with_all = ["kubeconfig",
        "api_url"])]
    objects_from: Option<PathBuf>,

    /// Write statuses and events to this folder [default: FOLDER/status]
    #[arg(long, env = "KNIT_OBJECTS_TO", value_name = "FOLDER", requires = "objects_from")]
    objects_to: Option<PathBuf>,

    /// Use the cluster of this kubeconfig [default: the usual kubeconfig, or the cluster of this pod]
    #[arg(long, env = "KNIT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// URL of an API server that needs no credentials, such as the lab's
    #[arg(long, env = "KNIT_API_URL", value_name = "URL", conflicts_with = "kubeconfig")]
    api_url: Option<String>,

    /// Directory for the ledger and sockets; a reboot must empty it
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    /// Directory for what persists across reboots
    #[arg(long, env = "KNIT_STATE_DIR", value_name = "DIR", default_value = "/var/lib/knit")]
    state_dir: PathBuf,

    /// The socket for the CNI shim [default: cni.sock in the runtime directory]
    #[arg(long, env = "KNIT_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Serve /healthz, /readyz and /metrics here, such as 127.0.0.1:9469 or :9469 [default: not served]
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

    /// Ask the container runtime at this socket for its sandboxes; networks of sandboxes that it lists are
    /// kept, others are removed
    #[arg(long, env = "KNIT_CRI_SOCKET", value_name = "PATH")]
    cri_socket: Option<PathBuf>,

    /// Serve ResourceClaims of Networks: register with kubelet as the driver knit.dev
    #[arg(long, env = "KNIT_DRA")]
    dra: bool,

    /// Kubelet's directory, which contains its plugins
    #[arg(long, env = "KNIT_KUBELET_DIR", value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,

    /// Write device metadata files of claims (KEP-5304), which containers get through CDI specifications in
    /// this directory of the container runtime
    #[arg(long, env = "KNIT_CDI_DIR", value_name = "DIR")]
    cdi_dir: Option<PathBuf>,

    /// The uid of the agent's pod, part of the names of its sockets for kubelet
    #[arg(long, env = "KNIT_POD_UID", value_name = "UID")]
    pod_uid: Option<String>,

    /// Run beside another CNI plugin, which provides the main interface of pods: attach additional Networks
    /// through the container runtime's NRI. The Network default and Services are not served then [default:
    /// Knit is the node's CNI plugin]
    #[arg(long, env = "KNIT_NRI", value_name = "WHAT", value_enum, num_args = 0..=1, require_equals = true,
        default_missing_value = "all")]
    nri: Option<Nri>,

    /// The container runtime's NRI socket
    #[arg(long, env = "KNIT_NRI_SOCKET", value_name = "PATH", default_value = nri::SOCKET)]
    nri_socket: PathBuf,

    /// Which Services Knit serves
    #[arg(long, env = "KNIT_SERVICES", value_name = "WHO", value_enum, default_value_t = Services::Auto)]
    services: Services,

    /// Where /healthz of the service proxy is served for external load balancers; like kube-proxy, and only
    /// while the default Network's Services are served here
    #[arg(long, env = "KNIT_SERVICES_HEALTHZ_ADDR", value_name = "ADDRESS:PORT",
        default_value_t = knit_services::HEALTHZ)]
    services_healthz_addr: SocketAddr,

    /// Where /metrics and /proxyMode of the service proxy are served; like kube-proxy, and only while it
    /// serves the default Network
    #[arg(long, env = "KNIT_SERVICES_METRICS_ADDR", value_name = "ADDRESS:PORT",
        default_value_t = knit_services::METRICS)]
    services_metrics_addr: SocketAddr,

    /// Whether Knit enforces NetworkPolicies. `off` also removes the rules of policies enforced before
    #[arg(long, env = "KNIT_POLICIES", value_name = "WHO", value_enum, default_value_t = Policies::On)]
    policies: Policies,

    /// Approximate maximum number of connections that the pods of one Network may have through this node at
    /// once; 0 for no limit other than the kernel's. The default Network has no such limit
    #[arg(long, env = "KNIT_NETWORK_CONNECTIONS", value_name = "NUMBER",
        default_value_t = knit_linux::Config::UPLINK_CONNECTIONS)]
    network_connections: u32,

    /// Ranges that pods of Networks with a router never reach as the outside, besides what Nodes list, such
    /// as the nodes' management network. Does not apply to the default Network
    #[arg(long, env = "KNIT_NOT_OUTSIDE", value_name = "CIDRS", value_delimiter = ',')]
    not_outside: Vec<ipnet::IpNet>,

    /// Seconds between two passes that compare everything with the desired state
    #[arg(long, env = "KNIT_PASS_EVERY", value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    pass_every: u64,

    /// Seconds to wait for an agent that is being replaced
    #[arg(long, env = "KNIT_REPLACE_WAIT", value_name = "SECONDS", default_value_t = 60)]
    replace_wait: u64,

    #[command(flatten)]
    log: LogArgs,
}

/// Which Services Knit serves on this node.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Services {
    /// Those of every Network; if kube-proxy is active on the node, it serves those of the default Network
    Auto,
    /// Those of every Network, even if kube-proxy is active on the node
    #[value(alias = "knit")]
    On,
    /// None
    #[value(alias = "none")]
    Off,
}

/// Who enforces policies on this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Policies {
    /// Knit enforces them in every Network whose spec does not exclude it
    #[value(alias = "knit")]
    On,
    /// Knit does not enforce them
    #[value(aliases = ["none", "others"])]
    Off,
}

/// How pods ask for further Networks beside another CNI plugin.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Nri {
    /// Networks requested by annotations and by claims
    All,
    /// Networks requested by claims only
    Claims,
}

/// How long requests that run may take to end when the agent stops.
const STOP: Duration = Duration::from_secs(20);

pub fn run(args: Args) -> Result<ExitCode> {
    args.log.start()?;
    // Most threads wait for the kernel most of the time.
    knit_kernel::share_heaps(2);
    // The work is short and mostly the kernel's: two threads keep memory small.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
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
    let namespace = NetNs::current().context("cannot open this process's network namespace")?;
    let proxy = service_proxy(&args, &namespace)?;
    let run_dir = std::path::absolute(&args.run_dir).context("cannot resolve the runtime directory")?;
    let policies = enforcement(&args, &namespace, &run_dir)?;
    let source = if let Some(path) = args.objects_from {
        let kinds = knit_enforcement::folder_kinds(Kinds::default());
        Source::Folder(FolderOptions { output: args.objects_to, kinds, ..FolderOptions::new(path) })
    } else if let Some(url) = args.api_url {
        Source::Url(url)
    } else if let Some(path) = args.kubeconfig {
        Source::Kubeconfig { path, context: None }
    } else {
        Source::Infer
    };
    let serve = if args.dra { ServeClaims::All } else { ServeClaims::ThoseLeft };
    let dra = Some(DraConfig {
        kubelet_dir: args.kubelet_dir,
        instance: args.pod_uid,
        serve,
        cdi_dir: args.cdi_dir,
    });
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
    core.namespace = args.namespace;
    core.reconcile_every = Duration::from_secs(args.pass_every);
    core.not_outside = args.not_outside;
    core.cri_socket = args.cri_socket.as_deref().map(absolute_socket).transpose()?;
    let nri = args.nri.map(|nri| NriConfig {
        socket: args.nri_socket,
        served: match nri {
            Nri::All => Served::AnnotationsAndClaims,
            Nri::Claims => Served::Claims,
        },
    });
    Ok(AgentConfig {
        core,
        socket,
        source,
        node_addresses: args.node_ip,
        http: args.metrics_addr,
        lock_wait: Duration::from_secs(args.replace_wait),
        netns_dirs: args.netns_dirs,
        runtime: Box::new(make),
        nri,
        proxy,
        policies: Some(policies),
        dra,
    })
}

/// Half of the kernel's table of connections: of what it is now, or of what a service proxy makes of it if
/// that is less.
fn half_of_the_table(namespace: &NetNs) -> u32 {
    const MOST: &str = "net/netfilter/nf_conntrack_max";
    let now = || Sysctls::of(namespace).ok()?.get(&Sysctl::new(MOST).ok()?).ok()?.trim().parse::<u64>().ok();
    let planned = Limits::default().plan(knit_proxy_nft::cores()).into_iter().find(|(name, _)| *name == MOST);
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
        // The Networks that Knit serves then are nobody's primary one: none has Services.
        Services::Auto if args.nri.is_some() => return Ok(None),
        Services::On if args.nri.is_some() => bail!(
            "--services=on and --nri exclude each other: Knit serves Services on the main interfaces of \
             pods, which another CNI plugin creates; leave one of them out"
        ),
        Services::Auto => knit_services::Mode::Auto,
        Services::On => knit_services::Mode::On,
        Services::Off => return Ok(None),
    };
    let namespace = namespace.try_clone().context("cannot reopen this process's network namespace")?;
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

/// What the enforcement knows of the cluster names what it drops.
struct Known(Arc<knit_enforcement::Enforcement>);

impl knit_drops::Clusters for Known {
    fn ask(&self, question: knit_drops::Question) {
        self.0.ask(move |engine| question(engine.cluster()));
    }
}

fn enforcement(args: &Args, namespace: &NetNs, run_dir: &Path) -> Result<Arc<dyn PolicyEnforcer>> {
    let clone = || namespace.try_clone().context("cannot reopen this process's network namespace");
    let mode = match args.policies {
        Policies::On => knit_enforcement::Mode::On,
        Policies::Off => knit_enforcement::Mode::Off,
    };
    let config = knit_enforcement::Config {
        node: args.node_name.clone(),
        namespace: clone()?,
        mode,
        backends: Arc::new(knit_policy_nft::NftBackends),
    };
    let enforcement = Arc::new(knit_enforcement::Enforcement::new(config));
    if mode == knit_enforcement::Mode::Off {
        return Ok(enforcement);
    }
    let known = Arc::new(Known(Arc::clone(&enforcement)));
    let drops = knit_drops::Drops::start(known).context("cannot start reading dropped packets")?;
    let socket = run_dir.join(knit_drops::socket::NAME);
    Ok(Arc::new(knit_drops::WithDrops::new(enforcement, drops, clone()?, socket)))
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
