//! A client that puts the socket's path into `:authority`, as gRPC for Python and Go do, is served.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use knit_runtime::{
    AttachRequest, Attachment, Error, Info, InterfaceName, Network, NetworkName, Pod, Reason, Result,
    Runtime, SandboxId, Status, wire,
};

/// A runtime that says who it is, and nothing else.
struct Named;

#[async_trait]
impl Runtime for Named {
    async fn info(&self) -> Result<Info> {
        Ok(Info { name: "example.com/named".into(), version: "1".into(), features: Vec::new() })
    }

    async fn setup_network(&self, _: &Network) -> Result<()> {
        Err(Error::new(Reason::Unsupported, "no"))
    }

    async fn remove_network(&self, _: &NetworkName) -> Result<()> {
        Err(Error::new(Reason::Unsupported, "no"))
    }

    async fn attach(&self, _: &AttachRequest) -> Result<Attachment> {
        Err(Error::new(Reason::Unsupported, "no"))
    }

    async fn detach(&self, _: &Pod, _: Option<&InterfaceName>) -> Result<()> {
        Ok(())
    }

    async fn check(&self, _: &Pod, _: Option<&Path>, _: Option<&InterfaceName>) -> Result<()> {
        Ok(())
    }

    async fn list(&self, _: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        Ok(Vec::new())
    }

    async fn collect_garbage(&self, _: &[SandboxId]) -> Result<Vec<Attachment>> {
        Ok(Vec::new())
    }

    async fn status(&self) -> Result<Status> {
        Ok(Status::default())
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat()
}

/// GetCapabilities with this authority; the first call of a connection brings it into the header table, and
/// the second refers to it there.
fn call(connection: &mut UnixStream, stream: u32, authority: Option<&str>) {
    let path = "/kni.v1alpha1.NetworkRuntime/GetCapabilities";
    let authority = match authority {
        Some(authority) => [vec![0x41], string(authority)].concat(),
        // The newest entry but two: content-type and te came after it.
        None => vec![0xc0],
    };
    let mut block = [vec![0x83, 0x86, 0x04], string(path), authority].concat();
    if stream == 1 {
        block.extend(
            [vec![0x5f], string("application/grpc"), vec![0x40], string("te"), string("trailers")].concat(),
        );
    } else {
        block.extend([0xbf, 0xbe]);
    }
    let request = [frame(1, 4, stream, &block), frame(0, 1, stream, &[0; 5])].concat();
    connection.write_all(&request).expect("sent");
}

/// The kind of the first frame that answers on a stream, and what comes with it.
fn answer(connection: &mut UnixStream, stream: u32) -> (u8, Vec<u8>) {
    loop {
        let mut header = [0; 9];
        connection.read_exact(&mut header).expect("a frame");
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; length as usize];
        connection.read_exact(&mut payload).expect("its payload");
        if u32::from_be_bytes([header[5], header[6], header[7], header[8]]) == stream {
            return (header[3], payload);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_the_sockets_path_as_authority_was_reset() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("named.sock");
    let served = socket.clone();
    tokio::spawn(async move { wire::serve(&served, Arc::new(Named), std::future::pending()).await });
    // Bound under its own name only once it listens.
    while !socket.exists() {
        tokio::task::yield_now().await;
    }
    for authority in ["localhost", "%2Frun%2Fknit%2Fkni.sock", "/run/knit/kni.sock", "k"] {
        let mut connection = UnixStream::connect(&socket).expect("connected");
        connection.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
        connection.write_all(&hello).expect("sent");
        for (stream, authority) in [(1, Some(authority)), (3, None)] {
            call(&mut connection, stream, authority);
            let (kind, payload) = answer(&mut connection, stream);
            assert_eq!(kind, 1, "{authority:?}: HEADERS was to come, and not {payload:?}");
            let (kind, payload) = answer(&mut connection, stream);
            assert_eq!(kind, 0, "{authority:?}: DATA was to come");
            assert!(String::from_utf8_lossy(&payload).contains("example.com/named"), "{payload:?}");
            // The trailers end it.
            assert_eq!(answer(&mut connection, stream).0, 1, "{authority:?}");
        }
    }
}
