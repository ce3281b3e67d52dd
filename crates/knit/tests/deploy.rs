//! The manifests in deploy/ against the code: they can be read, they carry this version, their commands
//! exist, and their roles allow what the parts do and nothing beyond. With kubectl at hand, what the overlays
//! come to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use knit_kernel::testing::skip;
use serde_json::Value;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// All documents of a YAML text.
fn documents(text: &str, place: &str) -> Vec<Value> {
    let mut documents = vec![String::new()];
    for line in text.lines() {
        if line == "---" {
            documents.push(String::new());
        } else {
            let last = documents.last_mut().expect("there is one");
            last.push_str(line);
            last.push('\n');
        }
    }
    documents
        .iter()
        .map(|text| serde_saphyr::from_str::<Value>(text).unwrap_or_else(|e| panic!("{place}: {e}")))
        .filter(|value| !value.is_null())
        .collect()
}

/// Every object of every file.
fn objects() -> Vec<(String, Value)> {
    fn walk(folder: &Path, found: &mut Vec<(String, Value)>) {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.sort();
        for path in paths {
            // Examples are a user's objects, not Knit's.
            if path.ends_with("deploy/examples") {
                continue;
            }
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "yaml") {
                let place = path.display().to_string();
                let text = std::fs::read_to_string(&path).expect("a file");
                found.extend(documents(&text, &place).into_iter().map(|d| (place.clone(), d)));
            }
        }
    }
    let mut found = Vec::new();
    walk(&deploy(), &mut found);
    found
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn is_kustomize(object: &Value) -> bool {
    text(object, "/apiVersion").starts_with("kustomize.config.k8s.io/")
}

fn containers(object: &Value) -> Vec<&Value> {
    let list = |name: &str| object.pointer(&format!("/spec/template/spec/{name}")).and_then(Value::as_array);
    ["initContainers", "containers"].iter().filter_map(|name| list(name)).flatten().collect()
}

#[test]
fn every_object_can_be_read_and_has_a_name() {
    let objects = objects();
    assert!(objects.len() > 20, "{}", objects.len());
    for (place, object) in &objects {
        assert!(!text(object, "/apiVersion").is_empty() && !text(object, "/kind").is_empty(), "{place}");
        assert!(is_kustomize(object) || !text(object, "/metadata/name").is_empty(), "{place}");
    }
}

#[test]
fn version_and_image_are_those_of_this_build() {
    let path = deploy().join("components/version/kustomization.yaml");
    let component = &documents(&std::fs::read_to_string(path).expect("a file"), "the component")[0];
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(text(component, "/labels/0/pairs/app.kubernetes.io~1version"), version);
    assert_eq!(text(component, "/images/0/newTag"), version);
    // A name that nobody can own: a privileged container runs what answers for it.
    assert_eq!(text(component, "/images/0/newName"), "localhost/knit");
}

