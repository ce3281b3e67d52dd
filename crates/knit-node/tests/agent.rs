//! The whole agent over a folder of objects and its real socket, with a runtime in memory.

use std::io::{Read, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use knit_cni::protocol::{self, Command, MAX_FRAME, PROTOCOL_VERSION, Request, Response};
use knit_cni::{Args, NetworkConfig, code};
use knit_ledger::{Batch, Entry, Reservation};
use knit_node::agent::{Agent, AgentConfig};
use knit_node::files::Files;
use knit_node::front_door::dra::{DraConfig, ServeClaims};
use knit_node::sandboxes::books::Store as _;
use knit_node::testing::{FakeKernel, FakeRuntime, Faults, Life};
use knit_node::{Asked, ClaimRequest, CoreConfig, Peers};
use knit_objects::Source;
use knit_testbed::objects;
use knit_testbed::wait::holds;
use knit_types::{ObjectRef, Owner};
use serde_json::{Value, json};
use tempfile::TempDir;

struct Node {
    dir: TempDir,
    kernel: FakeKernel,
}

impl Node {
    fn new() -> Self {
        let node = Self { dir: tempfile::tempdir().expect("a directory"), kernel: FakeKernel::default() };
        for folder in ["objects", "netns"] {
            std::fs::create_dir(node.path(folder)).expect("a folder");
        }
        let network = |name: &str, id: u32, cidr: &str, more: Value| {
            let mut spec = json!({"class": "knit", "topology": "Layer3", "subnets": [{"cidr": cidr}]});
            if let (Some(spec), Value::Object(more)) = (spec.as_object_mut(), more) {
                spec.extend(more);
            }
            objects::network(name, id, spec)
        };
        let block = |network: &str, range: &str| objects::block(network, "node-1", range, None);
        for (n, object) in [
            network("default", 1, "10.1.0.0/16", json!({})),
            network("blue", 2, "10.2.0.0/16", json!({"allowedNamespaces": {"from": "All"}})),
            block("default", "10.1.0.0/28"),
            block("blue", "10.2.0.0/28"),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
            objects::node("node-1", &["192.0.2.1"]),
        ]
        .into_iter()
        .enumerate()
        {
            node.put(&n.to_string(), &object);
        }
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, file: &str, object: &Value) {
        objects::write(&self.path("objects"), file, object);
    }

    fn config(&self, source: Source) -> AgentConfig {
        let kernel = self.kernel.clone();
        let mut core = CoreConfig::new("node-1", self.path("run"), self.path("state"));
        core.cache_wait = Duration::from_millis(300);
        AgentConfig {
            core,
            socket: self.socket(),
            source,
            node_addresses: Vec::new(),
            http: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            lock_wait: Duration::from_secs(60),
            netns_dirs: vec![self.path("netns")],
            runtime: Box::new(move |addresses| {
                assert_eq!(addresses, ["192.0.2.1".parse::<std::net::IpAddr>().expect("an address")]);
                Ok(Arc::new(FakeRuntime::new("knit.dev/linux", &kernel, &Life::default())))
            }),
            proxy: None,
            nri: None,
            policies: None,
            dra: None,
        }
    }

    fn socket(&self) -> PathBuf {
        self.path("run").join("cni.sock")
    }

    async fn start(&self) -> Agent {
        Agent::start(self.config(Source::folder(self.path("objects")))).await.expect("started")
    }

    fn request(&self, command: Command, sandbox: &str, networks: &str) -> Request {
        let netns = self.path("netns").join(sandbox);
        if !netns.exists() {
            std::fs::write(&netns, b"").expect("a namespace");
        }
        let config = json!({
            "cniVersion": "1.1.0", "name": "knit",
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": networks}}
        });
        Request {
            version: PROTOCOL_VERSION,
            command,
            container_id: sandbox.into(),
            netns: netns.display().to_string(),
            ifname: "eth0".into(),
            args: Args {
                pod_namespace: Some("shop".into()),
                pod_name: Some(format!("pod-{sandbox}")),
                pod_uid: Some(format!("uid-{sandbox}")),
                infra_container_id: None,
            },
            path: String::new(),
            config: NetworkConfig::parse(config.to_string().as_bytes()).expect("a configuration"),
            timeout_ms: Some(60_000),
        }
    }

    async fn call(&self, request: Request) -> Response {
        let socket = self.socket();
        let asked = tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).expect("connected");
            protocol::send(&mut stream, &request).expect("sent");
            protocol::receive::<Response>(&mut stream).expect("an answer")
        });
        asked.await.expect("asked")
    }
}

