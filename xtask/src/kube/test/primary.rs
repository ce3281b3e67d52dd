//! Primary Networks on a real cluster: the example with two tenants, whose addresses are the same. Everything
//! of Kubernetes works inside each, and nothing crosses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::talk::{http, udp};
use super::{pods, talk};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;
use crate::kube::{knit, net};

/// A tenant of the example: its namespace, and its node ports.
struct Tenant {
    name: &'static str,
    everywhere: u16,
    udp: u16,
    here: u16,
}

const TENANTS: [Tenant; 2] = [
    Tenant { name: "red", everywhere: 30180, udp: 30181, here: 30182 },
    Tenant { name: "blue", everywhere: 30280, udp: 30281, here: 30282 },
];

/// A pod of a tenant.
#[derive(Debug, Clone)]
struct Pod {
    name: String,
    node: String,
    address: IpAddr,
}

/// How long a client waits before it calls it silence.
const WAIT: Duration = Duration::from_secs(2);
/// How long what must come may take.
const LIMIT: Duration = Duration::from_secs(60);

pub fn two_tenants(bed: &Bed) -> Result<()> {
    knit::install(bed, "full")?;
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples/two-tenants");
    let example = example.to_str().context("the example's path")?;
    bed.kubectl(&["apply", "-k", example])?;
    bed.apply("{apiVersion: v1, kind: Namespace, metadata: {name: plain}}")?;
    bed.kubectl(&["wait", "--for=create", "-n", "plain", "serviceaccount/default", "--timeout=30s"])?;
    bed.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: client, namespace: plain}}, spec: {{nodeName: n1, \
         containers: [{{name: agnhost, image: {AGNHOST}, args: [pause]}}]}}}}"
    ))?;
    for tenant in &TENANTS {
        // Available is: its pods were probed by the kubelet, and are ready.
        let rollout = ["rollout", "status", "-n", tenant.name, "deployment/web", "--timeout=120s"];
        bed.kubectl(&rollout).map_err(|error| error.context(seen(bed)))?;
    }
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", "plain", "pod/client", "--timeout=90s"])?;
    let pods: Vec<Vec<Pod>> = TENANTS.iter().map(|tenant| web(bed, tenant)).collect::<Result<_>>()?;
    for (tenant, pods) in TENANTS.iter().zip(&pods) {
        let nodes: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
        ensure!(nodes.len() == 2, "{}: pods are not on both nodes: {pods:?}", tenant.name);
    }
    let nodes = nodes(bed)?;
    inside(bed, &pods)?;
    node_ports(bed, &pods, &nodes)?;
    hand_made(bed, &pods, &nodes)?;
    local_policy(bed, &nodes)?;
    bed.kubectl(&["delete", "-k", example, "--timeout=120s"])?;
    bed.kubectl(&["delete", "namespace", "plain", "--timeout=60s"]).map(drop)
}

/// Agents learn of other nodes from slices: two tenants, whose pods on both nodes reach each other in their
/// own Network. They still do, and new pods start, after somebody has deleted all slices while no controller
/// is there and agents are restarted; a controller that comes writes them again.
pub fn with_slices(bed: &Bed) -> Result<()> {
    knit::install(bed, "full")?;
    let in_system = |args: &[&str]| bed.kubectl(&[&["-n", "knit-system"], args].concat());
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples/two-tenants");
    let example = example.to_str().context("the example's path")?;
    bed.kubectl(&["apply", "-k", example])?;
    all_reach_each_other(bed)?;
    let whole = || -> Result<bool> {
        let complete = |kind| bed.kubectl(&["get", kind, "-o", "jsonpath={.items[*].spec.complete}"]);
        Ok(complete("nodeslices")?.contains("true") && complete("blockslices")?.matches("true").count() >= 3)
    };
    ensure!(whole()?, "not all sets of slices are complete");

    in_system(&["scale", "deployment/knit-controller", "--replicas=0"])?;
    let controllers = "--selector=app.kubernetes.io/name=knit-controller";
    in_system(&["wait", "--for=delete", "pod", controllers, "--timeout=60s"])?;
    bed.kubectl(&["delete", "nodeslices,blockslices", "--all"])?;
    in_system(&["rollout", "restart", "daemonset/knit-node"])?;
    in_system(&["rollout", "status", "daemonset/knit-node", "--timeout=120s"])
        .map_err(|error| error.context(seen(bed)))?;
    all_reach_each_other(bed)?;
    for tenant in &TENANTS {
        bed.kubectl(&["rollout", "restart", "-n", tenant.name, "deployment/web"])?;
    }
    all_reach_each_other(bed)?;
    let left = bed.kubectl(&["get", "nodeslices,blockslices", "-o", "name"])?;
    ensure!(left.is_empty(), "somebody wrote slices while no controller was there: {left}");

    in_system(&["scale", "deployment/knit-controller", "--replicas=1"])?;
    until("all sets of slices", LIMIT, || Ok(whole()?.then_some(())))?;
    all_reach_each_other(bed)?;
    bed.kubectl(&["delete", "-k", example, "--timeout=120s"]).map(drop)
}

