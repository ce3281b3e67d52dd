//! `cargo xtask kube`: a real Kubernetes cluster on this machine, in namespaces, to try Knit on.
//!
//! [`components`] says what it is made of and [`build`] builds it, once; [`up`] starts it; [`bed::Bed`] is a
//! cluster that runs, and what tests use; [`machine`] is how control plane and nodes are kept apart from this
//! machine and from each other; [`mod@test`] has the end-to-end tests. docs/kubernetes-test-bed.md is for
//! people.

pub mod bed;
mod build;
mod certs;
mod cgroups;
mod command;
mod components;
mod control_plane;
mod dns;
mod e2e_images;
pub mod images;
pub mod knit;
mod machine;
mod net;
mod node;
mod paths;
mod test;
mod up;
pub mod wait;

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// What a bed is made with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
pub struct Options {
    /// How many nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub nodes: u8,
    /// No network plugin: nodes stay NotReady until one is installed. This is so unless --cni is given
    #[arg(long, conflicts_with = "cni")]
    #[serde(skip)]
    pub no_cni: bool,
    /// A network plugin to compare with
    #[arg(long)]
    pub cni: Option<Cni>,
    /// kube-proxy on every node
    #[arg(long)]
    pub kube_proxy: bool,
    /// CoreDNS in two pods, behind the Service kube-dns (10.96.0.10)
    #[arg(long)]
    pub dns: bool,
    /// Pods, services and nodes with IPv4 and IPv6
    #[arg(long)]
    pub dual_stack: bool,
    /// The prefix length of each node's IPv4 pod range [default: 24]
    #[arg(long, value_name = "LENGTH", value_parser = clap::value_parser!(u8).range(17..=29))]
    #[serde(default)]
    pub node_mask: Option<u8>,
    /// Print no phases
    #[arg(long)]
    #[serde(skip)]
    pub quiet: bool,
}

/// Network plugins that the bed can install by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cni {
    /// bridge, host-local and portmap of the containernetworking project
    Bridge,
}

impl Options {
    /// Two nodes without network plugin and proxy: what Knit is tried on.
    pub const BARE: Self = Self {
        nodes: 2,
        no_cni: false,
        cni: None,
        kube_proxy: false,
        dns: false,
        dual_stack: false,
        node_mask: None,
        quiet: false,
    };
}

/// A Kubernetes cluster on this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: command::Command,
}

pub fn run(args: Args) -> Result<()> {
    command::run(args.command)
}

/// A program that the bed uses, where it is built.
pub fn program(name: &str) -> Result<Option<PathBuf>> {
    let cache = paths::Cache::find()?;
    let Some(component) = components::ALL.iter().find(|c| c.programs.iter().any(|p| p.name == name)) else {
        return Ok(None);
    };
    let path = cache.programs(component.name, &component.key()?).join(name);
    Ok(path.is_file().then_some(path))
}
