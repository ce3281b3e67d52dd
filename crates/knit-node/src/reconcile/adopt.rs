//! After the ledger was lost: what runtimes have is taken into a new one, so that no running pod notices.

use std::collections::BTreeMap;
use std::path::PathBuf;

use knit_ipam::{AddressList, LeaseKind};
use knit_ledger::{AttachmentPlan, Details, Leased, NetnsRef, SandboxRecord, Shared};
use knit_runtime::{Attachment, SandboxId};

use super::{Lists, Outcome, Reconciler};
use crate::clock;
use crate::netns;
use crate::request::Door;

/// The interface in a pod that others know it by.
const MAIN: &str = "eth0";

impl Reconciler {
    /// Takes what runtimes have into a ledger that lost it, or some of it: running pods must not notice. A
    /// record that was cut back may lack one interface only.
    pub(super) fn adopt(&self, lists: &Lists, netns_dirs: &[PathBuf], outcome: &mut Outcome) {
        let mut sandboxes: BTreeMap<&SandboxId, Vec<(&str, &Attachment)>> = BTreeMap::new();
        for (runtime, by_key) in &lists.by_runtime {
            for attachment in by_key.values() {
                sandboxes.entry(&attachment.pod.sandbox).or_default().push((runtime, attachment));
            }
        }
        let mut books = self.sandboxes.books();
        for (sandbox, attachments) in sandboxes {
            // What a record holds that cannot be read is its own until its DEL.
            if books.unreadable_of(sandbox).is_some() {
                continue;
            }
            let known = books.get(sandbox).cloned();
            let mut attachments = attachments;
            if let Some(record) = &known {
                let inode = record.netns().inode;
                attachments.retain(|(_, found)| {
                    let same = found.pod_netns_inode == inode || found.pod_netns_inode == 0;
                    same && record.attachment(&found.interface).is_none()
                });
            }
            let Some((_, first)) = attachments.first() else { continue };
            let pod = match (&first.pod.namespace, &first.pod.name) {
                (Some(namespace), Some(name)) => Some(knit_ipam::PodRef {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    uid: first.pod.uid.clone(),
                }),
                _ => self.pod_of(sandbox, attachments.iter().map(|(_, attachment)| *attachment)),
            };
            let inode = first.pod_netns_inode;
            let namespace = find_netns(netns_dirs, inode)
                // Unknown: never removed because a path is free, but by its DEL, or when nothing of it is
                // left.
                .unwrap_or(NetnsRef { path: PathBuf::new(), inode, device: 0 });
            let mut plans = attachments.iter().map(|(runtime, attachment)| plan_of(runtime, attachment));
            let record = match known {
                Some(mut record) => plans.try_for_each(|plan| record.plan(plan)).map(|()| record),
                None => SandboxRecord::planned(sandbox.clone(), pod, namespace, clock::now().0, plans),
            };
            let mut record = match record {
                Ok(record) => record,
                Err(error) => {
                    tracing::error!(
                        %sandbox, error = &error as &dyn std::error::Error,
                        "cannot record a running sandbox"
                    );
                    outcome.failed += 1;
                    continue;
                }
            };
            for (_, attachment) in &attachments {
                // Each was planned just above.
                let _ = record.attached(&attachment.interface, (*attachment).clone());
            }
            let found = |lease: &knit_ipam::Lease| {
                attachments.iter().any(|(_, attachment)| attachment.interface == lease.key.interface)
            };
            let leases: Vec<knit_ipam::Lease> = record.leases().filter(found).collect();
            if let Err(error) = books.put(record) {
                tracing::error!(
                    %sandbox, error = &error as &dyn std::error::Error,
                    "cannot record a running sandbox"
                );
                outcome.failed += 1;
                continue;
            }
            leases.into_iter().for_each(|lease| books.adopt(lease));
            outcome.adopted += attachments.len();
        }
    }

    /// Finds out whose sandboxes those are that were taken into the ledger without it; says of how many.
    pub(super) fn name_adopted(&self) -> usize {
        let strangers: Vec<SandboxId> = {
            let books = self.sandboxes.books();
            books.records().filter(|r| r.is_a_strangers()).map(|r| r.sandbox().clone()).collect()
        };
        strangers.iter().filter(|sandbox| self.name_one(sandbox).is_some()).count()
    }

