//! `knit get KIND`: Networks, attachments, blocks and nodes, as a table or for scripts.

mod local;
mod summary;
mod tables;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use knit_api::{AddressBlock, Network, NetworkAttachment, NodeNetwork};
use knit_objects::{Key, Object};
use knit_output::Format;
use serde::Serialize;

use super::objects::From;
use tables::{Columns, table};

/// Show Networks, attachments, blocks or nodes
///
/// The default Network's attachments are not written to the API unless its spec says so; on a node, --local
/// lists all of them, from the agent's ledger.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  knit get networks
  knit get attachments -n shop -o wide
  kubectl knit get attachments -A
  knit get blocks -o json

  # On a node: every attachment that its agent made, whether or not an API server answers
  knit get attachments --local

  # Without Kubernetes
  knit get nodes --objects-from ./objects")]
pub struct Args {
    /// The kind of objects to show
    kind: Kind,

    /// Only objects with these names
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    /// Only attachments of this namespace
    #[arg(short, long)]
    namespace: Option<String>,

    /// Attachments of all namespaces, which is also the default without -n; for kubectl users
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,

    /// Attachments from this node's ledger instead of the API
    #[arg(long, conflicts_with_all = ["objects_from", "kubeconfig", "api_url"])]
    local: bool,

    /// The agent's runtime directory, for --local
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    #[command(flatten)]
    from: From,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Kind {
    /// What pods attach to
    #[value(alias = "network")]
    Networks,
    /// One pod interface on one Network each
    #[value(alias = "attachment")]
    Attachments,
    /// Which node owns which range of which Network
    #[value(alias = "block")]
    Blocks,
    /// What each node has
    #[value(alias = "node")]
    Nodes,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
enum Output {
    /// Columns
    #[default]
    Table,
    /// More columns
    Wide,
    /// One JSON list
    Json,
    /// YAML
    Yaml,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.local {
        if args.kind != Kind::Attachments {
            bail!("--local only shows attachments: leave it out, or list attachments");
        }
        return show(local::attachments(&args.run_dir)?, args);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the async runtime")?.block_on(fetch(args))
}

async fn fetch(args: &Args) -> Result<ExitCode> {
    let objects = args.from.open().await?;
    match args.kind {
        Kind::Networks => {
            let mut networks = objects.list::<Network>(None).await?;
            // With a folder there is no controller that would sum up what the nodes say.
            if args.from.objects_from.is_some() {
                summary::fill_in(&mut networks, &objects.list::<NodeNetwork>(None).await?);
            }
            show(networks, args)
        }
        Kind::Attachments => show(objects.list::<NetworkAttachment>(args.namespace.as_deref()).await?, args),
        Kind::Blocks => show(objects.list::<AddressBlock>(None).await?, args),
        Kind::Nodes => show(objects.list::<NodeNetwork>(None).await?, args),
    }
}

/// Prints objects; a name that was asked for and is not there is an exit code of 1.
fn show<K: Object + Columns + Serialize>(mut objects: Vec<K>, args: &Args) -> Result<ExitCode> {
    if let Some(namespace) = &args.namespace {
        objects.retain(|o| o.meta().namespace.as_ref().is_none_or(|n| n == namespace));
    }
    let mut code = ExitCode::SUCCESS;
    if !args.names.is_empty() {
        objects.retain(|o| o.meta().name.as_ref().is_some_and(|n| args.names.contains(n)));
        for name in &args.names {
            if !objects.iter().any(|o| o.meta().name.as_ref() == Some(name)) {
                knit_output::note(knit_output::Note::Warning, format_args!("{name} does not exist"));
                code = ExitCode::FAILURE;
            }
        }
    }
    objects.sort_by_cached_key(|o| Key::of(o).to_string());
    let format = match args.output {
        Output::Table | Output::Wide if objects.is_empty() => {
            knit_output::note(knit_output::Note::Info, "nothing found");
            return Ok(code);
        }
        Output::Table | Output::Wide => Format::Table,
        Output::Json => Format::Json,
        Output::Yaml => Format::Yaml,
    };
    knit_output::print_rows(format, &objects, || table(&objects, args.output == Output::Wide))?;
    Ok(code)
}
