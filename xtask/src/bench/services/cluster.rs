//! A real API server, without a cluster around it, that has ten thousand services from its first moment on.
//!
//! Objects are written to etcd, where the API server finds them and sees them change: what is measured is
//! what a proxy does, and writing them through the API would take minutes.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use knit_kernel::NetNs;
use serde_json::{Value, json};

use super::objects::{self, cluster_ip};

const ETCD: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 2379);
/// etcd takes no more than 128 operations at once.
const AT_ONCE: usize = 100;
const START_TIMEOUT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(50);
const KUBECONFIG: &str = "apiVersion: v1
kind: Config
current-context: x
clusters: [{name: x, cluster: {server: 'https://127.0.0.1:6443', insecure-skip-tls-verify: true}}]
users: [{name: x, user: {token: secret}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
";

/// What a cluster is made of.
pub struct Programs {
    pub etcd: PathBuf,
    pub api_server: PathBuf,
    pub kubectl: PathBuf,
}

/// etcd and the API server, in a network namespace; they end with the value.
pub struct Cluster {
    pub netns: NetNs,
    folder: tempfile::TempDir,
    daemons: Vec<Daemon>,
}

/// A program that runs in the background; it is killed with the value.
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Cluster {
    pub fn start(netns: NetNs, programs: &Programs, objects: &[(String, Value)]) -> Result<Self> {
        let folder = tempfile::tempdir().context("no folder for a cluster")?;
        let mut cluster = Self { netns, folder, daemons: Vec::new() };
        cluster.write("kubeconfig", KUBECONFIG)?;
        cluster.write("tokens", "secret,admin,1,system:masters\n")?;
        let key = rcgen::KeyPair::generate()?;
        cluster.write("key", &key.serialize_pem())?;
        cluster.write("key.pub", &key.public_key_pem())?;
        let urls = [
            "--data-dir=etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        ];
        let daemon = cluster.run(&programs.etcd, &urls)?;
        cluster.daemons.push(daemon);
        cluster.wait("etcd", |netns| netns.run(|| TcpStream::connect(ETCD)).is_ok_and(|s| s.is_ok()))?;
        for some in objects.chunks(AT_ONCE) {
            cluster.put(some)?;
        }
        let daemon = cluster.run(
            &programs.api_server,
            &[
                "--etcd-servers=http://127.0.0.1:2379",
                "--service-cluster-ip-range=10.96.0.0/12",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-account-key-file=key.pub",
                "--service-account-signing-key-file=key",
                "--cert-dir=certificates",
                "--bind-address=127.0.0.1",
                "--advertise-address=10.1.0.1",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=AlwaysAllow",
                "--token-auth-file=tokens",
                "--disable-admission-plugins=ServiceAccount",
            ],
        )?;
        cluster.daemons.push(daemon);
        let mut ready = Command::new(&programs.kubectl);
        ready.args(["--kubeconfig=kubeconfig", "get", "--raw", "/readyz"]).current_dir(cluster.folder.path());
        cluster.wait("the API server", |netns| {
            netns.run(|| ready.output()).is_ok_and(|output| output.is_ok_and(|o| o.status.success()))
        })?;
        Ok(cluster)
    }

    /// A program in the cluster's network and folder.
    pub fn run(&self, program: &Path, args: &[&str]) -> Result<Daemon> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let log = self.path(&format!("{name}.log"));
        let output = File::create(&log)?;
        let mut command = Command::new(program);
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output).env_remove("KNIT_LOG");
        let child = self.netns.run(|| command.spawn())?;
        Ok(Daemon { child: child.with_context(|| format!("cannot start {}", program.display()))?, log })
    }

    pub fn write(&self, name: &str, content: &str) -> Result<()> {
        fs::write(self.path(name), content).with_context(|| format!("cannot write {name}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn wait(&mut self, what: &str, mut ready: impl FnMut(&NetNs) -> bool) -> Result<()> {
        let end = Instant::now() + START_TIMEOUT;
        let (netns, daemon) = (&self.netns, self.daemons.last_mut().context("nothing runs")?);
        while !ready(netns) {
            ensure!(daemon.runs(), "{what} has ended: {}", daemon.log());
            ensure!(Instant::now() < end, "{what} does not answer: {}", daemon.log());
            super::kube_proxy::rest(PAUSE);
        }
        Ok(())
    }

    /// Whether etcd and the API server are still there.
    pub fn check(&mut self) -> Result<()> {
        match self.daemons.iter_mut().find_map(|daemon| (!daemon.runs()).then(|| daemon.log())) {
            Some(log) => bail!("the cluster has ended: {log}"),
            None => Ok(()),
        }
    }

    /// Writes objects where the API server keeps them.
    pub fn put(&self, objects: &[(String, Value)]) -> Result<()> {
        let put = |(key, value): &(String, Value)| {
            let value = BASE64.encode(value.to_string());
            json!({"requestPut": {"key": BASE64.encode(key), "value": value}})
        };
        let body = json!({"success": objects.iter().map(put).collect::<Vec<_>>()}).to_string();
        let mut stream = self.netns.run(|| TcpStream::connect(ETCD))?.context("etcd does not answer")?;
        let length = body.len();
        write!(
            stream,
            "POST /v3/kv/txn HTTP/1.1\r\nhost: etcd\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{body}"
        )?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply)?;
        if !reply.starts_with("HTTP/1.1 200") {
            bail!("etcd did not take objects: {reply}");
        }
        Ok(())
    }
}

impl Daemon {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The end of what it has printed.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service as it is kept, with the key that it is kept at.
pub fn service(number: u32) -> (String, Value) {
    stored("services/specs", objects::service(number, "TCP"))
}

/// The note that its address is taken, without which the API server would mend that first, for minutes.
pub fn address(number: u32) -> (String, Value) {
    let (ip, service) = (cluster_ip(number), objects::service(number, "TCP"));
    let note = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {
            "name": ip, "uid": ip,
            "labels": {
                "ipaddress.kubernetes.io/ip-family": "IPv4",
                "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io",
            },
        },
        "spec": {"parentRef": {
            "resource": "services",
            "namespace": service["metadata"]["namespace"], "name": service["metadata"]["name"],
        }},
    });
    (format!("/registry/ipaddresses/{ip}"), note)
}

/// Likewise its endpoints.
pub fn slice(number: u32, addresses: &[Ipv4Addr]) -> (String, Value) {
    stored("endpointslices", objects::slice(number, "TCP", addresses))
}

/// A node, which has no namespace.
pub fn node(name: &str, address: Ipv4Addr) -> (String, Value) {
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    });
    (format!("/registry/minions/{name}"), node)
}

fn stored(kind: &str, object: Value) -> (String, Value) {
    let part = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    (format!("/registry/{kind}/{}/{}", part("namespace"), part("name")), object)
}
