//! What people may get wrong, or mean badly: each is told in words, the pod waits, and nobody else notices.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::pods;
use super::support::{self, Overlay};
use super::talk::none_lost;
use super::talkers::Talkers;
use crate::kube::bed::Bed;
use crate::kube::images::PAUSE;
use crate::kube::wait::until;

const LIMIT: Duration = Duration::from_secs(60);

/// Annotations of pods that cannot start as they are, and words of the events that say why.
fn annotations() -> Vec<(&'static str, &'static str, String, &'static str)> {
    let networks = "knit.dev/networks";
    vec![
        ("missing", networks, "later".into(), "Network later does not exist"),
        ("denied", networks, "closed".into(), "may not use Network closed"),
        ("denied-primary", "knit.dev/primary", "closed".into(), "may not use Network closed"),
        ("path", networks, "../../etc/passwd".into(), "Networks are not namespaced"),
        ("path-primary", "knit.dev/primary", "..".into(), "is not a valid Network name"),
        ("huge", networks, "a".repeat(200_000), "200000 bytes long"),
        ("many", networks, vec!["later"; 40].join(","), "it names 40 Networks"),
        ("control", networks, "later\u{1}\u{1b}[31m".into(), "control characters"),
        ("no-list", networks, "[{\"name\": 7}]".into(), "not a JSON list of Networks"),
        (
            "foreign-address",
            networks,
            json!([{ "name": "open", "ips": ["203.0.113.9"] }]).to_string(),
            "203.0.113.9",
        ),
        ("refused", networks, "over-services".into(), "is not accepted"),
    ]
}

/// Networks that pass the schema's rules and cannot be: name, spec, reason and words of the condition.
fn networks() -> Vec<(&'static str, Value, &'static str, &'static str)> {
    let subnet = |cidr: &str| json!([{ "cidr": cidr }]);
    vec![
        (
            "over-services",
            json!({ "subnets": subnet("10.96.128.0/20") }),
            "SubnetOverlap",
            "overlaps the service range",
        ),
        ("over-nodes", json!({ "subnets": subnet("10.250.0.0/16") }), "SubnetOverlap", "the address of node"),
        ("over-pods", json!({ "subnets": subnet("10.244.0.0/16") }), "SubnetOverlap", "the podCIDR of node"),
        (
            "no-class",
            json!({ "subnets": subnet("10.91.0.0/16"), "class": "nobody" }),
            "ClassNotFound",
            "NetworkClass nobody does not exist",
        ),
        (
            "second-primary",
            json!({ "subnets": subnet("10.92.0.0/16"), "primaryFor": { "matchLabels": { "team": "bad" } } }),
            "PrimaryConflict",
            "namespace bad-primary already has Network first-primary",
        ),
    ]
}

/// NetworkAttachments that cannot be: name, pod, Network, reason and words of the condition.
const ATTACHMENTS: [(&str, &str, &str, &str, &str); 4] = [
    ("no-pod", "nobody", "open", "PodNotFound", "no node runs pod nobody"),
    ("not-allowed", "good", "closed", "NotAllowed", "may not use Network closed"),
    ("no-network", "good", "nowhere", "NetworkNotFound", "Network nowhere does not exist"),
    ("not-accepted", "good", "over-nodes", "AttachFailed", "is not accepted"),
];

pub fn told(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    let talkers = Talkers::start(bed, "bad-talk")?;
    support::namespace(bed, "bad")?;
    support::namespace(bed, "bad-primary")?;
    bed.kubectl(&["label", "namespace", "bad-primary", "team=bad"])?;
    none_lost(&talkers.client, &talkers.flows(), || told_all(bed))?;
    talkers.not_hurt(bed)?;
    for namespace in ["bad", "bad-primary", "bad-talk"] {
        pods::delete_namespace(bed, namespace)?;
    }
    Ok(())
}

