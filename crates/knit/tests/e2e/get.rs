//! `knit get` on what a node has, from its objects and from its ledger.

use std::process::Output;

use knit_kernel::testing::eventually;
use serde_json::Value;

use crate::support::{Cluster, Node, SOON, addresses, e2e};

fn get(node: &Node, args: &[&str]) -> Output {
    let mut command = node.command("get");
    command.args(args).output().expect("knit runs")
}

fn table(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// The line of a table that starts with these words.
fn line(table: &str, start: &[&str]) -> Vec<String> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let found =
        table.lines().map(words).find(|line| line.len() >= start.len() && line[..start.len()] == *start);
    found.unwrap_or_else(|| panic!("no line {start:?} in\n{table}"))
}

#[test]
fn objects_and_attachments_are_shown() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let (_pod, result) = node.add("web", "blue");
        let from = ["--objects-from", "/run/objects", "--objects-to", "/run/written-a"];
        let get_from = |kind: &'static str, more: &[&str]| get(node, &[&[kind][..], &from, more].concat());

        let networks = table(&get_from("networks", &["-o", "wide"]));
        assert!(networks.starts_with("NAME"), "{networks}");
        assert_eq!(line(&networks, &["blue"])[1..3], ["Layer2", "10.77.0.0/16,fd77::/64"]);
        let blocks = table(&get_from("blocks", &[]));
        assert_eq!(line(&blocks, &["blue-a"])[1..5], ["blue", "a", "10.77.1.0/24", "fd77::100/120"]);
        eventually("the node is reported", SOON, || {
            let nodes = table(&get_from("nodes", &[]));
            nodes.contains("knit.dev/linux") && line(&nodes, &["a"]).get(5).is_some_and(|n| n == "2")
        });
        eventually("the attachment is reported", SOON, || {
            // The object comes first, and then its status.
            let attachments = table(&get_from("attachments", &["-n", "shop"]));
            attachments.lines().any(|line| line.contains("web-net1") && line.contains("True"))
        });
        // As kubectl has it, and as the pages say.
        assert_eq!(table(&get_from("attachments", &["-A"])), table(&get_from("attachments", &[])),);
        // No controller sums up what the nodes say; `knit get` does.
        let networks = table(&get_from("networks", &[]));
        // One pod and the router, out of 256 addresses per family.
        assert_eq!(line(&networks, &["blue"])[4..7], ["2,2", "254,254", "True"], "{networks}");
        let attachments = table(&get_from("attachments", &["-n", "shop"]));
        let own: Vec<String> = addresses(&result, "net1").iter().map(ToString::to_string).collect();
        let row = line(&attachments, &["shop", "web-net1"]);
        assert_eq!(row[2..8], ["web", "blue", "net1", &own.join(","), "a", "True"], "{attachments}");
        // The default Network's are not published; the ledger has them.
        assert!(!attachments.contains("eth0"), "{attachments}");
        let local = get(node, &["attachments", "--local", "--run-dir", "/run/knit-a", "-o", "json"]);
        let local: Vec<Value> = serde_json::from_slice(&local.stdout).expect("JSON");
        assert_eq!(local.len(), 2);
        let eth0 = local.iter().find(|a| a["spec"]["network"] == "default").expect("the default Network's");
        assert_eq!(eth0["status"]["addresses"][0]["address"], addresses(&result, "eth0")[0].to_string());
        assert_eq!(eth0["status"]["conditions"][0]["status"], "True");

        // What is not there, and what is wrong.
        let missing = get_from("networks", &["no-such"]);
        assert_eq!(missing.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such does not exist"));
        let wrong = get(node, &["attachments", "--local", "--run-dir", "/run/nowhere"]);
        let error = String::from_utf8_lossy(&wrong.stderr).into_owned();
        assert!(error.starts_with("error: cannot read /run/nowhere/ledger"), "{error}");
        let yaml = get_from("blocks", &["-o", "yaml", "tiny-a"]);
        assert!(String::from_utf8_lossy(&yaml.stdout).contains("ipv4: 10.99.0.8/29"), "{yaml:?}");
    });
}
