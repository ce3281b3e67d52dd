//! Real packets between namespaces.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use knit_kernel::NetNs;

use crate::case::Problem;

/// How long packets may take that must arrive: a machine with much else to do is slow.
const PACKET_TIMEOUT: Duration = Duration::from_secs(5);

/// How long until a packet is sent again.
const RESEND_INTERVAL: Duration = Duration::from_millis(250);

/// Sends a UDP packet from one namespace to `to`, where the other namespace answers it on `port`; gives the
/// address that the packet came from.
pub(crate) async fn talk(from: &NetNs, to: SocketAddr, at: &NetNs, port: u16) -> Result<IpAddr, Problem> {
    let (from, at) = (from.try_clone()?, at.try_clone()?);
    let talked = tokio::task::spawn_blocking(move || exchange(&from, to, &at, port));
    talked.await.map_err(|error| Problem::Failed(format!("sending packets failed: {error}")))?
}

fn exchange(from: &NetNs, to: SocketAddr, at: &NetNs, port: u16) -> Result<IpAddr, Problem> {
    let any = |port| match to {
        SocketAddr::V4(_) => SocketAddr::from(([0; 4], port)),
        SocketAddr::V6(_) => SocketAddr::from(([0; 16], port)),
    };
    let io = |what: &str, error: std::io::Error| Problem::Failed(format!("{what} {to}: {error}"));
    let server = at.run(|| UdpSocket::bind(any(port)))?.map_err(|e| io("listening for packets to", e))?;
    let client = from.run(|| UdpSocket::bind(any(0)))?.map_err(|e| io("sending packets to", e))?;
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(RESEND_INTERVAL)).map_err(|e| io("a socket for", e))?;
    }
    let end = Instant::now() + PACKET_TIMEOUT;
    let mut buffer = [0; 64];
    let mut last = String::from("no packet arrived");
    while Instant::now() < end {
        if let Err(error) = client.send_to(b"knit", to) {
            last = format!("sending failed: {error}");
            wait_a_little(&client);
            continue;
        }
        let source = match server.recv_from(&mut buffer) {
            Ok((4, source)) if buffer[..4] == *b"knit" => source,
            Ok(_) => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(error) => return Err(io("listening for packets to", error)),
        };
        // A connection that is translated on its way answers from where it was sent to.
        server.send_to(b"tink", source).map_err(|e| io("answering packets to", e))?;
        match client.recv_from(&mut buffer) {
            Ok((4, peer)) if buffer[..4] == *b"tink" && peer.ip() == to.ip() => return Ok(source.ip()),
            Ok((_, peer)) => last = format!("an answer came from {peer}"),
            Err(_) => last = "packets arrive, and their answers do not".into(),
        }
    }
    Err(Problem::Failed(format!("no packets to {to} and back within {PACKET_TIMEOUT:?}: {last}")))
}

/// Nothing is there to wait for: whether a route or a neighbour is there shows only when sending.
fn wait_a_little(socket: &UdpSocket) {
    let _ = socket.recv(&mut [0]);
}
