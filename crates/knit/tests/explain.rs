//! `knit explain`: the commands of docs/network-policy.md as they stand there, and what the page does not
//! show.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PAGE: &str = include_str!("../../../docs/network-policy.md");

/// The page's one file of objects.
fn file() -> &'static str {
    let (_, rest) = PAGE.split_once("<!-- shop.yaml -->\n```yaml\n").expect("the file");
    rest.split_once("```").expect("its end").0
}

/// The page's commands, each with what it prints.
fn commands() -> Vec<(&'static str, String)> {
    let (_, rest) = PAGE.split_once("```console\n").expect("commands");
    let mut found: Vec<(&str, String)> = Vec::new();
    for line in rest.split_once("```").expect("their end").0.lines() {
        match (line.strip_prefix("$ "), found.last_mut()) {
            (Some(command), _) => found.push((command, String::new())),
            (None, Some((_, prints))) => *prints += &format!("{line}\n"),
            (None, None) => panic!("output before the first command"),
        }
    }
    found
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        fs::write(folder.path().join(name), text).expect("a file");
    }
    folder
}

fn knit(folder: &Path, args: &[&str]) -> Output {
    let folder = folder.to_str().expect("UTF-8");
    let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
    command.arg("explain").args(args).args(["--objects-from", folder]).env("NO_COLOR", "1");
    command.output().expect("knit runs")
}

/// What was printed, less the blanks that fill a table's last column.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn the_commands_of_the_page_print_what_it_says() {
    let folder = folder(&[("shop.yaml", file())]);
    let program = PathBuf::from(env!("CARGO_BIN_EXE_knit"));
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", program.parent().expect("a folder").display());
    let commands = commands();
    assert_eq!(commands.len(), 2, "the page has lost its commands");
    for (command, prints) in commands {
        let mut shell = Command::new("bash");
        shell.args(["-c", command]).current_dir(folder.path()).env("PATH", &path).env("NO_COLOR", "1");
        assert_eq!(text(&shell.output().expect("bash runs").stdout), prints, "{command}");
    }
}

