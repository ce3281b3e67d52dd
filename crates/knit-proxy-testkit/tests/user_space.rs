//! The kit with a backend that can do little: the example of a proxy in user space. What it cannot do is left
//! out and listed; what it can do is right; and a backend that ignores who may come in is caught.

#[allow(dead_code, reason = "its main is another program")]
#[path = "../../knit-proxy/examples/userspace.rs"]
mod userspace;

use std::sync::{Arc, Mutex};

use knit_kernel::NetNs;
use knit_kernel::testing::in_namespaces;
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::view::{NodeView, Sources};
use knit_proxy_testkit::{Options, Report, World, read, run_with};

/// Services have addresses of the node, since a process can listen on those only.
const CASES: &str = r#"
- name: a cluster IP
  rules: [20]
  services:
  - metadata: {name: web, namespace: shop}
    spec:
      clusterIP: 192.0.2.2
      ports: [{name: web, port: 4080, protocol: TCP}, {name: dns, port: 4053, protocol: UDP}]
  endpointSlices:
  - metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
    addressType: IPv4
    ports: [{name: web, port: 8080, protocol: TCP}, {name: dns, port: 8053, protocol: UDP}]
    endpoints: [{addresses: [10.1.0.2], nodeName: node}]
  flows:
  - {from: outside, to: "192.0.2.2:4080/TCP", gets: "10.1.0.2:8080"}
  - {from: outside, to: "192.0.2.2:4053/UDP", gets: "10.1.0.2:8053"}
  - {from: pod-a, to: "192.0.2.2:4080/TCP", gets: "10.1.0.2:8080", masqueraded: false}
- name: source ranges
  rules: [43]
  services:
  - metadata: {name: web, namespace: shop}
    spec:
      type: LoadBalancer
      clusterIP: 192.0.2.1
      ports: [{name: web, port: 4081, protocol: TCP}]
      loadBalancerSourceRanges: [198.51.100.0/24]
    status: {loadBalancer: {ingress: [{ip: 192.0.2.2}]}}
  endpointSlices:
  - metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
    addressType: IPv4
    ports: [{name: web, port: 8080, protocol: TCP}]
    endpoints: [{addresses: [10.1.0.2], nodeName: node}]
  flows:
  - {from: outside, to: "192.0.2.2:4081/TCP", gets: drop}
"#;

/// Each backend listens in the node's namespace.
struct In<B> {
    node: NetNs,
    backend: B,
}

impl<B: Backend + Send> Backend for In<B> {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let (node, backend) = (&self.node, &mut self.backend);
        node.run(|| backend.sync(state)).unwrap_or_else(|error| Outcome::Failed(error.to_string()))
    }
}

/// Lets everybody in.
struct Careless(userspace::UserSpace);

impl Backend for Careless {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let mut state = state.clone();
        for port in state.ports.values_mut() {
            let mut open = (**port).clone();
            open.frontends.iter_mut().for_each(|frontend| frontend.sources = Sources::Any);
            *port = Arc::new(open);
        }
        self.0.sync(&state)
    }
}

fn tried<B: Backend + Send>(mut backend: impl FnMut() -> B) -> Report {
    let told = Mutex::new(Vec::new());
    let options = Options {
        udp: false,
        keeps_client_addresses: false,
        drops: false,
        told: Box::new(|case, _| told.lock().expect("nobody panics").push(case.to_owned())),
        ..Options::default()
    };
    let world = World::new().expect("a world");
    let cases = read(CASES).expect("good cases");
    let open = |node: &NetNs| In { node: node.try_clone().expect("the same namespace"), backend: backend() };
    let report = run_with(&world, &cases, &options, open).expect("the cases run");
    drop(options);
    assert_eq!(told.into_inner().expect("nobody panics").len(), cases.len(), "each case is told of");
    report
}

#[test]
fn what_a_backend_cannot_do_is_left_out_and_listed() {
    in_namespaces(|| {
        let report = tried(userspace::UserSpace::default);
        assert!(report.wrong.is_empty(), "{}", report.wrong.join("\n"));
        assert_eq!(report.passed, 2, "{report:?}");
        assert_eq!(report.left_out.len(), 2, "{report:?}");
        assert!(report.left_out[0].contains("/UDP"), "{report:?}");
    });
}

#[test]
fn a_backend_that_lets_everybody_in_is_caught() {
    in_namespaces(|| {
        let report = tried(|| Careless(userspace::UserSpace::default()));
        assert_eq!(report.wrong.len(), 1, "{report:?}");
        assert!(report.wrong[0].contains("source ranges (rules 43)"), "{report:?}");
    });
}
