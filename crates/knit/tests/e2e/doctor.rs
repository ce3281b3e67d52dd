//! `knit doctor` on a node that is well, and on one with a defect each.

use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Instant;

use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::eventually;
use knit_kernel::{Handle, Op, owner};
use knit_nft::{Family, Nftables as _, Table, TableId, Transaction};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{Cluster, Node, SOON, e2e, ip, name, shim};

/// A record as JSON, whatever is in it.
#[derive(Clone, Deserialize, Serialize)]
#[serde(transparent)]
struct Raw(Value);

impl knit_ledger::Record for Raw {
    fn key(&self) -> &str {
        self.0["sandbox"].as_str().unwrap_or_default()
    }
}

/// Writes something into the record of a pod that no agent understands; says which sandbox it is.
fn spoil_a_record(path: &Path, pod: &str) -> String {
    let mut ledger = knit_ledger::Ledger::<Raw>::open(path).expect("nobody has it").ledger;
    let of_pod = |record: &&Raw| record.0["pod"]["name"].as_str().is_some_and(|name| name.contains(pod));
    let mut record = ledger.records().find(of_pod).expect("a record of that pod").clone();
    record.0["attachments"][0]["state"] = json!("melted");
    ledger.put(record.clone()).expect("written");
    knit_ledger::Record::key(&record).to_owned()
}

/// All findings, and the exit code.
pub fn doctor(node: &Node) -> (Vec<Value>, i32) {
    let mut command = node.command("doctor");
    command.args(["-o", "json", "--cni-conf-dir", "/run/net.d", "--cni-bin-dir", "/run/bin"]);
    command.arg("--run-dir").arg(&node.run).arg("--state-dir").arg(&node.state);
    let output = command.output().expect("knit runs");
    let findings = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
    (findings, output.status.code().expect("a code"))
}

/// The message of what is not good in a check.
pub fn trouble(findings: &[Value], check: &str) -> String {
    let bad = findings.iter().filter(|f| f["check"] == check && f["verdict"] != "good");
    let texts: Vec<String> =
        bad.map(|f| format!("{}: {} -> {}", f["verdict"], f["message"], f["advice"])).collect();
    texts.join("\n")
}

#[track_caller]
pub fn finds(node: &Node, check: &str, verdict: &str, words: &str) {
    let (mut findings, mut code) = doctor(node);
    let mut found = trouble(&findings, check);
    // The kernel takes a moment to tell that an end is down.
    let end = Instant::now() + SOON;
    while !found.contains(words) && Instant::now() < end {
        (findings, code) = doctor(node);
        found = trouble(&findings, check);
    }
    assert!(
        found.contains(&format!("\"{verdict}\"")) && found.contains(words),
        "{check}: {found:?}\n{findings:#?}"
    );
    assert!(code == if verdict == "wrong" { 2 } else { 1 } || code == 2, "exit code {code}");
}

/// A node as it should be, with a default route, an uplink, a CNI configuration and the shim in its place.
fn healthy() -> Cluster {
    let mut cluster = healthy_objects();
    cluster.a.start();
    cluster
}

/// The same, before its agent starts.
pub fn healthy_objects() -> Cluster {
    let cluster = Cluster::new();
    let node = &cluster.a;
    let handle = Handle::open(&node.space).expect("a handle");
    let eth0 = handle.index_of(&name("eth0")).expect("eth0");
    let route = Route { protocol: 4, ..Route::default_v4().dev(eth0).via(ip("192.168.7.2")) };
    handle.apply(&[Op::create(route)]).expect("a default route");
    for folder in ["/run/net.d", "/run/bin"] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    std::fs::copy(shim(), "/run/bin/knit-cni").expect("the shim");
    configure(node, &node.socket().display().to_string());
    cluster
}

fn configure(node: &Node, socket: &str) {
    let plugin = json!({"type": "knit-cni", "socket": socket,
        "capabilities": {"io.kubernetes.cri.pod-annotations": true, "portMappings": true}});
    let list = json!({"cniVersion": "1.1.0", "name": "knit", "plugins": [plugin]});
    std::fs::write("/run/net.d/10-knit.conflist", list.to_string()).expect("written");
    assert!(node.socket().is_absolute());
}

#[test]
fn a_node_that_is_well() {
    e2e(|| {
        let cluster = healthy();
        let (_one, _) = cluster.a.add("one", "blue");
        let cache = cluster.a.state.join("boot-cache.log");
        eventually("the Networks are kept", SOON, || {
            std::fs::read(&cache).is_ok_and(|text| String::from_utf8_lossy(&text).contains("\"tiny\""))
        });
        let checks = [
            "forwarding",
            "kernel",
            "trial pod",
            "run-time directory",
            "space",
            "socket",
            "agent",
            "ledger",
            "runtimes",
            "noted DELs",
            "attachments",
            "routes",
            "routers",
            "MTU",
            "Services",
            "CNI configuration",
            "CNI plugin",
        ];
        let (mut findings, mut code) = doctor(&cluster.a);
        // The kernel takes a moment to tell that an end is up.
        let end = Instant::now() + SOON;
        while checks.iter().any(|check| !trouble(&findings, check).is_empty()) && Instant::now() < end {
            (findings, code) = doctor(&cluster.a);
        }
        for check in checks {
            assert!(findings.iter().any(|f| f["check"] == check), "{check} is not looked at");
            assert_eq!(trouble(&findings, check), "", "{check}");
        }
        // What this kernel lacks is the kernel's matter.
        assert!(code == 0 || !trouble(&findings, "bridged packets").is_empty(), "{code}");
        // The trial left nothing, and the same look gives the same.
        cluster.a.audit(&[("one", 2)].into());
    });
}

