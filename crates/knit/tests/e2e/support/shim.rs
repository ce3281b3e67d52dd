//! The shim, built and run as a container runtime runs it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::Pod;

/// Runs the shim for a node, from any thread.
#[derive(Clone)]
pub struct Caller {
    pub(super) socket: PathBuf,
}

/// What a run of the shim left.
#[derive(Debug)]
pub struct Ran {
    pub ok: bool,
    pub json: Value,
}

/// The shim that belongs to the `knit` under test. Cargo gives tests only the programs of their own package.
pub fn shim() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_knit")).with_file_name("knit-cni")
}

pub fn build_shim() {
    // Inside the namespaces it was built before.
    if std::env::var_os("KNIT_TEST_IN_NAMESPACES").is_some() {
        return;
    }
    let Some(cargo) = std::env::var_os("CARGO") else { return };
    let profile = match shim().parent().and_then(Path::file_name).and_then(|n| n.to_str()) {
        Some("debug") | None => "dev".to_owned(),
        Some(other) => other.to_owned(),
    };
    let target = shim().ancestors().nth(2).map(Path::to_owned).expect("a target directory");
    let built = Command::new(cargo)
        .args([
            "build",
            "--quiet",
            "-p",
            "knit-cni",
            "--bin",
            "knit-cni",
            "--profile",
            &profile,
            "--target-dir",
        ])
        .arg(target)
        .status();
    assert!(built.expect("cargo runs").success(), "the shim does not build");
}

impl Caller {
    pub fn cni(&self, command: &str, pod: &Pod, networks: &str) -> Ran {
        self.cni_as(command, pod, &pod.sandbox, networks, &json!({}))
    }

    pub fn cni_as(&self, command: &str, pod: &Pod, pod_name: &str, networks: &str, more: &Value) -> Ran {
        let mut config = json!({
            "cniVersion": "1.1.0", "name": "knit", "type": "knit-cni", "socket": self.socket,
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": networks}}
        });
        if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
            config.extend(more.clone());
        }
        run_shim(command, &pod.sandbox, &pod.path, pod_name, &config)
    }
}

pub fn run_shim(command: &str, sandbox: &str, netns: &Path, pod: &str, config: &Value) -> Ran {
    let mut child = shim_command(command, sandbox, netns, pod).spawn().expect("the shim starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(config.to_string().as_bytes()).expect("the configuration is read");
    drop(stdin);
    let output = child.wait_with_output().expect("the shim ends");
    let text = String::from_utf8(output.stdout).expect("text");
    let json = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON") };
    Ran { ok: output.status.success(), json }
}

pub fn shim_command(command: &str, sandbox: &str, netns: &Path, pod: &str) -> Command {
    let mut shim = Command::new(shim());
    shim.env_clear()
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", sandbox)
        .env("CNI_NETNS", netns)
        .env("CNI_IFNAME", "eth0")
        .env(
            "CNI_ARGS",
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod};K8S_POD_UID=uid-{pod}"),
        )
        .env("CNI_PATH", "/opt/cni/bin");
    shim.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    shim
}
