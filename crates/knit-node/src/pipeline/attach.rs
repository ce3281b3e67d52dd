//! Each interface by its Network's runtime, all of them before anybody is answered.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use ipnet::IpNet;
use knit_ledger::SandboxRecord;
use knit_runtime::{
    Address, AttachRequest, Attachment, InterfaceName, Network, Pod, Reason as RuntimeReason, Runtime,
    feature,
};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::admit::Admitted;
use super::verify::{Answer, Verified};
use super::{Pipeline, UNDO_TIMEOUT, Waits};
use crate::error::{Error, Reason, Result};
use crate::networks::WaitLimit;

/// How long an attach that was given up is followed: less than the addresses that it was asked for rest.
const ABANDONED_ATTACH_TIMEOUT: Duration = Duration::from_secs(170);

impl Pipeline {
    /// Makes all that was planned, and verifies it. What fails is for the caller to undo.
    pub(super) async fn make(
        &self,
        admitted: &Admitted<'_>,
        planned: &[InterfaceName],
        patience: WaitLimit,
        waits: Waits,
    ) -> Result<Vec<Verified>> {
        let record = admitted.record();
        let covered_by = match (waits.soon(), patience) {
            (Some(soon), _) => soon,
            (None, WaitLimit::Until(deadline)) => deadline,
            (None, WaitLimit::Once) => Instant::now() + self.config.runtime_deadline,
        };
        self.cover(record, covered_by).await?;
        // What fails must be taken back before the caller stops waiting, or it never hears why.
        let left = waits.deadline().saturating_duration_since(Instant::now());
        let limit = left.saturating_sub(UNDO_TIMEOUT).max(left / 2).min(self.config.runtime_deadline);
        let answers = self.attach_all(admitted, planned, limit).await?;
        answers.into_iter().map(|answer| answer.verify(record.netns().inode)).collect()
    }

