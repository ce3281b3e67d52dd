//! What a Network cannot have whose topology has no router, as rules of the CRD.

use knit_types::Topology;
use kube::core::cel::{Message, Rule};

/// The default Network.
pub(crate) fn of_default() -> Rule {
    let refused = format!("self.metadata.name != 'default' || {}", has_router("self.spec.topology"));
    Rule::new(refused).message(Message::Message(format!(
        "the Network default cannot be {}, where there are no Services and no NetworkPolicy: write topology: \
         Layer3",
        names()
    )))
}

/// Primary Networks.
pub(crate) fn of_primary() -> Rule {
    let refused = format!("{} || !has(self.primaryFor)", has_router("self.topology"));
    Rule::new(refused).message(Message::Message(format!(
        "{} Network cannot be a primary one, since it has no Services and no NetworkPolicy: leave primaryFor \
         out and let pods ask for it",
        with_article()
    )))
}

/// What is said of a router.
pub(crate) fn of_services() -> Rule {
    let said = "has(self.services) || has(self.clusterServices) || has(self.outside)";
    Rule::new(format!("{} || !({said})", has_router("self.topology"))).message(Message::Message(format!(
        "services, clusterServices and outside are about a router, which {} Network does not have: leave \
         them out",
        with_article()
    )))
}

fn without_router() -> impl Iterator<Item = &'static str> {
    Topology::ALL.into_iter().filter(|topology| !topology.has_router()).map(Topology::as_str)
}

/// True where this field is a topology with a router.
fn has_router(field: &str) -> String {
    let all: Vec<String> = without_router().map(|name| format!("{field} != '{name}'")).collect();
    match all.as_slice() {
        [one] => one.clone(),
        several => format!("({})", several.join(" && ")),
    }
}

fn names() -> String {
    without_router().collect::<Vec<_>>().join(" or ")
}

fn with_article() -> String {
    let names = names();
    let article = if names.starts_with(['A', 'E', 'I', 'O', 'U']) { "an" } else { "a" };
    format!("{article} {names}")
}
