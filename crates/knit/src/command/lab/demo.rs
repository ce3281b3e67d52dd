//! `knit lab demo`: what Knit does, proved step by step before your eyes, and taken away again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use knit_lab::cluster::{Lab, Manifests, Options, RunningPod};
use owo_colors::OwoColorize as _;
use serde_json::Value;

use super::inside::inside;
use super::map::Map;
use super::picture;

/// What the demo applies.
pub const MANIFESTS: &str = include_str!("demo.yaml");
/// Who gets no answer is not waited for any longer.
const SILENCE: &str = "700";

/// Show in a few seconds what Knit does, then remove everything again
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the map to this file [default: knit-lab.svg in the directory for temporary files]
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Do not write the map to a file
    #[arg(long, conflicts_with = "svg")]
    no_svg: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let svg = match (&args.svg, args.no_svg) {
        (_, true) => None,
        (Some(path), _) => Some(path.clone()),
        (None, _) => Some(std::env::temp_dir().join("knit-lab.svg")),
    };
    inside(|| Ok(()), || (), |()| async move { Demo::begin().await?.show(svg.as_deref()).await })
}

struct Demo {
    lab: Lab,
    started: Instant,
}

impl Demo {
    async fn begin() -> Result<Self> {
        let started = Instant::now();
        say("A cluster of two nodes in this process: no root, nothing installed, the machine's network \
             untouched.\n")?;
        let lab = Lab::start(Options::default()).await?;
        let demo = Self { lab, started };
        let nodes = demo.lab.nodes();
        let names: Vec<String> = nodes.iter().map(|n| format!("{} ({})", n.name, n.addresses()[0])).collect();
        demo.step("two nodes", &format!("{}, each with a real node agent", names.join(" and ")))?;
        Ok(demo)
    }

    async fn show(self, svg: Option<&Path>) -> Result<ExitCode> {
        let manifests = Manifests::parse("demo.yaml", MANIFESTS)?;
        self.lab.apply(&manifests)?;
        self.lab.wait_for_pods(Duration::from_secs(30), |_| {}).await?;
        let pods = self.pods(&manifests)?;
        self.step(
            "two tenants",
            "namespaces red and blue, each with its own Network: both have 10.77.0.0/24 and fd77::/64",
        )?;
        for pod in &pods {
            let addresses: Vec<String> = pod.addresses.iter().map(IpAddr::to_string).collect();
            let name = format!("{}/{}", pod.namespace, pod.name);
            say(&format!(
                "         {}  {}  {}\n",
                paint(&pod.namespace, &format!("{name:<12}")),
                pod.node,
                addresses.join("  ")
            ))?;
        }
        self.reach(&pods).await?;
        self.overlap(&pods).await?;
        self.isolation(&pods).await?;
        self.service().await?;
        self.agents_die(&pods).await?;

        let map = Map::of(&self.lab, &pods);
        say(&format!("\n{}\n", map.text()))?;
        if let Some(path) = svg {
            std::fs::write(path, picture::svg(&map))
                .with_context(|| format!("cannot write the map to {}", path.display()))?;
            say(&format!("The map as a picture: {}\n", path.display()))?;
        }
        let (lab, started) = (self.lab, self.started);
        lab.stop().await;
        say(&format!(
            "Everything is removed again, after {:.1} s. To run your own: knit lab up, then knit \
            lab exec red/client -- sh\n",
            started.elapsed().as_secs_f64()
        ))?;
        Ok(ExitCode::SUCCESS)
    }

    fn pods(&self, manifests: &Manifests) -> Result<Vec<RunningPod>> {
        let of_kind = manifests.objects().iter().filter(|object| object["kind"] == "Pod");
        of_kind
            .map(|pod| {
                let metadata = &pod["metadata"];
                let text = |field: &str| metadata[field].as_str().unwrap_or("default").to_owned();
                Ok(self.lab.pod(&text("namespace"), &text("name"))?)
            })
            .collect()
    }

    /// Pods of one Network reach each other, across nodes and in both families.
    async fn reach(&self, pods: &[RunningPod]) -> Result<()> {
        let mut said = Vec::new();
        for tenant in ["red", "blue"] {
            let web = find(pods, tenant, "web-2")?;
            for address in &web.addresses {
                let answer = self.ask(tenant, address, 8080, &[]).await?;
                ensure!(
                    answer.contains(&format!("{tenant}/web-2 on node-2")),
                    "{tenant}/web-2 did not answer: {answer}"
                );
                said.push(format!("{tenant}/client (node-1) asks {address}: \"{}\"", answer.trim()));
            }
        }
        self.step("across nodes", "pods of one Network reach each other, over IPv4 and IPv6")?;
        said.iter().try_for_each(|line| say(&format!("         {line}\n")))
    }

    /// One address, two tenants, two answers.
    async fn overlap(&self, pods: &[RunningPod]) -> Result<()> {
        let addresses = |tenant: &str| -> BTreeSet<IpAddr> {
            let of = pods.iter().filter(|pod| pod.namespace == tenant);
            of.flat_map(|pod| pod.addresses.iter().copied().filter(IpAddr::is_ipv4)).collect()
        };
        let shared = addresses("red").intersection(&addresses("blue")).next().copied();
        let Some(shared) = shared else {
            return self.step(
                "same addresses",
                "both Networks have the same range; here no two pods got the same address",
            );
        };
        let mut said = Vec::new();
        for tenant in ["red", "blue"] {
            let answer = self.ask(tenant, &shared, 8080, &[]).await?;
            ensure!(answer.starts_with(&format!("{tenant}/")), "{tenant} asked {shared} and heard: {answer}");
            said.push(format!("{tenant}/client asks {shared}: \"{}\"", answer.trim()));
        }
        self.step("same addresses", &format!("{shared} is one pod in red and another in blue"))?;
        said.iter().try_for_each(|line| say(&format!("         {line}\n")))
    }

