//! Servers that answer, and clients that notice who did.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use knit_kernel::netns::NetNs;

use crate::SOON;

/// A server on all IPv4 addresses of a namespace that says this and a newline, and then echoes.
pub fn serve(space: &NetNs, port: u16, says: &'static str) {
    let listener = space.run(|| TcpListener::bind(("0.0.0.0", port))).expect("in").expect("bound");
    answer(listener, format!("{says}\n"));
}

/// A server at this address of the test's own namespace that echoes.
pub fn serve_at(address: &str) {
    answer(TcpListener::bind(address).expect("bound"), String::new());
}

/// A thread for the listener, and one for each connection. They end with the test's process.
fn answer(listener: TcpListener, greeting: String) {
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let greeting = greeting.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                if stream.write_all(greeting.as_bytes()).is_err() {
                    return;
                }
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// A connection, and who answered.
pub fn connect(from: &NetNs, to: (&str, u16), wait: Duration) -> io::Result<(TcpStream, String)> {
    let target = SocketAddr::new(crate::ip(to.0), to.1);
    let mut stream = from.run(|| TcpStream::connect_timeout(&target, wait)).expect("in")?;
    stream.set_read_timeout(Some(SOON))?;
    let (mut name, mut byte) = (String::new(), [0]);
    loop {
        stream.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return Ok((stream, name));
        }
        name.push(char::from(byte[0]));
    }
}

/// Says something over a connection and hears it again.
pub fn echo(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"still here")?;
    let mut heard = [0; 10];
    stream.read_exact(&mut heard)?;
    assert_eq!(&heard, b"still here");
    Ok(())
}