#[test]
fn json_says_the_same() {
    let shop = folder(&[("shop.yaml", file())]);
    let output = knit(shop.path(), &["shop/batch", "shop/db:5432", "-o", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json[0]["enforced"], true);
    assert_eq!(json[0]["allowed"], false);
    assert_eq!(json[0]["egress"]["allowed"], true);
    assert_eq!(json[0]["ingress"]["tiers"][1]["rules"][0]["policy"], "NetworkPolicy shop/db");
    let output = knit(shop.path(), &["shop/web", "shop/db:5432", "-o", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&json[0]["allowed"], &json[0]["ingress"]["rule"]), (&true.into(), &0.into()));
    let others = "apiVersion: knit.dev/v1alpha1\nkind: Network\nmetadata: {name: default}\n\
        spec: {topology: Layer3, policy: {enforcement: Others}}\n";
    let left = folder(&[("shop.yaml", file()), ("network.yaml", others)]);
    let output = knit(left.path(), &["shop/web", "shop/db:5432", "-o", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json[0]["enforced"], false);
    assert!(text(&output.stderr).contains("does not enforce policies"), "nobody may miss it");
}

const NETWORKS: &str = "
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: blue}
spec: {topology: Layer3, subnets: [{cidr: 10.77.0.0/16}], primaryFor: {matchLabels: {tenant: blue}}}
---
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: storage}
spec: {topology: Layer3, subnets: [{cidr: 10.78.0.0/16}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: blue, labels: {tenant: blue}}
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {addresses: [{type: InternalIP, address: 192.168.0.1}, {type: Hostname, address: node-1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: blue, labels: {app: a}}
spec: {nodeName: node-1, containers: [{name: c, image: i}]}
status: {podIPs: [{ip: 10.77.0.5}, {ip: 'fd77::5'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: blue, labels: {app: b}}
spec: {nodeName: node-2, containers: [{name: c, image: i}]}
status: {podIPs: [{ip: 10.77.1.5}, {ip: 'fd77::1:5'}]}
---
apiVersion: v1
kind: Pod
metadata: {name: dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec: {nodeName: node-2, containers: [{name: c, image: i}]}
status: {podIPs: [{ip: 10.0.0.9}]}
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec: {clusterIP: 10.96.0.10, ports: [{name: dns, port: 53, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-1, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports: [{name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: [10.0.0.9]}]
---
apiVersion: knit.dev/v1alpha1
kind: NetworkAttachment
metadata: {name: a-storage, namespace: blue}
spec: {pod: a, network: storage}
status: {addresses: [{family: IPv4, address: 10.78.0.5, prefix: 16}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: out, namespace: blue}
spec:
  podSelector: {}
  policyTypes: [Egress]
  egress:
  - to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}}]
    ports: [{port: 5353, protocol: UDP}]
  - to: [{ipBlock: {cidr: 10.77.0.0/16}}]
---
apiVersion: k8s.cni.cncf.io/v1beta1
kind: MultiNetworkPolicy
metadata:
  name: closed
  namespace: blue
  annotations: {k8s.v1.cni.cncf.io/policy-for: 'storage, nowhere'}
spec: {podSelector: {}, policyTypes: [Ingress]}
";

#[test]
fn primary_networks_further_interfaces_and_cluster_services() {
    let folder = folder(&[("all.yaml", NETWORKS)]);
    let first = |args: &[&str]| {
        let output = knit(folder.path(), args);
        let all = text(&output.stdout) + &text(&output.stderr);
        text(&output.stdout).lines().next().map_or(all, str::to_owned)
    };
    assert_eq!(
        first(&["blue/a", "blue/b:80"]),
        "allowed: blue/a (10.77.0.5) to blue/b (10.77.1.5), TCP 80, in Network blue"
    );
    // The other family has its own verdict: the block says nothing of it.
    let both = text(&knit(folder.path(), &["blue/a", "blue/b:80"]).stdout);
    assert!(
        both.contains("denied: blue/a (fd77::5) to blue/b (fd77::1:5), TCP 80, in Network blue"),
        "{both}"
    );
    let dns = text(&knit(folder.path(), &["blue/a", "10.96.0.10:53/udp"]).stdout);
    assert!(dns.starts_with("allowed: "), "{dns}");
    assert!(dns.contains("evaluated as its endpoint 10.0.0.9:5353 (rule 38)"), "{dns}");
    assert!(first(&["203.0.113.9", "blue/a:80", "--network", "storage"]).starts_with("denied: "));
    assert!(
        first(&["node/node-1", "blue/a:80", "--network", "storage"]).starts_with("allowed: "),
        "its own node"
    );
    assert!(first(&["blue/a", "kube-system/dns:53/udp"]).contains("they have no Network in common"));
    let warned = text(&knit(folder.path(), &["kube-system/dns", "10.96.0.10:53/udp"]).stderr);
    assert!(warned.contains("10.96.0.10 is the address of Service kube-system/kube-dns"), "{warned}");
    assert!(
        warned.contains("MultiNetworkPolicy blue/closed: ")
            && warned.contains("Network nowhere does not exist")
    );
}

#[test]
fn of_two_networks_that_select_a_namespace_another_one_was_named_than_the_pods_have() {
    let network = |name: &str, created: &str| {
        format!(
            "apiVersion: knit.dev/v1alpha1\nkind: Network\n\
             metadata: {{name: {name}, creationTimestamp: '{created}'}}\n\
             spec: {{topology: Layer3, subnets: [{{cidr: 10.77.0.0/16}}], \
             primaryFor: {{matchLabels: {{t: a}}}}}}\n"
        )
    };
    let pod = |name: &str, ip: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: a}}\n\
             spec: {{nodeName: n, containers: [{{name: c, image: i}}]}}\nstatus: {{podIPs: [{{ip: {ip}}}]}}\n"
        )
    };
    let objects = [
        network("newer", "2026-03-01T00:00:00Z"),
        network("older", "2026-02-01T00:00:00Z"),
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: a, labels: {t: a}}\n".to_owned(),
        pod("x", "10.77.0.5"),
        pod("y", "10.77.0.6"),
    ];
    let folder = folder(&[("all.yaml", &objects.join("---\n"))]);
    let output = knit(folder.path(), &["a/x", "a/y:80"]);
    let (shown, warned) = (text(&output.stdout), text(&output.stderr));
    assert!(shown.contains("in Network older"), "{shown}{warned}");
    assert!(warned.contains("older, the older one, has it"), "{warned}");
}

#[test]
fn questions_that_cannot_be_answered_say_what_to_write() {
    let folder = folder(&[("shop.yaml", file())]);
    for (args, message) in [
        (&["shop/web", "shop/none:80"][..], "pod shop/none does not exist: write NAMESPACE/POD"),
        (&["web", "shop/db:80"], "pod web does not exist in namespace default: do you mean shop/web?"),
        (&["node/none", "shop/db:80"], "Node none does not exist"),
        (&["shop/web", "shop/db:http"], "pod shop/db has no port named http"),
        (&["shop/web", "10.0.0.1:http"], "10.0.0.1 has no named ports"),
        (&["shop/web", "shop/db:80", "--network", "red"], "Network red does not exist"),
        (&["shop/web", "[fd00::1]:80"], "have no address family in common"),
        (&["shop/web", "shop/db:99999"], "\"99999\" is not a valid port"),
    ] {
        let output = knit(folder.path(), args);
        assert!(!output.status.success(), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains(message), "{args:?}: {error}");
    }
}
