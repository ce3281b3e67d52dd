//! Runs cases against a backend, with packets.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_kernel::NetNs;
use knit_kernel::conntrack::{Conntrack, Filter};
use knit_proxy::backend::Backend;
use knit_proxy::kubernetes::Kubernetes;
use knit_proxy::model::{PerFamily, Protocol};
use knit_proxy::source::Event;
use knit_proxy::view::{self, LocalTraffic, View, ViewConfig};

use crate::case::{Case, Flow, Gets, NodePorts, Pods, Step};
use crate::options::{Options, Report};
use crate::world::{POD_RANGES, World};

/// How often to connect until each of several endpoints has answered: with two, one stays silent once in 2^60
/// runs.
const ATTEMPTS: usize = 60;
/// How often to connect where everybody must reach the same endpoint.
const STICKY_ATTEMPTS: usize = 12;

/// What became of one packet.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Got {
    Answer { by: SocketAddr, masqueraded: bool },
    Reject,
    Silence,
    Error(String),
}

/// Runs cases as [`run_with`] does, with a backend that can do everything. Returns what was not as the cases
/// say: nothing if all is well.
///
/// # Errors
/// If the kernel refuses what the tests need.
pub fn run<B: Backend>(
    world: &World,
    cases: &[Case],
    open: impl FnMut(&NetNs) -> B,
) -> Result<Vec<String>, crate::WorldError> {
    run_with(world, cases, &Options::default(), open).map(|report| report.wrong)
}

/// Runs cases one after another on the same node, each from what the one before left, as a proxy that is
/// started again.
///
/// `open` makes the backend for the node's namespace. What `options` says that it cannot do is left out, and
/// listed in the report.
///
/// # Errors
/// If the kernel refuses what the tests need.
pub fn run_with<B: Backend>(
    world: &World,
    cases: &[Case],
    options: &Options<'_>,
    mut open: impl FnMut(&NetNs) -> B,
) -> Result<Report, crate::WorldError> {
    let mut report = Report::default();
    for case in cases {
        let mut backend = open(world.node());
        forget_flows(world.node());
        let mut found = Report::default();
        run_case(world, case, options, &mut backend, &mut found)?;
        let rules: Vec<String> = case.rules.iter().map(ToString::to_string).collect();
        let label = format!("{} (rules {})", case.name, rules.join(", "));
        (options.told)(&label, &found);
        report.passed += found.passed;
        report.wrong.extend(found.wrong.into_iter().map(|failure| format!("{label}: {failure}")));
        report.left_out.extend(found.left_out.into_iter().map(|flow| format!("{label}: {flow}")));
    }
    Ok(report)
}

fn run_case(
    world: &World,
    case: &Case,
    options: &Options<'_>,
    backend: &mut impl Backend,
    report: &mut Report,
) -> Result<(), crate::WorldError> {
    let mut view = View::new(view_config(case), World::node_info());
    view.set_service_ranges("test", case.config.service_ranges.clone());
    let mut source = Objects::default();
    let mut sticky: HashMap<String, SocketAddr> = HashMap::new();
    for (number, step) in std::iter::once(&case.start).chain(&case.then).enumerate() {
        source.load(&mut view, step);
        for group in view.services().flat_map(|s| view.groups(s.name.as_str())) {
            for (endpoint, port) in
                group.endpoints.iter().flat_map(|e| group.ports.iter().map(move |p| (e, p)))
            {
                world.serve(SocketAddr::new(endpoint.address, port.number), port.protocol)?;
            }
        }
        let changes = view.take_changes();
        let outcome = match number {
            0 => backend.sync(view.current()),
            _ => backend.apply(&changes, view.current()),
        };
        let settled = match options.expected(&outcome) {
            true => (options.settled)(),
            false => Err(format!("the backend says {outcome:?}")),
        };
        if let Err(why) = settled {
            report.wrong.push(format!("step {number}: {why}"));
            return Ok(());
        }
        for flow in &step.flows {
            let masqueraded = match flow.masqueraded {
                Some(true) => ", masqueraded",
                Some(false) => ", not masqueraded",
                None => "",
            };
            let text =
                format!("step {number}: {} to {} should get {}{masqueraded}", flow.from, flow.to, flow.gets);
            if let Some(why) = options.cannot(flow) {
                report.left_out.push(format!("{text}: {why}"));
                continue;
            }
            match run_flow(world, flow, options, &mut sticky) {
                Ok(()) => report.passed += 1,
                Err(failure) => report.wrong.push(format!("{text}, but {failure}")),
            }
        }
    }
    Ok(())
}

/// The Kubernetes objects that are there.
#[derive(Default)]
struct Objects {
    convert: Kubernetes,
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
}

impl Objects {
    /// Takes in a step: what is not in a list any more is gone.
    fn load(&mut self, view: &mut View, step: &Step) {
        if let Some(services) = &step.services {
            view.list_start(view::ListKind::Services);
            services.iter().for_each(|service| tell(view, self.convert.service(service).event));
            view.list_done(view::ListKind::Services);
            self.services.clone_from(services);
        }
        if let Some(slices) = &step.endpoint_slices {
            view.list_start(view::ListKind::Groups);
            slices.iter().for_each(|slice| tell(view, self.convert.slice(slice).event));
            view.list_done(view::ListKind::Groups);
            self.slices.clone_from(slices);
        }
    }
}

fn tell(view: &mut View, event: Event) {
    match event {
        Event::SetService(service) => view.set_service(*service),
        Event::DeleteService(name) => view.delete_service(&name),
        Event::SetGroup(group) => view.set_group(*group),
        Event::DeleteGroup(name) => view.delete_group(&name),
        _ => {}
    }
}

