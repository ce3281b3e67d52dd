//! Two nodes with real agents in namespaces, pods that answer, and a folder of objects.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_cni::protocol::{Command, Response};
use knit_enforcement::{Config, Enforcement, Mode, NftBackends, folder_kinds};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::in_namespaces;
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_objects::{FolderOptions, Kinds, Source};
use knit_services::Services;
pub use knit_testbed::SOON;
pub use knit_testbed::objects::write;
use knit_testbed::wire::Wire;
use knit_testbed::{cni, objects};
use serde_json::{Value, json};

/// How long a packet that must not arrive is waited for.
pub const REFUSED: Duration = Duration::from_millis(600);
pub const STOP: Duration = Duration::from_secs(5);

pub struct Node {
    pub name: &'static str,
    pub space: NetNs,
    pub dir: PathBuf,
    pub objects: PathBuf,
}

pub struct Pod {
    pub space: NetNs,
    pub name: &'static str,
    pub namespace: &'static str,
    /// IPv4 first.
    pub addresses: Vec<IpAddr>,
    pub path: PathBuf,
}

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

impl Node {
    pub async fn start(&self) -> Agent {
        self.start_with(Mode::On).await
    }

    pub async fn start_with(&self, mode: Mode) -> Agent {
        self.start_from(self.folder(), mode).await
    }

    /// The bed's folder of objects.
    pub fn folder(&self) -> Source {
        Source::Folder(FolderOptions {
            output: Some(self.dir.join("status")),
            kinds: folder_kinds(Kinds::default()),
            ..FolderOptions::new(self.objects.clone())
        })
    }

    /// The same with objects from elsewhere.
    pub async fn start_from(&self, source: Source, mode: Mode) -> Agent {
        self.start_enforced(source, self.enforcement(mode)).await
    }

    pub fn enforcement(&self, mode: Mode) -> Arc<Enforcement> {
        let namespace = self.space.try_clone().expect("a clone");
        let (node, backends) = (self.name.to_owned(), Arc::new(NftBackends));
        Arc::new(Enforcement::new(Config { node, namespace, mode, backends }))
    }

    /// The same with this enforcement.
    pub async fn start_enforced(&self, source: Source, policies: Arc<Enforcement>) -> Agent {
        let clone = || self.space.try_clone().expect("a clone");
        let (space, name, routers) = (clone(), self.name, self.dir.join("run").join("netns"));
        let services = knit_services::Config {
            node: name.to_owned(),
            namespace: clone(),
            mode: knit_services::Mode::On,
            healthz: None,
            metrics: None,
            backends: Arc::new(knit_proxy_nft::NftBackends),
        };
        let config = AgentConfig {
            core: CoreConfig::new(name, self.dir.join("run"), self.dir.join("state")),
            socket: self.socket(),
            source,
            node_addresses: Vec::new(),
            http: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            lock_wait: SOON,
            netns_dirs: vec![PathBuf::from("/run/pods")],
            runtime: Box::new(move |addresses| {
                std::fs::create_dir_all(&routers).expect("a directory");
                let mut config = knit_linux::Config::new(name, addresses, space);
                config.router_directory = routers;
                Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
            }),
            proxy: Some(Arc::new(Services::new(services))),
            policies: Some(policies),
            dra: None,
            nri: None,
        };
        Agent::start(config).await.expect("started")
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("run").join("cni.sock")
    }

    /// Makes a pod, and a server in it.
    pub async fn pod(&self, namespace: &'static str, name: &'static str) -> Pod {
        self.add(namespace, name, &json!({"io.kubernetes.cri.pod-annotations": {}})).await.expect("added")
    }

    /// An ADD with this runtimeConfig: the pod, or the error's text.
    pub async fn add(
        &self,
        namespace: &'static str,
        name: &'static str,
        config: &Value,
    ) -> Result<Pod, String> {
        std::fs::create_dir_all("/run/pods").expect("a directory");
        let path = PathBuf::from(format!("/run/pods/{name}"));
        // One that was not admitted comes again.
        let space = match path.exists() {
            true => NetNs::open(&path).expect("a namespace"),
            false => NetNs::create(&path).expect("a namespace"),
        };
        // Listening before there is an interface: what comes first is answered.
        serve(&space, name);
        let about = cni::Pod { sandbox: name, namespace, netns: &path };
        let answer = cni::ask(&self.socket(), cni::request(Command::Add, about, config)).await;
        let result = match answer {
            Response::Ok(result) => result,
            Response::Err(error) => return Err(format!("{error:?}")),
        };
        let ips = result["ips"].as_array().unwrap_or_else(|| panic!("addresses in {result}"));
        let address =
            |ip: &Value| ip["address"].as_str().expect("text").parse::<IpNet>().expect("a net").addr();
        let mut addresses: Vec<IpAddr> = ips.iter().map(address).collect();
        addresses.sort_unstable();
        Ok(Pod { space, name, namespace, addresses, path })
    }

    pub async fn del(&self, pod: &Pod) {
        let about = cni::Pod { sandbox: pod.name, namespace: pod.namespace, netns: &pod.path };
        cni::call(&self.socket(), Command::Del, about, &json!({})).await;
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
            let dir = PathBuf::from("/run/test");
            let wire = Wire::new();
            let folder = dir.join("objects");
            write_objects(&folder);
            let node = |name: &'static str, number: u8| {
                let node = Node {
                    name,
                    space: wire.host(name, number),
                    dir: dir.join(name),
                    objects: folder.clone(),
                };
                std::fs::create_dir_all(&node.dir).expect("a directory");
                node
            };
            let nodes = [node("a", 1), node("b", 2)];
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
