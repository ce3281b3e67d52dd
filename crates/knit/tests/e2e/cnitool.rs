//! The real libcni, by its own tool: what a container runtime links is what talks to the shim here.
//!
//! `cnitool` is built from xtask/peers by `cargo xtask kube build peers`, which `cargo xtask kube bin` puts
//! in a folder that `KNIT_KUBE_BIN` names, and by `cargo xtask bench attach`; `KNIT_CNITOOL` names another
//! one.

use std::path::{Path, PathBuf};
use std::process::Command;

use knit_kernel::testing::{eventually, skip};
use serde_json::{Value, json};

use crate::support::{Cluster, NEVER, Pod, SOON, addresses, e2e, shim};

fn cnitool() -> Option<PathBuf> {
    let named = std::env::var_os("KNIT_CNITOOL").map(PathBuf::from);
    let bed = std::env::var_os("KNIT_KUBE_BIN").map(|folder| Path::new(&folder).join("cnitool"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let built = cache.or(home).map(|cache| cache.join("knit-bench/cni-plugins-1.9.1/cnitool"));
    let found = named.into_iter().chain(bed).chain(built).find(|path| path.is_file());
    if found.is_none() {
        skip(
            "there is no cnitool: `cargo xtask kube build peers` builds it, and `cargo xtask kube bin` says \
             where it is",
        );
    }
    found
}

struct Tool<'a> {
    program: &'a Path,
    directory: &'static str,
}

impl Tool<'_> {
    /// Runs a command of cnitool; what it printed.
    fn run(&self, command: &str, pod: &Pod) -> Result<Value, String> {
        let output = Command::new(self.program)
            .args([command, "knit"])
            .arg(&pod.path)
            .env_clear()
            .env("NETCONFPATH", self.directory)
            .env("CNI_PATH", self.directory)
            .output()
            .expect("cnitool runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            return Err(format!("{text}{}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(if text.is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON") })
    }
}

#[test]
fn libcni_gives_pods_of_two_nodes_their_network() {
    let Some(program) = cnitool() else { return };
    e2e(|| {
        // libcni keeps results under /var/lib: not the machine's.
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", "/var/lib", "tmpfs", flags, None).expect("a /var/lib of our own");
        let cluster = Cluster::started();
        let tool = |node: &crate::support::Node, directory: &'static str| {
            std::fs::create_dir_all(directory).expect("a directory");
            let list = json!({"cniVersion": "1.1.0", "name": "knit",
                "plugins": [{"type": "knit-cni", "socket": node.socket()}]});
            std::fs::write(format!("{directory}/10-knit.conflist"), list.to_string()).expect("written");
            std::fs::copy(shim(), format!("{directory}/knit-cni")).expect("the shim");
            Tool { program: &program, directory }
        };
        let (on_a, on_b) = (tool(&cluster.a, "/run/cni-a"), tool(&cluster.b, "/run/cni-b"));
        let (one, two) = (Pod::new("one"), Pod::new("two"));
        on_a.run("status", &one).expect("ready");
        on_a.run("add", &one).expect("attached");
        let result = on_b.run("add", &two).expect("attached");
        assert_eq!(result["cniVersion"], "1.1.0");
        for to in addresses(&result, "eth0") {
            eventually(&format!("one reaches two at {to}"), SOON, || one.talks(&two.space, to, NEVER));
        }
        on_a.run("check", &one).expect("whole");
        // Damage is seen through the same library.
        let handle = knit_kernel::Handle::open(&one.space).expect("a handle");
        let eth0 = handle.index_of(&crate::support::name("eth0")).expect("eth0");
        handle.apply(&[knit_kernel::link::Change::of(eth0).down().into()]).expect("down");
        let said = on_a.run("check", &one).expect_err("damaged");
        assert!(said.contains("detach and attach it again"), "{said}");
        on_a.run("del", &one).expect("detached");
        on_a.run("del", &one).expect("gone already is success");
        on_b.run("del", &two).expect("detached");
        cluster.a.audit(&[].into());
        cluster.b.audit(&[].into());
    });
}
