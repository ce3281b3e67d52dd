//! What agent, controller, proxy and shim promise together, each on a lab of its own: real agents, real pods, no root.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const TENANTS: &str = include_str!("../src/command/lab/demo.yaml");

/// A running lab; it ends with the value.
struct Lab {
    dir: tempfile::TempDir,
}

impl Lab {
    /// A lab with these manifests, or nothing where this machine allows none.
    fn up(manifests: &str, more: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("manifests.yaml");
        std::fs::write(&file, manifests).expect("a file");
        let lab = Self { dir };
        let mut arguments = vec!["lab", "up"];
        arguments.extend(more);
        let file = file.display().to_string();
        arguments.push(&file);
        let output = lab.knit(&arguments);
        let said = text(&output);
        if said.contains("namespaces are forbidden") || said.contains("was refused inside") {
            println!("skipped: {said}");
            return None;
        }
        assert!(output.status.success(), "the lab did not come up: {said}");
        assert!(!said.contains("warning:"), "{said}{}", lab.agents());
        Some(lab)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
        command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env_remove("KNIT_LAB")
            .stdin(Stdio::null());
        command
    }

    fn knit(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("knit runs")
    }

    /// Runs `knit lab ...`, which must succeed.
    #[track_caller]
    fn lab(&self, arguments: &[&str]) -> String {
        let mut all = vec!["lab"];
        all.extend(arguments);
        let output = self.knit(&all);
        assert!(output.status.success(), "knit {all:?}: {}{}", text(&output), self.agents());
        text(&output)
    }

