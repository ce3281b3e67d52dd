//! KubeProxyConfiguration (`kubeproxy.config.k8s.io/v1alpha1`): the file that kube-proxy is configured with.
//!
//! Every field that means something here is in the types below. A field that kube-proxy knows and that has no
//! meaning for this proxy is named in [`File::not_used`] if it is set; a field that nobody knows, in
//! [`File::unknown`]. As kubeadm writes the file, an empty text, a zero and a null mean the default.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::duration::GoDuration;

/// A configuration that was read.
#[derive(Debug, Default)]
pub struct File {
    /// What it says.
    pub config: KubeProxyConfiguration,
    /// Fields that nobody knows.
    pub unknown: Vec<String>,
    /// Fields that are set and have no meaning here, each with the reason.
    pub not_used: Vec<(&'static str, &'static str)>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KubeProxyConfiguration {
    pub client_connection: ClientConnection,
    pub hostname_override: String,
    pub bind_address: String,
    pub healthz_bind_address: String,
    pub metrics_bind_address: String,
    pub bind_address_hard_fail: bool,
    pub mode: String,
    pub iptables: Section,
    pub ipvs: Section,
    pub nftables: Section,
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: String,
    pub detect_local_mode: String,
    pub detect_local: DetectLocal,
    pub node_port_addresses: Option<Vec<String>>,
    pub conntrack: Conntrack,
    pub logging: Logging,
    pub feature_gates: BTreeMap<String, bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientConnection {
    pub kubeconfig: String,
}

/// What the sections of the modes have in common.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Section {
    pub masquerade_all: bool,
    pub masquerade_bit: Option<u32>,
    pub sync_period: Option<GoDuration>,
    pub min_sync_period: Option<GoDuration>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DetectLocal {
    pub bridge_interface: String,
    pub interface_name_prefix: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conntrack {
    pub max_per_core: Option<u64>,
    pub min: Option<u64>,
    pub tcp_established_timeout: Option<GoDuration>,
    pub tcp_close_wait_timeout: Option<GoDuration>,
    pub tcp_be_liberal: bool,
    pub udp_timeout: Option<GoDuration>,
    pub udp_stream_timeout: Option<GoDuration>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Logging {
    pub format: String,
    pub verbosity: u32,
}

/// Fields of kube-proxy that mean nothing here, and why.
const NOT_USED: &[(&str, &str)] = &[
    ("featureGates", "only AllowServiceExternalIPs exists"),
    ("clientConnection.acceptContentTypes", "JSON is used"),
    ("clientConnection.contentType", "JSON is used"),
    ("clientConnection.qps", "a proxy only watches"),
    ("clientConnection.burst", "a proxy only watches"),
    ("configSyncPeriod", "watches are never re-listed on a timer"),
    ("enableProfiling", "there is no profiler"),
    ("iptables.localhostNodePorts", "node ports do not answer on loopback"),
    ("ipvs.excludeCIDRs", "IPVS is not used"),
    ("ipvs.scheduler", "IPVS is not used; endpoints are chosen at random"),
    ("ipvs.strictARP", "IPVS is not used"),
    ("ipvs.tcpFinTimeout", "IPVS is not used"),
    ("ipvs.tcpTimeout", "IPVS is not used"),
    ("ipvs.udpTimeout", "IPVS is not used"),
    ("logging.flushFrequency", "log lines are written immediately"),
    ("logging.options", "log lines are written immediately"),
    ("oomScoreAdj", "it is set by what starts the process"),
    ("portRange", "only kube-proxy's former userspace mode used it"),
    ("showHiddenMetricsForVersion", "no metrics are hidden"),
    ("windowsRunAsService", "this is Linux"),
    ("winkernel", "this is Linux"),
];

/// The text of the file's group and version.
const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

impl File {
    /// Reads a file of YAML or JSON.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        Self::parse(&text).with_context(|| format!("cannot use {name} as configuration"))
    }

    /// Reads the text of one.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_saphyr::from_str(text).context("it is not YAML")?;
        let kind = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (kind("apiVersion"), kind("kind"));
        if (version.as_str(), kind.as_str()) != (API_VERSION, "KubeProxyConfiguration") {
            bail!(
                "it is apiVersion {version:?}, kind {kind:?}; write apiVersion: {API_VERSION} and kind: \
                 KubeProxyConfiguration"
            );
        }
        let mut unknown = Vec::new();
        let mut track = serde_path_to_error::Track::new();
        let cleaned = without_nulls(value.clone());
        let config =
            serde_ignored::deserialize(serde_path_to_error::Deserializer::new(cleaned, &mut track), |path| {
                unknown.push(path.to_string());
            });
        let config =
            config.map_err(|error: serde_json::Error| anyhow::anyhow!("{}: {error}", track.path()))?;
        let known = |field: &String| {
            let covered = |(name, _): &(&str, &str)| field == name || field.starts_with(&format!("{name}."));
            matches!(field.as_str(), "apiVersion" | "kind") || NOT_USED.iter().any(covered)
        };
        unknown.retain(|field| !known(field));
        let set = |(name, _): &&(&'static str, &'static str)| {
            !is_default(value.pointer(&format!("/{}", name.replace('.', "/"))).unwrap_or(&Value::Null))
        };
        let not_used = NOT_USED.iter().filter(set).copied().collect();
        Ok(Self { config, unknown, not_used })
    }
}

/// The value less all nulls: they mean the default, whatever a field's type is.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            map.into_iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k, without_nulls(v))).collect()
        }
        other => other,
    }
}

