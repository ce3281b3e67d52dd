//! The tables in memory and their logs: every change goes through here, under one lock, and takes the next
//! resourceVersion. Deletion lives here too, with finalizers, owner references and namespaces.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::watch;

use super::event::{Change, ChangeType};
use super::object::{Object, finalizers, is_deleting, list_at, meta, meta_mut, str_at};

/// Namespace (empty for cluster-scoped) and name.
pub type Key = (String, String);

/// The tables that the state itself knows.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// Where Namespaces are.
    pub namespaces: usize,
    /// Where Pods are.
    pub pods: usize,
    /// Where Services are.
    pub services: usize,
    /// Where IPAddresses are.
    pub ip_addresses: usize,
    /// Where ServiceCIDRs are.
    pub service_cidrs: usize,
}

/// One table: the objects of a kind and the log of their changes.
#[derive(Debug)]
pub struct Table {
    /// The objects by namespace and name.
    pub objects: BTreeMap<Key, Arc<Object>>,
    /// The latest changes, oldest first.
    pub log: VecDeque<Arc<Change>>,
    /// The resourceVersion up to which changes are no longer in the log.
    pub floor: u64,
    /// Tells watches that there is something new.
    pub changed: watch::Sender<u64>,
}

/// How a deletion treats what the object owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Propagation {
    /// Dependents are deleted too.
    #[default]
    Background,
    /// Dependents stay, without their owner.
    Orphan,
}

/// A deletion.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deletion {
    /// Seconds that a pod has to end; none for its own default.
    pub grace: Option<i64>,
    /// What happens to dependents.
    pub propagation: Propagation,
}

/// Everything that is stored.
#[derive(Debug)]
pub struct State {
    /// The resourceVersion of the last change.
    pub rv: u64,
    /// The tables.
    pub tables: Vec<Table>,
    /// Which node ports are taken, and by which Service.
    pub node_ports: BTreeMap<(u16, String), Key>,
    /// Where the search for the next free address or port begins, by range.
    pub cursors: BTreeMap<String, u128>,
    /// The tables that have rules of their own.
    pub known: Known,
    log_size: usize,
    clock: fn() -> jiff::Timestamp,
    uids: HashMap<String, (usize, Key)>,
    dependents: HashMap<String, BTreeSet<(usize, Key)>>,
}

impl State {
    /// Nothing stored yet.
    pub fn new(
        tables: usize,
        known: Known,
        log_size: usize,
        first_rv: u64,
        clock: fn() -> jiff::Timestamp,
    ) -> Self {
        let mut state = Self {
            rv: first_rv,
            tables: Vec::new(),
            node_ports: BTreeMap::new(),
            cursors: BTreeMap::new(),
            known,
            log_size,
            clock,
            uids: HashMap::new(),
            dependents: HashMap::new(),
        };
        state.grow(tables);
        state
    }

    /// Makes room for further tables.
    pub fn grow(&mut self, tables: usize) {
        while self.tables.len() < tables {
            self.tables.push(Table {
                objects: BTreeMap::new(),
                log: VecDeque::new(),
                floor: self.rv,
                changed: watch::Sender::new(self.rv),
            });
        }
    }

    /// The object, if it is there.
    pub fn get(&self, table: usize, key: &Key) -> Option<&Arc<Object>> {
        self.tables[table].objects.get(key)
    }

