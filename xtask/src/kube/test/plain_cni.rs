//! Another network plugin before Knit, and again after it.

use anyhow::{Result, ensure};
use knit_kernel::owner::PROTOCOL;

use super::pods;
use super::support::{self, Overlay, reaches};
use super::traces::{self, Traces};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;

/// A server and a client on either node.
fn generation(namespace: &str) -> String {
    let pod = |node: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: pod-{node}, namespace: {namespace}}}, spec: \
             {{nodeName: {node}, \
             terminationGracePeriodSeconds: 1, containers: [{{name: agnhost, image: '{AGNHOST}', \
             args: [netexec, --http-port=8080, --udp-port=-1]}}]}}}}\n---\n"
        )
    };
    [pod("n1"), pod("n2")].concat()
}

/// Makes a generation of pods, and sees that they reach each other.
fn live(bed: &Bed, namespace: &str) -> Result<()> {
    support::namespace(bed, namespace)?;
    bed.apply(&generation(namespace))?;
    support::pods_ready(bed, namespace)?;
    let pods = pods::pods(bed, namespace)?;
    for from in &pods {
        for to in &pods {
            reaches(bed, namespace, &from.name, &format!("{}:8080", to.address()?))?;
        }
    }
    Ok(())
}

/// Whether the nodes have a route of Knit's to each pod of a namespace.
fn served_by_knit(bed: &Bed, namespace: &str) -> Result<bool> {
    let mut by_knit = Vec::new();
    for pod in pods::pods(bed, namespace)? {
        let (route, ours) = (format!("route to {}/32 ", pod.address()?), format!("of protocol {PROTOCOL}"));
        let is_it = |line: &String| line.starts_with(&route) && line.ends_with(&ours);
        by_knit.push(traces::of_node(bed, &pod.node)?.iter().any(is_it));
    }
    ensure!(by_knit.iter().all(|by| *by == by_knit[0]), "{namespace} has pods of both plugins");
    Ok(by_knit[0])
}

pub fn before_and_after(bed: &Bed) -> Result<()> {
    // The plugin's own bridge comes with its first pod, and stays.
    live(bed, "first")?;
    pods::delete_namespace(bed, "first")?;
    let before: Vec<Traces> =
        bed.nodes().iter().map(|node| traces::of_node(bed, node)).collect::<Result<_>>()?;
    live(bed, "old")?;
    ensure!(!served_by_knit(bed, "old")?, "pods have Knit's network before it is installed");

    support::install(bed, Overlay::Full)?;
    live(bed, "knit")?;
    ensure!(served_by_knit(bed, "knit")?, "pods do not have Knit's network while it is installed");
    pods::delete_namespace(bed, "old")?;
    // Those that stayed are not disturbed by that.
    for (from, to) in [("pod-n1", "pod-n2"), ("pod-n2", "pod-n1")] {
        reaches(bed, "knit", from, &format!("{}:8080", pods::pod(bed, "knit", to)?.address()?))?;
    }

    support::uninstall(bed, Overlay::Full)?;
    live(bed, "new")?;
    ensure!(!served_by_knit(bed, "new")?, "pods have Knit's network after it is removed");
    pods::delete_namespace(bed, "knit")?;
    live_still(bed)?;
    pods::delete_namespace(bed, "new")?;
    for (node, before) in bed.nodes().iter().zip(&before) {
        let after = traces::of_node(bed, node)?;
        let left: Vec<_> = after.difference(before).cloned().collect();
        ensure!(left.is_empty(), "{node} still has {}", left.join(", "));
        // Such as the routes by which the plugin's pods of two nodes reach each other.
        let lost: Vec<_> = before.difference(&after).cloned().collect();
        ensure!(lost.is_empty(), "{node} lost {}", lost.join(", "));
    }
    Ok(())
}

/// The last generation goes on when the one before is gone.
fn live_still(bed: &Bed) -> Result<()> {
    let to = pods::pod(bed, "new", "pod-n2")?.address()?;
    reaches(bed, "new", "pod-n1", &format!("{to}:8080"))
}