#[test]
fn every_container_runs_a_command_that_exists() {
    let mut seen = BTreeSet::new();
    let overlays: Vec<Value> = objects()
        .into_iter()
        .flat_map(|(place, object)| {
            let patched = object.pointer("/patches").and_then(Value::as_array).cloned().unwrap_or_default();
            let patched = patched.iter().flat_map(|patch| {
                let patch: Value =
                    serde_saphyr::from_str(text(patch, "/patch")).unwrap_or_else(|e| panic!("{place}: {e}"));
                let operations = patch.as_array().cloned().unwrap_or_default();
                operations
                    .into_iter()
                    .filter(|o| text(o, "/path").ends_with("/args"))
                    .map(|o| o["value"].clone())
            });
            let own: Vec<Value> = containers(&object)
                .into_iter()
                .map(|container| {
                    assert_eq!(text(container, "/image"), "knit", "{place}");
                    container["args"].clone()
                })
                .collect();
            own.into_iter().chain(patched).collect::<Vec<_>>()
        })
        .collect();
    for args in &overlays {
        let args = args.as_array().expect("arguments").iter().map(|a| a.as_str().expect("text"));
        // As kubelet fills it in, for a node with IPv6 first.
        let args: Vec<String> = args.map(|a| a.replace("$(KNIT_HOST_IP)", "fd00::1")).collect();
        seen.insert(args[0].clone());
        // Help is printed only once everything before it was understood.
        let output =
            Command::new(env!("CARGO_BIN_EXE_knit")).args(&args).arg("--help").output().expect("knit runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.is_empty(), "knit {}: {error}", args.join(" "));
    }
    assert_eq!(Vec::from_iter(seen), ["controller", "install", "node", "proxy", "uninstall"]);
}

#[test]
fn health_and_numbers_are_on_one_address_of_a_node_and_probed_there() {
    let mut found = 0;
    for (place, object) in objects() {
        for container in containers(&object) {
            let args = container["args"].as_array().cloned().unwrap_or_default();
            let Some(listen) =
                args.iter().filter_map(Value::as_str).find(|a| a.starts_with("--metrics-addr="))
            else {
                continue;
            };
            found += 1;
            assert!(listen.starts_with("--metrics-addr=$(KNIT_HOST_IP):"), "{place}: {listen}");
            let env = container["env"].as_array().cloned().unwrap_or_default();
            let host = env.iter().find(|e| e["name"] == "KNIT_HOST_IP").expect("the node's address");
            assert_eq!(text(host, "/valueFrom/fieldRef/fieldPath"), "status.hostIP", "{place}");
            for probe in ["livenessProbe", "readinessProbe"] {
                assert!(container[probe]["httpGet"]["port"].is_number(), "{place}: {probe}");
                assert!(
                    container[probe]["httpGet"]["host"].is_null(),
                    "{place}: it is not on another address"
                );
            }
        }
    }
    assert_eq!(found, 2, "the agent and the controller");
}

/// `group resource verb`, of everything that roles with this name allow.
fn allowed(role: &str) -> BTreeSet<String> {
    let mut allowed = BTreeSet::new();
    for (_, object) in objects() {
        if !matches!(text(&object, "/kind"), "Role" | "ClusterRole")
            || text(&object, "/metadata/name") != role
        {
            continue;
        }
        let strings = |value: &Value| -> Vec<String> {
            let list = value.as_array().cloned().unwrap_or_default();
            list.iter().map(|v| v.as_str().expect("text").to_owned()).collect()
        };
        for rule in object["rules"].as_array().expect("rules") {
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    for verb in strings(&rule["verbs"]) {
                        allowed.insert(format!("{group} {resource} {verb}").trim().to_owned());
                    }
                }
            }
        }
    }
    allowed
}

fn expected(lines: &[(&str, &[&str], &[&str])]) -> BTreeSet<String> {
    let mut expected = BTreeSet::new();
    for (group, resources, verbs) in lines {
        for resource in *resources {
            for verb in *verbs {
                expected.insert(format!("{group} {resource} {verb}").trim().to_owned());
            }
        }
    }
    expected
}