fn result(response: Response) -> Value {
    match response {
        Response::Ok(value) => value,
        Response::Err(error) => panic!("{error:?}"),
    }
}

fn error_code(response: &Response) -> u32 {
    match response {
        Response::Ok(value) => panic!("it worked: {value}"),
        Response::Err(error) => error.code,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_through_the_socket() {
    let node = Node::new();
    let agent = node.start().await;
    assert_eq!(result(node.call(node.request(Command::Status, "", "")).await), Value::Null);
    let added = result(node.call(node.request(Command::Add, "a", "blue")).await);
    assert_eq!(added["cniVersion"], "1.1.0");
    assert_eq!(added["interfaces"][0]["name"], "eth0");
    assert_eq!(added["interfaces"][1]["name"], "net1");
    assert_eq!(added["ips"][0]["interface"], 0);
    assert!(added["ips"][0]["address"].as_str().is_some_and(|a| a.starts_with("10.1.0.")), "{added}");
    assert!(added["ips"][1]["address"].as_str().is_some_and(|a| a.starts_with("10.2.0.")), "{added}");

    // An older client gets the older form, of the same.
    let mut older = node.request(Command::Add, "a", "blue");
    older.config.cni_version = "0.4.0".into();
    let older = result(node.call(older).await);
    assert_eq!(
        (&older["ips"][0]["version"], &older["ips"][0]["address"]),
        (&json!("4"), &added["ips"][0]["address"])
    );

    let mut check = node.request(Command::Check, "a", "blue");
    assert_eq!(error_code(&node.call(check.clone()).await), code::INVALID_CONFIG, "no prevResult");
    check.config.prev_result = Some(added);
    result(node.call(check.clone()).await);
    node.kernel.lose("a", "net1");
    assert_eq!(error_code(&node.call(check).await), code::DAMAGED);

    assert_eq!(error_code(&node.call(node.request(Command::Gc, "", "")).await), code::INVALID_CONFIG);
    let mut gc = node.request(Command::Gc, "", "");
    gc.config.valid_attachments = Some(Vec::new());
    result(node.call(gc).await);
    assert!(node.kernel.is_clean());
    result(node.call(node.request(Command::Del, "a", "")).await);

    for (networks, expected) in
        [("no-such", code::TRY_AGAIN), ("a b", code::REFUSED), ("blue@eth0", code::REFUSED)]
    {
        assert_eq!(
            error_code(&node.call(node.request(Command::Add, "b", networks)).await),
            expected,
            "{networks}"
        );
    }
    let mut wrong = node.request(Command::Add, "b", "");
    wrong.config.cni_version = "9.9.9".into();
    assert_eq!(error_code(&node.call(wrong).await), code::INCOMPATIBLE_VERSION);
    let mut wrong = node.request(Command::Add, "b", "");
    wrong.container_id = "../b".into();
    assert_eq!(error_code(&node.call(wrong).await), code::INVALID_ENVIRONMENT);

    // A plain CNI client gets the default Network.
    let mut plain = node.request(Command::Add, "p", "");
    plain.args = Args::default();
    let plain = result(node.call(plain).await);
    assert_eq!(plain["ips"].as_array().map(Vec::len), Some(1));
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_does_not_disturb_others() {
    let node = Node::new();
    let agent = node.start().await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(UnixStream::connect(node.socket()).expect("connected"));
    }
    let huge = (u32::try_from(MAX_FRAME).expect("it fits") + 1).to_be_bytes();
    let frames: [&[u8]; 5] =
        [&huge, &[0, 0, 0, 2, b'{', b'}'], &[0, 0, 0, 9, b'{'], b"GET / HTTP/1.1\r\n\r\n", &[0, 0]];
    for frame in frames {
        let mut stream = UnixStream::connect(node.socket()).expect("connected");
        stream.write_all(frame).expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("said everything");
        let answer = tokio::task::spawn_blocking(move || {
            let mut answer = Vec::new();
            // Whatever was not read of the request resets the connection, behind the answer.
            match stream.read_to_end(&mut answer) {
                Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}"),
                _ => answer,
            }
        });
        let answer = answer.await.expect("read");
        // Half a header is no request at all; everything else gets an error.
        assert_eq!(answer.is_empty(), frame.len() < 4, "{frame:?}");
    }
    let adds = (0..8).map(|n| node.call(node.request(Command::Add, &format!("s{n}"), "blue")));
    for response in futures::future::join_all(adds).await {
        result(response);
    }
    assert_eq!(node.kernel.attachments().len(), 16);
    drop(silent);
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plugged_into_a_running_pod_and_out_again() {
    let node = Node::new();
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "")).await);
    let object = json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {"name": "more", "namespace": "shop"},
        "spec": {"pod": "pod-a", "network": "blue", "interface": "data0", "addresses": ["10.2.0.7"]}
    });
    node.put("more", &object);
    let kernel = node.kernel.clone();
    holds("plugging in", || kernel.attachments().iter().any(|a| a.interface.as_str() == "data0")).await;
    let status = node.path("objects").join("status");
    holds("the status", || contains(&status, "10.2.0.7") && contains(&status, "Attached")).await;
    // The same ADD again answers with it.
    let again = result(node.call(node.request(Command::Add, "a", "")).await);
    assert_eq!(again["interfaces"][1]["name"], "data0");

    // One that may not be: the condition says so, and nothing is made.
    let mut refused = object.clone();
    refused["metadata"]["name"] = "refused".into();
    refused["spec"]["interface"] = "data1".into();
    refused["spec"]["network"] = "default".into();
    refused["spec"]["addresses"] = json!([]);
    node.put("refused", &refused);
    holds("the refusal", || contains(&status, "RequestRefused")).await;

    std::fs::remove_file(node.path("objects").join("more.json")).expect("removed");
    holds("unplugging", || kernel.attachments().len() == 1).await;
    result(node.call(node.request(Command::Del, "a", "")).await);
    assert!(node.kernel.is_clean());
    agent.stop(Duration::from_secs(5)).await;
}

