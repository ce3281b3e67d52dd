//! A lab for a test, and what tests ask of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use knit_kernel::testing::{find_eventually, skip};
use serde_json::Value;

/// Two tenants with the same addresses: what the demo shows.
pub const TENANTS: &str = include_str!("../../src/command/lab/demo.yaml");

/// A running lab; it ends with the value.
pub struct Lab {
    pub dir: tempfile::TempDir,
    /// What the lab, its agents and all commands are.
    program: PathBuf,
}

impl Lab {
    /// A lab with these manifests, or nothing where this machine allows none.
    pub fn up(manifests: &str, more: &[&str]) -> Option<Self> {
        Self::up_as(Path::new(env!("CARGO_BIN_EXE_knit")), manifests, more)
    }

    /// The same with another program than the one that was just built.
    pub fn up_as(program: &Path, manifests: &str, more: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("manifests.yaml");
        std::fs::write(&file, manifests).expect("a file");
        let lab = Self { dir, program: program.to_owned() };
        let mut arguments = vec!["lab", "up"];
        arguments.extend(more);
        let file = file.display().to_string();
        arguments.push(&file);
        let output = lab.knit(&arguments);
        let said = text(&output);
        if said.contains("namespaces are forbidden") || said.contains("was refused inside") {
            skip(&said);
            return None;
        }
        assert!(output.status.success(), "the lab did not come up: {said}");
        if said.contains("warning:") {
            // It waits for less than a busy machine may need; what it waits for must come all the same.
            let late = said.matches("warning: after ").count();
            assert_eq!(said.matches("warning:").count(), late, "{said}{}", lab.agents());
            lab.eventually("all pods are ready", || {
                lab.status()["pods"].as_array()?.iter().all(|pod| pod["ready"] == true).then_some(())
            });
        }
        Some(lab)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env_remove("KNIT_LAB")
            .stdin(Stdio::null());
        command
    }

    pub fn knit(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("knit runs")
    }

    /// Runs `knit lab ...`, which must succeed.
    #[track_caller]
    pub fn lab(&self, arguments: &[&str]) -> String {
        let mut all = vec!["lab"];
        all.extend(arguments);
        let output = self.knit(&all);
        assert!(output.status.success(), "knit {all:?}: {}{}", text(&output), self.agents());
        text(&output)
    }

    pub fn agents(&self) -> String {
        ["node-1", "node-2"].map(|node| text(&self.knit(&["lab", "logs", node]))).join("\n--\n")
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.lab(&["status", "--json"])).expect("JSON")
    }

    pub fn address(&self, pod: &str) -> String {
        let status = self.status();
        let pods = status["pods"].as_array().expect("pods");
        let found = pods.iter().find(|p| format!("{}/{}", p["namespace"], p["name"]).replace('"', "") == pod);
        let found = found.unwrap_or_else(|| panic!("no pod {pod} in {status}"));
        found["addresses"][0].as_str().unwrap_or_else(|| panic!("{pod} has no address: {status}")).to_owned()
    }

    pub fn service(&self, namespace: &str, name: &str) -> String {
        let status = self.status();
        let services = status["services"].as_array().expect("services");
        let found = services.iter().find(|s| s["namespace"] == namespace && s["name"] == name);
        found.and_then(|s| s["addresses"][0].as_str()).unwrap_or_else(|| panic!("{status}")).to_owned()
    }

    /// Where the kubeconfig is.
    pub fn kubeconfig(&self) -> PathBuf {
        PathBuf::from(self.lab(&["kubeconfig"]).trim())
    }

    /// What the API answers on the port that kubectl uses; the status, and the body as text.
    pub fn request(&self, method: &str, path: &str) -> (u16, String) {
        use std::io::{Read as _, Write as _};
        let text = std::fs::read_to_string(self.kubeconfig()).expect("a kubeconfig");
        let line = text.lines().find(|line| line.contains("server:")).expect("a server");
        let host = line.split("http://").nth(1).expect("a URL").trim();
        let mut stream = std::net::TcpStream::connect(host).expect("the API answers on this machine");
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
        (code, body)
    }

    /// Starts numbered datagrams from a pod, which end when standard input does; its report is what it
    /// prints.
    pub fn stream(&self, pod: &str, to: &str) -> Stream {
        let mut command = self.command(&["lab", "exec", pod, "--", "knit", "lab", "stream", to]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a stream");
        Stream { child }
    }

    /// Whether a pod is ready, by its namespace and name.
    pub fn is_ready(&self, namespace: &str, name: &str) -> bool {
        let status = self.status();
        let pods = status["pods"].as_array().cloned().unwrap_or_default();
        pods.iter().any(|p| p["namespace"] == namespace && p["name"] == name && p["ready"] == true)
    }

    /// What a pod hears from an address, if it hears anything. For what is tried again, and for what must be
    /// silent.
    pub fn ask(&self, pod: &str, to: &str) -> Option<String> {
        self.ask_within(pod, to, "1000")
    }

    /// The same where an answer must come at the first try, however busy the machine is.
    pub fn ask_once(&self, pod: &str, to: &str) -> Option<String> {
        self.ask_within(pod, to, "60000")
    }

    fn ask_within(&self, pod: &str, to: &str, ms: &str) -> Option<String> {
        let output = self.knit(&["lab", "exec", pod, "--", "knit", "lab", "ask", to, "--timeout", ms]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[track_caller]
    pub fn eventually<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        find_eventually(what, Duration::from_secs(100), || look().ok_or(Seen(self)))
    }
}

/// How a lab is, looked up when it is shown.
struct Seen<'a>(&'a Lab);

impl std::fmt::Debug for Seen<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.0.status(), self.0.agents())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let mut output = self.knit(&["lab", "down"]);
        if text(&output).contains("is still there") {
            // It waits for ten seconds, which may not do on a busy machine.
            let end = Instant::now() + Duration::from_secs(100);
            while !output.status.success() && Instant::now() < end {
                std::thread::park_timeout(Duration::from_millis(200));
                output = self.knit(&["lab", "down"]);
            }
        }
        if !std::thread::panicking() {
            assert!(output.status.success(), "{}", text(&output));
            assert!(!self.dir.path().join("knit-lab").exists(), "the lab left its directory behind");
        }
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Numbered datagrams on their way.
pub struct Stream {
    child: std::process::Child,
}

impl Stream {
    /// Ends it, and returns its report.
    pub fn end(mut self) -> Value {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output().expect("an end");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output)))
    }
}

/// The processes of the lab whose directory is below this one.
pub fn processes_of(dir: &Path) -> Vec<u32> {
    let needle = dir.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.contains("--at") && line.contains(&needle) {
            found.push(pid);
        }
    }
    found
}
