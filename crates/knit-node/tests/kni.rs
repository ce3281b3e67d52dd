//! The KNI door, both protocols, over its socket.

mod common;

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use common::{Agent, Node};
use futures::StreamExt as _;
use knit_api::kni::beta as old;
use knit_api::kni::v1alpha1 as wire;
use knit_kernel::NetNs;
use knit_kernel::testing::in_namespaces;
use knit_node::front_door::kni::KniDoor;
use knit_runtime::Reason;
use knit_runtime::wire::error_from_status;
use old::kni_client::KniClient;
use tonic::transport::{Channel, Endpoint};
use wire::network_runtime_client::NetworkRuntimeClient;
use wire::watch_event::Type;

/// A node with an agent whose KNI door is open.
async fn open(node: &Node) -> (Agent, Channel) {
    let agent = node.start().await;
    let socket = node.dir.path().join("kni.sock");
    let door = KniDoor::open(&socket).expect("a door");
    let mode = std::fs::metadata(&socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "the socket is for its owner alone");
    tokio::spawn(door.serve(agent.core.clone()));
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).expect("an endpoint");
    (agent, endpoint.connect_lazy())
}

fn pod(node: &Node, sandbox: &str, namespace: &str, networks: &str) -> wire::Pod {
    wire::Pod {
        namespace: namespace.into(),
        name: format!("pod-{sandbox}"),
        uid: format!("uid-{sandbox}"),
        sandbox_id: sandbox.into(),
        netns_path: node.netns(sandbox).display().to_string(),
        annotations: HashMap::from([("knit.dev/networks".to_owned(), networks.to_owned())]),
        labels: HashMap::new(),
    }
}

fn names(attachments: &[wire::Attachment]) -> Vec<(&str, &str)> {
    attachments.iter().map(|a| (a.interface.as_str(), a.network.as_str())).collect()
}

fn reason<T: std::fmt::Debug>(result: Result<T, tonic::Status>) -> Reason {
    let status = result.expect_err("refused");
    assert!(!status.details().is_empty(), "typed: {status:?}");
    error_from_status(&status).reason
}

#[tokio::test]
async fn the_agent_decides_networks_and_addresses() {
    let node = Node::new();
    let (_agent, channel) = open(&node).await;
    let mut client = NetworkRuntimeClient::new(channel);
    let who =
        client.get_capabilities(wire::GetCapabilitiesRequest::default()).await.expect("who").into_inner();
    assert_eq!((who.name.as_str(), who.protocol_version.as_str()), ("knit.dev/node", "v1alpha1"));

    let request =
        wire::AttachRequest { pod: Some(pod(&node, "s1", "shop", "blue")), attachments: Vec::new() };
    let first = client.attach(request.clone()).await.expect("attached").into_inner();
    assert_eq!(names(&first.attachments), [("eth0", "default"), ("net1", "blue")]);
    assert!(first.attachments.iter().all(|a| a.addresses.len() == 1), "{first:?}");
    let again = client.attach(request).await.expect("again").into_inner();
    assert_eq!(again, first);

    let listed =
        client.list(wire::ListRequest { sandbox_id: "s1".into() }).await.expect("a list").into_inner();
    assert_eq!(names(&listed.attachments), names(&first.attachments));
    let this = Some(wire::Pod { sandbox_id: "s1".into(), ..wire::Pod::default() });
    client.check(wire::CheckRequest { pod: this.clone(), interface: "net1".into() }).await.expect("whole");
    let unknown = client.check(wire::CheckRequest { pod: this.clone(), interface: "net9".into() }).await;
    assert_eq!(reason(unknown), Reason::AttachmentNotFound);

    let main =
        client.detach(wire::DetachRequest { pod: this.clone(), interfaces: vec!["eth0".into()] }).await;
    assert_eq!(reason(main), Reason::Invalid, "not a pod without its main interface");
    let further = wire::DetachRequest { pod: this.clone(), interfaces: vec!["net1".into()] };
    client.detach(further.clone()).await.expect("a further one may go");
    client.detach(further).await.expect("and be gone already");
    let listed =
        client.list(wire::ListRequest { sandbox_id: "s1".into() }).await.expect("a list").into_inner();
    assert_eq!(names(&listed.attachments), [("eth0", "default")]);
    assert_eq!(node.attachments().len(), 1);
    client.detach(wire::DetachRequest { pod: this.clone(), interfaces: Vec::new() }).await.expect("detached");
    client.detach(wire::DetachRequest { pod: this, interfaces: Vec::new() }).await.expect("detached again");
    assert!(node.is_clean());
}

