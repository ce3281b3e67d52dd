//! Runs the proxy: objects in on one side, a backend on the other, and the servers that kube-proxy has.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_objects::Objects;
use knit_output::{Note, note};
use knit_proxy::backend::Backend;
use knit_proxy::backends::{BackendSetup, Backends as _};
use knit_proxy::grpc::{self, Link, Stream};
use knit_proxy::metrics;
use knit_proxy::model::NodeInfo;
use knit_proxy::objects::{Feed, Source};
use knit_proxy::source::{Event, Handle, Stopped};
use knit_proxy::start::{Options, start};
use knit_proxy::vitals::{Checks, ServerError, ServerNews, Servers, Vitals};
use knit_proxy_nft::{Config, KubeProxy, NftBackends};
use prometheus_client::registry::Registry;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tracing_subscriber::EnvFilter;

use super::report::{Log, Orphans, orphans};
use super::settings::Settings;
use super::{BackendKind, ServeArgs, SourceArgs, listen, node, print, socket, tell, watchers};
use crate::command::stop::Stop;

type AnyBackend = Box<dyn Backend + Send>;

/// How often the machine's own addresses are looked at.
const ADDRESSES: Duration = Duration::from_secs(30);
/// How often endpoint groups without a Service are looked for.
const ORPHANS: Duration = Duration::from_secs(10);

/// Runs until it is told to stop. What it made stays: connections go on, and the next start takes over.
pub fn serve(settings: &Settings, args: &ServeArgs) -> Result<ExitCode> {
    start_log(settings)?;
    for text in &settings.common.warnings {
        tracing::warn!("{text}");
    }
    for text in &settings.common.remarks {
        tracing::info!("{text}");
    }
    let kube_proxy = neighbour(args)?;
    if let Some(wanted) = &settings.conntrack
        && args.backend == BackendKind::Nftables
    {
        wanted.apply(&NetNs::current().context("cannot open this process's network namespace")?);
    }
    let mut registry = Registry::default();
    let vitals = Vitals::register(&mut registry, settings.unhealthy_after);
    let stream = Stream::new();
    let backend = backend(args.backend, settings, &vitals, &stream)?;
    let stream = (args.backend == BackendKind::Stream).then_some(stream);
    if let Some(stream) = &stream {
        registry.register_collector(Box::new(watchers::Numbers(stream.clone())));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve_with(settings, args, (backend, stream), kube_proxy, (vitals, registry)))?;
    // A look at objects that still waits for its answer must not hold the end up.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Removes what a proxy made here.
pub fn clean_up(args: &SourceArgs) -> Result<ExitCode> {
    let table = nft_config(args.service_proxy_name.as_deref()).table;
    let mut nft = Kernel::open().context("cannot open nftables")?;
    let found = knit_proxy_nft::remove_table(&mut nft, &table)
        .with_context(|| format!("cannot remove the nftables tables {table}"))?;
    let done = if found { "removed" } else { "there is no" };
    note(Note::Info, format!("{done} nftables table {table}"));
    Ok(ExitCode::SUCCESS)
}

fn backend(kind: BackendKind, settings: &Settings, vitals: &Vitals, stream: &Stream) -> Result<AnyBackend> {
    Ok(match kind {
        BackendKind::Stream => Box::new(stream.clone()),
        BackendKind::Print => Box::new(print::Print(std::io::stdout())),
        BackendKind::Nftables => NftBackends.open(BackendSetup {
            proxy_name: settings.common.proxy_name.as_deref(),
            masquerade_mark: 1 << settings.masquerade_bit,
            on_clean: Some(vitals.on_clean()),
            ..BackendSetup::default()
        })?,
    })
}

/// What `/proxyMode` answers.
fn mode_of(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Nftables => NftBackends.name(),
        BackendKind::Print => "print",
        BackendKind::Stream => "stream",
    }
}

fn nft_config(proxy_name: Option<&str>) -> Config {
    proxy_name.map_or_else(Config::default, Config::named)
}

/// Looks for kube-proxy, and refuses to start where it is at work, unless told to. Answers with what is to be
/// removed.
fn neighbour(args: &ServeArgs) -> Result<Option<KubeProxy>> {
    if args.backend != BackendKind::Nftables {
        return Ok(None);
    }
    let here = NetNs::current().context("cannot open this process's network namespace")?;
    let found = KubeProxy::look_in(&here)?;
    if found.is_empty() {
        return Ok(None);
    }
    if args.beside_kube_proxy {
        tracing::warn!(
            "found rules of kube-proxy on this node ({found}); they stay, because \
            --beside-kube-proxy is given"
        );
        return Ok(None);
    }
    if args.takeover && found.removable() {
        tracing::info!(
            "found rules of kube-proxy on this node ({found}); they are removed once our rules are in force"
        );
        return Ok(Some(found));
    }
    if args.takeover {
        bail!(
            "found rules of kube-proxy on this node ({found}), and not all of them can be removed \
            from here: stop kube-proxy, run kube-proxy --cleanup, and start again"
        );
    }
    bail!(
        "found rules of kube-proxy on this node ({found}); two proxies for the same Services \
        interfere with each other. Stop kube-proxy and start this with --takeover, or leave it and \
        start this with --beside-kube-proxy"
    )
}

