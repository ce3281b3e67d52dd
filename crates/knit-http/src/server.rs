//! The server: takes connections as far as there is room, and answers.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::answer::Answer;
use crate::guests::{Guest, Guests};
use crate::limits::Limits;

/// How long to wait when connections cannot be accepted, as without file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// The most that a client may say.
const REQUEST: usize = 16 << 10;

/// What a client is told.
pub type Reply = Response<Full<Bytes>>;

/// What a client wants to know.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// How it asks.
    pub method: &'a Method,
    /// What it asks for.
    pub path: &'a str,
    /// The address of ours that it called.
    pub to: SocketAddr,
}

/// What comes a little later.
pub type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Answers by path, and only to GET and HEAD.
pub fn only_get(answer: impl Fn(&str) -> Answer) -> impl Fn(Asked<'_>) -> Ready<Reply> {
    move |asked| {
        ready(match *asked.method {
            Method::GET | Method::HEAD => answer(asked.path).into(),
            _ => Answer::only_get().into(),
        })
    }
}

/// The same where an answer must be waited for.
pub fn only_get_later(answer: impl Fn(&str) -> Later<Answer>) -> impl Fn(Asked<'_>) -> Later<Reply> {
    move |asked| match *asked.method {
        Method::GET | Method::HEAD => {
            let answer = answer(asked.path);
            Box::pin(async move { answer.await.into() })
        }
        _ => Box::pin(ready(Answer::only_get().into())),
    }
}

/// Serves every client that there is room for, until the listener fails for good. Who is too many finds the
/// connection closed. Dropping it ends all connections.
pub async fn serve<F>(
    listener: TcpListener,
    guests: Arc<Guests>,
    answer: impl Fn(Asked<'_>) -> F + Send + Sync + 'static,
) -> io::Error
where
    F: Future<Output = Reply> + Send,
{
    let answer = Arc::new(answer);
    let mut connections = JoinSet::new();
    loop {
        let (stream, client) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return error,
            // The client went away, or there is no room: that passes.
            Err(error) => {
                tracing::debug!(%error, "cannot accept a client");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        let Ok(local) = stream.local_addr() else { continue };
        let Some(guest) = guests.admit(client.ip(), local.ip()) else { continue };
        let (answer, limits) = (Arc::clone(&answer), *guests.limits());
        connections.spawn(async move {
            serve_one(stream, (client, local), guest, &limits, &*answer).await;
        });
    }
}

async fn serve_one<F: Future<Output = Reply>>(
    stream: TcpStream,
    (client, local): (SocketAddr, SocketAddr),
    mut guest: Guest,
    limits: &Limits,
    answer: &(impl Fn(Asked<'_>) -> F + Send + Sync),
) {
    let service = service_fn(|request: Request<Incoming>| {
        let asked = Asked { method: request.method(), path: request.uri().path(), to: local };
        let reply = answer(asked);
        async move { Ok::<_, Infallible>(reply.await) }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.header).max_buf_size(REQUEST);
    server.keep_alive(limits.lifetime.is_none());
    let served = server.serve_connection(TokioIo::new(stream), service);
    let too_long = async {
        match limits.lifetime {
            Some(lifetime) => tokio::time::sleep(lifetime).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        served = served => if let Err(error) = served {
            tracing::debug!(%error, "a client was not served");
        },
        () = too_long => tracing::debug!(%client, "a client took too long"),
        () = guest.sent_away() => tracing::debug!(%client, "closed a connection of the client with \
        the most connections, to make room"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_reads_its_answer_kept_its_place() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let to = listener.local_addr().expect("an address");
        let guests = Arc::new(Guests::new(Limits::PROBES, || {}));
        // More than the kernel keeps for a client.
        let body = Bytes::from(vec![b'x'; 64 << 20]);
        let answer = only_get(move |_: &str| Answer::ok(body.clone()));
        let serving = tokio::spawn(serve(listener, Arc::clone(&guests), answer));
        let mut client = TcpStream::connect(to).await.expect("connected");
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("asked");
        client.readable().await.expect("it is answered");
        assert_eq!(guests.of_the_node(), 1);
        let gone = async {
            while guests.of_the_node() > 0 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), gone).await.expect("its place is free again");
        serving.abort();
    }
}
