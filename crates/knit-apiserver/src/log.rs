//! `pods/NAME/log`: what a container has printed, from the files of whoever runs the pods; with `follow`, as
//! it comes.

use std::convert::Infallible;
use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::Response;
use hyper::body::Frame;
use serde_json::Value;
use tokio::fs::File;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};

use super::http::Body;
use super::object::{Object, list_at, meta, str_at};
use super::request::Query;
use super::status::{ApiError, Result};
use super::store::Store;

/// How often a file that is followed is looked at.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(100);

/// Where the output of a pod's containers goes, below the directory of all logs.
pub fn directory(logs: &Path, namespace: &str, name: &str, uid: &str) -> PathBuf {
    logs.join(format!("{namespace}_{name}_{uid}"))
}

/// Where the output of one container goes, below the directory of all logs.
pub fn file(logs: &Path, pod: &Object, container: &str) -> PathBuf {
    directory(logs, pod.namespace(), pod.name(), pod.uid()).join(format!("{container}.log"))
}

/// Answers a GET of a pod's log.
pub(super) async fn answer(
    store: &Store,
    logs: Option<&Path>,
    namespace: &str,
    name: &str,
    query: &Query,
) -> Result<Response<Body>> {
    let kind = store.kind("v1", "Pod")?;
    let pod = store.get(&kind, namespace, name)?;
    let container = container(&pod, query.get("container"))?;
    let logs = logs.ok_or_else(|| ApiError::bad_request("nobody runs pods here, so they print nothing"))?;
    if query.flag("previous") {
        return Err(ApiError::bad_request(format!(
            "previous terminated container {container:?} in pod {name:?} not found: here the log of a \
             container goes on \
             after a restart; leave --previous out"
        )));
    }
    let path = file(logs, &pod, &container);
    let lines = query.number("tailLines")?.and_then(|lines| usize::try_from(lines).ok());
    let limit = query.number("limitBytes")?.unwrap_or(u64::MAX);
    let failed = |error: std::io::Error| {
        ApiError::new(
            500,
            "InternalError",
            format!("the log of container {container:?} cannot be read: {error}"),
        )
    };
    let mut text = match tokio::fs::read(&path).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read.map_err(failed)?,
    };
    let end = text.len() as u64;
    if let Some(lines) = lines {
        text.drain(..last_lines(&text, lines));
    }
    text.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    let left = limit - text.len() as u64;
    let first = Bytes::from(text);
    let body = if query.flag("follow") {
        let rest = Follow {
            store: store.clone(),
            pod: (namespace.into(), name.into(), pod.uid().into()),
            path,
            at: end,
            left,
        };
        let rest = stream::unfold(rest, |mut rest| async move { Some((rest.next().await?, rest)) });
        let frames = stream::iter([first]).chain(rest).map(|bytes| Ok::<_, Infallible>(Frame::data(bytes)));
        StreamBody::new(frames).boxed_unsync()
    } else {
        Full::new(first).boxed_unsync()
    };
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("text/plain"));
    Ok(response)
}

/// Which container is meant: the one that is named, the only one, or the pod's default one.
pub(super) fn container(pod: &Object, named: &str) -> Result<String> {
    let names: Vec<&str> = list_at(&pod.value, "spec.containers")
        .iter()
        .filter_map(|container| container["name"].as_str())
        .collect();
    if named.is_empty() {
        let default =
            pod.value["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"].as_str();
        return match (names.as_slice(), default) {
            (_, Some(default)) if names.contains(&default) => Ok(default.to_owned()),
            ([only], _) => Ok((*only).to_owned()),
            _ => Err(ApiError::bad_request(format!(
                "a container name must be specified for pod {}, choose one of: [{}]",
                pod.name(),
                names.join(" ")
            ))),
        };
    }
    if names.contains(&named) {
        return Ok(named.to_owned());
    }
    Err(ApiError::bad_request(format!("container {named} is not valid for pod {}", pod.name())))
}

/// Where the last lines of a text begin.
fn last_lines(text: &[u8], lines: usize) -> usize {
    if lines == 0 {
        return text.len();
    }
    // The newline at the very end ends the last line; it begins none.
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let mut ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    ends.nth(lines - 1).map_or(0, |(at, _)| at + 1)
}

/// A log that is followed.
struct Follow {
    store: Store,
    /// Namespace, name and uid.
    pod: (String, String, String),
    path: PathBuf,
    at: u64,
    left: u64,
}

impl Follow {
    /// What has been printed since; none once the pod is gone or through, and everything has been read.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            // Asked before the file is read, so that nothing printed last is missed.
            let through = self.is_through();
            let mut chunk = vec![0; 64 * 1024];
            let read = async {
                let mut file = File::open(&self.path).await?;
                file.seek(SeekFrom::Start(self.at)).await?;
                file.read(&mut chunk).await
            };
            let read = read.await.unwrap_or(0).min(usize::try_from(self.left).unwrap_or(usize::MAX));
            if read > 0 {
                chunk.truncate(read);
                self.at += read as u64;
                self.left -= read as u64;
                return Some(Bytes::from(chunk));
            }
            if through || self.left == 0 {
                return None;
            }
            tokio::time::sleep(FOLLOW_INTERVAL).await;
        }
    }

    fn is_through(&self) -> bool {
        let (namespace, name, uid) = &self.pod;
        let found = self.store.kind("v1", "Pod").and_then(|kind| self.store.get(&kind, namespace, name));
        let ended = |pod: &Value| matches!(str_at(pod, "status.phase"), Some("Succeeded" | "Failed"));
        !found.is_ok_and(|pod| meta(&pod.value, "uid") == uid && !ended(&pod.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_last_lines_of_a_text() {
        let text = b"one\ntwo\nthree\n";
        let last = |lines| std::str::from_utf8(&text[last_lines(text, lines)..]).unwrap();
        assert_eq!(last(0), "");
        assert_eq!(last(1), "three\n");
        assert_eq!(last(2), "two\nthree\n");
        assert_eq!(last(9), "one\ntwo\nthree\n");
        assert_eq!(last_lines(b"one\ntwo", 1), 4, "a line that is not finished is one");
        assert_eq!(last_lines(b"", 3), 0);
    }

    #[test]
    fn which_container_is_meant() {
        let pod = |containers: &[&str], annotations: Value| {
            let containers: Vec<Value> = containers.iter().map(|name| json!({"name": name})).collect();
            Object::new(
                json!({"metadata": {"name": "p", "annotations": annotations},
                    "spec": {"containers": containers}}),
                1,
            )
        };
        assert_eq!(container(&pod(&["a"], Value::Null), "").unwrap(), "a");
        assert_eq!(container(&pod(&["a", "b"], Value::Null), "b").unwrap(), "b");
        let words = container(&pod(&["a", "b"], Value::Null), "").unwrap_err().message;
        assert_eq!(words, "a container name must be specified for pod p, choose one of: [a b]");
        let default = json!({"kubectl.kubernetes.io/default-container": "b"});
        assert_eq!(container(&pod(&["a", "b"], default), "").unwrap(), "b");
        assert!(container(&pod(&["a"], Value::Null), "c").unwrap_err().message.contains("not valid"));
    }
}
