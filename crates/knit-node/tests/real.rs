//! Two agents with the reference runtime in namespaces, driven through the shim's protocol: overlapping
//! Networks over two nodes, a restart that no pod notices, and nothing left at the end.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use knit_cni::code;
use knit_cni::protocol::{Command, Response};
use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_kernel::{Handle, Op};
use knit_node::agent::Agent;
use knit_testbed::agents::{Node, Pod, two_nodes};
use knit_testbed::objects::{block, network, node, write};
use knit_testbed::wire::Wire;
use knit_testbed::{NEVER, SOON, cni, name};
use serde_json::{Value, json};

/// What these tests do with a node.
trait Called {
    async fn start(&self) -> Agent;

    /// A call about a pod with this annotation `knit.dev/networks`.
    async fn annotated(&self, command: Command, pod: &Pod, networks: &str) -> Value;

    /// Why a pod cannot be added within two seconds.
    async fn refusal(&self, pod: &Pod, networks: &str) -> String;
}

impl Called for Node {
    async fn start(&self) -> Agent {
        self.start_as(self.config()).await
    }

    async fn annotated(&self, command: Command, pod: &Pod, networks: &str) -> Value {
        self.call(command, pod, &cni::networks(networks)).await
    }

    async fn refusal(&self, pod: &Pod, networks: &str) -> String {
        let mut request = cni::request(Command::Add, pod.about(), &cni::networks(networks));
        request.timeout_ms = Some(2000);
        match cni::ask(&self.socket(), request).await {
            Response::Err(error) => format!("{error:?}"),
            Response::Ok(value) => panic!("{} was added: {value}", pod.name),
        }
    }
}

fn write_objects(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    let objects = [
        network(
            "default",
            1,
            json!({"class": "knit", "topology": "Layer3", "subnets": [{"cidr": "10.244.0.0/16"},
                {"cidr": "fd44::/64"}]}),
        ),
        network(
            "blue",
            2,
            json!({"class": "knit", "topology": "Layer3", "subnets": [{"cidr": "10.77.0.0/16"}],
                "allowedNamespaces": {"from": "All"}}),
        ),
        network(
            "green",
            3,
            json!({"class": "knit", "topology": "Layer2", "subnets": [{"cidr": "10.77.0.0/16"}],
                "primaryFor": {"matchLabels": {"team": "green"}}}),
        ),
        block("default", "a", "10.244.1.0/28", Some("fd44::1:0/124")),
        block("default", "b", "10.244.2.0/28", Some("fd44::2:0/124")),
        block("blue", "a", "10.77.0.16/28", None),
        block("blue", "b", "10.77.0.32/28", None),
        block("green", "a", "10.77.0.16/28", None),
        block("green", "b", "10.77.0.32/28", None),
        node("a", &["192.168.7.1"]),
        node("b", &["192.168.7.2"]),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "forest",
            "labels": {"team": "green"}}}),
    ];
    for (n, object) in objects.iter().enumerate() {
        write(folder, &n.to_string(), object);
    }
}

/// The address number `n` of a result.
fn address(result: &Value, n: usize) -> IpAddr {
    let text = result["ips"][n]["address"].as_str().unwrap_or_else(|| panic!("{n} in {result}"));
    text.parse::<IpNet>().expect("an address").addr()
}

/// Whether a packet arrives and is answered, within this time.
fn talk(from: &Pod, to: &Pod, address: IpAddr, port: u16, wait: Duration) -> bool {
    let target = SocketAddr::new(address, port);
    let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let bind = |pod: &Pod, at: SocketAddr| {
        let socket = pod.space.run(|| UdpSocket::bind(at)).expect("in").expect("bound");
        socket.set_read_timeout(Some(wait)).expect("a timeout");
        socket
    };
    let server = bind(to, SocketAddr::new(any, port));
    let client = bind(from, SocketAddr::new(any, 0));
    if client.send_to(b"ping", target).is_err() {
        return false;
    }
    let Ok((_, back)) = server.recv_from(&mut [0; 16]) else { return false };
    server.send_to(b"pong", back).is_ok() && client.recv(&mut [0; 16]).is_ok()
}

