//! The backend in Go is compiled and run, where Go and the modules that it needs are on this machine.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use knit_kernel::testing::{eventually, skip};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::grpc::{Stream, Watcher};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::view::{View, ViewConfig};
use prost::Message;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// What protoc sends to its plugins.
#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(string, repeated, tag = "1")]
    files: Vec<String>,
    #[prost(string, tag = "2")]
    parameter: String,
    #[prost(bytes = "vec", repeated, tag = "15")]
    descriptors: Vec<Vec<u8>>,
}

/// What they answer.
#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(string, tag = "1")]
    error: String,
    #[prost(message, repeated, tag = "15")]
    files: Vec<File>,
}

#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "15")]
    content: String,
}

/// `go`, which may use what is on this machine and nothing else.
fn go(folder: &Path, args: &[&str]) -> std::io::Result<Result<(), String>> {
    let output = Command::new("go")
        .args(args)
        .current_dir(folder)
        .env("GOFLAGS", "-mod=readonly -buildvcs=false")
        .env("GOPROXY", "off")
        .env("GOSUMDB", "off")
        .env("GOTOOLCHAIN", "local")
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(if output.status.success() { Ok(()) } else { Err(said) })
}

/// What protoc would do.
fn generate(folder: &Path, proto: &str) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let set = protox::compile([include.join(proto)], [include]).expect("the protocol");
    let request = Request {
        files: vec![proto.to_owned()],
        parameter: format!("module=example.com/go-backend,M{proto}=example.com/go-backend/proxypb"),
        descriptors: set.file.iter().map(Message::encode_to_vec).collect(),
    };
    let mut plugin = Command::new(folder.join("protoc-gen-go"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("protoc-gen-go runs");
    plugin.stdin.take().unwrap().write_all(&request.encode_to_vec()).unwrap();
    let output = plugin.wait_with_output().unwrap();
    let response = Response::decode(&*output.stdout).expect("an answer");
    assert_eq!(response.error, "");
    for file in response.files {
        let path = folder.join(file.name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, file.content).unwrap();
    }
}

/// What is made from the protocol.
const GENERATED: &str = "proxypb/proxy.pb.go";

/// With `KNIT_UPDATE_GO=1` the file is written again.
#[test]
fn the_generated_go_code_is_that_of_the_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/go-backend");
    for file in ["go.mod", "go.sum"] {
        std::fs::copy(example.join(file), folder.join(file)).unwrap();
    }
    let plugin = "google.golang.org/protobuf/cmd/protoc-gen-go";
    match go(folder, &["build", "-o", "protoc-gen-go", plugin]) {
        Err(error) => return skip(format_args!("there is no Go here ({error})")),
        Ok(Err(said)) => {
            return skip(format_args!("the Go modules that it needs are not on this machine: {said}"));
        }
        Ok(Ok(())) => {}
    }
    generate(folder, "knit/proxy/v1alpha1/proxy.proto");
    let fresh = std::fs::read_to_string(folder.join(GENERATED)).unwrap();
    let kept = example.join(GENERATED);
    if std::env::var_os("KNIT_UPDATE_GO").is_some() {
        std::fs::create_dir_all(kept.parent().unwrap()).unwrap();
        std::fs::write(&kept, &fresh).unwrap();
    }
    let kept = std::fs::read_to_string(kept).unwrap();
    assert!(kept == fresh, "{GENERATED} is stale: run this test with KNIT_UPDATE_GO=1");
}

#[test]
fn a_backend_in_go_follows_the_stream_and_reports() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/go-backend");
    std::fs::create_dir(folder.join("proxypb")).unwrap();
    for file in ["go.mod", "go.sum", "main.go", GENERATED] {
        std::fs::copy(example.join(file), folder.join(file)).unwrap();
    }
    // As somebody does who has cloned this, and has Go and its modules.
    match go(folder, &["build", "-o", "go-backend", "."]) {
        Err(error) => return skip(format_args!("there is no Go here ({error})")),
        Ok(Err(said)) if said.contains("GOPROXY=off") => {
            return skip(format_args!("the Go modules that it needs are not on this machine: {said}"));
        }
        Ok(built) => built.expect("it compiles"),
    }

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut stream = Stream::new();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tonic::transport::Server::builder().add_service(stream.service());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    runtime.spawn(server.serve_with_incoming(incoming));

    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    let web = || Service::new("shop/web").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80);
    let group = |count: u32| {
        let addresses: Vec<_> =
            (1..=count).map(|n| std::net::Ipv4Addr::from(0x0a01_0000 + n).into()).collect();
        EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &addresses)
    };
    view.set_service(web());
    view.take_changes();
    assert_eq!(stream.sync(view.current()), Outcome::Done);
    let mut child = Command::new(folder.join("go-backend"))
        .args([address.as_str(), "go-node"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines =
        BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap().trim().to_owned());
    let mut next = || lines.next().expect("a line");
    assert_eq!((next(), next()), ("set node".to_owned(), "set port shop/web TCP IPV4".to_owned()));
    assert_eq!(next(), "10.0.0.1:80 -> reject");
    view.set_group(group(2));
    let changes = view.take_changes();
    assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    assert_eq!(next(), "set port shop/web TCP IPV4");
    assert_eq!(next(), "10.0.0.1:80 -> 10.1.0.1:8080 10.1.0.2:8080");
    let reported = |stream: &Stream, done: &dyn Fn(&Watcher) -> bool| {
        eventually("the backend reports", TEST_TIMEOUT, || {
            stream.watchers().iter().any(|watcher| watcher.name == "go-node" && done(watcher))
        });
    };
    let revision = stream.revision();
    reported(&stream, &|watcher| watcher.revision == Some(revision) && watcher.failed.is_empty());
    // More than it has room for: it says so.
    view.set_group(group(1001));
    let changes = view.take_changes();
    assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    let wanted = "shop/web TCP IPv4: this backend has room for 1000 endpoints";
    reported(&stream, &|watcher| watcher.failed.iter().any(|failure| failure.to_string() == wanted));
    assert_eq!(next(), "set port shop/web TCP IPV4");
    assert!(next().starts_with("10.0.0.1:80 -> 10.1.0.1:8080 "));
    view.delete_service(&"shop/web".into());
    let changes = view.take_changes();
    assert_eq!(stream.apply(&changes, view.current()), Outcome::Done);
    assert_eq!(next(), "delete port shop/web TCP IPV4");
    let revision = stream.revision();
    reported(&stream, &|watcher| watcher.revision == Some(revision) && watcher.failed.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
}
