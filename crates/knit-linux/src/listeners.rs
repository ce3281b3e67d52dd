//! Which ports of the node its own programs answer on: a pod that got one as its host port would take what is
//! meant for them.

use std::fs::File;
use std::io::{self, BufReader};
use std::net::{IpAddr, SocketAddr};

use knit_kernel::netns::NetNs;
use knit_runtime::{AttachRequest, Error, PortMapping, Protocol, Reason, Result};

use crate::fail::internal;

/// Refuses ports of the node that a program there answers on.
pub(crate) fn check(request: &AttachRequest, node: &NetNs) -> Result<()> {
    for mapping in &request.ports {
        let found = listeners(node, mapping.protocol)?.into_iter().find(|at| {
            let serves = |address: &IpAddr| answers_for(at.ip(), *address, mapping.host_ip);
            at.port() == mapping.host_port && request.addresses.iter().any(|a| serves(&a.net.addr()))
        });
        if let Some(at) = found {
            let PortMapping { host_port, protocol, .. } = mapping;
            let message = format!(
                "a program on the node listens on {at}, and host port {host_port}/{} would take its \
                traffic: give sandbox {} another host port, or a host IP that the program does not use",
                protocol_name(*protocol),
                request.pod.sandbox
            );
            return Err(Error::new(Reason::Conflict, message));
        }
    }
    Ok(())
}

fn protocol_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
        Protocol::Sctp => "SCTP",
    }
}

/// Whether a program at this address would lose something to a pod with that address. A host port without a
/// host IP is every address of the node of the pod's families.
fn answers_for(program: IpAddr, pod: IpAddr, host_ip: Option<IpAddr>) -> bool {
    let program = program.to_canonical();
    let at = host_ip.filter(|ip| !ip.is_unspecified());
    let family = |ip: IpAddr| host_ip.is_none_or(|host| host.is_ipv4() == ip.is_ipv4());
    // Who talks to a loopback address does so from one, and that is left alone by the rules for host ports;
    // from outside nobody gets there.
    if program.is_loopback() || !family(pod) {
        return false;
    }
    match program {
        // What listens on all IPv6 addresses does so on IPv4's, mostly.
        IpAddr::V6(ip) if ip.is_unspecified() => true,
        _ if program.is_ipv4() != pod.is_ipv4() => false,
        _ => program.is_unspecified() || at.is_none_or(|at| at == program),
    }
}

/// Where programs in a namespace answer.
fn listeners(node: &NetNs, protocol: Protocol) -> Result<Vec<SocketAddr>> {
    // A UDP socket that is connected hears its one peer only: it asks, and does not answer. One that is not
    // may have got its port from the kernel and only ask, too; the kernel does not tell, and WireGuard's
    // port, say, is where such ports are. So it counts; a port that was only asked from is free a moment
    // later.
    let (files, state) = match protocol {
        Protocol::Tcp => (["tcp", "tcp6"], "0A"),
        Protocol::Udp => (["udp", "udp6"], "07"),
        Protocol::Sctp => return Ok(Vec::new()),
    };
    let look = || {
        let mut found = Vec::new();
        for file in files {
            match File::open(format!("/proc/thread-self/net/{file}")) {
                Ok(file) => read(BufReader::new(file), protocol, state, &mut found)?,
                // A kernel without IPv6.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    };
    let looked = node.run(look).map_err(internal("look at the node's sockets"))?;
    looked.map_err(|error| {
        let message =
            "cannot inspect the node's sockets, so no host port can be assigned: check that /proc is mounted";
        Error::new(Reason::Internal, message).because(error)
    })
}

fn read(
    lines: impl io::BufRead,
    protocol: Protocol,
    state: &str,
    found: &mut Vec<SocketAddr>,
) -> io::Result<()> {
    for line in lines.lines().skip(1) {
        let line = line?;
        let mut words = line.split_ascii_whitespace();
        let (local, now) = (words.nth(1), words.nth(1));
        if now == Some(state) {
            found.extend(local.and_then(address));
        } else if protocol == Protocol::Tcp {
            // The kernel lists those that listen first, and there may be very many others.
            break;
        }
    }
    Ok(())
}

/// An address as the kernel prints it: words of 32 bits in hexadecimal, each as it is in memory, and the
/// port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = [0; 16];
    let words = ip.len() / 8;
    for (place, word) in bytes.chunks_exact_mut(4).enumerate().take(words) {
        let text = ip.get(place * 8..place * 8 + 8)?;
        word.copy_from_slice(&u32::from_str_radix(text, 16).ok()?.to_ne_bytes());
    }
    let ip: IpAddr = match words {
        1 => <[u8; 4]>::try_from(&bytes[..4]).ok()?.into(),
        4 => bytes.into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_udp_client_that_is_connected_is_no_listener_and_one_that_is_bound_is() {
        let header = "sl  local_address rem_address   st tx_queue rx_queue";
        let lines = [
            header,
            "1: 0100007F:0035 00000000:0000 07 00000000:00000000",
            "2: 0702A8C0:C001 0102A8C0:0035 01 00000000:00000000",
            "3: 00000000:CA6C 00000000:0000 07 00000000:00000000",
        ];
        let text = lines.join("\n");
        let mut found = Vec::new();
        read(text.as_bytes(), Protocol::Udp, "07", &mut found).expect("read");
        let ports: Vec<u16> = found.iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [53, 51820], "not the port of a question that waits for its answer");
    }

    #[test]
    fn whom_a_host_port_would_take_something_from() {
        let ip = |text: &str| -> IpAddr { text.parse().expect("an address") };
        for (program, pod, host, takes) in [
            ("0.0.0.0", "10.0.0.1", None, true),
            ("::", "10.0.0.1", None, true),
            ("::", "fd00::1", None, true),
            ("127.0.0.53", "10.0.0.1", None, false),
            ("::ffff:127.0.0.1", "10.0.0.1", None, false),
            ("::1", "fd00::1", None, false),
            ("127.0.0.1", "10.0.0.1", Some("0.0.0.0"), false),
            ("192.0.2.1", "10.0.0.1", None, true),
            ("::ffff:192.0.2.1", "10.0.0.1", None, true),
            ("192.0.2.1", "fd00::1", None, false),
            ("192.0.2.1", "10.0.0.1", Some("0.0.0.0"), true),
            ("192.0.2.1", "10.0.0.1", Some("192.0.2.2"), false),
            ("192.0.2.1", "10.0.0.1", Some("192.0.2.1"), true),
            ("0.0.0.0", "10.0.0.1", Some("192.0.2.1"), true),
            ("0.0.0.0", "10.0.0.1", Some("fd00::2"), false),
            ("fd00::2", "fd00::1", Some("fd00::2"), true),
        ] {
            let found = answers_for(ip(program), ip(pod), host.map(ip));
            assert_eq!(found, takes, "{program} {pod} {host:?}");
        }
    }
}
