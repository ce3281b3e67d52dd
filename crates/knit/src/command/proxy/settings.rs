//! What the flags and the configuration file come to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ipnet::IpNet;
use knit_objects::Source;
use knit_proxy::engine::{EngineConfig, Pace, WaitFor};
use knit_proxy::kubernetes::{parse_ip, parse_net};
use knit_proxy::view::{LocalTraffic, NodePorts, ViewConfig};
use knit_proxy_nft::Limits;

use super::config::{File, KubeProxyConfiguration, Section};
use super::{ServeArgs, SourceArgs, conntrack};

/// All that a proxy has to know before it starts.
#[derive(Debug)]
pub struct Settings {
    pub common: Common,
    pub engine: EngineConfig,
    pub healthz: SocketAddr,
    pub metrics: SocketAddr,
    /// A proxy is unwell when a change has been waiting for this long (rule 55).
    pub unhealthy_after: Duration,
    /// An address that cannot be listened on ends the program.
    pub hard_fail: bool,
    /// The kernel's connection table; `None`: it is left alone.
    pub conntrack: Option<Limits>,
    /// The bit of the packet mark that says "masquerade this" (rule 50), counted from 0.
    pub masquerade_bit: u32,
    pub json_logs: bool,
    pub verbosity: u8,
    pub socket: PathBuf,
}

/// What serving and showing have in common.
#[derive(Debug)]
pub struct Common {
    pub source: Source,
    pub node_name: String,
    /// The node's own address, before those that its Node object has.
    pub address: Option<IpAddr>,
    pub proxy_name: Option<String>,
    pub view: ViewConfig,
    /// What is to be said about the configuration: warnings, then remarks.
    pub warnings: Vec<String>,
    pub remarks: Vec<String>,
    /// The objects come from a folder.
    pub from_files: bool,
}

/// kube-proxy's switch for external IPs (rule 21).
const EXTERNAL_IPS: &str = "AllowServiceExternalIPs";

const MIN_SYNC: Duration = Duration::from_secs(1);
const SYNC: Duration = Duration::from_secs(30);
const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;

