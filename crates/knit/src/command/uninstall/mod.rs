//! `knit uninstall`: takes away what `knit install` and the agent put on a node, and what would keep a
//! cluster from forgetting Knit.

mod claims;
mod cluster;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use knit_kernel::netns::NetNs;
use knit_ledger::{Entry, Ledger, LedgerError};
use knit_output::{Note, note};

use super::install::{ASIDE, Places};
use super::objects::From;

/// Uninstall Knit from this node, or clean up what is left of it in a cluster
///
/// Without --purge only the CNI configuration and the shim are removed: new pods no longer get their network
/// from Knit, and running ones keep theirs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # On a node: remove the configuration and the shim
  knit uninstall

  # On a node, while the agent runs: check whether claims are prepared, whose pods cannot terminate without it
  knit uninstall --check

  # On a node, after the agent was stopped: also remove everything that it created
  knit uninstall --purge

  # Anywhere kubectl works, after agents and controller are gone: remove finalizers and taints
  knit uninstall --cluster")]
pub struct Args {
    #[command(flatten)]
    places: Places,

    /// Also remove everything else that the agent created on this node: interfaces, routes, rules,
    /// namespaces, files. Running pods lose their network
    #[arg(long)]
    purge: bool,

    /// The agent's runtime directory
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    /// The agent's directory for what persists across reboots
    #[arg(long, env = "KNIT_STATE_DIR", value_name = "DIR", default_value = "/var/lib/knit")]
    state_dir: PathBuf,

    /// Only check that no claims are prepared on this node: nothing is removed
    #[arg(long, conflicts_with_all = ["purge", "cluster", "abandon_claims", "stay"])]
    check: bool,

    /// Clean up in the cluster instead of on a node: finalizers of Knit's objects, taints of Nodes
    #[arg(long, conflicts_with = "purge")]
    cluster: bool,

    /// Continue although claims are prepared here: their pods cannot terminate until kubelet is restarted
    /// without them
    #[arg(long)]
    abandon_claims: bool,

    #[command(flatten)]
    from: From,

    /// Do not exit when done, but wait for a signal: for the pods of a DaemonSet
    #[arg(long)]
    stay: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.cluster {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(cluster::clean(&args.from))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.abandon_claims {
        claims::check_none(&args.run_dir)?;
    }
    if args.check {
        note(Note::Info, "no claims are prepared on this node");
        return Ok(ExitCode::SUCCESS);
    }
    // No new pods first; then what was made for those that were there.
    files(&args.places)?;
    if args.purge {
        purge(&args.run_dir, &args.state_dir)?;
    }
    if args.stay {
        note(Note::Info, "done; waiting to be stopped");
        wait()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes configuration and shim away, and gives others the names back that `knit install --set-aside` took.
pub fn files(places: &Places) -> Result<()> {
    for path in [places.configuration(), places.shim()] {
        if remove_file(&path)? {
            note(Note::Info, format!("{} is removed", path.display()));
        }
    }
    let entries = match fs::read_dir(&places.conf_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", places.conf_dir.display()));
        }
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|end| end == ASIDE) {
            let back = path.with_extension("");
            // What was installed under that name since then is newer.
            if back.exists() {
                remove_file(&path)?;
                continue;
            }
            fs::rename(&path, &back).with_context(|| format!("cannot rename {}", path.display()))?;
            note(Note::Info, format!("{} is back", back.display()));
        }
    }
    Ok(())
}

/// Takes everything away that an agent made here. Refuses while one runs.
fn purge(run_dir: &Path, state_dir: &Path) -> Result<()> {
    let ledger = run_dir.join("ledger");
    let lock = if run_dir.exists() {
        match Ledger::<Entry>::open(&ledger) {
            Ok(opened) => Some(opened.ledger),
            Err(LedgerError::Locked { holder, .. }) => {
                let who = holder.map_or_else(String::new, |pid| format!(" (process {pid})"));
                bail!(
                    "a node agent is running here{who}: stop it first, in a cluster by deleting the \
                    DaemonSet knit-node"
                );
            }
            // It is about to be deleted: what is in it does not matter.
            Err(error) => {
                note(Note::Warning, format!("{error}; continuing anyway"));
                None
            }
        }
    } else {
        None
    };
    let namespace = NetNs::current().context("cannot open this process's network namespace")?;
    let purged = knit_linux::purge(&namespace, &run_dir.join("netns"))
        .context("not everything could be removed; run this as root, or again")?;
    drop(lock);
    note(
        Note::Info,
        if purged.is_empty() {
            "no Knit objects are left in the kernel".into()
        } else {
            format!("removed {purged}")
        },
    );
    for folder in [run_dir, state_dir] {
        clear(folder)?;
    }
    Ok(())
}

/// Removes a folder with all that is in it. One that is mounted here, as in a container, stays and is
/// emptied.
fn clear(folder: &Path) -> Result<()> {
    let failed = |path: &Path| format!("cannot remove {}", path.display());
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| failed(folder)),
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_folder = path.symlink_metadata().is_ok_and(|m| m.is_dir());
        let removed = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| failed(&path));
            }
            _ => {}
        }
    }
    match fs::remove_dir(folder) {
        Ok(()) => note(Note::Info, format!("{} is removed", folder.display())),
        Err(error) if matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::NotFound) => {
            note(Note::Info, format!("{} is emptied", folder.display()));
        }
        Err(error) => return Err(error).with_context(|| failed(folder)),
    }
    Ok(())
}

fn remove_file(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}

fn wait() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}