/// The first packets between two nodes may come before the other node's part is there.
#[track_caller]
fn reaches(from: &Pod, to: &Pod, address: IpAddr, port: u16) {
    let what = format!("{} reaches {} at {address}", from.name, to.name);
    eventually(&what, SOON, || talk(from, to, address, port, NEVER));
}

#[test]
fn overlapping_networks_over_two_nodes() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(scenario());
    });
}

async fn scenario() {
    let dir = PathBuf::from("/run/test");
    let (_wire, nodes) = two_nodes(&dir);
    write_objects(&dir.join("objects"));
    let (agent_a, agent_b) = tokio::join!(nodes[0].start(), nodes[1].start());
    let [one, two] = [Pod::new("shop", "one"), Pod::new("shop", "two")];
    let [tree, bush] = [Pod::new("forest", "tree"), Pod::new("forest", "bush")];
    let (first, second) = tokio::join!(
        nodes[0].annotated(Command::Add, &one, "blue"),
        nodes[1].annotated(Command::Add, &two, "blue")
    );
    let (third, fourth) = tokio::join!(
        nodes[0].annotated(Command::Add, &tree, ""),
        nodes[1].annotated(Command::Add, &bush, "")
    );
    // Both tenants have the same addresses.
    assert_eq!(address(&first, 2), address(&third, 0), "{first} {third}");
    // The default Network in both families, and each tenant in its own.
    for n in 0..3 {
        reaches(&one, &two, address(&second, n), 5000);
        reaches(&two, &one, address(&first, n), 5000);
    }
    reaches(&tree, &bush, address(&fourth, 0), 5001);
    reaches(&bush, &tree, address(&third, 0), 5001);
    // Nothing crosses between Networks.
    assert!(!talk(&tree, &two, address(&second, 0), 5002, NEVER));
    assert!(!talk(&one, &bush, address(&fourth, 0), 5003, NEVER), "that is blue's address for pod one");

    // The agent goes and comes: no pod notices, and the same request has the same answer.
    agent_a.stop(Duration::from_secs(5)).await;
    assert!(talk(&one, &two, address(&second, 0), 5004, SOON), "the agent is away");
    let agent_a = nodes[0].start().await;
    assert!(talk(&one, &two, address(&second, 2), 5005, SOON), "the agent is back");
    assert_eq!(nodes[0].annotated(Command::Add, &one, "blue").await, first);

    // A pod that vanishes without a DEL is cleared away; the others by their DELs.
    NetNs::delete(&tree.path).expect("unmounted");
    drop(tree.space);
    let outcome = agent_a.core().reconcile(&Default::default()).await;
    // Unless the agent heard of it before and has done so already.
    assert!(outcome.failed == 0 && outcome.removed <= 1, "{outcome:?}");
    let is_listed = || agent_a.core().list(None).iter().any(|made| made.pod.sandbox.as_str() == "tree");
    eventually("it is cleared away", SOON, || !is_listed());
    nodes[0].annotated(Command::Del, &one, "").await;
    nodes[1].annotated(Command::Del, &two, "").await;
    nodes[1].annotated(Command::Del, &bush, "").await;
    for agent in [&agent_a, &agent_b] {
        assert!(agent.core().list(None).is_empty());
        let runtime = agent.core().runtimes().get("knit.dev/linux").expect("the runtime");
        assert_eq!(runtime.list(None).await.expect("a list"), []);
    }
    agent_a.stop(Duration::from_secs(5)).await;
    agent_b.stop(Duration::from_secs(5)).await;
}

/// A Network of docs/underlay.md, counted from 1.
fn documented(number: usize) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/underlay.md");
    let page = std::fs::read_to_string(page).expect("docs/underlay.md");
    let example = page.split("```yaml\n").nth(number).and_then(|rest| rest.split("```").next());
    example.expect("an example").to_owned()
}

