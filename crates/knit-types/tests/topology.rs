//! A topology is one entry in knit-types and one file in knit-linux: nothing else asks which a Network has.

mod sources;

use std::fmt::Write as _;

use knit_types::Topology;
use sources::sources;

/// Where topologies are named, and why.
const NAMED: [(&str, &str); 8] = [
    ("knit-types/src/topology.rs", "the entries"),
    ("knit-linux/src/topology/", "the drivers"),
    ("knit-runtime/src/runtime.rs", "features that runtimes of strangers announce by name"),
    ("knit-conformance/src/bed.rs", "what the addresses say that a user gives"),
    ("knit-conformance/src/extended.rs", "promises that Underlay makes besides"),
    ("knit-controller/src/plan/lifecycle.rs", "the Network default is Layer3"),
    ("knit/src/command/doctor/trial.rs", "the Network that doctor tries is Layer3"),
    ("xtask/src/bench/datapath/", "what is compared"),
];

#[test]
fn nothing_but_its_driver_asks_which_topology_a_network_has() {
    let (mut problems, mut used) = (String::new(), [false; NAMED.len()]);
    for (file, source) in sources() {
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let shown = file.display().to_string();
        for (line, text) in code.lines().enumerate() {
            let names = |topology: Topology| text.contains(&format!("Topology::{topology}"));
            if text.trim_start().starts_with("//") || !Topology::ALL.into_iter().any(names) {
                continue;
            }
            match NAMED.iter().position(|(allowed, _)| shown.contains(allowed)) {
                Some(known) => used[known] = true,
                None => writeln!(problems, "{shown}:{}: {}", line + 1, text.trim()).unwrap(),
            }
        }
    }
    assert!(problems.is_empty(), "ask for a property of the topology instead:\n{problems}");
    let unused: Vec<_> = NAMED.iter().zip(used).filter(|(_, used)| !used).map(|(named, _)| named.0).collect();
    // The entries themselves are a macro's, and do not name themselves in full.
    assert!(unused.iter().all(|file| file.ends_with("topology.rs")), "not needed any more: {unused:?}");
}
