//! Attach all of a plan, each interface by its Network's runtime, and check the answers; or take it all back.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use ipnet::IpNet;
use knit_ledger::{Opaque, SandboxRecord};
use knit_runtime::{
    Address, AttachRequest, Attachment, InterfaceName, Network, Pod, Runtime, Topology, feature,
};
use tracing::Instrument as _;

use crate::clock;
use crate::core::Core;
use crate::error::{Error, Reason, Result};
use crate::record::{Details, details, ledger_error, pod_of};
use crate::request::pod_name;

/// How long a runtime may take to take back what it could not make. Its attach may have used up most of the time that the
/// caller waits.
pub(crate) const GIVE_UP: Duration = Duration::from_secs(5);

/// How long an attach that was given up is followed: less than the addresses that it was asked for rest.
const OUTLIVE: Duration = Duration::from_secs(170);

impl Core {
    /// Makes all interfaces of a record that are planned, or none: on failure nothing of them is left, and they are no
    /// longer in the record.
    pub(crate) async fn attach_planned(
        &self,
        record: SandboxRecord,
        limit: Duration,
    ) -> Result<SandboxRecord> {
        let planned: Vec<String> = record
            .attachments()
            .iter()
            .filter(|a| matches!(a.state(), knit_ledger::AttachmentState::Planned))
            .map(|a| a.plan().interface.clone())
            .collect();
        match self.try_attach(&record, &planned, limit).await {
            Ok(record) => Ok(record),
            Err(error) => {
                // Who waits for the answer should hear of this error; what a runtime does not take away in time, a later
                // pass does.
                self.take_back_within(&record, &planned, GIVE_UP).await;
                Err(error)
            }
        }
    }

    async fn try_attach(
        &self,
        record: &SandboxRecord,
        planned: &[String],
        limit: Duration,
    ) -> Result<SandboxRecord> {
        let pod = pod_of(record)?;
        // In two lanes: a runtime may do its work on the thread that asks, and where it is the kernel's work on links,
        // all of it takes turns under one lock. A second lane does the rest meanwhile; more would stand in line.
        let (here, beside) = planned.split_at(planned.len().div_ceil(2));
        let beside = (!beside.is_empty()).then(|| {
            let (core, record, pod, beside) = (self.clone(), record.clone(), pod.clone(), beside.to_vec());
            let lane = async move { core.attach_each(&record, &pod, &beside, limit).await };
            tokio::spawn(lane.in_current_span())
        });
        let mut results = self.attach_each(record, &pod, here, limit).await;
        // Both end before any failure is answered: nothing is made any more when things are taken back.
        if let Some(lane) = beside {
            results.extend(lane.await.map_err(|error| {
                Error::new(Reason::Internal, "attaching failed inside: the agent's log says where")
                    .because(error)
            })?);
        }
        let attachments = results.into_iter().collect::<Result<Vec<_>>>()?;
        let mut record = record.clone();
        for attachment in attachments {
            let made = Opaque::of(&attachment).map_err(|e| {
                Error::new(Reason::Internal, "what a runtime made cannot be written down").because(e)
            })?;
            record.attached(attachment.interface.as_str(), made).map_err(|e| {
                Error::new(Reason::Internal, "the record does not fit what was made").because(e)
            })?;
        }
        self.books().put(record.clone()).map_err(|e| ledger_error(&pod_name(&pod), e))?;
        Ok(record)
    }

    async fn attach_each(
        &self,
        record: &SandboxRecord,
        pod: &Pod,
        interfaces: &[String],
        limit: Duration,
    ) -> Vec<Result<Attachment>> {
        join_all(interfaces.iter().map(|interface| self.attach_one(record, pod, interface, limit))).await
    }

    async fn attach_one(
        &self,
        record: &SandboxRecord,
        pod: &Pod,
        interface: &str,
        limit: Duration,
    ) -> Result<Attachment> {
        let request = self.attach_request(record, pod, interface)?;
        let plan = record.attachment(interface).map(knit_ledger::Attachment::plan);
        let runtime_name = plan.map(|p| p.runtime.clone()).unwrap_or_default();
        let runtime = self.runtimes().get(&runtime_name).ok_or_else(|| {
            let message = format!(
                "network runtime {runtime_name} of Network {} does not answer on this node: start it",
                request.network
            );
            Error::new(Reason::NotReady, message)
        })?;
        let network = request.network.clone();
        let (asked, asking) = (request.clone(), Arc::clone(&runtime));
        let mut call: BoxFuture<'static, _> = Box::pin(async move { asking.attach(&asked).await });
        match tokio::time::timeout(limit, &mut call).await {
            Ok(Ok(attachment)) => {
                verify(&request, &attachment, record.netns().inode)?;
                Ok(attachment)
            }
            Ok(Err(error)) => Err(Error::from_runtime("attaching", &network, interface, error)),
            Err(_) => {
                self.outlive(runtime, call, &request);
                let message = format!(
                    "network runtime {runtime_name} did not attach interface {interface} to Network {network} within {} ms",
                    limit.as_millis()
                );
                Err(Error::new(Reason::NotReady, message))
            }
        }
    }