    /// The objects of one namespace, or of all, after a key.
    pub fn range<'a>(
        &'a self,
        table: usize,
        namespace: Option<&str>,
        after: Option<&Key>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Object>)> {
        let namespace = namespace.map(str::to_owned);
        let from = match (after, &namespace) {
            (Some(key), _) => Bound::Excluded(key.clone()),
            (None, Some(namespace)) => Bound::Included((namespace.clone(), String::new())),
            (None, None) => Bound::Unbounded,
        };
        self.tables[table]
            .objects
            .range((from, Bound::Unbounded))
            .take_while(move |((ns, _), _)| namespace.as_ref().is_none_or(|wanted| wanted == ns))
    }

    /// Stores an object as the next version.
    pub fn put(&mut self, table: usize, value: Value) -> Arc<Object> {
        self.rv += 1;
        let object = Arc::new(Object::new(value, self.rv));
        let key = (object.namespace().to_owned(), object.name().to_owned());
        let before = self.tables[table].objects.insert(key.clone(), Arc::clone(&object));
        match &before {
            Some(old) => self.unindex(table, &key, old),
            None => {
                self.uids.insert(object.uid().to_owned(), (table, key.clone()));
            }
        }
        self.index(table, &key, &object);
        let change = if before.is_some() { ChangeType::Modified } else { ChangeType::Added };
        self.record(table, Change::new(change, Arc::clone(&object), before));
        object
    }

    /// Takes an object away, and what follows from that. `last` is its last content.
    pub fn remove(&mut self, table: usize, key: &Key, last: Value) -> Arc<Object> {
        self.rv += 1;
        let object = Arc::new(Object::new(last, self.rv));
        let before = self.tables[table].objects.remove(key);
        if let Some(old) = &before {
            self.unindex(table, key, old);
            self.uids.remove(old.uid());
        }
        self.record(table, Change::new(ChangeType::Deleted, Arc::clone(&object), before));
        if table == self.known.services {
            self.release_addresses(&object.value);
        }
        self.collect_dependents(object.uid());
        self.finish_namespace(&key.0);
        object
    }

    fn record(&mut self, table: usize, change: Change) {
        let (rv, limit) = (self.rv, self.log_size);
        let table = &mut self.tables[table];
        table.log.push_back(Arc::new(change));
        while table.log.len() > limit {
            if let Some(oldest) = table.log.pop_front() {
                table.floor = oldest.object.rv;
            }
        }
        table.changed.send_replace(rv);
    }

    fn index(&mut self, table: usize, key: &Key, object: &Object) {
        for owner in owners(&object.value) {
            self.dependents.entry(owner.to_owned()).or_default().insert((table, key.clone()));
        }
        if table == self.known.services {
            for (port, protocol) in node_ports(&object.value) {
                self.node_ports.insert((port, protocol), key.clone());
            }
        }
    }

    fn unindex(&mut self, table: usize, key: &Key, object: &Object) {
        for owner in owners(&object.value) {
            if let Some(set) = self.dependents.get_mut(owner) {
                set.remove(&(table, key.clone()));
                if set.is_empty() {
                    self.dependents.remove(owner);
                }
            }
        }
        if table == self.known.services {
            for port in node_ports(&object.value) {
                self.node_ports.remove(&port);
            }
        }
    }

    /// Deletes an object: at once, or when its finalizers are gone, or when its pod has ended. Returns the
    /// object as it is afterwards, and whether it is gone.
    pub fn delete(
        &mut self,
        table: usize,
        key: &Key,
        deletion: Deletion,
        now: jiff::Timestamp,
    ) -> Option<(Arc<Object>, bool)> {
        let object = Arc::clone(self.get(table, key)?);
        if deletion.propagation == Propagation::Orphan {
            self.orphan_dependents(object.uid());
        }
        if table == self.known.namespaces {
            return Some(self.delete_namespace(key, &object, now));
        }
        let grace = if table == self.known.pods { pod_grace(&object.value, deletion.grace) } else { 0 };
        let held = finalizers(&object.value).next().is_some();
        if !held && grace == 0 {
            return Some((self.remove(table, key, object.value.clone()), true));
        }
        let already = object.value["metadata"]["deletionGracePeriodSeconds"].as_i64();
        if object.is_deleting() && already.is_none_or(|old| old <= grace) {
            return Some((object, false));
        }
        let mut value = object.value.clone();
        mark_deleting(&mut value, grace, now);
        Some((self.put(table, value), false))
    }

    fn delete_namespace(
        &mut self,
        key: &Key,
        object: &Arc<Object>,
        now: jiff::Timestamp,
    ) -> (Arc<Object>, bool) {
        let mut last = Arc::clone(object);
        if !object.is_deleting() {
            let mut value = object.value.clone();
            mark_deleting(&mut value, 0, now);
            meta_mut(&mut value).remove("deletionGracePeriodSeconds");
            value["status"]["phase"] = json!("Terminating");
            last = self.put(self.known.namespaces, value);
        }
        for table in 0..self.tables.len() {
            let keys: Vec<Key> = self.range(table, Some(&key.1), None).map(|(key, _)| key.clone()).collect();
            for key in keys {
                self.delete(table, &key, Deletion::default(), now);
            }
        }
        self.finish_namespace(&key.1);
        (last, self.get(self.known.namespaces, key).is_none())
    }

    /// Removes a namespace that is being deleted once nothing is left in it.
    fn finish_namespace(&mut self, namespace: &str) {
        if namespace.is_empty() {
            return;
        }
        let key = (String::new(), namespace.to_owned());
        let Some(object) = self.get(self.known.namespaces, &key).filter(|object| object.is_deleting()) else {
            return;
        };
        let value = object.value.clone();
        let empty =
            (0..self.tables.len()).all(|table| self.range(table, Some(namespace), None).next().is_none());
        if empty && finalizers(&value).next().is_none() {
            self.remove(self.known.namespaces, &key, value);
        }
    }

    /// Deletes what a deleted object owned, unless it has another owner.
    fn collect_dependents(&mut self, uid: &str) {
        let Some(dependents) = self.dependents.get(uid).cloned() else { return };
        for (table, key) in dependents {
            let Some(object) = self.get(table, &key) else { continue };
            let value = object.value.clone();
            if owners(&value).any(|owner| owner != uid && self.uids.contains_key(owner)) {
                self.put(table, without_owner(value, uid));
            } else {
                self.delete(table, &key, Deletion::default(), (self.clock)());
            }
        }
    }

    fn orphan_dependents(&mut self, uid: &str) {
        for (table, key) in self.dependents.get(uid).cloned().unwrap_or_default() {
            if let Some(value) = self.get(table, &key).map(|object| object.value.clone()) {
                self.put(table, without_owner(value, uid));
            }
        }
    }

    /// Whether an object names owners, and none of them exists.
    pub fn is_ownerless(&self, value: &Value) -> bool {
        let mut owners = owners(value).peekable();
        owners.peek().is_some() && owners.all(|owner| !self.uids.contains_key(owner))
    }

    fn release_addresses(&mut self, service: &Value) {
        for ip in cluster_ips(service) {
            let key = (String::new(), ip);
            let mine = self.get(self.known.ip_addresses, &key).is_some_and(|address| {
                str_at(&address.value, "spec.parentRef.name") == Some(meta(service, "name"))
                    && str_at(&address.value, "spec.parentRef.namespace") == Some(meta(service, "namespace"))
            });
            if mine && let Some(address) = self.get(self.known.ip_addresses, &key) {
                let value = address.value.clone();
                self.remove(self.known.ip_addresses, &key, value);
            }
        }
    }

    /// Drops the IPAddresses that a Service had and no longer has.
    pub fn release_unused(&mut self, before: &Value, after: &Value) {
        let kept: Vec<String> = cluster_ips(after).collect();
        let mut gone = before.clone();
        gone["spec"]["clusterIPs"] =
            cluster_ips(before).filter(|ip| !kept.contains(ip)).map(Value::String).collect();
        gone["spec"]["clusterIP"] = Value::Null;
        self.release_addresses(&gone);
    }
}

