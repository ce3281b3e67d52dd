//! Who of many nodes says what all of them see: a few, whom everybody finds without asking the others.

use knit_types::fnv1a;

/// Whether this node is one of the `count` that speak about an object, of all that could. Each node that
/// knows the same others comes to the same answer, and different objects fall to different nodes.
pub fn speaks<'a>(node: &str, among: impl IntoIterator<Item = &'a str>, object: &str, count: usize) -> bool {
    let own = rank(node, object);
    let mut found = false;
    let mut before = 0;
    for other in among {
        if other == node {
            found = true;
        } else if rank(other, object) > own {
            before += 1;
        }
    }
    found && before < count
}

/// The nodes that an object falls to, of those that there are: at most so many, in an order that is the same
/// wherever this is asked. One that comes or goes changes no other's place.
pub fn chosen<'a>(among: impl IntoIterator<Item = &'a str>, object: &str, count: usize) -> Vec<&'a str> {
    let mut ranked: Vec<_> = among.into_iter().map(|node| rank(node, object)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.dedup();
    ranked.truncate(count);
    ranked.into_iter().map(|(_, node)| node).collect()
}

/// The order among nodes for one object (rendezvous hashing). It must not change from one version to another:
/// FNV-1a, with its bits mixed, because names of nodes differ in their last letters only.
fn rank<'a>(node: &'a str, object: &str) -> (u64, &'a str) {
    let hash = fnv1a(object.bytes().chain([0]).chain(node.bytes()));
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29), node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_five_thousand_nodes_two_speak_and_not_always_the_same() {
        let nodes: Vec<String> = (0..5000).map(|n| format!("node-{n}")).collect();
        let all = || nodes.iter().map(String::as_str);
        let speakers = |object: &str| -> Vec<&str> {
            // The best of all are found by one pass; that the others stay silent is asked of a sample.
            let mut ranked: Vec<_> = all().map(|node| rank(node, object)).collect();
            ranked.sort_unstable();
            let best: Vec<&str> = ranked.iter().rev().take(2).map(|(_, node)| *node).collect();
            assert!(best.iter().all(|node| speaks(node, all(), object, 2)));
            let silent = ranked.iter().rev().skip(2).step_by(97);
            assert!(silent.clone().all(|(_, node)| !speaks(node, all(), object, 2)));
            best
        };
        assert_ne!(speakers("shop/web"), speakers("shop/db"));
        let different: std::collections::HashSet<_> =
            (0..100).map(|n| speakers(&format!("shop/{n}"))[0]).collect();
        assert!(different.len() > 80, "{}", different.len());
    }

    #[test]
    fn a_node_that_goes_changes_no_others_place() {
        let nodes: Vec<String> = (0..50).map(|n| format!("node-{n}")).collect();
        let all = || nodes.iter().map(String::as_str);
        let before = chosen(all(), "shop/web", 4);
        assert_eq!(before.len(), 4);
        assert_eq!(chosen(all().rev(), "shop/web", 4), before, "whatever the order");
        let without: Vec<&str> = all().filter(|node| *node != before[1]).collect();
        let after = chosen(without, "shop/web", 4);
        assert_eq!([after[0], after[1], after[2]], [before[0], before[2], before[3]]);
        assert_eq!(chosen(["b", "b"], "shop/web", 4), ["b"]);
    }

    #[test]
    fn who_is_not_among_them_does_not_speak() {
        assert!(!speaks("a", ["b", "c"], "shop/web", 5));
        assert!(!speaks("a", [], "shop/web", 1));
        assert!(speaks("a", ["a"], "shop/web", 1));
    }
}