/// Whether the pods of each tenant are there, on both nodes, and reach each other.
fn all_reach_each_other(bed: &Bed) -> Result<()> {
    for tenant in &TENANTS {
        let rollout = ["rollout", "status", "-n", tenant.name, "deployment/web", "--timeout=120s"];
        bed.kubectl(&rollout).map_err(|error| error.context(seen(bed)))?;
        // A pod that a rollout replaced is listed until it is gone.
        until("the end of pods that were replaced", LIMIT, || {
            let list = bed.kubectl_json(&["get", "pods", "-n", tenant.name, "-l", "app=web"])?;
            let mut pods = list["items"].as_array().context("a list of pods")?.iter();
            let leaving = pods.any(|pod| pod.pointer("/metadata/deletionTimestamp").is_some());
            Ok((!leaving).then_some(()))
        })?;
        let own = web(bed, tenant)?;
        let nodes: BTreeSet<&str> = own.iter().map(|pod| pod.node.as_str()).collect();
        ensure!(nodes.len() == 2, "{}: pods are not on both nodes: {own:?}", tenant.name);
        for (pod, to) in own.iter().flat_map(|pod| own.iter().map(move |to| (pod, to))) {
            let from = pods::pod(bed, tenant.name, &pod.name)?.space()?;
            let at = SocketAddr::new(to.address, 8080);
            let what = format!("{}/{} to {}", tenant.name, pod.name, to.name);
            balances(&what, &BTreeSet::from([&*to.name]), || http(&from, at, "/hostname"))
                .map_err(|error| error.context(seen(bed)))?;
        }
    }
    Ok(())
}

/// What there is, for a test that failed.
fn seen(bed: &Bed) -> String {
    let looks: [&[&str]; 3] = [
        &["get", "pods,networks,addressblocks", "-A", "-o", "wide"],
        &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        &["logs", "-n", "knit-system", "-l", "app.kubernetes.io/name=knit-node", "--tail=30", "--prefix"],
    ];
    looks.map(|look| bed.kubectl(look).unwrap_or_else(|error| error.to_string())).join("\n")
}

/// The pods of a tenant's deployment.
fn web(bed: &Bed, tenant: &Tenant) -> Result<Vec<Pod>> {
    let list = bed.kubectl_json(&["get", "pods", "-n", tenant.name, "-l", "app=web"])?;
    let items = list["items"].as_array().context("a list of pods")?;
    let pod = |item: &serde_json::Value| {
        let text = |path: &str| item.pointer(path).and_then(|v| v.as_str()).map(str::to_owned);
        let address = text("/status/podIP").context("a pod has no address")?.parse()?;
        ensure!(matches!(address, IpAddr::V4(v4) if v4.octets()[..2] == [10, 77]), "podIP {address}");
        let (name, node) =
            (text("/metadata/name").context("a name")?, text("/spec/nodeName").context("a node")?);
        Ok(Pod { name, node, address })
    };
    items.iter().map(pod).collect()
}

