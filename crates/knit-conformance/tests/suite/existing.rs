//! A runtime that does not set up Networks is looked at on one that is there.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use knit_conformance::{ADDRESSES, Error, ExistingNetwork, Report};
use knit_kernel::testing::in_namespaces;
use knit_runtime::{
    Address, AttachRequest, Attachment, Info, InterfaceName, Network, NetworkId, NetworkName, Pod, Reason,
    Result, Runtime, SandboxId, Status, Subnet, Topology, feature,
};

use crate::bridge::BridgeRuntime;
use crate::{examine_on, failed};

/// The example, with one Network, and no call to make or remove any.
struct Fixed(BridgeRuntime);

#[async_trait]
impl Runtime for Fixed {
    async fn info(&self) -> Result<Info> {
        let mut info = self.0.info().await?;
        info.features.retain(|f| f != feature::NETWORK_SETUP);
        Ok(info)
    }

    async fn setup_network(&self, _: &Network) -> Result<()> {
        Err(knit_runtime::Error::new(Reason::Unsupported, "its Network is there"))
    }

    async fn remove_network(&self, _: &NetworkName) -> Result<()> {
        Err(knit_runtime::Error::new(Reason::Unsupported, "its Network stays"))
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        self.0.attach(request).await
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        self.0.detach(pod, interface).await
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        self.0.check(pod, netns, interface).await
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        self.0.list(sandbox).await
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        self.0.collect_garbage(keep).await
    }

    async fn status(&self) -> Result<Status> {
        self.0.status().await
    }
}

/// A Network called `there`, set up before the suite runs.
fn fixed() -> Fixed {
    let subnet = |cidr: &str, gateway: &str| Subnet {
        cidr: cidr.parse().expect("a range"),
        gateway: Some(gateway.parse().expect("an address")),
    };
    let network = Network {
        name: "there".into(),
        id: NetworkId::new(7).expect("a number"),
        topology: Topology::Layer2,
        subnets: vec![subnet("10.9.0.0/24", "10.9.0.1"), subnet("fd09::/64", "fd09::1")],
        mtu: None,
        primary: false,
        outside: false,
        not_outside: Vec::new(),
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: Vec::new(),
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: None,
        parameters: Default::default(),
    };
    let runtime = BridgeRuntime::default();
    let tokio = tokio::runtime::Builder::new_current_thread().build().expect("a tokio runtime");
    tokio.block_on(runtime.setup_network(&network)).expect("set up");
    Fixed(runtime)
}

fn addresses(count: usize) -> Vec<Address> {
    let address = |net: String, gateway: &str| Address {
        net: net.parse().expect("an address"),
        gateway: Some(gateway.parse().expect("a gateway")),
    };
    let both =
        |n| [address(format!("10.9.0.{n}/24"), "10.9.0.1"), address(format!("fd09::{n:x}/64"), "fd09::1")];
    (20..20 + count).flat_map(both).collect()
}

fn on(runtime: Arc<dyn Runtime>, addresses: Vec<Address>) -> std::result::Result<Report, Error> {
    let network = ExistingNetwork { name: "there".into(), addresses };
    examine_on(runtime, Vec::new(), Some(network))
}

#[test]
fn a_runtime_without_setup_passes_on_a_network_that_is_there() {
    in_namespaces(|| {
        let runtime = Arc::new(fixed());
        let report =
            on(Arc::clone(&runtime) as Arc<dyn Runtime>, addresses(ADDRESSES)).expect("the suite runs");
        assert_eq!(failed(&report), Vec::<&str>::new());
        assert!(report.conformant);
        let of = |name: &str| report.profiles.iter().find(|p| p.name == name).expect("a profile");
        for name in ["Core", "Layer2", "IPv4", "IPv6", "StaticAddress", "StaticMac", "Routes"] {
            assert_eq!((of(name).result, of(name).skipped), ("Passed", 0), "{name}");
        }
        for name in ["NetworkSetup", "Layer3", "Mtu"] {
            assert_eq!(of(name).result, "Skipped", "{name}");
        }
        let tokio = tokio::runtime::Builder::new_current_thread().build().expect("a tokio runtime");
        let status = tokio.block_on(runtime.0.status()).expect("a status");
        assert_eq!(status.networks.len(), 1, "its Network is left alone");
        assert_eq!(status.networks[0].attachments, 0, "its pods are gone");
    });
}

#[test]
fn a_family_without_addresses_is_not_looked_at() {
    in_namespaces(|| {
        let mut only = addresses(ADDRESSES);
        only.retain(|address| address.net.addr().is_ipv6());
        let report = on(Arc::new(fixed()), only).expect("the suite runs");
        assert_eq!(failed(&report), Vec::<&str>::new());
        let of = |name: &str| report.profiles.iter().find(|p| p.name == name).expect("a profile").result;
        assert_eq!((of("IPv4"), of("IPv6")), ("Skipped", "Passed"));
    });
}

#[test]
fn what_cannot_be_right_is_refused_before_anything_is_made() {
    in_namespaces(|| {
        let few = on(Arc::new(fixed()), addresses(ADDRESSES - 1));
        assert!(matches!(few, Err(Error::FewAddresses { given, .. }) if given == ADDRESSES - 1));
        let mut mixed = addresses(ADDRESSES);
        mixed[0].net = mixed[0].net.addr().into();
        assert!(matches!(on(Arc::new(fixed()), mixed), Err(Error::MixedAddresses { .. })));
        assert!(matches!(on(Arc::new(fixed()), Vec::new()), Err(Error::MixedAddresses { .. })));
        // Who sets up Networks would be made to remove this one.
        let able = on(Arc::new(BridgeRuntime::default()), addresses(ADDRESSES));
        assert!(matches!(able, Err(Error::SetsUp { .. })));
        assert!(matches!(examine_on(Arc::new(fixed()), Vec::new(), None), Err(Error::NoNetwork)));
    });
}
