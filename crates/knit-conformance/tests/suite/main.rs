//! The suite against a runtime that keeps every promise, and against runtimes that break one each.

#[allow(dead_code, unreachable_pub, reason = "it is a program of its own; its main is not called here")]
#[path = "../../../knit-runtime/examples/bridge.rs"]
mod bridge;
mod existing;
mod reference;
mod wrong;

use std::future::pending;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bridge::BridgeRuntime;
use knit_conformance::{ExistingNetwork, Options, Outcome, Report};
use knit_kernel::testing::{eventually, in_namespaces};
use knit_runtime::{Runtime, wire};
use wrong::{Defect, Wrong};

fn options(socket: PathBuf) -> Options {
    Options {
        socket,
        deadline: Duration::from_secs(30),
        directory: "/run/conformance".into(),
        node: "node".into(),
        node_addresses: Vec::new(),
        underlay_parent: None,
        network: None,
    }
}

/// Serves a runtime and runs the suite against it.
fn examine(runtime: Arc<dyn Runtime>, node_addresses: Vec<IpAddr>) -> Report {
    examine_on(runtime, node_addresses, None).expect("the suite runs")
}

/// The same, on a Network that is there already.
fn examine_on(
    runtime: Arc<dyn Runtime>,
    node_addresses: Vec<IpAddr>,
    network: Option<ExistingNetwork>,
) -> Result<Report, knit_conformance::Error> {
    examine_with(runtime, |options| Options { node_addresses, network, ..options })
}

/// The same, with these options.
fn examine_with(
    runtime: Arc<dyn Runtime>,
    change: impl FnOnce(Options) -> Options,
) -> Result<Report, knit_conformance::Error> {
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    tokio.expect("a tokio runtime").block_on(async {
        let folder = tempfile::tempdir_in("/run").expect("a folder");
        let socket = folder.path().join("runtime.sock");
        let served = socket.clone();
        let server = tokio::spawn(async move { wire::serve(&served, runtime, pending()).await });
        // Bound is not yet listening.
        eventually("the runtime listens", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());
        let options = change(options(socket));
        let report = knit_conformance::run(options, |case, outcome| {
            if let Outcome::Failed(why) = outcome {
                println!("{} failed: {why}", case.name);
            }
        });
        let report = report.await;
        server.abort();
        report
    })
}

fn failed(report: &Report) -> Vec<&'static str> {
    report.failures().map(|case| case.name).collect()
}

#[test]
fn the_example_passes() {
    in_namespaces(|| {
        let report = examine(Arc::new(BridgeRuntime::default()), Vec::new());
        assert_eq!(failed(&report), Vec::<&str>::new());
        assert!(report.conformant);
        let of = |name: &str| report.profiles.iter().find(|p| p.name == name).expect("a profile");
        for name in [
            "Core",
            "NetworkSetup",
            "Layer2",
            "IPv4",
            "IPv6",
            "StaticAddress",
            "StaticMac",
            "Mtu",
            "Routes",
            "CollectGarbage",
        ] {
            assert_eq!(of(name).result, "Passed", "{name}");
            assert_eq!(of(name).skipped, 0, "{name}");
        }
        for name in ["Layer3", "Underlay", "HostPorts", "Update", "Watch"] {
            assert_eq!(of(name).result, "Skipped", "{name} is not announced");
        }
        let left = std::fs::read_dir("/run/conformance").expect("the folder").count();
        assert_eq!(left, 0, "namespaces are left");
        let yaml = serde_saphyr::to_string(&report).expect("YAML");
        assert!(yaml.contains("conformant: true") && yaml.contains("name: example.com/bridge"), "{yaml}");
    });
}

/// One defect breaks the promises that it is about, and no other.
fn caught(defect: Defect, by: &[&str]) {
    let report = examine(Arc::new(Wrong::new(BridgeRuntime::default(), defect)), Vec::new());
    assert!(!report.conformant);
    assert_eq!(failed(&report), by, "{defect:?}");
}

macro_rules! defects {
    ($($name:ident $defect:ident [$($case:literal),+])+) => {
        $(#[test]
        fn $name() {
            in_namespaces(|| caught(Defect::$defect, &[$($case),+]));
        })+
    };
}