impl Settings {
    pub fn of(args: &ServeArgs) -> Result<Self> {
        let file = read(&args.source)?;
        let common = Common::of(&args.source, &file)?;
        let config = &file.config;
        let section = section(config);
        let min_interval = match section.min_sync_period {
            // Who says what to do has its own pace; there is no need for two.
            _ if args.from_stream.is_some() => Duration::ZERO,
            // Zero is "at once", but kubeadm writes it for "the default".
            Some(period) => Section::period(Some(period), MIN_SYNC),
            None => MIN_SYNC,
        };
        let sync = Section::period(section.sync_period, SYNC);
        let pace = Pace { min_interval, retry_max: sync, ..Pace::default() };
        let bind = bind_address(&args.source, config)?;
        let any: IpAddr = match bind {
            Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        let local: IpAddr = match bind {
            Some(IpAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        let healthz = args.healthz_bind_address.as_ref().unwrap_or(&config.healthz_bind_address);
        let metrics = args.metrics_bind_address.as_ref().unwrap_or(&config.metrics_bind_address);
        // Without a cluster and without a configuration, the machine is somebody's own: its limits are left
        // alone.
        let conntrack = (!common.from_files || args.source.config.is_some())
            .then(|| conntrack::wanted(&config.conntrack));
        Ok(Self {
            engine: EngineConfig {
                view: common.view.clone(),
                pace,
                wait_for: WaitFor { node: true, ..WaitFor::default() },
            },
            healthz: listen(healthz, any, HEALTHZ_PORT).context("the healthz address")?,
            metrics: listen(metrics, local, METRICS_PORT).context("the metrics address")?,
            unhealthy_after: sync * 2,
            hard_fail: config.bind_address_hard_fail,
            conntrack,
            masquerade_bit: masquerade_bit(section)?,
            json_logs: args.log_format == super::LogFormat::Json || config.logging.format == "json",
            verbosity: args.verbose.max(u8::from(config.logging.verbosity >= 4)),
            socket: args.source.socket.clone(),
            common,
        })
    }
}

/// Where the proxy is told to be: an address of the node, or all of one family.
fn bind_address(args: &SourceArgs, config: &KubeProxyConfiguration) -> Result<Option<IpAddr>> {
    match &args.bind_address {
        Some(address) => Ok(Some(*address)),
        None if config.bind_address.is_empty() => Ok(None),
        None => Ok(Some(ip(&config.bind_address).context("bindAddress")?)),
    }
}

impl Common {
    /// For `get` and `explain`.
    pub fn read(args: &SourceArgs) -> Result<Self> {
        Self::of(args, &read(args)?)
    }

    fn of(args: &SourceArgs, file: &File) -> Result<Self> {
        let config = &file.config;
        let mut warnings: Vec<String> = file
            .unknown
            .iter()
            .map(|field| format!("unknown field {field} in the configuration is ignored"))
            .collect();
        let mut remarks = Vec::new();
        if !file.not_used.is_empty() {
            let list: Vec<_> = file.not_used.iter().map(|(name, why)| format!("{name} ({why})")).collect();
            remarks.push(format!(
                "fields of the configuration that have no effect here: \
            {}",
                list.join(", ")
            ));
        }
        if !matches!(config.mode.as_str(), "" | "nftables") {
            remarks.push(format!("mode {} is configured; nftables is used instead", config.mode));
        }
        let kubeconfig =
            args.kubeconfig.clone().or_else(|| some(&config.client_connection.kubeconfig).map(PathBuf::from));
        let source = match (&args.from_files, kubeconfig) {
            (Some(folder), _) => Source::folder(folder),
            (None, Some(path)) => Source::Kubeconfig { path, context: None },
            (None, None) => Source::Infer,
        };
        let name = args.node_name.as_deref().or_else(|| some(&config.hostname_override));
        let node_name = match name {
            Some(name) => name.trim().to_lowercase(),
            None => super::node::host_name()?,
        };
        let view = ViewConfig {
            node_ports: node_ports(args, file, &mut warnings)?,
            local_traffic: local_traffic(args, config, &mut warnings)?,
            masquerade_all: args.masquerade_all || section(config).masquerade_all,
            external_ips: !args.deny_external_ips && config.feature_gates.get(EXTERNAL_IPS) != Some(&false),
            ..ViewConfig::default()
        };
        Ok(Self {
            source,
            node_name,
            address: bind_address(args, config)?.filter(|address| !address.is_unspecified()),
            proxy_name: args.service_proxy_name.clone(),
            view,
            warnings,
            remarks,
            from_files: args.from_files.is_some(),
        })
    }
}

fn read(args: &SourceArgs) -> Result<File> {
    args.config.as_deref().map_or_else(|| Ok(File::default()), File::read)
}

/// The section of the mode that the file is for.
fn section(config: &KubeProxyConfiguration) -> &Section {
    match config.mode.as_str() {
        "nftables" => &config.nftables,
        "ipvs" => &config.ipvs,
        _ => &config.iptables,
    }
}

/// kube-proxy's own bit is 14.
fn masquerade_bit(section: &Section) -> Result<u32> {
    match section.masquerade_bit {
        None => Ok(14),
        Some(bit @ 0..=31) => Ok(bit),
        Some(bit) => bail!("masqueradeBit: {bit} must be between 0 and 31"),
    }
}

/// Rule 24. A file for another mode than nftables had node ports on all addresses, and keeps that.
fn node_ports(args: &SourceArgs, file: &File, warnings: &mut Vec<String>) -> Result<NodePorts> {
    let given = args.nodeport_addresses.as_ref().or(file.config.node_port_addresses.as_ref());
    let list: Vec<&str> =
        given.into_iter().flatten().map(|text| text.trim()).filter(|t| !t.is_empty()).collect();
    if list.is_empty() {
        let other_mode = args.config.is_some() && file.config.mode != "nftables";
        return Ok(if other_mode { NodePorts::All } else { NodePorts::Primary });
    }
    let keyword = |word: &str| list.contains(&word);
    if keyword("localhost") {
        warnings.push(
            "node ports do not answer on loopback addresses: nodePortAddresses: localhost is ignored".into(),
        );
    }
    let others: Vec<&str> = list.iter().copied().filter(|text| *text != "localhost").collect();
    match others.as_slice() {
        [] | ["primary"] => return Ok(NodePorts::Primary),
        ["all"] => return Ok(NodePorts::All),
        several if several.iter().any(|t| matches!(*t, "primary" | "all")) => {
            bail!("nodePortAddresses: must be primary, all or a list of CIDRs, not {}", list.join(","))
        }
        _ => {}
    }
    let ranges =
        others.iter().map(|text| range(text).context("nodePortAddresses")).collect::<Result<Vec<_>>>()?;
    if ranges.iter().any(|r| r.addr().is_loopback()) {
        warnings.push("node ports do not answer on loopback addresses, which nodePortAddresses lists".into());
    }
    Ok(NodePorts::Ranges(ranges))
}

/// Rule 49.
fn local_traffic(
    args: &SourceArgs,
    config: &KubeProxyConfiguration,
    warnings: &mut Vec<String>,
) -> Result<LocalTraffic> {
    let cidrs = args.cluster_cidr.as_deref().unwrap_or(&config.cluster_cidr);
    let detect = &config.detect_local;
    let needed = |text: &str, field: &str| -> Result<std::sync::Arc<str>> {
        some(text).map(Into::into).with_context(|| {
            format!("detectLocalMode: {} requires detectLocal.{field}", config.detect_local_mode)
        })
    };
    Ok(match config.detect_local_mode.as_str() {
        "" | "ClusterCIDR" => {
            let list = cidrs.split(',').map(str::trim).filter(|t| !t.is_empty());
            let ranges = list.map(|text| range(text).context("clusterCIDR")).collect::<Result<Vec<_>>>()?;
            if ranges.is_empty() {
                if config.detect_local_mode == "ClusterCIDR" {
                    warnings.push(
                        "detectLocalMode: ClusterCIDR without clusterCIDR: pods cannot be \
                        distinguished from other clients"
                            .into(),
                    );
                }
                LocalTraffic::Unknown
            } else {
                LocalTraffic::Sources(ranges)
            }
        }
        "NodeCIDR" => LocalTraffic::NodePodRanges,
        "BridgeInterface" => LocalTraffic::Bridge(needed(&detect.bridge_interface, "bridgeInterface")?),
        "InterfaceNamePrefix" => {
            LocalTraffic::InterfacePrefix(needed(&detect.interface_name_prefix, "interfaceNamePrefix")?)
        }
        other => bail!(
            "detectLocalMode: {other:?} must be ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"
        ),
    })
}

/// Reads an address to listen on: `IP:PORT`, `IP`, or nothing for the default. Port 0 takes any free one.
fn listen(text: &str, default_ip: IpAddr, default_port: u16) -> Result<SocketAddr> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(SocketAddr::new(default_ip, default_port));
    }
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(address) = text.trim_matches(['[', ']']).parse() {
        return Ok(SocketAddr::new(address, default_port));
    }
    match text.strip_prefix(':').and_then(|port| port.parse().ok()) {
        Some(port) => Ok(SocketAddr::new(default_ip, port)),
        None => bail!(
            "{text:?} is not a valid address to listen on: write IP:PORT, such as \
        0.0.0.0:{default_port}"
        ),
    }
}

fn some(text: &str) -> Option<&str> {
    Some(text.trim()).filter(|t| !t.is_empty())
}

fn ip(text: &str) -> Result<IpAddr> {
    parse_ip(text).with_context(|| format!("{text:?} is not an IP address"))
}

fn range(text: &str) -> Result<IpNet> {
    parse_net(text.trim()).with_context(|| format!("{text:?} is not a valid CIDR such as 10.0.0.0/8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> File {
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        File::parse(&format!("{head}{text}")).unwrap()
    }

    fn common(args: &SourceArgs, text: &str) -> Result<Common> {
        Common::of(
            &SourceArgs { config: Some("config".into()), node_name: Some("n".into()), ..args.clone() },
            &file(text),
        )
    }

    #[test]
    fn rule_24_where_node_ports_answer() {
        let of = |text: &str| common(&SourceArgs::default(), text).map(|c| c.view.node_ports);
        let ranges = |list: &[&str]| NodePorts::Ranges(list.iter().map(|r| r.parse().unwrap()).collect());
        assert_eq!(of("mode: nftables").unwrap(), NodePorts::Primary);
        assert_eq!(of("mode: iptables").unwrap(), NodePorts::All);
        assert_eq!(of("mode: iptables\nnodePortAddresses: [primary]").unwrap(), NodePorts::Primary);
        assert_eq!(
            of("nodePortAddresses: [10.0.0.0/8, 'fd00::/8']").unwrap(),
            ranges(&["10.0.0.0/8", "fd00::/8"])
        );
        assert!(
            format!("{:#}", of("nodePortAddresses: [primary, 10.0.0.0/8]").unwrap_err())
                .contains("must be primary, all")
        );
        assert!(
            format!("{:#}", of("nodePortAddresses: [10.0.0.0]").unwrap_err())
                .contains("\"10.0.0.0\" is not a valid CIDR")
        );
        let flag = SourceArgs { nodeport_addresses: Some(vec!["all".into()]), ..SourceArgs::default() };
        assert_eq!(common(&flag, "nodePortAddresses: [primary]").unwrap().view.node_ports, NodePorts::All);
    }

    #[test]
    fn rule_21_flag_and_file_switch_external_ips_off() {
        let of = |args: &SourceArgs, text: &str| common(args, text).unwrap().view.external_ips;
        let none = SourceArgs::default();
        assert!(of(&none, ""));
        assert!(!of(&SourceArgs { deny_external_ips: true, ..SourceArgs::default() }, ""));
        assert!(!of(&none, "featureGates: {AllowServiceExternalIPs: false}"));
        assert!(of(&none, "featureGates: {AllowServiceExternalIPs: true, Other: false}"));
    }

    #[test]
    fn rule_25_loopback_is_refused_with_a_word() {
        let common = common(&SourceArgs::default(), "nodePortAddresses: [127.0.0.0/8, 10.0.0.0/8]").unwrap();
        assert!(common.warnings[0].contains("loopback"), "{:?}", common.warnings);
    }

    #[test]
    fn rule_49_how_pods_are_told_from_others() {
        let of = |text: &str| common(&SourceArgs::default(), text).map(|c| c.view.local_traffic);
        let sources =
            LocalTraffic::Sources(vec!["10.244.0.0/16".parse().unwrap(), "fd00::/48".parse().unwrap()]);
        assert_eq!(of("clusterCIDR: 10.244.0.0/16,fd00::/48").unwrap(), sources);
        assert_eq!(of("").unwrap(), LocalTraffic::Unknown);
        assert_eq!(of("detectLocalMode: NodeCIDR").unwrap(), LocalTraffic::NodePodRanges);
        let bridge = "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: br0}";
        assert_eq!(of(bridge).unwrap(), LocalTraffic::Bridge("br0".into()));
        let prefix = "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}";
        assert_eq!(of(prefix).unwrap(), LocalTraffic::InterfacePrefix("veth".into()));
        for bad in ["detectLocalMode: BridgeInterface", "detectLocalMode: Guess", "clusterCIDR: 10.0.0.0/99"]
        {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rule_47_the_section_of_the_mode_counts() {
        let of = |text: &str| common(&SourceArgs::default(), text).unwrap().view.masquerade_all;
        assert!(of("mode: iptables\niptables: {masqueradeAll: true}"));
        assert!(!of("mode: nftables\niptables: {masqueradeAll: true}"));
        assert!(of("mode: nftables\nnftables: {masqueradeAll: true}"));
    }

    #[test]
    fn rule_50_the_bit_of_the_packet_mark() {
        let of = |text: &str| masquerade_bit(section(&file(text).config)).map_err(|e| e.to_string());
        assert_eq!(of(""), Ok(14));
        assert_eq!(of("mode: nftables\nnftables: {masqueradeBit: 3}"), Ok(3));
        assert_eq!(
            of("iptables: {masqueradeBit: 32}"),
            Err("masqueradeBit: 32 must be between 0 and 31".into())
        );
    }

    #[test]
    fn addresses_to_listen_on() {
        let any: IpAddr = [0, 0, 0, 0].into();
        for (text, expected) in [
            ("", Some("0.0.0.0:10256")),
            ("127.0.0.1:1", Some("127.0.0.1:1")),
            (":9", Some("0.0.0.0:9")),
            ("127.0.0.1", Some("127.0.0.1:10256")),
            ("[::1]:7", Some("[::1]:7")),
            ("::", Some("[::]:10256")),
            ("everywhere", None),
            (":x", None),
        ] {
            let found = listen(text, any, HEALTHZ_PORT).ok().map(|a| a.to_string());
            assert_eq!(found.as_deref(), expected, "{text:?}");
        }
    }
}
