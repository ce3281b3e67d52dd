//! A node to run the shim on: a folder, and whatever listens on the agent's socket in it.

use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use knit_cni::protocol::{Request, Response, receive, send};
use knit_cni::{paths, spool};
use serde_json::{Value, json};
use tempfile::TempDir;

pub struct Node {
    pub dir: TempDir,
}

/// What a run of the shim left.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
}

impl Node {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a folder") }
    }

    pub fn socket(&self) -> PathBuf {
        paths::socket(self.dir.path())
    }

    pub fn spool(&self) -> PathBuf {
        paths::spool(self.dir.path())
    }

    pub fn notes(&self) -> Vec<Request> {
        let notes = spool::notes(&self.spool()).expect("notes");
        notes.into_iter().map(|n| n.request.expect("a note")).collect()
    }

    pub fn mark_ready(&self) {
        std::fs::write(paths::ready_marker(self.dir.path()), b"").expect("a marker");
    }

    pub fn config(&self) -> Value {
        json!({ "cniVersion": "1.1.0", "name": "knit", "type": "knit-cni", "socket": self.socket() })
    }

    /// An agent for one call, which answers as it is told; gives the request that it got.
    pub fn agent(
        &self,
        answer: impl FnOnce(&Request, &mut UnixStream) + Send + 'static,
    ) -> mpsc::Receiver<Request> {
        let listener = UnixListener::bind(self.socket()).expect("a socket");
        let (sender, requests) = mpsc::channel();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let request: Request = receive(&mut stream).expect("a request");
            answer(&request, &mut stream);
            let _ = sender.send(request);
        });
        requests
    }

    /// An agent that gives this answer to one call.
    pub fn answering(&self, response: Response) -> mpsc::Receiver<Request> {
        self.agent(move |_, stream| send(stream, &response).expect("answered"))
    }

    /// Runs the shim as containerd does.
    pub fn run(&self, command: &str, config: &Value) -> Ran {
        run(&full_environment(command), config.to_string().as_bytes())
    }
}

impl Ran {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{:?} is no JSON: {e}", self.stdout))
    }

    /// The CNI error that it printed: its code and message.
    #[track_caller]
    pub fn error(&self) -> (u64, String) {
        assert_eq!(self.code, 1, "{self:?}");
        let json = self.json();
        assert!(json["cniVersion"].is_string(), "{self:?}");
        (json["code"].as_u64().expect("a code"), json["msg"].as_str().expect("a message").to_owned())
    }

    #[track_caller]
    pub fn silent_success(&self) {
        assert_eq!((self.code, self.stdout.as_str()), (0, ""));
    }
}

pub fn full_environment(command: &str) -> Vec<(&'static str, String)> {
    vec![
        ("CNI_COMMAND", command.to_owned()),
        ("CNI_CONTAINERID", "c1".to_owned()),
        ("CNI_NETNS", "/run/netns/c1".to_owned()),
        ("CNI_IFNAME", "eth0".to_owned()),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=u1".to_owned()),
        ("CNI_PATH", "/opt/cni/bin".to_owned()),
    ]
}

pub fn command(environment: &[(&str, String)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_knit-cni"));
    command.env_clear().envs(environment.iter().map(|(k, v)| (k, v)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn run(environment: &[(&str, String)], input: &[u8]) -> Ran {
    let mut child = command(environment).spawn().expect("the shim starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A shim that has seen enough does not read to the end.
    let _ = stdin.write_all(input);
    drop(stdin);
    let output = child.wait_with_output().expect("the shim ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing is for standard error");
    Ran {
        code: output.status.code().expect("no signal"),
        stdout: String::from_utf8(output.stdout).expect("text"),
    }
}
