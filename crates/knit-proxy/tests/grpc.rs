//! A proxy that is fed by another process, which dies and comes back.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use knit_kernel::testing::eventually;
use knit_proxy::backend::{Backend, Failure, Outcome, Retry};
use knit_proxy::engine::{Engine, EngineConfig, Pace, run};
use knit_proxy::grpc::{Link, Source, Stream};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service, ServiceName};
use knit_proxy::source::{Event, handle};
use knit_proxy::view::{Changes, NodeView, PortView};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const SOCKET: &str = "KNIT_TEST_FEEDER_SOCKET";
/// What the other process prints for us begins like this; the rest is the test harness's.
const WORD: &str = "feeder: ";

// --- the other process ---

/// Not a test, but what the other process runs: a feeder that is told by standard input what there is.
#[test]
fn feeder_process() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let stream = Stream::new();
    let listener = {
        let _guard = runtime.enter();
        tokio::net::UnixListener::bind(path).unwrap()
    };
    let server = tonic::transport::Server::builder().add_service(stream.service());
    runtime.spawn(server.serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)));
    let (handle, inbox) = handle();
    let pace = Pace { min_interval: Duration::ZERO, ..Pace::default() };
    let config = EngineConfig { pace, ..EngineConfig::default() };
    let engine = Engine::new(config, NodeInfo::new("node-a"), stream.clone());
    let engine = std::thread::spawn(move || run(engine, &inbox));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["set", name, address, ref endpoints @ ..] => {
                let service = Service::new(name).cluster_ip(address.parse().unwrap()).port(Protocol::Tcp, 80);
                let endpoints: Vec<_> = endpoints.iter().map(|e| e.parse().unwrap()).collect();
                let group = EndpointGroup::of_addresses(name, name, Protocol::Tcp, 8080, &endpoints);
                handle
                    .send_all(vec![Event::SetService(Box::new(service)), Event::SetGroup(Box::new(group))])
                    .unwrap();
            }
            ["delete", name] => handle.send(Event::DeleteService(ServiceName::from(name))).unwrap(),
            ["listed"] => handle.all_listed().unwrap(),
            ["watchers"] => {
                for watcher in stream.watchers() {
                    let done = watcher.revision == Some(stream.revision());
                    let failed: Vec<String> = watcher.failed.iter().map(ToString::to_string).collect();
                    println!("\n{WORD}{} done={done} {:?} {failed:?}", watcher.name, watcher.broken);
                }
                println!("\n{WORD}that is all");
            }
            _ => panic!("{line:?} is no command"),
        }
    }
    handle.stop();
    engine.join().unwrap();
}

// --- this one ---