    /// A block that came a moment ago may not be known to the runtime yet.
    async fn cover(&self, record: &SandboxRecord, deadline: Instant) -> Result<()> {
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let Some(lease) = &plan.lease else { continue };
            let own: Vec<knit_ipam::Block> =
                self.sandboxes.books().allocator.blocks(&plan.network).cloned().collect();
            if !self.networks.covers(&plan.network, &self.config.node, &lease.addresses, &own) {
                self.networks.bring_up_to_date(&plan.network, deadline).await?;
            }
        }
        Ok(())
    }

    async fn attach_all(
        &self,
        admitted: &Admitted<'_>,
        planned: &[InterfaceName],
        limit: Duration,
    ) -> Result<Vec<Answer>> {
        let pod = admitted.record().runtime_pod();
        // In two lanes: a runtime may do its work on the thread that asks, and where it is the kernel's work
        // on links, all of it takes turns under one lock. A second lane does the rest meanwhile; more would
        // stand in line.
        let (here, beside) = planned.split_at(planned.len().div_ceil(2));
        let beside = (!beside.is_empty()).then(|| {
            let (pipeline, admitted, pod, beside) =
                (self.clone(), admitted.clone().into_owned(), pod.clone(), beside.to_vec());
            let lane = async move { pipeline.attach_each(&admitted, &pod, &beside, limit).await };
            tokio::spawn(lane.in_current_span())
        });
        let mut results = self.attach_each(admitted, &pod, here, limit).await;
        // Both end before any failure is answered: nothing is made any more when things are taken back.
        if let Some(lane) = beside {
            results.extend(lane.await.map_err(|error| {
                Error::new(Reason::Internal, "internal error while attaching; check the agent's log")
                    .because(error)
            })?);
        }
        results.into_iter().collect()
    }

    async fn attach_each(
        &self,
        admitted: &Admitted<'_>,
        pod: &Pod,
        interfaces: &[InterfaceName],
        limit: Duration,
    ) -> Vec<Result<Answer>> {
        join_all(interfaces.iter().map(|interface| self.attach_one(admitted, pod, interface, limit))).await
    }

    async fn attach_one(
        &self,
        admitted: &Admitted<'_>,
        pod: &Pod,
        interface: &InterfaceName,
        limit: Duration,
    ) -> Result<Answer> {
        let record = admitted.record();
        let request = self.asked_of_runtime(record, pod, interface)?;
        let plan = record.attachment(interface).map(knit_ledger::Attachment::plan);
        let runtime_name = plan.map(|p| p.runtime.clone()).unwrap_or_default();
        let runtime = self.runtimes.get(&runtime_name).ok_or_else(|| {
            let message = format!(
                "network runtime {runtime_name} of Network {} does not answer on this node: start it",
                request.network
            );
            Error::new(Reason::NotReady, message)
        })?;
        let network = request.network.clone();
        let mut call = admitted.attach(&runtime, &request);
        match tokio::time::timeout(limit, &mut call).await {
            Ok(Ok(attachment)) => Ok(Answer { request, attachment }),
            Ok(Err(error)) => {
                if error.reason == RuntimeReason::AddressInUse {
                    self.sandboxes.in_use().insert((pod.sandbox.clone(), interface.clone()));
                }
                Err(Error::from_runtime("attaching", &network, interface.as_str(), error))
            }
            Err(_) => {
                self.outlive(runtime, call, &request);
                let message = format!(
                    "network runtime {runtime_name} did not attach interface {interface} to Network \
                     {network} within {} ms",
                    limit.as_millis()
                );
                Err(Error::new(Reason::NotReady, message))
            }
        }
    }

    /// Follows an attach that was given up to its end: what it makes after all is taken away again.
    pub(crate) fn outlive(
        &self,
        runtime: Arc<dyn Runtime>,
        call: BoxFuture<'static, knit_runtime::Result<Attachment>>,
        request: &AttachRequest,
    ) {
        let (pipeline, pod, interface) = (self.clone(), request.pod.clone(), request.interface.clone());
        self.sandboxes.late().insert((pod.sandbox.clone(), interface.clone()));
        tokio::spawn(async move {
            // One that never ends is given up: what it makes after that, a pass finds.
            let made =
                tokio::time::timeout(ABANDONED_ATTACH_TIMEOUT, call).await.is_ok_and(|made| made.is_ok());
            pipeline.sandboxes.late().remove(&(pod.sandbox.clone(), interface.clone()));
            if !made {
                return;
            }
            let _guard = pipeline.sandboxes.locks().lock(pod.sandbox.clone()).await;
            // What is recorded is somebody's, or is taken away by the next pass.
            if pipeline
                .sandboxes
                .books()
                .get(&pod.sandbox)
                .is_some_and(|r| r.attachment(&interface).is_some())
            {
                return;
            }
            tracing::warn!(
                sandbox = %pod.sandbox, %interface,
                "an interface was created after its request had been abandoned: removing it"
            );
            if let Err(error) = runtime.detach(&pod, Some(&interface)).await {
                tracing::warn!(
                    sandbox = %pod.sandbox, %interface, error = &error as &dyn std::error::Error,
                    "it cannot be removed yet; retrying in the next pass"
                );
            }
        });
    }

    /// What a runtime is asked for, from the record alone and what is known of the Network.
    pub(crate) fn asked_of_runtime(
        &self,
        record: &SandboxRecord,
        pod: &Pod,
        interface: &InterfaceName,
    ) -> Result<AttachRequest> {
        let attachment = record.attachment(interface).ok_or_else(|| {
            let message = format!("the record of sandbox {} has no interface {interface}", record.sandbox());
            Error::new(Reason::Internal, message)
        })?;
        let (plan, details) = (attachment.plan(), attachment.details());
        let network = self.networks.applied(&plan.network).ok_or_else(|| {
            Error::new(Reason::NotReady, format!("Network {} is not set up on this node", plan.network))
        })?;
        let lease = plan.lease.as_ref();
        Ok(AttachRequest {
            pod: pod.clone(),
            netns: record.netns().path.clone(),
            network: plan.network.clone(),
            interface: interface.clone(),
            addresses: lease.map(|l| addresses(&network, &l.addresses)).unwrap_or_default(),
            // Who cannot be told a MAC chooses one.
            mac: lease.map(|l| l.mac).filter(|_| self.runtimes.has(&plan.runtime, feature::STATIC_MAC)),
            default_route: details.default_route,
            ports: details.ports.clone(),
            routes: Vec::new(),
            dns: details.dns.clone(),
        })
    }
}

/// The addresses of an interface, as its Network's topology wants them.
fn addresses(network: &Network, leased: &knit_ipam::AddressList) -> Vec<Address> {
    // Of a subnet that the Network no longer has.
    let alone = |address| Address { net: IpNet::from(address), gateway: network.gateway_for(address) };
    leased.iter().map(|address| network.pod_address(address).unwrap_or_else(|| alone(address))).collect()
}