#[tokio::test]
async fn what_a_client_asks_for_needs_the_same_rights() {
    let node = Node::new();
    let (_agent, channel) = open(&node).await;
    let mut client = NetworkRuntimeClient::new(channel);
    let wish = |network: &str, interface: &str, ip: &str| wire::AttachmentRequest {
        network: network.into(),
        interface: interface.into(),
        addresses: match ip {
            "" => Vec::new(),
            ip => vec![wire::Address { ip: ip.into(), ..wire::Address::default() }],
        },
        ..wire::AttachmentRequest::default()
    };
    let attachments = vec![wish("", "main0", "10.1.0.9"), wish("blue", "extra", "10.2.0.7")];
    let request = wire::AttachRequest { pod: Some(pod(&node, "s1", "shop", "")), attachments };
    let made = client.attach(request).await.expect("attached").into_inner().attachments;
    assert_eq!(names(&made), [("main0", "default"), ("extra", "blue")]);
    assert_eq!(
        (made[0].addresses[0].ip.as_str(), made[1].addresses[0].ip.as_str()),
        ("10.1.0.9", "10.2.0.7")
    );

    // A pod that the agent does not know, and of which the client says nothing: advice for this door.
    let silent = wire::Pod { annotations: HashMap::new(), ..pod(&node, "s0", "shop", "") };
    let request = wire::AttachRequest { pod: Some(silent), attachments: Vec::new() };
    let status = client.attach(request).await.expect_err("not known");
    assert!(status.message().contains("send its annotations"), "{status:?}");
    assert!(!status.message().contains("CNI"), "{status:?}");

    // Network green is the primary of another team's namespaces, and nobody else may attach.
    let request = wire::AttachRequest {
        pod: Some(pod(&node, "s2", "shop", "")),
        attachments: vec![wish("", "", ""), wish("green", "", "")],
    };
    assert_eq!(reason(client.attach(request).await), Reason::NotAllowed);
    let nobody = wire::Pod { namespace: String::new(), name: String::new(), ..pod(&node, "s3", "shop", "") };
    let request = wire::AttachRequest { pod: Some(nobody), attachments: vec![wish("blue", "", "")] };
    assert_eq!(reason(client.attach(request).await), Reason::Invalid);
    for broken in [
        wire::AttachRequest::default(),
        wire::AttachRequest { pod: Some(wire::Pod::default()), attachments: Vec::new() },
        wire::AttachRequest {
            pod: Some(wire::Pod { netns_path: "relative".into(), ..pod(&node, "s4", "shop", "") }),
            attachments: Vec::new(),
        },
        wire::AttachRequest {
            pod: Some(pod(&node, "s5", "shop", "")),
            attachments: vec![wish("", "lo", "")],
        },
        wire::AttachRequest { pod: Some(pod(&node, "s5", "shop", "")), attachments: vec![wish("", "", "x")] },
    ] {
        assert_eq!(reason(client.attach(broken).await), Reason::Invalid);
    }
    let network = wire::SetupNetworkRequest::default();
    assert_eq!(reason(client.setup_network(network).await), Reason::Unsupported);
}

