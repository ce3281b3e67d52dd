//! `knit proxy` as it runs: files in, health, metrics and answers out; signals.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_kernel::nft::Kernel;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_nft::Nftables as _;
use rustix::mount::{MountFlags, mount_bind, mount_remount};
use rustix::thread::CapabilitySet;

const SHOP: &str = include_str!("proxy/good/shop.yaml");
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A proxy that runs, and all it has printed. It is stopped with the value.
struct Proxy {
    child: Child,
    log: Arc<Mutex<String>>,
    out: Arc<Mutex<String>>,
}

impl Proxy {
    fn start(folder: &Path, more: &[&str]) -> Self {
        Self::with_backend("print", folder, more)
    }

    fn with_backend(backend: &str, folder: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
        command.args(["proxy", "--backend", backend, "--node-name", "here"]);
        command.args(["--healthz-bind-address", "127.0.0.1:0", "--metrics-bind-address", "127.0.0.1:0"]);
        command.arg("--socket").arg(folder.join("proxy.sock")).args(more);
        command.env_remove("KNIT_LOG").stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("knit starts");
        let out = collect(child.stdout.take().expect("a pipe"));
        let log = collect(child.stderr.take().expect("a pipe"));
        Self { child, log, out }
    }

    /// With no more than a pod of the overlay `proxy` has.
    fn with_net_admin_only(folder: &Path, more: &[&str]) -> Self {
        let drop = |set: CapabilitySet| {
            rustix::thread::remove_capability_from_bounding_set(set).expect("one may have less");
        };
        std::thread::scope(|scope| {
            let start = || {
                let known = CapabilitySet::all().iter().filter(|set| *set != CapabilitySet::NET_ADMIN);
                known
                    .filter(|set| rustix::thread::capability_is_in_bounding_set(*set) == Ok(true))
                    .for_each(drop);
                Self::with_backend("nftables", folder, more)
            };
            scope.spawn(start).join().expect("no panic")
        })
    }

    fn from_files(folder: &Path) -> Self {
        Self::start(folder, &["--from-files", folder.to_str().expect("UTF-8")])
    }

    fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    fn out(&self) -> String {
        self.out.lock().expect("no panic").clone()
    }

    #[track_caller]
    fn logs(&self, words: &str) {
        eventually(&format!("{words:?} in the log"), TEST_TIMEOUT, || self.log().contains(words));
    }

    #[track_caller]
    fn prints(&self, words: &str) {
        eventually(&format!("{words:?} printed"), TEST_TIMEOUT, || self.out().contains(words));
    }

    /// The address after these words in the log.
    #[track_caller]
    fn address(&self, words: &str) -> SocketAddr {
        self.logs(words);
        let log = self.log();
        let rest = log.split(words).nth(1).expect("the words are there");
        rest.split_whitespace().next().expect("an address").parse().expect("an address")
    }

    fn terminate(mut self) -> (ExitStatus, String) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
        let status = self.child.wait().expect("it ends");
        // Who reads the pipes may be behind; they hold the texts until all is read.
        eventually("all that was said is read", TEST_TIMEOUT, || {
            Arc::strong_count(&self.log) == 1 && Arc::strong_count(&self.out) == 1
        });
        (status, self.log())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(pipe: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let text = Arc::<Mutex<String>>::default();
    let shared = Arc::clone(&text);
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            let line = line.unwrap_or_default();
            shared.lock().expect("no panic").push_str(&(line + "\n"));
        }
    });
    text
}

/// Replaces a file at once: somebody who looks in between sees no empty one.
fn put(file: &Path, text: &str) {
    let beside = file.with_extension("new");
    fs::write(&beside, text).expect("a file");
    fs::rename(&beside, file).expect("in place");
}

fn http(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("a server");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("an answer");
    reply
}

