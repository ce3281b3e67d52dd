//! Traffic between two namespaces: one-byte exchanges, short connections, datagrams, and a stream.
//!
//! One thread is the client and one the server, each in its namespace. Both block in the kernel between
//! packets, as ordinary programs do.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use knit_kernel::NetNs;

use super::cpu::{Cpu, SoftIrqThreads};

/// A lost packet ends the benchmark with an error instead of a hang.
const PACKET_TIMEOUT: Duration = Duration::from_secs(5);
/// What one write of a stream carries.
const CHUNK: usize = 128 << 10;

/// What is sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Ord, PartialOrd)]
pub enum Load {
    /// One byte there and back on an open TCP connection.
    Exchange,
    /// A TCP connection that is opened, carries one byte each way, and is closed.
    Connect,
    /// One byte there and back between two open UDP sockets.
    Datagram,
    /// As many bytes as one TCP connection carries.
    Stream,
}

/// What one round of a load came to.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// The median time of an exchange or a connection in microseconds; of a stream, Gbit/s.
    pub value: f64,
    /// The CPU time of both ends and of all in between for one exchange or connection, in microseconds; of a
    /// stream, for 64 KiB.
    pub cpu: f64,
}

/// A client and a server between which packets go.
pub struct Ends<'a> {
    pub client: &'a NetNs,
    pub server: &'a NetNs,
    /// Where the client sends to.
    pub to: SocketAddr,
    /// Where the server listens: another port than `to` has if a service is in between.
    pub port: u16,
    pub threads: &'a SoftIrqThreads,
}

impl Ends<'_> {
    /// One round, of about `count` exchanges.
    pub fn round(&self, load: Load, count: usize) -> Result<Round> {
        let round = match load {
            Load::Exchange => self.exchange(count),
            Load::Connect => self.connect(count),
            Load::Datagram => self.datagram(count),
            Load::Stream => self.stream(count),
        };
        round.with_context(|| format!("{load:?} to {}", self.to))
    }

    fn any(&self) -> IpAddr {
        if self.to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    }

    fn listen(&self) -> Result<TcpListener> {
        let at = SocketAddr::new(self.any(), self.port);
        Ok(self.server.run(move || TcpListener::bind(at))??)
    }

    fn dial(&self) -> Result<TcpStream> {
        let to = self.to;
        let stream = self.client.run(move || TcpStream::connect_timeout(&to, PACKET_TIMEOUT))??;
        prepare(&stream)?;
        Ok(stream)
    }

    fn exchange(&self, count: usize) -> Result<Round> {
        let listener = self.listen()?;
        let server = spawn(move || {
            let (mut stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            echo(&mut stream)
        });
        let mut stream = self.dial()?;
        let round = timed(self.threads, count, || byte(&mut stream))?;
        drop(stream);
        joined(server)?;
        Ok(round)
    }

    fn connect(&self, count: usize) -> Result<Round> {
        let listener = self.listen()?;
        let server = spawn(move || {
            for _ in 0..count + count / 10 {
                let (mut stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                echo(&mut stream)?;
            }
            Ok(())
        });
        let (to, threads) = (self.to, self.threads);
        // In one visit: entering a namespace is not what is measured.
        let round = self.client.run(move || {
            timed(threads, count, || {
                let mut stream = TcpStream::connect_timeout(&to, PACKET_TIMEOUT)?;
                prepare(&stream)?;
                byte(&mut stream)
            })
        })??;
        joined(server)?;
        Ok(round)
    }

    fn datagram(&self, count: usize) -> Result<Round> {
        let (any, port, to) = (self.any(), self.port, self.to);
        let listener = self.server.run(move || UdpSocket::bind((any, port)))??;
        listener.set_read_timeout(Some(PACKET_TIMEOUT))?;
        let server = spawn(move || {
            let mut buffer = [0; 16];
            for _ in 0..count + count / 10 {
                let (size, from) = listener.recv_from(&mut buffer)?;
                listener.send_to(&buffer[..size], from)?;
            }
            Ok(())
        });
        let client = self.client.run(move || {
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(to)?;
            io::Result::Ok(socket)
        })??;
        client.set_read_timeout(Some(PACKET_TIMEOUT))?;
        let mut buffer = [0; 16];
        let round = timed(self.threads, count, || {
            client.send(b"x")?;
            client.recv(&mut buffer).map(drop)
        })?;
        joined(server)?;
        Ok(round)
    }

    fn stream(&self, chunks: usize) -> Result<Round> {
        let listener = self.listen()?;
        let server = spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let mut buffer = vec![0; CHUNK];
            while stream.read(&mut buffer)? > 0 {}
            stream.write_all(b"x")
        });
        let mut stream = self.dial()?;
        let data = vec![0; CHUNK];
        // The window opens first.
        for _ in 0..chunks / 10 {
            stream.write_all(&data)?;
        }
        let (cpu, begin) = (Cpu::now(self.threads)?, Instant::now());
        for _ in 0..chunks {
            stream.write_all(&data)?;
        }
        stream.shutdown(std::net::Shutdown::Write)?;
        stream.read_exact(&mut [0])?;
        let (cpu, time) = (cpu.since(self.threads)?, begin.elapsed().as_secs_f64());
        joined(server)?;
        let bytes = (chunks * CHUNK) as f64;
        Ok(Round { value: bytes * 8.0 / time / 1e9, cpu: cpu * 65_536.0 / bytes })
    }
}

/// Runs `once` a tenth of `count` times to warm up, then `count` times under the clock.
fn timed(threads: &SoftIrqThreads, count: usize, mut once: impl FnMut() -> io::Result<()>) -> Result<Round> {
    for _ in 0..count / 10 {
        once()?;
    }
    let mut times = Vec::with_capacity(count);
    let cpu = Cpu::now(threads)?;
    for _ in 0..count {
        let begin = Instant::now();
        once()?;
        times.push(begin.elapsed());
    }
    let cpu = cpu.since(threads)? / count as f64;
    times.sort();
    Ok(Round { value: times[count / 2].as_secs_f64() * 1e6, cpu })
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PACKET_TIMEOUT))
}

fn byte(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"x")?;
    stream.read_exact(&mut [0])
}

/// Sends back what comes until the other side closes.
fn echo(stream: &mut TcpStream) -> io::Result<()> {
    let mut buffer = [0; 16];
    loop {
        let size = stream.read(&mut buffer)?;
        if size == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..size])?;
    }
}

fn spawn(serve: impl FnOnce() -> io::Result<()> + Send + 'static) -> JoinHandle<io::Result<()>> {
    thread::spawn(serve)
}

fn joined(server: JoinHandle<io::Result<()>>) -> Result<()> {
    server.join().map_err(|_| anyhow!("the server panicked"))?.context("the server")
}
