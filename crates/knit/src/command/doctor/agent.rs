//! The agent: its directories, its socket, whether it answers, and its ledger.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use knit_cni::protocol::{self, Command, PROTOCOL_VERSION, Request, Response};
use knit_cni::{Args, NetworkConfig};
use knit_ledger::{AttachmentState, Entry, SandboxRecord, Scan};

use super::{Node, chain};

/// How long the agent may take to answer.
const AGENT_TIMEOUT: Duration = Duration::from_secs(3);

pub fn look(node: &mut Node) {
    if !directory(node) {
        return;
    }
    space(node);
    socket(node);
    ledger(node);
}

/// Less than this, and the ledger may not take the next pod.
const TOO_LITTLE: u64 = 256 << 10;
/// Less than this is worth a look.
const LITTLE: u64 = 4 << 20;

/// Whether there is room to write down what is made.
fn space(node: &mut Node) {
    let check = "space";
    let path = node.args.run_dir.clone();
    let shown = path.display();
    let found = match rustix::fs::statvfs(&path) {
        Ok(found) => found,
        Err(error) => return node.unknown(check, format!("cannot inspect {shown}: {error}")),
    };
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let free_kib = free >> 10;
    let advice =
        format!("free space in {shown}: check what fills it (du -x {shown}); running pods are not affected");
    if free < TOO_LITTLE || (found.f_files > 0 && found.f_favail == 0) {
        let words =
            format!("{shown} is full ({free_kib} KiB, {} files free): new pods are refused", found.f_favail);
        node.wrong(check, words, advice);
    } else if free < LITTLE {
        node.warning(check, format!("{shown} has only {free_kib} KiB free"), advice);
    } else {
        node.good(check, format!("{shown} has {} MiB free", free >> 20));
    }
}

/// Whether there is something to look at.
fn directory(node: &mut Node) -> bool {
    let check = "run-time directory";
    let path = node.args.run_dir.clone();
    let shown = path.display();
    match std::fs::metadata(&path) {
        Ok(found) if !found.is_dir() => {
            node.wrong(
                check,
                format!("{shown} is not a directory"),
                "remove it; the agent creates the directory",
            );
            false
        }
        Ok(found) if found.permissions().mode() & 0o022 != 0 => {
            node.wrong(
                check,
                format!(
                    "{shown} is writable by other users than its owner (mode {:o})",
                    found.permissions().mode() & 0o7777
                ),
                format!("chmod 0700 {shown}"),
            );
            true
        }
        Ok(_) => {
            node.good(check, format!("{shown} exists"));
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            node.wrong(
                check,
                format!("{shown} does not exist: no agent has run on this node since boot"),
                "start the agent (knit node), or specify its directory with --run-dir",
            );
            false
        }
        Err(error) => {
            node.unknown(check, format!("cannot inspect {shown}: {error}; run this as root"));
            false
        }
    }
}