/// Whether a file below a folder has a text in it.
fn contains(folder: &Path, text: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| {
        let path = entry.path();
        if path.is_dir() {
            contains(&path, text)
        } else {
            std::fs::read_to_string(&path).is_ok_and(|content| content.contains(text))
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_restarts_while_the_api_is_away() {
    let node = Node::new();
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    let kept = node.path("state").join("boot-cache.json");
    holds("the cache on disk", || std::fs::read_to_string(&kept).is_ok_and(|c| c.contains("\"shop\""))).await;
    agent.stop(Duration::from_secs(5)).await;

    // Nobody listens there.
    let agent = Agent::start(node.config(Source::Url("http://127.0.0.1:1".into()))).await.expect("started");
    result(node.call(node.request(Command::Status, "", "")).await);
    result(node.call(node.request(Command::Add, "b", "blue")).await);
    result(node.call(node.request(Command::Del, "a", "")).await);
    let mut elsewhere = node.request(Command::Add, "c", "");
    elsewhere.args.pod_namespace = Some("never-seen".into());
    assert_eq!(error_code(&node.call(elsewhere).await), code::TRY_AGAIN);
    agent.stop(Duration::from_secs(5)).await;
}

/// Everything boots at once: the API server is there, and its lists take their time. What was known before
/// the boot may be old, and the namespace may have a Network of its own by now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_list_is_waited_for_and_not_guessed() {
    let node = Node::new();
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    let kept = node.path("state").join("boot-cache.json");
    holds("the cache on disk", || std::fs::read_to_string(&kept).is_ok_and(|c| c.contains("\"shop\""))).await;
    agent.stop(Duration::from_secs(5)).await;

    // It takes every request, and answers none.
    let api = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", api.local_addr().expect("an address"));
    let holding = tokio::spawn(async move {
        let mut clients = Vec::new();
        while let Ok((client, _)) = api.accept().await {
            clients.push(client);
        }
    });
    let agent = Agent::start(node.config(Source::Url(url))).await.expect("started");
    let answer = node.call(node.request(Command::Add, "b", "")).await;
    assert_eq!(error_code(&answer), code::TRY_AGAIN, "{answer:?}");
    // Pods that are there are served as ever, and can go.
    result(node.call(node.request(Command::Del, "a", "")).await);
    assert!(node.kernel.is_clean());
    agent.stop(Duration::from_secs(5)).await;
    holding.abort();
}

/// An API server that lists some objects, never has news, and does not list the kinds that it holds back.
async fn half_an_api(objects: Vec<Value>, held: &'static str) -> (String, tokio::sync::watch::Sender<bool>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let api = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", api.local_addr().expect("an address"));
    let (open, opened) = tokio::sync::watch::channel(false);
    let objects = Arc::new(objects);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = api.accept().await {
            let (objects, opened) = (Arc::clone(&objects), opened.clone());
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = client.read_u8().await else { return };
                    head.push(byte);
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let request = head.lines().next().unwrap_or_default();
                let target = request.split(' ').nth(1).unwrap_or_default();
                let plural = target.split('?').next().and_then(|path| path.rsplit('/').next());
                let plural = plural.unwrap_or_default();
                if target.contains("watch=") {
                    let begun = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
                    let _ = client.write_all(begun).await;
                    return std::future::pending().await;
                }
                // All objects of a kind, or those of the Network behind the slash.
                let (held_kind, of_network) = held.split_once('/').unwrap_or((held, ""));
                let is_held = plural == held_kind && target.contains(of_network);
                let (status, body) = if is_held && !*opened.borrow() {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
                        "reason": "Forbidden", "message": "no role allows it"});
                    ("403 Forbidden", body)
                } else if request.starts_with("GET ") {
                    let of_kind = |object: &&Value| {
                        let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
                        plural == format!("{kind}s")
                    };
                    let items: Vec<&Value> = objects.iter().filter(of_kind).collect();
                    let list = json!({"kind": "List", "apiVersion": "v1",
                        "metadata": {"resourceVersion": "1"},
                        "items": items});
                    ("200 OK", list)
                } else {
                    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503,
                        "reason": "ServiceUnavailable", "message": "it only lists"});
                    ("503 Service Unavailable", body)
                };
                let body = body.to_string();
                let answer = format!(
                    "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
                     Connection: close\r\n\r\n{body}",
                    body.len()
                );
                let _ = client.write_all(answer.as_bytes()).await;
            });
        }
    });
    (url, open)
}