#[test]
fn roles_allow_what_the_parts_do_and_nothing_else() {
    const READ: &[&str] = &["list", "watch"];
    const CLUSTER_POLICIES: &[&str] =
        &["clusternetworkpolicies", "adminnetworkpolicies", "baselineadminnetworkpolicies"];
    const CLUSTER_POLICY_STATUSES: &[&str] = &[
        "clusternetworkpolicies/status",
        "adminnetworkpolicies/status",
        "baselineadminnetworkpolicies/status",
    ];
    let agent = expected(&[
        ("knit.dev", &["networks", "networkclasses", "addressblocks", "networkattachments"], READ),
        ("knit.dev", &["nodeslices", "blockslices"], READ),
        ("", &["namespaces", "nodes", "pods", "services"], READ),
        ("networking.k8s.io", &["servicecidrs", "networkpolicies"], READ),
        ("policy.networking.k8s.io", CLUSTER_POLICIES, READ),
        ("k8s.cni.cncf.io", &["multi-networkpolicies"], READ),
        ("knit.dev", &["policypeerslices"], READ),
        ("discovery.k8s.io", &["endpointslices"], READ),
        // Server-side apply makes what is missing.
        ("knit.dev", &["nodenetworks", "networkattachments"], &["create", "patch"]),
        ("knit.dev", &["nodenetworks/status", "networkattachments/status"], &["patch"]),
        ("knit.dev", &["networkattachments"], &["get", "delete"]),
        ("", &["nodes/status"], &["patch"]),
        ("events.k8s.io", &["events"], &["create", "patch"]),
        ("coordination.k8s.io", &["leases"], &["create", "patch"]),
    ]);
    let controller = expected(&[
        ("knit.dev", &["networkclasses", "networks"], &["get", "list", "watch", "create", "patch"]),
        ("knit.dev", &["networkclasses/status", "networks/status", "networkattachments/status"], &["patch"]),
        ("knit.dev", &["addressblocks"], &["list", "watch", "create", "patch", "delete"]),
        ("knit.dev", &["nodeslices", "blockslices"], &["list", "watch", "create", "update", "delete"]),
        ("knit.dev", &["nodenetworks"], READ),
        ("knit.dev", &["networkattachments"], &["list", "watch", "patch", "delete"]),
        ("", &["namespaces", "pods"], READ),
        ("", &["nodes"], &["list", "watch", "patch"]),
        ("networking.k8s.io", &["servicecidrs", "networkpolicies"], READ),
        ("policy.networking.k8s.io", CLUSTER_POLICIES, READ),
        ("k8s.cni.cncf.io", &["multi-networkpolicies"], READ),
        ("policy.networking.k8s.io", CLUSTER_POLICY_STATUSES, &["patch"]),
        // Server-side apply makes what is missing.
        ("knit.dev", &["policypeerslices"], &["list", "watch", "create", "patch", "delete"]),
        ("coordination.k8s.io", &["leases"], &["get", "list", "watch", "create", "update"]),
        ("events.k8s.io", &["events"], &["create", "patch"]),
    ]);
    let proxy = expected(&[
        ("", &["services", "nodes"], READ),
        ("discovery.k8s.io", &["endpointslices"], READ),
        ("networking.k8s.io", &["servicecidrs"], READ),
        ("events.k8s.io", &["events"], &["create", "patch"]),
    ]);
    let uninstall = expected(&[
        ("knit.dev", &["networks", "networkattachments"], &["list", "patch"]),
        ("", &["nodes"], &["list", "patch"]),
        ("coordination.k8s.io", &["leases"], &["get"]),
    ]);
    // Where claims are served.
    let agent_claims = expected(&[
        ("resource.k8s.io", &["resourceclaims"], &["get"]),
        ("resource.k8s.io", &["resourceclaims/status"], &["patch"]),
        ("resource.k8s.io", &["resourceclaims/driver"], &["associated-node:patch"]),
    ]);
    let controller_claims = expected(&[(
        "resource.k8s.io",
        &["resourceslices", "deviceclasses"],
        &["list", "create", "patch", "delete"],
    )]);
    for (role, expected) in [
        ("knit-node", agent),
        ("knit-controller", controller),
        ("knit-proxy", proxy),
        ("knit-uninstall", uninstall),
        ("knit-node-claims", agent_claims),
        ("knit-controller-claims", controller_claims),
    ] {
        assert_eq!(allowed(role), expected, "{role}");
    }
}

#[test]
fn no_container_is_pulled_and_none_has_more_than_it_needs() {
    for (place, object) in objects() {
        for container in containers(&object) {
            let name = format!("{place}: {}", text(container, "/name"));
            // On a node to which nobody brought the image, a pull asks whoever answers for its name.
            assert_eq!(text(container, "/imagePullPolicy"), "Never", "{name}");
            let security = &container["securityContext"];
            if security["privileged"] == true {
                // The API server allows Bidirectional mounts to privileged containers only.
                let mounts = container["volumeMounts"].as_array().cloned().unwrap_or_default();
                let both_ways = mounts.iter().any(|m| text(m, "/mountPropagation") == "Bidirectional");
                assert!(both_ways, "{name} needs not be privileged");
                continue;
            }
            assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(security["capabilities"]["drop"], serde_json::json!(["ALL"]), "{name}");
            assert_eq!(text(security, "/seccompProfile/type"), "RuntimeDefault", "{name}");
        }
    }
}