defects! {
    a_nameless_runtime Nameless ["Capabilities"]
    a_status_that_is_never_ready NeverReady ["StatusReady"]
    an_attach_that_forgets_to_set_the_link_up LinkDown [
        "AttachAnswers", "AttachCarriesPackets", "AttachConflict", "AttachAllOrNothing", "AttachAtOnce",
        "DefaultRoute", "DetachRemoves", "DetachOneOfTwo", "CheckPasses", "SetupAgain", "RemoveRefusedInUse",
        "SwitchedPods", "Ipv4Packets", "Ipv6Packets", "WantedAddress", "WantedMac", "NetworkMtu",
        "ExtraRoutes", "CollectGarbage"
    ]
    an_attach_that_cannot_be_repeated NotIdempotent ["AttachAgain"]
    an_attach_that_ignores_a_conflict NoConflict ["AttachConflict"]
    an_attach_that_says_internal_for_everything AllInternal [
        "AttachConflict", "AttachUnknownNetwork", "AttachGoneNamespace", "AttachAllOrNothing",
            "ErrorsAreTyped",
        "AttachNeedsAddresses", "CheckSeesDamage", "CheckSeesLinkDown", "CheckSeesOtherNamespace",
            "CheckUnknown",
        "RemoveRefusedInUse"
    ]
    an_attach_that_leaves_half HalfStays ["AttachAllOrNothing"]
    an_attach_that_knows_one_pod_at_a_time OneAtATime ["AttachAtOnce"]
    a_detach_that_does_nothing DetachLies ["AttachAllOrNothing", "DetachRemoves", "DetachOneOfTwo"]
    a_detach_that_takes_all DetachTakesAll ["DetachOneOfTwo"]
    a_detach_that_fails_for_what_is_gone DetachNotFound ["DetachAgain"]
    a_list_that_does_not_filter ListsAll ["ListTells"]
    a_check_that_sees_nothing BlindCheck ["CheckSeesDamage", "CheckSeesLinkDown"]
    a_check_that_knows_everybody CheckKnowsAll ["CheckUnknown"]
    garbage_that_stays GarbageStays ["CollectGarbage"]
    garbage_collection_that_takes_everything GarbageTakesAll ["CollectGarbage"]
    a_network_that_goes_under_its_pods RemovesInUse ["RemoveRefusedInUse"]
    a_mac_of_its_own_choice OtherMac ["WantedMac"]
    an_mtu_of_its_own_choice OtherMtu ["NetworkMtu"]
    routes_left_out NoRoutes ["ExtraRoutes"]
    features_that_are_not_there Boasts ["UpdateInPlace", "WatchTells"]
    a_default_route_that_is_left_out NoDefaultRoute ["DefaultRoute"]
    a_default_route_that_nobody_asked_for AlwaysDefaultRoute ["DefaultRoute"]
    name_servers_left_out NoDns ["NameServers"]
    addresses_of_its_own_choice AddressesOfItsOwn ["AttachNeedsAddresses"]
    one_address_more_than_asked_for OneAddressMore [
        "AttachAnswers", "AttachConflict", "AttachAllOrNothing", "AttachAtOnce", "DetachRemoves",
            "DetachOneOfTwo",
        "CheckPasses", "SetupAgain", "RemoveRefusedInUse", "Ipv4Packets", "Ipv6Packets", "WantedAddress",
        "WantedMac", "NetworkMtu", "CollectGarbage"
    ]
    a_host_end_that_is_not_there OtherHostEnd ["HostEnd"]
    a_list_that_forgets_whose_it_is PodsForgotten ["ListKnowsPods"]
    a_status_that_does_not_count NeverCounts ["StatusReady"]
    a_check_that_does_not_see_a_link_that_is_down BlindToDown ["CheckSeesLinkDown"]
    a_check_that_does_not_see_another_namespace BlindToOtherNamespace ["CheckSeesOtherNamespace"]
    a_network_whose_namespace_stays NetworkStays ["RemoveLeavesNothing"]
}
