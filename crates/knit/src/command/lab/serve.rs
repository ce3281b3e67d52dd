//! `knit lab serve`: the built-in server of pods, HTTP and UDP echo. Who asks learns who answered.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::process::ExitCode;

use anyhow::{Context as _, Result};

/// The built-in server of pods
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Serve HTTP on this port
    #[arg(long, value_name = "PORT")]
    http: Vec<u16>,

    /// Echo datagrams sent to this port
    #[arg(long, value_name = "PORT")]
    udp: Vec<u16>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut threads = Vec::new();
    for port in &args.http {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port))
            .with_context(|| format!("cannot listen on TCP port {port}: is it in use?"))?;
        threads.push(std::thread::spawn(move || serve_http(&listener)));
    }
    for port in &args.udp {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, *port))
            .with_context(|| format!("cannot listen on UDP port {port}: is it in use?"))?;
        threads.push(std::thread::spawn(move || echo(&socket)));
    }
    println!("serving HTTP on {:?} and UDP echo on {:?}", args.http, args.udp);
    for thread in threads {
        let _ = thread.join();
    }
    // A pod that serves nothing stays all the same.
    loop {
        std::thread::park();
    }
}

fn serve_http(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || {
            // Who went away in the middle does not want an answer.
            let _ = answer(&stream);
        });
    }
}

fn answer(mut stream: &TcpStream) -> std::io::Result<()> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 && line != "\r\n" && line != "\n" {
        line.clear();
    }
    let of = |name: &str| std::env::var(name).unwrap_or_default();
    let body =
        format!("{}/{} on {}, asked by {peer}\n", of("POD_NAMESPACE"), of("POD_NAME"), of("NODE_NAME"));
    println!("asked by {peer}");
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n{body}",
        body.len()
    )
}

fn echo(socket: &UdpSocket) {
    let mut buffer = [0; 65536];
    loop {
        // An unreachable sender shows as an error of the next call; it is no reason to stop.
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}
