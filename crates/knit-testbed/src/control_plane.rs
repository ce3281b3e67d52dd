//! etcd and a real kube-apiserver in the test's own network namespace, and other programs beside them.
//!
//! The programs are those of `cargo xtask kube build`, in its cache or in the folder that `KNIT_KUBE_BIN`
//! names; a key is made with `openssl`. Where something is missing, the reason is returned, for
//! `knit_kernel::testing::skip`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::testing::eventually;
use knit_kernel::{Handle, Op};

use crate::{name, net};

/// How long daemons of Kubernetes may take to start, on a busy machine.
pub const START_TIMEOUT: Duration = Duration::from_secs(100);
/// The address that the API server says it has; it is on `lo`.
pub const ADDRESS: &str = "192.0.2.1";
/// The token of the administrator.
pub const ADMIN: &str = "secret";

/// etcd and kube-apiserver, and what was started beside them. All end with the value.
#[derive(Debug)]
pub struct ControlPlane {
    folder: PathBuf,
    kubectl: PathBuf,
    children: Vec<(String, Child)>,
}

impl ControlPlane {
    /// Starts both, with files in this folder: `kubeconfig` is the administrator's. Authorization is `RBAC`
    /// or `AlwaysAllow`.
    pub fn start(folder: &Path, authorization: &str) -> Result<Self, String> {
        let (etcd, api, kubectl) = (program("etcd")?, program("kube-apiserver")?, program("kubectl")?);
        let key = Command::new("openssl")
            .args(["genpkey", "-algorithm", "RSA", "-out", "key"])
            .current_dir(folder)
            .output();
        if !key.is_ok_and(|output| output.status.success()) {
            return Err("there is no openssl to make a key with".into());
        }
        let handle = Handle::current().expect("a handle");
        let lo = handle.index_of(&name("lo")).expect("lo");
        let own = Op::create(Address::new(lo, net(&format!("{ADDRESS}/32"))));
        handle.apply(&[own]).expect("an address");
        let mut plane = Self { folder: folder.to_owned(), kubectl, children: Vec::new() };
        plane.write("kubeconfig", &kubeconfig(ADMIN));
        plane.write("tokens", &format!("{ADMIN},admin,1,system:masters\n"));
        plane.run(
            &etcd,
            &[
                "--data-dir=etcd",
                "--unsafe-no-fsync",
                "--listen-client-urls=http://127.0.0.1:2379",
                "--advertise-client-urls=http://127.0.0.1:2379",
                "--listen-peer-urls=http://127.0.0.1:2380",
            ],
        );
        let (authorization, address) =
            (format!("--authorization-mode={authorization}"), format!("--advertise-address={ADDRESS}"));
        plane.run(
            &api,
            &[
                "--etcd-servers=http://127.0.0.1:2379",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-account-key-file=key",
                "--service-account-signing-key-file=key",
                "--cert-dir=certificates",
                "--bind-address=127.0.0.1",
                &address,
                "--endpoint-reconciler-type=none",
                &authorization,
                "--token-auth-file=tokens",
                "--disable-admission-plugins=ServiceAccount",
            ],
        );
        Ok(plane)
    }

    /// Starts a program in the folder; what it prints is its log.
    pub fn run(&mut self, program: &Path, args: &[&str]) {
        let name = program.file_name().expect("a name").to_string_lossy().into_owned();
        let log = File::create(self.folder.join(format!("{name}.log"))).expect("a file");
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.folder).stdin(Stdio::null());
        let child = command.stdout(log.try_clone().expect("a file")).stderr(log).spawn();
        self.children.push((name, child.unwrap_or_else(|error| panic!("{}: {error}", program.display()))));
    }

    /// Ends a program with SIGTERM, and waits for it.
    pub fn stop(&mut self, name: &str) {
        let at = self.children.iter().position(|(other, _)| other == name).expect("it runs");
        let (_, mut child) = self.children.remove(at);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
        child.wait().expect("it ends");
    }

    /// Fails the test, with its log, if a program has ended.
    #[track_caller]
    pub fn check(&mut self, name: &str) {
        let child = self.children.iter_mut().find(|(other, _)| other == name);
        let ended = child.is_none_or(|(_, child)| matches!(child.try_wait(), Ok(Some(_))));
        assert!(!ended, "{name} has ended: {}", self.log(name));
    }

    /// What a program has printed.
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default()
    }

    /// Runs kubectl as the administrator: what it prints, or what it says of an error.
    pub fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.kubectl);
        let output = command.arg("--kubeconfig=kubeconfig").args(args).current_dir(&self.folder).output();
        let output = output.expect("kubectl runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Applies with `-f FILE` or `-k FOLDER`, as soon as the API server takes it.
    #[track_caller]
    pub fn apply(&self, args: &[&str]) {
        let args = [&["apply", "--server-side"], args].concat();
        eventually(&format!("the API server takes {args:?}"), START_TIMEOUT, || {
            let applied = self.kubectl(&args);
            // Shown only if the test fails.
            applied.inspect_err(|error| println!("{error}")).is_ok()
        });
    }

    /// A kubeconfig of somebody with this token; where it is.
    pub fn client(&self, name: &str, token: &str) -> PathBuf {
        self.write(name, &kubeconfig(token));
        self.folder.join(name)
    }

    /// Writes a file into the folder.
    pub fn write(&self, name: &str, content: &str) {
        fs::write(self.folder.join(name), content).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn kubeconfig(token: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
         clusters: [{{name: x, cluster: {{server: 'https://127.0.0.1:6443', insecure-skip-tls-verify: \
         true}}}}]\n\
         users: [{{name: x, user: {{token: '{token}'}}}}]\n\
         contexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n"
    )
}

/// A program of the folder that somebody named, or the newest that the test bed's cache has; or why there is
/// none.
pub fn program(name: &str) -> Result<PathBuf, String> {
    find(name).ok_or_else(|| {
        format!("there is no {name}: `cargo xtask kube build` makes it, or KNIT_KUBE_BIN names its folder")
    })
}

fn find(name: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("KNIT_KUBE_BIN") {
        return Some(PathBuf::from(folder).join(name)).filter(|path| path.is_file());
    }
    let cache = std::env::var_os("KNIT_KUBE_CACHE").map(PathBuf::from).or_else(|| {
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        let folder = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(folder.join("knit/kube"))
    })?;
    let folders = fs::read_dir(cache.join("bin")).ok()?.flatten();
    let built = folders.map(|folder| folder.path().join(name)).filter(|path| path.is_file());
    built.max_by_key(|path| fs::metadata(path).and_then(|m| m.modified()).ok())
}
