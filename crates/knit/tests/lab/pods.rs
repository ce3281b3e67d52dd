//! Pods, who reaches them, and what becomes of them.

use crate::support::{Lab, TENANTS};

#[test]
fn tenants_with_the_same_addresses_reach_their_own_and_nobody_else() {
    let Some(lab) = Lab::up(TENANTS, &[]) else { return };
    for tenant in ["red", "blue"] {
        let other = if tenant == "red" { "blue" } else { "red" };
        for pod in ["web-1", "web-2"] {
            let address = lab.address(&format!("{tenant}/{pod}"));
            let to = format!("{address}:8080");
            let heard = lab
                .ask_once(&format!("{tenant}/client"), &to)
                .unwrap_or_else(|| panic!("{tenant}/{pod} is silent"));
            assert!(heard.starts_with(&format!("{tenant}/{pod} ")), "{heard}");
            // The other tenant reaches its own pod of that address, or nobody.
            if let Some(heard) = lab.ask(&format!("{other}/client"), &to) {
                assert!(heard.starts_with(&format!("{other}/")), "{other} heard {heard}");
            }
        }
        let service = lab.service(tenant, "web");
        let to = format!("{service}:80");
        let client = format!("{tenant}/client");
        let heard = lab.eventually("the Service answers", || lab.ask(&client, &to));
        assert!(heard.starts_with(&format!("{tenant}/web-")), "{heard}");
        assert_eq!(lab.ask(&format!("{other}/client"), &to), None, "{other} reached a Service of {tenant}");
    }
}

#[test]
fn a_deleted_pod_is_gone_and_a_deployment_makes_another() {
    let manifests = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: main, image: knit-lab, readinessProbe: {tcpSocket: {port: 8080}}}]}
";
    let Some(lab) = Lab::up(manifests, &[]) else { return };
    let names = || -> Vec<(String, bool)> {
        let status = lab.status();
        let pods = status["pods"].as_array().cloned().unwrap_or_default();
        pods.iter().map(|p| (p["name"].as_str().unwrap_or_default().to_owned(), p["ready"] == true)).collect()
    };
    let before = names();
    assert_eq!(before.len(), 3, "{before:?}");
    let first = before[0].0.clone();
    let (code, answer) = lab.request("DELETE", &format!("/api/v1/namespaces/default/pods/{first}"));
    assert_eq!(code, 200, "{answer}");
    lab.eventually("another pod takes its place", || {
        let now = names();
        (now.len() == 3 && now.iter().all(|(name, ready)| *ready && *name != first)).then_some(())
    });
}
