//! Events about pods, as a scheduler and a kubelet write them, so that `kubectl describe pod` tells the
//! story.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::{Value, json};

use knit_apiserver::object::Object;
use knit_apiserver::{ApiError, Store, WriteOptions};

/// Who says something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speaker<'a> {
    /// The component.
    pub(crate) component: &'a str,
    /// Its node, if it has one.
    pub(crate) node: &'a str,
}

/// Whether all is well.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mood {
    Normal,
    Warning,
}

/// Says something about a pod; what has been said before is counted. An event that is lost is no reason to
/// stop.
pub(crate) fn say(store: &Store, pod: &Object, who: Speaker<'_>, mood: Mood, reason: &str, message: &str) {
    if let Err(error) = write(store, pod, who, mood, reason, message) {
        tracing::debug!(%error, pod = pod.name(), reason, "an event was refused");
    }
}

fn write(
    store: &Store,
    pod: &Object,
    who: Speaker<'_>,
    mood: Mood,
    reason: &str,
    message: &str,
) -> Result<(), ApiError> {
    let mut hasher = DefaultHasher::new();
    (pod.uid(), who.component, reason, message).hash(&mut hasher);
    let name = format!("{}.{:016x}", pod.name(), hasher.finish());
    let now = knit_apiserver::store::seconds(store.now());
    let kind = store.kind("v1", "Event")?;
    let options = WriteOptions { manager: who.component.to_owned(), ..WriteOptions::default() };
    let again = store.modify(&kind, pod.namespace(), &name, &options, false, |event| {
        let mut event = event.clone();
        event["count"] = json!(event["count"].as_u64().unwrap_or(1) + 1);
        event["lastTimestamp"] = json!(now);
        Ok(event)
    });
    if !matches!(&again, Err(error) if error.reason == "NotFound") {
        return again.map(drop);
    }
    let mood = match mood {
        Mood::Normal => "Normal",
        Mood::Warning => "Warning",
    };
    let mut source = json!({"component": who.component});
    if !who.node.is_empty() {
        source["host"] = Value::from(who.node);
    }
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "type": mood, "reason": reason, "message": message,
        "metadata": {"name": name, "namespace": pod.namespace()},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace(),
            "name": pod.name(),
            "uid": pod.uid()},
        "source": source, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        "reportingComponent": who.component, "reportingInstance": who.node,
    });
    store.create(&kind, pod.namespace(), event, &options).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use knit_apiserver::StoreOptions;

    #[test]
    fn what_is_said_again_is_counted() {
        let store = Store::new(&StoreOptions::default()).unwrap();
        let pod = Object::new(json!({"metadata": {"name": "p", "namespace": "default", "uid": "u"}}), 1);
        let who = Speaker { component: "kubelet", node: "node-1" };
        for message in ["no room", "no room", "still none"] {
            say(&store, &pod, who, Mood::Warning, "Failed", message);
        }
        let kind = store.kind("v1", "Event").unwrap();
        let events = store.list(&kind, &Default::default()).unwrap().items;
        let counts: Vec<_> =
            events.iter().map(|e| (e.value["message"].clone(), e.value["count"].clone())).collect();
        assert_eq!(counts.len(), 2, "{counts:?}");
        assert!(counts.contains(&(json!("no room"), json!(2))), "{counts:?}");
        assert_eq!(events[0].value["source"], json!({"component": "kubelet", "host": "node-1"}));
    }
}
