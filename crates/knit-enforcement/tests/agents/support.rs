//! Two nodes with real agents in namespaces, pods that answer, and a folder of objects.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use knit_enforcement::{Config, Enforcement, Mode, folder_kinds};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::in_namespaces;
use knit_node::agent::{Agent, AgentConfig};
use knit_objects::{FolderOptions, Kinds, Source};
use knit_policy_nft::NftBackends;
use knit_services::Services;
pub use knit_testbed::SOON;
use knit_testbed::agents::two_nodes;
pub use knit_testbed::agents::{Node, Pod};
use knit_testbed::objects;
pub use knit_testbed::objects::write;
use knit_testbed::wire::Wire;
use serde_json::{Value, json};

/// How long a packet that must not arrive is waited for.
pub const REFUSED: Duration = Duration::from_millis(600);
pub const STOP: Duration = Duration::from_secs(5);

pub struct Bed {
    _wire: Wire,
    pub nodes: [Node; 2],
    pub objects: PathBuf,
}

impl Bed {
    pub fn node(&self) -> &Node {
        &self.nodes[0]
    }

    /// An object called FILE.
    pub fn put(&self, file: &str, object: &Value) {
        write(&self.objects, file, object);
    }

    /// The object called FILE is gone.
    pub fn remove(&self, file: &str) {
        std::fs::remove_file(self.objects.join(format!("{file}.json"))).expect("it was there");
    }

    /// A pod's object on a node, with these labels.
    pub fn pod_object(&self, node: &str, namespace: &str, name: &str, labels: &Value) {
        let object = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}"),
                "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "c",
                "ports": [{"name": "web", "containerPort": 8080}]}]}});
        self.put(&format!("pod-{namespace}-{name}"), &object);
    }

    /// The slice that a controller would write about these pods of a node: name, namespace, labels.
    pub fn slice(&self, network: &str, node: &str, pods: &[(&Pod, &str, &Value)]) {
        let pods: Vec<Value> = pods
            .iter()
            .map(|(pod, uid, labels)| {
                let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
                json!({"namespace": pod.namespace, "name": pod.name, "uid": uid, "created": 1,
                    "addresses": addresses, "labels": labels})
            })
            .collect();
        let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "PolicyPeerSlice",
            "metadata": {"name": format!("{network}-{node}"), "labels": {"knit.dev/network": network}},
            "spec": {"network": network, "node": node, "pods": pods}});
        self.put(&format!("slice-{network}-{node}"), &object);
    }

    /// A Service of namespace kube-system that leads to port 8080 of a pod.
    pub fn service(&self, name: &str, ip: &str, endpoint: &Pod) {
        let ports = json!([{"port": 80, "protocol": "TCP"}]);
        let spec = json!({"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ports": ports});
        let object = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": "kube-system", "name": name}, "spec": spec});
        self.put(&format!("service-{name}"), &object);
        let address = endpoint.addresses[0].to_string();
        let object = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"namespace": "kube-system", "name": name,
                "labels": {"kubernetes.io/service-name": name}},
            "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": [address], "nodeName": "a", "conditions": {"ready": true}}]});
        self.put(&format!("endpoints-{name}"), &object);
    }

    pub fn namespace(&self, name: &str, labels: &Value) {
        let object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        self.put(&format!("namespace-{name}"), &object);
    }
}

/// A NetworkPolicy.
pub fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name, "resourceVersion": "7"}, "spec": spec})
}

/// Isolates all pods of a namespace in this direction.
pub fn deny(namespace: &str, kind: &str) -> Value {
    policy(namespace, "deny", &json!({"podSelector": {}, "policyTypes": [kind]}))
}

/// What the tests of this crate do with a node.
pub trait Enforced {
    /// Starts its agent with policies.
    async fn start(&self) -> Agent;

    /// The same in this mode.
    async fn start_with(&self, mode: Mode) -> Agent;

    /// The bed's folder of objects.
    fn objects(&self) -> Source;

    /// The same with objects from elsewhere.
    async fn start_from(&self, source: Source, mode: Mode) -> Agent;

    fn enforcement(&self, mode: Mode) -> Arc<Enforcement>;

    /// The same with this enforcement.
    async fn start_enforced(&self, source: Source, policies: Arc<Enforcement>) -> Agent;

    /// Makes a pod, and a server in it.
    async fn pod(&self, namespace: &'static str, name: &'static str) -> Pod;

    /// An ADD with this runtimeConfig: the pod, or the error's text.
    async fn add_with(
        &self,
        namespace: &'static str,
        name: &'static str,
        config: &Value,
    ) -> Result<Pod, String>;
}

impl Enforced for Node {
    async fn start(&self) -> Agent {
        self.start_with(Mode::On).await
    }

    async fn start_with(&self, mode: Mode) -> Agent {
        self.start_from(self.objects(), mode).await
    }

    fn objects(&self) -> Source {
        Source::Folder(FolderOptions { kinds: folder_kinds(Kinds::default()), ..self.folder() })
    }

    async fn start_from(&self, source: Source, mode: Mode) -> Agent {
        self.start_enforced(source, self.enforcement(mode)).await
    }

    fn enforcement(&self, mode: Mode) -> Arc<Enforcement> {
        let (node, namespace, backends) = (self.name.to_owned(), self.namespace(), Arc::new(NftBackends));
        Arc::new(Enforcement::new(Config { node, namespace, mode, backends }))
    }