/// Joins a node to a second segment, by a link of this name.
fn join(wire: &Wire, node: &Node, port: &str, link: &str) {
    let handle = Handle::open(&wire.space).expect("a handle");
    if handle.link_by_name(&name("lan")).expect("a look").is_none() {
        let mut bridge = NewLink::bridge(name("lan"), Bridge::default());
        bridge.up = true;
        handle.create_link(&bridge).expect("the segment");
    }
    let mut new = NewLink::veth(name(port), Peer::new(name(link), &node.space));
    new.master = Some(handle.index_of(&name("lan")).expect("the segment"));
    new.up = true;
    handle.create_link(&new).expect("a port of the segment");
    let up = Change::named(name(link)).up();
    Handle::open(&node.space).expect("a handle").apply(&[up.into()]).expect("up");
}

#[test]
fn the_network_of_the_page_about_underlays_works_and_its_pods_come_back_with_their_link() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(underlay());
    });
}

async fn underlay() {
    let dir = PathBuf::from("/run/test");
    let (wire, nodes) = two_nodes(&dir);
    let folder = dir.join("objects");
    write_objects(&folder);
    let write = |file: &str, object: &Value| {
        std::fs::write(folder.join(file), object.to_string()).expect("written");
    };
    let office = format!("{}status:\n  id: 20\n", documented(1));
    std::fs::write(folder.join("office.yaml"), office).expect("written");
    for (node, range) in [("a", "192.168.20.32/28"), ("b", "192.168.20.48/28")] {
        let spec = json!({"network": "office", "node": node, "ipv4": range});
        let block = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AddressBlock",
            "metadata": {"name": format!("office-{node}")}, "spec": spec});
        write(&format!("office-{node}.json"), &block);
    }
    write(
        "11.json",
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop",
        "labels": {"office": "yes"}}}),
    );
    let node = |name: &str, address: &str, labels: Value| {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]}})
    };
    write("9.json", &node("a", "192.168.7.1", json!({"rack": "left"})));
    join(&wire, &nodes[0], "lan-a", "bond0.20");
    join(&wire, &nodes[1], "lan-b", "eth1");
    // A Network on the segment that nodes and a host are on: others reach that host as before, by their node.
    let street = json!({"topology": "Underlay", "underlay": {"parents": [{"name": "eth9"}]},
        "subnets": [{"cidr": "192.168.7.0/24", "reserved": ["192.168.7.0/26"]}]});
    write(
        "street.json",
        &json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network",
        "metadata": {"name": "street"}, "spec": street, "status": {"id": 21}}),
    );
    let mut host = Pod::new("nobody", "host");
    host.space = wire.host("host", 99);
    let (agent_a, agent_b) = tokio::join!(nodes[0].start(), nodes[1].start());
    let [one, two] = [Pod::new("shop", "one"), Pod::new("shop", "two")];
    let first = nodes[0].annotated(Command::Add, &one, "office").await;
    reaches(&one, &host, "192.168.7.99".parse().expect("an address"), 4999);

    // A node that no entry is for says so, until one is.
    let error = nodes[1].refusal(&two, "office").await;
    assert!(error.contains("no entry of spec.underlay.parents matches this node's labels"), "{error}");
    write("10.json", &node("b", "192.168.7.2", json!({"rack": "right"})));
    let second = nodes[1].annotated(Command::Add, &two, "office").await;
    let on_lan = |result: &Value| address(result, 2);
    assert!(first["ips"][2]["address"].as_str().is_some_and(|text| text.ends_with("/24")), "{first}");
    reaches(&one, &two, on_lan(&second), 5000);
    reaches(&two, &one, on_lan(&first), 5000);

    // The link goes, and the pod's with it.
    let port = Handle::open(&wire.space).expect("a handle");
    port.delete_link(port.index_of(&name("lan-a")).expect("a port")).expect("deleted");
    let problem = || {
        let states = agent_a.core().networks().states();
        let office = states.into_iter().find(|state| state.name == "office");
        office.and_then(|state| state.problem).map(|problem| problem.message)
    };
    let told = || problem().is_some_and(|message| message.contains("no link bond0.20"));
    eventually("NodeNetwork can say that the link is missing", SOON, told);
    assert!(!talk(&one, &two, on_lan(&second), 5001, NEVER));
    join(&wire, &nodes[0], "lan-a", "bond0.20");
    reaches(&one, &two, on_lan(&second), 5002);
    eventually("the Network is ready again", SOON, || problem().is_none());

    nodes[0].annotated(Command::Del, &one, "").await;
    nodes[1].annotated(Command::Del, &two, "").await;
    for agent in [&agent_a, &agent_b] {
        let runtime = agent.core().runtimes().get("knit.dev/linux").expect("the runtime");
        assert_eq!(runtime.list(None).await.expect("a list"), []);
    }
    agent_a.stop(Duration::from_secs(5)).await;
    agent_b.stop(Duration::from_secs(5)).await;
}

