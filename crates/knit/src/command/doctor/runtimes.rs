//! Network runtimes beside the agent's own: who may reach their sockets, and whether they answer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use knit_api::names;
use knit_ledger::SandboxRecord;
use knit_runtime::wire::RemoteRuntime;
use knit_runtime::{Runtime as _, Status};

use super::{Node, chain};

const CHECK: &str = "runtimes";

/// How long a runtime may take to answer.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(3);

pub async fn look(node: &mut Node) {
    let folder = node.args.run_dir.join("runtimes");
    let used: BTreeSet<String> = node
        .records
        .iter()
        .flatten()
        .flat_map(SandboxRecord::attachments)
        .map(|attachment| attachment.plan().runtime.clone())
        .filter(|runtime| runtime != names::LINUX_RUNTIME)
        .collect();
    let sockets = match sockets(&folder) {
        Ok(sockets) => sockets,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return node.unknown(CHECK, format!("cannot read {}: {error}", folder.display())),
    };
    let mut answering = BTreeSet::new();
    for socket in &sockets {
        if let Err(problem) = knit_node::runtimes::closed_to_others(socket) {
            node.wrong(
                CHECK,
                problem,
                "until then the agent does not use it; check what else was opened there",
            );
            continue;
        }
        let shown = socket.display();
        match ask(socket).await {
            Ok((name, status)) if status.ready => {
                node.good(CHECK, format!("{name} answers at {shown} and is ready"));
                answering.insert(name);
            }
            Ok((name, status)) => {
                let words = format!("{name} at {shown} is not ready: {}", status.message);
                node.wrong(CHECK, words, "follow its message; its log has more");
                answering.insert(name);
            }
            Err(problem) => node.wrong(
                CHECK,
                format!("no answer at {shown}: {problem}"),
                "restart that runtime and read its log: until it answers, its Networks accept no \
                pods; running pods continue",
            ),
        }
    }
    for name in used.difference(&answering) {
        node.wrong(
            CHECK,
            format!("pods here are attached by network runtime {name}, which does not answer"),
            "start it: until then its interfaces are neither detached nor maintained",
        );
    }
    if sockets.is_empty() && used.is_empty() {
        node.good(CHECK, "none except the agent's own");
    }
}

fn sockets(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "sock") {
            sockets.push(path);
        }
    }
    sockets.sort();
    Ok(sockets)
}

async fn ask(socket: &Path) -> Result<(String, Status), String> {
    let runtime = RemoteRuntime::new(socket, RUNTIME_TIMEOUT).map_err(|error| chain(&error))?;
    let asked = async { Ok((runtime.info().await?.name, runtime.status().await?)) };
    match tokio::time::timeout(RUNTIME_TIMEOUT, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => {
            let error: knit_runtime::Error = error;
            Err(chain(&error))
        }
        Err(_) => Err(format!("no answer within {} s", RUNTIME_TIMEOUT.as_secs())),
    }
}