    fn agents(&self) -> String {
        ["node-1", "node-2"].map(|node| text(&self.knit(&["lab", "logs", node]))).join("\n--\n")
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.lab(&["status", "--json"])).expect("JSON")
    }

    fn address(&self, pod: &str) -> String {
        let status = self.status();
        let pods = status["pods"].as_array().expect("pods");
        let found = pods.iter().find(|p| format!("{}/{}", p["namespace"], p["name"]).replace('"', "") == pod);
        let found = found.unwrap_or_else(|| panic!("no pod {pod} in {status}"));
        found["addresses"][0].as_str().unwrap_or_else(|| panic!("{pod} has no address: {status}")).to_owned()
    }

    fn service(&self, namespace: &str, name: &str) -> String {
        let status = self.status();
        let services = status["services"].as_array().expect("services");
        let found = services.iter().find(|s| s["namespace"] == namespace && s["name"] == name);
        found.and_then(|s| s["addresses"][0].as_str()).unwrap_or_else(|| panic!("{status}")).to_owned()
    }

    /// What a pod hears from an address, if it hears anything.
    fn ask(&self, pod: &str, to: &str) -> Option<String> {
        let output = self.knit(&["lab", "exec", pod, "--", "knit", "lab", "ask", to, "--timeout", "1000"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[track_caller]
    fn eventually<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < end, "{what}: not within 30 s; {}{}", self.status(), self.agents());
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let output = self.knit(&["lab", "down"]);
        if !std::thread::panicking() {
            assert!(output.status.success(), "{}", text(&output));
            assert!(!self.dir.path().join("knit-lab").exists(), "the lab left its directory behind");
        }
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn tenants_with_the_same_addresses_reach_their_own_and_nobody_else() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    for tenant in ["red", "blue"] {
        let other = if tenant == "red" { "blue" } else { "red" };
        for pod in ["web-1", "web-2"] {
            let address = lab.address(&format!("{tenant}/{pod}"));
            let to = format!("{address}:8080");
            let heard = lab
                .ask(&format!("{tenant}/client"), &to)
                .unwrap_or_else(|| panic!("{tenant}/{pod} is silent"));
            assert!(heard.starts_with(&format!("{tenant}/{pod} ")), "{heard}");
            // The other tenant reaches its own pod of that address, or nobody.
            if let Some(heard) = lab.ask(&format!("{other}/client"), &to) {
                assert!(heard.starts_with(&format!("{other}/")), "{other} heard {heard}");
            }
        }
        let service = lab.service(tenant, "web");
        let to = format!("{service}:80");
        let heard = lab.eventually("the Service answers", || lab.ask(&format!("{tenant}/client"), &to));
        assert!(heard.starts_with(&format!("{tenant}/web-")), "{heard}");
        assert_eq!(lab.ask(&format!("{other}/client"), &to), None, "{other} reached a Service of {tenant}");
    }
}

#[test]
fn agents_restarted_lose_no_packet() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    let to = format!("{}:8080", lab.address("red/web-2"));
    let stream = lab
        .command(&["lab", "exec", "red/client", "--", "knit", "lab", "stream", &to, "--run-for", "3000"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("a stream");
    for node in ["node-1", "node-2"] {
        lab.lab(&["fail", "agent", node]);
        lab.lab(&["fail", "agent", node, "--heal"]);
    }
    let output = stream.wait_with_output().expect("an end");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert!(report["sent"].as_u64().is_some_and(|sent| sent > 1000), "{report}");
    assert_eq!(report["lost"], 0, "{report}");
}

#[test]
fn a_lost_node_comes_back_with_its_pods() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    lab.lab(&["fail", "node", "node-2"]);
    let status = lab.status();
    assert_eq!(status["nodes"][1]["state"], "lost", "{status}");
    let to = format!("{}:8080", lab.address("red/web-1"));
    assert!(lab.ask("red/client", &to).is_some(), "what is on the other node goes on");
    lab.lab(&["fail", "node", "node-2", "--heal"]);
    let address = lab.eventually("red/web-2 is ready again", || {
        let status = lab.status();
        let pods = status["pods"].as_array()?;
        let pod = pods.iter().find(|p| p["namespace"] == "red" && p["name"] == "web-2")?;
        (pod["ready"] == true).then(|| pod["addresses"][0].as_str().map(str::to_owned))?
    });
    let to = format!("{address}:8080");
    let heard = lab.eventually("red/web-2 answers again", || lab.ask("red/client", &to));
    assert!(heard.starts_with("red/web-2 on node-2"), "{heard}");
}

#[test]
fn without_the_api_agents_go_on_and_then_catch_up() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    lab.lab(&["fail", "api"]);
    let to = format!("{}:8080", lab.address("red/web-2"));
    assert!(lab.ask("red/client", &to).is_some(), "pods do not need the API");
    // An agent that restarts without the API serves what it knew.
    lab.lab(&["fail", "agent", "node-1"]);
    lab.lab(&["fail", "agent", "node-1", "--heal"]);
    assert!(lab.ask("red/client", &to).is_some(), "a restarted agent breaks nothing");
    // A pod on a Network that came meanwhile can only be served once the agents have heard of it.
    let late = lab.dir.path().join("late.yaml");
    std::fs::write(&late, LATE).expect("a file");
    lab.lab(&["apply", &late.display().to_string()]);
    lab.lab(&["fail", "api", "--heal"]);
    let heard = lab.eventually("the late pod answers", || {
        let status = lab.status();
        let pod = status["pods"]
            .as_array()?
            .iter()
            .find(|p| p["namespace"] == "late" && p["ready"] == true)?
            .clone();
        lab.ask("late/late", &format!("{}:8080", pod["addresses"][0].as_str()?))
    });
    assert!(heard.starts_with("late/late on node-1"), "{heard}");
}

const LATE: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: late, labels: {tenant: late}}
---
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: late}
spec: {topology: Layer3, subnets: [{cidr: 10.78.0.0/24}], primaryFor: {matchLabels: {tenant: late}}}
---
apiVersion: v1
kind: Pod
metadata: {name: late, namespace: late}
spec: {nodeName: node-1, containers: [{name: main, image: knit-lab}]}
";

