//! `knit explain FROM TO[:PORT]`: what policies say about a connection, rule by rule.

mod known;
mod party;
mod show;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use knit_output::{Format, Note, note};
use knit_policy::model::{DEFAULT_NETWORK, Family, Name};
use knit_policy::verdict::{Flow, State};

use super::objects::From;
use known::Known;
use party::{Party, Target};
use show::Explained;

/// Explain what network policies mean for a connection, rule by rule
///
/// Reads pods, namespaces, nodes and policies of every kind once, and evaluates one connection: whether it is
/// allowed, which rule of which policy decides, on which side and in which tier, and why the others do not.
///
/// This shows what policies mean. Whether they are in force on a node is in its NodeNetwork.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # May this pod reach that one on TCP port 80?
  knit explain shop/web shop/db:5432

  # UDP; a port by the name that the pod gives it; without a port: a ping
  knit explain shop/web kube-system/coredns-7d9:53/udp
  knit explain shop/web shop/db:postgres
  knit explain shop/web shop/db

  # From or to a node or any address, in a Network of choice, for scripts
  knit explain node/worker-1 shop/db:5432
  knit explain 203.0.113.9 shop/web:443 --network blue -o json

  # Without Kubernetes: objects from files
  knit explain shop/web shop/db:5432 --objects-from ./objects")]
pub struct Args {
    /// The client: NAMESPACE/POD, node/NAME or an address
    from: String,

    /// The destination and its port: NAMESPACE/POD, node/NAME or an address; then :PORT, :PORT/udp or :NAME
    #[arg(value_name = "TO[:PORT]")]
    to: Target,

    /// The Network [default: the first that both are in]
    #[arg(long, value_name = "NETWORK")]
    network: Option<String>,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    source: From,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
enum Output {
    /// Words and a table of rules
    #[default]
    Table,
    /// A JSON list, with an item for each address family
    Json,
    /// YAML
    Yaml,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let known =
        runtime.block_on(async { known::read(&args.source.open_with(known::kinds()).await?).await })?;
    for problem in &known.problems {
        note(Note::Warning, problem);
    }
    let explained = explain(args, &known)?;
    if let Some(left) = explained.iter().find(|explained| !explained.is_enforced()) {
        let message = format!(
            "Knit does not enforce policies in Network {}: this is what the policies say, not what happens \
             to packets",
            left.network()
        );
        note(Note::Warning, message);
    }
    match args.output {
        Output::Table => knit_output::print(&show::text(&explained))?,
        Output::Json => knit_output::print_rows(Format::Json, &explained, || show::rules(&explained))?,
        Output::Yaml => knit_output::print_rows(Format::Yaml, &explained, || show::rules(&explained))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(args: &Args, known: &Known) -> Result<Vec<Explained>> {
    let (from, to) = (Party::find(&args.from, known)?, Party::find(&args.to.who, known)?);
    let network = network(args, &from, &to, known)?;
    let traffic = to.traffic(args.to.port.as_ref())?;
    let (sources, destinations) = (from.addresses(&network), to.addresses(&network));
    for (party, addresses) in [(&from, &sources), (&to, &destinations)] {
        if addresses.is_empty() {
            bail!(
                "{party} has no address in Network {network}: it may not exist yet, or is in another Network"
            );
        }
    }
    let mut explained = Vec::new();
    for family in Family::ALL {
        let of = |list: &[std::net::IpAddr]| list.iter().copied().find(|a| Family::of(*a) == family);
        let (Some(source), Some(destination)) = (of(&sources), of(&destinations)) else { continue };
        if let Some(service) = known.services.get(&destination).filter(|_| *network == *DEFAULT_NETWORK) {
            note(
                Note::Warning,
                format_args!(
                    "{destination} is the address of Service {service}: policies apply to the pod \
                    that receives the packet, so ask about that pod and its port (rule 29)"
                ),
            );
        }
        let flow = Flow { network: network.clone(), source, destination, traffic, state: State::New };
        let verdict = known.cluster.judge(&flow);
        let enforced = !known.left_to_others.contains(&network);
        explained.push(Explained::new(&from, &to, &flow, &verdict, enforced));
    }
    if explained.is_empty() {
        bail!("{from} and {to} have no address family in common in Network {network}");
    }
    Ok(explained)
}

/// The Network that was asked for, or the first that both are in.
fn network(args: &Args, from: &Party, to: &Party, known: &Known) -> Result<Name> {
    if let Some(name) = &args.network {
        if *name != *DEFAULT_NETWORK && !known.networks.iter().any(|n| **n == **name) {
            bail!("Network {name} does not exist: knit get networks lists them");
        }
        return Ok(name.as_str().into());
    }
    match (from.networks(), to.networks()) {
        (None, None) => Ok(DEFAULT_NETWORK.into()),
        (Some(list), None) | (None, Some(list)) => {
            Ok(list.into_iter().next().unwrap_or(DEFAULT_NETWORK.into()))
        }
        (Some(ours), Some(theirs)) => match ours.iter().find(|n| theirs.contains(n)) {
            Some(name) => Ok(name.clone()),
            None => bail!(
                "{from} is in Network {} and {to} in {}: they have no Network in common, so no packet can \
                 get from one to the other, whatever policies say",
                ours.join(", "),
                theirs.join(", ")
            ),
        },
    }
}
