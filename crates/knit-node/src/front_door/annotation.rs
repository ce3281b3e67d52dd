//! The annotations by which a pod asks for Networks: `knit.dev/primary`, a name, and `knit.dev/networks`, in
//! both forms of the NPWG standard: `blue,green@net1`, or a JSON list. Whoever may create a pod writes them,
//! so nothing in them is trusted.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::names;
use knit_ipam::Mac;
use knit_runtime::InterfaceName;
use knit_types::NetworkName;
use serde::Deserialize;

use crate::request::{Asked, Wish, Wishes};

/// The longest annotation that is read.
const MAX_LENGTH: usize = 16 << 10;

/// The most Networks that one pod can ask for.
const MAX_NETWORKS: usize = 16;

/// An entry of the JSON form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    interface: Option<String>,
    #[serde(default)]
    ips: Option<Vec<String>>,
    #[serde(default)]
    mac: Option<String>,
    #[serde(default, rename = "default-route")]
    default_route: Option<Vec<String>>,
}

/// What a pod's annotations ask for.
#[must_use]
pub fn wishes(annotations: &BTreeMap<String, String>) -> Wishes {
    let text = |name: &str| annotations.get(name).map(|text| text.trim()).filter(|text| !text.is_empty());
    let wrong = |name: &str, problem: String| Wishes::Wrong(format!("annotation {name}: {problem}"));
    let primary = text(names::PRIMARY_ANNOTATION);
    let primary = match primary.map(network_name).transpose() {
        Ok(primary) => primary,
        Err(problem) => return wrong(names::PRIMARY_ANNOTATION, problem),
    };
    let further = annotations.get(names::NETWORKS_ANNOTATION).map(|text| parse(text)).transpose();
    match further {
        Ok(further) => Wishes::Said(Wish { primary, further: further.unwrap_or_default() }),
        Err(problem) => wrong(names::NETWORKS_ANNOTATION, problem),
    }
}

/// What the annotation of further Networks asks for, or what is wrong with it.
///
/// # Errors
/// When it is not of either form; the text says what to write.
pub fn parse(text: &str) -> Result<Vec<Asked>, String> {
    if text.len() > MAX_LENGTH {
        return Err(format!("it is {} bytes long: write at most {MAX_LENGTH}", text.len()));
    }
    if text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) {
        return Err("it contains control characters: write names, or a JSON list".to_owned());
    }
    let text = text.trim();
    let asked = if text.is_empty() {
        Vec::new()
    } else if text.starts_with(['[', '{']) {
        parse_json(text)?
    } else {
        text.split(',').map(parse_name).collect::<Result<_, _>>()?
    };
    check_number(asked.len())?;
    Ok(asked)
}

/// Whether a pod can ask for so many further Networks.
///
/// # Errors
/// When it cannot; the text says what to write.
pub fn check_number(networks: usize) -> Result<(), String> {
    if networks > MAX_NETWORKS {
        return Err(format!("it names {networks} Networks: write at most {MAX_NETWORKS}"));
    }
    Ok(())
}

/// The name of a Network that somebody asks for.
///
/// # Errors
/// When it is none; the text says what to write.
pub fn network_name(name: &str) -> Result<NetworkName, String> {
    if let Some((namespace, name)) = name.split_once('/') {
        let (namespace, name) = (shown(namespace), shown(name));
        return Err(format!("{namespace}/{name}: Networks are not namespaced: write only the name"));
    }
    NetworkName::new(name).map_err(|error| error.to_string())
}

fn parse_name(part: &str) -> Result<Asked, String> {
    let part = part.trim();
    if part.is_empty() {
        return Err("nothing between two commas: write names such as blue,green@net1".to_owned());
    }
    let (name, interface) = match part.split_once('@') {
        Some((name, interface)) => (name, Some(interface)),
        None => (part, None),
    };
    let network = network_name(name)?;
    let interface = interface.map(parse_interface).transpose()?;
    Ok(Asked { network, interface, ..Asked::default() })
}

fn parse_json(text: &str) -> Result<Vec<Asked>, String> {
    let entries: Vec<Entry> = serde_json::from_str(text).map_err(|error| {
        format!(
            "it is not a JSON list of Networks ({error}): write [{{\"name\": \"blue\"}}] with interface, \
                 ips, mac or default-route as needed"
        )
    })?;
    entries.into_iter().map(Asked::try_from).collect()
}

