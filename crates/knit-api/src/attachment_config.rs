//! AttachmentConfig: what a claim says about the interface that it asks for. It travels as opaque parameters
//! of a ResourceClaim or DeviceClass, which the API server does not look into; so this is the one place where
//! they are checked, for whoever reads them.

use std::fmt;
use std::net::IpAddr;

use knit_types::{Addresses, InterfaceName, Mac, NetworkName, parse_ip};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{GROUP, VERSION};

/// The kind of opaque parameters that Knit reads.
pub const KIND: &str = "AttachmentConfig";

/// The fields that are served.
pub const FIELDS: [&str; 5] = ["network", "interface", "addresses", "mac", "defaultRoute"];

/// Fields that other drivers have and nobody serves here yet. They are refused rather than ignored: a pod
/// must not run without what it asked for.
pub const NOT_SERVED: [&str; 11] = [
    "mtu",
    "routes",
    "rules",
    "neighbors",
    "vrf",
    "sysctls",
    "ethtool",
    "gsoMaxSize",
    "groMaxSize",
    "bandwidth",
    "profile",
];

/// The longest parameters that are read, which is also the API server's limit.
const MAX_LENGTH: usize = 10 << 10;

/// What a claim, or its class, says about one interface.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct AttachmentConfig {
    /// The Network that it is for. A device is of one Network anyway: this says that no other is meant.
    pub network: Option<NetworkName>,
    /// The interface's name in the pod.
    pub interface: Option<InterfaceName>,
    /// Addresses that it must have, at most one per family.
    pub addresses: Vec<IpAddr>,
    /// The MAC that it must have.
    pub mac: Option<Mac>,
    /// Whether the pod's default route goes out here.
    pub default_route: Option<bool>,
}

/// What is wrong with parameters, and what to write.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ConfigError(String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Raw {
    #[serde(rename = "apiVersion")]
    _api_version: Value,
    #[serde(rename = "kind")]
    _kind: Value,
    network: Option<String>,
    interface: Option<String>,
    addresses: Option<Vec<String>>,
    mac: Option<String>,
    default_route: Option<bool>,
}

// === impl AttachmentConfig ===

impl AttachmentConfig {
    /// Reads opaque parameters. Nothing in them is ignored.
    ///
    /// # Errors
    /// When something in them is wrong, unknown or not served; the text says what to write.
    pub fn read(parameters: &Value) -> Result<Self, ConfigError> {
        let wrong = |problem: String| Err(ConfigError(problem));
        let Some(map) = parameters.as_object() else {
            return wrong(format!("they are not an object: write kind: {KIND}"));
        };
        let length = parameters.to_string().len();
        if length > MAX_LENGTH {
            return wrong(format!("they are {length} bytes long: write at most {MAX_LENGTH}"));
        }
        let said = |field: &str| map.get(field).and_then(Value::as_str);
        let version = format!("{GROUP}/{VERSION}");
        if said("apiVersion") != Some(version.as_str()) || said("kind") != Some(KIND) {
            return wrong(format!("they are not of a known kind: write apiVersion: {version}, kind: {KIND}"));
        }
        check_fields(map)?;
        let raw = Raw::deserialize(parameters).map_err(|error| ConfigError(shorten(&error.to_string())))?;
        raw.try_into()
    }

    /// This, said by a claim, together with what its class says. A field that both set must say the same: a
    /// class is an operator's, and who writes a claim does not overrule it.
    ///
    /// # Errors
    /// When the two contradict each other.
    pub fn with_class(self, class: Self) -> Result<Self, ConfigError> {
        fn both<T: PartialEq>(
            field: &str,
            own: Option<T>,
            class: Option<T>,
        ) -> Result<Option<T>, ConfigError> {
            match (own, class) {
                (Some(own), Some(class)) if own != class => Err(ConfigError(format!(
                    "{field} differs from what the DeviceClass says: leave it out, or use another class"
                ))),
                (own, class) => Ok(own.or(class)),
            }
        }
        let list = |list: Vec<IpAddr>| (!list.is_empty()).then_some(list);
        Ok(Self {
            network: both("network", self.network, class.network)?,
            interface: both("interface", self.interface, class.interface)?,
            addresses: both("addresses", list(self.addresses), list(class.addresses))?.unwrap_or_default(),
            mac: both("mac", self.mac, class.mac)?,
            default_route: both("defaultRoute", self.default_route, class.default_route)?,
        })
    }
}

impl TryFrom<Raw> for AttachmentConfig {
    type Error = ConfigError;

