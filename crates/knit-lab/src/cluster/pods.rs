//! The part of a kubelet: each pod that has a node gets a namespace, its networks through the shim, and its
//! processes; its status says how it goes; when it is deleted, everything is taken back in the reverse order.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use knit_kernel::netns::NetNs;
use knit_kernel::sandbox::loopback_up;
use knit_types::sync::Locked;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Lab;
use super::container::{Contained, built_in, next_change};
use super::error::{Error, Result};
use super::events::{self, Mood, Speaker};
use super::node::{Node, append};
use super::objects::{self, Changes, POD};
use super::probe::Target;
use super::shim::{Sandbox, Shim};
use knit_apiserver::log;
use knit_apiserver::object::Object;

/// How long processes get to end by themselves where the pod does not say less.
const GRACE: Duration = Duration::from_secs(2);

/// The pods that this lab runs.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    running: Mutex<BTreeMap<String, Running>>,
}

/// A pod that this lab runs, as others see it.
#[derive(Clone, Debug)]
pub struct RunningPod {
    /// Its namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its network namespace, once it has its networks.
    pub netns: Option<Arc<NetNs>>,
}

#[derive(Debug)]
struct Running {
    pod: RunningPod,
    ended: Arc<tokio::sync::Notify>,
    stop: watch::Sender<Stop>,
}

/// How a pod is to end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stop {
    No,
    /// In order: DEL, and its object goes.
    Orderly,
    /// Its node is gone: nothing is asked, and its object stays.
    Lost,
}

impl Pods {
    fn running(&self) -> MutexGuard<'_, BTreeMap<String, Running>> {
        self.running.locked()
    }

    /// A pod by its namespace and name.
    pub(crate) fn find(&self, namespace: &str, name: &str) -> Option<RunningPod> {
        let running = self.running();
        let mut pods = running.values().map(|running| &running.pod);
        pods.find(|pod| pod.namespace == namespace && pod.name == name).cloned()
    }

    /// Ends all pods of a node at once, as a power cut does, and waits for that.
    pub(crate) async fn lose(&self, node: &str) {
        loop {
            let next = {
                let running = self.running();
                let found = running.values().find(|running| running.pod.node == node);
                found.map(|running| {
                    running.stop.send_replace(Stop::Lost);
                    Arc::clone(&running.ended)
                })
            };
            let Some(ended) = next else { return };
            let _ = tokio::time::timeout(Duration::from_millis(200), ended.notified()).await;
        }
    }
}

/// Runs pods as the API says; as long as the lab.
pub(crate) async fn run(lab: Lab) {
    let mut changes = Changes::of(lab.store(), &[POD]);
    let mut workers = JoinSet::new();
    loop {
        pass(&lab, &mut workers);
        tokio::select! {
            () = changes.wait() => {}
            () = lab.nodes_changed() => {}
            Some(_) = workers.join_next() => {}
        }
    }
}