fn told_all(bed: &Bed) -> Result<()> {
    network(bed, "closed", &json!({ "subnets": [{ "cidr": "10.88.0.0/16" }] }))?;
    let all = json!({ "from": "All" });
    network(bed, "open", &json!({ "subnets": [{ "cidr": "10.89.0.0/16" }], "allowedNamespaces": all }))?;
    let bad = json!({ "matchLabels": { "team": "bad" } });
    network(bed, "first-primary", &json!({ "subnets": [{ "cidr": "10.90.0.0/16" }], "primaryFor": bad }))?;
    bed.kubectl(&[
        "wait",
        "--for=condition=Accepted",
        "network/first-primary",
        "network/open",
        "--timeout=30s",
    ])?;
    for (name, spec, reason, words) in networks() {
        network(bed, name, &spec)?;
        condition(bed, &["network", name], "Accepted", reason, words)?;
    }
    for (name, annotation, value, _) in annotations() {
        // `apply` would write a long one twice, which is more than the API server takes.
        bed.kubectl_with(&["create", "-f", "-"], Some(&pod(name, &json!({ annotation: value }))))?;
    }
    bed.apply(&pod("good", &json!({ "knit.dev/networks": "open" })))?;
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", "bad", "pod/good", "--timeout=60s"])?;
    for (name, pod, network, _, _) in ATTACHMENTS {
        let object = json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
            "metadata": { "name": name, "namespace": "bad" }, "spec": { "pod": pod, "network": network },
        });
        bed.apply(&object.to_string())?;
    }
    for (name, _, _, words) in annotations() {
        event(bed, "bad", name, words)?;
        let pod = pods::pod(bed, "bad", name)?;
        ensure!(pod.address.is_none() && !pod.ready, "{name} started without what it asked for: {pod:?}");
    }
    for (name, _, _, reason, words) in ATTACHMENTS {
        condition(bed, &["networkattachment", "-n", "bad", name], "Ready", reason, words)?;
    }
    // What was only missing comes, and the pod with it.
    network(bed, "later", &json!({ "subnets": [{ "cidr": "10.93.0.0/16" }], "allowedNamespaces": all }))?;
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", "bad", "pod/missing", "--timeout=90s"])?;
    // And so for an object: its pod comes, and the agent takes over from the controller.
    bed.apply(&pod("nobody", &json!({})))?;
    let wanted = ["wait", "--for=condition=Ready", "-n", "bad", "networkattachment/no-pod", "--timeout=60s"];
    bed.kubectl(&wanted).map_err(|error| error.context(support::logs(bed)))?;

    bed.kubectl(&["delete", "networkattachments", "-n", "bad", "--all", "--timeout=60s"])?;
    bed.kubectl(&["delete", "pods", "-n", "bad", "--all", "--timeout=60s"])?;
    let mut names = vec!["closed", "open", "later", "first-primary"];
    names.extend(networks().iter().map(|(name, ..)| *name));
    let delete = [&["delete", "network", "--timeout=60s"][..], &names].concat();
    bed.kubectl(&delete).map(drop)
}

fn network(bed: &Bed, name: &str, spec: &Value) -> Result<()> {
    let mut spec = spec.clone();
    spec["topology"] = "Layer3".into();
    let object = json!({ "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": { "name": name },
        "spec": spec });
    bed.apply(&object.to_string()).map(drop)
}

fn pod(name: &str, annotations: &Value) -> String {
    let object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "bad", "annotations": annotations },
        "spec": {
            "nodeName": "n1", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false,
            "containers": [{ "name": "pause", "image": PAUSE }],
        },
    });
    format!("{object}\n")
}

/// Waits for an event of a pod that has these words in it, and nothing that a terminal could be fooled by.
pub fn event(bed: &Bed, namespace: &str, pod: &str, words: &str) -> Result<()> {
    let selector = format!("involvedObject.name={pod}");
    let mut said = Vec::new();
    let told = until(&format!("an event of {pod} says {words:?}"), LIMIT, || {
        let list = bed.kubectl_json(&["get", "events", "-n", namespace, "--field-selector", &selector])?;
        let items = list["items"].as_array().context("a list of events")?;
        said = items.iter().filter_map(|event| event["message"].as_str().map(str::to_owned)).collect();
        Ok(said.iter().any(|message| message.contains(words)).then_some(()))
    });
    told.with_context(|| format!("its events: {said:?}"))?;
    let fooling = |message: &&String| message.chars().any(|c| c.is_control() && c != '\n');
    ensure!(!said.iter().any(|message| fooling(&message)), "control characters in events of {pod}: {said:?}");
    Ok(())
}

/// Waits for a condition that is False for this reason, in these words.
fn condition(bed: &Bed, object: &[&str], kind: &str, reason: &str, words: &str) -> Result<()> {
    let mut last = String::new();
    let told = until(&format!("{object:?} says {reason}: {words:?}"), LIMIT, || {
        let object = bed.kubectl_json(&[&["get"], object].concat())?;
        let conditions = object["status"]["conditions"].as_array();
        let found = conditions.into_iter().flatten().find(|condition| condition["type"] == kind);
        last = found.map(Value::to_string).unwrap_or_default();
        let said = |c: &Value| {
            c["status"] == "False"
                && c["reason"] == reason
                && c["message"].as_str().is_some_and(|m| m.contains(words))
        };
        Ok(found.is_some_and(said).then_some(()))
    });
    told.with_context(|| format!("it says {last}"))
}
