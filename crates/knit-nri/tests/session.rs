//! A plugin against a runtime that does as it should, and against ones that do not.

mod support;

use std::sync::Arc;
use std::time::Duration;

use knit_nri::client::{Client, Identity};
use knit_nri::session::{self, Ended, Limits, SessionError};
use knit_nri::ttrpc::code;
use knit_nri::wire::ttrpc::{Request, Response};
use knit_nri::wire::{
    ConfigureResponse, Container, ContainerState, CreateContainerRequest, Empty, Event, PodSandboxRequest,
    RegisterPluginRequest, StateChangeEvent, SynchronizeRequest, SynchronizeResponse,
};
use prost::Message as _;
use support::{FakeRuntime, Recorder, configure, pod};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

fn identity() -> Identity {
    Identity::new("knit", "10").expect("an identity")
}

/// A session with a runtime at its other end.
fn pair(limits: Limits) -> (FakeRuntime, Arc<Recorder>, JoinHandle<Ended>) {
    let (here, there) = UnixStream::pair().expect("sockets");
    let plugin = Arc::new(Recorder::default());
    let serving = Arc::clone(&plugin);
    let task = tokio::spawn(async move { session::serve(here, &identity(), &serving, &limits).await });
    (FakeRuntime::new(there), plugin, task)
}

fn sandbox(id: &str) -> PodSandboxRequest {
    PodSandboxRequest { pod: Some(pod(id)) }
}

fn container(id: &str) -> CreateContainerRequest {
    let container = Container { name: "main".into(), ..Default::default() };
    CreateContainerRequest { pod: Some(pod(id)), container: Some(container) }
}

#[tokio::test]
async fn a_session_from_registration_to_its_end() {
    let (mut runtime, plugin, task) = pair(Limits::default());
    let (stream, request) = runtime.registration().await;
    let register = RegisterPluginRequest::decode(request.payload.as_slice()).expect("a request");
    assert_eq!((register.plugin_name.as_str(), register.plugin_idx.as_str()), ("knit", "10"));
    // As containerd sometimes does: everything else comes before the answer to the registration.
    let configured = runtime.call("Configure", &configure(Duration::from_secs(2))).await;
    let configured = ConfigureResponse::decode(configured.payload.as_slice()).expect("a response");
    assert_eq!(configured.events, 0x000f, "RunPodSandbox, StopPodSandbox, RemovePodSandbox, CreateContainer");
    let policy = configured.failure_policy.expect("a policy");
    assert!(policy.fail_request && policy.keep_connected);
    let in_state = |state: ContainerState, sandbox: &str| {
        let (state, pod_sandbox_id) = (state.into(), sandbox.to_owned());
        Container { state, pod_sandbox_id, ..Container::default() }
    };
    for (more, state, sandbox) in [
        (true, ContainerState::ContainerRunning, "a"),
        (true, ContainerState::ContainerCreated, "b"),
        (false, ContainerState::ContainerStopped, "c"),
    ] {
        let containers = vec![in_state(state, sandbox)];
        let part = SynchronizeRequest { pods: vec![pod("a"), pod("b")], containers, more };
        let answer = runtime.call("Synchronize", &part).await;
        let answer = SynchronizeResponse::decode(answer.payload.as_slice()).expect("a response");
        assert_eq!(answer.more, more, "a part is answered as it came");
    }
    runtime.answer(stream, Response::success(&Empty {})).await;
    assert_eq!(runtime.call("RunPodSandbox", &sandbox("one")).await.error(), None);
    assert_eq!(runtime.call("CreateContainer", &container("one")).await.error(), None);
    assert_eq!(runtime.call("StopPodSandbox", &sandbox("one")).await.error(), None);
    assert_eq!(runtime.call("RemovePodSandbox", &sandbox("one")).await.error(), None);
    assert_eq!(runtime.call("Shutdown", &Empty {}).await.error(), None);
    drop(runtime);
    let ended = task.await.expect("an end");
    assert!(ended.served && matches!(ended.why, SessionError::Closed), "{ended:?}");
    let expected = [
        "connected containerd v2.4.2",
        "synchronize 6 {\"a\", \"c\"}",
        "run one",
        "create one/main",
        "stop one",
        "remove one",
        "disconnected",
    ];
    assert_eq!(plugin.heard(), expected);
}

