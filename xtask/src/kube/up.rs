//! Making a bed, in the order of what needs what; the API server starts while nodes load their images.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::bed::{self, Bed, tail};
use super::components::Group;
use super::machine::control::{Control, Daemon};
use super::machine::{self, CONTROL_PLANE, Kind};
use super::paths::{Cache, State};
use super::wait::{Phases, until};
use super::{Cni, Options, build, certs, control_plane, dns, images, net, node};

/// How long a process of ours, or a node, may take to appear.
const LIMIT: Duration = Duration::from_secs(60);

impl Bed {
    /// Makes a bed. What an earlier one left behind is removed first; one that is up is not touched.
    pub fn up(options: &Options) -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the bed needs root: nodes are namespaces with control groups and real container runtimes. Run \
             it with sudo \
             (sudo -E env PATH=\"$PATH\" cargo xtask kube up)"
        );
        if let Some(holder) = machine::holder()? {
            bail!(
                "a bed is up already, in {}; there can be one on a machine. `cargo xtask kube down` ends it",
                holder.state.display()
            );
        }
        let cache = Cache::find()?;
        let state = State::find(&cache)?;
        let needs_peers = options.kube_proxy || options.cni == Some(Cni::Bridge);
        build::build(&cache, if needs_peers { &[Group::Core, Group::Peers] } else { &[Group::Core] })?;
        let images = images::make(&cache)?;
        bed::down().context("cannot remove what an earlier bed left behind")?;

        let phases = Phases::start(options.quiet);
        let bed = Self::new(cache, state, options.clone());
        match bed.rise(&images, &phases) {
            Ok(()) => Ok(bed),
            Err(error) => {
                let logs = bed.keep_logs("up").map(|path| path.display().to_string());
                let logs = logs.unwrap_or_else(|error| format!("nowhere ({error:#})"));
                bed::down().context("cannot remove a bed that did not come up")?;
                Err(error.context(format!("the bed did not come up; its logs are in {logs}")))
            }
        }
    }

    fn rise(&self, images: &[std::path::PathBuf], phases: &Phases) -> Result<()> {
        let (state, options, nodes) = (self.state(), self.options(), self.nodes());
        for folder in [state.logs(), state.machine(CONTROL_PLANE)] {
            fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        fs::write(state.description(), serde_json::to_vec(options)?)?;
        build::link(self.cache(), &state.bin())?;
        certs::make(state, &nodes)?;
        for (index, name) in nodes.iter().enumerate() {
            node::prepare(state, index, name)?;
        }
        self.start_keeper()?;
        let space = self.control_plane_ns()?;
        net::lay(&space)?;
        let plane = self.control_plane();
        plane.start(control_plane::etcd(state))?;
        plane.start(control_plane::api_server(state, options))?;
        for name in &nodes {
            plane.start(self.node_machine(name))?;
        }
        for (index, name) in nodes.iter().enumerate() {
            self.wait_for_machine(name)?;
            net::plug(&space, index, name, &self.node_ns(name)?)?;
            self.machine(name).start(node::containerd(state, name))?;
        }
        phases.reached("control plane and nodes have their namespaces");
        self.load_while_api_starts(&nodes, images, phases)?;
        plane.start(control_plane::controller_manager(state, options))?;
        plane.start(control_plane::scheduler(state))?;
        for (index, name) in nodes.iter().enumerate() {
            self.machine(name).start(node::kubelet(state, options, index, name))?;
        }
        for (index, name) in nodes.iter().enumerate() {
            self.wait_for_registration(name)?;
            self.connect_pods(index, name)?;
            phases.reached(&format!("node {name} is registered"));
        }
        if options.kube_proxy {
            for name in &nodes {
                self.machine(name).start(node::kube_proxy(state, options, name)?)?;
            }
        }
        if options.dns {
            dns::start(self)?;
        }
        if options.cni.is_some() {
            self.wait_for_nodes(LIMIT)?;
            phases.reached("all nodes are Ready");
            if options.dns && options.kube_proxy {
                dns::wait(self)?;
                phases.reached("the cluster DNS answers");
            }
        }
        self.alive()
    }

    /// The outermost process: everything else is below it.
    fn start_keeper(&self) -> Result<()> {
        let log = self.state().logs().join("keeper.log");
        let out = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new("/proc/self/exe");
        command.args(machine::keeper_arguments(self.state(), CONTROL_PLANE, Kind::ControlPlane));
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).current_dir("/");
        let mut keeper = command.spawn().context("cannot start the bed's keeper")?;
        let control = self.control_plane();
        until("the control plane's namespaces", LIMIT, || {
            if let Some(status) = keeper.try_wait()? {
                bail!("the bed's keeper ended ({status}):\n{}", tail(&log));
            }
            Ok(control.process())
        })
        .map(drop)
    }

    fn node_machine(&self, name: &str) -> Daemon {
        Daemon {
            name: name.into(),
            program: "/proc/self/exe".into(),
            args: machine::keeper_arguments(self.state(), name, Kind::Node),
            path: self.state().bin(),
            log: self.state().logs().join(format!("{name}.log")),
            group: None,
        }
    }

    fn wait_for_machine(&self, name: &str) -> Result<()> {
        let control = Control::of(self.state().machine(name));
        until(&format!("node {name}"), LIMIT, || {
            self.alive()?;
            Ok(control.process())
        })
        .map(drop)
    }

    fn load_while_api_starts(
        &self,
        nodes: &[String],
        images: &[std::path::PathBuf],
        phases: &Phases,
    ) -> Result<()> {
        std::thread::scope(|scope| {
            let load = |name: &str| -> Result<()> {
                self.wait_for_containerd(name)?;
                images.iter().try_for_each(|image| self.import(name, image))
            };
            let threads: Vec<_> = nodes.iter().map(|name| scope.spawn(move || load(name))).collect();
            self.wait_for_api()?;
            phases.reached("the API server is ready");
            for thread in threads {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            phases.reached("containerd has the images");
            Ok(())
        })
    }

    fn wait_for_registration(&self, name: &str) -> Result<()> {
        let node = format!("node/{name}");
        let created = self.kubectl(&["wait", "--for=create", &node, "--timeout=60s"]);
        created.map(drop).or_else(|error| self.alive().and(Err(error)))?;
        let range = "--for=jsonpath={.spec.podCIDR}";
        self.kubectl(&["wait", range, &node, "--timeout=60s"]).map(drop)
    }

    /// The control plane reaches pods, as the API server's proxy must; and with the bridge plugin so do the
    /// other nodes, which is an agent's work otherwise.
    fn connect_pods(&self, index: usize, name: &str) -> Result<()> {
        let ranges = self.pod_ranges(name)?;
        let mut from = vec![self.control_plane_ns()?];
        if self.options().cni == Some(Cni::Bridge) {
            for other in self.nodes().iter().filter(|other| *other != name) {
                from.push(self.node_ns(other)?);
            }
            for plugin in ["bridge", "host-local", "portmap"] {
                let to = self.node_path(name, &format!("/opt/cni/bin/{plugin}"))?;
                fs::copy(self.state().program(plugin), to)
                    .with_context(|| format!("cannot install {plugin}"))?;
            }
            let list = self.node_path(name, "/etc/cni/net.d/10-bridge.conflist")?;
            fs::write(&list, node::bridge_conflist(&ranges)).context("cannot write the CNI configuration")?;
        }
        for space in &from {
            for range in &ranges {
                net::route_to_pods(space, *range, index)?;
            }
        }
        Ok(())
    }
}
