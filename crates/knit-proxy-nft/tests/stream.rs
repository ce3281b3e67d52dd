//! The packet-flow cases with a backend in another process: told by a stream what to do, and asked by its
//! reports whether it has done so. It is how a backend in another language goes through the test kit.

use std::time::Duration;

use knit_kernel::testing::{eventually, in_namespaces};
use knit_proxy::engine::{Engine, EngineConfig, Pace, run};
use knit_proxy::grpc::{Source, Stream};
use knit_proxy::model::NodeInfo;
use knit_proxy_nft::{Config, NftBackend};
use knit_proxy_testkit::{FILES, NODE, Options, World, read, run_with};

#[test]
fn a_backend_that_follows_the_stream_passes() {
    in_namespaces(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("stream.sock");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let stream = Stream::new();
        let listener = runtime.block_on(async { tokio::net::UnixListener::bind(&socket) }).expect("a socket");
        let serving = stream.clone();
        runtime.spawn(async move { serving.serve_unix(listener).await });

        let world = World::new().expect("a world");
        let source = Source::new(&format!("unix:{}", socket.display()), NODE).expect("an address");
        let backend = NftBackend::new_in(world.node(), Config::default()).expect("a backend");
        // Each step is waited for, so there is nothing to gather.
        let pace = Pace { min_interval: Duration::from_millis(10), ..Pace::default() };
        let config = EngineConfig { pace, ..EngineConfig::default() };
        let engine = Engine::new(config, NodeInfo::new(NODE), backend);
        let engine = engine.observed_by(source.observer());
        let (handle, inbox) = knit_proxy::source::handle();
        let thread = std::thread::spawn(move || run(engine, &inbox));
        runtime.spawn(source.run(handle.clone(), |_| {}));

        let settled = || {
            let done = || {
                let newest = stream.revision();
                stream.watchers().iter().any(|watcher| {
                    watcher.revision == Some(newest) && watcher.broken.is_none() && watcher.failed.is_empty()
                })
            };
            eventually("the newest state is reported", Duration::from_secs(60), done);
            Ok(())
        };
        let options = Options { settled: Box::new(settled), ..Options::default() };
        for name in ["cluster-ip", "changes"] {
            let (_, text) = FILES.iter().find(|(file, _)| *file == name).expect("a file of that name");
            let cases = read(text).expect("the cases are right");
            let report = run_with(&world, &cases, &options, |_| stream.clone()).expect("the cases run");
            assert!(report.wrong.is_empty(), "{}", report.wrong.join("\n"));
            assert!(report.passed > 0 && report.left_out.is_empty(), "{report:?}");
        }
        handle.stop();
        thread.join().expect("the engine ends");
    });
}
