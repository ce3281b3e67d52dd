//! A node with an uplink, the agent on it, and pods.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use knit_kernel::addr::Address;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::route::Route;
use knit_kernel::testing::{cpu_time_of, eventually};
use knit_kernel::{Handle, IfName, NetNs, Op};
use serde_json::{Value, json};

use super::Programs;

const RUN: &str = "/run/knit";
const OBJECTS: &str = "/run/objects";
const PODS: &str = "/run/netns";
const LOG: &str = "/run/agent.log";

/// A node: the namespace that this process is in.
pub struct Node {
    agent: Child,
    knit: PathBuf,
    shim: PathBuf,
    _outside: NetNs,
}

/// A pod's namespace.
pub struct Pod {
    pub id: String,
    pub path: PathBuf,
}

impl Pod {
    pub fn new(id: &str) -> Result<Self> {
        std::fs::create_dir_all(PODS)?;
        let path = Path::new(PODS).join(id);
        NetNs::create(&path)?;
        Ok(Self { id: id.to_owned(), path })
    }

    pub fn discard(&self) -> Result<()> {
        NetNs::delete(&self.path)?;
        Ok(())
    }
}

impl Node {
    /// With these objects besides those of a plain node.
    pub fn start(programs: &Programs, further: &[Value]) -> Result<Self> {
        let outside = uplink()?;
        std::fs::create_dir_all(OBJECTS)?;
        for (number, object) in objects().iter().chain(further).enumerate() {
            std::fs::write(format!("{OBJECTS}/{number}.json"), object.to_string())?;
        }
        let agent = agent(&programs.knit, &[])?;
        let (knit, shim) = (programs.knit.clone(), programs.shim.clone());
        Ok(Self { agent, knit, shim, _outside: outside })
    }

    /// Whether this agent can be told how often it compares everything: older ones, which `--program` may
    /// name, cannot.
    pub fn has_passes(&self) -> Result<bool> {
        let help = Command::new(&self.knit).args(["node", "--help"]).output();
        let help = help.with_context(|| format!("cannot run {}", self.knit.display()))?;
        Ok(String::from_utf8_lossy(&help.stdout).contains("--pass-every"))
    }

    /// Replaces the agent by one with these further arguments.
    pub fn restart(&mut self, further: &[&str]) -> Result<()> {
        self.agent.kill()?;
        self.agent.wait()?;
        self.agent = agent(&self.knit, further)?;
        Ok(())
    }

    pub fn add(&self, pod: &Pod, networks: &str) -> Result<()> {
        self.call("ADD", pod, networks)
    }

    pub fn del(&self, pod: &Pod) -> Result<()> {
        self.call("DEL", pod, "")
    }

    fn call(&self, command: &str, pod: &Pod, networks: &str) -> Result<()> {
        let config = json!({
            "cniVersion": "1.1.0", "name": "knit", "type": "knit-cni", "socket": format!("{RUN}/cni.sock"),
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": networks}}
        });
        let args = format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME={};K8S_POD_UID=u-{}", pod.id, pod.id);
        plugin(&self.shim, command, pod, &args, &config, Path::new("/nonexistent")).map(|_| ()).map_err(
            |error| {
                let log = std::fs::read_to_string(LOG).unwrap_or_default();
                error.context(format!("the agent's log:\n{log}"))
            },
        )
    }

    /// The CPU of all threads of the agent so far, those that have ended included.
    pub fn cpu(&self) -> Result<Duration> {
        cpu_time_of(self.agent.id()).context("the agent's CPU time")
    }

    /// What it has in memory, in MiB, by a line of its status.
    pub fn memory(&self, line: &str) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.agent.id()))?;
        let value =
            status.lines().find_map(|l| l.strip_prefix(line)).with_context(|| format!("no {line}"))?;
        let kib: f64 = value.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib / 1024.0)
    }

    /// Whether the node has a host end of this pod.
    pub fn has_links(&self, pod: &Pod) -> Result<bool> {
        let links = Handle::current()?.links(&LinkFilter { owned: true, ..LinkFilter::default() })?;
        let mark = format!("pod {} ", pod.id);
        Ok(links.iter().any(|link| link.owner().is_some_and(|owner| owner.starts_with(&mark))))
    }
}

/// Starts the agent, and returns when it serves.
fn agent(knit: &Path, further: &[&str]) -> Result<Child> {
    let log = std::fs::File::create(LOG)?;
    let agent = Command::new(knit)
        .args(["node", "--node-name", "node", "--objects-from", OBJECTS, "--run-dir", RUN])
        .args(["--state-dir", "/run/state", "--netns-dirs", PODS, "--log", "warn"])
        .args(further)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .with_context(|| format!("{} does not start", knit.display()))?;
    let socket = format!("{RUN}/cni.sock");
    eventually("the agent serves", Duration::from_secs(20), || UnixStream::connect(&socket).is_ok());
    Ok(agent)
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// Runs a CNI plugin as a container runtime does, and returns what it printed.
pub fn plugin(
    program: &Path,
    command: &str,
    pod: &Pod,
    args: &str,
    config: &Value,
    path: &Path,
) -> Result<Value> {
    let mut child = Command::new(program)
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", &pod.id)
        .env("CNI_NETNS", &pod.path)
        .env("CNI_IFNAME", "eth0")
        .env("CNI_ARGS", args)
        .env("CNI_PATH", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} does not start", program.display()))?;
    child.stdin.take().context("no input")?.write_all(config.to_string().as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{command} of {} by {}: {}",
            pod.id,
            program.display(),
            String::from_utf8_lossy(&output.stdout)
        );
    }
    Ok(if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout)? })
}

/// An uplink with an address and a default route: what leaves is masqueraded.
pub fn uplink() -> Result<NetNs> {
    let outside = NetNs::unnamed()?;
    let handle = Handle::current()?;
    let link = NewLink::veth(IfName::new("uplink")?, Peer::new(IfName::new("node")?, &outside));
    let index = handle.create_link(&link)?.index;
    let there = Handle::open(&outside)?;
    let far = there.index_of(&IfName::new("node")?)?;
    there.apply(&[Change::of(far).up().into(), Op::create(Address::new(far, "192.0.2.254/24".parse()?))])?;
    handle
        .apply(&[Change::of(index).up().into(), Op::create(Address::new(index, "192.0.2.1/24".parse()?))])?;
    let route = Route { protocol: 4, ..Route::default_v4().dev(index).via("192.0.2.254".parse()?) };
    handle.apply(&[Op::create(route)])?;
    Ok(outside)
}

/// The default Network and nine more, with room for two thousand pods each: freed addresses rest for a while.
fn objects() -> Vec<Value> {
    let api = "knit.dev/v1alpha1";
    let mut objects = vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}}),
    ];
    for (id, name) in ["default", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"].iter().enumerate() {
        let mut spec = json!({"class": "knit", "topology": "Layer3",
            "subnets": [{"cidr": format!("10.{}.0.0/16", 100 + id)}]});
        if id > 0 {
            spec["allowedNamespaces"] = json!({"from": "All"});
        }
        objects.push(json!({"apiVersion": api, "kind": "Network", "metadata": {"name": name},
            "spec": spec, "status": {"id": id + 1}}));
        objects.extend((0..8).map(|n| {
            json!({"apiVersion": api, "kind": "AddressBlock", "metadata": {"name": format!("{name}-{n}")},
                "spec": {"network": name, "node": "node", "ipv4": format!("10.{}.{}.0/24", 100 + id, n)}})
        }));
    }
    objects
}
