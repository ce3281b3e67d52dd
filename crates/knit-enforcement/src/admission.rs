//! A pod's way past policies: it is made when what they ask for about it is in force, and not before.

use knit_ledger::SandboxRecord;
use knit_node::{Error, Reason};
use knit_policy::model::PodKey;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::feed::{Shared, labels_of};
use crate::local::Local;
use crate::worker::{Admit, Objection, Summary, Told};

const LATER: &str = "; the container runtime will retry";

/// Returns when what policies ask for about the interfaces of a record is in force.
pub(crate) async fn admit(
    shared: &Shared,
    record: &SandboxRecord,
    deadline: Instant,
) -> knit_node::Result<()> {
    // Policies select pods: what is no pod's is nobody's subject.
    let Some(pod) = record.pod() else { return Ok(()) };
    let (namespace, name) = (pod.namespace.as_str(), pod.name.as_str());
    let who = format!("pod {namespace}/{name}");
    let core = &shared.core;
    let deadline = deadline.min(Instant::now() + core.config().cache_wait);
    let (mut world, mut summary) = (core.world().subscribe(), shared.summary.clone());
    loop {
        world.mark_unchanged();
        let standing = *summary.borrow_and_update();
        // Without a worker nobody would hear of the next policy, either.
        if summary.has_changed().is_err() {
            return Err(stopped(&who));
        }
        let Some(answer) = ask(shared, (namespace, name, pod.uid.as_deref()), standing) else {
            return Ok(());
        };
        let objection = match tokio::time::timeout_at(deadline, answer).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(objection))) => objection,
            Ok(Err(_)) => return Err(stopped(&who)),
            Err(_) => {
                let message = format!("{who}: its network policies are still being applied{LATER}");
                return Err(Error::new(Reason::NotReady, message));
            }
        };
        if objection == Objection::Overtaken && Instant::now() < deadline {
            continue;
        }
        if let Objection::NoRouter(..) = objection {
            return Err(error(&who, &objection));
        }
        // Others than the one that is missing may come first.
        let news = async {
            tokio::select! {
                changed = world.changed() => changed.is_ok(),
                changed = summary.changed() => changed.is_ok(),
            }
        };
        if !matches!(tokio::time::timeout_at(deadline, news).await, Ok(true)) {
            return Err(error(&who, &objection));
        }
    }
}

/// Asks the worker about a pod as it is now; nothing if there is nothing to wait for.
fn ask(
    shared: &Shared,
    (namespace, name, uid): (&str, &str, Option<&str>),
    standing: Summary,
) -> Option<oneshot::Receiver<Result<(), Objection>>> {
    let _reading = shared.reading();
    let now = shared.core.world().get();
    let mut locals = shared.remembered.named(&shared.core, &now, namespace, name);
    // The newest is the first.
    let place = locals.iter().position(|local| Some(&*local.pod.uid) == uid).unwrap_or_default();
    shared.kept.pods_changed();
    if locals.is_empty() {
        return None;
    }
    if standing.complete && standing.policies == 0 {
        let pods = locals.into_iter().map(|local| local.pod).collect();
        shared.tell(Told::Local(PodKey::new(namespace, name), pods));
        return None;
    }
    let (reply, answer) = oneshot::channel();
    let namespace = now.namespaces.get(namespace).map(|labels| labels_of(labels));
    let Local { pod, labels_known } = locals.remove(place);
    let namesakes = locals.into_iter().map(|local| local.pod).collect();
    shared.tell(Told::Admit(Box::new(Admit { pod, namesakes, labels_known, namespace, reply })));
    Some(answer)
}

fn stopped(who: &str) -> Error {
    let message = format!(
        "{who}: policy enforcement has stopped on this node: see the agent's log and restart the agent"
    );
    Error::new(Reason::NotReady, message)
}

fn error(who: &str, objection: &Objection) -> Error {
    let later = LATER;
    let (reason, message) = match objection {
        Objection::NotComplete => (
            Reason::NotReady,
            format!("{who}: the agent has not received all policies from the API server yet{later}"),
        ),
        Objection::Overtaken => {
            (Reason::NotReady, format!("{who}: its interfaces changed in the meantime{later}"))
        }
        Objection::LabelsUnknown => (
            Reason::NotReady,
            format!("{who}: a policy may select it, and its labels have not arrived from the API{later}"),
        ),
        Objection::NamespaceUnknown => (
            Reason::NotReady,
            format!(
                "{who}: a policy may select it, and the labels of its namespace have not arrived from the \
                 API{later}"
            ),
        ),
        Objection::PeersUnknown(network) => (
            Reason::NotReady,
            format!(
                "{who}: policies act on it in Network {network}, and the PolicyPeerSlices of that Network \
                 have not arrived from the API{later}"
            ),
        ),
        Objection::NotInForce(network, why) => (
            Reason::NotReady,
            format!("{who}: policies could not be applied in Network {network}: {why}{later}"),
        ),
        Objection::NoRouter(network, policy) => (
            Reason::Refused,
            format!(
                "{who}: {policy} selects its interface in Network {network}, where no policy can be \
                 enforced, because that Network has no router: leave the pod out of the policy, or use \
                 another Network"
            ),
        ),
    };
    Error::new(reason, message)
}
