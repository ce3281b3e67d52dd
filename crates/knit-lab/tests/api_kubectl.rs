//! The real `kubectl` against the embedded API. Skipped, and said so, where kubectl is not installed.

use std::io::Write as _;
use std::process::Stdio;

use knit_lab::api::{Config, Handle, Server, StoreOptions};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

struct Kubectl {
    server: Handle,
    kubeconfig: tempfile::NamedTempFile,
    home: tempfile::TempDir,
}

impl Kubectl {
    /// None, with a printed reason, where there is no kubectl.
    async fn start() -> Option<Self> {
        let version = Command::new("kubectl").args(["version", "--client"]).output().await;
        if !version.is_ok_and(|output| output.status.success()) {
            return None;
        }
        let store = StoreOptions::with_crds(&knit_api::crds()).unwrap();
        let server = Server::start(Config { store, ..Config::default() }).await.unwrap();
        let mut kubeconfig = tempfile::NamedTempFile::new().unwrap();
        kubeconfig.write_all(server.kubeconfig().as_bytes()).unwrap();
        Some(Self { server, kubeconfig, home: tempfile::tempdir().unwrap() })
    }

    /// Runs kubectl with words separated by blanks; its output, both streams, and whether it succeeded.
    async fn run(&self, words: &str, input: &str) -> (String, bool) {
        let mut child = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(self.kubeconfig.path())
            .args(words.split_whitespace())
            .env("HOME", self.home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        let text =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        (text, output.status.success())
    }

    async fn ok(&self, words: &str, input: &str) -> String {
        let (text, success) = self.run(words, input).await;
        assert!(success, "kubectl {words}: {text}");
        text
    }

    async fn refused(&self, words: &str, input: &str) -> String {
        let (text, success) = self.run(words, input).await;
        assert!(!success, "kubectl {words} must fail: {text}");
        text
    }
}

const WEB: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: team}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - {name: a, image: 'web:1', ports: [{containerPort: 80}]}
      - {name: b, image: 'web:1'}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: team}
spec: {selector: {app: web}, type: NodePort, ports: [{port: 80}]}
";

const NETWORK: &str = "
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: blue}
spec: {topology: Layer3, subnets: [{cidr: 10.77.0.0/16}]}
";

#[tokio::test]
async fn kubectl_works() {
    let Some(k) = Kubectl::start().await else {
        println!("skipped: kubectl is not installed");
        return;
    };
    assert!(k.ok("get namespaces", "").await.contains("kube-system"));
    assert!(k.ok("create namespace team", "").await.contains("namespace/team created"));
    k.ok("-n team create configmap c --from-literal=a=b", "").await;
    k.ok("-n team create secret generic s --from-literal=p=q", "").await;
    k.ok("-n team create deployment d --image=x:1 --replicas=0 --port=80", "").await;

    let text = k.ok("apply -f -", WEB).await;
    assert!(text.contains("deployment.apps/web created") && text.contains("service/web created"), "{text}");
    let text = k.ok("apply -f -", WEB).await;
    assert!(text.contains("deployment.apps/web unchanged"), "{text}");
    k.ok("apply -f -", &WEB.replace("      - {name: b, image: 'web:1'}\n", "")).await;
    let names = "-n team get deployment web -o jsonpath={.spec.template.spec.containers[*].name}";
    assert_eq!(
        k.ok(names, "").await.split("WARNING").next().unwrap().trim(),
        "a",
        "a container taken from the file is taken from the object"
    );

    k.ok("-n team set image deployment/web a=web:2", "").await;
    let text = k.refused("apply --server-side -f -", WEB).await;
    assert!(text.contains("conflict with \"kubectl-set\""), "{text}");
    k.ok("apply --server-side --force-conflicts -f -", WEB).await;
    k.ok("-n team scale deployment web --replicas=3", "").await;
    assert!(k.ok("-n team get deployments", "").await.contains("0/3"));

    let text = k.refused("apply -f -", &NETWORK.replace("subnets", "subnetz")).await;
    assert!(text.contains("unknown field \"spec.subnetz\""), "{text}");
    let text = k.refused("apply -f -", &NETWORK.replace("10.77.0.0/16", "10.77.0.1/16")).await;
    assert!(text.contains("bits set behind the prefix"), "{text}");
    k.ok("apply -f -", NETWORK).await;
    let text = k.ok("get networks,services -A", "").await;
    assert!(text.contains("TOPOLOGY") && text.contains("10.77.0.0/16"), "{text}");
    assert!(k.ok("get knet -o wide", "").await.contains("SUBNET-2"));
    assert!(k.ok("describe network blue", "").await.contains("Cidr:"));
    assert!(k.ok("explain network.spec.subnets", "").await.contains("cidr"));
    assert!(k.ok("explain pod.spec.containers", "").await.contains("image"));
    assert!(k.ok("-n team describe service web", "").await.contains("NodePort"));
    assert!(k.ok("-n team describe deployment web", "").await.contains("3 desired"));
    assert!(k.ok("api-resources", "").await.contains("addressblocks"));

    let status = r#"{"status":{"conditions":[{"type":"Ready","status":"True","reason":"Made","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#;
    k.ok(&format!("patch network blue --subresource status --type merge -p {status}"), "").await;
    k.ok("wait network blue --for=condition=Ready --timeout=10s", "").await;
    k.ok("delete network blue", "").await;
    k.ok("delete namespace team", "").await;
    assert!(k.refused("get namespace team", "").await.contains("NotFound"));
    k.server.shutdown().await;
}