/// What a controller writes about two nodes.
fn slices(complete: bool) -> [Value; 3] {
    let slice = |kind: &str, name: &str, network: Option<&str>, mut spec: Value| {
        (spec["index"], spec["complete"]) = (json!(0), json!(complete));
        if let Some(network) = network {
            spec["network"] = json!(network);
        }
        json!({"apiVersion": "knit.dev/v1alpha1", "kind": kind,
            "metadata": {"name": name, "labels": network.map(|n| json!({"knit.dev/network": n}))},
            "spec": spec})
    };
    let block = |network: &str, node: &str, range: &str| {
        json!({"name": format!("{network}-{node}"), "node": node, "ipv4": range,
            "created": "2026-01-01T00:00:00Z"})
    };
    [
        slice(
            "NodeSlice",
            "nodes-0",
            None,
            json!({"nodes": [
            {"name": "node-1", "addresses": ["192.0.2.1"]}, {"name": "node-2", "addresses": ["192.0.2.2"]}]}),
        ),
        slice(
            "BlockSlice",
            "default-0",
            Some("default"),
            json!({"blocks": [block("default", "node-1", "10.1.0.0/28")]}),
        ),
        slice(
            "BlockSlice",
            "blue-0",
            Some("blue"),
            json!({"blocks": [
            block("blue", "node-1", "10.2.0.0/28"), block("blue", "node-2", "10.2.0.16/28")]}),
        ),
    ]
}

/// How many blocks of each node an agent told the runtime of.
fn told_blocks(node: &Node, network: &str) -> Vec<String> {
    let networks = node.kernel.networks();
    networks.get(network).map(|n| n.blocks.iter().map(|b| b.node.clone()).collect()).unwrap_or_default()
}

