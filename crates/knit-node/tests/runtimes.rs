//! What a runtime has not announced is not asked of it; sockets that others can reach are not used; Services
//! of a foreign runtime's Networks are somebody else's.

mod common;

use std::future::pending;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::{Node, network};
use knit_api::conditions::node_network::REASON_UNSUPPORTED;
use knit_ipam::Mac;
use knit_kernel::testing::{eventually, skip};
use knit_node::proxy::{ProxyError, Running, ServiceProxy, ServicesState};
use knit_node::testing::{FakeRuntime, Life};
use knit_node::{Core, Parts, Reason};
use knit_runtime::{PortMapping, Protocol, feature, wire};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::Instant;

const OTHER: &str = "example.com/other";

/// A core whose second runtime lacks some features.
async fn core_without(node: &Node, features: &[&str], proxy: Option<Arc<dyn ServiceProxy>>) -> Core {
    let config = node.config();
    let (ledger, _) = knit_node::files::Files::open(&config.ledger()).expect("the ledger");
    let core = Core::new(Parts { config, world: node.world.clone(), store: Box::new(ledger), proxy });
    let life = Life::default();
    core.runtimes()
        .add(Arc::new(FakeRuntime::new("knit.dev/linux", &node.kernel, &life)))
        .await
        .expect("ours");
    let other = FakeRuntime::new(OTHER, &node.other, &life).without(features);
    core.runtimes().add(Arc::new(other)).await.expect("the other");
    core
}

