//! A packet that the table of a policy drops becomes an entry with names, in the book and on the socket.

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use knit_drops::socket::{self, Line, Request};
use knit_drops::{Clusters, Dropped, Drops, Question};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::in_namespaces;
use knit_nft::{Chain, ChainKind, Family, Hook, Nftables as _, Rule, TableId, TableState};
use knit_policy::cluster::Cluster;
use knit_policy::model::{
    Attachment, Direction, Kind, NamespaceMatch, Pod, Policy, PolicyName, Scope, Selector, Subject, Tier,
};
use knit_policy_nft::log::{GROUP, Why};

const SECONDS: Duration = Duration::from_secs(60);

struct Known(Mutex<Cluster>);

impl Clusters for Known {
    fn ask(&self, question: Question) {
        question(&self.0.lock().expect("nobody panicked"));
    }
}

/// Pods shop/web and shop/db, and a policy that isolates both.
fn cluster() -> Cluster {
    let mut cluster = Cluster::new();
    for (name, address) in [("web", "127.0.0.1"), ("db", "127.0.0.2")] {
        let mut pod = Pod::new("shop", name);
        let addresses = [address.parse().expect("an address")].into();
        pod.attachments = [Attachment { network: "blue".into(), primary: true, addresses }].into();
        cluster.set_pod(pod);
    }
    cluster.set_policy(Policy {
        name: PolicyName { kind: Kind::Network, namespace: "shop".into(), name: "deny".into() },
        tier: Tier::Namespace,
        scope: Scope::Primary,
        subject: Subject { namespaces: NamespaceMatch::Named("shop".into()), pods: Selector::default() },
        ingress: None,
        egress: Some([].into()),
    });
    cluster
}

/// What the rules of a policy do to a packet that they deny.
fn drops_everything() -> TableState {
    let prefix = Why::Denied(Direction::Egress).prefix();
    TableState::new(TableId::new(Family::Inet, "drops")).chain(
        Chain::base("output", ChainKind::Filter, Hook::Output, 0),
        [Rule::new().log_group(prefix, GROUP).drop()],
    )
}

/// Waits on the blocking side for what the socket says, so that the runtime's threads serve.
fn first_line(path: &std::path::Path) -> Dropped {
    let deadline = Instant::now() + SECONDS;
    let mut found = None;
    while found.is_none() && Instant::now() < deadline {
        socket::ask(path, Request { follow: true }, |line| {
            if let Line::Dropped(dropped) = line {
                found = Some(*dropped);
            }
            Ok(found.is_none())
        })
        .expect("the socket answers");
    }
    found.expect("it is told")
}

#[test]
fn a_dropped_packet_is_named_listed_and_served_to_root_alone() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(socket::NAME);
        Kernel::open().expect("nftables").apply(&drops_everything()).expect("the table is made");
        let drops = Drops::start(Arc::new(Known(Mutex::new(cluster())))).expect("a thread");
        let _inside = runtime.enter();
        let here = NetNs::current().expect("a namespace");
        let listening = drops.listen(&"blue".into(), &here).expect("nfnetlink_log");
        let listener = socket::open(&path).expect("a socket");
        runtime.spawn(socket::serve(listener, drops.clone()));
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let socket = UdpSocket::bind("127.0.0.1:0").expect("bound");
        socket.send_to(b"x", "127.0.0.2:53").expect_err("a rule drops it");
        let dropped = first_line(&path);
        assert_eq!(dropped.network, "blue");
        assert_eq!(dropped.direction, "egress");
        assert_eq!(dropped.from.to_string(), "shop/web (127.0.0.1)");
        assert_eq!(dropped.to.to_string(), "shop/db (127.0.0.2)");
        assert_eq!(dropped.service(), "UDP 53");
        assert_eq!(dropped.policies, ["NetworkPolicy shop/deny"]);
        assert_eq!(
            dropped.message(),
            "A connection of this pod to shop/db (127.0.0.2) (UDP 53) in Network blue was dropped: isolated \
             by NetworkPolicy shop/deny, and no rule allows this. knit explain shop/web shop/db:53/udp \
             --network blue shows the rules."
        );
        let recent = drops.recent();
        assert_eq!((recent.len(), &recent[0].from), (1, &dropped.from));
        assert!(
            drops.metrics().contains("namespace=\"shop\",pod=\"web\",network=\"blue\",direction=\"egress\"")
        );
        // Who listens lets go of the group at the end.
        drop(listening);
        knit_kernel::testing::eventually("the group is free", SECONDS, || {
            drops.listen(&"blue".into(), &here).is_ok()
        });
    });
}
