//! The source of a running proxy: reads Services, EndpointSlices, ServiceCIDRs and this proxy's Node, and
//! follows them.
//!
//! A [`Feed`] turns what `knit-objects` says, of a cluster or of a folder of files, into [`Event`]s. Objects
//! are converted as they come in and are not kept. What is wrong with one is told once, and again only after
//! it changed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

pub use knit_objects::{FolderOptions, Objects, Source as Origin};

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use knit_objects::{Event as Change, Key, Subscription};
use knit_types::sync::Locked;

use crate::kubernetes::{Converted, HEADLESS_LABEL, Kubernetes, PROXY_NAME_LABEL};
use crate::model::{GroupName, NetworkName, NodeInfo, ObjectRef, Problem, ServiceName};
use crate::source::{Event, Handle, Stopped};
use crate::view::ListKind;

/// What to read, and for which node.
pub struct Source {
    kubernetes: Kubernetes,
    proxy_name: Option<String>,
    node: NodeInfo,
}

/// The events of one proxy. Ends when it is dropped.
pub struct Feed {
    services: Subscription<Converted>,
    slices: Subscription<Converted>,
    ranges: Subscription<Converted>,
    nodes: Subscription<(NodeInfo, Vec<Problem>)>,
    /// What was told of objects that have something wrong; all others are not in it.
    told: HashMap<ObjectRef, Vec<Problem>>,
    node: Place,
}

/// What is known of the node.
struct Place {
    /// What this machine knows of itself.
    own: NodeInfo,
    /// The last Node object, and whether it is still there.
    object: Option<NodeInfo>,
    gone: bool,
}

impl Source {
    /// For the node of this name. What else is known of it here (addresses of its interfaces) fills in what
    /// its Node object does not say, or stands alone where there is no such object.
    #[must_use]
    pub fn new(node: NodeInfo) -> Self {
        Self { kubernetes: Kubernetes::new(), proxy_name: None, node }
    }

    /// Serves the Services that have this name in their label instead of those that have no such label (rule
    /// 1).
    #[must_use]
    pub fn named(mut self, proxy_name: &str) -> Self {
        self.kubernetes = self.kubernetes.named(proxy_name);
        self.proxy_name = Some(proxy_name.to_owned());
        self
    }

    /// Says which Network a namespace's services are in.
    #[must_use]
    pub fn networks(mut self, network_of: impl Fn(&str) -> NetworkName + Send + 'static) -> Self {
        self.kubernetes = self.kubernetes.networks(network_of);
        self
    }

    /// Starts reading. Needs a tokio runtime.
    ///
    /// # Errors
    /// When a selector is none, which a proxy name that is no label value makes so.
    pub fn open(self, objects: &Objects) -> knit_objects::Result<Feed> {
        let kubernetes = Arc::new(Mutex::new(self.kubernetes));
        // The server leaves out what is not ours; conversion looks again, because files may have anything.
        let ours = match &self.proxy_name {
            Some(name) => format!("{PROXY_NAME_LABEL}={name}"),
            None => format!("!{PROXY_NAME_LABEL}"),
        };
        let shared = Arc::clone(&kubernetes);
        // Headless Services are not a proxy's (rule 3): what is not sent need not be read.
        let services = objects.watch::<Service>().labels(ours).fields("spec.clusterIP!=None");
        let services = services.map(move |object| Some(lock(&shared).service(&object))).subscribe()?;
        let shared = Arc::clone(&kubernetes);
        let slices = objects.watch::<EndpointSlice>().labels(format!("!{HEADLESS_LABEL}"));
        let slices = slices.map(move |object| Some(lock(&shared).slice(&object))).subscribe()?;
        let shared = Arc::clone(&kubernetes);
        let ranges = objects.watch::<ServiceCIDR>();
        let ranges = ranges.map(move |object| Some(lock(&shared).service_cidr(&object))).subscribe()?;
        let nodes = objects.watch::<Node>().fields(format!("metadata.name={}", self.node.name));
        let nodes = nodes.map(move |object| Some(lock(&kubernetes).node(&object))).subscribe()?;
        let node = Place { own: self.node, object: None, gone: false };
        Ok(Feed { services, slices, ranges, nodes, told: HashMap::new(), node })
    }
}

