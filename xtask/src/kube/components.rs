//! What the bed is made of: which programs, out of which folder of ours, with which flags. Versions are in
//! the go.mod files there (`xtask/components/`, `xtask/peers/`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

/// Which part of the bed a component is for, so that not everything must be built for everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Group {
    /// A cluster without network plugins: control plane, kubelet, container runtime, DNS, test images
    Core,
    /// What Knit is compared and tried with: kube-proxy, the containernetworking plugins and cnitool
    Peers,
    /// The upstream end-to-end tests
    E2e,
    /// The conformance suite of ClusterNetworkPolicy
    Cnp,
}

/// One folder with a go.mod, and the programs that are built out of it.
#[derive(Debug)]
pub struct Component {
    pub name: &'static str,
    pub group: Group,
    folder: &'static str,
    ldflags: &'static str,
    pub cgo: bool,
    pub programs: &'static [Program],
}

/// One program.
#[derive(Debug)]
pub struct Program {
    pub name: &'static str,
    package: &'static str,
    /// Built by `go test -c`.
    is_test: bool,
}

const fn program(name: &'static str, package: &'static str) -> Program {
    Program { name, package, is_test: false }
}

/// Kubernetes misreports its version without.
const KUBERNETES_FLAGS: &str = "-s -w -X k8s.io/component-base/version.gitVersion=v1.37.1 \
    -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37";

const fn component(
    name: &'static str,
    group: Group,
    folder: &'static str,
    ldflags: &'static str,
    programs: &'static [Program],
) -> Component {
    Component { name, group, folder, ldflags, cgo: false, programs }
}

/// All of them, those that the bed starts with first.
pub const ALL: [Component; 12] = [
    component(
        "etcd",
        Group::Core,
        "components/etcd",
        "-s -w",
        &[program("etcd", "go.etcd.io/etcd/server/v3")],
    ),
    component(
        "kubernetes",
        Group::Core,
        "components/kubernetes",
        KUBERNETES_FLAGS,
        &[
            program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
            program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
            program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
            program("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
            program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
            program("agnhost", "k8s.io/kubernetes/test/images/agnhost"),
        ],
    ),
    component(
        "containerd",
        Group::Core,
        "components/containerd",
        "-s -w -X github.com/containerd/containerd/v2/version.Version=2.4.2",
        &[
            program("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
            program(
                "containerd-shim-runc-v2",
                "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            ),
            program("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
        ],
    ),
    Component {
        cgo: true,
        ..component(
            "runc",
            Group::Core,
            "components/runc",
            "-s -w",
            &[program("runc", "github.com/opencontainers/runc")],
        )
    },
    component("coredns", Group::Core, "components/coredns", "-s -w", &[program("coredns", ".")]),
    component("pause", Group::Core, "components/pause", "-s -w", &[program("pause", ".")]),
    component(
        "kube-proxy",
        Group::Peers,
        "components/kubernetes",
        KUBERNETES_FLAGS,
        &[program("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy")],
    ),
    component(
        "cni-plugins",
        Group::Peers,
        "peers/cni-plugins",
        "-s -w",
        &[
            program("cnitool", "github.com/containernetworking/cni/cnitool"),
            program("bridge", "github.com/containernetworking/plugins/plugins/main/bridge"),
            program("host-local", "github.com/containernetworking/plugins/plugins/ipam/host-local"),
            program("portmap", "github.com/containernetworking/plugins/plugins/meta/portmap"),
        ],
    ),
    component(
        "ginkgo",
        Group::E2e,
        "components/ginkgo",
        "-s -w",
        &[program("ginkgo", "github.com/onsi/ginkgo/v2/ginkgo")],
    ),
    component(
        "e2e",
        Group::E2e,
        "components/kubernetes",
        KUBERNETES_FLAGS,
        &[Program { name: "e2e.test", package: "k8s.io/kubernetes/test/e2e", is_test: true }],
    ),
    component(
        "e2e-images",
        Group::E2e,
        "components/kubernetes",
        KUBERNETES_FLAGS,
        &[program("regression-issue-74839", "k8s.io/kubernetes/test/images/regression-issue-74839")],
    ),
    component(
        "network-policy-api",
        Group::Cnp,
        "components/network-policy-api",
        "-s -w",
        &[Program { name: "cnp.test", package: ".", is_test: true }],
    ),
];

/// The components of these groups.
pub fn of(groups: &[Group]) -> impl Iterator<Item = &'static Component> {
    ALL.iter().filter(|component| groups.contains(&component.group))
}

impl Component {
    /// Where its go.mod is.
    pub fn folder(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(self.folder)
    }

    /// What its programs follow from: its files, its flags. A change builds it again, beside the old.
    pub fn key(&self) -> Result<String> {
        let folder = self.folder();
        let read = || -> std::io::Result<String> {
            let mut files: Vec<_> =
                fs::read_dir(&folder)?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
            files.retain(|path| path.is_file());
            files.sort();
            let mut hash = Sha256::new();
            for path in files {
                let content = fs::read(&path)?;
                hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
                hash.update(content.len().to_le_bytes());
                hash.update(content);
            }
            hash.update(format!("{:?} {}", self.flags(), std::env::consts::ARCH));
            Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
        };
        read().with_context(|| format!("cannot read {}", folder.display()))
    }

    fn flags(&self) -> Vec<String> {
        let mut flags = vec!["-trimpath".to_owned(), "-ldflags".into(), self.ldflags.into()];
        if self.name == "runc" && seccomp_headers() {
            flags.extend(["-tags".into(), "seccomp".into()]);
        }
        flags
    }

    /// The command that builds one of its programs.
    pub fn build(&self, program: &Program, to: &Path) -> Command {
        let mut command = Command::new("go");
        if program.is_test {
            // Its dependencies were vetted by those who published them.
            command.args(["test", "-c", "-vet=off"]);
        } else {
            command.arg("build");
        }
        command.args(self.flags()).arg("-o").arg(to).arg(program.package);
        command.current_dir(self.folder()).env("CGO_ENABLED", if self.cgo { "1" } else { "0" });
        command
    }
}

/// runc can filter system calls only where libseccomp's headers are; elsewhere it is built without, and pods
/// that ask for a filter (`seccompProfile: RuntimeDefault`) are refused by it.
pub fn seccomp_headers() -> bool {
    Path::new("/usr/include/seccomp.h").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_has_a_folder_and_a_key() {
        for component in &ALL {
            assert!(component.folder().join("go.mod").is_file(), "{} has no go.mod", component.name);
            assert_eq!(component.key().unwrap().len(), 16);
        }
    }

    #[test]
    fn no_program_is_built_twice() {
        let mut names: Vec<_> = ALL.iter().flat_map(|c| c.programs).map(|p| p.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
