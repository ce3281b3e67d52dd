//! `knit proxy` fed by a Kubernetes API (the embedded one): what is served, and events on Services.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use knit_apiserver::{Config, Server};
use knit_kernel::testing::eventually;
use serde_json::{Value, json};

struct Stop(Child);

impl Drop for Stop {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn request(address: SocketAddr, method: &str, path: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(address).expect("the API");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
         accept: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("an answer");
    assert!(reply.starts_with("HTTP/1.1 20"), "{method} {path}: {reply}");
    let start = reply.find('{').expect("JSON");
    let end = reply.rfind('}').expect("JSON");
    serde_json::from_str(&reply[start..=end]).expect("JSON")
}

fn service(name: &str, cluster_ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name },
        "spec": {
            "clusterIP": cluster_ip, "externalIPs": ["198.51.100.50"],
            "ports": [{ "port": 80, "targetPort": 8080 }],
        },
    })
}

/// Two Services want one external IP and port: the older has it, the younger gets an event. Everything else
/// works.
#[test]
fn rule_21_the_older_service_has_an_external_ip_and_the_other_gets_an_event() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("tokio");
    let server = runtime.block_on(Server::start(Config::default())).expect("the API starts");
    let api = server.addr;
    let folder = tempfile::tempdir().expect("a folder");
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig()).expect("a file");
    let post = |path: &str, body: &Value| request(api, "POST", path, body);
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": "here" },
        "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.99" }] },
    });
    post("/api/v1/nodes", &node);
    // Both are made within a second, so that their names decide: `a-first` comes before `b-second`.
    let services = "/api/v1/namespaces/default/services";
    let first = post(services, &service("a-first", ""));
    let second = post(services, &service("b-second", ""));
    let ip = |object: &Value| object["spec"]["clusterIP"].as_str().expect("a cluster IP").to_owned();
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "b-second-1", "labels": { "kubernetes.io/service-name": "b-second" } },
        "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
        "endpoints": [{ "addresses": ["192.0.2.1"], "nodeName": "here" }],
    });
    post("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", &slice);

    let proxy = Command::new(env!("CARGO_BIN_EXE_knit"))
        .args(["proxy", "--backend", "print", "--node-name", "here"])
        .args(["--healthz-bind-address", "127.0.0.1:0", "--metrics-bind-address", "127.0.0.1:0"])
        .arg("--socket")
        .arg(folder.path().join("proxy.sock"))
        .arg("--kubeconfig")
        .arg(&kubeconfig)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("knit starts");
    let _proxy = Stop(proxy);

    let about_second = || {
        let events = request(api, "GET", "/apis/events.k8s.io/v1/events", &Value::Null);
        let events = events["items"].as_array().cloned().unwrap_or_default();
        events.into_iter().find(|e| e["regarding"]["name"] == "b-second")
    };
    eventually("an event on the younger Service", Duration::from_secs(60), || about_second().is_some());
    let event = about_second().expect("just seen");
    let note = event["note"].as_str().expect("a note");
    assert!(note.contains("spec.externalIPs") && note.contains("198.51.100.50:80"), "{note}");
    assert!(note.contains("default/a-first"), "{note}");
    assert_eq!(event["regarding"]["kind"], "Service");
    assert_eq!(event["type"], "Warning");

    let rows = Command::new(env!("CARGO_BIN_EXE_knit"))
        .args(["proxy", "get", "services", "-o", "json", "--node-name", "here", "--kubeconfig"])
        .arg(&kubeconfig)
        .output()
        .expect("knit runs");
    let rows: Value = serde_json::from_slice(&rows.stdout).expect("JSON");
    let addresses = |name: &str| -> Vec<String> {
        let rows = rows.as_array().expect("rows").iter().filter(|row| row["service"] == name);
        let frontends = rows.flat_map(|row| row["frontends"].as_array().cloned().unwrap_or_default());
        frontends.map(|f| f["address"].as_str().expect("an address").to_owned()).collect()
    };
    assert_eq!(addresses("default/a-first"), [format!("{}:80", ip(&first)), "198.51.100.50:80".to_owned()]);
    assert_eq!(addresses("default/b-second"), [format!("{}:80", ip(&second))]);
    runtime.block_on(server.shutdown());
}
