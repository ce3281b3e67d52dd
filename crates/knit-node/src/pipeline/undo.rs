//! The way back: what was recorded is taken away, or stays recorded as leaving until a later pass can.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use knit_ledger::{SandboxRecord, Unreadable};
use knit_runtime::{InterfaceName, Pod, Runtime, SandboxId};
use knit_types::{Owner, chain};
use tokio::time::Instant;

use super::{Pipeline, is_main};
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::request::Door;

/// How long a call of a runtime that takes interfaces away may last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetachLimits {
    limit: Duration,
    /// When the pass began for which this is done, if it is one: a runtime that did not answer in time since
    /// then is left for the next pass.
    pass: Option<Instant>,
}

impl DetachLimits {
    /// For what somebody waits for.
    pub(crate) fn of_request(limit: Duration) -> Self {
        Self { limit, pass: None }
    }

    /// For what a pass does for many sandboxes: one runtime that hangs must not hold it up for each of them.
    pub(crate) fn of_pass(limit: Duration, begun: Instant) -> Self {
        Self { limit, pass: Some(begun) }
    }
}

impl Pipeline {
    /// Takes a sandbox's interfaces away. What is gone already is success, and so is a `main` that it does
    /// not have.
    pub(crate) async fn detach(&self, sandbox: &SandboxId, main: Option<&InterfaceName>) -> Result<()> {
        self.detach_with(sandbox, main, DetachLimits::of_request(self.config.detach_deadline)).await
    }

    /// The same, with a limit for each call of a runtime.
    pub(crate) async fn detach_with(
        &self,
        sandbox: &SandboxId,
        main: Option<&InterfaceName>,
        limits: DetachLimits,
    ) -> Result<()> {
        let patience = self.config.detach_deadline / 2;
        let lock = self.sandboxes.locks().lock(sandbox.clone());
        let _guard = tokio::time::timeout(patience, lock).await.map_err(|_| {
            let message = format!(
                "an earlier request for sandbox {sandbox} is still running; it will be \
            retried"
            );
            Error::new(Reason::NotReady, message)
        })?;
        let (record, unreadable) = {
            let books = self.sandboxes.books();
            (books.get(sandbox).cloned(), books.unreadable_of(sandbox).cloned())
        };
        if let Some(unreadable) = unreadable {
            // Which interface is its main one is not known: it goes by any DEL.
            return self.remove_unreadable(sandbox, &unreadable, limits).await;
        }
        let Some(record) = record else { return Ok(()) };
        if main.is_some_and(|main| !is_main(&record, main)) {
            return Ok(());
        }
        self.remove_with(&record, limits).await
    }

    /// Takes some of a sandbox's further interfaces away. Its main one goes with the sandbox only, and what
    /// an object asks for goes with that object.
    pub(crate) async fn detach_some(
        &self,
        sandbox: &SandboxId,
        interfaces: &BTreeSet<InterfaceName>,
    ) -> Result<()> {
        let _guard = self.sandboxes.locks().lock(sandbox.clone()).await;
        let record = self.sandboxes.books().get(sandbox).cloned();
        let Some(record) = record else { return Ok(()) };
        let named = |a: &&knit_ledger::Attachment| interfaces.contains(&a.plan().interface);
        let mut leaving = Vec::new();
        for attachment in record.attachments().iter().filter(named) {
            let interface = attachment.plan().interface.clone();
            if attachment.details().main {
                let message = format!(
                    "{interface} is the main interface of sandbox {sandbox}: detach the pod as a whole"
                );
                return Err(Error::new(Reason::Refused, message));
            }
            match record.goes_with(attachment) {
                Owner::Sandbox(_) => leaving.push(interface),
                Owner::Object(object) => {
                    let message = format!(
                        "{interface} was requested by NetworkAttachment {object}: delete that object"
                    );
                    return Err(Error::new(Reason::Refused, message));
                }
                Owner::Claim(claim) => {
                    let message = format!("{interface} belongs to claim {claim} and is removed with the pod");
                    return Err(Error::new(Reason::Refused, message));
                }
            }
        }
        let done = self.take_back(&record, &leaving).await;
        self.report.changed(sandbox);
        if done { Ok(()) } else { Err(not_all(sandbox)) }
    }

