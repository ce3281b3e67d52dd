//! `knit proxy` takes over from a real kube-proxy, with connections open.
//!
//! It needs etcd, kube-apiserver, kube-proxy and kubectl, as `cargo xtask kube build` leaves them in its
//! cache, or in the folder that `KNIT_KUBE_BIN` names; and `nft` and `openssl`. Where they are not, it is
//! skipped.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::nft::{Kernel, Nftables};
use knit_kernel::route::Route;
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_kernel::{Handle, IfName, Op};

const PATIENCE: Duration = Duration::from_secs(100);
const SERVICE: &str = "10.96.0.10:80";

const OBJECTS: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: node-a}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP, name: ""}]
endpoints: [{addresses: [192.0.2.11]}, {addresses: [192.0.2.12]}]
"#;

/// Programs that are ended with the value.
struct Bed {
    folder: PathBuf,
    programs: HashMap<&'static str, PathBuf>,
    children: Vec<(String, Child)>,
}

impl Bed {
    fn start(&mut self, program: &Path, args: &[&str]) {
        let name = program.file_name().expect("a name").to_string_lossy().into_owned();
        let log = File::create(self.folder.join(format!("{name}.log"))).expect("a file");
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.folder).stdin(Stdio::null());
        let child = command.stdout(log.try_clone().expect("a file")).stderr(log).spawn();
        self.children.push((name, child.expect("it starts")));
    }

    fn kube(&mut self, name: &str, args: &[&str]) {
        self.start(&self.programs[name].clone(), args);
    }

    fn stop(&mut self, name: &str) {
        let (_, mut child) =
            self.children.remove(self.children.iter().position(|(n, _)| n == name).expect("it runs"));
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
        child.wait().expect("it ends");
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default()
    }

    fn kubectl(&self, args: &[&str]) -> bool {
        let mut command = Command::new(&self.programs["kubectl"]);
        command.arg("--kubeconfig").arg(self.folder.join("kubeconfig")).args(args);
        command.output().is_ok_and(|output| output.status.success())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A program of the folder that somebody named, or the newest that the test bed's cache has.
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

fn echo(address: &'static str) {
    let listener = TcpListener::bind(address).expect("bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping").expect("sent");
    let mut buffer = [0; 4];
    stream.read_exact(&mut buffer).expect("answered");
    assert_eq!(&buffer, b"ping");
}

fn connect(wait: Duration) -> Option<TcpStream> {
    let address: SocketAddr = SERVICE.parse().expect("an address");
    let stream = TcpStream::connect_timeout(&address, wait).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    Some(stream)
}

fn tables() -> Vec<String> {
    let mut nft = Kernel::open().expect("nftables");
    nft.tables().expect("a listing").iter().map(ToString::to_string).collect()
}

fn network() {
    let handle = Handle::current().expect("a handle");
    let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
    let address = |text: &str| Op::create(Address::new(lo, text.parse().expect("an address")));
    let own = ["192.0.2.1/32", "192.0.2.11/32", "192.0.2.12/32"].map(address);
    handle.apply(&own).expect("addresses");
    let route = Route {
        source: Some([192, 0, 2, 1].into()),
        ..Route::to("10.96.0.0/16".parse().expect("a range")).dev(lo)
    };
    handle.apply(&[Op::create(route)]).expect("a route");
}

#[test]
fn rule_62_kube_proxy_is_taken_over_with_connections_open() {
    in_namespaces(|| {
        let mut programs = HashMap::new();
        for name in ["etcd", "kube-apiserver", "kube-proxy", "kubectl"] {
            match find(name) {
                Some(path) => programs.insert(name, path),
                None => {
                    return skip(format_args!(
                        "there is no {name}: `cargo xtask kube build` makes it, or KNIT_KUBE_BIN names its \
                         folder"
                    ));
                }
            };
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let key =
            Command::new("openssl").args(["genpkey", "-algorithm", "RSA", "-out", &path("key")]).output();
        if !key.is_ok_and(|output| output.status.success()) {
            return skip("there is no openssl to make a key with");
        }
        if !Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success()) {
            return skip("there is no nft, which kube-proxy needs");
        }
        network();
        echo("192.0.2.11:8080");
        echo("192.0.2.12:8080");
        let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
             clusters: [{name: x, cluster: {server: 'https://127.0.0.1:6443', insecure-skip-tls-verify: \
             true}}]\n\
             users: [{name: x, user: {token: secret}}]\n\
             contexts: [{name: x, context: {cluster: x, user: x}}]\n";
        fs::write(path("kubeconfig"), kubeconfig).expect("a file");
        fs::write(path("tokens"), "secret,admin,1,system:masters\n").expect("a file");
        fs::write(path("objects.yaml"), OBJECTS).expect("a file");
        let mut bed = Bed { folder: folder.path().to_owned(), programs, children: Vec::new() };
        bed.kube(
            "etcd",
            &[
                "--data-dir=etcd",
                "--unsafe-no-fsync",
                "--listen-client-urls=http://127.0.0.1:2379",
                "--advertise-client-urls=http://127.0.0.1:2379",
                "--listen-peer-urls=http://127.0.0.1:2380",
            ],
        );
        bed.kube(
            "kube-apiserver",
            &[
                "--etcd-servers=http://127.0.0.1:2379",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-account-key-file=key",
                "--service-account-signing-key-file=key",
                "--cert-dir=certificates",
                "--bind-address=127.0.0.1",
                "--advertise-address=192.0.2.1",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=AlwaysAllow",
                "--token-auth-file=tokens",
                "--disable-admission-plugins=ServiceAccount",
            ],
        );
        eventually("the API server takes objects", PATIENCE, || {
            bed.kubectl(&["apply", "--validate=false", "--server-side", "-f", &path("objects.yaml")])
        });
        let kube_proxy = [
            "--kubeconfig=kubeconfig",
            "--proxy-mode=nftables",
            "--hostname-override=node-a",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ];
        bed.kube("kube-proxy", &kube_proxy);
        eventually("kube-proxy serves", PATIENCE, || {
            let over =
                bed.children.last_mut().is_some_and(|(_, child)| matches!(child.try_wait(), Ok(Some(_))));
            assert!(!over, "{}", bed.log("kube-proxy"));
            connect(Duration::from_millis(500)).is_some()
        });
        let mut streams: Vec<TcpStream> = (0..4).map(|_| connect(PATIENCE).expect("connected")).collect();
        streams.iter_mut().for_each(ping);
        assert!(tables().contains(&"ip kube-proxy".to_owned()), "{:?}", tables());

        // It does not start beside it, and says what to do.
        let knit = Path::new(env!("CARGO_BIN_EXE_knit"));
        let socket = path("proxy.sock");
        let common = ["proxy", "--kubeconfig=kubeconfig", "--node-name=node-a", "--socket", &socket];
        let common: Vec<&str> = common
            .into_iter()
            .chain(["--metrics-bind-address=127.0.0.1:0", "--healthz-bind-address=127.0.0.1:0"])
            .collect();
        let refused =
            Command::new(knit).args(&common).current_dir(folder.path()).output().expect("knit runs");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("--takeover"), "{said}");

        // Beside it: both are there, and traffic goes on.
        bed.start(knit, &[&common[..], &["--beside-kube-proxy"]].concat());
        eventually("both are there", PATIENCE, || bed.log("knit").contains("in force:"));
        assert!(
            tables().contains(&"ip kube-proxy".to_owned()) && tables().contains(&"ip knit-proxy".to_owned())
        );
        streams.iter_mut().for_each(ping);
        ping(&mut connect(PATIENCE).expect("connected"));
        bed.stop("knit");

        // kube-proxy ends, which leaves its rules; they go once ours are in force, and no connection breaks.
        bed.stop("kube-proxy");
        bed.start(knit, &[&common[..], &["--takeover"]].concat());
        eventually("kube-proxy's tables are gone", PATIENCE, || {
            assert!(connect(PATIENCE).is_some(), "there is always one of the two");
            tables().iter().all(|table| !table.contains("kube-proxy"))
        });
        assert!(tables().contains(&"ip knit-proxy".to_owned()), "{}", bed.log("knit"));
        streams.iter_mut().for_each(ping);
        ping(&mut connect(PATIENCE).expect("connected"));
        // Its own rules are what serves now: a change is followed.
        assert!(bed.kubectl(&["delete", "endpointslice", "web-1"]));
        eventually("nobody is left", PATIENCE, || connect(PATIENCE).is_none());
        streams.iter_mut().for_each(ping);
    });
}