/// Where the proxy hears of Services.
enum Input {
    /// From the objects themselves.
    Objects(Objects, Box<Feed>),
    /// From another proxy.
    Stream(Box<grpc::Source>),
}

impl Input {
    async fn open(settings: &Settings, args: &ServeArgs) -> Result<Self> {
        let common = &settings.common;
        let reading = |from: &str| {
            tracing::info!(version = env!("CARGO_PKG_VERSION"), node = common.node_name, "reading {from}");
        };
        if let Some(address) = &args.from_stream {
            let source = grpc::Source::new(address, &common.node_name).context("--from-stream")?;
            reading(address);
            return Ok(Self::Stream(Box::new(source)));
        }
        let objects = Objects::open(common.source.clone()).await.context("cannot read Services")?;
        reading(&objects.origin().to_string());
        let own = node::own(&common.node_name, common.address);
        let mut source = Source::new(own);
        if let Some(name) = &common.proxy_name {
            source = source.named(name);
        }
        let feed = source.open(&objects).context("cannot read Services")?;
        Ok(Self::Objects(objects, Box::new(feed)))
    }

    /// Where events can be written that somebody sees: in a cluster, and not in a folder.
    fn cluster(&self) -> Option<&Objects> {
        match self {
            Self::Objects(objects, _) => objects.client().map(|_| objects),
            Self::Stream(_) => None,
        }
    }

    /// Sends everything that happens to the engine.
    async fn feed(self, handle: Handle, first: Option<std::net::IpAddr>) -> Result<(), Stopped> {
        match self {
            Self::Objects(_, feed) => feed_engine(*feed, handle, first).await,
            Self::Stream(source) => source.run(handle, log_link).await,
        }
    }
}

fn log_link(link: Link) {
    match link {
        Link::Connected => tracing::info!("the stream is open"),
        Link::Lost { reason, retry_in } => tracing::warn!(
            "the stream is closed ({reason}); existing rules stay in force, retrying in {retry_in:?}"
        ),
    }
}

/// Hands the node view on, at an address to listen on or a socket's path.
async fn serve_stream(stream: Stream, address: String, hard_fail: bool) -> Result<()> {
    let served = match address.strip_prefix("unix:") {
        Some(path) => {
            let listener = socket::listen(std::path::Path::new(path))?;
            tracing::info!("serving the node view at {address}");
            stream.serve_unix(listener).await
        }
        None => {
            let at = address
                .parse()
                .with_context(|| format!("--stream-address: {address:?} must be IP:PORT or unix:PATH"))?;
            stream.serve_tcp(listen::listen(at, "the node view over gRPC", hard_fail).await?).await
        }
    };
    served.context("the server of the stream has stopped")
}