/// Starts a worker for each pod that needs one, and tells the others to stop.
fn pass(lab: &Lab, workers: &mut JoinSet<()>) {
    let pods = objects::list(lab.store(), POD);
    let wanted: HashSet<&str> = pods.iter().filter(|pod| !pod.is_deleting()).map(|pod| pod.uid()).collect();
    let mut running = lab.pods().running();
    for (uid, entry) in running.iter() {
        if !wanted.contains(uid.as_str()) {
            entry.stop.send_if_modified(|stop| {
                *stop == Stop::No && {
                    *stop = Stop::Orderly;
                    true
                }
            });
        }
    }
    for pod in &pods {
        let Some(node) = pod.value["spec"]["nodeName"].as_str().and_then(|node| lab.node(node).ok()) else {
            continue;
        };
        if running.contains_key(pod.uid()) {
            continue;
        }
        if pod.is_deleting() {
            objects::delete(lab.store(), POD, pod, Some(0));
            continue;
        }
        if matches!(pod.value["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
            || node.namespace().is_none()
        {
            continue;
        }
        let entry = Running {
            pod: RunningPod {
                namespace: pod.namespace().to_owned(),
                name: pod.name().to_owned(),
                node: node.name.clone(),
                addresses: Vec::new(),
                netns: None,
            },
            ended: Arc::default(),
            stop: watch::Sender::new(Stop::No),
        };
        let (stop, ended) = (entry.stop.subscribe(), Arc::clone(&entry.ended));
        running.insert(pod.uid().to_owned(), entry);
        let (lab, pod) = (lab.clone(), Arc::clone(pod));
        workers.spawn(async move {
            Worker::new(lab.clone(), node, Arc::clone(&pod), stop).run().await;
            lab.pods().running().remove(pod.uid());
            ended.notify_waiters();
        });
    }
}

/// What keeps one pod running.
struct Worker {
    lab: Lab,
    node: Arc<Node>,
    pod: Arc<Object>,
    stop: watch::Receiver<Stop>,
    shim: Shim,
    sandbox: Sandbox,
    host_network: bool,
}

impl Worker {
    fn new(lab: Lab, node: Arc<Node>, pod: Arc<Object>, stop: watch::Receiver<Stop>) -> Self {
        let shim = Shim { program: lab.program(), socket: knit_cni::paths::socket(&node.run_dir()) };
        let id = format!("{}-{}", pod.uid(), lab.next_number());
        let containers = pod.value["spec"]["containers"].as_array().into_iter().flatten();
        let ports = containers.flat_map(|c| c["ports"].as_array().into_iter().flatten());
        let mappings: Vec<Value> = ports
            .filter(|p| p["hostPort"].as_u64().is_some_and(|n| n > 0))
            .map(|p| {
                let protocol = p["protocol"].as_str().unwrap_or("TCP").to_ascii_lowercase();
                json!({"hostPort": p["hostPort"], "containerPort": p["containerPort"], "protocol": protocol,
                    "hostIP": p["hostIP"].as_str().unwrap_or("")})
            })
            .collect();
        let annotations = pod.value["metadata"].get("annotations").cloned().unwrap_or_else(|| json!({}));
        let sandbox = Sandbox {
            netns: node.pod_namespaces().join(&id),
            id,
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            uid: pod.uid().to_owned(),
            runtime_config: json!({"portMappings": mappings,
                "io.kubernetes.cri.pod-annotations": annotations}),
        };
        let host_network = pod.value["spec"]["hostNetwork"].as_bool().unwrap_or_default();
        Self { lab, node, pod, stop, shim, sandbox, host_network }
    }

    async fn run(mut self) {
        match self.start().await {
            Ok(Some((namespace, addresses))) => self.keep_running(&namespace, &addresses).await,
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(pod = self.pod.name(), %error, "cannot create the pod's namespace");
                self.report("FailedCreatePodSandBox", &error.to_string());
                let _ = self.stop.wait_for(|stop| *stop != Stop::No).await;
            }
        }
        if *self.stop.borrow() == Stop::Lost {
            self.lost();
            return;
        }
        self.clean_up().await;
        let gone = objects::get(self.lab.store(), POD, self.pod.namespace(), self.pod.name());
        if gone.is_some_and(|pod| pod.uid() == self.pod.uid() && pod.is_deleting()) {
            objects::delete(self.lab.store(), POD, &self.pod, Some(0));
        }
    }

    /// Makes the namespace and asks for the networks until it has them; nothing if it is to stop before.
    async fn start(&mut self) -> Result<Option<(Arc<NetNs>, Vec<IpAddr>)>> {
        let what = || format!("the namespace of pod {}", self.pod.name());
        if self.host_network {
            let Some(namespace) = self.node.namespace() else { return Ok(None) };
            let addresses = self.node.addresses();
            self.started(&namespace, &addresses);
            return Ok(Some((namespace, addresses)));
        }
        let path = self.sandbox.netns.clone();
        let made = tokio::task::spawn_blocking(move || -> Result<NetNs, knit_kernel::netns::Error> {
            let namespace = NetNs::create(&path)?;
            // A loopback that does not come up shows in what the pod does; the kernel never refuses it to
            // root.
            let _ = namespace.run(loopback_up)?;
            Ok(namespace)
        });
        let made = made.await.map_err(|error| Error::io(what())(std::io::Error::other(error)))?;
        let namespace = Arc::new(made.map_err(Error::kernel(what()))?);
        let mut pause = Duration::from_millis(50);
        loop {
            if *self.stop.borrow() != Stop::No {
                return Ok(None);
            }
            match self.shim.add(&self.sandbox).await {
                Ok(addresses) => {
                    self.started(&namespace, &addresses);
                    return Ok(Some((namespace, addresses)));
                }
                Err(error) => {
                    self.report("FailedCreatePodSandBox", &error.to_string());
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        _ = self.stop.wait_for(|stop| *stop != Stop::No) => {}
                    }
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
            }
        }
    }

    fn started(&self, namespace: &Arc<NetNs>, addresses: &[IpAddr]) {
        if let Some(entry) = self.lab.pods().running().get_mut(self.pod.uid()) {
            entry.pod.netns = Some(Arc::clone(namespace));
            entry.pod.addresses = addresses.to_vec();
        }
    }

    /// Says why the pod does not run yet: in its status, and as an event.
    fn report(&self, reason: &str, message: &str) {
        let status = json!({"phase": "Pending", "reason": reason, "message": message});
        self.set_status(&status);
        self.say(Mood::Warning, reason, message);
    }

    fn say(&self, mood: Mood, reason: &str, message: &str) {
        let who = Speaker { component: "kubelet", node: &self.node.name };
        events::say(self.lab.store(), &self.pod, who, mood, reason, message);
    }

    fn set_status(&self, status: &Value) {
        let done = objects::set_status(self.lab.store(), POD, self.pod.namespace(), self.pod.name(), status);
        if let Err(error) = done
            && error.reason != "NotFound"
        {
            tracing::warn!(%error, pod = self.pod.name(), "a pod's status was refused");
        }
    }

    /// Runs the containers, and says in the status how they are, until it is told to stop.
    async fn keep_running(&mut self, namespace: &Arc<NetNs>, addresses: &[IpAddr]) {
        let containers = self.pod.value["spec"]["containers"].as_array().cloned().unwrap_or_default();
        let mut children: Vec<Contained> = Vec::new();
        for container in &containers {
            children.push(Contained::new(container.clone()));
        }
        for contained in &mut children {
            self.start_container(contained, namespace, addresses);
        }
        self.write_running(&children, addresses);
        loop {
            let node = self.node.namespace();
            let target = node.map(|node| Target {
                node,
                pod: Arc::clone(namespace),
                address: addresses.first().copied(),
            });
            let finished = tokio::select! {
                _ = self.stop.wait_for(|stop| *stop != Stop::No) => break,
                // Whichever container has news: an exit, a restart that is due, a probe.
                changed = next_change(&mut children, target.as_ref()) => changed,
            };
            if let Some(index) = finished {
                self.ended(&mut children[index], namespace, addresses);
            }
            if self.write_running(&children, addresses) {
                let _ = self.stop.wait_for(|stop| *stop != Stop::No).await;
                break;
            }
        }
        let grace = self.pod.value["spec"]["terminationGracePeriodSeconds"]
            .as_u64()
            .map_or(GRACE, Duration::from_secs);
        let grace = if *self.stop.borrow() == Stop::Lost { Duration::ZERO } else { grace.min(GRACE) };
        for contained in &mut children {
            self.say(Mood::Normal, "Killing", &format!("Stopping container {}", contained.name()));
            contained.end(grace).await;
        }
    }

    /// A container's process has ended, or is due again.
    fn ended(&self, contained: &mut Contained, namespace: &Arc<NetNs>, addresses: &[IpAddr]) {
        if contained.child.is_some() {
            return;
        }
        let policy = self.pod.value["spec"]["restartPolicy"].as_str().unwrap_or("Always");
        let again = policy == "Always" || (policy == "OnFailure" && contained.exit_code != Some(0));
        if !again {
            contained.done = true;
        } else if contained.due.is_none() {
            let pause = Duration::from_millis(200) * 2_u32.saturating_pow(contained.restarts.min(6));
            contained.due = Some(tokio::time::Instant::now() + pause);
            self.say(
                Mood::Warning,
                "BackOff",
                &format!("Back-off restarting failed container {}", contained.name()),
            );
        } else {
            contained.due = None;
            contained.restarts += 1;
            self.start_container(contained, namespace, addresses);
        }
    }

    fn start_container(&self, contained: &mut Contained, namespace: &Arc<NetNs>, addresses: &[IpAddr]) {
        contained.start(self.command(&contained.container, addresses), namespace, &self.now());
        match &contained.problem {
            None => self.say(Mood::Normal, "Started", &format!("Started container {}", contained.name())),
            Some(problem) => self.say(Mood::Warning, "Failed", &format!("Error: {problem}")),
        }
    }

    /// Writes the status. Says whether the pod is through.
    fn write_running(&self, children: &[Contained], addresses: &[IpAddr]) -> bool {
        let now = knit_apiserver::store::seconds(self.lab.store().now());
        let done = children.iter().all(|c| c.done);
        let ready = !done && children.iter().all(|c| c.ready && c.child.is_some());
        let phase = match done {
            true if children.iter().all(|c| c.exit_code == Some(0)) => "Succeeded",
            true => "Failed",
            false => "Running",
        };
        let current = objects::get(self.lab.store(), POD, self.pod.namespace(), self.pod.name());
        let before = current.as_ref().map(|pod| &pod.value["status"]["conditions"]);
        let condition = |kind: &str, holds: bool| {
            let status = if holds { "True" } else { "False" };
            let mut conditions = before.and_then(Value::as_array).into_iter().flatten();
            let old = conditions.find(|c| c["type"] == kind && c["status"] == status);
            let since = old.and_then(|c| c["lastTransitionTime"].as_str()).unwrap_or(&now);
            json!({"type": kind, "status": status, "lastTransitionTime": since})
        };
        let statuses: Vec<Value> = children.iter().map(|c| c.status(&now)).collect();
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
        let status = json!({
            "phase": phase, "reason": null, "message": null,
            "hostIP": self.node.addresses().first().map(IpAddr::to_string),
            "hostIPs": self.node.addresses().iter().map(|ip|
                json!({"ip": ip.to_string()})).collect::<Vec<_>>(),
            "podIP": addresses.first().map(IpAddr::to_string), "podIPs": ips,
            "startTime": current.as_ref().and_then(|p|
                p.value["status"]["startTime"].as_str()).unwrap_or(&now),
            "conditions": [
                condition("PodScheduled", true), condition("PodReadyToStartContainers", true),
                condition("Initialized", true), condition("ContainersReady", ready), condition("Ready",
                    ready)],
            "containerStatuses": statuses,
        });
        self.set_status(&status);
        done
    }

    /// The node is lost, and the pod with it; its object waits for the node's return.
    fn lost(&self) {
        let _ = NetNs::delete(&self.sandbox.netns);
        let now = knit_apiserver::store::seconds(self.lab.store().now());
        self.set_status(&json!({"phase": "Pending", "reason": "NodeLost", "message": "its node is lost",
            "podIP": null, "podIPs": null, "containerStatuses": null,
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}]}));
    }

    async fn clean_up(&self) {
        if self.host_network {
            return;
        }
        let mut pause = Duration::from_millis(50);
        while let Err(error) = self.shim.del(&self.sandbox).await {
            tracing::warn!(pod = self.pod.name(), %error, "DEL failed; retrying");
            if *self.stop.borrow() == Stop::Lost || self.node.namespace().is_none() {
                break;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
        let path = self.sandbox.netns.clone();
        let deleted = tokio::task::spawn_blocking(move || NetNs::delete(path)).await;
        if let Ok(Err(error)) = deleted {
            tracing::warn!(pod = self.pod.name(), %error, "cannot delete a pod's namespace");
        }
    }

    fn now(&self) -> String {
        knit_apiserver::store::seconds(self.lab.store().now())
    }

    /// The command of a container, ready to run.
    fn command(&self, container: &Value, addresses: &[IpAddr]) -> Result<Command> {
        let words = |field: &str| -> Vec<String> {
            let list = container[field].as_array().into_iter().flatten();
            list.filter_map(|word| word.as_str().map(str::to_owned)).collect()
        };
        let mut line: Vec<String> = words("command");
        if line.is_empty() {
            line = built_in(container);
        }
        line.extend(words("args"));
        let program = match line.first().map(String::as_str) {
            Some("knit") | None => self.lab.program(),
            Some(other) => PathBuf::from(other),
        };
        let mut command = Command::new(program);
        command.args(line.iter().skip(1)).process_group(0).stdin(Stdio::null()).kill_on_drop(true);
        command.env("POD_NAME", self.pod.name()).env("POD_NAMESPACE", self.pod.namespace());
        command.env("NODE_NAME", &self.node.name);
        command.env("POD_IP", addresses.first().map(IpAddr::to_string).unwrap_or_default());
        for variable in container["env"].as_array().into_iter().flatten() {
            if let (Some(name), Some(value)) = (variable["name"].as_str(), variable["value"].as_str()) {
                command.env(name, value);
            }
        }
        let name = container["name"].as_str().unwrap_or_default();
        let log = log::file(&self.lab.logs(), &self.pod, name);
        let dir = log.parent().unwrap_or(&log);
        std::fs::create_dir_all(dir)
            .map_err(Error::io(format!("cannot create directory {}", dir.display())))?;
        command.stdout(append(&log)?).stderr(append(&log)?);
        Ok(command)
    }
}
