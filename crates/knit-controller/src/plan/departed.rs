//! What a node that is gone leaves behind: attachments that no agent will ever speak of again.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_api::conditions::network_attachment as reasons;
use knit_api::names::ATTACHMENT_FINALIZER;

use super::action::{Action, Plan};
use super::index::Index;
use super::status::condition;
use super::turn::Turn;
use crate::cluster::{Agents, AttachmentView, Cluster, Gone, Memory, NamespacedName, Now};
use crate::config::Config;

/// Nodes that have been gone for longer than the grace, with their agents: one that still renews its Lease
/// serves pods, whoever deleted its Node. While renewals would not arrive (`heard` is false), no node counts
/// as departed, and each agent gets its whole time again.
pub(super) fn nodes(
    (cluster, index): (&Cluster, Index<'_>),
    memory: &mut Memory,
    config: &Config,
    (now, heard): (Now, bool),
    plan: &mut Plan,
) -> HashSet<String> {
    let missing: BTreeSet<&str> = index.missing().collect();
    memory.gone.retain(|node, _| missing.contains(node.as_str()));
    let mut departed = HashSet::new();
    for node in missing {
        let new = || Gone { since: now.steady, lease: None };
        let gone = memory.gone.entry(node.to_owned()).or_insert_with(new);
        let mut over = gone.since.saturating_add(config.node_gone_grace);
        match cluster.leases.get(node) {
            Some(lease) => {
                let seen = gone.lease.take_if(|(version, _)| heard && *version == lease.version);
                let (version, since) = seen.unwrap_or_else(|| (lease.version.clone(), now.steady));
                over = over.max(since.saturating_add(lease.holds));
                gone.lease = Some((version, since));
            }
            None => gone.lease = None,
        }
        if now.steady < over {
            plan.again_at(over);
        } else if heard {
            departed.insert(node.to_owned());
        }
    }
    departed
}

/// Lets attachments of departed nodes go, and with them the addresses that they hold. One that is being
/// deleted loses our finalizer; one that an agent made is deleted; one that a user made says that its node is
/// gone.
pub(super) fn attachments(
    cluster: &Cluster,
    index: &Index<'_>,
    departed: &HashSet<String>,
    memory: &mut Memory,
    config: &Config,
    (now, turn): (Now, &mut Turn),
    plan: &mut Plan,
) {
    // No agent puts the finalizer on what it publishes itself: one that has both was relabelled by its user.
    // Agents do not follow it any more, have unplugged it, and may not change it.
    let relabelled = |view: &AttachmentView| view.leaving.is_some() && view.managed;
    let nobodys = |view: &AttachmentView| relabelled(view) || (view.leaving.is_some() && view.node.is_none());
    let place = |view: &AttachmentView| (view.namespace.clone(), view.name.clone());
    let behind = index.left_behind();
    let waiting: HashSet<NamespacedName> = behind.iter().filter(|a| nobodys(a)).map(|a| place(a)).collect();
    memory.leaving.retain(|key, _| waiting.contains(key));
    let waited = |view: &AttachmentView, memory: &mut Memory, plan: &mut Plan| {
        let since = *memory.leaving.entry(place(view)).or_insert(now.steady);
        let over = since.saturating_add(config.node_gone_grace);
        if now.steady < over {
            plan.again_at(over);
        }
        now.steady >= over
    };
    for view in behind {
        let action = match (&view.node, &view.leaving) {
            (Some(node), Some(finalizers)) if !departed.contains(node) && relabelled(view) => {
                if !waited(view, memory, plan) {
                    continue;
                }
                let_go(view, finalizers, "it is labeled as published by an agent, but no agent has it".into())
            }
            // Its user wants it gone, and the machine that had it may never come back.
            (Some(node), Some(finalizers)) if !departed.contains(node) => {
                let Some(away) = memory.agents.away_since(cluster, node, now) else { continue };
                let over = away.saturating_add(config.node_gone_grace);
                if now.steady < over {
                    plan.again_at(over);
                    continue;
                }
                // It is more likely then that something is wrong with us.
                if plan.held_back > 0 {
                    continue;
                }
                let_go(view, finalizers, format!("the agent of node {node} is down"))
            }
            (Some(node), None) if !departed.contains(node) => continue,
            (Some(node), Some(finalizers)) => let_go(view, finalizers, format!("node {node} is gone")),
            // An agent put the finalizer there and never said more. If it is there, it does so within the
            // grace.
            (None, Some(finalizers)) => {
                if !waited(view, memory, plan) {
                    continue;
                }
                let_go(view, finalizers, "no node reports that it has it".into())
            }
            // Somebody else's finalizer keeps it.
            (Some(_), None) if view.managed && view.deleting => continue,
            (None, None) => continue,
            (Some(node), None) if view.managed => Action::DeleteAttachment {
                namespace: view.namespace.clone(),
                name: view.name.clone(),
                uid: view.uid.clone(),
                why: format!("node {node} is gone"),
            },
            (Some(node), None) => Action::ForgetAttachment {
                namespace: view.namespace.clone(),
                name: view.name.clone(),
                resource_version: view.resource_version.clone(),
                condition: node_gone(node, now),
            },
        };
        if turn.takes(view, memory, plan) {
            plan.actions.push(action);
        }
    }
}

// === impl Agents ===

impl Agents {
    /// Since when the agent of a node is away; nothing while it is not, or not known to be.
    fn away_since(&self, cluster: &Cluster, node: &str, now: Now) -> Option<Duration> {
        let (lease, seen) = (cluster.leases.get(node)?, self.leases.get(node)?);
        let since = seen.since.saturating_add(lease.holds);
        (seen.version == lease.version && now.steady >= since).then_some(since)
    }
}

fn let_go(view: &AttachmentView, finalizers: &[String], why: String) -> Action {
    Action::AttachmentFinalizers {
        namespace: view.namespace.clone(),
        name: view.name.clone(),
        resource_version: view.resource_version.clone(),
        finalizers: finalizers.iter().filter(|f| *f != ATTACHMENT_FINALIZER).cloned().collect(),
        why,
    }
}

fn node_gone(node: &str, now: Now) -> Condition {
    let message =
        format!("node {node}, which ran the pod, is gone: it will be attached again where the pod runs next");
    condition(&[], reasons::READY, false, reasons::REASON_NO_POD, message, None, now.wall)
}
