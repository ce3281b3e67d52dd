//! The answer to ADD, in the form of the newest version, and how older versions write it.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::version::Version;

/// All interfaces of a pod with their addresses, and its routes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct CniResult {
    /// The interfaces, the pod's main one first.
    pub interfaces: Vec<Interface>,
    /// The addresses.
    pub ips: Vec<Ip>,
    /// The routes.
    pub routes: Vec<Route>,
    /// Name servers.
    pub dns: Dns,
}

/// One interface.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// Its MAC address.
    #[serde(default)]
    pub mac: String,
    /// Its largest packet.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// The path of the network namespace that it is in; none for one on the host.
    #[serde(default)]
    pub sandbox: Option<String>,
}

/// One address.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Ip {
    /// The address with its prefix length.
    pub address: IpNet,
    /// The gateway.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// Which of the interfaces has it.
    #[serde(default)]
    pub interface: Option<usize>,
}

/// One route.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Route {
    /// Where packets are to go.
    pub dst: IpNet,
    /// The next hop.
    #[serde(default)]
    pub gw: Option<IpAddr>,
}

/// Name servers, as a result has them.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub struct Dns {
    /// Name servers' addresses.
    pub nameservers: Vec<String>,
    /// Search domains.
    pub search: Vec<String>,
    /// Resolver options.
    pub options: Vec<String>,
}

// === impl CniResult ===

impl CniResult {
    /// The result as one version of the specification writes it.
    #[must_use]
    pub fn to_json(&self, version: Version) -> Value {
        let interfaces: Vec<Value> = self.interfaces.iter().map(|i| i.to_json(version)).collect();
        let ips: Vec<Value> = self.ips.iter().map(|ip| ip.to_json(version)).collect();
        let routes: Vec<Value> = self.routes.iter().map(Route::to_json).collect();
        json!({
            "cniVersion": version,
            "interfaces": interfaces,
            "ips": ips,
            "routes": routes,
            "dns": self.dns.to_json(),
        })
    }

    /// Reads a result of any version that Knit speaks, such as the one given back for CHECK.
    ///
    /// # Errors
    /// When it is not of that form.
    pub fn from_json(json: &Value) -> Result<Self, serde_json::Error> {
        Self::deserialize(json)
    }
}

impl Interface {
    fn to_json(&self, version: Version) -> Value {
        let mut json = Map::new();
        json.insert("name".into(), self.name.as_str().into());
        if !self.mac.is_empty() {
            json.insert("mac".into(), self.mac.as_str().into());
        }
        if let Some(mtu) = self.mtu.filter(|_| version >= Version::V1_1_0) {
            json.insert("mtu".into(), mtu.into());
        }
        if let Some(sandbox) = &self.sandbox {
            json.insert("sandbox".into(), sandbox.as_str().into());
        }
        json.into()
    }
}

impl Ip {
    fn to_json(&self, version: Version) -> Value {
        let mut json = Map::new();
        // Before 1.0.0 an address says its family.
        if version < Version::V1_0_0 {
            let family = if self.address.addr().is_ipv4() { "4" } else { "6" };
            json.insert("version".into(), family.into());
        }
        json.insert("address".into(), self.address.to_string().into());
        if let Some(gateway) = self.gateway {
            json.insert("gateway".into(), gateway.to_string().into());
        }
        if let Some(interface) = self.interface {
            json.insert("interface".into(), interface.into());
        }
        json.into()
    }
}

impl Route {
    fn to_json(&self) -> Value {
        let mut json = Map::new();
        json.insert("dst".into(), self.dst.to_string().into());
        if let Some(gw) = self.gw {
            json.insert("gw".into(), gw.to_string().into());
        }
        json.into()
    }
}

impl Dns {
    fn to_json(&self) -> Value {
        let mut json = Map::new();
        for (key, list) in
            [("nameservers", &self.nameservers), ("search", &self.search), ("options", &self.options)]
        {
            if !list.is_empty() {
                json.insert(key.into(), list.clone().into());
            }
        }
        json.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result() -> CniResult {
        CniResult {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: "0a:58:0a:01:00:05".into(),
                mtu: Some(1450),
                sandbox: Some("/run/netns/a".into()),
            }],
            ips: vec![Ip {
                address: "10.1.0.5/32".parse().expect("an address"),
                gateway: Some("169.254.1.1".parse().expect("an address")),
                interface: Some(0),
            }],
            routes: vec![Route {
                dst: "0.0.0.0/0".parse().expect("a range"),
                gw: Some("169.254.1.1".parse().expect("an address")),
            }],
            dns: Dns::default(),
        }
    }

    #[test]
    fn each_version_has_its_own_form() {
        for version in Version::ALL {
            let json = result().to_json(version);
            assert_eq!(json["cniVersion"], version.as_str());
            let has_family = json["ips"][0].get("version").is_some();
            assert_eq!(has_family, version < Version::V1_0_0, "{version}: addresses say their family");
            let has_mtu = json["interfaces"][0].get("mtu").is_some();
            assert_eq!(has_mtu, version >= Version::V1_1_0, "{version}: interfaces have an MTU");
            let mut back = CniResult::from_json(&json).expect("it reads back");
            back.interfaces[0].mtu = Some(1450);
            assert_eq!(back, result(), "{version}");
        }
    }
}
