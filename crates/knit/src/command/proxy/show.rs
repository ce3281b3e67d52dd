//! `knit proxy get` and `knit proxy explain`: the node view, for people and for scripts.
//!
//! Asked without a source, they ask the proxy that runs on this node; with one, they read the objects
//! themselves and show what a proxy would do, which needs no privilege.

use std::collections::HashSet;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use knit_objects::Objects;
use knit_output::{Cell, Format, Note, Table, Tone, note};
use knit_proxy::explain::{Explanation, PortExplanation};
use knit_proxy::objects;
use knit_proxy::source::Event;
use knit_proxy::view::{Action, Frontend, ListKind, PortKey, PortView, Sources, Target, View};
use serde::{Deserialize, Serialize};

use super::SourceArgs;
use super::settings::Common;
use super::watchers::{self, WatcherRow};
use super::{node, report, socket};

/// What to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Frontends, and the endpoints they lead to
    #[value(alias = "service", alias = "svc")]
    Services,
    /// Every endpoint, and whether it is used
    #[value(alias = "endpoint", alias = "ep")]
    Endpoints,
    /// Watchers of a running proxy's stream (--backend stream), and their last reports
    #[value(alias = "watcher")]
    Watchers,
}

/// How to show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table
    Table,
    /// A table with more columns
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// The whole node view, as it goes to scripts and through the socket.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct State {
    pub services: Vec<ServicePortRow>,
    pub endpoints: Vec<EndpointRow>,
    pub problems: Vec<String>,
    #[serde(default)]
    pub watchers: Vec<WatcherRow>,
}

/// One port of a Service in one family.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortRow {
    pub service: String,
    pub port: String,
    pub protocol: String,
    pub family: String,
    pub frontends: Vec<FrontendRow>,
    pub cluster_endpoints: usize,
    pub local_endpoints: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity_seconds: Option<u32>,
}

/// Somewhere clients connect to.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendRow {
    pub kind: String,
    pub address: String,
    pub route: String,
    pub endpoints: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_pods: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub only_from: Option<Vec<String>>,
    pub rejects: bool,
    pub drops: bool,
}

/// One endpoint of one port of a Service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRow {
    pub service: String,
    pub port: String,
    pub protocol: String,
    pub endpoint: String,
    pub here: bool,
    pub used: bool,
    /// Empty, and its conditions left out, where another proxy has decided: it does not say.
    pub slice: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminating: Option<bool>,
    /// Why it serves, or does not serve, traffic for all of the cluster's endpoints.
    pub cluster: String,
    /// The same for this node's endpoints.
    pub local: String,
}

/// How long to wait for objects that a cluster does not send.
const TIMEOUT: Duration = Duration::from_secs(15);