    /// Takes those interfaces of a sandbox away that an object asked for, and that `own` says are its.
    pub(crate) async fn unplug(
        &self,
        sandbox: &SandboxId,
        own: impl Fn(&SandboxRecord, &knit_ledger::Attachment) -> bool,
    ) -> Result<()> {
        let _guard = self.sandboxes.locks().lock(sandbox.clone()).await;
        let record = self.sandboxes.books().get(sandbox).cloned();
        let Some(record) = record else { return Ok(()) };
        let by_object = |a: &&knit_ledger::Attachment| {
            let details = a.details();
            let may_be = matches!(details.door, Door::Object(_)) || details.door.is_forgotten();
            may_be && !details.main && a.plan().loan.is_none()
        };
        let leaving = record.attachments().iter().filter(by_object).filter(|a| own(&record, a));
        let leaving: Vec<InterfaceName> = leaving.map(|a| a.plan().interface.clone()).collect();
        if leaving.is_empty() || self.take_back(&record, &leaving).await {
            return Ok(());
        }
        Err(not_all(sandbox))
    }

    /// Takes all of a sandbox away. Who calls has its lock.
    pub(crate) async fn remove(&self, record: &SandboxRecord) -> Result<()> {
        self.remove_with(record, DetachLimits::of_request(self.config.detach_deadline)).await
    }

    /// The same, with a limit for each call of a runtime.
    pub(crate) async fn remove_with(&self, record: &SandboxRecord, limits: DetachLimits) -> Result<()> {
        let all: Vec<InterfaceName> =
            record.attachments().iter().map(|a| a.plan().interface.clone()).collect();
        let problem = self.undo(record, &all, limits).await;
        self.report.changed(record.sandbox());
        let Some(problem) = problem else { return Ok(()) };
        let message = format!(
            "sandbox {} could not be detached completely: {problem}; the agent retries",
            record.sandbox()
        );
        Err(Error::new(Reason::NotReady, message))
    }

    /// Takes all of a sandbox away whose record cannot be read: which runtimes made something for it is not
    /// known, so each is told. Who calls has its lock.
    pub(crate) async fn remove_unreadable(
        &self,
        sandbox: &SandboxId,
        record: &Unreadable,
        limits: DetachLimits,
    ) -> Result<()> {
        let known = record.pod();
        let pod = Pod {
            sandbox: sandbox.clone(),
            namespace: known.as_ref().map(|pod| pod.namespace.clone()),
            name: known.as_ref().map(|pod| pod.name.clone()),
            uid: known.and_then(|pod| pod.uid),
        };
        // Side by side: what one that hangs made stays for a later pass, and nothing else does.
        let all = self.runtimes.all();
        let each = all.iter().map(|(name, runtime)| self.detach_by(name, runtime, &pod, None, limits));
        if let Some(problem) = join_all(each).await.into_iter().flatten().next() {
            let message = format!(
                "sandbox {sandbox}, whose record cannot be read, could not be detached completely: \
                {problem}; the agent retries"
            );
            return Err(Error::new(Reason::NotReady, message));
        }
        tracing::warn!(%sandbox, "its record could not be read; everything that network runtimes had for it \
            was removed");
        let discarded = self.sandboxes.books().discard(sandbox, clock::now());
        // Nobody else tells what was in force about it that it is gone.
        if let Some(policies) = self.networks.policies() {
            policies.compare();
        }
        self.sandboxes.changed();
        self.report.changed(sandbox);
        discarded.map_err(|error| {
            let message = format!("the record of sandbox {sandbox} cannot be removed; the agent retries");
            Error::new(Reason::NotReady, message).because(error)
        })
    }