#[tokio::test]
async fn a_second_request_that_differs_got_the_old_answer() {
    let node = Node::new();
    let (_agent, channel) = open(&node).await;
    let mut client = NetworkRuntimeClient::new(channel);
    let wish = |network: &str, interface: &str, ip: &str| wire::AttachmentRequest {
        network: network.into(),
        interface: interface.into(),
        addresses: match ip {
            "" => Vec::new(),
            ip => vec![wire::Address { ip: ip.into(), ..wire::Address::default() }],
        },
        ..wire::AttachmentRequest::default()
    };
    let ask = |attachments: &[wire::AttachmentRequest]| wire::AttachRequest {
        pod: Some(pod(&node, "s1", "shop", "")),
        attachments: attachments.to_vec(),
    };
    let main = wish("", "eth0", "10.1.0.9");
    let first = client.attach(ask(std::slice::from_ref(&main))).await.expect("attached").into_inner();
    let mut mac = main.clone();
    mac.mac = "02:00:00:00:00:42".into();
    let mut ports = main.clone();
    ports.ports = vec![wire::PortMapping {
        protocol: wire::Protocol::Tcp.into(),
        host_port: 8080,
        container_port: 80,
        ..wire::PortMapping::default()
    }];
    for (other, what) in [
        (vec![main.clone(), wish("blue", "net1", "")], "one more Network"),
        (vec![wish("nowhere", "eth0", "")], "a Network that does not exist"),
        (vec![wish("", "eth0", "10.1.0.10")], "another address"),
        (vec![mac], "another MAC"),
        (vec![ports], "ports"),
    ] {
        assert_eq!(reason(client.attach(ask(&other)).await), Reason::Conflict, "{what}");
    }
    // Nothing happened, and the same request still has its answer; so has one that leaves the choice to the
    // agent.
    assert_eq!(node.attachments().len(), 1);
    for same in [main, wish("default", "eth0", ""), wish("", "", "")] {
        assert_eq!(client.attach(ask(&[same])).await.expect("the same").into_inner(), first);
    }
}

#[tokio::test]
async fn changes_and_readiness_are_told() {
    let node = Node::new();
    let (_agent, channel) = open(&node).await;
    let mut client = NetworkRuntimeClient::new(channel);
    let attach = |sandbox: &str| wire::AttachRequest {
        pod: Some(pod(&node, sandbox, "shop", "")),
        attachments: Vec::new(),
    };
    client.attach(attach("s1")).await.expect("attached");
    let mut events = client.watch(wire::WatchRequest {}).await.expect("a watch").into_inner();
    let mut next = async || {
        let event = events.next().await.expect("an event").expect("an event");
        (event.r#type(), event.attachment.map(|a| a.sandbox_id).unwrap_or_default())
    };
    assert_eq!(next().await, (Type::Added, "s1".to_owned()));
    assert_eq!(next().await, (Type::Synced, String::new()));
    client.attach(attach("s2")).await.expect("attached");
    assert_eq!(next().await, (Type::Added, "s2".to_owned()));

    let status = client.status(wire::StatusRequest {}).await.expect("a status").into_inner();
    let default = status.networks.iter().find(|n| n.name == "default").expect("the default Network");
    assert_eq!((default.ready, default.attachments), (true, 2), "{status:?}");

    // Only what came in by this door is collected.
    let keep = wire::CollectGarbageRequest { sandbox_ids: vec!["s2".into()] };
    let removed = client.collect_garbage(keep).await.expect("collected").into_inner().removed;
    assert_eq!(removed.iter().map(|a| a.sandbox_id.as_str()).collect::<Vec<_>>(), ["s1"]);
    assert_eq!(next().await, (Type::Removed, "s1".to_owned()));
}

#[tokio::test]
async fn the_old_service_attaches_and_answers() {
    let node = Node::new();
    let (_agent, channel) = open(&node).await;
    let mut client = KniClient::new(channel);
    let request = |sandbox: &str| old::AttachInterfaceRequest {
        id: sandbox.into(),
        namespace: "shop".into(),
        name: format!("pod-{sandbox}"),
        annotations: HashMap::from([("knit.dev/networks".to_owned(), "blue".to_owned())]),
        ..old::AttachInterfaceRequest::default()
    };
    // Both ways to say where the namespace is.
    let mut one = request("s1");
    one.isolation =
        Some(old::Isolation { path: node.netns("s1").display().to_string(), ..old::Isolation::default() });
    let mut two = request("s2");
    two.extradata.insert("netns".into(), node.netns("s2").display().to_string());
    for (request, address) in [(one, "10.1.0."), (two, "10.1.0.")] {
        let made = client.attach_interface(request.clone()).await.expect("attached").into_inner().ipconfigs;
        assert!(made["eth0"].ip[0].starts_with(address), "{made:?}");
        assert_eq!(made["net1"].extradata["network"], "blue");
        let query = old::QueryPodNetworkRequest { id: request.id.clone(), ..Default::default() };
        assert_eq!(client.query_pod_network(query).await.expect("known").into_inner().ipconfigs, made);
    }
    assert_eq!(reason(client.attach_interface(request("s3")).await), Reason::Invalid, "no namespace is said");
    let query = old::QueryPodNetworkRequest { id: "s9".into(), ..Default::default() };
    assert_eq!(reason(client.query_pod_network(query).await), Reason::AttachmentNotFound);
    let networks = client.query_node_networks(old::QueryNodeNetworksRequest {}).await.expect("networks");
    let default = networks.into_inner().networks.into_iter().find(|n| n.name == "default");
    assert!(default.expect("the default Network").ready);
    for sandbox in ["s1", "s2", "s2"] {
        let detach = old::DetachInterfaceRequest { id: sandbox.into(), ..Default::default() };
        client.detach_interface(detach).await.expect("detached");
    }
    assert!(node.is_clean());
}

#[test]
fn the_old_service_makes_namespaces_that_never_collide() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let node = Node::new();
            let (_agent, channel) = open(&node).await;
            let mut client = KniClient::new(channel);
            let create = |uid: &str| old::CreateNetworkRequest {
                namespace: "shop".into(),
                name: "web-0".into(),
                uid: uid.into(),
                netns_path_prefix: "/run/pods".into(),
                ..Default::default()
            };
            let first = client.create_network(create("u1")).await.expect("made").into_inner().netns_path;
            let again = client.create_network(create("u1")).await.expect("made").into_inner().netns_path;
            assert_eq!(first, again, "the same pod has one namespace");
            let ns = NetNs::open(&first).expect("a namespace");
            let links =
                knit_kernel::Handle::open(&ns).and_then(|h| h.links(&Default::default())).expect("links");
            assert!(links.iter().any(|l| l.name.as_str() == "lo" && l.up), "{links:?}");

            // Attached without a word about where: the note tells, and the pod's uid with it.
            let attach = old::AttachInterfaceRequest {
                id: "s1".into(),
                namespace: "shop".into(),
                name: "web-0".into(),
                annotations: HashMap::from([("a".to_owned(), "b".to_owned())]),
                ..Default::default()
            };
            client.attach_interface(attach).await.expect("attached");
            let made = node.attachments();
            assert_eq!((made[0].pod.uid.as_deref(), made[0].pod_netns_inode), (Some("u1"), ns.id().ino));

            // The next pod of that name.
            let second = client.create_network(create("u2")).await.expect("made").into_inner().netns_path;
            assert_ne!(first, second);
            let delete = |path: &str| old::DeleteNetworkRequest {
                namespace: "shop".into(),
                name: "web-0".into(),
                netns_path: path.into(),
                ..Default::default()
            };
            client.delete_network(delete(&first)).await.expect("deleted");
            client.delete_network(delete(&first)).await.expect("deleted again");
            assert!(!Path::new(&first).exists() && NetNs::open(&second).is_ok());
            client.delete_network(delete("/etc/passwd")).await.expect("not ours: nothing happens");
            assert!(Path::new("/etc/passwd").exists());
            client.delete_network(delete("")).await.expect("deleted by name");
            assert!(!Path::new(&second).exists());
            // Its pod is gone with it.
            let query = old::QueryPodNetworkRequest { id: "s1".into(), ..Default::default() };
            assert_eq!(reason(client.query_pod_network(query).await), Reason::AttachmentNotFound);
            assert!(node.is_clean());
            for uid in ["", "../x", "a/b"] {
                assert_eq!(reason(client.create_network(create(uid)).await), Reason::Invalid, "{uid:?}");
            }
        });
    });
}

