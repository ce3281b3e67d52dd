//! `knit conformance` against the agent's own socket, as docs/kni.md says: which cases hold there, and which
//! cannot.

use serde_json::json;

use crate::support::{Cluster, e2e};

const PAGE: &str = include_str!("../../../../docs/kni.md");

#[test]
fn the_agents_own_socket_differs_where_the_page_says_so() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster
            .put(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "knit-conformance"}}));
        cluster.a.start();
        let mut conformance = cluster.a.command("conformance");
        conformance.arg("--runtime").arg(cluster.a.run.join("kni.sock")).args(["--network", "default"]);
        conformance.args(["--namespaces", "/run/netns/conformance", "--report", "/run/report.yaml"]);
        conformance.args(["--node", "a", "--node-address", "192.168.7.1"]);
        for n in 20..60 {
            conformance.arg("--address").arg(format!("10.244.1.{n}/32@10.244.0.1"));
            conformance.arg("--address").arg(format!("fd44::1{n:02x}/128@fd44::1"));
        }
        let output = conformance.output().expect("knit runs");
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut failed: Vec<&str> = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|words| words.get(2) == Some(&"Failed"))
            .map(|words| words[1])
            .collect();
        // The page names them, each in code marks.
        let (_, end) = PAGE.split_once("The agent's own socket").expect("the paragraph");
        let mut named: Vec<&str> = end
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|word| word.chars().all(char::is_alphanumeric))
            .collect();
        // What the case damages the agent may have repaired before it is asked: both are as they should be.
        let either = ["CheckSeesDamage", "CheckSeesLinkDown"];
        failed.retain(|case| !either.contains(case));
        failed.sort_unstable();
        named.retain(|case| !either.contains(case));
        named.sort_unstable();
        assert_eq!(failed, named, "{table}{}", String::from_utf8_lossy(&output.stderr));
    });
}
