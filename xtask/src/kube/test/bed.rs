//! The bed itself: that it is the cluster that it says it is, without anything of Knit's.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;

/// Daemons that are stopped and started again serve again, and the cluster knows its node as before.
pub fn daemons_restart(bed: &Bed) -> Result<()> {
    let uid = |bed: &Bed| bed.kubectl(&["get", "node", "n1", "-o", "jsonpath={.metadata.uid}"]);
    let before = uid(bed)?;
    bed.restart_containerd("n1")?;
    bed.restart_kubelet("n1")?;
    bed.stop_api()?;
    ensure!(!bed.api_is_ready()?, "the API server was stopped, and answers");
    bed.start_api()?;
    ensure!(uid(bed)? == before, "node n1 is another one than before");
    // A kubelet that runs renews its Lease.
    let renewed = |bed: &Bed| {
        bed.kubectl(&["get", "lease", "-n", "kube-node-lease", "n1", "-o", "jsonpath={.spec.renewTime}"])
    };
    let old = renewed(bed)?;
    until(
        "the kubelet renews its Lease",
        Duration::from_secs(40),
        || Ok((renewed(bed)? != old).then_some(())),
    )
}

/// A server on one node, a client on the other: by address, by Service, by name.
pub fn pods_talk(bed: &Bed) -> Result<()> {
    let manifests = format!(
        "
apiVersion: v1
kind: Namespace
metadata: {{name: talk}}
---
apiVersion: v1
kind: Pod
metadata: {{name: server, namespace: talk, labels: {{app: server}}}}
spec:
  nodeName: n1
  containers:
  - name: agnhost
    image: {AGNHOST}
    args: [netexec, --http-port=8080]
    readinessProbe: {{httpGet: {{path: /healthz, port: 8080}}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {{name: server, namespace: talk}}
spec: {{selector: {{app: server}}, ports: [{{port: 80, targetPort: 8080}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: client, namespace: talk}}
spec:
  nodeName: n2
  containers:
  - {{name: agnhost, image: {AGNHOST}, args: [pause]}}
"
    );
    // A namespace's account is made a moment after the namespace.
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: talk}}";
    bed.apply(namespace)?;
    bed.kubectl(&["wait", "--for=create", "-n", "talk", "serviceaccount/default", "--timeout=30s"])?;
    bed.apply(&manifests)?;
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", "talk", "pod", "--all", "--timeout=90s"])?;
    let address = bed.kubectl(&["get", "pod", "-n", "talk", "server", "-o", "jsonpath={.status.podIP}"])?;
    for target in [format!("{address}:8080"), "server:80".into(), "server.talk.svc.cluster.local:80".into()] {
        let url = ["exec", "-n", "talk", "client", "--", "/agnhost", "connect", "--timeout=5s", &target];
        let mut last = String::new();
        // Rules and names of a Service follow its endpoints by a moment.
        let reached = until(&format!("{target} answers"), Duration::from_secs(30), || {
            let output = bed.kubectl_output(&url, None)?;
            last = String::from_utf8_lossy(&output.stderr).into_owned();
            Ok(output.status.success().then_some(()))
        });
        reached.map_err(|error| error.context(last))?;
    }
    bed.kubectl(&["delete", "namespace", "talk", "--timeout=60s"]).map(drop)
}
