//! The network configuration that a container runtime gives on the plugin's standard input.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::error::{CniError, code};
use crate::version::{UnsupportedVersion, Version};

/// The parts of a network configuration that Knit reads. Unknown fields are passed over.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// The version of the specification that the answer has to follow.
    #[serde(default)]
    pub cni_version: String,
    /// The configuration's name.
    #[serde(default)]
    pub name: String,
    /// What the runtime adds for the capabilities that the configuration declares.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "RuntimeConfig::is_empty")]
    pub runtime_config: RuntimeConfig,
    /// The answer to ADD, given back for CHECK and DEL, or the answer of the plugin before this one in a
    /// chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prev_result: Option<Value>,
    /// GC: the attachments that are still in use.
    #[serde(
        rename = "cni.dev/valid-attachments",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Option::is_none"
    )]
    pub valid_attachments: Option<Vec<AttachmentKey>>,
    /// The agent's socket, where it is not the usual one. Only the shim reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// How many seconds a call may take, where it is not the usual time. Only the shim reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// Where DELs are noted while the agent is away; beside the socket if it is left out. Only the shim reads
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool_dir: Option<String>,
    /// The file that is there once the agent was ready since boot; beside the socket if it is left out. Only
    /// the shim reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_file: Option<String>,
}

/// An attachment as GC names it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachmentKey {
    /// The container's (sandbox's) id.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface's name.
    pub ifname: String,
}

/// What a container runtime adds for a capability.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeConfig {
    /// Capability `portMappings`.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub port_mappings: Vec<PortMapping>,
    /// Capability `io.kubernetes.cri.pod-annotations`; absent where the runtime does not send it.
    #[serde(rename = "io.kubernetes.cri.pod-annotations", default, skip_serializing_if = "Option::is_none")]
    pub pod_annotations: Option<BTreeMap<String, String>>,
    /// Capability `ips`: addresses that the interface must have, with or without a prefix.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<String>,
    /// Capability `mac`: the MAC that the interface must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Capability `dns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<DnsConfig>,
    /// Capability `bandwidth`, which Knit does not serve: the agent warns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Value>,
}

/// One port of the node that leads into the pod. containerd writes the names of fields with capitals, as its
/// own program has them; CNI's convention, and CRI-O, do not.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// The node's port; 0 stands for none.
    #[serde(default, alias = "HostPort")]
    pub host_port: u16,
    /// The pod's port.
    #[serde(default, alias = "ContainerPort")]
    pub container_port: u16,
    /// `tcp`, `udp` or `sctp`, in any case; tcp if it is empty.
    #[serde(
        alias = "Protocol",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub protocol: String,
    /// The node's address that it holds for; all of them if it is empty.
    #[serde(
        rename = "hostIP",
        alias = "HostIP",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub host_ip: String,
}

/// Name servers, as the capability `dns` has them; with capitals from containerd.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DnsConfig {
    /// Name servers' addresses.
    #[serde(
        alias = "Servers",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub servers: Vec<String>,
    /// Search domains.
    #[serde(
        alias = "Searches",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub searches: Vec<String>,
    /// Resolver options.
    #[serde(
        alias = "Options",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub options: Vec<String>,
}

// === impl NetworkConfig ===

impl NetworkConfig {
    /// Reads what a container runtime writes on the plugin's standard input.
    ///
    /// # Errors
    /// When it is not JSON, or not an object of the form that CNI describes.
    pub fn parse(input: &[u8]) -> Result<Self, CniError> {
        let undecodable = |details: String| {
            let msg = "the network configuration on standard input is not valid: see the CNI specification";
            CniError::new(code::DECODE, msg).with_details(details)
        };
        // A struct would also be read from a list of its fields.
        if input.trim_ascii_start().first() != Some(&b'{') {
            return Err(undecodable("it is not a JSON object".to_owned()));
        }
        serde_json::from_slice(input).map_err(|error| undecodable(error.to_string()))
    }

    /// The version that the answer has to follow.
    ///
    /// # Errors
    /// When it is none that Knit speaks.
    pub fn version(&self) -> Result<Version, UnsupportedVersion> {
        self.cni_version.parse()
    }
}

// === impl RuntimeConfig ===

impl RuntimeConfig {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Programs in Go write an empty list as null.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_containerd_sends() {
        let config = NetworkConfig::parse(
            br#"{"cniVersion":"1.1.0","name":"knit","type":"knit-cni","capabilities":{"portMappings":true},
                "runtimeConfig":{"portMappings":[{"hostPort":80,"containerPort":8080,"protocol":"tcp","hostIP":""}],
                "io.kubernetes.cri.pod-annotations":{"knit.dev/networks":"blue"},"ips":null}}"#,
        )
        .expect("it parses");
        assert_eq!(config.version(), Ok(Version::V1_1_0));
        assert_eq!(config.runtime_config.port_mappings[0].container_port, 8080);
        let annotations = config.runtime_config.pod_annotations.expect("annotations");
        assert_eq!(annotations["knit.dev/networks"], "blue");
        assert!(config.valid_attachments.is_none(), "nothing was said about attachments");
    }

    #[test]
    fn names_of_fields_with_capitals_as_containerd_writes_them() {
        let config = NetworkConfig::parse(
            br#"{"cniVersion":"1.1.0","name":"knit","type":"knit-cni","runtimeConfig":{
                "portMappings":[{"HostPort":18080,"ContainerPort":8080,"Protocol":"TCP","HostIP":"192.0.2.1"}],
                "dns":{"Servers":["10.96.0.10"],"Searches":["svc"],"Options":null}}}"#,
        )
        .expect("it parses");
        let port = PortMapping {
            host_port: 18080,
            container_port: 8080,
            protocol: "TCP".into(),
            host_ip: "192.0.2.1".into(),
        };
        assert_eq!(config.runtime_config.port_mappings, [port]);
        let dns = config.runtime_config.dns.expect("name servers");
        assert_eq!(
            (dns.servers, dns.searches, dns.options),
            (vec!["10.96.0.10".into()], vec!["svc".into()], vec![])
        );
    }

    #[test]
    fn gc_names_what_stays() {
        let config = NetworkConfig::parse(
            br#"{"cniVersion":"1.1.0","name":"knit","cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]}"#,
        )
        .expect("it parses");
        let valid = config.valid_attachments.expect("a list");
        assert_eq!(valid, [AttachmentKey { container_id: "c1".into(), ifname: "eth0".into() }]);
    }

    #[test]
    fn garbage_is_a_decode_error() {
        for input in [
            &b""[..],
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            br#"{"runtimeConfig":{"portMappings":[{"hostPort":70000}]}}"#,
        ] {
            assert_eq!(NetworkConfig::parse(input).expect_err("garbage").code, code::DECODE);
        }
        let unknown = NetworkConfig::parse(br#"{"cniVersion":"0.2.0"}"#).expect("it parses").version();
        assert_eq!(unknown, Err(UnsupportedVersion("0.2.0".into())));
    }
}
