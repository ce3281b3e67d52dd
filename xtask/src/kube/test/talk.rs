//! Traffic of pods from threads of this program in the pods' own network namespaces: no tool is needed in any
//! image, and every exchange is counted.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use knit_kernel::NetNs;

/// How long an answer may take before it counts as lost.
pub const WAIT: Duration = Duration::from_secs(3);
/// The pause between two exchanges.
const PACE: Duration = Duration::from_millis(10);
/// Fewer exchanges than this prove nothing.
const ENOUGH: u64 = 20;

/// How a client talks to agnhost's `netexec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// A TCP connection for each exchange.
    Connections,
    /// One TCP connection, with numbered exchanges.
    Stream,
    /// Numbered datagrams, of which nothing repeats a lost one.
    Datagrams,
}

/// A client that talks until it is told to stop.
#[derive(Clone, Debug)]
pub struct Flow {
    pub to: SocketAddr,
    pub how: How,
}

/// What became of a flow.
#[derive(Debug, Default)]
struct Count {
    done: u64,
    lost: Vec<String>,
}

/// All three ways to the same place.
pub fn all_ways(to: SocketAddr) -> Vec<Flow> {
    [How::Connections, How::Stream, How::Datagrams].map(|how| Flow { to, how }).into()
}

/// Does `meanwhile` while all flows go on, and fails if one of them lost anything.
pub fn none_lost<T>(from: &NetNs, flows: &[Flow], meanwhile: impl FnOnce() -> Result<T>) -> Result<T> {
    std::thread::scope(|scope| {
        let start = |flow: &Flow| {
            let (flow, (stop, stopped)) = (flow.clone(), mpsc::channel::<()>());
            let talking = scope.spawn(move || from.run(move || talk(&flow, &stopped)));
            (stop, talking)
        };
        let threads: Vec<_> = flows.iter().map(start).collect();
        let result = meanwhile();
        let (stops, threads): (Vec<_>, Vec<_>) = threads.into_iter().unzip();
        drop(stops);
        let mut problems = Vec::new();
        for (flow, thread) in flows.iter().zip(threads) {
            let count = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let what = format!("{:?} to {}", flow.how, flow.to);
            if let Some(first) = count.lost.first() {
                problems.push(format!("{what}: {} of {} lost, first: {first}", count.lost.len(), count.done));
            } else if count.done < ENOUGH {
                problems.push(format!("{what}: only {} exchanges were made", count.done));
            }
        }
        let result = result?;
        ensure!(problems.is_empty(), "{}", problems.join("; "));
        Ok(result)
    })
}

/// Exchanges of the slowest kind, so many that flows that go on meanwhile have made enough.
pub fn for_a_while(from: &NetNs, to: SocketAddr) -> Result<()> {
    let exchanges = || {
        let mut stream = None;
        (0..3 * ENOUGH).try_for_each(|number| next_of(&mut stream, to, number).map(drop))
    };
    from.run(exchanges)?.with_context(|| format!("the stream to {to} broke"))
}

/// Talks until the other end of the channel is gone.
fn talk(flow: &Flow, stopped: &Receiver<()>) -> Count {
    let mut count = Count::default();
    let mut stream = None;
    loop {
        let number = count.done;
        let exchanged = match flow.how {
            How::Connections => http_get(flow.to, &format!("/echo?msg={number}")),
            How::Stream => next_of(&mut stream, flow.to, number),
            How::Datagrams => datagram(flow.to, number),
        };
        match exchanged {
            Ok(answer) if answer == number.to_string() => {}
            Ok(answer) => count.lost.push(format!("{answer:?} came in place of {number}")),
            Err(error) => count.lost.push(format!("exchange {number}: {error}")),
        }
        count.done += 1;
        // A connection that broke cannot go on, and one loss is enough to fail.
        if flow.how == How::Stream && !count.lost.is_empty() {
            return count;
        }
        match stopped.recv_timeout(PACE) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return count,
        }
    }
}

fn next_of(stream: &mut Option<BufReader<TcpStream>>, to: SocketAddr, number: u64) -> io::Result<String> {
    let stream = match stream {
        Some(stream) => stream,
        none => none.insert(BufReader::new(connect(to)?)),
    };
    write!(stream.get_mut(), "GET /echo?msg={number} HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(String::from_utf8_lossy(&body).into_owned())
}

fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, WAIT)?;
    stream.set_read_timeout(Some(WAIT))?;
    stream.set_write_timeout(Some(WAIT))?;
    Ok(stream)
}

fn http_get(to: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = connect(to)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.trim().to_owned());
    body.ok_or_else(|| io::Error::other("no HTTP answer"))
}

fn datagram(to: SocketAddr, number: u64) -> io::Result<String> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    exchange(&socket, to, format!("echo {number}").as_bytes())
        .map(|answer| String::from_utf8_lossy(&answer).trim().to_owned())
}