    fn name_one(&self, sandbox: &SandboxId) -> Option<()> {
        // If something is being done for it, the next pass comes.
        let _guard = self.sandboxes.locks().try_lock(sandbox.clone())?;
        let mut record = self.sandboxes.books().get(sandbox).filter(|r| r.is_a_strangers())?.clone();
        let made = record.attachments().iter().filter_map(knit_ledger::Attachment::made);
        let pod = self.pod_of(sandbox, made)?;
        tracing::info!(%sandbox, %pod, "identified the pod of an adopted sandbox");
        record.of_pod(pod);
        match self.sandboxes.books().put(record) {
            Ok(()) => Some(()),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot record the pod of an adopted sandbox");
                None
            }
        }
    }

    /// The pod of a sandbox that a runtime knows by its id only.
    fn pod_of<'a>(
        &self,
        sandbox: &SandboxId,
        attachments: impl Iterator<Item = &'a Attachment>,
    ) -> Option<knit_ipam::PodRef> {
        let said = self.cri.as_ref().and_then(|cri| cri.pod(sandbox.as_str()));
        said.or_else(|| self.pod_by_objects(sandbox)).or_else(|| self.pod_by_address(attachments))
    }

    /// The pod whose kubelet says that it has the address of the main interface.
    fn pod_by_address<'a>(
        &self,
        attachments: impl Iterator<Item = &'a Attachment>,
    ) -> Option<knit_ipam::PodRef> {
        let mut main = attachments.filter(|attachment| attachment.interface.as_str() == MAIN);
        let addresses: Vec<_> = main.next()?.addresses.iter().map(|address| address.net.addr()).collect();
        let world = self.world.get();
        // One that is done may have left its address to another.
        let mut pods = world.pods.iter().filter(|(_, pod)| {
            !pod.ending && !pod.host_network && pod.addresses.iter().any(|a| addresses.contains(a))
        });
        let ((namespace, name), pod) = pods.next()?;
        // Two Networks may have the same addresses.
        pods.next().is_none().then(|| knit_ipam::PodRef {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: pod.uid.clone().filter(|_| !pod.mirror),
        })
    }

    /// The pod of a sandbox that a runtime knows by its id only, and that the container runtime is not asked
    /// for: what agents wrote into the status of its NetworkAttachments says it.
    fn pod_by_objects(&self, sandbox: &SandboxId) -> Option<knit_ipam::PodRef> {
        let objects = self.world.users().all();
        let mut pods = objects.iter().filter_map(|object| {
            let (namespace, status) = (object.metadata.namespace.as_ref()?, object.status.as_ref()?);
            let here = status.node.as_deref() == Some(self.config.node.as_str());
            (here && status.sandbox_id.as_deref() == Some(sandbox.as_str()))
                .then(|| (namespace.clone(), object.spec.pod.clone()))
        });
        let first = pods.next()?;
        // Two that differ: somebody else wrote one of them.
        pods.all(|pod| pod == first).then_some(())?;
        Some(knit_ipam::PodRef { namespace: first.0, name: first.1, uid: None })
    }
}

fn plan_of(runtime: &str, attachment: &Attachment) -> AttachmentPlan {
    let main = attachment.interface.as_str() == MAIN;
    let details = Details {
        door: Door::Cni(String::new()),
        main,
        default_route: main,
        ports: attachment.ports.clone(),
        dns: attachment.dns.clone(),
    };
    let addresses: Vec<std::net::IpAddr> = attachment.addresses.iter().map(|a| a.net.addr()).collect();
    AttachmentPlan {
        interface: attachment.interface.clone(),
        network: attachment.network.clone(),
        runtime: runtime.to_owned(),
        lease: AddressList::from_list(&addresses).map(|addresses| Leased {
            addresses,
            mac: attachment.mac,
            kind: LeaseKind::Dynamic,
        }),
        loan: None,
        host_interface: Some(attachment.host.name.clone()).filter(|name| !name.is_empty()),
        details: Shared::new(details),
    }
}

/// The namespace with this inode, if it is mounted in one of these directories.
fn find_netns(directories: &[PathBuf], inode: u64) -> Option<NetnsRef> {
    let entries = directories.iter().filter_map(|d| std::fs::read_dir(d).ok()).flatten().flatten();
    let mut found = entries.filter_map(|e| netns::identify(&e.path()).ok().flatten());
    found.find(|namespace| inode != 0 && namespace.inode == inode)
}