    async fn start_enforced(&self, source: Source, policies: Arc<Enforcement>) -> Agent {
        let services = knit_services::Config {
            node: self.name.to_owned(),
            namespace: self.namespace(),
            mode: knit_services::Mode::On,
            healthz: None,
            metrics: None,
            backends: Arc::new(knit_proxy_nft::NftBackends),
        };
        let config = AgentConfig {
            source,
            http: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            proxy: Some(Arc::new(Services::new(services))),
            policies: Some(policies),
            ..self.config()
        };
        self.start_as(config).await
    }

    async fn pod(&self, namespace: &'static str, name: &'static str) -> Pod {
        let annotations = json!({"io.kubernetes.cri.pod-annotations": {}});
        self.add_with(namespace, name, &annotations).await.expect("added")
    }

    async fn add_with(
        &self,
        namespace: &'static str,
        name: &'static str,
        config: &Value,
    ) -> Result<Pod, String> {
        // One that was not admitted comes again.
        let pod = Pod::new(namespace, name);
        // Listening before there is an interface: what comes first is answered.
        serve(&pod.space, name);
        self.add(pod, config).await
    }
}

/// A server of both families that says its name and then echoes, unless there is one already.
fn serve(space: &NetNs, says: &'static str) {
    let Ok(listener) = space.run(|| TcpListener::bind("[::]:8080")).expect("in") else { return };
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                let mut sent = stream.write_all(format!("{says}\n").as_bytes());
                while let (Ok(()), Ok(length @ 1..)) = (&sent, stream.read(&mut buffer)) {
                    sent = stream.write_all(&buffer[..length]);
                }
            });
        }
    });
}

/// Whether a connection comes about.
pub fn reaches(from: &NetNs, to: IpAddr, wait: Duration) -> bool {
    reaches_port(from, SocketAddr::new(to, 8080), wait)
}

pub fn reaches_port(from: &NetNs, target: SocketAddr, wait: Duration) -> bool {
    from.run(|| TcpStream::connect_timeout(&target, wait)).expect("in").is_ok()
}

/// Waits until one pod reaches another, or does not.
pub async fn becomes(what: &str, from: &NetNs, to: IpAddr, reachable: bool) {
    knit_testbed::wait::eventually(what, SOON, || match reaches(from, to, REFUSED) == reachable {
        true => Ok(()),
        false => Err(format!("reachable: {}", !reachable)),
    })
    .await;
}

/// Two nodes with Networks default, and blue and green for namespaces sky and forest.
pub fn with_bed<F: Future<Output = ()>>(scenario: impl FnOnce(Bed) -> F + Send) {
    in_namespaces(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let dir = Path::new("/run/test");
            let folder = dir.join("objects");
            write_objects(&folder);
            let (wire, nodes) = two_nodes(dir);
            scenario(Bed { nodes, objects: folder, _wire: wire }).await;
        });
    });
}

fn write_objects(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    let networks = [
        ("default", 1, "Layer3", "10.244.0.0/16", "fd44::/64"),
        ("blue", 2, "Layer3", "10.77.0.0/16", "fd77::/64"),
        ("green", 3, "Layer2", "10.88.0.0/16", "fd88::/64"),
    ];
    for (name, id, topology, ipv4, ipv6) in networks {
        write_network(folder, name, id, topology, &json!([{"cidr": ipv4}, {"cidr": ipv6}]), &Value::Null);
    }
    let blocks = [
        ("default", "a", "10.244.1.0/28", "fd44::100/124"),
        ("default", "b", "10.244.2.0/28", "fd44::200/124"),
        ("blue", "a", "10.77.0.16/28", "fd77::10/124"),
        ("blue", "b", "10.77.0.32/28", "fd77::20/124"),
        ("green", "a", "10.88.0.16/28", "fd88::10/124"),
        ("green", "b", "10.88.0.32/28", "fd88::20/124"),
    ];
    for (network, node, ipv4, ipv6) in blocks {
        write(folder, &format!("block-{network}-{node}"), &objects::block(network, node, ipv4, Some(ipv6)));
    }
    write(folder, "node-a", &objects::node("a", &["192.168.7.1", "fd07::1"]));
    write(folder, "node-b", &objects::node("b", &["192.168.7.2", "fd07::2"]));
    for (name, team) in
        [("shop", "none"), ("other", "none"), ("kube-system", "none"), ("sky", "blue"), ("forest", "green")]
    {
        let object = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {"team": team}}});
        write(folder, &format!("namespace-{name}"), &object);
    }
    let ranges = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "fd96::/112"]}});
    write(folder, "ranges", &ranges);
}

/// A Network with what it says of policies.
pub fn write_network(folder: &Path, name: &str, id: u32, topology: &str, subnets: &Value, policy: &Value) {
    let mut spec = json!({"class": "knit", "topology": topology, "subnets": subnets});
    if name != "default" {
        spec["primaryFor"] = json!({"matchLabels": {"team": name}});
        spec["allowedNamespaces"] = json!({"from": "All"});
    }
    if !policy.is_null() {
        spec["policy"] = policy.clone();
    }
    write(folder, &format!("network-{name}"), &objects::network(name, id, spec));
}
