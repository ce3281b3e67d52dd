//! Between NRI's words and the core's.

use std::collections::BTreeMap;
use std::path::PathBuf;

use knit_nri::wire::PodSandbox;
use knit_runtime::{InterfaceName, Pod, SandboxId};

use super::Served;
use crate::front_door::annotation;
use crate::request::{Door, Main, PodRequest, Start, Wish, Wishes};

/// What a sandbox is to get. None for one in the node's own network: it has no namespace of its own.
///
/// # Errors
/// When the sandbox is not described as it must be: nothing can be said about it then, least of all that it
/// needs nothing.
pub(super) fn pod_request(
    pod: &PodSandbox,
    main: &InterfaceName,
    served: Served,
) -> Result<Option<PodRequest>, String> {
    let Some(netns) = pod.network_namespace() else { return Ok(None) };
    let sandbox = sandbox(pod)?;
    let netns = PathBuf::from(netns);
    if !netns.is_absolute() {
        return Err(format!("network namespace {netns:?} of sandbox {sandbox} is not an absolute path"));
    }
    let some = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let (namespace, name) = (some(&pod.namespace), some(&pod.name));
    if namespace.is_some() != name.is_some() {
        return Err(format!("sandbox {sandbox} has only one of a pod's namespace and name"));
    }
    let annotations: BTreeMap<String, String> =
        pod.annotations.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let wishes = annotation::wishes(&annotations);
    let wishes = match served {
        Served::AnnotationsAndClaims => wishes,
        Served::Claims if wishes == Wishes::Said(Wish::default()) => wishes,
        // It was promised something that it would start without.
        Served::Claims => Wishes::Wrong(
            "it requests Networks by annotation, but only claims are served on this node: use a \
             ResourceClaim, or start the agent with --nri=all"
                .to_owned(),
        ),
    };
    Ok(Some(PodRequest {
        pod: Pod { sandbox, namespace, name, uid: some(&pod.uid) },
        start: Some(Start { netns, main: Main::Foreign(main.clone()) }),
        wishes,
        claims: Vec::new(),
        door: Door::Nri,
    }))
}

/// The sandbox of an event.
pub(super) fn sandbox(pod: &PodSandbox) -> Result<SandboxId, String> {
    SandboxId::new(pod.id.as_str()).map_err(|error| format!("the id of a sandbox: {error}"))
}

#[cfg(test)]
mod tests {
    use knit_nri::wire::{LinuxNamespace, LinuxPodSandbox};

    use super::*;

    fn pod(annotations: &[(&str, &str)]) -> PodSandbox {
        let namespace = |kind: &str, path: &str| LinuxNamespace { r#type: kind.into(), path: path.into() };
        PodSandbox {
            id: "sandbox".into(),
            name: "web".into(),
            uid: "uid".into(),
            namespace: "plain".into(),
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            linux: Some(LinuxPodSandbox {
                namespaces: vec![namespace("ipc", "/proc/1/ns/ipc"), namespace("network", "/run/netns/a")],
            }),
            ips: Vec::new(),
        }
    }

    fn request(pod: &PodSandbox, served: Served) -> Result<Option<PodRequest>, String> {
        pod_request(pod, &InterfaceName::new("eth0").expect("a name"), served)
    }

    #[test]
    fn a_sandbox_becomes_a_request_for_further_interfaces() {
        let pod = pod(&[("knit.dev/networks", "blue@net5"), ("other", "x")]);
        let request = request(&pod, Served::AnnotationsAndClaims).expect("a request").expect("one");
        let start = request.start.expect("a start");
        assert_eq!(start.netns, PathBuf::from("/run/netns/a"));
        assert!(matches!(&start.main, Main::Foreign(name) if name.as_str() == "eth0"));
        assert_eq!(request.pod.uid.as_deref(), Some("uid"));
        let Wishes::Said(wish) = request.wishes else { panic!("{:?}", request.wishes) };
        assert_eq!((wish.further.len(), wish.further[0].network.as_str()), (1, "blue"));
    }

    #[test]
    fn a_pod_in_the_nodes_network_is_left_alone() {
        let mut host = pod(&[("knit.dev/networks", "blue")]);
        host.linux.as_mut().expect("namespaces").namespaces.pop();
        assert!(request(&host, Served::AnnotationsAndClaims).expect("nothing").is_none());
        host.linux = None;
        assert!(request(&host, Served::AnnotationsAndClaims).expect("nothing").is_none());
    }

    #[test]
    fn what_cannot_be_a_sandbox_is_an_error_and_not_nothing() {
        let bad: [fn(&mut PodSandbox); 4] = [
            |pod| pod.id = "../x".into(),
            |pod| pod.id = String::new(),
            |pod| pod.name = String::new(),
            |pod| pod.linux.as_mut().expect("namespaces").namespaces[1].path = "netns".into(),
        ];
        for change in bad {
            let mut pod = pod(&[]);
            change(&mut pod);
            assert!(request(&pod, Served::AnnotationsAndClaims).is_err(), "{pod:?}");
        }
    }

    #[test]
    fn where_only_claims_are_served_an_annotation_is_refused() {
        let plain = request(&pod(&[("other", "x")]), Served::Claims).expect("a request").expect("one");
        assert_eq!(plain.wishes, Wishes::Said(Wish::default()));
        for annotation in ["knit.dev/networks", "knit.dev/primary"] {
            let asks =
                request(&pod(&[(annotation, "blue")]), Served::Claims).expect("a request").expect("one");
            assert!(
                matches!(&asks.wishes, Wishes::Wrong(why) if why.contains("ResourceClaim")),
                "{annotation}"
            );
        }
    }
}