#[test]
fn a_deleted_pod_is_gone_and_a_deployment_makes_another() {
    let manifests = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: main, image: knit-lab, readinessProbe: {tcpSocket: {port: 8080}}}]}
";
    let Some(lab) = Lab::up(manifests, &[]) else { return };
    let names = || -> Vec<(String, bool)> {
        let status = lab.status();
        let pods = status["pods"].as_array().cloned().unwrap_or_default();
        pods.iter().map(|p| (p["name"].as_str().unwrap_or_default().to_owned(), p["ready"] == true)).collect()
    };
    let before = names();
    assert_eq!(before.len(), 3, "{before:?}");
    let first = before[0].0.clone();
    let url = kubeconfig_url(&lab);
    delete(&url, &format!("/api/v1/namespaces/default/pods/{first}"));
    lab.eventually("another pod takes its place", || {
        let now = names();
        (now.len() == 3 && now.iter().all(|(name, ready)| *ready && *name != first)).then_some(())
    });
}

fn kubeconfig_url(lab: &Lab) -> String {
    let path = PathBuf::from(lab.lab(&["kubeconfig"]).trim());
    let text = std::fs::read_to_string(&path).expect("a kubeconfig");
    let line = text.lines().find(|line| line.contains("server:")).expect("a server");
    line.split("http://").nth(1).expect("a URL").trim().to_owned()
}

/// A DELETE over the forwarded port, as kubectl would send it.
fn delete(host: &str, path: &str) {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(host).expect("the API answers on this machine");
    write!(
        stream,
        "DELETE {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn a_killed_lab_leaves_nothing_and_the_next_one_starts() {
    let Some(lab) = Lab::up("", &["--nodes", "1"]) else { return };
    let lock = lab.dir.path().join("knit-lab/lab.lock");
    let pid = holder(&lock);
    kill(pid);
    lab.eventually("everything of it has ended", || processes_of(lab.dir.path()).is_empty().then_some(()));
    let again = lab.knit(&["lab", "up", "--empty", "--nodes", "1"]);
    assert!(again.status.success(), "{}", text(&again));
    assert!(text(&again).contains("removed what a killed lab left"), "{}", text(&again));
}

/// The outermost process of the lab whose directory is named on its command line.
fn holder(lock: &Path) -> u32 {
    let dir = lock.with_extension("");
    let all = processes_of(dir.parent().and_then(Path::parent).expect("a parent"));
    *all.iter().min().expect("a process")
}

fn processes_of(dir: &Path) -> Vec<u32> {
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

fn kill(pid: u32) {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill runs");
    assert!(status.success());
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |manifest: &str, more: &[&str]| -> String {
        let file = dir.path().join("m.yaml");
        std::fs::write(&file, manifest).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
        command.args(["lab", "up"]).args(more).arg(&file).env("XDG_RUNTIME_DIR", dir.path());
        let output = command.output().expect("knit runs");
        assert!(!output.status.success(), "{}", text(&output));
        assert!(!dir.path().join("knit-lab").exists(), "something was made: {}", text(&output));
        text(&output)
    };
    let network = |cidr: &str| {
        format!(
            "apiVersion: knit.dev/v1alpha1\nkind: Network\nmetadata: {{name: red}}\nspec: {{topology: Layer3, subnets: [{{cidr: {cidr}}}]}}\n"
        )
    };
    let said = run(&network("10.244.7.0/24"), &[]);
    assert!(said.contains("Network red (10.244.7.0/24) overlaps Network default"), "{said}");
    let said = run(&network("10.96.0.0/24"), &[]);
    assert!(said.contains("overlaps the service range"), "{said}");
    let said = run(&network("172.20.0.0/24"), &[]);
    assert!(said.contains("overlaps the nodes' range"), "{said}");
    let said = run("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {contaners: []}\n", &[]);
    assert!(said.contains("contaners"), "{said}");
    let said = run("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n", &["--name", "no/good"]);
    assert!(said.contains("cannot be a lab's name"), "{said}");
}
