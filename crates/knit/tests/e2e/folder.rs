//! The complete folder of docs/objects.md, as it stands there: an agent starts from it and gives pods what it
//! says.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use knit_kernel::testing::{eventually, skip};

use crate::support::{Cluster, SOON, addresses, e2e, shim};

const PAGE: &str = include_str!("../../../../docs/objects.md");
const RECIPE: &str = include_str!("../../../../docs/agent.md");

/// The files of the page: each has its name in a comment before its block.
fn files() -> Vec<(String, String)> {
    let blocks = PAGE.split("<!-- ").skip(1).map(|part| {
        let (name, rest) = part.split_once(" -->").expect("a name");
        let text = rest.split("```yaml\n").nth(1).and_then(|t| t.split("```").next()).expect("a block");
        (name.to_owned(), text.to_owned())
    });
    blocks.collect()
}

#[test]
fn the_folder_of_the_page_is_complete() {
    e2e(|| {
        let mut cluster = Cluster::new();
        let folder = PathBuf::from("/run/page");
        std::fs::create_dir_all(&folder).expect("a folder");
        let files = files();
        assert_eq!(files.len(), 2, "the page has lost its files");
        for (name, text) in &files {
            // The page's node is called worker-1; this one is a.
            let text = text.replace("worker-1", "a").replace("192.0.2.10", "192.168.7.1");
            std::fs::write(folder.join(name), text).expect("written");
        }
        cluster.a.objects.clone_from(&folder);
        cluster.a.start();
        let node = &cluster.a;
        let (web, result) = node.add("web", "lab");
        let (db, other) = node.add("db", "lab");
        for (interface, prefix) in [("eth0", "10.244.1."), ("net1", "10.99.0.")] {
            let to = addresses(&other, interface)[0];
            assert!(to.to_string().starts_with(prefix), "{interface}: {to}");
            assert!(web.talks(&db.space, to, SOON), "{interface}: {to}");
        }
        assert!(addresses(&result, "net1")[0].to_string().starts_with("10.99.0."));
        eventually("knit get shows them", SOON, || {
            let mut get = node.command("get");
            get.args(["networks", "--objects-from", "/run/page", "--objects-to", "/run/written-a"]);
            let shown = String::from_utf8(get.output().expect("knit runs").stdout).expect("text");
            let line = shown.lines().find(|line| line.starts_with("lab ")).unwrap_or_default();
            let columns: Vec<&str> = line.split_whitespace().collect();
            // Two pods and the router, out of 32 addresses.
            columns.get(4..7) == Some(&["3", "29", "True"])
        });
    });
}

/// The commands of docs/agent.md that try an agent in namespaces of its own, as they stand there.
#[test]
fn the_recipe_for_private_namespaces_works() {
    e2e(|| {
        for tool in ["unshare", "ip"] {
            if Command::new(tool).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
                return skip(format_args!("the recipe needs {tool}, which this machine has not"));
            }
        }
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("objects")).expect("a folder");
        for (name, text) in files() {
            std::fs::write(folder.path().join("objects").join(name), text).expect("written");
        }
        let (_, recipe) = RECIPE.split_once("```console\n$ unshare ").expect("the recipe");
        let recipe = recipe.split("```").next().expect("an end");
        let mut script = "set -e\n".to_owned();
        for line in recipe.lines().filter_map(|line| line.strip_prefix("# ")) {
            script += line;
            if line.ends_with('&') {
                // A reader takes longer than the agent; a script does not.
                script += "\nuntil [ -S /run/knit/cni.sock ]; do sleep 0.1; done";
            }
            script += "\n";
        }
        let programs = shim().parent().expect("a folder").display().to_string();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
        // All that it starts ends with it.
        let mut shell = Command::new("unshare");
        shell.args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "timeout",
            "120",
            "bash",
            "-c",
            &script,
        ]);
        let output = shell
            .current_dir(folder.path())
            .env("PATH", path)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .output();
        let output = output.expect("unshare runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        for words in ["inet 10.244.1.", "inet 10.99.0.", "lab       Layer2"] {
            assert!(said.contains(words), "{words} is not in {said}");
        }
    });
}