#[test]
fn a_pod_that_is_tried_again_gets_another_address_than_one_that_a_host_of_the_segment_has() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(taken_addresses());
    });
}

async fn taken_addresses() {
    let dir = PathBuf::from("/run/test");
    let (wire, nodes) = two_nodes(&dir);
    let folder = dir.join("objects");
    write_objects(&folder);
    let spec = json!({"topology": "Underlay",
        "underlay": {"parents": [{"name": "eth1"}], "duplicateCheckMilliseconds": 2000},
        "subnets": [{"cidr": "192.168.20.0/24", "reserved": ["192.168.20.0/27"]}],
        "allowedNamespaces": {"from": "All"}});
    write(&folder, "office", &network("office", 20, spec));
    write(&folder, "office-a", &block("office", "a", "192.168.20.32/28", None));
    join(&wire, &nodes[0], "lan-a", "eth1");
    // Somebody else has the first addresses of the node's block.
    let host = Node { name: "host", space: wire.host("host", 99), dir: dir.clone(), objects: folder };
    join(&wire, &host, "lan-host", "eth1");
    let taken = ["192.168.20.32", "192.168.20.33", "192.168.20.34"];
    let handle = Handle::open(&host.space).expect("a handle");
    let eth1 = handle.index_of(&name("eth1")).expect("eth1");
    for address in taken {
        let address = format!("{address}/24").parse().expect("an address");
        handle.apply(&[Op::create(LinkAddress::new(eth1, address))]).expect("an address of the host");
    }
    let agent = nodes[0].start().await;
    let ask =
        async |pod: &Pod, networks: &str| nodes[0].ask(Command::Add, pod, &cni::networks(networks)).await;
    // Kubelet tries again with a new sandbox.
    let mut refused = Vec::new();
    let (pod, result) = loop {
        let pod = Pod::new("shop", &format!("try-{}", refused.len()));
        match ask(&pod, "office").await {
            Response::Ok(result) => break (pod, result),
            Response::Err(error) => {
                assert_eq!(error.code, code::TRY_AGAIN, "{error:?}");
                assert!(refused.len() < taken.len(), "{refused:?}, and now {error:?}");
                let message = format!("{error:?}");
                let which = taken.iter().find(|address| message.contains(&format!("address {address} is")));
                refused.push(*which.unwrap_or_else(|| panic!("{message}")));
                assert!(agent.core().list(None).is_empty(), "nothing is left of it");
            }
        }
    };
    let got = address(&result, 2).to_string();
    assert!(!refused.is_empty() && !taken.contains(&got.as_str()), "{refused:?}, then {got}");
    refused.sort_unstable();
    refused.dedup();
    assert_eq!(refused.len(), taken.len(), "no address is tried twice");
    // A pod that wants this address, and no other, hears who has it, each time.
    for attempt in 0..2 {
        let wants = Pod::new("shop", &format!("wants-{attempt}"));
        let networks = r#"[{"name":"office","ips":["192.168.20.40"]}]"#;
        if attempt == 0 {
            let address = "192.168.20.40/24".parse().expect("an address");
            handle.apply(&[Op::create(LinkAddress::new(eth1, address))]).expect("an address of the host");
        }
        let Response::Err(error) = ask(&wants, networks).await else { panic!("somebody has it") };
        assert_eq!(error.code, code::REFUSED, "{error:?}");
        let mac = handle.link_by_name(&name("eth1")).expect("a look").expect("eth1").mac.expect("a MAC");
        assert!(format!("{error:?}").contains(&mac.to_string()), "{error:?}");
    }
    // It does not rest: once the host gives it up, the pod gets it.
    let address = "192.168.20.40/24".parse().expect("an address");
    handle.apply(&[Op::delete(LinkAddress::new(eth1, address))]).expect("given up");
    let wants = Pod::new("shop", "wants");
    nodes[0].annotated(Command::Add, &wants, r#"[{"name":"office","ips":["192.168.20.40"]}]"#).await;
    nodes[0].annotated(Command::Del, &pod, "").await;
    agent.stop(Duration::from_secs(5)).await;
}

#[test]
fn the_network_of_the_page_about_underlays_that_is_on_a_bridge_works() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(bridged());
    });
}

