//! Ports that cannot be opened yet.

use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use tokio::net::TcpListener;

/// How long to wait before a port is tried again.
pub const OPEN_RETRY_DELAY: Duration = Duration::from_secs(5);

/// Opens a port by `open`, again and again every few seconds until it can be opened: somebody else may let go
/// of it, an interface may get the address. `failed` is told of each failure, and says whether to go on.
///
/// # Errors
/// The failure after which `failed` did not want to go on.
pub async fn open_patiently(
    open: impl Fn() -> io::Result<std::net::TcpListener>,
    mut failed: impl FnMut(&io::Error) -> ControlFlow<()>,
) -> io::Result<TcpListener> {
    loop {
        let opened = open().and_then(|listener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        });
        match opened {
            Err(error) if failed(&error).is_continue() => {}
            other => return other,
        }
        tokio::time::sleep(OPEN_RETRY_DELAY).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_port_that_comes_free_is_opened_and_one_that_cannot_be_had_is_told() {
        let left = Cell::new(3);
        let open = || {
            if left.replace(left.get() - 1) > 0 {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        };
        let mut told = 0;
        let opened = open_patiently(open, |_| {
            told += 1;
            ControlFlow::Continue(())
        });
        assert!(opened.await.is_ok());
        assert_eq!(told, 3);
        let refused = || Err(io::ErrorKind::PermissionDenied.into());
        let never = open_patiently(refused, |_| ControlFlow::Break(())).await;
        assert_eq!(never.map(drop).map_err(|error| error.kind()), Err(io::ErrorKind::PermissionDenied));
    }
}