/// The nodes' addresses.
fn nodes(bed: &Bed) -> Result<BTreeMap<String, IpAddr>> {
    let of = |node: String| {
        let path = "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}";
        let text = bed.kubectl(&["get", "node", &node, "-o", path])?;
        Ok((node, text.split(' ').next().context("an address")?.parse()?))
    };
    bed.nodes().into_iter().map(of).collect()
}

/// What a pod gets from a URL, if anything: its name is looked up as a pod's resolver would.
fn get(bed: &Bed, namespace: &str, pod: &str, url: &str) -> Result<Option<String>> {
    let from = pods::pod(bed, namespace, pod)?.space()?;
    let rest = url.strip_prefix("http://").context("a URL")?;
    let (host, path) = rest.split_once('/').context("a path")?;
    let to = match host.parse::<SocketAddr>() {
        Ok(to) => to,
        Err(_) => {
            let within = if host.contains('.') { host.to_owned() } else { format!("{host}.{namespace}") };
            let found = talk::look_up(&from, dns()?, &format!("{within}.svc.cluster.local"))?;
            let Some(address) = found.first() else { return Ok(None) };
            SocketAddr::new((*address).into(), 80)
        }
    };
    http(&from, to, &format!("/{path}"))
}

/// The cluster's DNS.
fn dns() -> Result<IpAddr> {
    Ok(net::DNS_V4.parse()?)
}

/// Waits until exactly these answer, each at least once.
fn balances(
    what: &str,
    names: &BTreeSet<&str>,
    mut ask: impl FnMut() -> Result<Option<String>>,
) -> Result<()> {
    let mut last = String::new();
    let reached = until(what, LIMIT, || {
        let mut found = BTreeSet::new();
        for _ in 0..24 {
            match ask()? {
                Some(name) => found.insert(name),
                None => {
                    last = format!("silence after {found:?}");
                    return Ok(None);
                }
            };
            if found.iter().map(String::as_str).eq(names.iter().copied()) {
                return Ok(Some(()));
            }
        }
        last = format!("{found:?} in place of {names:?}");
        Ok(None)
    });
    reached.map_err(|error| error.context(last))
}

/// Clients of the API on both nodes, with the account of their pod and the API server's certificate checked.
fn api_clients(bed: &Bed, namespace: &str) -> Result<()> {
    for node in bed.nodes() {
        bed.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: api-{node}, namespace: {namespace}}}, spec: \
             {{nodeName: {node}, \
             terminationGracePeriodSeconds: 1, containers: [{{name: agnhost, image: '{AGNHOST}', \
             args: [inclusterclient, --poll-interval=1]}}]}}}}"
        ))?;
    }
    for node in bed.nodes() {
        let mut last = String::new();
        let reached = until(&format!("{namespace}/api-{node} asks the API"), LIMIT, || {
            // Nothing to read before it runs.
            let output =
                bed.kubectl_output(&["logs", "-n", namespace, &format!("api-{node}"), "--tail=3"], None)?;
            last = [output.stdout, output.stderr].iter().map(|text| String::from_utf8_lossy(text)).collect();
            let asked = last.contains("calling /healthz");
            Ok((asked && !last.contains("error") && !last.contains("failed")).then_some(()))
        });
        reached.map_err(|error| error.context(last))?;
        bed.kubectl(&["delete", "pod", "-n", namespace, &format!("api-{node}"), "--timeout=30s"])?;
    }
    Ok(())
}

