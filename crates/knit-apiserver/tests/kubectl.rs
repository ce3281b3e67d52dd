//! The real `kubectl` against the embedded API: the one that `KNIT_KUBECTL` names, or the one on the path.
//! Skipped, and said so, where there is none.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::Arc;

use knit_apiserver::exec::{Exec, pipe_all};
use knit_apiserver::{Config, Handle, Server, StoreOptions};
use knit_kernel::testing::skip;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

struct Kubectl {
    server: Handle,
    kubeconfig: tempfile::NamedTempFile,
    home: tempfile::TempDir,
    logs: tempfile::TempDir,
}

/// Runs what is for a pod right here.
#[derive(Debug)]
struct Here;

impl Exec for Here {
    fn start(&self, _: &str, _: &str, _: &str, line: &[String]) -> Result<Child, String> {
        let mut command = Command::new(&line[0]);
        pipe_all(command.args(&line[1..]).kill_on_drop(true));
        command.spawn().map_err(|error| format!("{}: {error}", line[0]))
    }
}

fn program() -> std::ffi::OsString {
    std::env::var_os("KNIT_KUBECTL").unwrap_or_else(|| "kubectl".into())
}

impl Kubectl {
    /// None, with a printed reason, where there is no kubectl.
    async fn start() -> Option<Self> {
        let version = Command::new(program()).args(["version", "--client"]).output().await;
        match version {
            Ok(output) if output.status.success() => println!("{}", String::from_utf8_lossy(&output.stdout)),
            _ => {
                skip("no kubectl is on the path, and KNIT_KUBECTL names none");
                return None;
            }
        }
        let store = StoreOptions::with_crds(&knit_api::crds()).unwrap();
        let logs = tempfile::tempdir().unwrap();
        let exec: Arc<dyn Exec> = Arc::new(Here);
        let config =
            Config { store, logs: Some(logs.path().to_owned()), exec: Some(exec), ..Config::default() };
        let server = Server::start(config).await.unwrap();
        let mut kubeconfig = tempfile::NamedTempFile::new().unwrap();
        kubeconfig.write_all(server.kubeconfig().as_bytes()).unwrap();
        Some(Self { server, kubeconfig, home: tempfile::tempdir().unwrap(), logs })
    }

    /// Runs kubectl with words separated by blanks; its output, both streams, and whether it succeeded.
    async fn run(&self, words: &str, input: &str) -> (String, bool) {
        let mut child = Command::new(program())
            .arg("--kubeconfig")
            .arg(self.kubeconfig.path())
            // A blank that is part of a word is written as one that does not break.
            .args(words.split(' ').map(|word| word.replace('\u{a0}', " ")))
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
    let Some(k) = Kubectl::start().await else { return };
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
    assert!(text.contains("host bits set"), "{text}");
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

    pods(&k).await;

    let status = concat!(
        r#"{"status":{"conditions":[{"type":"Ready","status":"True","reason":"Made","message":"","#,
        r#""lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#
    );
    k.ok(&format!("patch network blue --subresource status --type merge -p {status}"), "").await;
    k.ok("wait network blue --for=condition=Ready --timeout=10s", "").await;
    k.ok("delete network blue", "").await;
    k.ok("delete namespace team", "").await;
    assert!(k.refused("get namespace team", "").await.contains("NotFound"));
    k.server.shutdown().await;
}

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: team}
spec: {nodeName: node-1, containers: [{name: a, image: x}, {name: b, image: x}]}
---
apiVersion: v1
kind: Event
metadata: {name: p.1, namespace: team}
involvedObject: {apiVersion: v1, kind: Pod, namespace: team, name: p, uid: UID}
type: Warning
reason: FailedCreatePodSandBox
message: no address is left
count: 3
firstTimestamp: 2026-01-01T00:00:00Z
lastTimestamp: 2026-01-01T00:00:00Z
source: {component: kubelet, host: node-1}
";

/// A pod's events and its logs.
async fn pods(k: &Kubectl) {
    let (pod, event) = POD.split_once("---").unwrap();
    k.ok("create -f -", pod).await;
    let kind = k.server.store().kind("v1", "Pod").unwrap();
    let pod = k.server.store().get(&kind, "team", "p").unwrap();
    k.ok("create -f -", &event.replace("UID", pod.uid())).await;
    let text = k.ok("-n team describe pod p", "").await;
    assert!(text.contains("FailedCreatePodSandBox") && text.contains("no address is left"), "{text}");
    assert!(text.contains("x3 over"), "{text}");
    let text = k.ok("-n team get events --field-selector involvedObject.name=p", "").await;
    assert!(text.contains("no address is left"), "{text}");

    let file = knit_apiserver::log::file(k.logs.path(), &pod, "b");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "one\ntwo\nthree\n").unwrap();
    assert_eq!(k.ok("-n team logs p -c b", "").await, "one\ntwo\nthree\n");
    assert_eq!(k.ok("-n team logs p -c b --tail=1", "").await, "three\n");
    assert_eq!(k.ok("-n team logs p -c a", "").await, "", "it has printed nothing");
    let text = k.refused("-n team logs p -c c", "").await;
    assert!(text.contains("container c is not valid for pod p"), "{text}");
    assert!(k.refused("-n team logs none", "").await.contains("NotFound"));
    assert_eq!(k.ok("-n team exec p -c b -- echo hello", "").await, "hello\n");
    assert_eq!(k.ok("-n team exec -i p -c b -- cat", "in and out").await, "in and out");
    let (text, good) = k.run("-n team exec p -c b -- sh -c exit\u{a0}7", "").await;
    assert!(!good && text.contains("exit code 7"), "{text}");
    let text = k.refused("-n team exec p -c b -- no-such-program", "").await;
    assert!(text.contains("no-such-program"), "{text}");
    // Until the pod is through.
    let end = async {
        let mut grown = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
        grown.write_all(b"four\n").unwrap();
        k.ok(
            r#"-n team patch pod p --subresource status --type merge -p {"status":{"phase":"Succeeded"}}"#,
            "",
        )
        .await;
    };
    let (text, _) = tokio::join!(k.ok("-n team logs p -c b -f", ""), end);
    assert_eq!(text, "one\ntwo\nthree\nfour\n");
}
