//! Tells nodes of the NetworkAttachments that users make for their pods: each object's `status.node` names
//! the node that its pod is on. An agent follows only the objects that name its own node, so what one tenant
//! does with its objects is no event for any other node.
//!
//! Apart from the plan of everything else, as `peers` is: pods come and go. Pods are watched only in
//! namespaces that have such objects. [`plan`] decides, [`pods`] follows pods, [`run`] reads objects and
//! writes.

mod plan;
mod pods;
mod run;
#[cfg(test)]
mod tests;

pub(crate) use run::keep;