/// The allocated cluster IPs of a Service.
pub fn cluster_ips(service: &Value) -> impl Iterator<Item = String> {
    list_at(service, "spec.clusterIPs")
        .iter()
        .filter_map(Value::as_str)
        .filter(|ip| !ip.is_empty() && *ip != "None")
        .map(str::to_owned)
}

/// The node ports of a Service, with their protocol.
pub fn node_ports(service: &Value) -> Vec<(u16, String)> {
    let mut ports: Vec<(u16, String)> = list_at(service, "spec.ports")
        .iter()
        .filter_map(|port| {
            let number = u16::try_from(port["nodePort"].as_u64()?).ok().filter(|port| *port != 0)?;
            Some((number, port["protocol"].as_str().unwrap_or("TCP").to_owned()))
        })
        .collect();
    let health = service["spec"]["healthCheckNodePort"].as_u64().and_then(|port| u16::try_from(port).ok());
    ports.extend(health.filter(|port| *port != 0).map(|port| (port, "TCP".to_owned())));
    ports
}

fn owners(value: &Value) -> impl Iterator<Item = &str> {
    list_at(value, "metadata.ownerReferences").iter().filter_map(|owner| owner["uid"].as_str())
}

fn without_owner(mut value: Value, uid: &str) -> Value {
    let metadata = meta_mut(&mut value);
    if let Some(list) = metadata.get_mut("ownerReferences").and_then(Value::as_array_mut) {
        list.retain(|owner| owner["uid"] != uid);
        if list.is_empty() {
            metadata.remove("ownerReferences");
        }
    }
    value
}

/// How long a pod may take to end: 0 where nobody runs it.
fn pod_grace(pod: &Value, asked: Option<i64>) -> i64 {
    let ended = matches!(str_at(pod, "status.phase"), Some("Succeeded" | "Failed"));
    if ended || str_at(pod, "spec.nodeName").is_none_or(str::is_empty) {
        return 0;
    }
    asked.unwrap_or_else(|| pod["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30)).max(0)
}

fn mark_deleting(value: &mut Value, grace: i64, now: jiff::Timestamp) {
    let until = now.saturating_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
    let first = !is_deleting(value);
    let metadata = meta_mut(value);
    metadata.insert("deletionTimestamp".into(), super::store::seconds(until).into());
    metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
    if first && let Some(generation) = metadata.get("generation").and_then(Value::as_i64) {
        metadata.insert("generation".into(), (generation + 1).into());
    }
}
