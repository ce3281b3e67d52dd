//! What cannot work is refused in clear words, with nothing half-made.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Output};

use knit_kernel::testing::{has_own_user_namespace, in_namespaces, skip};

use crate::support::text;

const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team, labels: {team: a}}\n---\n";

fn up(dir: &Path, manifest: &str, more: &[&str]) -> Output {
    let file = dir.join("m.yaml");
    std::fs::write(&file, manifest).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
    command.args(["lab", "up"]).args(more).arg(&file).env("XDG_RUNTIME_DIR", dir).env_remove("KNIT_LAB");
    command.output().expect("knit runs")
}

/// What is said about manifests that must be refused.
#[track_caller]
fn refused(manifest: &str, more: &[&str]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let output = up(dir.path(), manifest, more);
    assert!(!output.status.success(), "it must be refused: {}", text(&output));
    assert!(!dir.path().join("knit-lab").exists(), "something was made: {}", text(&output));
    text(&output)
}

fn network(name: &str, cidr: &str, more: &str) -> String {
    format!(
        "apiVersion: knit.dev/v1alpha1\nkind: Network\nmetadata: {{name: {name}}}\n\
         spec: {{topology: Layer3, subnets: [{{cidr: {cidr}}}]{more}}}\n---\n"
    )
}

fn pod(namespace: &str, annotation: &str, value: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: a, namespace: {namespace}, annotations: \
         {{{annotation}: '{value}'}}}}\n\
         spec: {{containers: [{{name: c, image: x}}]}}\n---\n"
    )
}

#[test]
fn an_unknown_field_or_kind() {
    let said = refused("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {contaners: []}\n", &[]);
    assert!(said.contains("unknown field \"spec.contaners\""), "{said}");
    let said = refused(&network("red", "10.77.0.0/24", "").replace("subnets", "subnetz"), &[]);
    assert!(said.contains("Network red") && said.contains("unknown field \"spec.subnetz\""), "{said}");
    let said = refused("apiVersion: knit.dev/v1alpha1\nkind: Netwerk\nmetadata: {name: a}\n", &[]);
    assert!(said.contains("no matches for kind \"Netwerk\""), "{said}");
    let said = refused(&network("red", "10.77.0.1/24", ""), &[]);
    assert!(said.contains("host bits set"), "{said}");
}

#[test]
fn a_network_that_overlaps_nodes_services_or_the_default_one() {
    for (cidr, whom) in [
        ("10.244.7.0/24", "Network red (10.244.7.0/24) overlaps Network default (10.244.0.0/16)"),
        ("10.96.0.0/24", "overlaps the service range 10.96.0.0/16"),
        ("172.20.0.0/24", "overlaps the nodes' range 172.20.0.0/16"),
        ("\"fd20::/48\"", "overlaps the nodes' range fd20::/64"),
    ] {
        let said = refused(&network("red", cidr, ""), &[]);
        assert!(said.contains(whom), "{said}");
    }
}

#[test]
fn a_pod_on_a_network_that_is_not_there_or_not_for_it() {
    let said = refused(&pod("default", "knit.dev/networks", "nowhere"), &[]);
    assert!(said.contains("Pod default/a requests Network nowhere, which does not exist"), "{said}");
    let said = refused(&pod("default", "knit.dev/primary", "nowhere"), &[]);
    assert!(said.contains("Network nowhere, which does not exist"), "{said}");
    let closed = network("red", "10.77.0.0/24", "") + NAMESPACE + &pod("team", "knit.dev/networks", "red");
    let said = refused(&closed, &[]);
    assert!(
        said.contains(
            "Network red, which does not allow namespace team to attach: check its \
        allowedNamespaces"
        ),
        "{said}"
    );
    let said = refused(&pod("nowhere", "a", "b"), &[]);
    assert!(said.contains("namespaces \"nowhere\" not found"), "{said}");
}

#[test]
fn a_name_a_file_or_a_program_that_cannot_be() {
    let said = refused(NAMESPACE, &["--name", "no/good"]);
    assert!(said.contains("is not a valid lab name"), "{said}");
    let said = refused(NAMESPACE, &["no-such-file.yaml"]);
    assert!(said.contains("cannot read manifest no-such-file.yaml"), "{said}");
    let said = refused("a: [\n", &[]);
    assert!(said.contains("cannot read manifest") && said.contains("m.yaml"), "{said}");
}

#[test]
fn a_port_that_is_taken() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let said = refused(NAMESPACE, &["--api-port", &port]);
    assert!(
        said.contains(&format!("port {port} of 127.0.0.1 is in use: set another one with --api-port")),
        "{said}"
    );
}

/// The limits of user namespaces are those of the namespace one is in, so that they can be closed for this
/// test alone.
#[test]
fn no_user_namespaces() {
    in_namespaces(|| {
        if !has_own_user_namespace() {
            return skip("user namespaces are forbidden here, and the limits would be the machine's own");
        }
        for limit in ["max_user_namespaces", "max_net_namespaces"] {
            if let Err(error) = std::fs::write(format!("/proc/sys/user/{limit}"), "0") {
                return skip(format!("user.{limit} cannot be set here: {error}"));
            }
        }
        let said = refused(NAMESPACE, &[]);
        assert!(said.contains("new namespaces are forbidden here"), "{said}");
        assert!(said.contains("sysctl -w user.max_user_namespaces=10000 opens it"), "{said}");
        assert!(said.contains("or run as root"), "{said}");
    });
}

/// Where user namespaces are forbidden, root has the other namespaces without one, and the limits are the
/// machine's: the test above must leave them alone.
#[test]
fn limits_of_a_machine_without_user_namespaces_are_left_alone() {
    const USERS: &str = "/proc/sys/user/max_user_namespaces";
    const NETWORKS: &str = "/proc/sys/user/max_net_namespaces";
    in_namespaces(|| {
        if !has_own_user_namespace() {
            return skip("user namespaces are forbidden here, and the limits would be the machine's own");
        }
        // This namespace is that machine.
        if let Err(error) = std::fs::write(USERS, "0") {
            return skip(format!("{USERS} cannot be set here: {error}"));
        }
        let before = std::fs::read_to_string(NETWORKS).expect("a limit");
        assert_ne!(before.trim(), "0");
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "refused::no_user_namespaces", "--nocapture"])
            .env_remove("KNIT_TEST_IN_NAMESPACES")
            .env_remove("KNIT_TEST_STRICT")
            .env_remove("KNIT_TEST_SKIPS")
            .output()
            .expect("this test runs again");
        assert!(text(&output).contains("running 1 test"), "{}", text(&output));
        assert_eq!(std::fs::read_to_string(NETWORKS).expect("a limit"), before, "{}", text(&output));
    });
}
