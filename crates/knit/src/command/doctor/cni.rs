//! What the container runtime finds: a CNI configuration that names the shim, and the shim.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use serde_json::Value;

use super::Node;

/// The shim, as configurations name it.
const PLUGIN: &str = "knit-cni";

pub fn look(node: &mut Node) {
    configuration(node);
    plugin(node);
}

fn configuration(node: &mut Node) {
    let check = "CNI configuration";
    let directory = node.args.cni_conf_dir.clone();
    let shown = directory.display();
    let mut files: Vec<PathBuf> = match std::fs::read_dir(&directory) {
        Ok(entries) => entries.flatten().map(|e| e.path()).filter(|p| is_configuration(p)).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let advice = "install Knit's configuration there, or specify the directory with --cni-conf-dir";
            return node.warning(check, format!("{shown} does not exist"), advice);
        }
        Err(error) => return node.unknown(check, format!("cannot read {shown}: {error}")),
    };
    files.sort();
    let Some(first) = files.first() else {
        let advice = "install Knit's configuration (knit install); until then the node stays NotReady";
        return node.wrong(check, format!("there is no configuration in {shown}"), advice);
    };
    let read = std::fs::read(first).map_err(|e| e.to_string());
    let config: Value = match read.and_then(|text| serde_json::from_slice(&text).map_err(|e| e.to_string())) {
        Ok(config) => config,
        Err(error) => {
            let words = format!("cannot read {}: {error}", first.display());
            return node.wrong(check, words, "fix or remove it: container runtimes use the first file");
        }
    };
    let listed = config["plugins"].as_array().cloned().unwrap_or_else(|| vec![config.clone()]);
    let Some(ours) = listed.iter().find(|plugin| plugin["type"] == PLUGIN) else {
        return node.warning(
            check,
            format!("container runtimes use {} (the first in {shown}), which is not Knit's", first.display()),
            "remove it or give Knit's file a smaller number, unless Knit only serves secondary Networks here",
        );
    };
    let annotations = ours["capabilities"]["io.kubernetes.cri.pod-annotations"] == true;
    let socket = ours["socket"].as_str().map_or_else(
        || knit_cni::paths::socket(std::path::Path::new(knit_cni::paths::RUN_DIR)),
        PathBuf::from,
    );
    if socket != node.socket() {
        return node.wrong(
            check,
            format!(
                "{} names the socket {}, but the agent uses {}",
                first.display(),
                socket.display(),
                node.socket().display()
            ),
            "use the same path in both (\"socket\" in the configuration, --socket or --run-dir of the agent)",
        );
    }
    if !annotations {
        return node.warning(
            check,
            format!("{} does not request pod annotations", first.display()),
            "add \"capabilities\": {\"io.kubernetes.cri.pod-annotations\": true}: without it the agent has \
             to wait for each pod's object",
        );
    }
    node.good(check, format!("{} names the shim", first.display()));
}

fn is_configuration(path: &std::path::Path) -> bool {
    path.extension().is_some_and(|e| e == "conflist" || e == "conf" || e == "json")
}

fn plugin(node: &mut Node) {
    let check = "CNI plugin";
    let path = node.args.cni_bin_dir.join(PLUGIN);
    match std::fs::metadata(&path) {
        Ok(found) if found.is_file() && found.permissions().mode() & 0o111 != 0 => {
            node.good(check, format!("{} exists", path.display()));
        }
        Ok(_) => {
            let words = format!("{} cannot be run", path.display());
            node.wrong(check, words, format!("chmod 0755 {}", path.display()));
        }
        Err(error) => node.warning(
            check,
            format!("cannot inspect {}: {error}", path.display()),
            "install the shim there, or specify the directory with --cni-bin-dir",
        ),
    }
}
