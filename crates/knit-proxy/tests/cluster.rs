//! The example that is a whole proxy, run as a program: from a folder, with a broken file in it, until it is
//! stopped.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ipFamilies: [IPv4], ports: [{port: 80, protocol: \
TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: \"\", port: 8080, protocol: TCP}]
endpoints: [{addresses: [192.0.2.1], conditions: {ready: true}}]
";

/// Lines of a stream, as they come.
fn lines(from: impl std::io::Read + Send + 'static) -> impl Fn(&str) {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    move |wanted: &str| loop {
        match receiver.recv_timeout(Duration::from_secs(60)) {
            Ok(line) if line.contains(wanted) => return,
            Ok(_) => {}
            Err(error) => panic!("no line with {wanted:?}: {error}"),
        }
    }
}

#[test]
fn a_whole_proxy_reads_a_folder_says_what_is_wrong_and_ends_when_told() {
    // Cargo builds examples with the tests, beside them.
    let mut program = std::env::current_exe().expect("this test's path");
    program.pop();
    program.set_file_name("examples");
    program.push("cluster");
    assert!(
        program.exists(),
        "{}: build it with --example cluster, or test without --test",
        program.display()
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("shop.yaml"), SERVICE).expect("a file");
    std::fs::write(folder.path().join("broken.yaml"), "kind: [").expect("a file");
    let mut child = Command::new(program)
        .arg("here")
        .arg(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let printed = lines(child.stdout.take().expect("a pipe"));
    let logged = lines(child.stderr.take().expect("a pipe"));
    logged("reading from");
    printed("cluster IP 10.96.0.10:80 -> cluster endpoints 192.0.2.1:8080");
    std::fs::write(folder.path().join("broken.yaml"), "kind: {").expect("a file");
    logged("broken.yaml");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    assert!(child.wait().expect("it ends").success());
}
