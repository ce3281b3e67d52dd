//! The containernetworking plugins: `bridge` with `host-local` and masquerading, alone and before `portmap`
//! and `firewall`. They run `iptables` or `nft`, in a namespace of their own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use knit_kernel::NetNs;
use knit_kernel::testing::{cpu_time, loopback_up};
use serde_json::{Value, json};

use super::node::{Pod, plugin};
use super::{Cost, discard, measure, pods};

/// What one peer took.
pub struct Peer {
    pub name: &'static str,
    pub add: Cost,
    pub del: Cost,
}

/// Those that could be measured.
pub struct Peers {
    pub bridge: Option<Peer>,
    pub chain: Option<Peer>,
}

/// The tools to build, by the names of their packages. `cnitool` is libcni's own client, for the end-to-end
/// tests.
const PACKAGES: [&str; 5] = [
    "plugins/plugins/ipam/host-local",
    "plugins/plugins/main/bridge",
    "plugins/plugins/meta/firewall",
    "plugins/plugins/meta/portmap",
    "cni/cnitool",
];
const VERSION: &str = "1.9.1";

/// Where plugins may be: those built here, or else the distribution's.
pub fn directories() -> Vec<PathBuf> {
    vec![cache(), PathBuf::from("/usr/lib/cni")]
}

fn cache() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    cache.or(home).unwrap_or_else(std::env::temp_dir).join(format!("knit-bench/cni-plugins-{VERSION}"))
}

/// Builds the plugins, where Go is there. Where it is not, or cannot fetch them, what is installed is used.
pub fn build(root: &Path) {
    let to = cache();
    if PACKAGES.iter().all(|p| to.join(Path::new(p).file_name().unwrap_or_default()).is_file()) {
        return;
    }
    let made = std::fs::create_dir_all(&to).and_then(|()| {
        Command::new("go")
            .args(["build", "-o"])
            .arg(&to)
            .args(PACKAGES.map(|p| format!("github.com/containernetworking/{p}")))
            .current_dir(root.join("xtask/peers/cni-plugins"))
            .env("CGO_ENABLED", "0")
            .status()
    });
    match made {
        Ok(status) if status.success() => {}
        Ok(status) => eprintln!("go build of the containernetworking plugins failed ({status})"),
        Err(error) => eprintln!("the containernetworking plugins are not built: {error}"),
    }
}

/// Measures both peers, in a namespace of their own.
fn measure_in(space: &NetNs, plugins: &Path, count: usize) -> Peers {
    let tell = |name: &str, result: Result<Peer>| match result {
        Ok(peer) => Some(peer),
        Err(error) => {
            eprintln!("{name} could not be measured, its columns stay empty: {error:#}");
            None
        }
    };
    let (bridge, chain) = ("bridge+host-local, ipMasq", "bridge, portmap, firewall");
    Peers {
        bridge: tell(bridge, one(space, plugins, bridge, false, count)),
        chain: tell(chain, one(space, plugins, chain, true, count)),
    }
}

pub fn measure_all(plugins: &Path, count: usize) -> Result<Peers> {
    let space = NetNs::unnamed()?;
    space.run(loopback_up)??;
    Ok(measure_in(&space, plugins, count))
}

fn one(space: &NetNs, plugins: &Path, name: &'static str, chained: bool, count: usize) -> Result<Peer> {
    let pods = pods(if chained { "chain" } else { "bridge" }, count + 2)?;
    // Everything from a thread inside: children are born where it is.
    let measured = space.run(|| -> Result<Peer> {
        let results = std::cell::RefCell::new(std::collections::BTreeMap::new());
        let cpu = || -> Result<Duration> { Ok(cpu_time().1) };
        let steps = steps(chained);
        let add = |pod: &Pod| -> Result<()> {
            let mut previous = Value::Null;
            for (number, step) in steps.iter().enumerate() {
                let config = step.config(&pod.id, &previous);
                let program = plugins.join(step.0);
                let result = plugin(&program, "ADD", pod, "", &config, plugins)?;
                previous = if number == 0 || !result.is_null() { result } else { previous };
            }
            results.borrow_mut().insert(pod.id.clone(), previous);
            Ok(())
        };
        let del = |pod: &Pod| -> Result<()> {
            let previous = results.borrow().get(&pod.id).cloned().unwrap_or_default();
            for step in steps.iter().rev() {
                let config = step.config(&pod.id, &previous);
                plugin(&plugins.join(step.0), "DEL", pod, "", &config, plugins)?;
            }
            Ok(())
        };
        // The first ones pay for the bridge and the tables.
        let (warm, counted) = pods.split_at(2);
        for pod in warm {
            add(pod)?;
            del(pod)?;
        }
        let add = measure(counted, cpu, add)?;
        let del = measure(counted, cpu, del)?;
        Ok(Peer { name, add, del })
    })?;
    discard(&pods)?;
    measured
}

/// One plugin of a list: its program, and its part of the configuration.
struct Step(&'static str, Value);

fn steps(chained: bool) -> Vec<Step> {
    let (name, subnet) = if chained { ("cni1", "10.201.0.0/16") } else { ("cni0", "10.200.0.0/16") };
    let mut steps = vec![Step(
        "bridge",
        json!({"type": "bridge", "bridge": name, "isGateway": true, "ipMasq": true, "hairpinMode": true,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": subnet}]], "dataDir": "/run/host-local"}}),
    )];
    if chained {
        steps.push(Step("portmap", json!({"type": "portmap", "capabilities": {"portMappings": true}})));
        steps.push(Step("firewall", json!({"type": "firewall"})));
    }
    steps
}

impl Step {
    fn config(&self, pod: &str, previous: &Value) -> Value {
        let mut config = self.1.clone();
        config["cniVersion"] = "1.0.0".into();
        config["name"] = "bench".into();
        if !previous.is_null() {
            config["prevResult"] = previous.clone();
        }
        if self.0 == "portmap" {
            let number: u32 = pod.trim_start_matches(char::is_alphabetic).parse().unwrap_or(0);
            config["runtimeConfig"] = json!({"portMappings": [{"hostPort": 20000 + number,
                "containerPort": 80, "protocol": "tcp"}]});
        }
        config
    }
}