#[test]
fn policies_cover_all_that_an_agent_may_write() {
    let writes = ["create", "update", "patch", "delete", "deletecollection"];
    let written: BTreeSet<String> = allowed("knit-node")
        .into_iter()
        .chain(allowed("knit-node-claims"))
        .filter_map(|line| {
            let (what, verb) = line.rsplit_once(' ')?;
            writes.contains(&verb).then(|| what.to_owned())
        })
        .collect();
    let mut covered = BTreeSet::new();
    let mut others: BTreeSet<String> = BTreeSet::new();
    let mut bound = BTreeSet::new();
    for (place, object) in objects() {
        if text(&object, "/kind") == "ValidatingAdmissionPolicyBinding" {
            assert_eq!(object["spec"]["validationActions"], serde_json::json!(["Deny"]), "{place}");
            bound.insert(text(&object, "/spec/policyName").to_owned());
        }
        if text(&object, "/kind") != "ValidatingAdmissionPolicy" {
            continue;
        }
        assert_eq!(text(&object, "/spec/failurePolicy"), "Fail", "{place}");
        // What nobody may write, whoever it is: claim_parameters.rs.
        let Some(conditions) = object["spec"]["matchConditions"].as_array() else {
            assert_eq!(text(&object, "/metadata/name"), "knit-claim-parameters", "{place}");
            others.insert(text(&object, "/metadata/name").to_owned());
            continue;
        };
        if conditions.iter().all(|condition| text(condition, "/name") != "by-an-agent") {
            // What others may not do to what an agent wrote.
            assert_eq!(text(&object, "/spec/matchConditions/0/name"), "not-by-an-agent", "{place}");
            others.insert(text(&object, "/metadata/name").to_owned());
            continue;
        }
        for rule in object["spec"]["matchConstraints"]["resourceRules"].as_array().expect("rules") {
            for resource in rule["resources"].as_array().expect("resources") {
                let group = rule["apiGroups"][0].as_str().expect("a group");
                let resource = resource.as_str().expect("a resource");
                covered.insert((text(&object, "/metadata/name").to_owned(), format!("{group} {resource}")));
            }
        }
    }
    for what in &written {
        let by = covered.iter().filter(|(policy, covers)| covers.trim() == what && bound.contains(policy));
        assert_eq!(by.count(), 1, "an agent may write {what}, and no policy says of which node");
    }
    assert!(!others.is_empty() && others.is_subset(&bound), "{others:?} of {bound:?} are in force");
}

#[test]
fn the_agents_container_sees_neither_of_the_runtimes_folders() {
    let objects = objects();
    let (_, daemon_set) = objects
        .iter()
        .find(|(_, o)| text(o, "/kind") == "DaemonSet" && text(o, "/metadata/name") == "knit-node")
        .expect("the agent");
    let mounts = |container: &Value| -> Vec<String> {
        let mounts = container["volumeMounts"].as_array().expect("mounts");
        mounts.iter().map(|m| text(m, "/mountPath").to_owned()).collect()
    };
    assert_eq!(
        mounts(&daemon_set["spec"]["template"]["spec"]["initContainers"][0]),
        ["/opt/cni/bin", "/etc/cni/net.d"]
    );
    assert_eq!(
        mounts(&daemon_set["spec"]["template"]["spec"]["containers"][0]),
        ["/run/knit", "/var/lib/knit", "/run/netns"]
    );
}

/// The API server refuses a level whose hands cannot be dealt out of 60 random bits, or are larger than its
/// deck.
#[test]
fn a_priority_level_was_refused_for_the_size_of_its_hands() {
    let levels =
        objects().into_iter().filter(|(_, object)| text(object, "/kind") == "PriorityLevelConfiguration");
    let mut seen = 0;
    for (place, level) in levels {
        let queuing = &level["spec"]["limited"]["limitResponse"]["queuing"];
        let number = |field: &str| queuing[field].as_u64().expect("a number");
        let (queues, hand) = (number("queues"), number("handSize"));
        assert!(hand <= queues, "{place}: a hand of {hand} of {queues} queues");
        let product = (0..hand).fold(1_f64, |product, dealt| product * (queues - dealt) as f64);
        assert!(product.log2() <= 60.0, "{place}: a hand of {hand} of {queues} queues");
        seen += 1;
    }
    assert!(seen >= 2, "only {seen} levels were found");
}