    /// Follows an attach that was given up to its end: what it makes after all is taken away again.
    fn outlive(
        &self,
        runtime: Arc<dyn Runtime>,
        call: BoxFuture<'static, knit_runtime::Result<Attachment>>,
        request: &AttachRequest,
    ) {
        let (core, pod, interface) = (self.clone(), request.pod.clone(), request.interface.clone());
        self.late().insert((pod.sandbox.clone(), interface.to_string()));
        tokio::spawn(async move {
            // One that never ends is given up: what it makes after that, a pass finds.
            let made = tokio::time::timeout(OUTLIVE, call).await.is_ok_and(|made| made.is_ok());
            core.late().remove(&(pod.sandbox.clone(), interface.to_string()));
            if !made {
                return;
            }
            let _guard = core.locks().lock(&pod.sandbox).await;
            // What is recorded is somebody's, or is taken away by the next pass.
            if core.books().get(&pod.sandbox).is_some_and(|r| r.attachment(interface.as_str()).is_some()) {
                return;
            }
            tracing::warn!(sandbox = %pod.sandbox, %interface, "an interface was made after its request had been given up: it is removed");
            if let Err(error) = runtime.detach(&pod, Some(&interface)).await {
                tracing::warn!(sandbox = %pod.sandbox, %interface, error = &error as &dyn std::error::Error, "it cannot be removed yet; the next pass tries again");
            }
        });
    }

    /// What a runtime is asked for, from the record alone and what is known of the Network.
    pub(crate) fn attach_request(
        &self,
        record: &SandboxRecord,
        pod: &Pod,
        interface: &str,
    ) -> Result<AttachRequest> {
        let broken = |what: &str| {
            Error::new(Reason::Internal, format!("the record of sandbox {} has {what}", record.sandbox()))
        };
        let attachment = record.attachment(interface).ok_or_else(|| broken("no such interface"))?;
        let plan = attachment.plan();
        let Details { default_route, ports, dns, .. } =
            details(attachment).ok_or_else(|| broken("an interface without details"))?;
        let network = self.networks().applied(&plan.network).ok_or_else(|| {
            Error::new(Reason::NotReady, format!("Network {} is not set up on this node", plan.network))
        })?;
        let lease = plan.lease.as_ref();
        Ok(AttachRequest {
            pod: pod.clone(),
            netns: record.netns().path.clone(),
            network: plan.network.clone(),
            interface: InterfaceName::new(interface)
                .map_err(|e| broken("a wrong interface name").because(e))?,
            addresses: lease.map(|l| addresses(&network, &l.addresses)).unwrap_or_default(),
            // Who cannot be told a MAC chooses one.
            mac: lease.map(|l| l.mac).filter(|_| self.runtimes().has(&plan.runtime, feature::STATIC_MAC)),
            default_route,
            ports,
            routes: Vec::new(),
            dns,
        })
    }

    /// Takes interfaces away and out of the record. What cannot be taken away now stays in the record as leaving, and a
    /// later pass tries again. True if nothing is left.
    pub(crate) async fn take_back(&self, record: &SandboxRecord, interfaces: &[String]) -> bool {
        self.take_back_within(record, interfaces, self.config().detach_deadline).await.is_none()
    }

