//! What fails, and what comes back.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::{Lab, TENANTS, processes_of, text};

#[test]
fn agents_restarted_lose_no_packet() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    let stream = lab.stream("red/client", &format!("{}:8080", lab.address("red/web-2")));
    for node in ["node-1", "node-2"].repeat(3) {
        lab.lab(&["fail", "agent", node]);
        lab.lab(&["fail", "agent", node, "--heal"]);
    }
    let report = stream.end();
    assert!(report["sent"].as_u64().is_some_and(|sent| sent > 300), "{report}");
    assert_eq!(report["lost"], 0, "{report}");
}

#[test]
fn a_lost_node_comes_back_with_its_pods() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    lab.lab(&["fail", "node", "node-2"]);
    let status = lab.status();
    assert_eq!(status["nodes"][1]["state"], "lost", "{status}");
    let to = format!("{}:8080", lab.address("red/web-1"));
    assert!(lab.ask_once("red/client", &to).is_some(), "what is on the other node goes on");
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
fn a_cut_link_is_silent_and_comes_back() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    let across = format!("{}:8080", lab.address("red/web-2"));
    let beside = format!("{}:8080", lab.address("red/web-1"));
    assert!(lab.ask_once("red/client", &across).is_some(), "it answers before");
    lab.lab(&["fail", "link", "node-2"]);
    let status = lab.status();
    assert_eq!(status["nodes"][1]["state"], "link cut", "{status}");
    let (_, node) = lab.request("GET", "/api/v1/nodes/node-2");
    let node: Value = serde_json::from_str(&node).expect("a Node");
    let ready = node["status"]["conditions"]
        .as_array()
        .and_then(|c| c.iter().find(|c| c["type"] == "Ready").cloned());
    assert_eq!(ready.map(|c| c["status"].clone()), Some("False".into()), "{node}");
    assert_eq!(lab.ask("red/client", &across), None, "nothing crosses a cut link");
    assert!(lab.ask_once("red/client", &beside).is_some(), "what is on the same node goes on");
    assert_eq!(lab.status()["pods"].as_array().map(Vec::len), Some(6), "no pod is taken away");

    lab.lab(&["fail", "link", "node-2", "--heal"]);
    let heard = lab.eventually("red/web-2 answers again", || lab.ask("red/client", &across));
    assert!(heard.starts_with("red/web-2 on node-2"), "{heard}");
    assert_eq!(lab.status()["nodes"][1]["state"], "up");
    // For a while, then by itself again.
    lab.lab(&["fail", "link", "node-1", "--for", "0.2"]);
    assert_eq!(lab.status()["nodes"][0]["state"], "up");
    lab.eventually("red/web-2 answers again", || lab.ask("red/client", &across));
}

#[test]
fn without_the_api_agents_go_on_and_then_catch_up() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    lab.lab(&["fail", "api"]);
    let to = format!("{}:8080", lab.address("red/web-2"));
    assert!(lab.ask_once("red/client", &to).is_some(), "pods do not need the API");
    // An agent that restarts without the API serves what it knew.
    lab.lab(&["fail", "agent", "node-1"]);
    lab.lab(&["fail", "agent", "node-1", "--heal"]);
    assert!(lab.ask_once("red/client", &to).is_some(), "a restarted agent breaks nothing");
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

fn kill(pid: u32) {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill runs");
    assert!(status.success());
}