#[test]
fn no_part_waits_among_the_tenants_when_the_api_server_is_busy() {
    let objects = objects();
    let of_kind = |kind: &str| {
        let base = |place: &String| place.contains("deploy/base/");
        let found = objects.iter().filter(|(place, object)| base(place) && text(object, "/kind") == kind);
        found.map(|(_, object)| object).collect::<Vec<_>>()
    };
    let levels: BTreeSet<&str> = of_kind("PriorityLevelConfiguration")
        .into_iter()
        .map(|level| text(level, "/metadata/name"))
        .collect();
    let accounts: BTreeSet<(&str, &str)> = of_kind("ServiceAccount")
        .into_iter()
        .map(|account| (text(account, "/metadata/namespace"), text(account, "/metadata/name")))
        .collect();
    assert_eq!(accounts.len(), 3, "{accounts:?}");
    // The flow of everything that an account asks; by name, its Lease has a way of its own.
    let (mut whole, mut leases) = (BTreeSet::new(), BTreeSet::new());
    for schema in of_kind("FlowSchema") {
        let name = text(schema, "/metadata/name");
        let level = text(schema, "/spec/priorityLevelConfiguration/name");
        // Kubernetes' own, which is always there.
        assert!(levels.contains(level) || level == "leader-election", "{name}: {level}");
        let precedence = schema.pointer("/spec/matchingPrecedence").and_then(Value::as_i64);
        // That of all other service accounts is 9000, and the smallest number counts.
        assert!(precedence.is_some_and(|precedence| (100..9000).contains(&precedence)), "{name}");
        for rule in schema.pointer("/spec/rules").and_then(Value::as_array).into_iter().flatten() {
            for subject in rule["subjects"].as_array().into_iter().flatten() {
                let account = &subject["serviceAccount"];
                let account = (text(account, "/namespace"), text(account, "/name"));
                assert!(accounts.contains(&account), "{name}: {account:?}");
                match rule.pointer("/resourceRules/0/resources/0").and_then(Value::as_str) {
                    Some("*") => assert!(whole.insert(account), "{account:?} has two flows"),
                    Some("leases") => {
                        // It counts before the flow of everything, and does not wait with it.
                        assert!(precedence < Some(800) && level != "knit", "{name}");
                        leases.insert(account.1);
                    }
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }
    assert_eq!(whole, accounts, "each part has a flow");
    assert_eq!(leases, ["knit-controller", "knit-node"].into(), "whose silence means that it is down");
}

#[test]
fn overlays_are_complete() {
    let kubectl = std::env::var("KUBECTL").unwrap_or_else(|_| "kubectl".into());
    if Command::new(&kubectl).args(["version", "--client"]).output().is_err() {
        return skip("there is no kubectl here; name one with KUBECTL");
    }
    for (overlay, expected) in [
        (
            "overlays/full",
            "ClusterRole 4, ClusterRoleBinding 2, ConfigMap 1, CustomResourceDefinition 8, DaemonSet 1, \
            Deployment 1, FlowSchema 4, Namespace 1, PriorityLevelConfiguration 2, Role 2, RoleBinding 2, \
            ServiceAccount 2, ValidatingAdmissionPolicy 5, ValidatingAdmissionPolicyBinding 5",
        ),
        (
            "overlays/cni",
            "ClusterRole 4, ClusterRoleBinding 2, ConfigMap 1, CustomResourceDefinition 8, DaemonSet 1, \
            Deployment 1, FlowSchema 4, Namespace 1, PriorityLevelConfiguration 2, Role 2, RoleBinding 2, \
            ServiceAccount 2, ValidatingAdmissionPolicy 5, ValidatingAdmissionPolicyBinding 5",
        ),
        (
            "overlays/claims",
            "ClusterRole 6, ClusterRoleBinding 4, ConfigMap 1, CustomResourceDefinition 8, DaemonSet 1, \
            Deployment 1, FlowSchema 4, MutatingAdmissionPolicy 1, MutatingAdmissionPolicyBinding 1, \
            Namespace 1, PriorityLevelConfiguration 2, Role 2, RoleBinding 2, ServiceAccount 2, \
            ValidatingAdmissionPolicy 7, ValidatingAdmissionPolicyBinding 7",
        ),
        (
            "overlays/secondary",
            "ClusterRole 4, ClusterRoleBinding 2, ConfigMap 1, CustomResourceDefinition 8, DaemonSet 1, \
            Deployment 1, FlowSchema 4, Namespace 1, PriorityLevelConfiguration 2, Role 2, RoleBinding 2, \
            ServiceAccount 2, ValidatingAdmissionPolicy 5, ValidatingAdmissionPolicyBinding 5",
        ),
        (
            "overlays/dra",
            "ClusterRole 6, ClusterRoleBinding 4, ConfigMap 1, CustomResourceDefinition 8, DaemonSet 1, \
            Deployment 1, FlowSchema 4, Namespace 1, PriorityLevelConfiguration 2, Role 2, RoleBinding 2, \
            ServiceAccount 2, ValidatingAdmissionPolicy 7, ValidatingAdmissionPolicyBinding 7",
        ),
        (
            "overlays/proxy",
            "ClusterRole 1, ClusterRoleBinding 1, ConfigMap 1, DaemonSet 1, FlowSchema 1, Namespace 1, \
            PriorityLevelConfiguration 1, ServiceAccount 1",
        ),
        (
            "uninstall",
            "ClusterRole 1, ClusterRoleBinding 1, DaemonSet 1, Job 1, Role 1, RoleBinding 1, ServiceAccount \
             1",
        ),
    ] {
        let output = Command::new(&kubectl)
            .arg("kustomize")
            .arg(deploy().join(overlay))
            .output()
            .expect("kubectl runs");
        assert!(output.status.success(), "{overlay}: {}", String::from_utf8_lossy(&output.stderr));
        let objects = documents(&String::from_utf8(output.stdout).expect("text"), overlay);
        let mut kinds = std::collections::BTreeMap::<&str, usize>::new();
        for object in &objects {
            *kinds.entry(text(object, "/kind")).or_default() += 1;
            let name = format!("{overlay}: {} {}", text(object, "/kind"), text(object, "/metadata/name"));
            let version = env!("CARGO_PKG_VERSION");
            assert_eq!(text(object, "/metadata/labels/app.kubernetes.io~1version"), version, "{name}");
            for container in containers(object) {
                assert_eq!(text(container, "/image"), format!("localhost/knit:{version}"), "{name}");
                let label = text(object, "/spec/template/metadata/labels/app.kubernetes.io~1version");
                assert_eq!(label, version, "{name}");
            }
            // A version in a selector could never change.
            assert!(
                object.pointer("/spec/selector/matchLabels/app.kubernetes.io~1version").is_none(),
                "{name}"
            );
        }
        if ["overlays/secondary", "overlays/dra"].contains(&overlay) {
            let agent = objects.iter().find(|o| text(o, "/kind") == "DaemonSet").expect("the agent");
            assert!(agent.pointer("/spec/template/spec/initContainers").is_none(), "nothing is installed");
            let volumes = agent.pointer("/spec/template/spec/volumes").and_then(Value::as_array);
            let paths: BTreeSet<&str> =
                volumes.expect("volumes").iter().map(|v| text(v, "/hostPath/path")).collect();
            let expected = ["/run/knit", "/run/netns", "/var/lib/knit", "/var/run/nri"];
            let kubelets = paths.iter().filter(|path| path.starts_with("/var/lib/kubelet/")).count();
            assert!(expected.iter().all(|path| paths.contains(path)), "{overlay}: {paths:?}");
            assert_eq!(paths.len(), expected.len() + kubelets, "{overlay}: {paths:?}");
        }
        let kinds: Vec<String> = kinds.iter().map(|(kind, n)| format!("{kind} {n}")).collect();
        assert_eq!(kinds.join(", "), expected.split_whitespace().collect::<Vec<_>>().join(" "), "{overlay}");
    }
}