#[test]
fn defects_of_agent_and_files() {
    e2e(|| {
        let mut cluster = healthy();
        let (one, _) = cluster.a.add("one", "");
        let (_two, _) = cluster.a.add("two", "blue");
        let node = &mut cluster.a;
        let socket = node.socket();
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).expect("opened");
        finds(node, "socket", "wrong", "mode 666");
        configure(node, "/run/elsewhere.sock");
        finds(node, "CNI configuration", "wrong", "/run/elsewhere.sock");
        std::fs::write("/run/net.d/05-other.conflist", r#"{"name":"x","plugins":[{"type":"bridge"}]}"#)
            .expect("written");
        finds(node, "CNI configuration", "warning", "05-other.conflist");
        std::fs::remove_file("/run/bin/knit-cni").expect("removed");
        finds(node, "CNI plugin", "warning", "knit-cni");

        node.kill();
        finds(node, "agent", "wrong", "nothing is listening");
        assert!(node.cni("DEL", &one, "").ok, "noted");
        finds(node, "noted DELs", "warning", "1 DELs");
        // The namespace is gone, and nobody was told.
        let ledger = node.run.join("ledger");
        one.remove();
        finds(node, "ledger", "warning", "one");
        let unreadable = spoil_a_record(&ledger, "two");
        finds(node, "ledger", "wrong", "cannot be read");
        // What its record does not say may be its own.
        let said = trouble(&doctor(node).0, "attachments");
        assert!(!said.contains(&unreadable), "{said}");
        let mut file = std::fs::File::options().write(true).open(&ledger).expect("the ledger");
        file.seek(SeekFrom::Start(40)).expect("longer");
        file.write_all(b"####").expect("damaged");
        finds(node, "ledger", "wrong", "damaged");
        // Pods whose records are behind the damage live, and are not called nobody's.
        let (findings, _) = doctor(node);
        for check in ["attachments", "routes"] {
            let said = trouble(&findings, check);
            assert!(said.contains("not known while the ledger is damaged"), "{check}: {said}");
            assert!(!said.contains("without a record") && !said.contains("does not have"), "{check}: {said}");
        }
        std::fs::remove_dir_all(&node.run).unwrap_or_else(|e| println!("{e}"));
    });
}

#[test]
fn defects_in_the_kernel() {
    e2e(|| {
        let mut cluster = healthy();
        let (one, _) = cluster.a.add("one", "");
        let node = &mut cluster.a;
        let cache = node.state.join("boot-cache.log");
        eventually("the Networks are kept", SOON, || {
            std::fs::read(&cache).is_ok_and(|text| String::from_utf8_lossy(&text).contains("\"tiny\""))
        });
        // An agent that runs mends some of what follows, once a minute.
        node.kill();
        let handle = Handle::open(&node.space).expect("a handle");
        // An interface with a mark, of a sandbox that nobody recorded.
        let inside = NetNs::unnamed().expect("a namespace");
        let mut stray = NewLink::veth(name("knitstray"), Peer::new(name("eth0"), &inside));
        stray.alias =
            Some(owner::alias("pod ghost eth0 1 0000000000000000 02:00:00:00:00:01 - 10.244.1.99/32"));
        let index = handle.create_link(&stray).expect("a link").index;
        finds(node, "attachments", "warning", "knitstray");
        handle.delete_link(index).expect("deleted");
        // A route to a pod that is not there.
        let links = handle.links(&knit_kernel::handle::LinkFilter { owned: true, ..Default::default() });
        let port =
            links.expect("links").into_iter().find(|l| l.owner().is_some_and(|o| o.starts_with("pod one ")));
        let route = Route::to("10.244.1.99/32".parse().expect("a prefix")).dev(port.expect("its port").index);
        handle.ensure(route).expect("a route");
        finds(node, "routes", "warning", "10.244.1.99");
        handle.remove(route).expect("removed");
        // A pod's end that is down.
        let pod = Handle::open(&one.space).expect("a handle");
        let eth0 = pod.index_of(&name("eth0")).expect("eth0");
        pod.apply(&[Change { up: Some(false), ..Change::of(eth0) }.into()]).expect("down");
        finds(node, "attachments", "wrong", "carry no packets");
        pod.apply(&[Change::of(eth0).up().into()]).expect("up");

        Sysctls::of(&node.space).expect("sysctls").set(&Sysctl::ipv4_forwarding(), 0).expect("off");
        finds(node, "forwarding", "wrong", "net.ipv4.ip_forward is 0");
        // A router of a Network that is gone.
        std::fs::create_dir_all(node.run.join("netns")).expect("a folder");
        NetNs::create(node.run.join("netns/yellow")).expect("a router");
        finds(node, "routers", "warning", "yellow");
        // The uplink shrinks.
        let uplink = handle.index_of(&name("eth0")).expect("eth0");
        let mtu = knit_kernel::Mtu::new(1300).ok();
        handle.apply(&[Change { mtu, ..Change::of(uplink) }.into()]).expect("a smaller MTU");
        finds(node, "MTU", "wrong", "only 1300");
        let mut tables = Transaction::new();
        tables.add_table(Table::new(TableId::new(Family::Ip, "kube-proxy")));
        Kernel::open_in(&node.space).and_then(|mut kernel| kernel.commit(&tables)).expect("a table");
        finds(node, "Services", "warning", "kube-proxy in its nftables mode");
        // It is gone without a word, while the agent is away.
        let link = handle.links(&knit_kernel::handle::LinkFilter {
            owned: true,
            kind: Some("veth"),
            ..Default::default()
        });
        for link in link.expect("links") {
            handle.delete_link(link.index).expect("deleted");
        }
        finds(node, "attachments", "wrong", "not in the kernel");
    });
}