/// Whether a value is what kubeadm writes for "the default".
fn is_default(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(yes) => !yes,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => matches!(text.as_str(), "" | "0" | "0s"),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(is_default),
    }
}

impl Section {
    /// A period, or what kube-proxy takes for it.
    pub fn period(value: Option<GoDuration>, default: Duration) -> Duration {
        value.map(|d| d.0).filter(|d| !d.is_zero()).unwrap_or(default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    /// The fields and values that `kubeadm init` puts into the ConfigMap kube-proxy.
    const KUBEADM: &str = r#"
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, contentType: "",
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null,
  tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s,
  syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s,
  tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}},
  verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "",
  sourceVip: ""}
"#;

    #[test]
    fn the_file_of_kubeadm_is_taken_without_a_word() {
        let file = File::parse(&format!("{HEAD}{KUBEADM}")).unwrap();
        assert_eq!(file.unknown, Vec::<String>::new());
        assert_eq!(file.not_used, []);
        assert_eq!(file.config.client_connection.kubeconfig, "/var/lib/kube-proxy/kubeconfig.conf");
        assert_eq!(file.config.cluster_cidr, "10.244.0.0/16");
        assert_eq!(Section::period(file.config.iptables.sync_period, Duration::from_secs(30)).as_secs(), 30);
    }

    #[test]
    fn unknown_fields_and_fields_without_a_meaning_are_named() {
        let text = "detectLokal: {}\nnftables: {masqueradeAl: true}\nipvs: \
                    {scheduler: rr}\nconfigSyncPeriod: 15m\n\
                    oomScoreAdj: -999\nwinkernel: {enableDSR: true}\n";
        let file = File::parse(&format!("{HEAD}{text}")).unwrap();
        assert_eq!(file.unknown, ["detectLokal", "nftables.masqueradeAl"]);
        let not_used: Vec<_> = file.not_used.iter().map(|(name, _)| *name).collect();
        assert_eq!(not_used, ["configSyncPeriod", "ipvs.scheduler", "oomScoreAdj", "winkernel"]);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, expected) in [
            ("conntrack: {maxPerCore: many}\n", "conntrack.maxPerCore"),
            ("nftables: {minSyncPeriod: soon}\n", "nftables.minSyncPeriod"),
            ("nodePortAddresses: 10.0.0.0/8\n", "nodePortAddresses"),
            ("hostnameOverride: [\n", "not YAML"),
        ] {
            let error = format!("{:#}", File::parse(&format!("{HEAD}{text}")).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        let error = format!("{:#}", File::parse("kind: ConfigMap\napiVersion: v1\n").unwrap_err());
        assert!(error.contains("kind \"ConfigMap\""), "{error}");
    }
}
