//! Tells the author of a Service which of its addresses is not served, and why.
//!
//! Every node comes to the same conclusion. Two of them say so: whichever two the Service's name falls to, so that one
//! that is away is not missed and thousands do not write the same.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::ObjectReference;
use knit_node::world::World;
use knit_objects::{EventLimits, EventNote, EventRecorder, Objects, Reporter};
use knit_proxy::elect::speaks;
use knit_proxy::model::{NetworkName, ServiceName};

/// How many nodes tell.
const SPEAKERS: usize = 2;

/// What is refused, and what was said about it.
#[derive(Debug)]
pub(crate) struct Refusals {
    node: String,
    recorder: EventRecorder,
    told: BTreeMap<(ServiceName, Why), String>,
}

/// Why something is refused, as the reason of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// The Network does not allow external IPs.
    ExternalIPsDenied,
    /// An address belongs to somebody else.
    AddressRefused,
}

impl Refusals {
    /// Needs a tokio runtime.
    pub(crate) fn new(objects: &Objects, node: &str) -> Self {
        let reporter = Reporter { controller: "knit.dev/node".to_owned(), instance: node.to_owned() };
        let recorder = EventRecorder::start(objects, reporter, EventLimits::default());
        Self { node: node.to_owned(), recorder, told: BTreeMap::new() }
    }

    /// The external IPs of a Service that its Network does not allow; none: nothing is wrong.
    pub(crate) fn denied(
        &mut self,
        world: &World,
        service: &ServiceName,
        found: Option<(&NetworkName, &[IpAddr])>,
    ) {
        let text = found.map(|(network, addresses)| {
            let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            format!(
                "spec.externalIPs {} are not served: Network {network} does not allow them; its operator can, with \
                 spec.services.externalIPs: Allow. A Service of type LoadBalancer needs no such permission",
                list.join(", ")
            )
        });
        self.say(world, service, Why::ExternalIPsDenied, text);
    }

    /// The addresses of a Service that lead elsewhere or nowhere; none of them: nothing is wrong.
    pub(crate) fn addresses(&mut self, world: &World, service: &ServiceName, whys: &[String]) {
        let text = (!whys.is_empty()).then(|| format!("not served from outside: {}", whys.join("; ")));
        self.say(world, service, Why::AddressRefused, text);
    }

    fn say(&mut self, world: &World, service: &ServiceName, why: Why, text: Option<String>) {
        let key = (service.clone(), why);
        let Some(text) = text else {
            self.told.remove(&key);
            return;
        };
        if self.told.get(&key) == Some(&text) {
            return;
        }
        tracing::warn!(%service, "{text}");
        let nodes = world.nodes.keys().map(String::as_str);
        if speaks(&self.node, nodes, service.as_str(), SPEAKERS) {
            let reason = format!("{why:?}");
            let note: String = text.chars().take(1000).collect();
            self.recorder.tell(EventNote::warning(regarding(service), &reason, "Serve", note));
        }
        self.told.insert(key, text);
    }
}

fn regarding(service: &ServiceName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        namespace: Some(service.namespace().to_owned()),
        name: Some(service.name().to_owned()),
        ..ObjectReference::default()
    }
}
