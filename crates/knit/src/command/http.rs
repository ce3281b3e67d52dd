//! Health and numbers over HTTP: where to listen.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;

/// Reads where to listen: an address and a port, or only a port for all addresses.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let all = if std::net::TcpListener::bind("[::]:0").is_ok() { "[::]" } else { "0.0.0.0" };
    let whole = if text.starts_with(':') { format!("{all}{text}") } else { text.to_owned() };
    // An IPv6 address from a pod's own fields has no brackets.
    let bare = || {
        let (address, port) = whole.rsplit_once(':')?;
        Some(SocketAddr::new(address.parse().ok()?, port.parse().ok()?))
    };
    whole.parse().ok().or_else(bare).ok_or_else(|| {
        format!("{text:?} is not a valid address to listen on: write one such as 127.0.0.1:9469 or :9469")
    })
}

/// Opens the port.
pub async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address} for health and metrics: free the address, or set another one")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_to_listen() {
        for (text, shown) in [
            ("127.0.0.1:9469", "127.0.0.1:9469"),
            ("[fd00::1]:9469", "[fd00::1]:9469"),
            ("fd00::1:9469", "[fd00::1]:9469"),
        ] {
            assert_eq!(address(text).map(|a| a.to_string()).as_deref(), Ok(shown), "{text}");
        }
        assert_eq!(address(":9469").map(|a| (a.ip().is_unspecified(), a.port())), Ok((true, 9469)));
        for text in ["", "9469", "localhost:9469", "127.0.0.1", "fd00::1", ":"] {
            assert!(address(text).is_err(), "{text}");
        }
    }
}
