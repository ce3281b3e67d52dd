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
use knit_node::{Asked, ClaimRequest, CoreConfig};
use knit_objects::Source;
use knit_testbed::objects;
use knit_testbed::wait::{eventually, holds};
use knit_types::{ObjectRef, Owner};
use serde_json::{Value, json};
use tempfile::TempDir;

#[path = "agent/claims.rs"]
mod claims;
#[path = "agent/give_back.rs"]
mod give_back;
#[path = "agent/slices.rs"]
mod slices;

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

/// What a file has in it that is text.
fn text_of(file: &Path) -> Option<String> {
    std::fs::read(file).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// What an ADD gives whose caller comes again as long as it is told to, as kubelet does: how much has arrived
/// in the short time that these agents wait depends on the machine.
async fn added(node: &Node, sandbox: &str, networks: &str) -> Value {
    let end = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        match node.call(node.request(Command::Add, sandbox, networks)).await {
            Response::Err(error) if error.code == code::TRY_AGAIN => {
                assert!(tokio::time::Instant::now() < end, "{sandbox}: not within a minute: {error:?}");
            }
            response => return result(response),
        }
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
    let kept = node.path("state").join("boot-cache.log");
    holds("the cache on disk", || text_of(&kept).is_some_and(|c| c.contains("namespace/shop"))).await;
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
    let kept = node.path("state").join("boot-cache.log");
    holds("the cache on disk", || text_of(&kept).is_some_and(|c| c.contains("namespace/shop"))).await;
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
    let kept = node.path("state").join("boot-cache.log");
    holds("the cache on disk", || text_of(&kept).is_some_and(|c| c.contains("10.96.0.7"))).await;
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
        networks.insert("blue".into(), Arc::new(changed.try_into().expect("a name")));
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