fn socket(node: &mut Node) {
    let path = node.socket();
    let shown = path.display().to_string();
    match std::fs::metadata(&path) {
        Ok(found) => {
            let mode = found.permissions().mode() & 0o777;
            let own = rustix::process::geteuid().as_raw();
            if mode & 0o077 != 0 {
                node.wrong(
                    "socket",
                    format!("{shown} is accessible to other users (mode {mode:o})"),
                    format!(
                        "chmod 0600 {shown}, and find out who changed it; the agent still refuses other users"
                    ),
                );
            } else if found.uid() != 0 && found.uid() != own {
                let words = format!("{shown} belongs to user {}", found.uid());
                node.wrong("socket", words, "stop whatever created it, remove it, and restart the agent");
            } else {
                node.good("socket", format!("{shown} exists, accessible only to root"));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let advice = "start the agent and read its log; it opens the socket when it is ready to serve";
            return node.wrong("socket", format!("{shown} does not exist: no agent is serving"), advice);
        }
        Err(error) => {
            return node.unknown("socket", format!("cannot inspect {shown}: {error}; run this as root"));
        }
    }
    match ask(&path) {
        Ok(Response::Ok(_)) => node.good("agent", "it answers and is ready"),
        Ok(Response::Err(error)) => {
            let advice = "follow its message; until then new pods wait, and running ones continue";
            node.wrong(
                "agent",
                format!("it answers but is not ready: {} {}", error.msg, error.details),
                advice,
            );
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => node.wrong(
            "agent",
            "nothing is listening on its socket: it is stopped, or starting",
            "start it (knit node) and read its log; running pods continue, new ones wait, DELs are recorded",
        ),
        Err(error) => {
            node.wrong(
                "agent",
                format!("it does not answer: {error}"),
                "read its log, and restart it if it hangs",
            );
        }
    }
}

fn ask(socket: &Path) -> io::Result<Response> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(AGENT_TIMEOUT))?;
    stream.set_write_timeout(Some(AGENT_TIMEOUT))?;
    let config = NetworkConfig::parse(br#"{"cniVersion":"1.1.0","name":"knit"}"#);
    let request = Request {
        version: PROTOCOL_VERSION,
        command: Command::Status,
        container_id: String::new(),
        netns: String::new(),
        ifname: String::new(),
        args: Args::default(),
        path: String::new(),
        config: config.map_err(|e| io::Error::other(e.msg))?,
        timeout_ms: None,
    };
    protocol::send(&mut stream, &request).map_err(io::Error::other)?;
    protocol::receive(&mut stream).map_err(io::Error::other)
}

fn ledger(node: &mut Node) {
    let check = "ledger";
    let path = node.args.run_dir.join("ledger");
    if !path.exists() {
        let advice = "start the agent; it creates the ledger, and rebuilds it from the kernel";
        return node.warning(check, format!("{} does not exist", path.display()), advice);
    }
    let (content, scan) = match knit_ledger::read::<Entry>(&path) {
        Ok(found) => found,
        Err(error) => return node.unknown(check, format!("{}; run this as root", chain(&error))),
    };
    let records: Vec<SandboxRecord> = content.records.values().filter_map(|e| e.sandbox().cloned()).collect();
    match scan {
        Scan::Whole if content.unreadable.is_empty() => {
            let attachments: usize = records.iter().map(|r| r.attachments().len()).sum();
            let reserved = content.records.len() - records.len();
            let claims = if reserved > 0 { format!(", {reserved} reservations") } else { String::new() };
            let words = format!("intact: {} sandboxes with {attachments} attachments{claims}", records.len());
            node.good(check, words);
        }
        // Said below, one by one.
        Scan::Whole => {}
        // An agent at work may be writing this very moment.
        Scan::TornTail { .. } => {
            node.good(check, "intact; its last write is incomplete, and the next start truncates it");
        }
        Scan::Corrupt { why, .. } => {
            node.damaged = true;
            node.wrong(
                check,
                format!("{} is damaged: {why}", path.display()),
                "restart the agent: it sets the file aside and rebuilds it from the kernel; then \
                 find out what else writes there",
            );
        }
        Scan::Newer { version } => {
            let words = format!("it has format {version}, which a newer agent wrote");
            return node.wrong(
                check,
                words,
                "use the knit of that version, or drain the node and remove the file",
            );
        }
    }
    for record in content.unreadable.values() {
        let whose = record.pod().map(|pod| format!(" of pod {pod}")).unwrap_or_default();
        node.wrong(
            check,
            format!("the record of sandbox {}{whose} cannot be read: {}", record.key(), record.why()),
            "delete that pod: its addresses stay reserved and its networks are not maintained until then; if \
             a newer agent wrote it, run that one again",
        );
        // Without its owner, whatever the ledger does not have may be that one's.
        node.damaged |= record.sandbox().is_none();
    }
    consistency(node, &records);
    node.records = Some(records);
    node.unreadable = content.unreadable.into_values().collect();
}

fn consistency(node: &mut Node, records: &[SandboxRecord]) {
    let check = "ledger";
    let mut holders: BTreeMap<(&str, IpAddr), Vec<&str>> = BTreeMap::new();
    let mut unfinished = Vec::new();
    let mut gone = Vec::new();
    for record in records {
        let namespace = record.netns();
        if !namespace.path.as_os_str().is_empty() && knit_node::netns::is_gone(namespace) {
            gone.push(record.sandbox().as_str());
        }
        for attachment in record.attachments() {
            let plan = attachment.plan();
            for address in plan.lease.iter().flat_map(|lease| lease.addresses.iter()) {
                holders.entry((&plan.network, address)).or_default().push(record.sandbox().as_str());
            }
            if !matches!(attachment.state(), AttachmentState::Attached(_)) {
                unfinished.push(format!("{} of {}", plan.interface, record.sandbox()));
            }
        }
    }
    for ((network, address), sandboxes) in holders.iter().filter(|(_, sandboxes)| sandboxes.len() > 1) {
        node.wrong(
            check,
            format!("address {address} of Network {network} is recorded for {}", sandboxes.join(" and ")),
            "delete one of these pods, and report this with the agent's log: it is a bug",
        );
    }
    if !unfinished.is_empty() {
        node.warning(
            check,
            format!("neither attached nor gone: {}", some(&unfinished)),
            "check again in a moment; if it persists, the agent's log says why it cannot finish",
        );
    }
    if !gone.is_empty() {
        node.warning(
            check,
            format!("network namespaces are gone without a DEL: {}", some(&gone)),
            "nothing: the agent removes them within a minute; if it persists, read its log",
        );
    }
}

/// The first few of a list.
pub fn some<T: AsRef<str>>(list: &[T]) -> String {
    let shown: Vec<&str> = list.iter().take(5).map(AsRef::as_ref).collect();
    let more = list.len().saturating_sub(shown.len());
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}