    /// The same, with a limit for each call of a runtime. Gives what is wrong if something is left.
    pub(crate) async fn take_back_within(
        &self,
        record: &SandboxRecord,
        interfaces: &[String],
        limit: Duration,
    ) -> Option<String> {
        let Ok(pod) = pod_of(record) else { return Some("its record names no sandbox".to_owned()) };
        // While a runtime may still be making one, that it is gone now does not mean that it stays gone.
        let late: Vec<String> = {
            let late = self.late();
            interfaces
                .iter()
                .filter(|i| late.contains(&(pod.sandbox.clone(), (*i).clone())))
                .cloned()
                .collect()
        };
        let mut leaving = record.clone();
        for interface in interfaces {
            // Fails only for an interface that the record does not have.
            let _ = leaving.detaching(interface);
        }
        if let Err(error) = self.books().put(leaving.clone()) {
            // Taking away must go on with a full disk too: a record that still says more than is there is mended later.
            tracing::warn!(
                sandbox = record.sandbox(),
                error = &error as &dyn std::error::Error,
                "a detach cannot be recorded beforehand"
            );
        }
        let all = interfaces.len() == record.attachments().len();
        let mut calls: Vec<(String, Option<InterfaceName>, Vec<String>)> = Vec::new();
        for attachment in leaving.attachments().iter().filter(|a| interfaces.contains(&a.plan().interface)) {
            let plan = attachment.plan();
            match calls.iter_mut().find(|(runtime, _, _)| all && *runtime == plan.runtime) {
                Some((_, _, interfaces)) => interfaces.push(plan.interface.clone()),
                None => {
                    // All of a sandbox goes in one call.
                    let name = if all { None } else { InterfaceName::new(plan.interface.as_str()).ok() };
                    calls.push((plan.runtime.clone(), name, vec![plan.interface.clone()]));
                }
            }
        }
        let pod = &pod;
        let results = join_all(calls.into_iter().map(|(name, interface, interfaces)| async move {
            let Some(runtime) = self.runtimes().get(&name) else {
                tracing::warn!(runtime = %name, sandbox = %pod.sandbox, "a network runtime is away: its interfaces are detached when it is back");
                return (interfaces, Some(format!("network runtime {name} does not answer on this node: start it")));
            };
            let problem = match tokio::time::timeout(limit, runtime.detach(pod, interface.as_ref())).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => {
                    tracing::warn!(runtime = %name, sandbox = %pod.sandbox, error = &error as &dyn std::error::Error, "detaching failed; it is tried again");
                    Some(format!("network runtime {name} did not detach it: {error}"))
                }
                Err(_) => {
                    tracing::warn!(runtime = %name, sandbox = %pod.sandbox, "detaching takes too long; it is tried again");
                    Some(format!("network runtime {name} did not detach it within {} s: see its log", limit.as_secs()))
                }
            };
            (interfaces, problem)
        }));
        let results = results.await;
        let problem = results.iter().find_map(|(_, problem)| problem.clone());
        let gone = results.into_iter().filter(|(_, problem)| problem.is_none());
        let gone: Vec<String> = gone.flat_map(|(interfaces, _)| interfaces).collect();
        if let Err(error) = self.books().forget(&pod.sandbox, &gone, &late, clock::now()) {
            tracing::warn!(
                sandbox = record.sandbox(),
                error = &error as &dyn std::error::Error,
                "what is gone cannot be taken out of the ledger; it is tried again"
            );
        }
        self.books_changed();
        problem
    }
}

/// The addresses of an interface, as its Network's topology wants them.
fn addresses(network: &Arc<Network>, leased: &knit_ipam::Addresses) -> Vec<Address> {
    let with_prefix = |address: std::net::IpAddr| {
        let subnet = network.subnets.iter().find(|s| s.cidr.contains(&address));
        let host = IpNet::from(address);
        let net = match (network.topology, subnet) {
            (Topology::Layer2, Some(subnet)) => IpNet::new(address, subnet.cidr.prefix_len()).unwrap_or(host),
            _ => host,
        };
        Address { net, gateway: network.gateway_for(address) }
    };
    leased.iter().map(with_prefix).collect()
}

/// Whether a runtime's answer covers what it was asked for. Fail closed: half an answer is none.
pub(crate) fn verify(request: &AttachRequest, attachment: &Attachment, inode: u64) -> Result<()> {
    let problem = if attachment.interface != request.interface {
        Some(format!("the interface is called {}", attachment.interface))
    } else if attachment.network != request.network {
        Some(format!("it is on Network {}", attachment.network))
    } else if let Some(missing) =
        request.addresses.iter().find(|a| !attachment.addresses.iter().any(|b| b.net.addr() == a.net.addr()))
    {
        Some(format!("it has no address {}", missing.net.addr()))
    } else if request.mac.is_some_and(|mac| mac != attachment.mac) {
        Some(format!("its MAC is {}", attachment.mac))
    } else if ![0, inode].contains(&attachment.pod_netns_inode) {
        // A runtime opens the namespace by its path, and a path such as /proc/PID/ns/net may be another's meanwhile.
        Some(format!(
            "{} is network namespace {} now, and that of the pod was {inode}",
            request.netns.display(),
            attachment.pod_netns_inode
        ))
    } else {
        None
    };
    match problem {
        None => Ok(()),
        Some(problem) => Err(Error::new(
            Reason::AttachFailed,
            format!(
                "the network runtime of Network {} did not make interface {} as asked: {problem}",
                request.network, request.interface
            ),
        )),
    }
}