pub fn get(args: &SourceArgs, what: What, service: Option<&str>, output: Output) -> Result<ExitCode> {
    let running = asks_running(args);
    if what == What::Watchers && (!running || service.is_some()) {
        bail!(
            "watchers are those of the proxy that runs here: leave out the Service, --from-files, \
             --kubeconfig and --config"
        );
    }
    let mut state = match running {
        true => socket::ask::<State>(&args.socket, &socket::Request::State)?,
        false => State::of(&read(args)?),
    };
    for problem in &state.problems {
        note(Note::Warning, problem);
    }
    if let Some(service) = service.map(full_name) {
        state.services.retain(|row| row.service == service);
        state.endpoints.retain(|row| row.service == service);
        if state.services.is_empty() {
            bail!(
                "Service {service} does not exist or is not served here; knit proxy get services \
            lists those that are"
            );
        }
    }
    let format = match output {
        Output::Table | Output::Wide => Format::Table,
        Output::Json => Format::Json,
        Output::Yaml => Format::Yaml,
    };
    let wide = output == Output::Wide;
    match what {
        What::Services => {
            knit_output::print_rows(format, &state.services, || services(&state.services, wide))
        }
        What::Endpoints => {
            knit_output::print_rows(format, &state.endpoints, || endpoints(&state.endpoints, wide))
        }
        What::Watchers => {
            knit_output::print_rows(format, &state.watchers, || watchers::table(&state.watchers))
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

pub fn explain(args: &SourceArgs, service: &str) -> Result<ExitCode> {
    let service = full_name(service);
    let text = match asks_running(args) {
        true => socket::ask::<Option<String>>(
            &args.socket,
            &socket::Request::Explain { service: service.clone() },
        )?,
        false => {
            let seen = read(args)?;
            for problem in &seen.problems {
                note(Note::Warning, problem);
            }
            explanation(&seen.view, &service)
        }
    };
    let Some(text) = text else {
        bail!(
            "Service {service} is not served here: it may not exist, have no cluster IP, be of type \
            ExternalName, or be for a proxy with another name"
        );
    };
    knit_output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What is to be said about a Service of this view.
pub fn explanation(view: &View, service: &str) -> Option<String> {
    if let Some(explanation) = knit_proxy::explain::explain(view, service) {
        return Some(explanation.to_string());
    }
    let told = view.current().ports.keys().any(|key| key.service.as_str() == service);
    told.then(|| {
        format!(
            "Service {service}: decisions are made by another proxy (--from-stream); ask that one \
            for its reasons.\nknit proxy get services {service} and knit proxy get endpoints {service} show \
             what is done."
        )
    })
}

/// Without a source, the proxy that runs here is asked.
fn asks_running(args: &SourceArgs) -> bool {
    args.from_files.is_none() && args.kubeconfig.is_none() && args.config.is_none()
}

fn full_name(service: &str) -> String {
    if service.contains('/') { service.to_owned() } else { format!("default/{service}") }
}

/// The objects of a source, as one proxy sees them.
struct Seen {
    view: View,
    problems: Vec<String>,
}

fn read(args: &SourceArgs) -> Result<Seen> {
    let common = Common::read(args)?;
    for text in &common.warnings {
        note(Note::Warning, text);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let objects = Objects::open(common.source.clone()).await.context("cannot read Services")?;
        let mut source = objects::Source::new(node::own(&common.node_name, common.address));
        if let Some(name) = &common.proxy_name {
            source = source.named(name);
        }
        let mut feed = source.open(&objects).context("cannot read Services")?;
        let mut seen = Seen {
            view: View::new(common.view.clone(), knit_proxy::model::NodeInfo::new(&common.node_name)),
            problems: Vec::new(),
        };
        let listed = tokio::time::timeout(TIMEOUT, seen.take_all(&mut feed, common.address)).await;
        if listed.is_err() {
            let why = feed.trouble().unwrap_or_else(|| "it did not answer".to_owned());
            bail!(
                "no complete lists of Services, EndpointSlices and the Node from {} in {TIMEOUT:?}: {why}",
                objects.origin()
            );
        }
        let of_files = objects.problems();
        seen.problems.extend(of_files.borrow().iter().map(ToString::to_string));
        seen.view.take_changes();
        seen.problems.extend(seen.view.problems().map(ToString::to_string));
        let orphans = seen.view.orphans().map(|g| report::orphan(g.name.as_str(), g.service.as_str()));
        seen.problems.extend(orphans);
        seen.problems.sort();
        Ok(seen)
    })
}

impl Seen {
    /// Takes events until everything that there is was told. A cluster may have no ServiceCIDRs to list.
    async fn take_all(&mut self, feed: &mut objects::Feed, first: Option<IpAddr>) {
        let (mut services, mut groups, mut known) = (false, false, false);
        while !(services && groups && known) {
            let Some(events) = feed.next().await else { return };
            for event in events {
                match event {
                    Event::SetService(service) => self.view.set_service(*service),
                    Event::SetGroup(group) => self.view.set_group(*group),
                    Event::SetNode(mut info) => {
                        node::put_first(&mut info, first);
                        self.view.set_node(*info);
                        known = true;
                    }
                    Event::SetServiceRanges { name, ranges } => self.view.set_service_ranges(&name, ranges),
                    Event::ListDone(ListKind::Services) => services = true,
                    Event::ListDone(ListKind::Groups) => groups = true,
                    Event::Problem(problem) => self.problems.push(problem.to_string()),
                    Event::DeleteService(name) => self.view.delete_service(&name),
                    Event::DeleteGroup(name) => self.view.delete_group(&name),
                    Event::DeleteServiceRanges(_)
                    | Event::SetExemptVips(_)
                    | Event::ListStart(_)
                    | Event::ListDone(ListKind::ServiceRanges) => {}
                    // Those come from another proxy, never from objects.
                    Event::SetPort(..)
                    | Event::DeletePort(_)
                    | Event::SetHealthCheck(..)
                    | Event::DeleteHealthCheck(_)
                    | Event::SetSettings(_)
                    | Event::State { .. } => {}
                }
            }
        }
    }
}

impl State {
    fn of(seen: &Seen) -> Self {
        Self { problems: seen.problems.clone(), ..Self::of_view(&seen.view) }
    }

    /// Everything in a view.
    pub fn of_view(view: &View) -> Self {
        let mut state = Self::default();
        for (key, port) in &view.current().ports {
            let targets = |action: Action| match action {
                Action::Endpoints(scope) => port.targets(scope).len(),
                Action::Reject | Action::Drop => 0,
            };
            state.services.push(ServicePortRow {
                service: key.service.to_string(),
                port: key.port.to_string(),
                protocol: key.protocol.to_string(),
                family: key.family.to_string(),
                frontends: port
                    .frontends
                    .iter()
                    .map(|f| FrontendRow::of(f, targets(f.route.action)))
                    .collect(),
                cluster_endpoints: port.cluster.len(),
                local_endpoints: port.local.len(),
                affinity_seconds: port.affinity_seconds,
            });
        }
        let names = view.services().map(|service| service.name.as_str());
        let explained = names.filter_map(|name| knit_proxy::explain::explain(view, name));
        state.endpoints = explained.flat_map(|e| endpoint_rows(&e)).collect();
        let known: HashSet<&str> = view.services().map(|service| service.name.as_str()).collect();
        let told = view.current().ports.iter().filter(|(key, _)| !known.contains(key.service.as_str()));
        state.endpoints.extend(told.flat_map(|(key, port)| told_rows(key, port)));
        state.problems = view.problems().map(ToString::to_string).collect();
        state
    }
}

impl FrontendRow {
    fn of(frontend: &Frontend, endpoints: usize) -> Self {
        let address = match frontend.address {
            Some(address) => std::net::SocketAddr::new(address, frontend.port).to_string(),
            None => frontend.port.to_string(),
        };
        let only_from = match &frontend.sources {
            Sources::Any => None,
            Sources::Only { ranges, .. } => Some(ranges.iter().map(ToString::to_string).collect()),
        };
        Self {
            kind: frontend.kind.to_string(),
            address,
            route: frontend.route.to_string(),
            endpoints,
            from_pods: frontend.from_pods.map(|r| r.to_string()),
            from_node: frontend.from_node.map(|r| r.to_string()),
            only_from,
            rejects: frontend.route.action == Action::Reject,
            drops: frontend.route.action == Action::Drop,
        }
    }
}

fn endpoint_rows(explanation: &Explanation) -> Vec<EndpointRow> {
    let rows = |port: &PortExplanation| -> Vec<EndpointRow> {
        let row = |e: &knit_proxy::explain::EndpointExplanation| EndpointRow {
            service: port.key.service.to_string(),
            port: port.key.port.to_string(),
            protocol: port.key.protocol.to_string(),
            endpoint: e.target.to_string(),
            here: e.target.local,
            used: e.cluster.is_in() || e.local.is_in(),
            slice: e.group.to_string(),
            ready: Some(e.conditions.ready),
            serving: Some(e.conditions.serving),
            terminating: Some(e.conditions.terminating),
            cluster: e.cluster.to_string(),
            local: e.local.to_string(),
        };
        port.endpoints.iter().map(row).collect()
    };
    explanation.ports.iter().flat_map(rows).collect()
}

/// The endpoints of a port that another proxy has decided about: those that are used, and nothing of the
/// others.
fn told_rows(key: &PortKey, port: &PortView) -> Vec<EndpointRow> {
    let words = |used: bool| if used { "used" } else { "not used" }.to_owned();
    let (cluster, local): (HashSet<&Target>, HashSet<&Target>) =
        (port.cluster.iter().collect(), port.local.iter().collect());
    let only_local = port.local.iter().filter(|target| !cluster.contains(target));
    let row = |target: &Target| EndpointRow {
        service: key.service.to_string(),
        port: key.port.to_string(),
        protocol: key.protocol.to_string(),
        endpoint: target.to_string(),
        here: target.local,
        used: true,
        slice: String::new(),
        ready: None,
        serving: None,
        terminating: None,
        cluster: words(cluster.contains(target)),
        local: words(local.contains(target)),
    };
    port.cluster.iter().chain(only_local).map(row).collect()
}

fn services(rows: &[ServicePortRow], wide: bool) -> Table {
    let mut columns = vec!["SERVICE", "PORT", "KIND", "ADDRESS", "ENDPOINTS"];
    if wide {
        columns.extend(["ROUTE", "FROM PODS", "FROM NODE", "ONLY FROM", "AFFINITY"]);
    }
    let mut table = Table::new(&columns);
    for row in rows {
        for f in &row.frontends {
            let endpoints = match (f.rejects, f.drops) {
                (true, _) => Cell::new("rejected: there are none", Tone::Warning),
                (_, true) => Cell::new("dropped: none on this node", Tone::Warning),
                _ => Cell::new(f.endpoints, Tone::Good),
            };
            let mut cells: Vec<Cell> = vec![
                row.service.as_str().into(),
                port_name(&row.port, &row.protocol).into(),
                f.kind.as_str().into(),
                f.address.as_str().into(),
                endpoints,
            ];
            if wide {
                let affinity = row.affinity_seconds.map(|s| format!("{s}s")).unwrap_or_default();
                cells.extend([
                    Cell::from(f.route.as_str()),
                    f.from_pods.clone().unwrap_or_default().into(),
                    f.from_node.clone().unwrap_or_default().into(),
                    f.only_from.as_ref().map(|list| list.join(",")).unwrap_or_default().into(),
                    affinity.into(),
                ]);
            }
            table.row(cells);
        }
    }
    table
}

fn endpoints(rows: &[EndpointRow], wide: bool) -> Table {
    let mut columns = vec!["SERVICE", "PORT", "ENDPOINT", "HERE", "USED"];
    if wide {
        columns.extend(["STATE", "SLICE", "CLUSTER", "LOCAL"]);
    }
    let mut table = Table::new(&columns);
    for row in rows {
        let mut cells: Vec<Cell> = vec![
            row.service.as_str().into(),
            port_name(&row.port, &row.protocol).into(),
            row.endpoint.as_str().into(),
            if row.here { "yes" } else { "no" }.into(),
            Cell::yes_no(row.used),
        ];
        if wide {
            let states = [(row.ready, "ready"), (row.serving, "serving"), (row.terminating, "terminating")];
            let states: Vec<_> =
                states.iter().filter(|(is, _)| *is == Some(true)).map(|(_, name)| *name).collect();
            cells.extend([
                Cell::from(states.join(",")),
                row.slice.as_str().into(),
                row.cluster.as_str().into(),
                row.local.as_str().into(),
            ]);
        }
        table.row(cells);
    }
    table
}

fn port_name(port: &str, protocol: &str) -> String {
    if port.is_empty() { protocol.to_owned() } else { format!("{port}/{protocol}") }
}