#[test]
fn two_pods_of_one_name_were_taken_for_each_other() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let node = Node::new();
            let (_agent, channel) = open(&node).await;
            let mut client = KniClient::new(channel);
            let create = |uid: &str| old::CreateNetworkRequest {
                namespace: "shop".into(),
                name: "web-0".into(),
                uid: uid.into(),
                netns_path_prefix: "/run/pods".into(),
                ..Default::default()
            };
            let attach = |id: &str, extradata: &[(&str, &str)]| old::AttachInterfaceRequest {
                id: id.into(),
                namespace: "shop".into(),
                name: "web-0".into(),
                annotations: HashMap::from([("a".to_owned(), "b".to_owned())]),
                extradata: extradata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
                ..Default::default()
            };
            let delete = |id: &str| old::DeleteNetworkRequest {
                id: id.into(),
                namespace: "shop".into(),
                name: "web-0".into(),
                ..Default::default()
            };
            let query = |id: &str| old::QueryPodNetworkRequest { id: id.into(), ..Default::default() };
            let first = client.create_network(create("u1")).await.expect("made").into_inner().netns_path;
            let second = client.create_network(create("u2")).await.expect("made").into_inner().netns_path;
            // Nothing says which one is meant: the error does, and does not send the client back to
            // CreateNetwork.
            let status = client.attach_interface(attach("s1", &[])).await.expect_err("ambiguous");
            assert!(status.message().contains("u1 and u2"), "{status:?}");
            client.attach_interface(attach("s1", &[("uid", "u1")])).await.expect("attached");
            // One is taken now, so the other is meant.
            client.attach_interface(attach("s2", &[])).await.expect("attached");
            let uids: Vec<_> = node.attachments().iter().filter_map(|a| a.pod.uid.clone()).collect();
            assert_eq!(uids, ["u1", "u2"]);
            client.attach_interface(attach("s1", &[])).await.expect("the same again");

            assert_eq!(reason(client.delete_network(delete("")).await), Reason::Invalid, "which one?");
            assert!(Path::new(&first).exists() && Path::new(&second).exists());
            client.delete_network(delete("s1")).await.expect("deleted by its sandbox");
            assert!(!Path::new(&first).exists() && Path::new(&second).exists());
            assert_eq!(reason(client.query_pod_network(query("s1")).await), Reason::AttachmentNotFound);
            client.query_pod_network(query("s2")).await.expect("the other stays");
            client.delete_network(delete("")).await.expect("the only one");
            assert!(!Path::new(&second).exists() && node.is_clean());
        });
    });
}

