//! Pods that talk while something happens to the cluster around them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use knit_kernel::NetNs;

use super::pods::{self, Pod};
use super::talk::{self, Flow, How, all_ways};
use super::{install, support};
use crate::kube::bed::Bed;
use crate::kube::wait::until;

/// How long the Service may take to answer at first.
const LIMIT: Duration = Duration::from_secs(60);

/// Servers and clients that talk, in a namespace of their own: from a pod of n1 to n2, by address and by
/// Service.
pub struct Talkers {
    namespace: &'static str,
    before: Vec<Pod>,
    /// The client's network namespace.
    pub client: NetNs,
    /// The server on the other node.
    pub direct: SocketAddr,
    /// The Service of both servers.
    pub service: SocketAddr,
}

impl Talkers {
    /// Makes them, and waits until they are heard.
    pub fn start(bed: &Bed, namespace: &'static str) -> Result<Self> {
        support::namespace(bed, namespace)?;
        bed.apply(&install::workload(namespace))?;
        support::pods_ready(bed, namespace)?;
        let server = pods::pod(bed, namespace, "server-n2")?;
        let talkers = Self {
            namespace,
            client: pods::pod(bed, namespace, "client-n1")?.space()?,
            direct: (server.address()?, 8080).into(),
            service: (pods::cluster_ip(bed, namespace, "server")?, 80).into(),
            before: pods::pods(bed, namespace)?,
        };
        // Both servers behind the Service, on both nodes: what nodes have now is what they are compared with
        // later.
        for client in ["client-n1", "client-n2"] {
            let space = pods::pod(bed, namespace, client)?.space()?;
            let mut heard = BTreeSet::new();
            until(&format!("both servers answer {client} by their Service"), LIMIT, || {
                heard.extend(talk::http(&space, talkers.service, "/hostname")?);
                Ok((heard.len() == 2).then_some(()))
            })?;
        }
        Ok(talkers)
    }

    /// All ways to a pod, and new connections to the Service.
    pub fn flows(&self) -> Vec<Flow> {
        let mut flows = all_ways(self.direct);
        flows.extend([How::Connections, How::Stream].map(|how| Flow { to: self.service, how }));
        flows
    }

    /// That all are the pods that they were.
    pub fn not_hurt(&self, bed: &Bed) -> Result<()> {
        pods::not_hurt(&self.before, &pods::pods(bed, self.namespace)?)
    }
}
