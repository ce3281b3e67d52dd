//! Clients that find out whether they get through, by an answer or by the count of what was denied: no
//! guessing by time.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use knit_kernel::NetNs;
use knit_policy::model::{Protocol, Traffic};
use knit_testbed::SOON;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto};

const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Whether a connection, a datagram or an echo request is answered; false as soon as `denied` says so.
#[track_caller]
pub fn reaches(from: &NetNs, to: IpAddr, traffic: Traffic, mut denied: impl FnMut() -> bool) -> bool {
    match traffic {
        Traffic::Port(Protocol::Tcp, port) => {
            let socket = connecting(from, SocketAddr::new(to, port));
            answered(&socket, PollFlags::OUT, &mut denied)
                && rustix::net::sockopt::socket_error(&socket).expect("asked").is_ok()
        }
        Traffic::Port(Protocol::Udp, port) => {
            let socket = udp(from, SocketAddr::new(to, port));
            socket.send(b"hello").expect("sent");
            answered(&socket.into(), PollFlags::IN, &mut denied)
        }
        Traffic::Icmpv6(_) | Traffic::Other => {
            let socket = ping(from, to);
            answered(&socket, PollFlags::IN, &mut denied)
        }
        other @ Traffic::Port(..) => panic!("{other} is not tried here"),
    }
}

fn answered(socket: &OwnedFd, flag: PollFlags, denied: &mut impl FnMut() -> bool) -> bool {
    let end = Instant::now() + SOON / 4;
    loop {
        let ready = poll(&mut [PollFd::new(socket, flag)], Some(&TICK)).expect("polled");
        if ready > 0 {
            return true;
        }
        if denied() || Instant::now() > end {
            return false;
        }
    }
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// A socket that has begun to connect. It is closed with the value, so that nothing more is sent.
fn connecting(from: &NetNs, to: SocketAddr) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let open = || rustix::net::socket_with(family(to.ip()), SocketType::STREAM, flags, None);
    let socket = from.run(open).expect("entered").expect("a socket");
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => socket,
        Err(error) => panic!("{to}: {error}"),
    }
}

pub fn udp(from: &NetNs, to: SocketAddr) -> UdpSocket {
    let bind = || UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
    let socket = from.run(bind).expect("entered").expect("a socket");
    socket.connect(to).expect("a peer");
    socket
}

fn ping(from: &NetNs, to: IpAddr) -> OwnedFd {
    let protocol = if to.is_ipv4() { ipproto::ICMP } else { ipproto::ICMPV6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let open = || rustix::net::socket_with(family(to), SocketType::RAW, flags, Some(protocol));
    let socket = from.run(open).expect("entered").expect("a raw socket");
    // A connected socket hears only its peer.
    rustix::net::connect(&socket, &SocketAddr::new(to, 0)).expect("a peer");
    // The kernel fills in the checksum of ICMPv6.
    let request: [u8; 8] =
        if to.is_ipv4() { [8, 0, 0xf7, 0xfd, 0, 1, 0, 1] } else { [128, 0, 0, 0, 0, 1, 0, 1] };
    rustix::net::send(&socket, &request, SendFlags::empty()).expect("sent");
    socket
}

/// A connection that is open.
#[track_caller]
pub fn connect(from: &NetNs, to: SocketAddr) -> TcpStream {
    let stream = from.run(|| TcpStream::connect_timeout(&to, SOON)).expect("entered").expect("connected");
    stream.set_nodelay(true).expect("no delay");
    stream
}

/// Whether what is said over a connection comes back. What is not answered within `wait` may still come
/// later.
pub fn echoes(stream: &mut TcpStream, wait: Duration) -> bool {
    stream.set_read_timeout(Some(wait)).expect("a timeout");
    stream.write_all(b"ping").expect("sent");
    let mut heard = [0; 4];
    stream.read_exact(&mut heard).is_ok()
}