/// The old one is detached and not deleted yet: neither could the new one be attached, nor the old one be
/// deleted.
#[test]
fn a_new_pod_of_a_terminating_ones_name_got_stuck() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let node = Node::new();
            let (agent, channel) = open(&node).await;
            let mut client = KniClient::new(channel);
            let create = |uid: &str| old::CreateNetworkRequest {
                namespace: "shop".into(),
                name: "web-0".into(),
                uid: uid.into(),
                netns_path_prefix: "/run/pods".into(),
                ..Default::default()
            };
            let attach = |id: &str| old::AttachInterfaceRequest {
                id: id.into(),
                namespace: "shop".into(),
                name: "web-0".into(),
                annotations: HashMap::from([("a".to_owned(), "b".to_owned())]),
                ..Default::default()
            };
            let detach = |id: &str| old::DetachInterfaceRequest { id: id.into(), ..Default::default() };
            let delete = |id: &str| old::DeleteNetworkRequest {
                id: id.into(),
                namespace: "shop".into(),
                name: "web-0".into(),
                ..Default::default()
            };
            let first = client.create_network(create("u1")).await.expect("made").into_inner().netns_path;
            client.attach_interface(attach("s1")).await.expect("attached");
            client.detach_interface(detach("s1")).await.expect("detached");
            let second = client.create_network(create("u2")).await.expect("made").into_inner().netns_path;
            client.attach_interface(attach("s2")).await.expect("the namespace where nobody was");
            let uids: Vec<_> = node.attachments().iter().filter_map(|a| a.pod.uid.clone()).collect();
            assert_eq!(uids, ["u2"]);
            client.delete_network(delete("s1")).await.expect("deleted by the sandbox that was there");
            assert!(!Path::new(&first).exists() && Path::new(&second).exists());

            // Neither was ever attached, and nobody says which: the pod that has the name now keeps its
            // namespace.
            let third = client.create_network(create("u3")).await.expect("made").into_inner().netns_path;
            client.delete_network(delete("s2")).await.expect("deleted");
            let fourth = client.create_network(create("u4")).await.expect("made").into_inner().netns_path;
            assert_eq!(reason(client.attach_interface(attach("s4")).await), Reason::Invalid, "which one?");
            let pod = knit_node::world::PodView { uid: Some("u4".into()), ..Default::default() };
            agent.core.world().update(|world| {
                let pods = std::sync::Arc::make_mut(&mut world.pods);
                pods.insert(("shop".into(), "web-0".into()), std::sync::Arc::new(pod));
            });
            client.attach_interface(attach("s4")).await.expect("its uid decides");
            assert_eq!(node.attachments()[0].pod.uid.as_deref(), Some("u4"));
            client.delete_network(delete("")).await.expect("the other one");
            assert!(!Path::new(&third).exists() && Path::new(&fourth).exists());
        });
    });
}
