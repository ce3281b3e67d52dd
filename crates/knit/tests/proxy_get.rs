//! `knit proxy get` and `knit proxy explain` with files, good and bad.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn knit(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_knit")).arg("proxy").args(args).output().expect("knit runs")
}

/// What was printed, less the blanks that fill a table's last column.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// A folder of test files, asked as node `here`.
fn ask(args: &[&str], folder: &str) -> Output {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/proxy").join(folder);
    let folder = folder.to_str().expect("UTF-8");
    knit(&[args, &["--node-name", "here", "--from-files", folder]].concat())
}

#[test]
fn services_and_where_they_lead() {
    let output = ask(&["get", "services"], "good");
    assert_eq!(
        text(&output.stdout),
        "\
SERVICE     PORT       KIND         ADDRESS           ENDPOINTS
shop/cart   TCP        cluster IP   10.96.0.11:8443   rejected: there are none
shop/web    http/TCP   cluster IP   10.96.0.10:80     2
shop/web    http/TCP   node port    30080             1
"
    );
    assert_eq!(text(&output.stderr), "");
    let output = ask(&["get", "services", "shop/cart", "-o", "yaml"], "good");
    assert_eq!(
        text(&output.stdout),
        "\
- service: shop/cart
  port: \"\"
  protocol: TCP
  family: IPv4
  frontends:
  - kind: cluster IP
    address: 10.96.0.11:8443
    route: reject
    endpoints: 0
    rejects: true
    drops: false
  clusterEndpoints: 0
  localEndpoints: 0
  affinitySeconds: 10800
"
    );
}

#[test]
fn endpoints_and_whether_they_are_used() {
    let output = ask(&["get", "endpoints"], "good");
    assert_eq!(
        text(&output.stdout),
        "\
SERVICE    PORT       ENDPOINT         HERE   USED
shop/web   http/TCP   192.0.2.1:8080   yes    yes
shop/web   http/TCP   192.0.2.2:8080   no     yes
shop/web   http/TCP   192.0.2.3:8080   no     no
"
    );
    let output = ask(&["get", "endpoints", "-o", "wide"], "good");
    assert!(text(&output.stdout).contains("not used: it is terminating, and others are ready (rule 30)"));
    let output = ask(&["get", "endpoints", "-o", "json"], "good");
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows[2]["endpoint"], "192.0.2.3:8080");
    assert_eq!(rows[2]["used"], false);
}

#[test]
fn explain_says_which_rule_gave_which_endpoints() {
    let words = text(&ask(&["explain", "shop/web"], "good").stdout);
    assert_eq!(
        words,
        "\
Service shop/web in Network default
  internal traffic policy Cluster, external Local
port http TCP IPv4
  cluster IP 10.96.0.10:80 -> cluster endpoints
  node port 30080 -> local endpoints (rule 32)
    from the node itself -> cluster endpoints, masqueraded (rule 34)
  cluster endpoints: the ready ones (rule 30); no topology hints
  local endpoints: the ready ones (rule 30)
  endpoint 192.0.2.1:8080 of shop/web-1, here
    cluster: used: it is ready
    local: used: it is ready
  endpoint 192.0.2.2:8080 of shop/web-1
    cluster: used: it is ready
    local: not used: it is on another node
  endpoint 192.0.2.3:8080 of shop/web-1
    cluster: not used: it is terminating, and others are ready (rule 30)
    local: not used: it is on another node
"
    );
    assert_eq!(text(&ask(&["--explain", "shop/web"], "good").stdout), words, "the flag says the same");
    let none = ask(&["explain", "shop/none"], "good");
    assert_eq!(none.status.code(), Some(1));
    assert!(
        text(&none.stderr).starts_with("error: Service shop/none is not served here"),
        "{}",
        text(&none.stderr)
    );
}

#[test]
fn explain_with_a_bind_address_says_what_the_proxy_with_it_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = r#"
apiVersion: v1
kind: Node
metadata: {name: here}
status: {addresses: [{type: InternalIP, address: 192.0.2.9}]}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  loadBalancerSourceRanges: [198.51.100.0/24]
  ports: [{port: 80, protocol: TCP}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.7}]}}
