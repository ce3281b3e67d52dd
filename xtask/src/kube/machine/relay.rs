//! The API server's port on this machine's loopback: a plain relay into the control plane's namespace.

use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;

use anyhow::{Context as _, Result};
use knit_kernel::NetNs;

use crate::kube::net::API_PORT;

/// Relays, forever. Where the port is taken it fails at once, and `cargo xtask kube kubectl` works without
/// it.
pub fn run(space: &NetNs) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, API_PORT))
        .with_context(|| format!("no relay: port {API_PORT} of this machine's loopback is not free"))?;
    // The listener stays outside; connections are made from inside.
    space.enter()?;
    for outside in listener.incoming() {
        let relayed = outside.and_then(|outside| {
            let inside = TcpStream::connect((Ipv4Addr::LOCALHOST, API_PORT))?;
            pump(outside.try_clone()?, inside.try_clone()?);
            pump(inside, outside);
            Ok(())
        });
        if let Err(error) = relayed {
            eprintln!("a connection was not relayed: {error}");
        }
    }
    Ok(())
}

/// Copies one direction, and passes the end on.
fn pump(mut from: TcpStream, mut to: TcpStream) {
    thread::spawn(move || {
        // A connection that breaks ends both ways, and there is nobody to tell.
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
}
