//! Readiness probes, as a kubelet does them: from the node, at the pod's address; `exec` inside the pod.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use knit_kernel::netns::NetNs;
use serde_json::Value;
use tokio::process::Command;

use super::node::spawn_in;

/// One container's readiness probe.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    action: Action,
    pub(crate) delay: Duration,
    pub(crate) period: Duration,
    timeout: Duration,
    pub(crate) successes: u32,
    pub(crate) failures: u32,
}

#[derive(Clone, Debug)]
enum Action {
    Http { host: Option<IpAddr>, port: u16, path: String },
    Tcp { host: Option<IpAddr>, port: u16 },
    Exec { command: Vec<String> },
}

/// Where a probe comes from and goes to.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) node: Arc<NetNs>,
    pub(crate) pod: Arc<NetNs>,
    pub(crate) address: Option<IpAddr>,
}

impl Probe {
    /// The readiness probe of a container, if it has one that is known.
    pub(crate) fn of(container: &Value) -> Option<Self> {
        let probe = container.get("readinessProbe").filter(|probe| probe.is_object())?;
        let number = |field: &str, usual: u64| probe[field].as_u64().unwrap_or(usual);
        let count = |field: &str, usual| u32::try_from(number(field, usual)).unwrap_or(1).max(1);
        let host = |action: &Value| action["host"].as_str().and_then(|host| host.parse().ok());
        let action = if let Some(http) = probe.get("httpGet").filter(|v| v.is_object()) {
            let path = http["path"].as_str().unwrap_or("/").to_owned();
            Action::Http { host: host(http), port: port(container, &http["port"])?, path }
        } else if let Some(tcp) = probe.get("tcpSocket").filter(|v| v.is_object()) {
            Action::Tcp { host: host(tcp), port: port(container, &tcp["port"])? }
        } else {
            let command = probe["exec"]["command"].as_array()?;
            let command: Vec<String> = command.iter().filter_map(|w| w.as_str().map(str::to_owned)).collect();
            Action::Exec { command }
        };
        Some(Self {
            action,
            delay: Duration::from_secs(number("initialDelaySeconds", 0)),
            period: Duration::from_secs(number("periodSeconds", 10).max(1)),
            timeout: Duration::from_secs(number("timeoutSeconds", 1).max(1)),
            successes: count("successThreshold", 1),
            failures: count("failureThreshold", 3),
        })
    }

    /// Tries once.
    pub(crate) async fn attempt(&self, target: &Target) -> bool {
        let timeout = self.timeout;
        match &self.action {
            Action::Exec { command } => {
                let Some((program, arguments)) = command.split_first() else { return false };
                let mut run = Command::new(program);
                run.args(arguments).kill_on_drop(true).stdin(std::process::Stdio::null());
                run.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
                let Ok(mut child) = spawn_in(&target.pod, run, "a probe") else { return false };
                matches!(tokio::time::timeout(timeout, child.wait()).await,
                    Ok(Ok(status)) if status.success())
            }
            Action::Http { host, port, path } => {
                let Some(address) = host.or(target.address) else { return false };
                let (to, path) = (SocketAddr::new(address, *port), path.clone());
                blocking(target, move |node| node.run(|| http(to, &path, timeout)).unwrap_or(false)).await
            }
            Action::Tcp { host, port } => {
                let Some(address) = host.or(target.address) else { return false };
                let to = SocketAddr::new(address, *port);
                let connect = move || TcpStream::connect_timeout(&to, timeout).is_ok();
                blocking(target, move |node| node.run(connect).unwrap_or(false)).await
            }
        }
    }
}

async fn blocking(target: &Target, attempt: impl FnOnce(&NetNs) -> bool + Send + 'static) -> bool {
    let node = Arc::clone(&target.node);
    tokio::task::spawn_blocking(move || attempt(&node)).await.unwrap_or(false)
}

/// Whether a GET is answered with 2xx or 3xx.
fn http(to: SocketAddr, path: &str, timeout: Duration) -> bool {
    let attempt = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: kube-probe/lab\r\nConnection: close\r\n\r\n"
        )?;
        let mut start = [0; 12];
        stream.read_exact(&mut start)?;
        Ok(matches!(start[9], b'2' | b'3'))
    };
    attempt().unwrap_or(false)
}

/// A port by its number, or by the name that the container gives it.
fn port(container: &Value, port: &Value) -> Option<u16> {
    match port {
        Value::Number(number) => number.as_u64().and_then(|n| u16::try_from(n).ok()),
        Value::String(name) => {
            let mut ports = container["ports"].as_array().into_iter().flatten();
            let found = ports.find(|p| p["name"] == name.as_str())?["containerPort"].as_u64()?;
            u16::try_from(found).ok()
        }
        _ => None,
    }
}