/// An agent reads slices, its own Node and its own blocks, and of no other Node or block the object.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_knows_other_nodes_from_slices_and_loses_none_when_somebody_deletes_them() {
    use k8s_openapi::api::core::v1::{Namespace, Node as NodeObject};
    use knit_api::{AddressBlock, BlockSlice, Network, NodeSlice};
    use knit_apiserver::{Config as ApiConfig, Server, StoreOptions};
    use knit_objects::{Key, Objects, Write};

    async fn create<K: knit_objects::Object + serde::Serialize>(objects: &Objects, object: &Value) {
        let object: K = serde_json::from_value(object.clone()).expect("an object");
        objects.write(&Write::create(&object)).await.expect("created");
    }
    let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
    let store = StoreOptions { crds, ..StoreOptions::default() };
    let server = Server::start(ApiConfig { store, ..ApiConfig::default() }).await.expect("an API server");
    let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
    let node = Node::new();
    for file in std::fs::read_dir(node.path("objects")).expect("the objects") {
        let text = std::fs::read(file.expect("a file").path()).expect("read");
        let object: Value = serde_json::from_slice(&text).expect("an object");
        match object["kind"].as_str().expect("a kind") {
            "Network" => {
                create::<Network>(&objects, &object).await;
                let key = Key::cluster(object["metadata"]["name"].as_str().expect("a name"));
                let write = Write::status::<Network>(key, &object["status"], "test");
                objects.write(&write).await.expect("written");
            }
            "AddressBlock" => create::<AddressBlock>(&objects, &object).await,
            "Namespace" => create::<Namespace>(&objects, &object).await,
            "Node" => {
                create::<NodeObject>(&objects, &object).await;
                let write = Write::status::<NodeObject>(Key::cluster("node-1"), &object["status"], "test");
                objects.write(&write).await.expect("written");
            }
            other => panic!("{other}"),
        }
    }
    // Another node that nobody has told of in a slice.
    create::<NodeObject>(&objects, &json!({"metadata": {"name": "node-9"}})).await;
    let start = || async {
        let mut config = node.config(Source::Url(server.url()));
        (config.core.block_wait, config.core.peers) = (Duration::from_secs(1), Peers::Slices);
        Agent::start(config).await.expect("started")
    };
    let agent = start().await;
    // A controller that is older writes no slices, and one that is at it has not written all.
    for held in ["no slices", "slices that are not complete"] {
        let answer = node.call(node.request(Command::Add, "a", "blue")).await;
        assert_eq!(error_code(&answer), code::TRY_AGAIN, "{held}: {answer:?}");
        assert!(format!("{answer:?}").contains("not all Nodes, BlockSlices have arrived"), "{answer:?}");
        if held == "no slices" {
            let [nodes, default, blue] = slices(false);
            create::<NodeSlice>(&objects, &nodes).await;
            create::<BlockSlice>(&objects, &default).await;
            create::<BlockSlice>(&objects, &blue).await;
            let known = || agent.core().world().get().nodes.contains_key("node-2");
            holds("the other node", known).await;
        }
    }
    let complete = json!({"spec": {"complete": true}});
    objects
        .write(&Write::merge::<NodeSlice>(Key::cluster("nodes-0"), complete.clone()))
        .await
        .expect("written");
    for name in ["default-0", "blue-0"] {
        let write = Write::merge::<BlockSlice>(Key::cluster(name), complete.clone());
        objects.write(&write).await.expect("written");
    }
    holds("all lists", || agent.core().world().get().is_synced()).await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    assert_eq!(told_blocks(&node, "blue"), ["node-1", "node-2"]);
    let inside = node.kernel.networks()["blue"].not_outside.clone();
    assert!(inside.contains(&"192.0.2.2/32".parse().expect("a range")), "{inside:?}");
    assert!(!agent.core().world().get().nodes.contains_key("node-9"), "Nodes themselves are not followed");

    let kept = node.path("state").join("boot-cache.json");
    let all_kept = |text: String| text.contains("10.2.0.16/28") && text.contains("\"whole\"");
    holds("the cache on disk", || std::fs::read_to_string(&kept).is_ok_and(all_kept)).await;

    // Somebody deletes all slices: whoever was known stays known.
    for name in ["blue-0", "default-0"] {
        objects.write(&Write::delete::<BlockSlice>(Key::cluster(name))).await.expect("deleted");
    }
    objects.write(&Write::delete::<NodeSlice>(Key::cluster("nodes-0"))).await.expect("deleted");
    // One more slice, by which it shows that the loss was heard of. Nothing waits for a controller.
    let block = json!({"name": "blue-node-3", "node": "node-3", "ipv4": "10.2.0.32/28"});
    let mark = json!({"metadata": {"name": "blue-1", "labels": {"knit.dev/network": "blue"}},
        "spec": {"network": "blue", "index": 1, "blocks": [block]}});
    create::<BlockSlice>(&objects, &mark).await;
    holds("the loss", || told_blocks(&node, "blue") == ["node-1", "node-2", "node-3"]).await;
    assert!(agent.core().world().get().is_synced());
    result(node.call(node.request(Command::Add, "c", "blue")).await);
    let all_kept = |text: String| text.contains("10.2.0.32/28");
    holds("the cache on disk", || std::fs::read_to_string(&kept).is_ok_and(all_kept)).await;
    objects.write(&Write::delete::<BlockSlice>(Key::cluster("blue-1"))).await.expect("deleted");
    // So it does over a restart of the agent, by what was kept on disk.
    agent.stop(Duration::from_secs(5)).await;
    let agent = start().await;
    result(node.call(node.request(Command::Add, "b", "blue")).await);
    assert_eq!(told_blocks(&node, "blue"), ["node-1", "node-2", "node-3"]);
    // One that says that the other nodes are gone is believed once all of it is there.
    let [_, default, mut blue] = slices(true);
    blue["spec"]["blocks"].as_array_mut().expect("blocks").truncate(1);
    create::<BlockSlice>(&objects, &default).await;
    create::<BlockSlice>(&objects, &blue).await;
    holds("the end of a block", || told_blocks(&node, "blue") == ["node-1"]).await;
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_was_let_out_to_every_service_while_the_service_ranges_were_not_known() {
    for (peers, held, list) in [
        (Peers::Objects, "servicecidrs", "servicecidrs"),
        (Peers::Objects, "nodes", "nodes"),
        (Peers::Slices, "nodes", "nodes"),
        (Peers::Slices, "nodeslices", "nodes"),
        (Peers::Slices, "blockslices", "blockslices"),
        // Where Nodes have podCIDRs, the blocks of the default Network say where its pods are.
        (Peers::Slices, "blockslices/default", "blockslices"),
        (Peers::Slices, "addressblocks", "addressblocks"),
    ] {
        let node = Node::new();
        let mut objects: Vec<Value> = std::fs::read_dir(node.path("objects"))
            .expect("the objects")
            .map(|file| std::fs::read(file.expect("a file").path()).expect("read"))
            .map(|text| serde_json::from_slice(&text).expect("an object"))
            .collect();
        objects.push(json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}}));
        objects.extend(slices(true));
        let (url, open) = half_an_api(objects, held).await;
        let mut config = node.config(Source::Url(url));
        (config.core.block_wait, config.core.peers) = (Duration::from_secs(1), peers);
        config.node_addresses = vec!["192.0.2.1".parse().expect("an address")];
        let agent = Agent::start(config).await.expect("started");
        let answer = node.call(node.request(Command::Add, "a", "blue")).await;
        assert_eq!(error_code(&answer), code::TRY_AGAIN, "{held}: {answer:?}");
        let said = format!("{answer:?}").to_lowercase();
        assert!(said.contains(&format!("not all {list} have arrived")), "{said}");
        assert!(!node.kernel.networks().contains_key("blue"), "{held}");
        open.send_replace(true);
        holds("the list", || agent.core().world().get().is_synced()).await;
        result(node.call(node.request(Command::Add, "a", "blue")).await);
        let inside = node.kernel.networks()["blue"].not_outside.clone();
        for range in ["10.96.0.0/16", "192.0.2.1/32"] {
            assert!(inside.contains(&range.parse().expect("a range")), "{held}: {inside:?}");
        }
        agent.stop(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_cluster_service_was_allowed_for_ever() {
    let node = Node::new();
    let blue = |services: &[&str]| {
        let services: Vec<Value> =
            services.iter().map(|name| json!({"namespace": "shop", "name": name})).collect();
        json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "blue"},
            "spec": {"class": "knit", "topology": "Layer3", "subnets": [{"cidr": "10.2.0.0/16"}],
                "allowedNamespaces": {"from": "All"}, "clusterServices": services},
            "status": {"id": 2}})
    };
    let service = |name: &str, ip: &str| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "shop"},
            "spec": {"clusterIP": ip, "clusterIPs": [ip]}})
    };
    node.put("1", &blue(&["db", "cache"]));
    node.put("db", &service("db", "10.96.0.7"));
    node.put("cache", &service("cache", "10.96.0.8"));
    let allowed = || -> Vec<String> {
        let networks = node.kernel.networks();
        networks
            .get("blue")
            .map(|n| n.cluster_service_ips.iter().map(ToString::to_string).collect())
            .unwrap_or_default()
    };
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    holds("the way to both", || allowed() == ["10.96.0.7", "10.96.0.8"]).await;
    let kept = node.path("state").join("boot-cache.json");
    holds("the cache on disk", || std::fs::read_to_string(&kept).is_ok_and(|c| c.contains("10.96.0.7")))
        .await;
    agent.stop(Duration::from_secs(5)).await;

    // Deleted while the agent is away.
    std::fs::remove_file(node.path("objects").join("db.json")).expect("removed");
    let agent = node.start().await;
    holds("the end of the way to it", || allowed() == ["10.96.0.8"]).await;

    // Deleted while the list changes, so that the watch that knew it does not see it go.
    std::fs::remove_file(node.path("objects").join("cache.json")).expect("removed");
    agent.core().world().update_networks(|world| {
        let networks = Arc::make_mut(&mut world.networks);
        let changed: knit_api::Network =
            serde_json::from_value(blue(&["cache", "other"])).expect("a Network");
        networks.insert("blue".to_owned(), Arc::new(changed.into()));
    });
    holds("the end of the way to that", || allowed().is_empty()).await;
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_went_while_the_agent_was_away_leaves_no_file_behind() {
    let node = Node::new();
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    let status = node.path("objects").join("status");
    holds("its NetworkAttachment", || contains(&status, "pod-a-net1")).await;
    // Killed: nothing of it is cleared away.
    agent.stop(Duration::from_secs(5)).await;
    knit_cni::spool::leave(&knit_cni::paths::spool(&node.path("run")), &node.request(Command::Del, "a", ""))
        .expect("noted");
    let agent = node.start().await;
    holds("the end of its NetworkAttachment", || !contains(&status, "pod-a-net1")).await;
    agent.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_is_replaced_by_another() {
    let node = Node::new();
    let first = node.start().await;
    let added = result(node.call(node.request(Command::Add, "a", "blue")).await);
    let (second, ()) = tokio::join!(node.start(), first.stop(Duration::from_secs(5)));
    assert_eq!(result(node.call(node.request(Command::Add, "a", "blue")).await), added);
    assert_eq!(node.kernel.attachments().len(), 2);
    second.stop(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_health_and_numbers() {
    let node = Node::new();
    node.put(
        "policy",
        &json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "wall", "namespace": "shop"}, "spec": {"podSelector": {}}}),
    );
    let agent = node.start().await;
    result(node.call(node.request(Command::Add, "a", "blue")).await);
    assert_eq!(
        error_code(
            &node.call(node.request(Command::Add, "b", r#"[{"name":"blue","ips":["10.2.0.1"]}]"#)).await
        ),
        code::REFUSED
    );
    let status = node.path("objects").join("status");
    for (what, text) in [
        ("the NetworkAttachment", "pod-a-net1"),
        ("the event of a refused pod", "RequestRefused"),
        ("the event of the policy", "NotEnforced"),
        ("the NodeNetwork", "agentVersion"),
        ("the Lease", "renewTime"),
        ("the Node's condition", "NetworkUnavailable"),
    ] {
        holds(what, || contains(&status, text)).await;
    }
    let address = agent.http().expect("an address");
    assert!(get(address, "/healthz").await.contains("200 OK"));
    assert!(get(address, "/readyz").await.contains("200 OK"));
    assert!(get(address, "/other").await.contains("404"));
    holds("the numbers", || {
        agent.core().metrics().text().contains("knit_node_attachments{network=\"blue\"} 1")
    })
    .await;
    let metrics = get(address, "/metrics").await;
    assert!(metrics.contains("knit_node_requests_total{operation=\"attach\",result=\"ok\"} 1"), "{metrics}");
    assert!(metrics.contains("result=\"RequestRefused\"} 1"), "{metrics}");

    result(node.call(node.request(Command::Del, "a", "")).await);
    holds("the end of the NetworkAttachment", || !contains(&status, "pod-a-net1")).await;
    agent.stop(Duration::from_secs(5)).await;
}

async fn get(address: SocketAddr, path: &'static str) -> String {
    let asked = tokio::task::spawn_blocking(move || {
        let mut stream = std::net::TcpStream::connect(address)?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer)
    });
    asked.await.expect("asked").expect("answered")
}

/// Nobody looked at claims any more: reservations stayed, and kubelet could not end pods.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_an_earlier_agent_were_left_alone_when_the_next_one_had_dra_off() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let socket = kubelet_dir.join("plugins/knit.dev/dra.sock");
    let config = || {
        let serve = ServeClaims::ThoseLeft;
        let dra = Some(DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve });
        AgentConfig { dra, ..node.config(Source::folder(node.path("objects"))) }
    };
    let agent = Agent::start(config()).await.expect("started");
    assert!(!socket.exists(), "there is no claim");
    let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
    let blue = Asked { network: "blue".into(), ..Asked::default() };
    let request = ClaimRequest { claim: claim.clone(), networks: vec![blue], pod: None };
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    agent.core().prepare_claim(request, soon).await.expect("reserved");
    agent.stop(Duration::from_secs(60)).await;

    let agent = Agent::start(config()).await.expect("started");
    assert!(socket.exists(), "kubelet can free it");
    // The folder has no such claim.
    let ledger = node.path("run").join("ledger");
    let records = || knit_ledger::read::<Entry>(&ledger).expect("the ledger").0.records.len();
    holds("it is freed, since it is gone", || records() == 0).await;
    agent.stop(Duration::from_secs(60)).await;
    let agent = Agent::start(config()).await.expect("started");
    assert!(!socket.exists(), "there is none any more");
    agent.stop(Duration::from_secs(60)).await;

    // Where kubelet's directory is not mounted, it starts all the same.
    let (mut files, _) = Files::open(&ledger).expect("the ledger");
    let left = Reservation::new(Owner::claim(claim), 1).expect("a reservation");
    files.commit(Batch::new().put(left.into())).expect("recorded");
    drop(files);
    std::fs::remove_dir_all(&kubelet_dir).expect("removed");
    std::fs::write(&kubelet_dir, b"").expect("in the way");
    Agent::start(config()).await.expect("started").stop(Duration::from_secs(60)).await;
}

