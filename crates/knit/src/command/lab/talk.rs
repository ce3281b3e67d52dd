//! `knit lab ask` and `knit lab stream`: small clients for pods.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;

/// Ask an HTTP server
#[derive(Debug, clap::Args)]
pub struct AskArgs {
    /// The address and port of the server
    #[arg(value_name = "ADDRESS:PORT")]
    to: SocketAddr,

    /// Number of requests
    #[arg(long, default_value_t = 1)]
    count: u32,

    /// How long to wait for an answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    timeout: u64,
}

/// Send numbered datagrams to an echo server
#[derive(Debug, clap::Args)]
pub struct StreamArgs {
    /// The address and port of the server
    #[arg(value_name = "ADDRESS:PORT")]
    to: SocketAddr,

    /// How long to send, in milliseconds [default: until standard input ends]
    #[arg(long, value_name = "MS")]
    run_for: Option<u64>,

    /// The interval between two datagrams, in microseconds
    #[arg(long, value_name = "US", default_value_t = 1000)]
    every: u64,
}

/// Stragglers are waited for this long, on a machine that is out of breath; where there are none, not at all.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the receiver looks whether more is sent.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(50);
/// How many were sent, while nobody knows.
const NOT_YET: u64 = u64::MAX;

pub fn ask(args: &AskArgs) -> Result<ExitCode> {
    let timeout = Duration::from_millis(args.timeout);
    let mut answered = 0;
    for _ in 0..args.count {
        match ask_once(args.to, timeout) {
            Ok(body) => {
                answered += 1;
                print!("{body}");
            }
            Err(error) => {
                eprintln!("{}: {error}", args.to);
                break;
            }
        }
    }
    Ok(if answered == args.count { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn ask_once(to: SocketAddr, timeout: Duration) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

/// Sends at an even pace, receives on another thread, and prints what is missing.
pub fn stream(args: &StreamArgs) -> Result<ExitCode> {
    let any: IpAddr =
        if args.to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).context("cannot open a UDP socket")?;
    socket.connect(args.to).with_context(|| format!("cannot send to {}", args.to))?;
    socket.set_read_timeout(Some(RECEIVE_TIMEOUT)).context("cannot set a timeout on the socket")?;
    let receiver = socket.try_clone().context("cannot share the socket")?;
    let all = Arc::new(AtomicU64::new(NOT_YET));
    let total = Arc::clone(&all);
    let receiving = std::thread::spawn(move || receive(&receiver, &total));

    let stop = Arc::new(AtomicBool::new(false));
    if args.run_for.is_none() {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        });
    }
    let end = args.run_for.map(|ms| Instant::now() + Duration::from_millis(ms));
    let every = Duration::from_micros(args.every.max(50));
    let mut sent = 0_u64;
    let mut refused = 0_u64;
    while !stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end) {
        if socket.send(&sent.to_be_bytes()).is_err() {
            refused += 1;
        }
        sent += 1;
        // Who was late does not catch up: a burst could be more than the other side's buffer takes.
        std::thread::park_timeout(every);
    }
    all.store(sent, Ordering::Relaxed);
    let (seen, gap) = receiving.join().map_err(|_| anyhow::anyhow!("the receiving thread failed"))?;
    let missing: Vec<u64> = (0..sent).filter(|number| !seen.contains(number)).collect();
    let report = json!({
        "sent": sent, "received": seen.len(), "lost": missing.len(), "refused": refused,
        "first_lost": missing.iter().take(10).collect::<Vec<_>>(), "longest_gap_ms": gap.as_millis(),
    });
    println!("{report}");
    Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Which numbers came back, and the longest silence between two of them.
fn receive(socket: &UdpSocket, total: &AtomicU64) -> (std::collections::BTreeSet<u64>, Duration) {
    let mut seen = std::collections::BTreeSet::new();
    let mut gap = Duration::ZERO;
    let mut last: Option<Instant> = None;
    let mut ended: Option<Instant> = None;
    let mut buffer = [0; 64];
    loop {
        if let Ok(8) = socket.recv(&mut buffer) {
            let mut number = [0; 8];
            number.copy_from_slice(&buffer[..8]);
            seen.insert(u64::from_be_bytes(number));
            let now = Instant::now();
            gap = gap.max(last.map_or(Duration::ZERO, |last| now - last));
            last = Some(now);
        }
        // Nothing for a while is the end, if no more is sent. A refusal shows as an error as well, and is no
        // end.
        let total = total.load(Ordering::Relaxed);
        if total == NOT_YET {
            continue;
        }
        let quiet_since = last.max(Some(*ended.get_or_insert_with(Instant::now)));
        if seen.len() as u64 >= total
            || quiet_since.is_some_and(|since| since.elapsed() >= LAST_ANSWER_TIMEOUT)
        {
            return (seen, gap);
        }
    }
}