struct Feeder {
    child: Child,
    commands: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Feeder {
    fn start(socket: &Path, commands: &[&str]) -> Self {
        // What a process that was killed left.
        let _ = std::fs::remove_file(socket);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "feeder_process", "--nocapture"])
            .env(SOCKET, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut feeder = Self { commands: child.stdin.take().unwrap(), lines, child };
        commands.iter().for_each(|command| feeder.tell(command));
        feeder
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    fn watchers(&mut self) -> Vec<String> {
        self.tell("watchers");
        let said = self.lines.by_ref().map(|line| line.unwrap());
        let said = said.filter_map(|line| line.strip_prefix(WORD).map(str::to_owned));
        said.take_while(|line| line != "that is all").collect()
    }

    /// Waits until what it says of its watchers is this.
    fn knows(&mut self, wanted: &[&str]) {
        let mut found = Vec::new();
        let end = Instant::now() + TEST_TIMEOUT;
        eventually("the feeder knows", TEST_TIMEOUT * 2, || {
            found = self.watchers();
            assert!(found == wanted || Instant::now() < end, "{found:?} is not {wanted:?}");
            found == wanted
        });
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says what it is asked to do, and cannot do what is called `bad`, until it is told that it can.
struct Recording {
    calls: Sender<String>,
    bad: bool,
}

impl Recording {
    fn fail<'a>(&self, tried: impl Iterator<Item = &'a knit_proxy::view::PortKey>) -> Outcome {
        let bad = tried.filter(|key| self.bad && key.service.name() == "bad");
        let fail = |key: &knit_proxy::view::PortKey| Failure {
            key: key.clone(),
            reason: "no room".to_owned(),
            retry: Retry::Later,
        };
        Outcome::of(bad.map(fail).collect())
    }
}

fn endpoints(view: &PortView) -> Vec<String> {
    view.cluster.iter().map(ToString::to_string).collect()
}

impl Backend for Recording {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let ports: Vec<String> =
            state.ports.iter().map(|(key, view)| format!("{} {:?}", key.service, endpoints(view))).collect();
        self.calls.send(format!("sync {} {}", state.node.name, ports.join(", "))).unwrap();
        self.fail(state.ports.keys())
    }

    fn apply(&mut self, changes: &Changes, _: &NodeView) -> Outcome {
        let said: Vec<String> = (changes.ports.iter())
            .map(|change| match &change.new {
                Some(view) => format!("{} {:?}", change.key.service, endpoints(view)),
                None => format!("no {}", change.key.service),
            })
            .collect();
        // What cannot be done is tried again every now and then; said once is enough.
        let said: Vec<String> = said.into_iter().filter(|text| !self.bad || text != "shop/bad []").collect();
        if !said.is_empty() {
            self.calls.send(format!("apply {}", said.join(", "))).unwrap();
        }
        self.fail(changes.ports.iter().filter(|change| change.new.is_some()).map(|change| &change.key))
    }
}

fn next(calls: &Receiver<String>) -> String {
    calls.recv_timeout(TEST_TIMEOUT).expect("the backend is called")
}

#[test]
fn a_proxy_is_fed_by_another_process_and_outlives_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("feeder.sock");
    let source = Source::new(&format!("unix:{}", socket.display()), "node-a").unwrap();
    let (handle, inbox) = handle();
    let (calls, called) = channel();
    let pace =
        Pace { min_interval: Duration::ZERO, retry_first: Duration::from_millis(10), ..Pace::default() };
    let config = EngineConfig { pace, ..EngineConfig::default() };
    let engine = Engine::new(config, NodeInfo::new("node-a"), Recording { calls, bad: true })
        .observed_by(source.observer());
    let engine = std::thread::spawn(move || run(engine, &inbox));
    let (links, link) = channel();
    let feeding = handle.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let source = runtime.spawn(source.run(feeding, move |link| links.send(link).unwrap()));
    // Nobody is there yet: it waits, and the backend is left alone.
    assert!(matches!(link.recv_timeout(TEST_TIMEOUT).unwrap(), Link::Lost { .. }));

    let mut feeder = Feeder::start(
        &socket,
        &["set shop/web 10.0.0.1 10.1.0.1 10.1.0.2", "set shop/bad 10.0.0.2", "listed"],
    );
    assert_eq!(next(&called), r#"sync node-a shop/bad [], shop/web ["10.1.0.1:8080", "10.1.0.2:8080"]"#);
    while link.recv_timeout(TEST_TIMEOUT).unwrap() != Link::Connected {}
    feeder.knows(&[r#"node-a done=true None ["shop/bad TCP IPv4: no room"]"#]);
    feeder.tell("set shop/web 10.0.0.1 10.1.0.2");
    assert_eq!(next(&called), r#"apply shop/web ["10.1.0.2:8080"]"#);
    feeder.knows(&[r#"node-a done=true None ["shop/bad TCP IPv4: no room"]"#]);

    // It dies. Nothing is taken away.
    feeder.kill();
    assert!(matches!(link.recv_timeout(TEST_TIMEOUT).unwrap(), Link::Lost { .. }));
    assert!(called.try_recv().is_err());

    // Another one comes, and counts its states again. Only what is other than before is done.
    let mut feeder = Feeder::start(
        &socket,
        &["set shop/web 10.0.0.1 10.1.0.2", "set shop/new 10.0.0.3", "set shop/same 10.0.0.4", "listed"],
    );
    assert_eq!(next(&called), "apply no shop/bad, shop/new [], shop/same []");
    feeder.knows(&["node-a done=true None []"]);
    feeder.tell("delete shop/new");
    assert_eq!(next(&called), "apply no shop/new");
    feeder.knows(&["node-a done=true None []"]);

    handle.stop();
    engine.join().unwrap();
    // It notices with the next state that nobody takes it any more.
    feeder.tell("delete shop/same");
    let ended = runtime.block_on(async { tokio::time::timeout(TEST_TIMEOUT, source).await });
    assert!(ended.expect("in time").expect("no panic").is_err());
    // Who watches no more is forgotten.
    feeder.knows(&[]);
}