fn exchange(socket: &UdpSocket, to: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    socket.set_read_timeout(Some(WAIT))?;
    socket.send_to(question, to)?;
    let mut answer = vec![0; 1500];
    let (length, _) = socket.recv_from(&mut answer)?;
    answer.truncate(length);
    Ok(answer)
}

/// What agnhost says over HTTP, if anything.
pub fn http(from: &NetNs, to: SocketAddr, path: &str) -> Result<Option<String>> {
    Ok(from.run(|| http_get(to, path))?.ok())
}

/// The same over UDP.
pub fn udp(from: &NetNs, to: SocketAddr) -> Result<Option<String>> {
    let asked = from.run(|| exchange(&UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?, to, b"hostname"))?;
    Ok(asked.ok().map(|answer| String::from_utf8_lossy(&answer).trim().to_owned()))
}

/// Whether somebody is there: connects, or is refused by whom it asked.
pub fn answers(from: &NetNs, to: SocketAddr) -> Result<bool> {
    let tried = from.run(|| TcpStream::connect_timeout(&to, WAIT))?;
    Ok(tried.map_or_else(|error| error.kind() == io::ErrorKind::ConnectionRefused, |_| true))
}

/// The addresses of a name, as the cluster's DNS tells them to a client there; none if it knows none.
pub fn look_up(from: &NetNs, server: IpAddr, name: &str) -> Result<Vec<Ipv4Addr>> {
    let answer = from.run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        exchange(&socket, SocketAddr::new(server, 53), &question(name))
    })?;
    let answer = answer.with_context(|| format!("the DNS server {server} did not answer for {name}"))?;
    read_answer(&answer).with_context(|| format!("what the DNS server says of {name}"))
}

/// A question for A records: number, "recursion desired", one question.
fn question(name: &str) -> Vec<u8> {
    let mut bytes = vec![0x4b, 0x6e, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        bytes.push(u8::try_from(label.len()).unwrap_or(u8::MAX));
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

fn read_answer(bytes: &[u8]) -> Result<Vec<Ipv4Addr>> {
    let u16_at = |at: usize| -> Result<usize> {
        let bytes = bytes.get(at..at + 2).context("it is cut off")?;
        Ok(usize::from(u16::from_be_bytes([bytes[0], bytes[1]])))
    };
    // A name ends with an empty label, or with two bytes that point elsewhere.
    let behind_name = |mut at: usize| -> Result<usize> {
        loop {
            match bytes.get(at).context("it is cut off")? {
                0 => return Ok(at + 1),
                length if *length >= 0xc0 => return Ok(at + 2),
                length => at += usize::from(*length) + 1,
            }
        }
    };
    if u16_at(2)? & 0xf == 3 {
        return Ok(Vec::new());
    }
    let (code, questions, answers) = (u16_at(2)? & 0xf, u16_at(4)?, u16_at(6)?);
    if code != 0 {
        bail!("it failed with code {code}");
    }
    let mut at = 12;
    for _ in 0..questions {
        at = behind_name(at)? + 4;
    }
    let mut found = Vec::new();
    for _ in 0..answers {
        at = behind_name(at)?;
        let (kind, length) = (u16_at(at)?, u16_at(at + 8)?);
        let data = bytes.get(at + 10..at + 10 + length).context("it is cut off")?;
        if let (1, Ok(octets)) = (kind, <[u8; 4]>::try_from(data)) {
            found.push(octets.into());
        }
        at += 10 + length;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read() {
        let mut bytes = question("web.red.svc.cluster.local");
        (bytes[2], bytes[3], bytes[7]) = (0x84, 0, 2);
        for last in [1, 2] {
            bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 77, 0, last]);
        }
        let found = read_answer(&bytes).unwrap();
        assert_eq!(found, [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)]);
        for length in 12..bytes.len() {
            assert!(read_answer(&bytes[..length]).is_err(), "cut at {length}");
        }
        bytes[3] = 3;
        assert_eq!(read_answer(&bytes).unwrap(), Vec::<Ipv4Addr>::new());
    }

    #[test]
    fn what_is_lost_is_counted() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let flow = Flow { to: server.local_addr().unwrap(), how: How::Datagrams };
        for (answer, lost) in [(&b"0"[..], 0), (b"1", 1)] {
            // Nobody holds the other end, so it stops after one exchange.
            let (_, stopped) = mpsc::channel();
            let flow = flow.clone();
            let count = std::thread::scope(|scope| {
                let talking = scope.spawn(move || talk(&flow, &stopped));
                let mut question = [0; 64];
                let (length, from) = server.recv_from(&mut question).unwrap();
                assert_eq!(&question[..length], b"echo 0");
                server.send_to(answer, from).unwrap();
                talking.join().unwrap()
            });
            assert_eq!((count.done, count.lost.len()), (1, lost), "{count:?}");
        }
    }
}