"#;
    fs::write(folder.path().join("all.yaml"), objects).expect("written");
    let folder = folder.path().to_str().expect("UTF-8");
    let words = |args: &[&str]| {
        let output = knit(&[args, &["--node-name", "here", "--from-files", folder]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let itself = "and from its own address (rule 44)";
    assert!(!words(&["explain", "shop/web"]).contains(itself));
    for asked in [
        &["--explain", "shop/web", "--bind-address", "198.51.100.1"][..],
        &["explain", "shop/web", "--bind-address", "198.51.100.1"],
    ] {
        let words = words(asked);
        assert!(words.contains(itself), "{words}");
    }
}

/// Broken YAML, bad addresses and ranges, ports out of range, a slice without a Service, two Services with
/// one external IP and port: each is named with object and field, and everything else is served.
#[test]
fn rules_12_21_bad_objects_are_named_and_the_rest_is_served() {
    let output = ask(&["get", "services"], "bad");
    assert!(output.status.success());
    assert_eq!(
        text(&output.stdout),
        "\
SERVICE         PORT       KIND               ADDRESS            ENDPOINTS
bad/addresses   TCP        cluster IP         10.96.0.30:80      1
bad/addresses   TCP        load-balancer IP   198.51.100.8:80    1
bad/addresses   TCP        external IP        198.51.100.7:80    1
bad/older       TCP        cluster IP         10.96.0.51:80      rejected: there are none
bad/older       TCP        external IP        198.51.100.50:80   rejected: there are none
bad/ports       good/TCP   cluster IP         10.96.0.40:80      1
bad/younger     TCP        cluster IP         10.96.0.50:80      rejected: there are none
broken/first    TCP        cluster IP         10.96.0.20:80      rejected: there are none
broken/third    TCP        cluster IP         10.96.0.21:80      rejected: there are none
shop/cart       TCP        cluster IP         10.96.0.11:8443    rejected: there are none
shop/web        http/TCP   cluster IP         10.96.0.10:80      2
shop/web        http/TCP   node port          30080              1
"
    );
    assert_eq!(
        text(&output.stderr),
        "\
warning: EndpointSlice bad/addresses-1: endpoints[0].addresses[0]: \"192.0.2.999\" is not an IP address; \
it is ignored
warning: EndpointSlice bad/addresses-1: endpoints[1].addresses[0]: 2001:db8::1 is not an IPv4 address; the \
endpoint is ignored
warning: EndpointSlice bad/lost-1: metadata.labels[kubernetes.io/service-name]: Service bad/lost does not \
exist or is not served here; its endpoints are not used
warning: EndpointSlice bad/ports-1: ports[1].port: -5 is not a port number (1 to 65535); the port is ignored
warning: Service bad/addresses: spec.externalIPs[0]: \"10.0.0.300\" is not an IP address; it is ignored
warning: Service bad/addresses: spec.loadBalancerSourceRanges[0]: \"10.0.0.0/99\" is not a valid CIDR such \
as 10.0.0.0/8; it allows no clients
warning: Service bad/addresses: status.loadBalancer.ingress[0].ip: \"one.two.three\" is not an IP address; \
it is ignored
warning: Service bad/ports: spec.ports[0].port: 70000 is not a port number (1 to 65535); the port is ignored
warning: Service bad/ports: spec.ports[1].port: 0 is not a port number (1 to 65535); the port is ignored
warning: Service bad/ports: spec.ports[2].protocol: \"QUIC\" must be TCP, UDP or SCTP; the port is ignored
warning: Service bad/ports: spec.ports[3].nodePort: 99999 is not a port number (1 to 65535); the port is \
ignored
warning: Service bad/younger: spec.externalIPs: external IP 198.51.100.50:80 TCP of port \"\" is already \
used by bad/older, which takes precedence; it is not served here, change one of the two
warning: broken.yaml:10: not YAML: while parsing a flow mapping, did not find expected ',' or '}' at line 4, \
column 5
"
    );
}

#[test]
fn a_hundred_thousand_endpoints_in_one_service() {
    let folder = tempfile::tempdir().expect("a folder");
    let service = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"many","namespace":"big"},
        "spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}"#;
    fs::write(folder.path().join("service.json"), service).expect("a file");
    for slice in 0..100 {
        let endpoint = |i: usize| {
            let n = slice * 1000 + i;
            format!(r#"{{"addresses":["10.{}.{}.{}"]}}"#, 128 + n / 62500, n / 250 % 250, n % 250 + 1)
        };
        let endpoints: Vec<String> = (0..1000).map(endpoint).collect();
        let object = format!(
            r#"{{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"IPv4",
            "metadata":{{"name":"many-{slice}","namespace":"big","labels":{{"kubernetes.io/service-name":"many"}}}},
            "ports":[{{"name":"","port":8080,"protocol":"TCP"}}],"endpoints":[{}]}}"#,
            endpoints.join(",")
        );
        fs::write(folder.path().join(format!("slice-{slice}.json")), object).expect("a file");
    }
    let from = folder.path().to_str().expect("UTF-8");
    let output = knit(&["get", "services", "-o", "json", "--node-name", "here", "--from-files", from]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows[0]["clusterEndpoints"], 100_000);
}

#[test]
fn a_configuration_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.conf");
    let from = folder.path().to_str().expect("UTF-8");
    let config = |text: &str| {
        fs::write(&file, text).expect("a file");
        knit(&["get", "services", "--from-files", from, "--config", file.to_str().expect("UTF-8")])
    };
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let output = config(&format!("{head}conntrack: {{maxPerCore: many}}\n"));
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.contains("config.conf as configuration") && error.contains("conntrack.maxPerCore"),
        "{error}"
    );
    let output = config(&format!("{head}nodePortAdresses: [primary]\n"));
    assert!(output.status.success());
    let warning = text(&output.stderr);
    assert!(warning.contains("unknown field nodePortAdresses"), "{warning}");
}

#[test]
fn without_a_source_the_running_proxy_is_asked() {
    let output = knit(&["get", "services", "--socket", "/nonexistent/proxy.sock"]);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.starts_with("error: no proxy answers at /nonexistent/proxy.sock; start one, or specify"),
        "{error}"
    );
}
