//! Sockets of the HTTP servers: one family each, a limited number of connections, and no patience with slow
//! clients.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// So many connections are open at once on one port; beyond that, the oldest goes. Load balancers have one
/// each.
pub(super) const CONNECTIONS: usize = 128;
/// How long a client may take to say what it wants.
pub(super) const HEADER: Duration = Duration::from_secs(10);
/// How long to wait when connections cannot be accepted, as without file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Opens a port for one family: the IPv6 wildcard does not take IPv4's, whatever the machine's settings, so
/// that both can be open beside each other.
///
/// # Errors
/// When the kernel refuses.
pub fn bind(at: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Connections of a process before this one may still be ending.
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Whether the kernel does not have the family at all: there is nothing to wait for.
#[must_use]
pub fn is_no_family(error: &io::Error) -> bool {
    /// Linux' number; the standard library has no name for it.
    const EAFNOSUPPORT: i32 = 97;
    error.raw_os_error() == Some(EAFNOSUPPORT)
}

/// Serves every connection, until the listener fails for good.
pub(super) async fn accept_all<F: Future<Output = ()> + Send + 'static>(
    listener: &TcpListener,
    serve: impl Fn(TcpStream) -> F,
) -> io::Error {
    // Dropping the set ends its tasks.
    let mut connections = JoinSet::new();
    let mut order: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return error,
            // The client went away, or there is no room: that passes.
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        order.retain(|task| !task.is_finished());
        if order.len() >= CONNECTIONS
            && let Some(oldest) = order.pop_front()
        {
            oldest.abort();
        }
        order.push_back(connections.spawn(serve(stream)));
    }
}