async fn serve_with(
    settings: &Settings,
    args: &ServeArgs,
    (backend, stream): (AnyBackend, Option<Stream>),
    kube_proxy: Option<KubeProxy>,
    (vitals, registry): (Vitals, Registry),
) -> Result<()> {
    let common = &settings.common;
    let input = Input::open(settings, args).await?;
    let (teller, waiting) = tell::teller(&common.node_name);
    let (log, in_force) = Log::new(move |problem| teller.tell(problem));
    let mut observers = vitals.observers();
    observers.push(Box::new(log));
    if let Input::Stream(source) = &input {
        observers.push(source.observer());
    }
    if !backend.families().v6 {
        tracing::info!("this kernel has no IPv6: IPv6 is disabled");
    }
    let (ended, mut engine_ended) = oneshot::channel();
    let options = Options {
        engine: settings.engine.clone(),
        observers,
        // Nobody listens when the program ends anyway.
        on_end: Some(Box::new(move || _ = ended.send(()))),
    };
    let running = start(backend, NodeInfo::new(&common.node_name), options)?;
    let handle = running.handle().clone();

    let mut servers = vitals.serve(&Servers {
        healthz: Some(settings.healthz),
        metrics: Some(settings.metrics),
        mode: mode_of(args.backend),
        text: Arc::new(move || metrics::text(&registry)),
        // With a stream the health checks are those of the node that follows.
        checks: stream.is_none().then_some(Checks::OnNodePorts),
        hard_fail: settings.hard_fail,
        tell: Arc::new(log_server),
        ..Servers::default()
    });
    let watched = stream.clone();
    let (address, hard) = (args.stream_address.clone(), settings.hard_fail);
    let streaming = async move {
        match stream {
            Some(stream) => serve_stream(stream, address, hard).await,
            None => std::future::pending().await,
        }
    };
    match socket::listen(&settings.socket) {
        Ok(listener) => {
            tokio::spawn(socket::serve(listener, handle.clone(), watched));
        }
        Err(error) => tracing::warn!("knit proxy get cannot query this proxy: {error:#}"),
    }
    tokio::spawn(watch_orphans(handle.clone()));
    if let Some(objects) = input.cluster() {
        tokio::spawn(waiting.run(objects.clone(), handle.clone()));
    }
    let feeding = tokio::spawn(input.feed(handle.clone(), common.address));
    if let Some(found) = kube_proxy {
        tokio::spawn(take_over(found, in_force));
    }

    let mut stop = Stop::listen()?;
    let result = tokio::select! {
        () = stop.asked() => Ok(()),
        _ = &mut engine_ended => Err(anyhow::anyhow!("the proxy's thread has stopped; the log above \
        says why")),
        failed = first_failure(&mut servers) => Err(failed),
        ended = streaming => ended,
    };
    feeding.abort();
    if result.is_ok() {
        tracing::info!("stopping; existing rules stay in force");
    }
    // It may be busy in the kernel for a while. That it panicked was printed.
    let _ = tokio::task::spawn_blocking(move || running.stop()).await;
    // Left behind, it is replaced by the next start.
    let _ = std::fs::remove_file(&settings.socket);
    result
}

/// Waits until a server of the proxy fails.
async fn first_failure(servers: &mut JoinSet<Result<(), ServerError>>) -> anyhow::Error {
    while let Some(ended) = servers.join_next().await {
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.into(),
            Err(panicked) => return anyhow::Error::from(panicked).context("a server has stopped"),
        }
    }
    std::future::pending().await
}

fn log_server(news: &ServerNews<'_>) {
    match news {
        ServerNews::Listening { .. } => tracing::info!("{news}"),
        ServerNews::Unavailable { .. } => tracing::error!("{news}"),
        ServerNews::NoCheck { .. } => tracing::warn!("{news}"),
    }
}

async fn feed_engine(mut feed: Feed, handle: Handle, first: Option<std::net::IpAddr>) -> Result<(), Stopped> {
    let mut addresses = tokio::time::interval(ADDRESSES);
    loop {
        let events = tokio::select! {
            events = feed.next() => match events {
                Some(events) => events,
                None => return Ok(()),
            },
            _ = addresses.tick() => match node::host_addresses() {
                Ok(found) => feed.host_addresses(found).into_iter().collect(),
                Err(error) => {
                    tracing::warn!("{error:#}");
                    Vec::new()
                }
            },
        };
        for mut event in events {
            if let Event::SetNode(node) = &mut event {
                node::put_first(node, first);
            }
            handle.send(event)?;
        }
    }
}

async fn watch_orphans(handle: Handle) {
    let mut known = Orphans::default();
    let mut turn = tokio::time::interval(ORPHANS);
    loop {
        turn.tick().await;
        let engine = handle.clone();
        let found = tokio::task::spawn_blocking(move || engine.inspect(orphans)).await;
        let Ok(Ok(found)) = found else { return };
        for text in known.look(&found) {
            tracing::warn!("{text}");
        }
    }
}

async fn take_over(found: KubeProxy, mut in_force: watch::Receiver<bool>) {
    if in_force.wait_for(|yes| *yes).await.is_err() {
        return;
    }
    let removed = tokio::task::spawn_blocking(move || {
        let mut nft = Kernel::open().context("cannot open nftables")?;
        found.remove_tables(&mut nft).with_context(|| format!("cannot remove {found}"))
    });
    if let Ok(Err(error)) = removed.await {
        tracing::error!("{error:#}; it is still there");
    }
}

fn start_log(settings: &Settings) -> Result<()> {
    let level = match settings.verbosity {
        // Each failed request would be a line without object or address; what does not arrive is told by
        // knit_objects.
        0 => "info,kube_client::client::builder=off",
        1 => "info,knit=debug,knit_proxy=debug,knit_objects=debug",
        _ => "debug",
    };
    let filter = match std::env::var("KNIT_LOG") {
        Ok(text) => {
            EnvFilter::try_new(&text).with_context(|| format!("KNIT_LOG={text} is not a valid log filter"))?
        }
        Err(_) => EnvFilter::new(level),
    };
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    let started = if settings.json_logs {
        log.json().try_init()
    } else {
        log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init()
    };
    started.map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
}
