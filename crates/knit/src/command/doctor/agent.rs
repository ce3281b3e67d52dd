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
use knit_ledger::{AttachmentState, SandboxRecord, Scan};

use super::{Node, chain};

/// How long the agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

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
        Err(error) => return node.unknown(check, format!("{shown} cannot be looked at: {error}")),
    };
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let free_kib = free >> 10;
    let advice =
        format!("free space in {shown}: see what fills it (du -x {shown}); pods that run are not affected");
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
                "remove it; the agent makes the directory",
            );
            false
        }
        Ok(found) if found.permissions().mode() & 0o022 != 0 => {
            node.wrong(
                check,
                format!(
                    "{shown} can be written by others than its owner (mode {:o})",
                    found.permissions().mode() & 0o7777
                ),
                format!("chmod 0700 {shown}"),
            );
            true
        }
        Ok(_) => {
            node.good(check, format!("{shown} is there"));
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            node.wrong(
                check,
                format!("{shown} is not there: no agent has run on this node since boot"),
                "start the agent (knit node), or name its directory with --run-dir",
            );
            false
        }
        Err(error) => {
            node.unknown(check, format!("{shown} cannot be looked at: {error}; run it as root"));
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
                    format!("{shown} is open to others (mode {mode:o})"),
                    format!(
                        "chmod 0600 {shown}, and see who changed it; the agent still refuses other users"
                    ),
                );
            } else if found.uid() != 0 && found.uid() != own {
                let words = format!("{shown} belongs to user {}", found.uid());
                node.wrong("socket", words, "stop whatever made it, remove it, and restart the agent");
            } else {
                node.good("socket", format!("{shown} is there, for root alone"));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let advice = "start the agent and read its log; it opens the socket when it is ready to serve";
            return node.wrong("socket", format!("{shown} is not there: no agent serves"), advice);
        }
        Err(error) => {
            return node.unknown("socket", format!("{shown} cannot be looked at: {error}; run it as root"));
        }
    }
    match ask(&path) {
        Ok(Response::Ok(_)) => node.good("agent", "it answers, and is ready"),
        Ok(Response::Err(error)) => {
            let advice = "do what it says; until then new pods wait, and running ones go on";
            node.wrong(
                "agent",
                format!("it answers, and is not ready: {} {}", error.msg, error.details),
                advice,
            );
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => node.wrong(
            "agent",
            "nobody listens on its socket: it is stopped, or starting",
            "start it (knit node) and read its log; running pods go on, new ones wait, DELs are noted",
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
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
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
        let advice = "start the agent; it makes the ledger, and takes what the kernel has into it";
        return node.warning(check, format!("{} is not there", path.display()), advice);
    }
    let (records, scan) = match knit_ledger::read::<SandboxRecord>(&path) {
        Ok(found) => found,
        Err(error) => return node.unknown(check, format!("{}; run it as root", chain(&error))),
    };
    match scan {
        Scan::Whole => {
            let attachments: usize = records.iter().map(|r| r.attachments().len()).sum();
            node.good(check, format!("sound: {} sandboxes with {attachments} attachments", records.len()));
        }
        // An agent at work may be writing this very moment.
        Scan::TornTail { .. } => {
            node.good(check, "sound; its last write is unfinished, and the next start cuts it off");
        }
        Scan::Corrupt { why, .. } => {
            node.damaged = true;
            node.wrong(
                check,
                format!("{} is damaged: {why}", path.display()),
                "restart the agent: it sets the file aside and rebuilds it from the kernel; then see what \
                 else writes there",
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
    consistency(node, &records);
    node.records = Some(records);
}

fn consistency(node: &mut Node, records: &[SandboxRecord]) {
    let check = "ledger";
    let mut holders: BTreeMap<(&str, IpAddr), Vec<&str>> = BTreeMap::new();
    let mut unfinished = Vec::new();
    let mut gone = Vec::new();
    for record in records {
        let namespace = record.netns();
        if !namespace.path.as_os_str().is_empty() && knit_node::netns::is_gone(namespace) {
            gone.push(record.sandbox());
        }
        for attachment in record.attachments() {
            let plan = attachment.plan();
            for address in plan.lease.iter().flat_map(|lease| lease.addresses.iter()) {
                holders.entry((&plan.network, address)).or_default().push(record.sandbox());
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
            "delete one of these pods, and report it with the agent's log: this must not happen",
        );
    }
    if !unfinished.is_empty() {
        node.warning(
            check,
            format!("neither attached nor gone: {}", some(&unfinished)),
            "look again in a moment; if it stays, the agent's log says why it cannot finish",
        );
    }
    if !gone.is_empty() {
        node.warning(
            check,
            format!("network namespaces are gone whose DEL never came: {}", some(&gone)),
            "nothing: the agent removes them within a minute; if it stays, read its log",
        );
    }
}

/// The first few of a list.
pub fn some<T: AsRef<str>>(list: &[T]) -> String {
    let shown: Vec<&str> = list.iter().take(5).map(AsRef::as_ref).collect();
    let more = list.len().saturating_sub(shown.len());
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}