#[test]
fn rules_55_61_files_are_followed_and_health_metrics_and_questions_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("shop.yaml");
    fs::write(&file, SHOP).expect("a file");
    let proxy = Proxy::from_files(folder.path());
    proxy.prints("cluster IP 10.96.0.10:80 -> cluster endpoints: 192.0.2.1:8080 192.0.2.2:8080");
    proxy.logs("in force: 2 service ports");

    // One endpoint gone: only its Service is printed again.
    put(&file, &SHOP.replace("  - {addresses: [192.0.2.2], nodeName: there}\n", ""));
    proxy.prints("cluster IP 10.96.0.10:80 -> cluster endpoints: 192.0.2.1:8080\n");
    assert_eq!(proxy.out().matches("set shop/cart").count(), 1, "{}", proxy.out());

    // A broken file takes nothing away, and is named with its line.
    fs::write(folder.path().join("broken.yaml"), "kind: [\n").expect("a file");
    proxy.logs("broken.yaml:");
    fs::remove_file(folder.path().join("broken.yaml")).expect("removed");

    let healthz = proxy.address("healthz on http://");
    for path in ["/healthz", "/livez"] {
        let reply = http(healthz, path);
        assert!(reply.starts_with("HTTP/1.1 200") && reply.contains(r#""healthy":true"#), "{reply}");
    }
    let metrics = proxy.address("metrics on http://");
    let reply = http(metrics, "/metrics");
    assert!(reply.contains("kubeproxy_sync_proxy_rules_duration_seconds_count"), "{reply}");
    assert!(reply.contains(r#"kubeproxy_proxy_healthz_total{code="200"} 1"#), "{reply}");
    assert!(http(metrics, "/proxyMode").ends_with("\r\n\r\nprint"), "the backend that it has");

    // What runs is asked through its socket, by its own user only.
    let socket = folder.path().join("proxy.sock");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&socket).expect("a socket").permissions());
    assert_eq!(mode & 0o777, 0o600);
    let ask = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_knit"))
            .arg("proxy")
            .args(args)
            .arg("--socket")
            .arg(&socket)
            .output()
            .expect("knit runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert!(ask(&["get", "services"]).contains("10.96.0.10:80"));
    assert!(ask(&["get", "endpoints", "shop/web"]).contains("192.0.2.1:8080"));
    assert!(ask(&["explain", "shop/web"]).contains("192.0.2.1:8080 of shop/web-1, here"));

    fs::remove_file(&file).expect("removed");
    proxy.prints("delete shop/web:http TCP IPv4");
    let (status, log) = proxy.terminate();
    assert!(status.success(), "{log}");
    assert!(log.contains("stopping; existing rules stay in force"), "{log}");
    assert!(!socket.exists());
}

#[test]
fn a_problem_is_logged_once_while_it_lasts() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("shop.yaml");
    let bad = SHOP.replace("type: NodePort", "type: NodePort\n  externalIPs: [10.0.0.300]");
    fs::write(&file, &bad).expect("a file");
    let proxy = Proxy::from_files(folder.path());
    let words = "Service shop/web: spec.externalIPs[0]: \"10.0.0.300\" is not an IP address; it is ignored";
    proxy.logs(words);
    put(&file, &bad.replace("10.96.0.10", "10.96.0.99"));
    proxy.prints("cluster IP 10.96.0.99:80");
    let (_, log) = proxy.terminate();
    assert_eq!(log.matches(words).count(), 1, "{log}");
}

#[test]
fn a_configuration_file_is_used_and_its_fields_are_spoken_of() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("shop.yaml"), SHOP).expect("a file");
    let config = folder.path().join("config.conf");
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
                ipvs: {scheduler: rr, masqueradeAl: true}\nclusterCIDR: 192.0.2.0/24\nhostnameOverride: \
                There\n";
    fs::write(&config, text).expect("a file");
    let from = folder.path().to_str().expect("UTF-8");
    let config = config.to_str().expect("UTF-8");
    let proxy = Proxy::start(folder.path(), &["--from-files", from, "--config", config]);
    proxy.logs("in force: 2 service ports");
    let log = proxy.log();
    assert!(log.contains("unknown field ipvs.masqueradeAl in the configuration"), "{log}");
    assert!(log.contains("have no effect here: ipvs.scheduler (IPVS is not used"), "{log}");
    assert!(log.contains("mode ipvs is configured; nftables is used instead"), "{log}");
    // The flag for the node's name comes before the file, the pods' range is the file's.
    proxy.prints("node port 30080 -> local endpoints: 192.0.2.1:8080");
    proxy.prints("from pods here -> cluster endpoints");
}