impl TryFrom<Entry> for Asked {
    type Error = String;

    fn try_from(entry: Entry) -> Result<Self, String> {
        if entry.namespace.is_some_and(|namespace| !namespace.is_empty()) {
            return Err(format!(
                "{} has a namespace: Networks are not namespaced, leave it out",
                shown(&entry.name)
            ));
        }
        let network = network_name(&entry.name)?;
        let ips = entry.ips.unwrap_or_default();
        let addresses: Vec<IpAddr> = ips.iter().map(|ip| parse_address(ip)).collect::<Result<_, _>>()?;
        if addresses.len() > 2 {
            return Err(format!("{} has {} ips: write at most one per family", entry.name, addresses.len()));
        }
        let mac = entry.mac.filter(|mac| !mac.is_empty());
        Ok(Self {
            interface: entry
                .interface
                .filter(|i| !i.is_empty())
                .as_deref()
                .map(parse_interface)
                .transpose()?,
            addresses,
            mac: mac.map(|mac| shorten(&mac).parse::<Mac>().map_err(|e| e.to_string())).transpose()?,
            default_route: entry.default_route.is_some_and(|gateways| !gateways.is_empty()),
            network,
        })
    }
}

/// An address, with or without a prefix.
///
/// # Errors
/// When it is neither; the text says what to write.
pub fn parse_address(text: &str) -> Result<IpAddr, String> {
    let text = text.trim();
    text.parse::<IpAddr>()
        .or_else(|_| text.parse::<IpNet>().map(|net| net.addr()))
        .map_err(|_| format!("{} is not an IP address; write one such as 10.77.0.9", shown(text)))
}

fn parse_interface(name: &str) -> Result<InterfaceName, String> {
    InterfaceName::new(shorten(name)).map_err(|error| error.to_string())
}

/// A stranger's text in a message: quoted and short.
fn shown(text: &str) -> String {
    format!("{:?}", shorten(text))
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<(String, Option<String>)> {
        let asked = parse(text).expect(text);
        asked.into_iter().map(|a| (a.network.into(), a.interface.map(String::from))).collect()
    }

    #[test]
    fn both_forms() {
        assert_eq!(names("blue"), [("blue".into(), None)]);
        assert_eq!(
            names(" blue , green@net7 "),
            [("blue".into(), None), ("green".into(), Some("net7".into()))]
        );
        assert_eq!(names(""), []);
        assert_eq!(names("[]"), []);
        let asked = parse(
            r#"[{"name":"blue","interface":"data0","ips":["10.0.0.9/24","fd00::9"],"mac":"02:00:00:00:00:07","default-route":["10.0.0.1"]}]"#,
        )
        .expect("a list");
        assert_eq!(
            asked[0].addresses,
            ["10.0.0.9".parse::<IpAddr>().expect("v4"), "fd00::9".parse().expect("v6")]
        );
        assert_eq!(asked[0].mac, Some("02:00:00:00:00:07".parse().expect("a mac")));
        assert!(asked[0].default_route);
    }

    #[test]
    fn hostile_input_is_refused() {
        let long = "a".repeat(MAX_LENGTH + 1);
        let many = vec!["blue"; MAX_NETWORKS + 1].join(",");
        let deep = "[".repeat(10_000);
        for text in [
            "a,,b",
            ",",
            "default/blue",
            "../../etc/passwd",
            "blue@",
            "blue@lo",
            "blue@a/b",
            "Blue",
            "-a",
            "a.",
            "a b",
            "blue\u{0}",
            "blue\u{1b}[31m",
            "{}",
            "[{}]",
            "[1]",
            "[{\"name\":\"blue\",\"bandwidth\":{}}]",
            "[{\"name\":\"blue\",\"namespace\":\"x\"}]",
            "[{\"name\":\"blue\",\"ips\":[\"10.0.0.300\"]}]",
            "[{\"name\":\"blue\",\"mac\":\"zz\"}]",
            "[{\"name\":\"blue\",\"ips\":[\"10.0.0.1\",\"10.0.0.2\",\"::1\"]}]",
            "[{\"name\":\"blue\",\"interface\":\"a name that is far too long\"}]",
            &long,
            &many,
            &deep,
        ] {
            let error = parse(text).expect_err(&text.chars().take(40).collect::<String>());
            assert!(error.len() < 600, "the message is short: {error}");
            assert!(!error.chars().any(char::is_control), "no control characters: {error:?}");
        }
    }
}
