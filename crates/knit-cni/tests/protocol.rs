//! Frames survive the way, and whatever else arrives is an error, never a panic and never a huge allocation.

use std::io::Cursor;

use knit_cni::protocol::{
    Command, FrameError, MAX_FRAME, PROTOCOL_VERSION, Request, Response, encode, receive, send,
};
use knit_cni::{Args, CniError, NetworkConfig, code, spool};
use proptest::prelude::*;

fn request() -> Request {
    Request {
        version: PROTOCOL_VERSION,
        command: Command::Add,
        container_id: "c1".into(),
        netns: "/run/netns/c1".into(),
        ifname: "eth0".into(),
        args: Args { pod_name: Some("web-0".into()), ..Args::default() },
        path: "/opt/cni/bin".into(),
        config: NetworkConfig {
            cni_version: "1.1.0".into(),
            name: "knit".into(),
            ..NetworkConfig::default()
        },
        timeout_ms: Some(30_000),
    }
}

#[test]
fn messages_survive_the_way() {
    let mut wire = Vec::new();
    send(&mut wire, &request()).expect("sent");
    send(&mut wire, &Response::Err(CniError::new(code::TRY_AGAIN, "later"))).expect("sent");
    send(&mut wire, &Response::Ok(serde_json::Value::Null)).expect("sent");
    let mut from = Cursor::new(wire);
    assert_eq!(receive::<Request>(&mut from).expect("the request"), request());
    let error = receive::<Response>(&mut from).expect("the error");
    assert_eq!(error, Response::Err(CniError::new(code::TRY_AGAIN, "later")));
    let done = receive::<Response>(&mut from).expect("the end");
    assert_eq!(done, Response::Ok(serde_json::Value::Null));
    assert!(matches!(receive::<Response>(&mut from), Err(FrameError::Closed)));
}

#[test]
fn a_frame_cut_anywhere_is_truncated() {
    let frame = encode(&request()).expect("a frame");
    for cut in 1..frame.len() {
        let error = receive::<Request>(&mut &frame[..cut]).expect_err("cut");
        assert!(matches!(error, FrameError::Truncated), "cut at {cut}: {error}");
    }
}

#[test]
fn a_huge_frame_is_refused_both_ways() {
    let huge = (MAX_FRAME as u32 + 1).to_be_bytes();
    assert!(matches!(receive::<Request>(&mut &huge[..]), Err(FrameError::TooLong { .. })));
    let mut long = request();
    long.path = "x".repeat(MAX_FRAME);
    assert!(matches!(encode(&long), Err(FrameError::TooLong { .. })));
}

#[test]
fn notes_are_kept_once_and_hostile_names_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let spool_dir = folder.path().join("spool");
    assert!(spool::notes(&spool_dir).expect("no folder is no note").is_empty());
    let del = Request { command: Command::Del, ..request() };
    spool::leave(&spool_dir, &del).expect("noted");
    spool::leave(&spool_dir, &del).expect("noted again");
    let notes = spool::notes(&spool_dir).expect("notes");
    assert_eq!(notes.len(), 1);
    assert_eq!(*notes[0].request.as_ref().expect("it reads"), del);
    for id in ["../evil", "", "a/b", "a\0b"] {
        let hostile = Request { container_id: id.into(), ..del.clone() };
        spool::leave(&spool_dir, &hostile).expect_err("a hostile name");
    }
    std::fs::write(spool_dir.join("broken.del"), b"{").expect("a broken note");
    let broken = spool::notes(&spool_dir).expect("notes");
    assert_eq!(broken.iter().filter(|n| n.request.is_err()).count(), 1);
}

proptest! {
    #[test]
    fn garbage_is_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(receive::<Request>(&mut &bytes[..]).is_err());
        let mut framed = (bytes.len() as u32).to_be_bytes().to_vec();
        framed.extend(&bytes);
        prop_assert!(receive::<Request>(&mut &framed[..]).is_err());
    }
}