#[test]
fn one_proxy_reads_objects_and_another_does_what_it_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = folder.path().join("objects");
    let (feeder, follower) = (folder.path().join("feeder"), folder.path().join("follower"));
    for folder in [&objects, &feeder, &follower] {
        fs::create_dir(folder).expect("a folder");
    }
    let file = objects.join("shop.yaml");
    fs::write(&file, SHOP).expect("a file");
    let address = format!("unix:{}", folder.path().join("stream.sock").display());
    let follower_socket = follower.join("proxy.sock");
    let second = Proxy::start(&follower, &["--from-stream", &address]);
    second.logs("the stream is closed");
    let from = objects.to_str().expect("UTF-8");
    let feed =
        || Proxy::with_backend("stream", &feeder, &["--from-files", from, "--stream-address", &address]);
    let first = feed();
    second.prints("cluster IP 10.96.0.10:80 -> cluster endpoints: 192.0.2.1:8080 192.0.2.2:8080");
    second.prints("set shop/cart");
    second.logs("in force: 2 service ports");
    let mode = http(first.address("metrics on http://"), "/proxyMode");
    assert!(mode.ends_with("\r\n\r\nstream"), "{mode}");
    // It can be asked like any other; the reasons are the first one's.
    let ask = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_knit"))
            .arg("proxy")
            .args(args)
            .arg("--socket")
            .arg(&follower_socket)
            .output()
            .expect("knit runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(ask(&["get", "services"]).contains("10.96.0.10:80"));
    let endpoints = ask(&["get", "endpoints", "shop/web", "-o", "wide"]);
    assert!(endpoints.contains("192.0.2.1:8080") && endpoints.contains("192.0.2.2:8080"), "{endpoints}");
    let reasons = ask(&["explain", "shop/web"]);
    assert!(reasons.contains("decisions are made by another proxy"), "{reasons}");
    // The first one knows who follows it, and how that goes.
    let feeder_socket = feeder.join("proxy.sock");
    let watchers = || {
        let asked = Command::new(env!("CARGO_BIN_EXE_knit"))
            .args(["proxy", "get", "watchers", "--socket"])
            .arg(&feeder_socket)
            .output()
            .expect("knit runs");
        assert!(asked.status.success(), "{asked:?}");
        String::from_utf8_lossy(&asked.stdout).into_owned()
    };
    eventually("the second one has reported", TEST_TIMEOUT, || {
        watchers().lines().any(|line| line.contains("up to date"))
    });

    // The first one ends; nothing changes for the second. Then it comes back with something else.
    let lost = || second.log().matches("the stream is closed").count();
    let lost_before = lost();
    let (status, log) = first.terminate();
    assert!(status.success(), "{log}");
    eventually("the end is noticed", TEST_TIMEOUT, || lost() > lost_before);
    fs::write(&file, SHOP.replace("  - {addresses: [192.0.2.2], nodeName: there}\n", "")).expect("a file");
    let before = second.out();
    let _first = feed();
    second.prints("cluster IP 10.96.0.10:80 -> cluster endpoints: 192.0.2.1:8080\n");
    let after = second.out();
    let new = after.strip_prefix(&before).expect("what was printed stays");
    assert!(!new.contains("shop/cart"), "only the difference is done: {new}");
}

#[test]
fn net_admin_is_all_the_privilege_that_is_needed() {
    in_namespaces(|| {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("shop.yaml"), SHOP).expect("a file");
        let config = folder.path().join("config.conf");
        let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                    conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 77s, udpTimeout: 78s}\n";
        fs::write(&config, text).expect("a file");
        // As in a container that is not privileged.
        mount_bind("/proc/sys", "/proc/sys").expect("mounted");
        mount_remount("/proc/sys", MountFlags::BIND | MountFlags::RDONLY, "").expect("read-only");
        let from = folder.path().to_str().expect("UTF-8");
        let config = config.to_str().expect("UTF-8");
        let proxy = Proxy::with_net_admin_only(folder.path(), &["--from-files", from, "--config", config]);
        proxy.logs("in force: 2 service ports");
        let tables = Kernel::open().expect("nftables").tables().expect("a listing");
        assert!(tables.iter().any(|table| &*table.name == "knit-proxy"), "{tables:?}");
        let log = proxy.log();
        let said: Vec<_> = log.lines().filter(|line| line.contains("connection table")).collect();
        assert_eq!(said.len(), 1, "{log}");
        assert!(said[0].contains("/proc/sys is read-only in this container"), "{log}");
        assert!(said[0].contains("net/netfilter/nf_conntrack_tcp_timeout_established=77"), "{log}");
        assert!(said[0].contains("net/netfilter/nf_conntrack_udp_timeout=78"), "{log}");
        let mode = http(proxy.address("metrics on http://"), "/proxyMode");
        assert!(mode.ends_with("\r\n\r\nnftables"), "{mode}");
    });
}
