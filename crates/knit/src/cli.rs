//! What can be typed. What it means is in [`crate::command`].

use clap::{Parser, Subcommand};

use crate::command;

/// Kubernetes networking: networks, and every interface that joins a pod to one, as API objects.
#[derive(Debug, Parser)]
#[command(name = "knit", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands, one file each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the completion script of a shell
    Completions(command::completions::Args),
    /// Check a network runtime against the profiles of KNI v1alpha1
    Conformance(command::conformance::Args),
    /// Run the controller: it numbers Networks, gives nodes their addresses, and says how Networks are
    Controller(Box<command::controller::Args>),
    /// Look for what is wrong on this node, and say what to do
    Doctor(Box<command::doctor::Args>),
    /// Say what network policies say about a connection, rule by rule
    Explain(Box<command::explain::Args>),
    /// Show Networks, attachments, blocks or nodes
    Get(Box<command::get::Args>),
    /// Be the CNI shim, as a container runtime runs it
    #[command(hide = true)]
    Cni,
    /// Put the CNI shim and its configuration where the container runtime looks for them
    Install(Box<command::install::Args>),
    /// Run a whole cluster on this machine: nodes, pods and an API, with nothing installed and no root
    Lab(Box<command::lab::Args>),
    /// Write the manual pages
    Man(command::man::Args),
    /// Run the node agent: it gives the pods of this node their networks
    Node(Box<command::node::Args>),
    /// Make this node's Services work: a drop-in for kube-proxy
    Proxy(Box<command::proxy::Args>),
    /// Take Knit away from this node, or what is left of it from a cluster
    Uninstall(Box<command::uninstall::Args>),
}
