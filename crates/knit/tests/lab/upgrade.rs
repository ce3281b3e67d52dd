//! A rolling upgrade: every agent is replaced by that of another program, one node after another.

use std::path::Path;

use serde_json::Value;

use crate::support::{Lab, TENANTS};

/// A UDP port of a Service, so that a stream can go through the proxies too.
const ECHO: &str = "
---
apiVersion: v1
kind: Service
metadata: {name: echo, namespace: red}
spec: {selector: {app: web}, ports: [{port: 7, targetPort: 8080, protocol: UDP}]}
";

fn late(name: &str, tenant: &str, node: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {tenant}}}\n\
         spec: {{nodeName: {node}, containers: [{{name: main, image: knit-lab}}]}}\n"
    )
}

/// What the ledger of a node's agent holds, by sandbox: its interface and addresses.
fn ledger(lab: &Lab, node: &str) -> Vec<(String, Value)> {
    let dir = format!("/run/knit-lab/{node}/knit");
    let printed = lab.lab(&[
        "exec",
        "red/client",
        "--",
        "knit",
        "get",
        "attachments",
        "--local",
        "--run-dir",
        &dir,
        "-o",
        "json",
    ]);
    let list: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
    let items = list.as_array().or_else(|| list["items"].as_array()).cloned().unwrap_or_default();
    let mut all: Vec<(String, Value)> = items
        .iter()
        .map(|item| {
            let mut status = item["status"].clone();
            // When it was looked at last is no part of what was made.
            status.as_object_mut().map(|status| status.remove("conditions"));
            (format!("{} {}", item["metadata"]["namespace"], item["metadata"]["name"]), status)
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn a_rolling_upgrade_loses_no_packet_and_no_attachment() {
    upgrade_from(Path::new(env!("CARGO_BIN_EXE_knit")));
}

/// `KNIT_TEST_EARLIER` names a program of an earlier commit: the lab, its API and its controller are that
/// one's to the end, and its agents are replaced.
#[test]
#[ignore = "needs a program of an earlier commit: `cargo xtask upgrade-test` builds one and runs this"]
fn agents_of_an_earlier_version_are_replaced_without_loss() {
    let earlier = std::env::var_os("KNIT_TEST_EARLIER").expect("KNIT_TEST_EARLIER names a program");
    upgrade_from(Path::new(&earlier));
}

/// Starts a lab of this program, and replaces its agents by those of the program that was just built.
fn upgrade_from(earlier: &Path) {
    let Some(lab) = Lab::up_as(earlier, &(TENANTS.to_owned() + ECHO), &[]) else { return };
    let newer = lab.dir.path().join("knit-new");
    std::fs::copy(env!("CARGO_BIN_EXE_knit"), &newer).expect("a copy");
    let programs = |status: &Value| -> Vec<String> {
        let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
        nodes.iter().map(|node| node["agentProgram"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let newer = newer.display().to_string();
    assert!(programs(&lab.status()).iter().all(|program| *program != newer));
    let before: Vec<_> = ["node-1", "node-2"].iter().map(|node| ledger(&lab, node)).collect();
    assert!(before.iter().all(|ledger| ledger.len() >= 2), "{before:?}");

    let to = |pod: &str| format!("{}:8080", lab.address(pod));
    let echo = format!("{}:7", lab.service("red", "echo"));
    // `up` has waited for TCP alone.
    lab.eventually("the UDP Service answers", || {
        let output =
            lab.knit(&["lab", "exec", "red/client", "--", "knit", "lab", "stream", &echo, "--run-for", "20"]);
        output.status.success().then_some(())
    });
    let streams = [
        lab.stream("red/client", &to("red/web-2")),
        lab.stream("blue/client", &to("blue/web-2")),
        lab.stream("red/client", &echo),
    ];
    for (place, node) in ["node-1", "node-2"].into_iter().enumerate() {
        // A pod comes just before its node's agent goes, and one while it is away or has just come back.
        let file = lab.dir.path().join(format!("late-{place}.yaml"));
        std::fs::write(&file, late(&format!("before-{place}"), "red", node)).expect("a file");
        lab.lab(&["apply", &file.display().to_string()]);
        let mut upgrade = lab.command(&["lab", "upgrade", &newer, node]).spawn().expect("an upgrade");
        std::fs::write(&file, late(&format!("meanwhile-{place}"), "blue", node)).expect("a file");
        lab.lab(&["apply", &file.display().to_string()]);
        assert!(upgrade.wait().expect("an end").success(), "{}", lab.agents());
        for (tenant, name) in [("red", "before"), ("blue", "meanwhile")] {
            let name = format!("{name}-{place}");
            lab.eventually(&format!("{tenant}/{name} is ready"), || {
                lab.is_ready(tenant, &name).then_some(())
            });
            let address = format!("{}:8080", lab.address(&format!("{tenant}/{name}")));
            let heard = lab.eventually("it answers", || lab.ask(&format!("{tenant}/client"), &address));
            assert!(heard.starts_with(&format!("{tenant}/{name} on {node}")), "{heard}");
        }
    }
    for stream in streams {
        let report = stream.end();
        assert!(report["sent"].as_u64().is_some_and(|sent| sent > 300), "{report}");
        assert_eq!((&report["lost"], &report["refused"]), (&0.into(), &0.into()), "{report}");
    }
    assert_eq!(programs(&lab.status()), [newer.clone(), newer], "both agents are the new program");
    for (node, before) in ["node-1", "node-2"].iter().zip(before) {
        let after = ledger(&lab, node);
        for attachment in &before {
            assert!(after.contains(attachment), "{node} has lost {attachment:?}: {after:?}");
        }
        assert_eq!(after.len(), before.len() + 2, "{after:?}");
    }
}
