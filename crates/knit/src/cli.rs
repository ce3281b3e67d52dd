//! What can be typed. What it means is in [`crate::command`].

use clap::{Parser, Subcommand};

use crate::command;

/// Kubernetes networking: networks, and every interface that connects a pod to one, as API objects.
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
    /// Run the controller: it numbers Networks, assigns addresses to nodes, and reports the status of
    /// Networks
    Controller(Box<command::controller::Args>),
    /// Check this node for problems, and say how to fix them
    Doctor(Box<command::doctor::Args>),
    /// Show packets that network policies drop on this node: source, destination and the policy
    Drops(command::drops::Args),
    /// Explain what network policies mean for a connection, rule by rule
    Explain(Box<command::explain::Args>),
    /// Show Networks, attachments, blocks or nodes
    Get(Box<command::get::Args>),
    /// Run as the CNI shim, as a container runtime does
    #[command(hide = true)]
    Cni,
    /// Install the CNI shim and its configuration where the container runtime looks for them
    Install(Box<command::install::Args>),
    /// Run a whole cluster on this machine: nodes, pods and an API, with nothing installed and no root
    Lab(Box<command::lab::Args>),
    /// Write the manual pages
    Man(command::man::Args),
    /// Run the node agent: it sets up the networks of this node's pods
    Node(Box<command::node::Args>),
    /// Implement this node's Services: a drop-in replacement for kube-proxy
    Proxy(Box<command::proxy::Args>),
    /// Uninstall Knit from this node, or clean up what is left of it in a cluster
    Uninstall(Box<command::uninstall::Args>),
}
