//! Events on Services: told by one node, although every node sees the same.
//!
//! A proxy does not know the other nodes, but it knows where a Service's endpoints are. Of those nodes one
//! speaks, which all of them work out for themselves. A problem of a Service without endpoints waits for the
//! first; until then it is in every proxy's log, and in `knit proxy get`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use knit_objects::{EventLimits, EventNote, EventRecorder, Objects, Reporter};
use knit_proxy::elect::speaks;
use knit_proxy::engine::Inspect;
use knit_proxy::model::Problem;
use knit_proxy::source::Handle;

/// How often problems that nobody was told of are looked at.
const TURN: Duration = Duration::from_secs(5);
/// Beyond so many that wait, the oldest are forgotten: they are in the log.
const WAITING: usize = 1024;

/// Where problems go to be told.
#[derive(Clone)]
pub struct Teller(Sender<Problem>);

/// Problems that wait until it can be said who tells of them.
pub struct Waiting {
    node: String,
    inbox: Receiver<Problem>,
    problems: Vec<Problem>,
}

/// Starts.
pub fn teller(node: &str) -> (Teller, Waiting) {
    let (sender, inbox) = channel();
    (Teller(sender), Waiting { node: node.to_owned(), inbox, problems: Vec::new() })
}

impl Teller {
    /// Something is wrong with an object.
    pub fn tell(&self, problem: &Problem) {
        if problem.object.kind == "Service" {
            // Nobody listens where there is no cluster to tell.
            let _ = self.0.send(problem.clone());
        }
    }
}

impl Waiting {
    /// Takes out what this node is to tell now. What another node tells is forgotten.
    fn due(&mut self, nodes_of: impl Fn(&str) -> BTreeSet<Arc<str>>) -> Vec<Problem> {
        self.problems.extend(self.inbox.try_iter());
        let excess = self.problems.len().saturating_sub(WAITING);
        self.problems.drain(..excess);
        let mut due = Vec::new();
        self.problems.retain(|problem| {
            let nodes = nodes_of(&problem.object.name);
            if speaks(&self.node, nodes.iter().map(|node| &**node), &problem.object.name, 1) {
                due.push(problem.clone());
            }
            nodes.is_empty()
        });
        due
    }

    /// Writes events, for as long as the proxy runs.
    pub async fn run(mut self, objects: Objects, handle: Handle) {
        let reporter = Reporter { controller: "knit.dev/proxy".to_owned(), instance: self.node.clone() };
        let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
        let mut turn = tokio::time::interval(TURN);
        loop {
            turn.tick().await;
            let engine = handle.clone();
            let looked = tokio::task::spawn_blocking(move || {
                engine.inspect(move |inspect| {
                    let due = self.due(|service| nodes_of(&inspect, service));
                    (self, due)
                })
            });
            let Ok(Ok((waiting, due))) = looked.await else { return };
            self = waiting;
            for problem in due {
                let text = format!("{}: {}", problem.field, problem.message);
                recorder.tell(EventNote::warning(regarding(&problem), "NotServed", "Serve", text));
            }
        }
    }
}

/// The nodes of a Service's endpoints.
fn nodes_of(inspect: &Inspect<'_>, service: &str) -> BTreeSet<Arc<str>> {
    let endpoints = inspect.view.groups(service).flat_map(|group| group.endpoints.iter());
    endpoints.filter_map(|endpoint| endpoint.node.clone()).collect()
}

/// The Service that an event is to be on.
fn regarding(problem: &Problem) -> ObjectReference {
    let (namespace, name) = problem.object.name.split_once('/').unwrap_or(("default", &problem.object.name));
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(list: &[&str]) -> BTreeSet<Arc<str>> {
        list.iter().map(|name| Arc::from(*name)).collect()
    }

    #[test]
    fn one_node_tells_of_what_all_of_them_see() {
        let all: Vec<String> = (0..50).map(|n| format!("node-{n}")).collect();
        let with_endpoints = ["node-3", "node-7", "node-31"];
        let problem = Problem::service("shop/web", "spec.externalIPs", "it is another Service's");
        let told = |node: &String| {
            let (teller, mut waiting) = teller(node);
            teller.tell(&problem);
            // Without endpoints nobody can be chosen, and it waits.
            assert_eq!(waiting.due(|_| nodes(&[])), []);
            let due = waiting.due(|_| nodes(&with_endpoints));
            assert!(waiting.problems.is_empty());
            due.len()
        };
        assert_eq!(all.iter().map(told).sum::<usize>(), 1);
    }

    #[test]
    fn what_waits_is_limited() {
        let (teller, mut waiting) = teller("node-1");
        for n in 0..2 * WAITING {
            teller.tell(&Problem::service(&format!("shop/web-{n}"), "spec.ports", "it is wrong"));
        }
        assert_eq!(waiting.due(|_| nodes(&[])), []);
        assert_eq!(waiting.problems.len(), WAITING);
    }
}