async fn bridged() {
    let dir = PathBuf::from("/run/test");
    let (wire, nodes) = two_nodes(&dir);
    let folder = dir.join("objects");
    write_objects(&folder);
    let machines = format!("{}status:\n  id: 20\n", documented(2));
    std::fs::write(folder.join("machines.yaml"), machines).expect("written");
    for (node, range) in [("a", "192.168.30.64/28"), ("b", "192.168.30.80/28")] {
        write(&folder, &format!("machines-{node}"), &block("machines", node, range, None));
    }
    // Each node has a bridge with an address of its own, and the wire between them is a port of both.
    for (node, port, address) in [(0, "lan-a", "192.168.30.2/24"), (1, "lan-b", "192.168.30.3/24")] {
        join(&wire, &nodes[node], port, "eth1");
        let handle = Handle::open(&nodes[node].space).expect("a handle");
        let mut bridge = NewLink::bridge(name("br0"), Bridge::default());
        // It is not Knit's.
        (bridge.up, bridge.group) = (true, 0);
        let bridge = handle.create_link(&bridge).expect("a bridge").index;
        let port = Change { master: Some(Some(bridge)), ..Change::named(name("eth1")) };
        let address = LinkAddress::new(bridge, address.parse().expect("an address"));
        handle.apply(&[port.into(), Op::create(address)]).expect("br0 as an operator makes it");
    }
    let (agent_a, agent_b) = tokio::join!(nodes[0].start(), nodes[1].start());
    let [one, two] = [Pod::new("shop", "one"), Pod::new("shop", "two")];
    let first = nodes[0].annotated(Command::Add, &one, "machines").await;
    let second = nodes[1].annotated(Command::Add, &two, "machines").await;
    reaches(&one, &two, address(&second, 2), 5000);
    reaches(&two, &one, address(&first, 2), 5001);
    // A node and its own pods reach each other.
    let mut node = Pod::new("nobody", "node");
    node.space = nodes[0].space.try_clone().expect("a clone");
    reaches(&node, &one, address(&first, 2), 5002);
    reaches(&one, &node, "192.168.30.2".parse().expect("an address"), 5003);
    // As for every other pod: the agent goes and comes, and nobody notices.
    agent_a.stop(Duration::from_secs(5)).await;
    let agent_a = nodes[0].start().await;
    assert_eq!(nodes[0].annotated(Command::Add, &one, "machines").await, first);
    assert!(talk(&one, &two, address(&second, 2), 5004, SOON));
    nodes[0].annotated(Command::Del, &one, "").await;
    nodes[1].annotated(Command::Del, &two, "").await;
    for agent in [&agent_a, &agent_b] {
        let runtime = agent.core().runtimes().get("knit.dev/linux").expect("the runtime");
        assert_eq!(runtime.list(None).await.expect("a list"), []);
    }
    agent_a.stop(Duration::from_secs(5)).await;
    agent_b.stop(Duration::from_secs(5)).await;
}
