//! Plain manifests: read, checked all together, and only then applied.

use std::path::Path;

use ipnet::IpNet;
use knit_model::{Labels, Network, overlap};
use serde_json::{Value, json};

use super::error::{Error, Result};
use super::objects::{self, NETWORK};
use super::wire;
use knit_apiserver::admission::{FieldValidation, take_unknown};
use knit_apiserver::object::meta;
use knit_apiserver::patch::PatchType;
use knit_apiserver::{ApiError, Store, StoreOptions, WriteOptions};

/// The default Network of a lab, unless its manifests say otherwise.
pub const DEFAULT_SUBNETS: [&str; 2] = ["10.244.0.0/16", "fd44::/64"];

/// Objects in the order in which they are applied.
#[derive(Clone, Debug, Default)]
pub struct Manifests {
    objects: Vec<Value>,
}

impl Manifests {
    /// Reads the text of one file: YAML, with several documents if need be, or JSON.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        let failed = |why: String| Error::Manifest { file: file.to_owned(), why };
        let mut objects = Vec::new();
        for document in documents(text) {
            let value: Value =
                serde_saphyr::from_str(&document).map_err(|error| failed(error.to_string()))?;
            match value {
                Value::Null => {}
                Value::Object(ref map) if map.get("kind").is_some_and(|kind| kind == "List") => {
                    objects.extend(value["items"].as_array().cloned().unwrap_or_default());
                }
                Value::Object(_) => objects.push(value),
                _ => return Err(failed("a document is not a Kubernetes object".to_owned())),
            }
        }
        for object in &mut objects {
            if object["kind"].as_str().is_none() || object["apiVersion"].as_str().is_none() {
                return Err(failed("an object without kind or apiVersion".to_owned()));
            }
            if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.remove("creationTimestamp");
            }
        }
        Ok(Self { objects })
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Manifest { file: file.clone(), why: error.to_string() })?;
        Self::parse(&file, &text)
    }

    /// Adds others.
    pub fn extend(&mut self, other: Self) {
        self.objects.extend(other.objects);
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The objects.
    pub fn objects(&self) -> &[Value] {
        &self.objects
    }

    /// Checks everything against an API of its own, and ranges against each other. Nothing is started for
    /// this.
    pub fn check(&self) -> Result<()> {
        self.check_beside(&Self::default())
    }

    /// Checks everything as [`Self::check`] does, where the namespaces and Networks of a running lab are
    /// there already.
    pub(crate) fn check_in(&self, store: &Store) -> Result<()> {
        let mut there = Self::default();
        for kind in [("v1", "Namespace"), NETWORK] {
            let known = |object: &Value| {
                self.objects.iter().any(|o| o["kind"] == kind.1 && meta(o, "name") == meta(object, "name"))
            };
            for object in objects::list(store, kind).iter().filter(|object| !known(&object.value)) {
                let (name, labels) = (object.name(), &object.value["metadata"]["labels"]);
                there
                    .objects
                    .push(json!({"apiVersion": kind.0, "kind": kind.1, "spec": object.value["spec"],
                    "metadata": {"name": name, "labels": labels}}));
            }
        }
        self.check_beside(&there)
    }

    fn check_beside(&self, there: &Self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let options = StoreOptions::with_crds(&knit_api::crds())
            .map_err(|error| Error::io("cannot encode the CRDs as JSON")(error.into()))?;
        let scratch = Store::new(&options).map_err(|error| Error::Api(error.into()))?;
        there.apply(&scratch)?;
        self.apply(&scratch)?;
        let mut all = there.clone();
        all.extend(self.clone());
        all.check_ranges(&options.service_cidrs)?;
        self.check_annotations(&scratch)
    }

    /// Applies everything: namespaces and Networks first.
    pub fn apply(&self, store: &Store) -> Result<()> {
        let mut ordered: Vec<&Value> = self.objects.iter().collect();
        ordered.sort_by_key(|object| match object["kind"].as_str() {
            Some("Namespace" | "CustomResourceDefinition") => 0,
            Some("NetworkClass") => 1,
            Some("Network") => 2,
            Some("Pod" | "Deployment") => 4,
            _ => 3,
        });
        for object in ordered {
            apply(store, object)?;
        }
        Ok(())
    }

    /// Whether the Networks that pods ask for exist, and let their namespace attach.
    fn check_annotations(&self, scratch: &Store) -> Result<()> {
        let network = |name: &str| objects::get(scratch, NETWORK, "", name);
        for object in &self.objects {
            let pod = match object["kind"].as_str() {
                Some("Pod") => object,
                Some("Deployment") => &object["spec"]["template"],
                _ => continue,
            };
            let namespace = Some(meta(object, "namespace")).filter(|n| !n.is_empty()).unwrap_or("default");
            let labels = objects::get(scratch, ("v1", "Namespace"), "", namespace);
            let labels = labels.map(|n| n.value["metadata"]["labels"].clone()).unwrap_or_default();
            let labels: Labels = serde_json::from_value(labels).unwrap_or_default();
            let kind = object["kind"].as_str().unwrap_or_default();
            let who = format!("{kind} {namespace}/{}", meta(object, "name"));
            for name in wanted_networks(&pod["metadata"]["annotations"]) {
                let refused =
                    |why: String| Err(Error::Network { who: who.clone(), network: name.clone(), why });
                match network(&name) {
                    None if name == "default" => {}
                    None => return refused("does not exist: add it to the manifests".to_owned()),
                    // A selector that cannot be read is refused by the agent, in its own words.
                    Some(found) if read(&found.value).is_some_and(|n| n.admits(&labels) == Ok(false)) => {
                        let why = format!(
                            "does not allow namespace {namespace} to attach: check its allowedNamespaces"
                        );
                        return refused(why);
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    fn check_ranges(&self, services: &[String]) -> Result<()> {
        let mut taken: Vec<(String, IpNet)> = Vec::new();
        let parsed = |texts: &[&str]| -> Vec<IpNet> { texts.iter().filter_map(|t| t.parse().ok()).collect() };
        taken.extend(
            parsed(&wire::GATEWAY)
                .into_iter()
                .map(|n| (format!("the nodes' range {}", n.trunc()), n.trunc())),
        );
        taken.extend(
            services.iter().filter_map(|s| Some((format!("the service range {s}"), s.parse().ok()?))),
        );
        let networks = self.objects.iter().filter(|object| object["kind"] == "Network");
        let (default, others): (Vec<&Value>, Vec<&Value>) =
            networks.partition(|n| meta(n, "name") == "default");
        let subnets =
            |network: &Value| read(network).map_or_else(Vec::new, |network| network.ranges().to_vec());
        let clash = |what: &str, nets: &[IpNet], taken: &[(String, IpNet)]| -> Result<()> {
            for net in nets {
                if let Some((other, _)) = taken.iter().find(|(_, t)| overlap(t, net)) {
                    return Err(Error::Overlap { first: format!("{what} ({net})"), second: other.clone() });
                }
            }
            Ok(())
        };
        let own = default.first().map_or_else(|| parsed(&DEFAULT_SUBNETS), |network| subnets(network));
        clash("Network default", &own, &taken)?;
        taken.extend(own.into_iter().map(|net| (format!("Network default ({net})"), net)));
        // Others may overlap each other.
        others.iter().try_for_each(|network| {
            clash(&format!("Network {}", meta(network, "name")), &subnets(network), &taken)
        })
    }
}

/// Applies one object, and its status where it has one.
pub(crate) fn apply(store: &Store, object: &Value) -> Result<()> {
    let kind_name = object["kind"].as_str().unwrap_or_default().to_owned();
    let name = meta(object, "name").to_owned();
    let refused = |error: ApiError| Error::Refused {
        kind: kind_name.clone(),
        name: name.clone(),
        error: Box::new(error),
    };
    let kind = store.kind_of(object).map_err(refused)?;
    let namespace = match (kind.namespaced, meta(object, "namespace")) {
        (false, _) => "",
        (true, "") => "default",
        (true, namespace) => namespace,
    };
    // An apply that meets an unknown field says less about it.
    let unknown =
        take_unknown(&kind, &mut object.clone()).map_err(|why| refused(ApiError::bad_request(why)))?;
    if let Some(field) = unknown.first() {
        return Err(refused(ApiError::bad_request(format!("unknown field {field:?}"))));
    }
    let options = WriteOptions {
        manager: "knit-lab".to_owned(),
        validation: FieldValidation::Strict,
        force: true,
        ..WriteOptions::default()
    };
    if name.is_empty() {
        return store.create(&kind, namespace, object.clone(), &options).map(drop).map_err(refused);
    }
    store.patch(&kind, namespace, &name, object, PatchType::Apply, &options).map(drop).map_err(refused)
}

/// The Networks that a pod's annotations name. What cannot be read here, the agent refuses in its own words.
fn wanted_networks(annotations: &Value) -> Vec<String> {
    let plain = |item: &str| -> String {
        let name = item.trim().split('@').next().unwrap_or_default();
        name.rsplit('/').next().unwrap_or_default().to_owned()
    };
    let mut names: Vec<String> = Vec::new();
    names.extend(annotations[knit_api::names::PRIMARY_ANNOTATION].as_str().map(plain));
    if let Some(text) = annotations[knit_api::names::NETWORKS_ANNOTATION].as_str() {
        match serde_json::from_str::<Vec<Value>>(text) {
            Ok(list) => names.extend(list.iter().filter_map(|item| item["name"].as_str()).map(plain)),
            Err(_) => names.extend(text.split(',').map(plain)),
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// A Network; none if it is not one, which whoever applies it says.
fn read(object: &Value) -> Option<Network> {
    serde_json::from_value::<knit_api::Network>(object.clone()).ok()?.try_into().ok()
}

/// Splits YAML at its document marks; JSON is one document.
fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in text.lines() {
        if line == "---" || line.starts_with("--- ") {
            documents.push(String::new());
        } else if let Some(last) = documents.last_mut() {
            last.push_str(line);
            last.push('\n');
        }
    }
    let empty = |d: &String| d.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#'));
    documents.retain(|document| !empty(document));
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        match Manifests::parse("test", text).and_then(|m| m.check()) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    fn network(name: &str, cidr: &str) -> String {
        format!(
            "apiVersion: knit.dev/v1alpha1\nkind: Network\nmetadata: {{name: {name}}}\nspec: {{topology: \
             Layer3, subnets: [{{cidr: {cidr}}}]}}\n---\n"
        )
    }

    #[test]
    fn primary_networks_may_overlap_each_other_and_nothing_else() {
        let two = network("red", "10.77.0.0/24") + &network("blue", "10.77.0.0/24");
        assert_eq!(check(&two), "");
        for (cidr, whom) in [
            ("172.20.7.0/24", "the nodes' range 172.20.0.0/16"),
            ("10.96.0.0/12", "the service range 10.96.0.0/16"),
            ("10.244.9.0/24", "Network default (10.244.0.0/16)"),
        ] {
            let said = check(&network("red", cidr));
            assert!(said.contains("Network red") && said.contains(whom), "{said}");
        }
    }

    #[test]
    fn a_pod_on_a_network_that_is_not_there_or_not_for_it_is_refused() {
        let pod = |annotation: &str, value: &str| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: a, annotations: {{{annotation}: \
                 '{value}'}}}}\nspec: {{containers: [{{name: c, image: x}}]}}\n"
            )
        };
        let said = check(&pod("knit.dev/networks", "nowhere@net1"));
        assert_eq!(
            said,
            "Pod default/a requests Network nowhere, which does not exist: add it to the manifests"
        );
        let said =
            check(&(network("red", "10.77.0.0/24") + &pod("knit.dev/networks", r#"[{"name": "red"}]"#)));
        assert!(said.contains("Network red, which does not allow namespace default to attach"), "{said}");
        assert_eq!(check(&pod("knit.dev/primary", "default")), "");
    }

    #[test]
    fn what_a_running_lab_has_is_known() {
        let store = Store::new(&StoreOptions::with_crds(&knit_api::crds()).unwrap()).unwrap();
        let there =
            network("red", "10.77.0.0/24") + "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n";
        Manifests::parse("test", &there).unwrap().apply(&store).unwrap();
        let check = |text: &str| Manifests::parse("test", text).and_then(|m| m.check_in(&store));
        let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: team}\nspec: {containers: \
                   [{name: c, image: x}]}\n";
        check(pod).unwrap();
        let said = check(&pod.replace("team", "nowhere")).unwrap_err().to_string();
        assert!(said.contains("nowhere"), "{said}");
        check(&network("red", "10.78.0.0/24")).unwrap();
        let annotated =
            pod.replace("namespace: team", "namespace: team, annotations: {knit.dev/networks: red}");
        let said = check(&annotated).unwrap_err().to_string();
        assert!(said.contains("Network red, which does not allow namespace team to attach"), "{said}");
    }

    #[test]
    fn wrong_manifests_are_refused_in_words() {
        let said = check("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {contaners: []}\n");
        assert!(said.starts_with("Pod a: ") && said.contains("contaners"), "{said}");
        let said = check("apiVersion: v1\nkind: Pood\nmetadata: {name: a}\n");
        assert!(said.contains("Pood"), "{said}");
        let said = check("kind: Pod\n");
        assert!(said.contains("without kind or apiVersion"), "{said}");
        let said = check("a: [\n");
        assert!(said.starts_with("cannot read manifest test"), "{said}");
        let said = check(
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: nowhere}\nspec: {containers: \
             [{name: c, image: x}]}\n",
        );
        assert!(said.contains("nowhere"), "{said}");
    }
}
