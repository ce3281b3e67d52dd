//! What a runtime has not announced is not asked of it, and what it does not answer is not waited for for
//! ever: one place for every runtime alike, inside the agent or behind a socket.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use knit_runtime::routers::Routers;
use knit_runtime::{
    AttachRequest, Attachment, Changes, Disturbance, Error, Info, InterfaceName, Network, NetworkUsage, Pod,
    Reason, Result, Runtime, SandboxId, Status, Survey, feature,
};
use knit_types::{Family, HasFamily as _, NetworkName};

/// How long any call may take but an attach, whose caller has a limit of its own and follows it to its end.
/// Callers that have less time wait less; this one is for those that would wait as long as it takes, with a
/// sandbox or a Network locked.
const RUNTIME_CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A runtime that is asked only for what it announced. What the trait has a default for is passed on here,
/// too: the default would take its place without a word.
pub(super) struct Announced {
    inner: Arc<dyn Runtime>,
    info: Info,
}

// === impl Announced ===

impl Announced {
    pub fn new(inner: Arc<dyn Runtime>, info: Info) -> Self {
        Self { inner, info }
    }

    /// Waits for a call, but not forever.
    async fn within<T>(&self, what: &str, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        match tokio::time::timeout(RUNTIME_CALL_TIMEOUT, call).await {
            Ok(result) => result,
            Err(_) => {
                let (name, seconds) = (&self.info.name, RUNTIME_CALL_TIMEOUT.as_secs());
                let message =
                    format!("network runtime {name} did not {what} within {seconds} s: check its log");
                Err(Error::new(Reason::NotReady, message))
            }
        }
    }

    fn unsupported(&self, network: &NetworkName, what: &[&str]) -> Error {
        Error::new(
            Reason::Unsupported,
            format!(
                "network runtime {} has not announced {}, which Network {network} needs: give the Network \
                a class whose runtime supports it, or do without",
                self.info.name,
                what.join(", ")
            ),
        )
        .on(network)
    }
}

#[async_trait]
impl Runtime for Announced {
    fn routers(&self) -> Option<Arc<dyn Routers>> {
        self.inner.routers()
    }

    async fn info(&self) -> Result<Info> {
        self.within("report its capabilities", self.inner.info()).await
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        let missing: Vec<&str> = needs(network).into_iter().filter(|need| !has(&self.info, need)).collect();
        if !missing.is_empty() {
            return Err(self.unsupported(&network.name, &missing));
        }
        // Without NetworkSetup its Networks are there by other means.
        if has(&self.info, feature::NETWORK_SETUP) {
            self.within("set up a Network", self.inner.setup_network(network)).await
        } else {
            Ok(())
        }
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        if has(&self.info, feature::NETWORK_SETUP) {
            self.within("remove a Network", self.inner.remove_network(name)).await
        } else {
            Ok(())
        }
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        self.inner.attach(request).await
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        self.within("detach", self.inner.detach(pod, interface)).await
    }

    async fn update(&self, request: &AttachRequest) -> Result<Attachment> {
        if !has(&self.info, feature::UPDATE) {
            return Err(self.unsupported(&request.network, &[feature::UPDATE]));
        }
        self.inner.update(request).await
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        self.within("check an interface", self.inner.check(pod, netns, interface)).await
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        self.within("list its attachments", self.inner.list(sandbox)).await
    }

    async fn watch(&self) -> Result<Changes> {
        if !has(&self.info, feature::WATCH) {
            let message = format!("network runtime {} has not announced Watch", self.info.name);
            return Err(Error::new(Reason::Unsupported, message));
        }
        self.within("start a watch", self.inner.watch()).await
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        if has(&self.info, feature::COLLECT_GARBAGE) {
            return self.within("collect garbage", self.inner.collect_garbage(keep)).await;
        }
        let mut removed = Vec::new();
        for attachment in self.list(None).await? {
            if !keep.contains(&attachment.pod.sandbox) {
                self.detach(&attachment.pod, Some(&attachment.interface)).await?;
                removed.push(attachment);
            }
        }
        Ok(removed)
    }

    async fn status(&self) -> Result<Status> {
        self.within("report its status", self.inner.status()).await
    }

    async fn survey(&self) -> Result<Survey> {
        self.within("compare its state", self.inner.survey()).await
    }

    async fn survey_and_list(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        self.within("compare its state", self.inner.survey_and_list()).await
    }

