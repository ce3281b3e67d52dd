//! Which groups an API server has: asked once for all who want to know at the same time.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::Client;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// So long an answer is good for others who ask: those who begin together.
const FRESH: Duration = Duration::from_secs(1);

/// The last answer.
#[derive(Debug, Default)]
pub(crate) struct Groups(Mutex<Option<(Instant, BTreeSet<String>)>>);

impl Groups {
    /// Whether the server has this version (`GROUP/VERSION`) of a group, with whichever kinds. It may have
    /// got one up to a second ago and not be known to.
    pub(crate) async fn has(&self, client: &Client, version: &str) -> kube::Result<bool> {
        // Held while the server is asked: whoever comes meanwhile gets the same answer.
        let mut last = self.0.lock().await;
        if let Some((_, versions)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return Ok(versions.contains(version));
        }
        let groups = client.list_api_groups().await?.groups;
        let versions: BTreeSet<String> = groups
            .into_iter()
            .flat_map(|group| group.versions)
            .map(|version| version.group_version)
            .collect();
        let has = versions.contains(version);
        *last = Some((Instant::now(), versions));
        Ok(has)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const ANSWER: &str = r#"{"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": "knit.dev",
        "versions": [{"groupVersion": "knit.dev/v1alpha1", "version": "v1alpha1"}]}]}"#;

    /// An API server with one group, which counts what it is asked.
    fn server(asked: &Arc<AtomicU32>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let asked = Arc::clone(asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let asked = Arc::clone(&asked);
                std::thread::spawn(move || answer(&stream, &asked));
            }
        });
        url
    }

    fn answer(mut stream: &TcpStream, asked: &AtomicU32) {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if line.is_empty() {
                asked.fetch_add(1, Ordering::Relaxed);
                let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json";
                let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{ANSWER}", ANSWER.len());
            }
        }
    }

    #[tokio::test]
    async fn who_asks_together_asks_once_and_later_again() {
        let asked = Arc::new(AtomicU32::new(0));
        let api = crate::api::Api::url(&server(&asked)).expect("a client");
        let groups = Groups::default();
        let (here, elsewhere, other) = tokio::join!(
            groups.has(&api.client, "knit.dev/v1alpha1"),
            groups.has(&api.client, "policy.networking.k8s.io/v1alpha1"),
            groups.has(&api.client, "knit.dev/v1"),
        );
        assert_eq!([here, elsewhere, other].map(|has| has.expect("an answer")), [true, false, false]);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        if let Some((at, _)) = &mut *groups.0.lock().await {
            *at -= FRESH;
        }
        assert!(groups.has(&api.client, "knit.dev/v1alpha1").await.expect("an answer"));
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }
}