    fn try_from(raw: Raw) -> Result<Self, ConfigError> {
        let wrong = |field: &str, problem: &dyn fmt::Display| ConfigError(format!("{field}: {problem}"));
        let network = raw.network.map(NetworkName::new).transpose();
        let network = network.map_err(|error| wrong("network", &error))?;
        let interface = raw.interface.map(|name| InterfaceName::new(shorten(&name)));
        let addresses = raw.addresses.unwrap_or_default();
        let parsed = addresses.iter().map(|text| {
            parse_ip(text).ok_or_else(|| {
                let problem =
                    format!("{:?} is not an IP address: write one such as 10.77.0.9", shorten(text));
                wrong("addresses", &problem)
            })
        });
        let addresses: Vec<IpAddr> = parsed.collect::<Result<_, _>>()?;
        if !addresses.is_empty() && Addresses::from_list(&addresses).is_none() {
            return Err(wrong("addresses", &"write at most one per family"));
        }
        Ok(Self {
            network,
            interface: interface.transpose().map_err(|error| wrong("interface", &error))?,
            addresses,
            mac: raw
                .mac
                .map(|mac| shorten(&mac).parse::<Mac>())
                .transpose()
                .map_err(|error| wrong("mac", &error))?,
            default_route: raw.default_route,
        })
    }
}

// === impl ConfigError ===

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

fn check_fields(map: &Map<String, Value>) -> Result<(), ConfigError> {
    for field in map.keys().map(String::as_str) {
        if NOT_SERVED.contains(&field) {
            return Err(ConfigError(format!("{field} is not supported yet: leave it out")));
        }
        if !FIELDS.contains(&field) && field != "apiVersion" && field != "kind" {
            let known = FIELDS.join(", ");
            return Err(ConfigError(format!("{:?} is not a known field: write {known}", shorten(field))));
        }
    }
    Ok(())
}

/// A stranger's text in a message: short, and without control characters.
fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    fn with(fields: Value) -> Value {
        let mut all = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AttachmentConfig"});
        let map = all.as_object_mut().expect("an object");
        map.extend(fields.as_object().expect("an object").clone());
        all
    }

    #[test]
    fn every_field_that_is_served_is_read() {
        let read = AttachmentConfig::read(&with(json!({
            "network": "blue", "interface": "data0", "addresses": ["10.2.0.9", "fd00::9"],
            "mac": "02:00:00:00:00:07", "defaultRoute": true,
        })))
        .expect("parameters");
        assert_eq!(read.network.as_deref(), Some("blue"));
        assert_eq!(read.interface, Some(InterfaceName::new("data0").expect("a name")));
        assert_eq!(read.addresses.len(), 2);
        assert_eq!(read.mac, Some("02:00:00:00:00:07".parse().expect("a MAC")));
        assert_eq!(read.default_route, Some(true));
        assert_eq!(AttachmentConfig::read(&with(json!({}))), Ok(AttachmentConfig::default()));
    }

    #[test]
    fn nothing_that_is_not_understood_is_ignored() {
        let long = "a".repeat(MAX_LENGTH);
        for (parameters, says) in [
            (json!(null), "not an object"),
            (json!([]), "not an object"),
            (json!({}), "kind: AttachmentConfig"),
            (json!({"apiVersion": "dra.net/v1", "kind": "AttachmentConfig"}), "knit.dev/v1alpha1"),
            (with(json!({"colour": "red"})), "not a known field"),
            (with(json!({"Network": "blue"})), "not a known field"),
            (with(json!({"mtu": 9000})), "mtu is not supported yet"),
            (with(json!({"sysctls": {}})), "sysctls is not supported yet"),
            (with(json!({"network": "../blue"})), "not a valid Network name"),
            (with(json!({"network": 7})), "string"),
            (with(json!({"interface": "a/b"})), "interface"),
            (with(json!({"interface": "lo"})), "interface"),
            (with(json!({"addresses": ["10.0.0.300"]})), "not an IP address"),
            (with(json!({"addresses": ["10.0.0.1", "10.0.0.2"]})), "one per family"),
            (with(json!({"mac": "zz\u{1b}[31m"})), "mac"),
            (with(json!({"defaultRoute": "yes"})), "boolean"),
            (with(json!({"network": long})), "10240"),
        ] {
            let error = AttachmentConfig::read(&parameters).expect_err(says).to_string();
            assert!(error.contains(says), "{parameters}: {error}");
            assert!(error.len() < 400 && !error.chars().any(char::is_control), "{error:?}");
        }
    }

    #[test]
    fn a_claim_does_not_overrule_its_class() {
        let read = |fields| AttachmentConfig::read(&with(fields)).expect("parameters");
        let class = read(json!({"network": "blue", "defaultRoute": false}));
        let own = read(json!({"network": "blue", "interface": "data0"}));
        let both = own.with_class(class.clone()).expect("no contradiction");
        assert_eq!((both.default_route, both.interface.is_some()), (Some(false), true));
        let error = read(json!({"defaultRoute": true})).with_class(class).expect_err("it contradicts");
        assert!(error.to_string().contains("DeviceClass"), "{error}");
    }
}
