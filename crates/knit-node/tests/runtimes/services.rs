//! Services of Networks of foreign runtimes, and what waits for service proxies.

use super::*;

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
        main_of(&mut request).ports =
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
    core.keep_network(&"other".into()).await;
    let Some(ServicesState::Off(who)) = state(&core, "other").services else {
        panic!("{:?}", state(&core, "other"));
    };
    assert!(who.contains(OTHER), "{who}");
}

/// Proxies whose supervisor a test plays: it lists Services, says how they are, and ends.
#[derive(Clone)]
struct Played {
    /// Whether all Services were listed.
    listed: watch::Receiver<bool>,
    state: watch::Receiver<ServicesState>,
}

#[derive(Debug)]
struct PlayedOne(watch::Receiver<ServicesState>);

impl Running for PlayedOne {
    fn update(&self, _: &knit_runtime::Network) {}

    fn watch(&self) -> watch::Receiver<ServicesState> {
        self.0.clone()
    }
}

#[async_trait]
impl ServiceProxy for Played {
    fn follow(&self, _: &Core, _: &knit_objects::Objects, _: &mut JoinSet<()>) {}

    async fn start(
        &self,
        _: Option<PathBuf>,
        network: &knit_runtime::Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        if self.stopped().is_some() {
            return Err(ProxyError { network: network.name.clone(), source: "it has ended".into() });
        }
        Ok(Box::new(PlayedOne(self.state.clone())))
    }

    fn owner_of_node_port(&self, _: Protocol, port: u16) -> Option<(String, String)> {
        let known = *self.listed.borrow() && port == 30080;
        known.then(|| ("forest".to_owned(), "web".to_owned()))
    }

    async fn node_ports_known(&self) -> bool {
        self.listed.clone().wait_for(|listed| *listed).await.is_ok()
    }

    fn stopped(&self) -> Option<Stopped> {
        let ended = self.state.has_changed().is_err();
        ended.then(|| Stopped { why: "they are not looked after".to_owned(), ran: true })
    }
}

/// A core whose runtime has routers, in which a test serves.
async fn core_with_routers(node: &Node, proxy: Played) -> Core {
    let config = node.config();
    let (ledger, _) = knit_node::files::Files::open(&config.ledger()).expect("the ledger");
    let (world, proxy) = (node.world.clone(), Some(Arc::new(proxy) as Arc<dyn ServiceProxy>));
    let core = Core::new(Parts { config, world, store: Box::new(ledger), proxy, policies: None });
    let runtime = FakeRuntime::new("knit.dev/linux", &node.kernel, &Life::default()).with_routers();
    core.runtimes().add(Arc::new(runtime)).await.expect("ours");
    let other = FakeRuntime::new(OTHER, &node.other, &Life::default());
    core.runtimes().add(Arc::new(other)).await.expect("the other");
    core
}

#[tokio::test(start_paused = true)]
async fn right_after_a_restart_a_host_port_took_the_node_port_of_a_service_that_was_not_listed_yet() {
    let node = Node::new();
    let (lists, listed) = watch::channel(false);
    // What an agent before left is in force; nobody has said yet whose it is.
    let (_state, state) = watch::channel(ServicesState::Kept);
    let core = core_with_routers(&node, Played { listed, state }).await;
    let add = |sandbox: &str, host_port| {
        let mut request = node.request(sandbox, "shop", "");
        let (protocol, container_port) = (Protocol::Tcp, 80);
        main_of(&mut request).ports =
            vec![PortMapping { protocol, host_port, container_port, host_ip: None }];
        core.attach(request, Instant::now() + Duration::from_secs(20))
    };
    let early = add("a", 30080).await.expect_err("nobody knows yet");
    assert_eq!(early.reason, Reason::NotReady, "{}", early.chain());
    assert!(early.chain().contains("Services"), "{}", early.chain());
    assert!(node.is_clean());
    core.attach(node.request("plain", "shop", ""), soon()).await.expect("who has no host port does not wait");
    let waiting = add("b", 30080);
    let (late, ()) = tokio::join!(waiting, async { _ = lists.send_replace(true) });
    let late = late.expect_err("it is forest/web's");
    assert_eq!(late.reason, Reason::Refused, "{}", late.chain());
    add("c", 30081).await.expect("nobody's");
    // While no API server answers there is nobody to wait for.
    let mut away = Node::new();
    away.world.before.networks_away = true;
    let (_lists, listed) = watch::channel(false);
    let (_state, state) = watch::channel(ServicesState::Kept);
    let core = core_with_routers(&away, Played { listed, state }).await;
    let mut request = away.request("d", "shop", "");
    let port = PortMapping { protocol: Protocol::Tcp, host_port: 80, container_port: 80, host_ip: None };
    main_of(&mut request).ports = vec![port];
    core.attach(request, soon()).await.expect("what was here before the outage");
}

#[tokio::test(start_paused = true)]
async fn when_nobody_looked_after_services_any_more_pods_of_tenants_were_started_without_them() {
    for before in [ServicesState::Waiting, ServicesState::Serving { ports: 3, failed: 0 }] {
        let node = Node::new();
        // Nor does anybody list Services any more.
        let (_, listed) = watch::channel(false);
        let (sender, receiver) = watch::channel(before.clone());
        let core = core_with_routers(&node, Played { listed, state: receiver }).await;
        core.keep_network(&"default".into()).await;
        core.keep_network(&"blue".into()).await;
        core.assess();
        core.readiness().now().expect("ready");
        if before == ServicesState::Waiting {
            // One that waits when it happens.
            let waiting = core.attach(node.request("a", "shop", "blue"), soon());
            // The clock moves on only when nobody has anything left to do.
            let ends = async {
                tokio::time::sleep(Duration::from_millis(1)).await;
                drop(sender);
            };
            let (waited, ()) = tokio::join!(waiting, ends);
            let error = waited.expect_err("its Services will not come");
            assert_eq!(error.reason, Reason::NotReady, "{}", error.chain());
        } else {
            drop(sender);
        }
        let started = Instant::now();
        let error = core.attach(node.request("b", "shop", "blue"), soon()).await.expect_err("refused");
        assert_eq!(error.reason, Reason::NotReady, "{}", error.chain());
        assert!(error.chain().contains("they are not looked after"), "{}", error.chain());
        assert_eq!(started.elapsed(), Duration::ZERO, "nobody waits for what will not come");
        // One that was set up afterwards has no proxy at all, and none will be started.
        let error = core.attach(node.request("e", "forest", ""), soon()).await.expect_err("refused");
        assert!(error.chain().contains("they are not looked after"), "{}", error.chain());
        // A Network that has no Services of ours does not need them.
        core.attach(node.request("f", "shop", "other"), soon()).await.expect("nothing to wait for");
        // The API server may need a pod of the default Network, also one with a host port.
        let mut request = node.request("c", "shop", "");
        let port = PortMapping { protocol: Protocol::Tcp, host_port: 80, container_port: 80, host_ip: None };
        main_of(&mut request).ports = vec![port];
        core.attach(request, soon()).await.expect("with a warning");
        core.assess();
        let problem = core.readiness().now().expect_err("not ready any more");
        assert!(problem.contains("they are not looked after"), "{problem}");
        let services = state(&core, "blue").services.expect("a proxy was started");
        assert!(matches!(services, ServicesState::Broken(_)), "{services:?}");
    }
}
