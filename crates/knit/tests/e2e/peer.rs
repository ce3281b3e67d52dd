//! Who may talk to the agent: root alone.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;

use knit_kernel::testing::{eventually, privileged};

use crate::support::{Cluster, Pod, SOON, build_shim, shim_command};

#[test]
fn another_user_is_not_served() {
    build_shim();
    privileged(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        // Even where the file would let anybody in.
        for (path, mode) in [(node.run.clone(), 0o755), (node.socket(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("opened");
        }
        let pod = Pod::new("stranger");
        let program = std::path::PathBuf::from("/run/knit-cni");
        std::fs::copy(crate::support::shim(), &program).expect("a copy that anybody may run");
        let run = |uid: u32| {
            let like = shim_command("ADD", &pod.sandbox, &pod.path, &pod.sandbox);
            let mut command = std::process::Command::new(&program);
            command.env_clear().envs(like.get_envs().filter_map(|(k, v)| Some((k, v?))));
            command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).uid(uid);
            let mut child = command.spawn().expect("the shim starts");
            // Who is served may need a while on a busy machine.
            let timeout = if uid == 0 { 60 } else { 2 };
            let config = serde_json::json!({"cniVersion": "1.1.0", "name": "knit", "type": "knit-cni",
                "socket": node.socket(), "timeoutSeconds": timeout,
                "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {}}});
            child.stdin.take().expect("a pipe").write_all(config.to_string().as_bytes()).expect("read");
            child.wait_with_output().expect("the shim ends").status.success()
        };
        assert!(!run(65534), "nobody got a network");
        node.audit(&[].into());
        assert!(run(0), "root gets one");
        node.audit(&[("stranger", 1)].into());
    });
}

#[test]
fn another_user_is_no_kni_client_either() {
    privileged(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let node = &cluster.a;
        let socket = node.run.join("kni.sock");
        eventually("the KNI door is open", SOON, || socket.exists());
        for (path, mode) in [(node.run.clone(), 0o755), (socket.clone(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("opened");
        }
        // What any gRPC client says first, and what a server answers to it.
        let hello = |uid: u32| {
            let socket = socket.clone();
            let client = std::thread::spawn(move || {
                let uid = rustix::process::Uid::from_raw(uid);
                // This thread alone becomes somebody else.
                rustix::thread::set_thread_res_uid(uid, uid, uid).expect("another user");
                let mut stream = UnixStream::connect(socket).expect("the file lets anybody in");
                stream.set_read_timeout(Some(SOON)).expect("a timeout");
                // A server that hung up already is a refusal, too.
                let _ =
                    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00");
                let mut answer = [0; 9];
                stream.read_exact(&mut answer).map(|()| answer[3])
            });
            client.join().expect("a client")
        };
        const SETTINGS: u8 = 4;
        assert_eq!(hello(0).expect("root is answered"), SETTINGS);
        let refused = hello(65534).expect_err("nobody is served");
        assert_ne!(refused.kind(), std::io::ErrorKind::WouldBlock, "refused, and not left waiting");
    });
}