    /// Has one runtime take one interface of a sandbox away, or all of them. Gives what is wrong if it did
    /// not.
    async fn detach_by(
        &self,
        name: &str,
        runtime: &Arc<dyn Runtime>,
        pod: &Pod,
        interface: Option<&InterfaceName>,
        limits: DetachLimits,
    ) -> Option<String> {
        if limits.pass.is_some_and(|begun| self.runtimes.is_silent_since(name, begun)) {
            return Some(format!("network runtime {name} does not answer: check its log"));
        }
        let answer = tokio::time::timeout(limits.limit, runtime.detach(pod, interface)).await;
        self.runtimes.has_answered(name, answer.is_ok());
        match answer {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                tracing::warn!(
                    runtime = %name, sandbox = %pod.sandbox, error = &error as &dyn std::error::Error,
                    "detaching failed; retrying"
                );
                Some(format!("network runtime {name} did not detach it: {}", chain(&error)))
            }
            Err(_) => {
                tracing::warn!(
                    runtime = %name, sandbox = %pod.sandbox,
                    "detaching takes too long; retrying"
                );
                Some(format!(
                    "network runtime {name} did not detach it within {} s: check its log",
                    limits.limit.as_secs()
                ))
            }
        }
    }

    /// Takes interfaces away and out of the record. What cannot be taken away now stays in the record as
    /// leaving, and a later pass tries again. True if nothing is left.
    pub(crate) async fn take_back(&self, record: &SandboxRecord, interfaces: &[InterfaceName]) -> bool {
        self.undo(record, interfaces, DetachLimits::of_request(self.config.detach_deadline)).await.is_none()
    }

    /// The same, with a limit for each call of a runtime. Gives what is wrong if something is left.
    pub(crate) async fn undo(
        &self,
        record: &SandboxRecord,
        interfaces: &[InterfaceName],
        limits: DetachLimits,
    ) -> Option<String> {
        let pod = record.runtime_pod();
        // While a runtime may still be making one, that it is gone now does not mean that it stays gone. And
        // an address that somebody else has must not be the next one to be tried.
        let late: Vec<InterfaceName> = {
            let (late, in_use) = (self.sandboxes.late(), self.sandboxes.in_use());
            let rests = |i: &&InterfaceName| {
                let key = (pod.sandbox.clone(), (*i).clone());
                late.contains(&key) || in_use.contains(&key)
            };
            interfaces.iter().filter(rests).cloned().collect()
        };
        let mut leaving = record.clone();
        for interface in interfaces {
            // Fails only for an interface that the record does not have.
            let _ = leaving.detaching(interface);
        }
        if let Err(error) = self.sandboxes.books().put(leaving.clone()) {
            // Taking away must go on with a full disk too: a record that still says more than is there is
            // mended later.
            tracing::warn!(
                sandbox = %record.sandbox(),
                error = &error as &dyn std::error::Error,
                "cannot record a detach in advance"
            );
        }
        let all = interfaces.len() == record.attachments().len();
        let mut calls: Vec<(String, Option<InterfaceName>, Vec<InterfaceName>)> = Vec::new();
        for attachment in leaving.attachments().iter().filter(|a| interfaces.contains(&a.plan().interface)) {
            let plan = attachment.plan();
            match calls.iter_mut().find(|(runtime, _, _)| all && *runtime == plan.runtime) {
                Some((_, _, interfaces)) => interfaces.push(plan.interface.clone()),
                None => {
                    // All of a sandbox goes in one call; nothing else may be as wide as that.
                    let name = (!all).then(|| plan.interface.clone());
                    calls.push((plan.runtime.clone(), name, vec![plan.interface.clone()]));
                }
            }
        }
        let pod = &pod;
        let results = join_all(calls.into_iter().map(|(name, interface, interfaces)| async move {
            let Some(runtime) = self.runtimes.get(&name) else {
                tracing::warn!(
                    runtime = %name, sandbox = %pod.sandbox,
                    "a network runtime is down: its interfaces will be detached when it is back"
                );
                return (
                    interfaces,
                    Some(format!("network runtime {name} does not answer on this node: start it")),
                );
            };
            let problem = self.detach_by(&name, &runtime, pod, interface.as_ref(), limits).await;
            (interfaces, problem)
        }));
        let results = results.await;
        let problem = results.iter().find_map(|(_, problem)| problem.clone());
        let gone = results.into_iter().filter(|(_, problem)| problem.is_none());
        let gone: Vec<InterfaceName> = gone.flat_map(|(interfaces, _)| interfaces).collect();
        let forgotten = self.sandboxes.books().forget(&pod.sandbox, &gone, &late, clock::now());
        match forgotten {
            Ok(()) => {
                let mut in_use = self.sandboxes.in_use();
                for interface in &gone {
                    in_use.remove(&(pod.sandbox.clone(), interface.clone()));
                }
            }
            Err(error) => tracing::warn!(
                sandbox = %record.sandbox(),
                error = &error as &dyn std::error::Error,
                "cannot remove a detached interface from the ledger; retrying"
            ),
        }
        let plans = record.attachments().iter().map(knit_ledger::Attachment::plan);
        let given_back = plans.filter(|plan| gone.contains(&plan.interface)).map(|plan| &plan.network);
        given_back.for_each(|network| self.networks.given_back(network));
        self.sandboxes.changed();
        self.release(record);
        problem
    }
}

fn not_all(sandbox: &SandboxId) -> Error {
    let message = format!("interfaces of sandbox {sandbox} could not be detached; the agent retries");
    Error::new(Reason::NotReady, message)
}
