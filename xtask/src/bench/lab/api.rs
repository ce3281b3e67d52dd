//! Load on the lab's API over plain HTTP connections.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// Connections that write, and how many objects each writes.
pub const WRITERS: usize = 8;
const OBJECTS: usize = 400;
/// Connections that watch.
pub const WATCHES: usize = 20;
/// Who hears nothing for this long has been forgotten.
const SILENCE: Duration = Duration::from_secs(30);

/// How much was done in which time.
pub struct Load {
    pub count: usize,
    pub time: Duration,
}

impl Load {
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64()
    }
}

/// Pods are created and their statuses patched, by several writers at once, each on a connection of its own
/// that waits for each answer: a write is one request, with all that the API does about one (decoding,
/// defaults, validation, `managedFields`, log, answer) and all that follows from it in the lab, whose
/// controllers and agents watch. The pods belong to a node that is not there, so that nobody runs them.
pub fn writes(host: &str) -> Result<Load> {
    let started = Instant::now();
    each_writer(host, |client, writer, index| {
        let pods = "/api/v1/namespaces/default/pods";
        let name = format!("bench-{writer}-{index}");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name,
            "labels": {"app": "bench"}},
            "spec": {"nodeName": "nowhere", "containers": [{"name": "c", "image": "bench:1",
                "ports": [{"containerPort": 80}]}]}});
        client.send("POST", pods, "application/json", &pod, 201)?;
        let status = json!({"status": {"phase": "Running", "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}]}});
        client.send(
            "PATCH",
            &format!("{pods}/{name}/status"),
            "application/strategic-merge-patch+json",
            &status,
            200,
        )
    })?;
    Ok(Load { count: WRITERS * OBJECTS * 2, time: started.elapsed() })
}

/// ConfigMaps are created by several writers, and seen by many watches.
pub fn events(host: &str) -> Result<Load> {
    let path = "/api/v1/namespaces/default/configmaps";
    let watches = (0..WATCHES).map(|_| watch(host, path)).collect::<Result<Vec<JoinHandle<Result<()>>>>>()?;
    let started = Instant::now();
    each_writer(host, |client, writer, index| {
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": "v"},
            "metadata": {"name": format!("bench-{writer}-{index}")}});
        client.send("POST", path, "application/json", &object, 201)
    })?;
    for watch in watches {
        watch.join().map_err(|_| anyhow::anyhow!("a watch failed"))??;
    }
    Ok(Load { count: WRITERS * OBJECTS * WATCHES, time: started.elapsed() })
}

fn each_writer(host: &str, write: impl Fn(&mut Client, usize, usize) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let write = &write;
                scope.spawn(move || {
                    let mut client = Client::connect(host)?;
                    (0..OBJECTS).try_for_each(|index| write(&mut client, writer, index))
                })
            })
            .collect();
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().map_err(|_| anyhow::anyhow!("a writer failed"))?)
    })
}

/// Begins a watch; the thread ends when it has seen every object.
fn watch(host: &str, path: &str) -> Result<JoinHandle<Result<()>>> {
    let mut client = Client::connect(host)?;
    write!(client.stream.get_mut(), "GET {path}?watch=1&resourceVersion=0 HTTP/1.1\r\nHost: {host}\r\n\r\n")?;
    ensure!(client.head()?.0 == 200, "a watch was refused");
    Ok(thread::spawn(move || {
        let mut seen = 0;
        let mut last = 0;
        let mut buffer = vec![0; 256 * 1024];
        while seen < WRITERS * OBJECTS {
            let read = client.stream.read(&mut buffer).context("a watch is silent")?;
            if read == 0 {
                bail!("a watch ended after {seen} events");
            }
            // Each event is an object and a newline; those between chunks follow no brace.
            for byte in &buffer[..read] {
                seen += usize::from(*byte == b'\n' && last == b'}');
                last = *byte;
            }
        }
        Ok(())
    }))
}

/// One connection, kept open.
struct Client {
    stream: BufReader<TcpStream>,
    host: String,
}

impl Client {
    fn connect(host: &str) -> Result<Self> {
        let stream =
            TcpStream::connect(host).with_context(|| format!("the API at {host} does not answer"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        Ok(Self { stream: BufReader::with_capacity(64 * 1024, stream), host: host.to_owned() })
    }

    fn send(&mut self, method: &str, path: &str, media: &str, body: &Value, wanted: u16) -> Result<()> {
        let body = body.to_string();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {media}\r\nContent-Length: \
             {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let (code, length) = self.head()?;
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer)?;
        ensure!(
            code == wanted,
            "{method} {path} was answered with {code}: {}",
            String::from_utf8_lossy(&answer)
        );
        Ok(())
    }

    /// The status of an answer, and the length of its body.
    fn head(&mut self) -> Result<(u16, usize)> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let code = line.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP answer")?;
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(':') else { return Ok((code, length)) };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().context("a wrong content-length")?;
            }
        }
    }
}
