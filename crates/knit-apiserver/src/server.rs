//! The server: listens on a TCP address, and on a Unix socket where one is asked for, until it is shut down.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::exec::Exec;
use super::http::{Served, handle};
use super::kinds::CrdError;
use super::store::{Store, StoreOptions};

/// How the server is set up.
#[derive(Clone)]
pub struct Config {
    /// Where to listen; port 0 for any free one.
    pub listen: SocketAddr,
    /// A Unix socket to listen on as well. A file that is there is replaced.
    pub unix_socket: Option<PathBuf>,
    /// The store.
    pub store: StoreOptions,
    /// Where the output of pods goes, if somebody runs them: see [`super::log`].
    pub logs: Option<PathBuf>,
    /// Who runs commands in pods, if anybody does.
    pub exec: Option<Arc<dyn Exec>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            unix_socket: None,
            store: StoreOptions::default(),
            logs: None,
            exec: None,
        }
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A CRD cannot be served.
    #[error("the embedded API cannot serve a CustomResourceDefinition")]
    Crd(#[from] CrdError),
    /// The address is taken, or not ours.
    #[error(
        "the embedded API cannot listen on {address}; choose another address, or port 0 for any free port"
    )]
    Listen {
        /// Which address.
        address: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// The embedded API.
#[derive(Debug)]
pub struct Server;

/// A running server. Dropping it stops the server too.
#[derive(Debug)]
pub struct Handle {
    /// Where it listens.
    pub addr: SocketAddr,
    store: Store,
    handed: mpsc::UnboundedSender<TcpStream>,
    stop: watch::Sender<bool>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Server {
    /// Makes a store and serves it. Must be called within a tokio runtime.
    pub async fn start(config: Config) -> Result<Handle, StartError> {
        let store = Store::new(&config.store)?;
        Self::serve(store, &config).await
    }

    /// Serves a store that is there already; `config.store` is not looked at.
    pub async fn serve(store: Store, config: &Config) -> Result<Handle, StartError> {
        let refused = |address: String| move |source| StartError::Listen { address, source };
        let tcp = TcpListener::bind(config.listen).await.map_err(refused(config.listen.to_string()))?;
        let addr = tcp.local_addr().map_err(refused(config.listen.to_string()))?;
        let unix = match &config.unix_socket {
            Some(path) => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(refused(path.display().to_string())(error));
                    }
                    _ => {}
                }
                Some(UnixListener::bind(path).map_err(refused(path.display().to_string()))?)
            }
            None => None,
        };
        let (stop, stopped) = watch::channel(false);
        let (handed, connections) = mpsc::unbounded_channel();
        let served = Served { store: store.clone(), logs: config.logs.clone(), exec: config.exec.clone() };
        let task = tokio::spawn(accept(served, tcp, unix, connections, stopped));
        Ok(Handle { addr, store, handed, stop, task: Some(task) })
    }
}

impl Handle {
    /// The store, for use in process.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// A kubeconfig for `kubectl --kubeconfig`.
    pub fn kubeconfig(&self) -> String {
        kubeconfig(&self.url())
    }

    /// Serves a connection that was accepted elsewhere, such as in another network namespace. Must be called
    /// within a tokio runtime.
    pub fn serve_connection(&self, stream: std::net::TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        // A server that is stopping closes what it is handed, as it does with all others.
        let _ = self.handed.send(TcpStream::from_std(stream)?);
        Ok(())
    }

    /// Stops the server: connections are closed, watches end.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        if let Some(task) = self.task.take()
            && let Err(error) = task.await
        {
            tracing::warn!(%error, "the embedded API did not stop cleanly");
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// A kubeconfig for a URL.
pub fn kubeconfig(url: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: knit-lab\n  cluster:\n    server: {url}\nusers:\n- \
         name: knit-lab\n  \
         user: {{}}\ncontexts:\n- name: knit-lab\n  context:\n    cluster: knit-lab\n    user: knit-lab\n    \
         namespace: \
         default\ncurrent-context: knit-lab\n"
    )
}

async fn accept(
    served: Served,
    tcp: TcpListener,
    unix: Option<UnixListener>,
    mut handed: mpsc::UnboundedReceiver<TcpStream>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        let from_unix = async {
            match &unix {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = stopped.changed() => break,
            accepted = tcp.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve_tcp(served.clone(), stream))),
                Err(error) => tracing::warn!(%error, "a connection was not accepted"),
            },
            Some(stream) = handed.recv() => drop(connections.spawn(serve_tcp(served.clone(), stream))),
            accepted = from_unix => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve_connection(served.clone(), TokioIo::new(stream)));
                }
                Err(error) => tracing::warn!(%error, "a connection was not accepted"),
            },
            Some(_) = connections.join_next() => {}
        }
    }
    connections.shutdown().await;
}

async fn serve_tcp(served: Served, stream: TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
    serve_connection(served, TokioIo::new(stream)).await;
}

async fn serve_connection<T>(served: Served, io: TokioIo<T>)
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let served = served.clone();
        async move { Ok::<_, Infallible>(handle(served, request).await) }
    });
    let connection =
        http1::Builder::new().timer(TokioTimer::new()).serve_connection(io, service).with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection ended early");
    }
}
