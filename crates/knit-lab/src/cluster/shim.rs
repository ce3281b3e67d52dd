//! How pods get their networks here: the real CNI shim, run as a container runtime runs it.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use knit_cni::CniResult;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use super::error::{Error, Result};

/// A sandbox as a container runtime knows it.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// Its network namespace.
    pub netns: PathBuf,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's uid.
    pub uid: String,
    /// What the runtime adds for capabilities: annotations, port mappings.
    pub runtime_config: Value,
}

/// The shim of one node.
#[derive(Clone, Debug)]
pub struct Shim {
    /// The program, which is `knit` itself.
    pub program: PathBuf,
    /// The agent's socket.
    pub socket: PathBuf,
}

impl Shim {
    /// ADD: returns the pod's main addresses.
    pub async fn add(&self, sandbox: &Sandbox) -> Result<Vec<IpAddr>> {
        let answer = self.call("ADD", Some(sandbox)).await?;
        let result = CniResult::from_json(&answer)
            .map_err(|error| Error::Cni(format!("cannot parse the answer to ADD: {error}")))?;
        let main = result.ips.iter().filter(|ip| ip.interface.is_none_or(|index| index == 0));
        Ok(main.map(|ip| ip.address.addr()).collect())
    }

    /// DEL.
    pub async fn del(&self, sandbox: &Sandbox) -> Result<()> {
        self.call("DEL", Some(sandbox)).await.map(drop)
    }

    /// STATUS: whether pods can be given networks.
    pub async fn status(&self) -> Result<()> {
        self.call("STATUS", None).await.map(drop)
    }

    async fn call(&self, command: &str, sandbox: Option<&Sandbox>) -> Result<Value> {
        let mut shim = Command::new(&self.program);
        // `cni` only tells the one binary of the lab to be the shim; the call itself is as CNI has it.
        shim.arg("cni").env("CNI_COMMAND", command).env("CNI_IFNAME", "eth0").env("CNI_PATH", "/opt/cni/bin");
        let mut config = json!({
            "cniVersion": "1.1.0", "name": "knit", "type": "knit-cni", "socket": path(&self.socket),
        });
        if let Some(sandbox) = sandbox {
            config["runtimeConfig"] = sandbox.runtime_config.clone();
            shim.env("CNI_CONTAINERID", &sandbox.id).env("CNI_NETNS", &sandbox.netns).env(
                "CNI_ARGS",
                format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
                    sandbox.namespace, sandbox.name, sandbox.id, sandbox.uid
                ),
            );
        }
        shim.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let failed = |source| Error::Shim { program: self.program.clone(), source };
        let mut child = shim.spawn().map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(config.to_string().as_bytes()).await.map_err(failed)?;
        }
        let output = child.wait_with_output().await.map_err(failed)?;
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        if output.status.success() {
            return Ok(answer);
        }
        let text = |field: &str| answer[field].as_str().unwrap_or_default();
        let mut words = text("msg").to_owned();
        if words.is_empty() {
            words = format!("the CNI shim exited with {} and without an answer", output.status);
        }
        if !text("details").is_empty() {
            words = format!("{words} ({})", text("details"));
        }
        Err(Error::Cni(words))
    }
}

fn path(path: &Path) -> String {
    path.display().to_string()
}