    async fn usage(&self) -> Result<Vec<NetworkUsage>> {
        self.inner.usage().await
    }

    async fn disturbed(&self) -> Disturbance {
        self.inner.disturbed().await
    }
}

pub(super) fn has(info: &Info, feature: &str) -> bool {
    info.features.iter().any(|have| have == feature)
}

/// The features that a Network cannot do without.
fn needs(network: &Network) -> Vec<&'static str> {
    let has = |family: Family| network.subnets.iter().any(|subnet| subnet.cidr.family() == family);
    let all = [
        // The feature of a topology is called like it.
        (network.topology.as_str(), true),
        (feature::IPV4, has(Family::V4)),
        (feature::IPV6, has(Family::V6)),
        (feature::MTU, network.mtu.is_some()),
        (feature::ROUTES, !network.routes.is_empty()),
    ];
    all.into_iter().filter(|(_, needed)| *needed).map(|(feature, _)| feature).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A runtime whose optional calls answer.
    struct Able;

    #[derive(Debug)]
    struct SomeRouters;

    impl Routers for SomeRouters {
        fn uplink(&self, _: std::os::fd::BorrowedFd<'_>) -> Result<Vec<std::net::IpAddr>> {
            Ok(Vec::new())
        }

        fn uplink_ranges(&self) -> Vec<ipnet::IpNet> {
            Vec::new()
        }

        fn uplink_in_router(&self) -> knit_runtime::IfName {
            knit_runtime::IfName::new("able").expect("a name")
        }

        fn uplink_prefix(&self) -> String {
            "able-".to_owned()
        }

        fn reserved_ports(&self) -> Vec<(knit_runtime::Protocol, u16)> {
            Vec::new()
        }

        fn steering(&self) -> Result<Box<dyn knit_runtime::routers::Steering>> {
            Err(Error::new(Reason::Internal, "steering"))
        }
    }

    #[async_trait]
    impl Runtime for Able {
        async fn info(&self) -> Result<Info> {
            let features = [feature::UPDATE, feature::WATCH].map(str::to_owned).into();
            Ok(Info { name: "example.com/able".into(), version: "1".into(), features })
        }

        async fn setup_network(&self, _: &Network) -> Result<()> {
            Ok(())
        }

        async fn remove_network(&self, _: &NetworkName) -> Result<()> {
            Ok(())
        }

        async fn attach(&self, _: &AttachRequest) -> Result<Attachment> {
            Err(Error::new(Reason::Internal, "attach"))
        }

        async fn detach(&self, _: &Pod, _: Option<&InterfaceName>) -> Result<()> {
            Ok(())
        }

        async fn check(&self, _: &Pod, _: Option<&Path>, _: Option<&InterfaceName>) -> Result<()> {
            Ok(())
        }

        async fn list(&self, _: Option<&SandboxId>) -> Result<Vec<Attachment>> {
            Ok(Vec::new())
        }

        async fn watch(&self) -> Result<Changes> {
            Err(Error::new(Reason::Internal, "watch"))
        }

        async fn collect_garbage(&self, _: &[SandboxId]) -> Result<Vec<Attachment>> {
            Ok(Vec::new())
        }

        async fn status(&self) -> Result<Status> {
            Ok(Status::default())
        }

        async fn survey(&self) -> Result<Survey> {
            Ok(Survey::default())
        }

        async fn disturbed(&self) -> Disturbance {
            Disturbance::Rules
        }

        fn routers(&self) -> Option<Arc<dyn Routers>> {
            Some(Arc::new(SomeRouters))
        }
    }

    #[tokio::test]
    async fn what_the_trait_has_a_default_for_is_passed_on() {
        let info = Able.info().await.expect("who it is");
        let announced = Announced::new(Arc::new(Able), info.clone());
        assert_eq!(announced.survey().await.expect("its own"), Survey::default());
        assert_eq!(announced.disturbed().await, Disturbance::Rules);
        assert_eq!(announced.routers().expect("its own").uplink_prefix(), "able-");
        assert_eq!(announced.watch().await.err().expect("its own").reason, Reason::Internal);
        // And not where it has announced nothing.
        let silent = Announced::new(Arc::new(Able), Info { features: Vec::new(), ..info });
        assert_eq!(silent.watch().await.err().expect("refused").reason, Reason::Unsupported);
    }
}