    /// What only the other tenant has is not there.
    async fn isolation(&self, pods: &[RunningPod]) -> Result<()> {
        let of = |tenant: &str| -> BTreeSet<IpAddr> {
            pods.iter()
                .filter(|pod| pod.namespace == tenant)
                .flat_map(|pod| pod.addresses.iter().copied())
                .collect()
        };
        let (red, blue) = (of("red"), of("blue"));
        let mut tried = 0;
        for (tenant, only_other) in [("red", blue.difference(&red)), ("blue", red.difference(&blue))] {
            for address in only_other {
                let to = std::net::SocketAddr::new(*address, 8080).to_string();
                let line = ["knit", "lab", "ask", &to, "--timeout", SILENCE];
                let (answered, text) = self.lab.exec(tenant, "client", &line).await?;
                ensure!(!answered, "{tenant}/client reached {address} of the other tenant: {text}");
                tried += 1;
            }
        }
        self.step("isolation", &format!("{tried} addresses that only the other tenant has: not one answers"))
    }

    /// A Service in each tenant, served by that tenant's own router.
    async fn service(&self) -> Result<()> {
        let mut lines = Vec::new();
        self.lab.wait_for_services(Duration::from_secs(5)).await?;
        for tenant in ["red", "blue"] {
            let address = self.cluster_ip(tenant, "web")?;
            let answers = self.ask(tenant, &address, 80, &["--count", "40"]).await?;
            let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
            for line in answers.lines() {
                *counts.entry(line.split(' ').next().unwrap_or_default()).or_default() += 1;
            }
            ensure!(
                counts.len() == 2 && counts.keys().all(|name| name.starts_with(&format!("{tenant}/web-"))),
                "Service {tenant}/web ({address}) was answered by {counts:?}"
            );
            let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
            lines
                .push(format!("{tenant}/web ({address}): 40 requests, answered by {}", counts.join(" and ")));
        }
        self.step("services", "a Service in each tenant balances over its own pods")?;
        lines.iter().try_for_each(|line| say(&format!("         {line}\n")))
    }

    /// Numbered datagrams across nodes while the agents of both are killed and started again.
    async fn agents_die(&self, pods: &[RunningPod]) -> Result<()> {
        let web = find(pods, "red", "web-2")?;
        let to = std::net::SocketAddr::new(web.addresses[0], 8080).to_string();
        let line = ["knit", "lab", "stream", &to, "--run-for", "2500"];
        let stream = self.lab.exec("red", "client", &line);
        let deaths = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            for node in ["node-1", "node-2"] {
                self.lab.kill_agent(node).await?;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
            for node in ["node-1", "node-2"] {
                self.lab.start_agent(node).await?;
            }
            Ok::<_, anyhow::Error>(())
        };
        let (stream, deaths) = tokio::join!(stream, deaths);
        deaths?;
        let (_, text) = stream?;
        let report: Value =
            serde_json::from_str(text.trim()).with_context(|| format!("the stream said: {text}"))?;
        ensure!(report["lost"] == 0, "packets were lost while the agents were down: {report}");
        self.step(
            "agents die",
            &format!(
                "both agents killed (SIGKILL) and started again under {} numbered packets: {} came back, {} \
                 lost",
                report["sent"], report["received"], report["lost"]
            ),
        )
    }

    async fn ask(&self, tenant: &str, address: &IpAddr, port: u16, more: &[&str]) -> Result<String> {
        let to = std::net::SocketAddr::new(*address, port).to_string();
        let mut line = vec!["knit", "lab", "ask", &to];
        line.extend(more);
        let (good, text) = self.lab.exec(tenant, "client", &line).await?;
        if !good {
            bail!("{tenant}/client asked {to} and got an unexpected answer: {}", text.trim());
        }
        Ok(text)
    }

    fn cluster_ip(&self, namespace: &str, name: &str) -> Result<IpAddr> {
        let kind = self.lab.store().kind("v1", "Service")?;
        let service = self.lab.store().get(&kind, namespace, name)?;
        let ip = service.value["spec"]["clusterIP"].as_str().unwrap_or_default();
        ip.parse().with_context(|| format!("Service {namespace}/{name} has no address"))
    }

    fn step(&self, name: &str, words: &str) -> Result<()> {
        let time = format!("{:5.1}s", self.started.elapsed().as_secs_f64());
        say(&format!("{} {} {} {words}\n", time.dimmed(), "✓".green().bold(), format!("{name}:").bold()))
    }
}

fn find<'a>(pods: &'a [RunningPod], namespace: &str, name: &str) -> Result<&'a RunningPod> {
    pods.iter()
        .find(|pod| pod.namespace == namespace && pod.name == name)
        .with_context(|| format!("pod {namespace}/{name} does not exist"))
}

fn paint(tenant: &str, text: &str) -> String {
    match tenant {
        "red" => text.red().to_string(),
        "blue" => text.blue().to_string(),
        _ => text.to_owned(),
    }
}

fn say(text: &str) -> Result<()> {
    knit_output::print(text).context("cannot write to standard output")
}