fn view_config(case: &Case) -> ViewConfig {
    let config = &case.config;
    ViewConfig {
        families: PerFamily { v4: true, v6: true },
        node_ports: match &config.node_ports {
            NodePorts::Primary => view::NodePorts::Primary,
            NodePorts::All => view::NodePorts::All,
            NodePorts::Ranges(ranges) => view::NodePorts::Ranges(ranges.clone()),
        },
        local_traffic: match config.pods {
            Pods::Unknown => LocalTraffic::Unknown,
            Pods::ClusterRange => {
                LocalTraffic::Sources(POD_RANGES.iter().filter_map(|r| r.parse().ok()).collect())
            }
            Pods::NodeRange => LocalTraffic::NodePodRanges,
            Pods::Bridge => LocalTraffic::Bridge("pod-a".into()),
            Pods::InterfacePrefix => LocalTraffic::InterfacePrefix("pod-".into()),
        },
        masquerade_all: config.masquerade_all,
        exempt_vips: config.exempt.clone(),
        ..ViewConfig::default()
    }
}

fn run_flow(
    world: &World,
    flow: &Flow,
    options: &Options<'_>,
    sticky: &mut HashMap<String, SocketAddr>,
) -> Result<(), String> {
    let from = world.host(&flow.from).ok_or_else(|| format!("nobody is called {:?}", flow.from))?;
    let connect = |patience| {
        from.run(|| match flow.to.protocol {
            Protocol::Udp => udp(flow.to.socket, patience),
            _ => tcp(flow.to.socket, patience),
        })
        .unwrap_or_else(|error| Got::Error(error.to_string()))
    };
    let expected = match &flow.gets {
        Gets::Endpoints(expected) => expected,
        Gets::Reject | Gets::Drop => {
            let (patience, wanted) = match flow.gets {
                Gets::Drop => (options.silence, Got::Silence),
                _ => (options.answer, Got::Reject),
            };
            let got = connect(patience);
            let closed = flow.gets == Gets::Drop && !options.drops && !matches!(got, Got::Answer { .. });
            return if got == wanted || closed { Ok(()) } else { Err(format!("{got}")) };
        }
    };
    let mut seen = BTreeSet::new();
    let attempts = match (&flow.sticky, expected.len()) {
        (Some(_), _) => STICKY_ATTEMPTS,
        (None, 1) => 1,
        (None, _) => ATTEMPTS,
    };
    for _ in 0..attempts {
        let Got::Answer { by, masqueraded } = (match connect(options.answer) {
            answer @ Got::Answer { .. } => answer,
            other => return Err(format!("{other}")),
        }) else {
            continue;
        };
        if !expected.contains(&by) {
            return Err(format!("{by} answered"));
        }
        if let Some(wanted) = flow.masqueraded
            && wanted != masqueraded
        {
            return Err(format!("{by} saw {}", if masqueraded { "another source" } else { "the client" }));
        }
        if let Some(word) = &flow.sticky {
            let before = *sticky.entry(word.clone()).or_insert(by);
            if before != by {
                return Err(format!("{by} answered after {before}"));
            }
        }
        seen.insert(by);
        if flow.sticky.is_none() && seen.len() == expected.len() {
            return Ok(());
        }
    }
    match expected.iter().find(|wanted| !seen.contains(wanted)) {
        Some(silent) if flow.sticky.is_none() => {
            Err(format!("{silent} never answered in {attempts} attempts"))
        }
        _ => Ok(()),
    }
}

impl std::fmt::Display for Got {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Answer { by, .. } => write!(f, "{by} answered"),
            Self::Reject => f.write_str("it was refused"),
            Self::Silence => f.write_str("nothing came back"),
            Self::Error(error) => f.write_str(error),
        }
    }
}

fn tcp(to: SocketAddr, patience: Duration) -> Got {
    let answer = || -> io::Result<Got> {
        let mut stream = TcpStream::connect_timeout(&to, patience)?;
        let own = stream.local_addr()?;
        stream.set_read_timeout(Some(patience))?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(understand(&text, own))
    };
    answer().unwrap_or_else(|error| failure(&error))
}

fn udp(to: SocketAddr, patience: Duration) -> Got {
    let answer = || -> io::Result<Got> {
        let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(patience))?;
        let own = socket.local_addr()?;
        match socket.send(b"hello") {
            // The node's own packet did not get out; if it was refused, the answer is waiting.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            sent => _ = sent?,
        }
        let mut buffer = [0; 128];
        let length = socket.recv(&mut buffer)?;
        Ok(understand(&String::from_utf8_lossy(&buffer[..length]), own))
    };
    answer().unwrap_or_else(|error| failure(&error))
}

fn understand(text: &str, own: SocketAddr) -> Got {
    let mut words = text.split(' ').map(str::parse::<SocketAddr>);
    match (words.next(), words.next()) {
        (Some(Ok(by)), Some(Ok(peer))) => Got::Answer { by, masqueraded: peer.ip() != own.ip() },
        _ => Got::Error(format!("the answer was {text:?}")),
    }
}

fn failure(error: &io::Error) -> Got {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Got::Reject,
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Got::Silence,
        _ => Got::Error(error.to_string()),
    }
}

/// Deletes all tracked connections, so that a case does not see those of the one before.
fn forget_flows(node: &NetNs) {
    let flows = Conntrack::open_in(node).and_then(|mut conntrack| {
        let all = conntrack.list(&Filter::all())?;
        conntrack.delete(&all)
    });
    // Without it, only flows of the same ports could be confused, which the kernel hands out at random.
    if let Err(error) = flows {
        println!("flows of earlier cases are still there: {error}");
    }
}