#[tokio::test]
async fn runtimes_before_0_12_tell_of_events_by_state_changes() {
    let (mut runtime, plugin, _task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    for event in [Event::RunPodSandbox, Event::StopPodSandbox, Event::RemovePodSandbox] {
        let change = StateChangeEvent { event: event.into(), pod: Some(pod("old")), container: None };
        assert_eq!(runtime.call("StateChange", &change).await.error(), None);
    }
    assert_eq!(plugin.heard()[2..], ["run old", "stop old", "remove old"]);
    let refused =
        StateChangeEvent { event: Event::RunPodSandbox.into(), pod: Some(pod("refused")), container: None };
    let answer = runtime.call("StateChange", &refused).await;
    assert_eq!(answer.error().map(|e| (e.code, e.message.as_str())), Some((code::UNKNOWN, "no")));
    // An event that a later runtime may have, and that was never asked for.
    let unknown = StateChangeEvent { event: 99, pod: Some(pod("old")), container: None };
    assert_eq!(runtime.call("StateChange", &unknown).await.error(), None);
}

#[tokio::test]
async fn a_refusal_reaches_the_runtime_in_its_words() {
    let (mut runtime, _, _task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    for answer in [
        runtime.call("RunPodSandbox", &sandbox("refused")).await,
        runtime.call("CreateContainer", &container("refused")).await,
    ] {
        assert_eq!(answer.error().map(|e| (e.code, e.message.as_str())), Some((code::UNKNOWN, "no")));
    }
}

#[tokio::test]
async fn a_runtime_that_says_it_waits_for_ever_ended_the_session() {
    let (mut runtime, _, _task) = pair(Limits::default());
    runtime.accept(Duration::from_millis(i64::MAX.unsigned_abs())).await;
    let answer = runtime.call("RunPodSandbox", &sandbox("one")).await;
    assert!(answer.error().is_none(), "{answer:?}");
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_is_answered_before_the_runtime_gives_up() {
    let (mut runtime, plugin, _task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    let before = tokio::time::Instant::now();
    let hangs = runtime.send("RunPodSandbox", &sandbox("hangs")).await;
    // Others are served meanwhile.
    assert_eq!(runtime.call("RunPodSandbox", &sandbox("next")).await.error(), None);
    let answer = runtime.response(hangs).await;
    let error = answer.error().expect("an error");
    assert_eq!(error.code, code::UNKNOWN, "a runtime drops a plugin whose answer is a deadline exceeded");
    let waited = before.elapsed();
    assert!(waited < Duration::from_secs(2), "{waited:?}");
    assert_eq!(plugin.heard()[2..], ["run hangs", "run next"]);
}

#[tokio::test]
async fn a_handler_that_panics_refuses_its_pod() {
    let (mut runtime, _, _task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    let answer = runtime.call("RunPodSandbox", &sandbox("panics")).await;
    assert_eq!(answer.error().map(|e| e.code), Some(code::UNKNOWN));
    assert_eq!(runtime.call("RunPodSandbox", &sandbox("next")).await.error(), None);
}

#[tokio::test]
async fn what_is_not_known_is_unimplemented_and_what_cannot_be_read_is_refused() {
    let (mut runtime, plugin, _task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    let answer = runtime.call("UpdatePodSandbox", &Empty {}).await;
    assert_eq!(answer.error().map(|e| e.code), Some(code::UNIMPLEMENTED));
    let foreign = Request { service: "other".into(), method: "RunPodSandbox".into(), ..Request::default() };
    let stream = runtime.send_request(foreign).await;
    assert_eq!(runtime.response(stream).await.error().map(|e| e.code), Some(code::UNIMPLEMENTED));
    for method in ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "CreateContainer", "Synchronize"] {
        let garbage = Request {
            service: session::PLUGIN_SERVICE.into(),
            method: method.into(),
            payload: vec![0xff; 7],
            timeout_nano: 0,
        };
        let stream = runtime.send_request(garbage).await;
        let answer = runtime.response(stream).await;
        assert_eq!(answer.error().map(|e| e.code), Some(code::INVALID_ARGUMENT), "{method}");
    }
    // A sandbox that is not named cannot be let pass.
    for method in ["RunPodSandbox", "CreateContainer"] {
        let answer = runtime.call(method, &Empty {}).await;
        assert_eq!(answer.error().map(|e| e.code), Some(code::INVALID_ARGUMENT), "{method}");
    }
    assert_eq!(plugin.heard().len(), 2, "{:?}", plugin.heard());
}

#[tokio::test]
async fn garbage_and_huge_frames_end_the_session() {
    let huge = [&1_u32.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
    let long = [&1_u32.to_be_bytes()[..], &10_u32.to_be_bytes(), &[0xff; 4], &[0; 4], &[1, 0]].concat();
    for (bytes, expected) in [(huge, "NRI"), (long, "ttrpc"), (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "NRI")] {
        let (mut runtime, _, task) = pair(Limits::default());
        runtime.registration().await;
        runtime.stream.write_all(&bytes).await.expect("written");
        let ended = task.await.expect("an end");
        assert!(!ended.served && ended.why.to_string().ends_with(expected), "{ended:?}");
    }
}

#[tokio::test]
async fn half_a_frame_and_then_nothing_is_a_closed_connection() {
    let (mut runtime, _, task) = pair(Limits::default());
    runtime.registration().await;
    runtime.stream.write_all(&[0, 0, 0, 1, 0, 0]).await.expect("written");
    drop(runtime);
    assert!(matches!(task.await.expect("an end").why, SessionError::Closed));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_says_nothing_is_left() {
    let (mut runtime, _, task) = pair(Limits::default());
    runtime.registration().await;
    assert!(matches!(task.await.expect("an end").why, SessionError::Silent(_)));
}

#[tokio::test]
async fn a_runtime_that_does_not_want_the_plugin_says_why() {
    let (mut runtime, _, task) = pair(Limits::default());
    let (stream, _) = runtime.registration().await;
    runtime.answer(stream, Response::failure(2, "disabled")).await;
    let ended = task.await.expect("an end");
    assert!(!ended.served && ended.why.to_string().contains("disabled"), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_takes_no_answers_is_left() {
    let (mut runtime, _, task) = pair(Limits::default());
    runtime.accept(Duration::from_secs(2)).await;
    // Answers of which none is read fill the socket.
    let flood = async {
        loop {
            let foreign = Request { service: "x".repeat(4000), ..Request::default() };
            let message =
                knit_nri::ttrpc::Message { stream: 1, body: knit_nri::ttrpc::Body::Request(foreign) };
            let bytes = knit_nri::mux::frames(1, &message.encode().expect("bytes")).expect("frames");
            if runtime.stream.write_all(&bytes).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let ended = tokio::select! {
        () = flood => unreachable!("it has no end"),
        ended = task => ended.expect("an end"),
    };
    assert!(matches!(ended.why, SessionError::Stuck(_)), "{ended:?}");
}

#[tokio::test]
async fn too_many_requests_and_sandboxes_are_refused() {
    let limits = Limits { requests: 2, sandboxes: 3, ..Limits::default() };
    let (mut runtime, plugin, _task) = pair(limits);
    runtime.accept(Duration::from_secs(60)).await;
    runtime.send("RunPodSandbox", &sandbox("hangs")).await;
    runtime.send("RunPodSandbox", &sandbox("hangs")).await;
    let answer = runtime.call("RunPodSandbox", &sandbox("third")).await;
    assert_eq!(answer.error().map(|e| e.code), Some(code::RESOURCE_EXHAUSTED));
    let many = SynchronizeRequest { pods: vec![pod("a"); 4], more: true, ..Default::default() };
    let answer = runtime.call("Synchronize", &many).await;
    assert_eq!(answer.error().map(|e| e.code), Some(code::RESOURCE_EXHAUSTED));
    assert!(!plugin.heard().contains(&"run third".to_owned()));
}

#[tokio::test]
async fn a_runtime_that_restarts_finds_the_plugin_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("nri.sock");
    let plugin = Arc::new(Recorder::default());
    let client = Client { socket: socket.clone(), identity: identity(), plugin: Arc::clone(&plugin) };
    let running = tokio::spawn(client.run());
    for time in 1..=3 {
        let listener = UnixListener::bind(&socket).expect("a socket");
        let (stream, _) = listener.accept().await.expect("a client");
        let mut runtime = FakeRuntime::new(stream);
        runtime.accept(Duration::from_secs(2)).await;
        plugin.hears("synchronize 0 {}", time).await;
        drop((runtime, listener));
        plugin.hears("disconnected", time).await;
        std::fs::remove_file(&socket).expect("removed");
    }
    running.abort();
}
