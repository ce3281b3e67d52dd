//! What the agent has recorded of the sandboxes of this node, as policies need it: also where a record cannot
//! be read. Its pod runs, and is as isolated as it was.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use knit_ledger::{SandboxRecord, Unreadable};
use knit_node::Core;
use knit_policy::model::{Attachment, Name};
use knit_types::PodRef;

/// One sandbox of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) uid: Option<String>,
    pub(crate) created_at: u64,
    pub(crate) attachments: Vec<Attachment>,
}

/// Where somebody has an interface here of whom it is not known which pod it is: policies may act on it, and
/// what the kernel has about it is all that is left of them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Strangers {
    /// In these Networks.
    pub(crate) networks: BTreeSet<Name>,
    /// In one that is not known either.
    pub(crate) anywhere: bool,
}

/// Everything that is recorded of pods, by namespace and name.
pub(crate) type ByPod = BTreeMap<(String, String), Vec<Recorded>>;

/// What is recorded of one pod; several while one goes and another comes.
pub(crate) fn of_pod(core: &Core, namespace: &str, name: &str) -> Vec<Recorded> {
    let is_it = |pod: &PodRef| pod.namespace == namespace && pod.name == name;
    let records = core.sandboxes().records_of(namespace, name);
    let unreadable = core.sandboxes().unreadable();
    let made_out = unreadable.iter().filter(|record| record.pod().is_some_and(|pod| is_it(&pod)));
    records.iter().map(Recorded::of).chain(made_out.filter_map(Recorded::made_out)).collect()
}

/// What is recorded of all pods.
pub(crate) fn by_pod(core: &Core) -> (ByPod, Strangers) {
    let sandboxes = core.sandboxes();
    gather(&sandboxes.records(), &sandboxes.unreadable())
}

fn gather(records: &[SandboxRecord], unreadable: &[Unreadable]) -> (ByPod, Strangers) {
    let (mut by_pod, mut strangers) = (ByPod::new(), Strangers::default());
    let mut add = |pod: &PodRef, recorded| {
        by_pod.entry((pod.namespace.clone(), pod.name.clone())).or_default().push(recorded);
    };
    for record in records {
        match record.pod() {
            Some(pod) => add(pod, Recorded::of(record)),
            // What others than Kubernetes attached is nobody's subject.
            None if record.is_a_strangers() => {
                let networks = record.attachments().iter().map(|a| Name::from(a.plan().network.as_str()));
                strangers.networks.extend(networks);
            }
            None => {}
        }
    }
    for record in unreadable {
        match (record.pod(), Recorded::made_out(record)) {
            (_, Some(made_out)) if made_out.attachments.is_empty() => {}
            (Some(pod), Some(made_out)) => add(&pod, made_out),
            _ => {
                for holding in record.holds() {
                    match holding.network {
                        Some(network) => drop(strangers.networks.insert(network.as_str().into())),
                        None => strangers.anywhere = true,
                    }
                }
            }
        }
    }
    (by_pod, strangers)
}

impl Recorded {
    pub(crate) fn of(record: &SandboxRecord) -> Self {
        Self {
            uid: record.pod().and_then(|pod| pod.uid.clone()),
            created_at: record.created_at(),
            attachments: attachments(record).collect(),
        }
    }

    /// A record that cannot be read, if its interfaces can be made out.
    fn made_out(record: &Unreadable) -> Option<Self> {
        let attachments = record.interfaces()?.into_iter().map(|interface| Attachment {
            network: interface.network.as_str().into(),
            primary: interface.main,
            addresses: interface.addresses.into(),
        });
        Some(Self {
            uid: record.pod().and_then(|pod| pod.uid),
            created_at: record.created_at().unwrap_or_default(),
            attachments: attachments.collect(),
        })
    }
}

impl Strangers {
    /// Whether one of them may be in this Network.
    pub(crate) fn may_be_in(&self, network: &Name) -> bool {
        self.anywhere || self.networks.contains(network)
    }
}

/// The interfaces of a sandbox that have addresses, made or not.
fn attachments(record: &SandboxRecord) -> impl Iterator<Item = Attachment> + '_ {
    record.attachments().iter().map(|attachment| {
        let plan = attachment.plan();
        let leased = plan.lease.iter().flat_map(|lease| lease.addresses.iter());
        let mut addresses: Vec<IpAddr> = leased.collect();
        // A runtime that gives out addresses itself says which when it has.
        if addresses.is_empty() {
            let made = attachment.made().into_iter().flat_map(|made| made.addresses.iter());
            addresses.extend(made.map(|address| address.net.addr()));
        }
        let network = plan.network.as_str().into();
        Attachment { network, primary: attachment.details().main, addresses: addresses.into() }
    })
}