/// Kubelet takes a claim for prepared, the ledger was moved away, and the pod has not arrived yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_started_without_its_claim_after_the_ledger_had_been_moved_away() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let config = || {
        let dra = DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve: ServeClaims::All };
        AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) }
    };
    let agent = Agent::start(config()).await.expect("started");
    result(node.call(node.request(Command::Add, "a", "")).await);
    agent.stop(Duration::from_secs(60)).await;

    let ledger = node.path("run").join("ledger");
    std::fs::remove_file(&ledger).expect("moved away");
    let agent = Agent::start(config()).await.expect("started");
    let refused = node.call(node.request(Command::Add, "b", "")).await;
    assert!(format!("{refused:?}").contains("not known to the node agent yet"), "{refused:?}");
    // The pod that runs is not asked for.
    result(node.call(node.request(Command::Add, "a", "")).await);
    agent.stop(Duration::from_secs(60)).await;

    // After a reboot there is no ledger either, and nothing that had one.
    std::fs::remove_file(&ledger).expect("gone");
    node.kernel.restart();
    let agent = Agent::start(config()).await.expect("started");
    result(node.call(node.request(Command::Add, "b", "")).await);
    agent.stop(Duration::from_secs(60)).await;
}

/// Kubelet's directory was not there, or its path too long: the node had no network at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_did_not_start_since_claims_could_not_be_served() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::write(&kubelet_dir, b"").expect("in the way");
    let dra = DraConfig { kubelet_dir: kubelet_dir.clone(), instance: None, serve: ServeClaims::All };
    let config = AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) };
    let agent = Agent::start(config).await.expect("started");
    result(node.call(node.request(Command::Add, "a", "")).await);
    let status = node.path("objects").join("status");
    holds("the event", || contains(&status, "ClaimsNotServed")).await;
    std::fs::remove_file(&kubelet_dir).expect("removed");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let socket = kubelet_dir.join("plugins_registry/knit.dev-reg.sock");
    holds("claims are served", || socket.exists()).await;
    agent.stop(Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_said_nothing_while_its_pod_could_not_be_attached() {
    let node = Node::new();
    let kubelet_dir = node.path("kubelet");
    std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).expect("a folder");
    let result_of =
        json!({"request": "nic", "driver": "knit.dev", "pool": "knit-networks", "device": "blue"});
    node.put(
        "claim",
        &json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "shop", "uid": "u-c"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [result_of]}},
                "reservedFor": [{"resource": "pods", "name": "pod-a", "uid": "uid-a"}]}}),
    );
    node.put(
        "pod",
        &json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "pod-a", "namespace": "shop", "uid": "uid-a"},
            "spec": {"nodeName": "node-1", "containers": [],
                "resourceClaims": [{"name": "net", "resourceClaimName": "c"}]}}),
    );
    let dra = DraConfig { kubelet_dir, instance: None, serve: ServeClaims::All };
    let config = AgentConfig { dra: Some(dra), ..node.config(Source::folder(node.path("objects"))) };
    let agent = Agent::start(config).await.expect("started");
    let claim = ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() };
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    agent.core().prepare(claim, soon).await.expect("prepared");
    node.kernel.fail(Faults { attach: Some((0, knit_runtime::Reason::Internal)), ..Faults::default() });
    error_code(&node.call(node.request(Command::Add, "a", "")).await);
    let status = node.path("objects").join("status");
    holds("why it is not ready", || contains(&status, "told to fail")).await;
    result(node.call(node.request(Command::Add, "a", "")).await);
    holds("that it is", || contains(&status, "verified") && !contains(&status, "told to fail")).await;
    agent.stop(Duration::from_secs(60)).await;
}