impl Feed {
    /// What happened next; empty for news that mean nothing to a proxy. `None` when the runtime shuts down.
    pub async fn next(&mut self) -> Option<Vec<Event>> {
        let mut events = Vec::new();
        tokio::select! {
            change = self.services.next() => {
                let gone = |key: &Key| Event::DeleteService(ServiceName::new(namespace(key), key.name()));
                self.take("Service", ListKind::Services, change?, gone, &mut events);
            }
            change = self.slices.next() => {
                let gone = |key: &Key| Event::DeleteGroup(GroupName::new(namespace(key), key.name()));
                self.take("EndpointSlice", ListKind::Groups, change?, gone, &mut events);
            }
            change = self.ranges.next() => {
                let gone = |key: &Key| Event::DeleteServiceRanges(key.name().into());
                self.take("ServiceCIDR", ListKind::ServiceRanges, change?, gone, &mut events);
            }
            change = self.nodes.next() => match change? {
                Change::Applied(key, (node, problems)) => {
                    self.tell("Node", key.name(), problems, &mut events);
                    self.node.object = Some(node);
                    self.node.gone = false;
                    events.push(self.node.event());
                }
                Change::Deleted(_) => {
                    self.node.gone = true;
                    events.push(self.node.event());
                }
                // Without a Node object the machine speaks for itself.
                Change::Synced => events.push(self.node.event()),
            },
        }
        Some(events)
    }

    /// Sends everything to an engine, until it stops or the runtime shuts down.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn send_to(mut self, handle: &Handle) -> Result<(), Stopped> {
        while let Some(events) = self.next().await {
            events.into_iter().try_for_each(|event| handle.send(event))?;
        }
        Ok(())
    }

    /// The machine's own addresses are other ones now.
    pub fn host_addresses(&mut self, addresses: Vec<std::net::IpAddr>) -> Option<Event> {
        if self.node.own.host_addresses == addresses {
            return None;
        }
        self.node.own.host_addresses = addresses;
        Some(self.node.event())
    }

    /// Why objects do not arrive, if they do not and that is known.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let all = [self.services.connection(), self.slices.connection(), self.nodes.connection()];
        all.iter().find_map(|connection| connection.borrow().error().map(str::to_owned))
    }

    fn take(
        &mut self,
        kind: &'static str,
        list: ListKind,
        change: Change<Converted>,
        gone: impl FnOnce(&Key) -> Event,
        events: &mut Vec<Event>,
    ) {
        match change {
            Change::Applied(key, converted) => {
                events.push(converted.event);
                self.tell(kind, &full_name(list, &key), converted.problems, events);
            }
            Change::Deleted(key) => {
                events.push(gone(&key));
                self.told.remove(&ObjectRef { kind, name: full_name(list, &key).into() });
            }
            Change::Synced => events.push(Event::ListDone(list)),
        }
    }

    /// Tells of problems that the object did not have before.
    fn tell(&mut self, kind: &'static str, name: &str, problems: Vec<Problem>, events: &mut Vec<Event>) {
        let object = ObjectRef { kind, name: name.into() };
        let before = self.told.remove(&object).unwrap_or_default();
        events.extend(problems.iter().filter(|p| !before.contains(p)).cloned().map(Event::Problem));
        if !problems.is_empty() {
            self.told.insert(object, problems);
        }
    }
}

impl Place {
    fn event(&self) -> Event {
        let mut node = self.object.clone().unwrap_or_else(|| self.own.clone());
        node.host_addresses.clone_from(&self.own.host_addresses);
        if node.addresses.is_empty() {
            node.addresses.clone_from(&self.own.addresses);
        }
        // A node whose object was deleted is on its way out (rules 55, 60).
        node.leaving |= self.gone;
        Event::SetNode(Box::new(node))
    }
}

fn namespace(key: &Key) -> &str {
    key.namespace().unwrap_or("default")
}

/// As a [`Problem`] calls the object.
fn full_name(list: ListKind, key: &Key) -> String {
    match list {
        ListKind::ServiceRanges => key.name().to_owned(),
        ListKind::Services | ListKind::Groups => format!("{}/{}", namespace(key), key.name()),
    }
}

/// Conversion does not panic; a converter is whole whenever it is not in use.
fn lock(kubernetes: &Mutex<Kubernetes>) -> MutexGuard<'_, Kubernetes> {
    kubernetes.locked()
}
