//! Tells the author of a Service which of its addresses is not served, and why.
//!
//! Every node comes to the same conclusion. Two of them say so: whichever two the Service's name falls to, so
//! that one that is away is not missed and thousands do not write the same. What a Service's author can
//! change again and again is said once a minute at most, and in few words.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use knit_node::world::World;
use knit_objects::{EventLimits, EventNote, EventRecorder, Objects, Reporter};
use knit_proxy::elect::speaks;
use knit_proxy::model::{NetworkName, ServiceName};

use crate::entrances::Refusal;

/// How many nodes tell.
const TELLING_NODES: usize = 2;
/// How often something else is said of one Service.
const RETELL_INTERVAL: Duration = Duration::from_secs(60);
/// So much of it is said.
const MAX_MESSAGE_CHARS: usize = 1000;

/// What is refused, and what was said about it.
#[derive(Debug)]
pub(crate) struct Refusals {
    node: String,
    recorder: EventRecorder,
    said: ToldRefusals,
}

/// What a refusal is about.
type RefusalSubject = (ServiceName, RefusalReason);

/// What was said, and what is to be said when the pause is over.
#[derive(Debug, Default)]
struct ToldRefusals {
    last: BTreeMap<RefusalSubject, String>,
    at: BTreeMap<RefusalSubject, Instant>,
    waiting: BTreeMap<RefusalSubject, String>,
}

/// Why something is refused, as the reason of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RefusalReason {
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
        Self { node: node.to_owned(), recorder, said: ToldRefusals::default() }
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
                "spec.externalIPs {} are not served: Network {network} does not allow them; its operator \
                can allow them with spec.services.externalIPs: Allow. A Service of type LoadBalancer does \
                not need this permission",
                list.join(", ")
            )
        });
        self.say(world, service, RefusalReason::ExternalIPsDenied, text, false);
    }

    /// The addresses of a Service that lead elsewhere or nowhere; none of them: nothing is wrong.
    pub(crate) fn addresses(&mut self, world: &World, service: &ServiceName, refused: &[Refusal]) {
        let whys: Vec<&str> = refused.iter().map(|refusal| &*refusal.why).collect();
        let text = (!whys.is_empty()).then(|| format!("not served from outside: {}", whys.join("; ")));
        // What only this node knows nobody else tells.
        let only_here = refused.iter().any(|refusal| refusal.only_here);
        let text = text.map(|text| if only_here { format!("on node {}, {text}", self.node) } else { text });
        self.say(world, service, RefusalReason::AddressRefused, text, only_here);
    }

    fn say(
        &mut self,
        world: &World,
        service: &ServiceName,
        why: RefusalReason,
        text: Option<String>,
        only_here: bool,
    ) {
        let now = Instant::now();
        let nodes = world.nodes.keys().map(String::as_str);
        let speaks =
            text.is_some() && (only_here || speaks(&self.node, nodes, service.as_str(), TELLING_NODES));
        let mut due = self.said.waited(now);
        due.extend(self.said.takes((service.clone(), why), text, speaks, now));
        for ((service, why), text) in due {
            tracing::warn!(%service, "{text}");
            self.recorder.tell(EventNote::warning(regarding(&service), &format!("{why:?}"), "Serve", text));
        }
    }
}

// === impl ToldRefusals ===

impl ToldRefusals {
    /// What is to be said now of what is refused; no text: nothing is.
    fn takes(
        &mut self,
        subject: RefusalSubject,
        text: Option<String>,
        speaks: bool,
        now: Instant,
    ) -> Option<(RefusalSubject, String)> {
        self.waiting.remove(&subject);
        let Some(text) = text.map(|text| text.chars().take(MAX_MESSAGE_CHARS).collect::<String>()) else {
            self.last.remove(&subject);
            return None;
        };
        if self.last.get(&subject) == Some(&text) {
            return None;
        }
        if !speaks {
            self.last.insert(subject, text);
            return None;
        }
        if self.at.get(&subject).is_some_and(|at| now < *at + RETELL_INTERVAL) {
            self.waiting.insert(subject, text);
            return None;
        }
        self.at.retain(|_, at| now < *at + RETELL_INTERVAL);
        self.at.insert(subject.clone(), now);
        self.last.insert(subject.clone(), text.clone());
        Some((subject, text))
    }

    /// What waited long enough.
    fn waited(&mut self, now: Instant) -> Vec<(RefusalSubject, String)> {
        let over =
            |subject: &RefusalSubject| self.at.get(subject).is_none_or(|at| now >= *at + RETELL_INTERVAL);
        let due: Vec<RefusalSubject> = self.waiting.keys().filter(|subject| over(subject)).cloned().collect();
        let mut said = Vec::new();
        for subject in due {
            let text = self.waiting.remove(&subject);
            said.extend(self.takes(subject, text, true, now));
        }
        said
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_author_who_changes_a_service_all_the_time_filled_every_nodes_log() {
        let subject = |name: &str| (ServiceName::from(name), RefusalReason::AddressRefused);
        let mut said = ToldRefusals::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let long = |n: usize| Some(format!("{n} {}", "x".repeat(100_000)));
        // Where others speak, nothing is said.
        assert_eq!(said.takes(subject("a/quiet"), long(0), false, at(0)), None);
        let first = said.takes(subject("a/loud"), long(1), true, at(0)).expect("said");
        assert_eq!(first.1.chars().count(), MAX_MESSAGE_CHARS);
        let more = (2..100).filter_map(|n| said.takes(subject("a/loud"), long(n), true, at(n as u64 % 60)));
        assert_eq!(more.count(), 0);
        // Going and coming again is a change, too.
        assert_eq!(said.takes(subject("a/loud"), None, true, at(30)), None);
        assert_eq!(said.takes(subject("a/loud"), long(100), true, at(31)), None);
        assert!(said.takes(subject("a/other"), long(1), true, at(31)).is_some(), "others do not wait");
        // What it is in the end is said.
        assert_eq!(said.waited(at(59)), []);
        let late = said.waited(at(60));
        assert_eq!(late.len(), 1);
        assert!(late[0].1.starts_with("100 "), "{}", &late[0].1[..10]);
        assert_eq!(
            (said.waited(at(200)), said.takes(subject("a/loud"), long(100), true, at(200))),
            (vec![], None)
        );
        assert!(said.waiting.is_empty());
    }
}
