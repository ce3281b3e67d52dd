//! NetworkPolicies that nobody enforces: their authors are told, once per object. In a cluster the controller
//! does that, in one place; where objects come from a folder, there is none.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_objects::{Event, Key, Objects, Write};

use super::writer::warning;
use crate::core::Core;

/// Says so on each NetworkPolicy of a folder, forever.
pub async fn warn_of_policies(core: Core, objects: Objects) {
    if objects.client().is_some() {
        return;
    }
    let watch = objects.watch::<NetworkPolicy>().map(|policy| Some(policy.metadata.uid));
    let Ok(mut events) = watch.subscribe() else { return };
    while let Some(event) = events.next().await {
        if let Event::Applied(key, uid) = event {
            say(&core, &objects, &key, uid).await;
        }
    }
}

async fn say(core: &Core, objects: &Objects, key: &Key, uid: Option<String>) {
    // The same name from every node and every run: the first one is the only one.
    let suffix = format!("knit-not-enforced-{}", uid.as_deref().unwrap_or("0"));
    let about = ObjectReference {
        api_version: Some("networking.k8s.io/v1".into()),
        kind: Some("NetworkPolicy".into()),
        namespace: key.namespace().map(str::to_owned),
        name: Some(key.name().to_owned()),
        uid,
        ..ObjectReference::default()
    };
    let message = "Knit does not enforce NetworkPolicies on this node; unless another component does, this \
        policy has no effect.";
    let event = warning(core.node(), about, "NotEnforced", message, &suffix);
    match objects.write(&Write::create(&event)).await {
        Ok(_) => tracing::warn!(policy = %key, "{message}"),
        Err(error) => tracing::debug!(policy = %key, error = &error as &dyn std::error::Error, "no event"),
    }
}