/// Pods of a tenant reach each other, their Services, names and the API, and nothing of the other tenant.
fn inside(bed: &Bed, pods: &[Vec<Pod>]) -> Result<()> {
    for (number, tenant) in TENANTS.iter().enumerate() {
        let (own, others) = (&pods[number], &pods[1 - number]);
        let names: BTreeSet<&str> = own.iter().map(|pod| pod.name.as_str()).collect();
        let other = &TENANTS[1 - number];
        for pod in own {
            let ask = |url: &str| get(bed, tenant.name, &pod.name, url);
            let who = format!("{}/{}", tenant.name, pod.name);
            for to in own {
                let url = format!("http://{}:8080/hostname", to.address);
                balances(&format!("{who} to {}", to.name), &BTreeSet::from([&*to.name]), || ask(&url))?;
            }
            // Itself among them: it comes back by the router.
            balances(&format!("{who} by Service"), &names, || ask("http://web/hostname"))?;
            let records = format!("pods.{}.svc.cluster.local", tenant.name);
            let (from, all) =
                (pods::pod(bed, tenant.name, &pod.name)?.space()?, own.iter().map(|to| to.address));
            let all: BTreeSet<IpAddr> = all.collect();
            until(&format!("{who} looks {records} up"), LIMIT, || {
                let found = talk::look_up(&from, dns()?, &records)?;
                Ok((found.into_iter().map(IpAddr::from).collect::<BTreeSet<_>>() == all).then_some(()))
            })?;
            for to in others.iter().filter(|to| own.iter().all(|pod| pod.address != to.address)) {
                let heard = ask(&format!("http://{}:8080/hostname", to.address))?;
                ensure!(heard.is_none(), "{who} reached {} of {}: {heard:?}", to.name, other.name);
            }
            let service = format!("http://web.{}/hostname", other.name);
            let heard = ask(&service)?;
            ensure!(heard.is_none(), "{who} reached {service}: {heard:?}");
        }
        api_clients(bed, tenant.name)?;
        // Nor do pods of the default Network.
        for url in [
            format!("http://{}:8080/hostname", own[0].address),
            format!("http://web.{}/hostname", tenant.name),
        ] {
            let heard = get(bed, "plain", "client", &url)?;
            ensure!(heard.is_none(), "a pod of the default Network reached {url}: {heard:?}");
        }
    }
    Ok(())
}

/// Node ports of both policies, from outside, from a node, from a pod of the default Network.
fn node_ports(bed: &Bed, pods: &[Vec<Pod>], nodes: &BTreeMap<String, IpAddr>) -> Result<()> {
    let (outside, n1) = (bed.control_plane_ns()?, bed.node_ns("n1")?);
    for (tenant, own) in TENANTS.iter().zip(pods) {
        let names: BTreeSet<&str> = own.iter().map(|pod| pod.name.as_str()).collect();
        for (node, address) in nodes {
            let at = |port| SocketAddr::new(*address, port);
            let what = |who: &str| format!("{who} to node port of {} on {node}", tenant.name);
            for (from, who) in [(&outside, "the outside"), (&n1, "n1")] {
                balances(&what(who), &names, || http(from, at(tenant.everywhere), "/hostname"))?;
                balances(&what(&format!("{who}, UDP")), &names, || udp(from, at(tenant.udp)))?;
            }
            let url = format!("http://{}/hostname", at(tenant.everywhere));
            balances(&what("a pod"), &names, || get(bed, "plain", "client", &url))?;
            let here: BTreeSet<&str> =
                own.iter().filter(|pod| pod.node == *node).map(|pod| pod.name.as_str()).collect();
            balances(&what("the outside, Local,"), &here, || http(&outside, at(tenant.here), "/hostname"))?;
            let seen = http(&outside, at(tenant.here), "/clientip")?.context("no answer")?;
            ensure!(seen.starts_with("10.250.0.1:"), "policy Local shows {seen} for 10.250.0.1");
        }
    }
    Ok(())
}

