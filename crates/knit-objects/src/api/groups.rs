//! Which groups an API server has: asked once for all who want to know at the same time.
//!
//! The list of groups is no proof that one is missing: an API server that is starting answers with those that
//! it knows so far. The group's own path is: until everything is known there, the answer is 503. So whoever
//! finds a group missing from the list asks for that path, too, once: what has been missing for certain only
//! has to be noticed when it comes.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::Client;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// So long an answer is good for others who ask: those who begin together.
const FRESH: Duration = Duration::from_secs(1);

/// What is known of them.
#[derive(Debug)]
pub(crate) struct Groups {
    known: Mutex<Known>,
    fresh: Duration,
}

#[derive(Debug, Default)]
struct Known {
    /// The last list, and when it was read.
    listed: Option<(Instant, BTreeSet<String>)>,
    /// Versions that were missing when they were asked for themselves, and have not been listed since.
    missing: BTreeSet<String>,
}

/// Whether a version of a group is there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Found {
    /// It is listed, with whichever kinds.
    Listed,
    /// It is not listed; only its own path says whether that is so.
    Unlisted,
    /// It is not there. It may have come up to a second ago and not be known yet.
    Missing,
}

impl Default for Groups {
    fn default() -> Self {
        Self { known: Mutex::default(), fresh: FRESH }
    }
}

impl Groups {
    /// Whether the server has this version (`GROUP/VERSION`) of a group.
    pub(crate) async fn find(&self, client: &Client, version: &str) -> kube::Result<Found> {
        // Held while the server is asked: whoever comes meanwhile gets the same answer.
        let mut known = self.known.lock().await;
        let Known { listed, missing } = &mut *known;
        if let Some((_, versions)) = listed.as_ref().filter(|(at, _)| at.elapsed() < self.fresh) {
            return Ok(found(version, versions, missing));
        }
        let groups = client.list_api_groups().await?.groups;
        let versions: BTreeSet<String> = groups
            .into_iter()
            .flat_map(|group| group.versions)
            .map(|version| version.group_version)
            .collect();
        missing.retain(|version| !versions.contains(version));
        let found = found(version, &versions, missing);
        *listed = Some((Instant::now(), versions));
        Ok(found)
    }

    #[cfg(test)]
    pub(crate) fn never_fresh() -> Self {
        Self { fresh: Duration::ZERO, ..Self::default() }
    }

    /// A version was asked for by its own path, and is not there.
    pub(crate) async fn is_missing(&self, version: &str) {
        self.known.lock().await.missing.insert(version.to_owned());
    }
}

fn found(version: &str, listed: &BTreeSet<String>, missing: &BTreeSet<String>) -> Found {
    match (listed.contains(version), missing.contains(version)) {
        (true, _) => Found::Listed,
        (false, true) => Found::Missing,
        (false, false) => Found::Unlisted,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use k8s_openapi::api::networking::v1::NetworkPolicy;
    use knit_types::sync::Locked as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::{Objects, Source};

    /// An API server that answers each path as it is told, and counts what it is asked. What it was not told
    /// it cannot say yet; the client would try that again by itself if the code were 503.
    #[derive(Clone, Default)]
    struct Server(Arc<Mutex<BTreeMap<String, Answer>>>);

    struct Answer {
        code: u16,
        body: Value,
        asked: u32,
    }

    impl Server {
        fn start(&self) -> String {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let url = format!("http://{}", listener.local_addr().expect("an address"));
            let server = self.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let server = server.clone();
                    std::thread::spawn(move || server.answer(&stream));
                }
            });
            url
        }

        fn set(&self, path: &str, code: u16, body: Value) {
            self.0.locked().insert(path.to_owned(), Answer { code, body, asked: 0 });
        }

        /// How often it was asked for a path since what it says was set.
        fn asked(&self, path: &str) -> u32 {
            self.0.locked().get(path).map_or(0, |answer| answer.asked)
        }

        fn answer(&self, mut stream: &TcpStream) {
            let mut path = String::new();
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if let Some(rest) = line.strip_prefix("GET ") {
                    path = rest.split(' ').next().unwrap_or_default().to_owned();
                }
                if line.is_empty() {
                    let (code, body) = match self.0.locked().get_mut(&path) {
                        Some(answer) => {
                            answer.asked += 1;
                            (answer.code, answer.body.clone())
                        }
                        None => (500, status(500)),
                    };
                    let body = body.to_string();
                    let head = format!("HTTP/1.1 {code} Answer\r\nContent-Type: application/json");
                    let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                }
            }
        }
    }

    fn status(code: u16) -> Value {
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "reason": "Test", "message": "as the test says"})
    }

    fn listed(version: &str) -> Value {
        let group = version.split('/').next();
        json!({"kind": "APIGroupList", "apiVersion": "v1",
            "groups": [{"name": group, "versions": [{"groupVersion": version, "version": "v1"}]}]})
    }

    #[tokio::test]
    async fn who_asks_together_asks_once_and_later_again() {
        let server = Server::default();
        server.set("/apis", 200, listed("knit.dev/v1alpha1"));
        let api = crate::api::Api::url(&server.start()).expect("a client");
        // However slow this machine is.
        let mut groups = Groups { fresh: Duration::from_secs(3600), ..Groups::default() };
        let (here, elsewhere, other) = tokio::join!(
            groups.find(&api.client, "knit.dev/v1alpha1"),
            groups.find(&api.client, "policy.networking.k8s.io/v1alpha1"),
            groups.find(&api.client, "knit.dev/v1"),
        );
        let all = [here, elsewhere, other].map(|found| found.expect("an answer"));
        assert_eq!(all, [Found::Listed, Found::Unlisted, Found::Unlisted]);
        assert_eq!(server.asked("/apis"), 1);
        groups.fresh = Duration::ZERO;
        let again = groups.find(&api.client, "knit.dev/v1alpha1").await;
        assert_eq!(again.expect("an answer"), Found::Listed);
        assert_eq!(server.asked("/apis"), 2);
    }

    /// The list of groups is served before everything is in it: a kind of policies was taken for one that the
    /// cluster does not have, and what the agent knew of its policies was thrown away.
    #[tokio::test]
    async fn an_api_server_that_was_starting_was_believed_to_lack_kinds() {
        let (server, own) = (Server::default(), "/apis/networking.k8s.io/v1");
        server.set("/apis", 200, listed("apiregistration.k8s.io/v1"));
        let mut objects = Objects::open(Source::Url(server.start())).await.expect("objects");
        objects.without_fresh_groups();
        assert_eq!(objects.serves::<NetworkPolicy>().await, None, "nobody can say yet");
        // It has started, and lacks it: what was found out for certain is not asked again.
        server.set(own, 404, status(404));
        for _ in 0..3 {
            assert_eq!(objects.serves::<NetworkPolicy>().await, Some(false));
        }
        assert_eq!(server.asked(own), 1);
        assert_eq!(server.asked("/apis"), 4);
        // It gets it, and loses it.
        let kind = json!({"name": "networkpolicies", "singularName": "", "namespaced": true,
            "kind": "NetworkPolicy", "verbs": ["list"]});
        let kinds = json!({"kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": "networking.k8s.io/v1", "resources": [kind]});
        server.set(own, 200, kinds);
        server.set("/apis", 200, listed("networking.k8s.io/v1"));
        assert_eq!(objects.serves::<NetworkPolicy>().await, Some(true));
        server.set("/apis", 200, listed("apiregistration.k8s.io/v1"));
        server.set(own, 500, status(500));
        assert_eq!(objects.serves::<NetworkPolicy>().await, None, "it is starting again");
    }
}
