//! Sockets of the HTTP servers: one family each, a limited number of connections, and no patience with slow
//! clients.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use knit_http::Limits;
use socket2::{Domain, Protocol, Socket, Type};

/// What clients of one port may have at once. Load balancers have a connection each, and keep it.
pub(super) const LIMITS: Limits =
    Limits { all: 128, each: None, own: None, header: Duration::from_secs(10), lifetime: None };
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
