//! The shim while the agent is away, ends, hangs or talks nonsense.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::{Node, command, full_environment};
use knit_cni::protocol::{Command, MAX_FRAME, Response};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use serde_json::{Value, json};

/// All commands while nobody answers.
fn check_away(node: &Node) {
    let config = node.config();
    for name in ["ADD", "CHECK"] {
        let started = Instant::now();
        let (code, msg) = node.run(name, &config).error();
        assert_eq!(code, 11, "{name}: {msg}");
        assert!(msg.contains("try again later"), "{name}: {msg}");
        assert!(started.elapsed() < Duration::from_secs(20), "{name} fails at once");
    }
    assert!(node.notes().is_empty());
    node.run("GC", &config).silent_success();
    assert!(node.notes().is_empty(), "the list of a GC would be old when the agent is back");

    node.run("DEL", &config).silent_success();
    node.run("DEL", &config).silent_success();
    let [note] = node.notes().try_into().expect("one note for one interface");
    assert_eq!(
        (note.command, note.container_id.as_str(), note.ifname.as_str()),
        (Command::Del, "c1", "eth0")
    );
    assert_eq!(note.config.name, "knit");
    assert_eq!(note.timeout_ms, None);
    let folder = std::fs::metadata(node.spool()).expect("a spool");
    assert_eq!(folder.permissions().mode() & 0o777, 0o700, "notes are nobody else's business");

    let (code, msg) = node.run("STATUS", &config).error();
    assert_eq!(code, 50, "{msg}");
    assert!(msg.contains("knit node"), "it says what to look at: {msg}");
    node.mark_ready();
    node.run("STATUS", &config).silent_success();
}

#[test]
fn no_socket() {
    check_away(&Node::new());
}

#[test]
fn a_socket_that_an_ended_agent_left() {
    let node = Node::new();
    drop(UnixListener::bind(node.socket()).expect("a socket"));
    assert!(node.socket().exists());
    check_away(&node);
}

#[test]
fn an_agent_that_ends_before_it_answers() {
    for answer in [&b""[..], &[0, 0], &[0, 0, 0, 9, b'{']] {
        for (command, code) in [("ADD", Some(11)), ("CHECK", Some(11)), ("DEL", None), ("STATUS", Some(50))] {
            let node = Node::new();
            let _requests = node.agent(move |_, stream| stream.write_all(answer).expect("a part"));
            let ran = node.run(command, &node.config());
            match code {
                Some(code) => assert_eq!(ran.error().0, code, "{command}"),
                None => {
                    ran.silent_success();
                    assert_eq!(node.notes().len(), 1);
                }
            }
        }
    }
}

#[test]
fn an_agent_that_refuses_us_unread() {
    let node = Node::new();
    let listener = UnixListener::bind(node.socket()).expect("a socket");
    let door = std::thread::spawn(move || drop(listener.accept().expect("a client")));
    assert_eq!(node.run("ADD", &node.config()).error().0, 11);
    door.join().expect("the door");
}

#[test]
fn an_agent_that_talks_nonsense() {
    let huge = u32::try_from(MAX_FRAME + 1).expect("a length").to_be_bytes();
    for answer in [&[0, 0, 0, 4, b'n', b'o', b'p', b'e'][..], &[0, 0, 0, 2, b'{', b'}'], &huge] {
        for command in ["ADD", "DEL"] {
            let node = Node::new();
            let answer = answer.to_vec();
            let _requests = node.agent(move |_, stream| stream.write_all(&answer).expect("an answer"));
            let (code, msg) = node.run(command, &node.config()).error();
            assert_eq!(code, 6, "{msg}");
            assert!(node.notes().is_empty(), "who talks is not away");
        }
    }
}

#[test]
fn a_silent_agent_costs_no_more_than_the_deadline() {
    for (command, code) in [("ADD", Some(11)), ("DEL", Some(11)), ("STATUS", None)] {
        let node = Node::new();
        node.mark_ready();
        // It trickles, so that no single read ever waits for long.
        let _requests = node.agent(|_, stream| {
            let (_nobody, pace) = mpsc::channel::<()>();
            for byte in [0, 0, 4, 0].into_iter().chain(std::iter::repeat_n(b' ', 1000)) {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                let _ = pace.recv_timeout(Duration::from_millis(100));
            }
        });
        let mut config = node.config();
        config["timeoutSeconds"] = json!(1);
        let started = Instant::now();
        let ran = node.run(command, &config);
        assert!(started.elapsed() < Duration::from_secs(60), "{command}: {:?}", started.elapsed());
        match code {
            Some(code) => assert_eq!(ran.error().0, code, "{command}"),
            None => ran.silent_success(),
        }
        assert!(node.notes().is_empty(), "{command}: a slow agent is asked again");
    }
}

#[test]
fn an_agent_that_does_not_accept_costs_no_more_than_the_deadline() {
    let node = Node::new();
    let full = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    bind(&full, &SocketAddrUnix::new(node.socket()).expect("an address")).expect("bound");
    listen(&full, 0).expect("listening");
    let _waiting = UnixStream::connect(node.socket()).expect("the only place in the queue");
    let mut config = node.config();
    config["timeoutSeconds"] = json!(1);
    let (code, msg) = node.run("ADD", &config).error();
    assert_eq!(code, 11);
    assert!(msg.contains("within 1 s"), "{msg}");
}

#[test]
fn a_runtime_that_never_closes_standard_input_is_not_waited_for() {
    let mut child = command(&full_environment("ADD")).spawn().expect("the shim starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"{\"cniVersion\":").expect("a part");
    let mut stdout = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("an answer");
    assert!(!child.wait().expect("it ended").success());
    let json: Value = serde_json::from_str(&stdout).expect("an error");
    assert_eq!(json["code"], 5);
    drop(stdin);
}

#[test]
fn a_del_that_cannot_be_noted_fails() {
    let node = Node::new();
    std::fs::write(node.dir.path().join("file"), b"").expect("a file");
    let mut config = node.config();
    config["spoolDir"] = json!(node.dir.path().join("file/spool"));
    let (code, msg) = node.run("DEL", &config).error();
    assert_eq!(code, 5);
    assert!(msg.contains("file/spool") && msg.contains("c1"), "{msg}");
}

#[test]
fn spool_and_marker_may_be_elsewhere() {
    let node = Node::new();
    let elsewhere = tempfile::tempdir().expect("a folder");
    let mut config = node.config();
    config["spoolDir"] = json!(elsewhere.path().join("notes"));
    config["readyFile"] = json!(elsewhere.path().join("was-ready"));
    node.run("DEL", &config).silent_success();
    assert!(node.notes().is_empty());
    assert_eq!(knit_cni::spool::notes(&elsewhere.path().join("notes")).expect("notes").len(), 1);
    assert_eq!(node.run("STATUS", &config).error().0, 50);
    std::fs::write(elsewhere.path().join("was-ready"), b"").expect("a marker");
    node.run("STATUS", &config).silent_success();
}

#[test]
fn a_new_add_takes_the_note_of_an_old_del_back() {
    let node = Node::new();
    node.run("DEL", &node.config()).silent_success();
    node.run("ADD", &node.config()).error();
    assert_eq!(node.notes().len(), 1, "an ADD that failed changes nothing");
    let requests = node.answering(Response::Ok(json!({ "cniVersion": "1.1.0" })));
    assert_eq!(node.run("ADD", &node.config()).code, 0);
    requests.recv().expect("the agent was asked");
    assert!(node.notes().is_empty(), "the old DEL would take the new networks away");
}