fn state(core: &Core, name: &str) -> knit_node::networks::NetworkState {
    core.networks().states().into_iter().find(|s| s.name == name).expect("the Network")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[tokio::test]
async fn a_runtime_was_asked_for_what_it_had_not_announced() {
    let mut node = Node::new();
    let open = json!({"class": "other", "allowedNamespaces": {"from": "All"}, "mtu": 1400});
    Arc::make_mut(&mut node.world.networks)
        .insert("other".into(), Arc::new(network("other", 4, "10.4.0.0/16", open)));
    for (lacks, named) in [(feature::LAYER3, "Layer3"), (feature::IPV4, "IPv4"), (feature::MTU, "Mtu")] {
        let core = core_without(&node, &[lacks], None).await;
        let refused = core.attach(node.request("s1", "shop", "other"), soon()).await.expect_err("refused");
        for words in [named, OTHER, "Network other"] {
            assert!(refused.message.contains(words), "{words}: {refused}");
        }
        let problem = state(&core, "other").problem.expect("a problem");
        assert_eq!((problem.reason, node.other.set_ups()), (REASON_UNSUPPORTED, 0), "{}", problem.message);
        assert!(node.is_clean(), "all or nothing");
        // The pod's other Network is not its business.
        core.attach(node.request("s2", "shop", ""), soon()).await.expect("attached");
        core.detach(common::id("s2"), None).await.expect("detached");
    }
}

#[tokio::test]
async fn a_runtime_without_network_setup_is_not_asked_to_set_up() {
    let node = Node::new();
    let core = core_without(&node, &[feature::NETWORK_SETUP], None).await;
    core.keep_network("other").await;
    assert_eq!(state(&core, "other").problem, None);
    assert!(node.other.networks().is_empty(), "it was asked");
}

#[tokio::test]
async fn pods_ask_a_runtime_only_for_what_it_has() {
    let node = Node::new();
    for (lacks, asked) in [
        (feature::STATIC_ADDRESS, r#"[{"name": "other", "ips": ["10.4.0.7"]}]"#),
        (feature::STATIC_MAC, r#"[{"name": "other", "mac": "02:00:00:00:00:42"}]"#),
    ] {
        let core = core_without(&node, &[lacks], None).await;
        let refused = core.attach(node.request("s1", "shop", asked), soon()).await.expect_err("refused");
        assert_eq!(refused.reason, Reason::Refused);
        assert!(refused.message.contains(lacks) && refused.message.contains(OTHER), "{refused}");
        assert!(node.is_clean());
        // Without the wish it works; and who cannot be told a MAC chooses one.
        let made = core.attach(node.request("s1", "shop", "other"), soon()).await.expect("attached");
        let own_mac = made.attachments[1].mac == Mac([2, 0, 0, 0, 0, 1]);
        assert_eq!(own_mac, lacks == feature::STATIC_MAC, "{made:?}");
        core.detach(common::id("s1"), None).await.expect("detached");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_others_can_reach_were_used() {
    let node = Node::new();
    let core = core_without(&node, &[], None).await;
    let (dir, limit) = (core.config().runtimes_dir(), Duration::from_secs(5));
    std::fs::create_dir_all(&dir).expect("a directory");
    let socket = dir.join("late.sock");
    let (served, runtime) =
        (socket.clone(), FakeRuntime::new("example.com/late", &node.other, &Life::default()));
    tokio::spawn(async move { wire::serve(&served, Arc::new(runtime), pending()).await });
    eventually("it listens", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());
    let mode =
        |mode| std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).expect("a mode");
    let healthy = || core.runtimes().describe().into_iter().find(|r| r.name == "example.com/late");
    mode(0o666);
    core.runtimes().refresh(&dir, limit).await;
    assert!(healthy().is_none(), "a socket that everybody can reach is used");
    mode(0o600);
    core.runtimes().refresh(&dir, limit).await;
    assert!(healthy().expect("found now").healthy);
    // Opened later: it is said, where people look for it.
    mode(0o660);
    core.runtimes().refresh(&dir, limit).await;
    let now = healthy().expect("still known");
    assert!(!now.healthy && now.message.as_ref().is_some_and(|m| m.contains("mode 0660")), "{now:?}");
    // What is no socket at all is not called.
    std::fs::write(dir.join("file.sock"), b"").expect("written");
    core.runtimes().refresh(&dir, limit).await;
    assert_eq!(core.runtimes().describe().len(), 3);
}

#[tokio::test]
async fn a_socket_of_another_user_was_used() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can give a file to another user");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("theirs.sock");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    std::os::unix::fs::chown(&socket, Some(65534), None).expect("given away");
    let problem = knit_node::runtimes::closed_to_others(&socket).expect_err("refused");
    assert!(problem.contains("user 65534"), "{problem}");
}

/// A proxy that can only serve where there is a router.
struct NeedsRouter;

#[async_trait]
impl ServiceProxy for NeedsRouter {
    fn follow(&self, _: &Core, _: &knit_objects::Objects, _: &mut JoinSet<()>) {}

    async fn start(
        &self,
        router: Option<PathBuf>,
        network: &knit_runtime::Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        let source = format!("{router:?} does not exist").into();
        Err(ProxyError { network: network.name.clone(), source })
    }
}

/// A proxy that knows one Service.
struct OneService;

#[async_trait]
impl ServiceProxy for OneService {
    fn follow(&self, _: &Core, _: &knit_objects::Objects, _: &mut JoinSet<()>) {}

    async fn start(
        &self,
        _: Option<PathBuf>,
        network: &knit_runtime::Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        Err(ProxyError { network: network.name.clone(), source: "it serves nothing".into() })
    }

    fn owner_of_node_port(&self, protocol: Protocol, port: u16) -> Option<(String, String)> {
        let owner = ("forest".to_owned(), "web".to_owned());
        (protocol == Protocol::Tcp && port == 30080).then_some(owner)
    }
}

#[tokio::test]
async fn a_pods_host_port_took_another_tenants_node_port() {
    let node = Node::new();
    let core = core_without(&node, &[], Some(Arc::new(OneService))).await;
    let add = |sandbox: &str, namespace: &str, protocol, host_port| {
        let mut request = node.request(sandbox, namespace, "");
        request.start.as_mut().expect("a pod that starts").ports =
            vec![PortMapping { protocol, host_port, container_port: 80, host_ip: None }];
        core.attach(request, Instant::now() + Duration::from_secs(60))
    };
    let error = add("a", "shop", Protocol::Tcp, 30080).await.expect_err("it is forest/web's");
    assert_eq!(error.reason, Reason::Refused);
    assert!(error.chain().contains("node port of Service forest/web"), "{}", error.chain());
    assert!(node.is_clean());
    add("b", "shop", Protocol::Udp, 30080).await.expect("another port");
    add("c", "forest", Protocol::Tcp, 30080).await.expect("its own namespace's");
}

#[tokio::test]
async fn services_of_a_foreign_network_were_an_error() {
    let node = Node::new();
    let core = core_without(&node, &[], Some(Arc::new(NeedsRouter))).await;
    core.keep_network("other").await;
    let Some(ServicesState::Off(who)) = state(&core, "other").services else {
        panic!("{:?}", state(&core, "other"));
    };
    assert!(who.contains(OTHER), "{who}");
}