/// A Service elsewhere whose hand-made EndpointSlice names a tenant's pod leads nobody there.
fn hand_made(bed: &Bed, pods: &[Vec<Pod>], nodes: &BTreeMap<String, IpAddr>) -> Result<()> {
    let (outside, n1) = (bed.control_plane_ns()?, bed.node_ns("n1")?);
    // In the default Network, and in the other tenant's, whose own addresses these may be.
    let victim = pods[0].iter().find(|pod| pod.node == "n1").context("a pod on n1")?;
    let client = bed.kubectl(&["get", "pod", "-n", "plain", "client", "-o", "jsonpath={.status.podIP}"])?;
    for (namespace, address, port) in [
        ("plain", victim.address.to_string(), 30191),
        ("blue", victim.address.to_string(), 30192),
        ("blue", client, 30193),
    ] {
        let name = format!("evil-{port}");
        bed.apply(&format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: {namespace}}}, spec: \
             {{type: NodePort, \
             ports: [{{port: 80, targetPort: 8080, nodePort: {port}}}]}}}}\n---\n\
             {{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, metadata: {{name: \
             {name}, \
             namespace: {namespace}, labels: {{kubernetes.io/service-name: {name}}}}}, ports: [{{port: \
             8080}}], \
             endpoints: [{{addresses: ['{address}'], nodeName: n1, conditions: {{ready: true}}}}]}}"
        ))?;
    }
    // One that leads to who may be reached, made last: when it works, the others are in force.
    bed.apply(
        "{apiVersion: v1, kind: Service, metadata: {name: good, namespace: blue}, spec: {type: NodePort, \
         selector: \
         {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30194}]}}",
    )?;
    let own: BTreeSet<&str> = pods[1].iter().map(|pod| pod.name.as_str()).collect();
    let n1_address = *nodes.get("n1").context("n1")?;
    let at = |port| SocketAddr::new(n1_address, port);
    balances("the good Service", &own, || http(&outside, at(30194), "/hostname"))?;
    let service =
        bed.kubectl(&["get", "service", "-n", "plain", "evil-30191", "-o", "jsonpath={.spec.clusterIP}"])?;
    let allowed = |heard: &Option<String>| heard.as_deref().is_none_or(|name| own.contains(name));
    for port in [30191, 30192, 30193] {
        for (from, who) in [(&outside, "the outside"), (&n1, "n1")] {
            let heard = http(from, at(port), "/hostname")?;
            ensure!(allowed(&heard), "{who} reached {heard:?} by node port {port}");
        }
    }
    let service: SocketAddr = SocketAddr::new(service.parse()?, 80);
    let heard = http(&n1, service, "/hostname")?;
    ensure!(heard.is_none(), "n1 reached {heard:?} by the Service's address");
    let heard = get(bed, "plain", "client", &format!("http://{service}/hostname"))?;
    ensure!(heard.is_none(), "a pod reached {heard:?} by the Service's address");
    let client = &pods[1][0].name;
    for port in [30192, 30193] {
        let heard = get(bed, "blue", client, &format!("http://evil-{port}/hostname"))?;
        ensure!(allowed(&heard), "blue/{client} reached {heard:?} by evil-{port}");
    }
    // While the kubelet, and with it any process of the node, reaches the pod itself.
    let heard = http(&n1, SocketAddr::new(victim.address, 8080), "/hostname")?;
    ensure!(
        heard.as_deref() == Some(&*victim.name),
        "n1 reaches {heard:?} in place of its pod {}",
        victim.name
    );
    Ok(())
}

/// Policy Local without an endpoint on the node: silence, while the other node answers.
fn local_policy(bed: &Bed, nodes: &BTreeMap<String, IpAddr>) -> Result<()> {
    let outside = bed.control_plane_ns()?;
    for tenant in &TENANTS {
        bed.kubectl(&["scale", "-n", tenant.name, "deployment/web", "--replicas=1"])?;
        let left = until("one pod is left", LIMIT, || {
            Ok(Some(web(bed, tenant)?).filter(|pods| pods.len() == 1).and_then(|mut pods| pods.pop()))
        })?;
        for (node, address) in nodes {
            let at = |port| SocketAddr::new(*address, port);
            let name = BTreeSet::from([&*left.name]);
            let what = format!("the last pod of {} by {node}", tenant.name);
            balances(&what, &name, || http(&outside, at(tenant.everywhere), "/hostname"))?;
            if *node == left.node {
                balances(&what, &name, || http(&outside, at(tenant.here), "/hostname"))?;
            } else {
                let silent = || -> Result<Option<()>> {
                    let connected =
                        outside.run(|| TcpStream::connect_timeout(&at(tenant.here), WAIT).map(drop))?;
                    let timed_out = |error: &std::io::Error| error.kind() == std::io::ErrorKind::TimedOut;
                    Ok(connected.err().is_some_and(|error| timed_out(&error)).then_some(()))
                };
                until(&format!("silence on {node}"), LIMIT, silent)?;
            }
        }
    }
    Ok(())
}
