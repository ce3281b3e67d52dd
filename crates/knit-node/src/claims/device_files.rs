//! Files by which containers read what their claim has (KEP-5304): one for each request, and a specification
//! by which the container runtime mounts them (CDI). Containers that name the claim find theirs at a path
//! that Kubernetes defines.
//!
//! Nothing that a tenant chose is part of a path on the node: names of claims and requests are only in the
//! path inside of the container, and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::resource::v1::{DeviceAttribute, NetworkDeviceData};
use knit_api::names;
use knit_types::ObjectRef;
use knit_types::sync::Locked as _;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The versions that are written, the newest first. Their content is the same.
const VERSIONS: [&str; 2] = ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"];
const KIND: &str = "DeviceMetadata";
/// Where containers find them.
const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// The class of the CDI devices.
const CDI_CLASS: &str = "metadata";
/// The first version in which the name of a device may begin with a digit, as a uid does.
const CDI_VERSION: &str = "0.5.0";

/// Where they are written.
#[derive(Clone, Debug)]
pub struct DeviceFiles {
    /// A folder of the agent's, with one for each claim.
    own: PathBuf,
    /// Where the container runtime looks for CDI specifications.
    cdi: PathBuf,
    /// One write at a time.
    writing: Arc<Mutex<()>>,
}

/// One device of a claim, as its file says it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct DeviceData {
    pub driver: String,
    pub pool: String,
    pub name: String,
    pub attributes: BTreeMap<String, DeviceAttribute>,
    #[serde(rename = "networkData", skip_serializing_if = "Option::is_none")]
    pub network_data: Option<NetworkDeviceData>,
}

/// A claim, as its files say it.
#[derive(Clone, Debug)]
pub(super) struct ClaimData {
    pub claim: ObjectRef,
    /// What its pod calls it, where it was made from a template.
    pub pod_claim: Option<String>,
    /// Devices by request, as the scheduler answered it: with the name of the subrequest.
    pub requests: Vec<(String, Vec<DeviceData>)>,
}

/// Why there are no files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceFileError {
    /// A name that could lead somewhere else.
    #[error("{what} {name:?} cannot be part of a path")]
    Name {
        /// What it names.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A file cannot be written, read or removed.
    #[error("cannot {what} {path}", path = path.display())]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// What is in a file, in one of its versions.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    kind: String,
    api_version: String,
    metadata: Metadata,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<String>,
    requests: [RequestData; 1],
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Metadata {
    name: String,
    namespace: String,
    uid: String,
    generation: i64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct RequestData {
    name: String,
    devices: Vec<DeviceData>,
}

// === impl DeviceFiles ===

impl DeviceFiles {
    /// In kubelet's directory, for a container runtime that reads this folder of CDI specifications.
    #[must_use]
    pub fn new(kubelet_dir: &Path, cdi_dir: PathBuf) -> Self {
        let own = kubelet_dir.join("plugins").join(names::DRIVER).join("dra-device-metadata");
        Self { own, cdi: cdi_dir, writing: Arc::default() }
    }

    /// Writes those of a claim, in place of what is there; gives the CDI device of each request.
    pub(super) fn write(&self, data: &ClaimData) -> Result<BTreeMap<String, String>, DeviceFileError> {
        let ClaimData { claim, pod_claim, requests } = data;
        let folder = self.folder_of(&claim.uid)?;
        check_name("claim", &claim.name)?;
        pod_claim.iter().try_for_each(|name| check_name("the pod's claim", name))?;
        let container = match pod_claim {
            Some(name) => format!("{IN_CONTAINER}/resourceclaimtemplates/{name}"),
            None => format!("{IN_CONTAINER}/resourceclaims/{}", claim.name),
        };
        let _writing = self.writing.locked();
        create_folder(&folder)?;
        create_folder(&self.cdi)?;
        let (mut devices, mut ids) = (Vec::new(), BTreeMap::new());
        for (n, (request, with)) in requests.iter().enumerate() {
            let base = request.split_once('/').map_or(request.as_str(), |(base, _)| base);
            check_name("request", base)?;
            let path = folder.join(format!("{n}.json"));
            let metadata = Metadata {
                name: claim.name.clone(),
                namespace: claim.namespace.clone(),
                uid: claim.uid.clone(),
                generation: 1,
            };
            let request = RequestData { name: request.clone(), devices: with.clone() };
            replace(&path, &encode(&metadata, pod_claim.as_deref(), &request))?;
            let name = format!("{}_{base}", claim.uid);
            let mount = json!({
                "hostPath": path,
                "containerPath": format!("{container}/{base}/{}-metadata.json", names::DRIVER),
                "options": ["ro", "bind"],
            });
            devices.push(json!({"name": name, "containerEdits": {"mounts": [mount]}}));
            ids.insert(base.to_owned(), format!("{}/{CDI_CLASS}={name}", names::DRIVER));
        }
        let kind = format!("{}/{CDI_CLASS}", names::DRIVER);
        let spec = json!({"cdiVersion": CDI_VERSION, "kind": kind, "devices": devices});
        // Last: the runtime never finds one whose files are still to come.
        replace(&self.cdi_of(&claim.uid), spec.to_string().as_bytes())?;
        Ok(ids)
    }

    /// Writes what the devices of a claim became. A claim without files has none afterwards.
    pub(super) fn attached(
        &self,
        uid: &str,
        data: &dyn Fn(&str) -> Option<NetworkDeviceData>,
    ) -> Result<(), DeviceFileError> {
        let folder = self.folder_of(uid)?;
        let _writing = self.writing.locked();
        for path in files_in(&folder)? {
            let Some(Document { mut metadata, pod_claim_name, requests: [mut request], .. }) = read(&path)?
            else {
                continue;
            };
            let before = request.devices.clone();
            for device in &mut request.devices {
                if let Some(data) = data(&device.name) {
                    device.network_data = Some(data);
                }
            }
            if request.devices != before {
                metadata.generation += 1;
                replace(&path, &encode(&metadata, pod_claim_name.as_deref(), &request))?;
            }
        }
        Ok(())
    }

    /// Removes those of a claim. None is success.
    pub(super) fn remove(&self, uid: &str) -> Result<(), DeviceFileError> {
        let folder = self.folder_of(uid)?;
        let gone = |path: &Path, result: io::Result<()>| match result {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(DeviceFileError::Io { what: "remove", path: path.to_owned(), source })
            }
            _ => Ok(()),
        };
        let _writing = self.writing.locked();
        let spec = self.cdi_of(uid);
        for file in [&spec, &unfinished(&spec)] {
            gone(file, fs::remove_file(file))?;
        }
        gone(&folder, fs::remove_dir_all(&folder))
    }

    /// The claims that there are files of.
    pub(super) fn claims(&self) -> BTreeSet<ObjectRef> {
        let Ok(folders) = fs::read_dir(&self.own) else { return BTreeSet::new() };
        let claim = |folder: PathBuf| {
            let uid = folder.file_name()?.to_str()?.to_owned();
            let first = files_in(&folder).ok()?.into_iter().next();
            let read = first.and_then(|path| read(&path).ok().flatten()).map(|document| document.metadata);
            // What was never finished is known by its folder.
            let (namespace, name) = read.map(|read| (read.namespace, read.name)).unwrap_or_default();
            Some(ObjectRef { namespace, name, uid })
        };
        folders.flatten().filter_map(|entry| claim(entry.path())).collect()
    }

    fn folder_of(&self, uid: &str) -> Result<PathBuf, DeviceFileError> {
        let valid = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if uid.is_empty() || uid.len() > 64 || !uid.bytes().all(valid) {
            return Err(DeviceFileError::Name { what: "uid", name: uid.chars().take(64).collect() });
        }
        Ok(self.own.join(uid))
    }

    /// Who calls has checked the uid.
    fn cdi_of(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{}_{CDI_CLASS}_{uid}.json", names::DRIVER))
    }
}

/// One document after the other, of the same content.
fn encode(metadata: &Metadata, pod_claim: Option<&str>, request: &RequestData) -> Vec<u8> {
    let mut bytes = Vec::new();
    for version in VERSIONS {
        let document = Document {
            kind: KIND.to_owned(),
            api_version: version.to_owned(),
            metadata: metadata.clone(),
            pod_claim_name: pod_claim.map(str::to_owned),
            requests: [request.clone()],
        };
        bytes.extend(serde_json::to_vec(&document).expect("plain data becomes JSON"));
        bytes.push(b'\n');
    }
    bytes
}

/// The first document of a file; none if it cannot be understood.
fn read(path: &Path) -> Result<Option<Document>, DeviceFileError> {
    let failed = |source| DeviceFileError::Io { what: "read", path: path.to_owned(), source };
    let bytes = fs::read(path).map_err(failed)?;
    Ok(serde_json::Deserializer::from_slice(&bytes).into_iter().next().and_then(Result::ok))
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>, DeviceFileError> {
    let failed = |source| DeviceFileError::Io { what: "read", path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|end| end == "json")).collect())
}

fn create_folder(path: &Path) -> Result<(), DeviceFileError> {
    let failed = |source| DeviceFileError::Io { what: "create", path: path.to_owned(), source };
    fs::create_dir_all(path).map_err(failed)
}

/// Writes a file that containers of any user may read, all of it or nothing.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), DeviceFileError> {
    let failed = |source| DeviceFileError::Io { what: "write", path: path.to_owned(), source };
    let new = unfinished(path);
    fs::write(&new, bytes).map_err(failed)?;
    fs::set_permissions(&new, Permissions::from_mode(0o644)).map_err(failed)?;
    fs::rename(&new, path).map_err(failed)
}

/// The name of a file while it is written, of a kind that nobody reads.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Names of objects, and of what a pod calls its claims: they are part of a path in a container, and must not
/// lead out of their folder there.
fn check_name(what: &'static str, name: &str) -> Result<(), DeviceFileError> {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.');
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if begins && name.len() <= 253 && name.bytes().all(valid) && !name.contains("..") {
        return Ok(());
    }
    Err(DeviceFileError::Name { what, name: name.chars().take(64).collect() })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn data(name: &str, pod_claim: Option<&str>, request: &str) -> ClaimData {
        let attribute = DeviceAttribute { string: Some("blue".into()), ..DeviceAttribute::default() };
        let device = DeviceData {
            driver: names::DRIVER.into(),
            pool: names::NETWORK_POOL.into(),
            name: "blue".into(),
            attributes: BTreeMap::from([(names::POD_NETWORK_ATTRIBUTE.to_owned(), attribute)]),
            network_data: None,
        };
        let claim = ObjectRef { namespace: "shop".into(), name: name.into(), uid: "7c3d-0".into() };
        let requests = vec![(request.to_owned(), vec![device])];
        ClaimData { claim, pod_claim: pod_claim.map(str::to_owned), requests }
    }

    fn documents(path: &Path) -> Vec<Value> {
        let bytes = fs::read(path).expect("a file");
        serde_json::Deserializer::from_slice(&bytes).into_iter().collect::<Result<_, _>>().expect("JSON")
    }

    #[test]
    fn files_say_what_kubernetes_defines_where_it_defines_it() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = DeviceFiles::new(dir.path(), dir.path().join("cdi"));
        for (pod_claim, place) in
            [(None, "resourceclaims/web-net-x1"), (Some("net"), "resourceclaimtemplates/net")]
        {
            let ids = files.write(&data("web-net-x1", pod_claim, "nic/fast")).expect("written");
            assert_eq!(ids["nic"], "knit.dev/metadata=7c3d-0_nic");
            let spec: Value =
                serde_json::from_slice(&fs::read(files.cdi_of("7c3d-0")).expect("a file")).expect("JSON");
            assert_eq!(spec["kind"], "knit.dev/metadata");
            assert_eq!(spec["devices"][0]["name"], "7c3d-0_nic");
            let mount = &spec["devices"][0]["containerEdits"]["mounts"][0];
            let inside = format!("{IN_CONTAINER}/{place}/nic/knit.dev-metadata.json");
            assert_eq!(mount["containerPath"], inside);
            let found = documents(Path::new(mount["hostPath"].as_str().expect("a path")));
            let versions: Vec<_> = found.iter().map(|document| &document["apiVersion"]).collect();
            assert_eq!(versions, ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]);
            for document in &found {
                assert_eq!(document["kind"], "DeviceMetadata");
                assert_eq!(document["metadata"]["generation"], 1);
                assert_eq!(document["podClaimName"], json!(pod_claim));
                assert_eq!(document["requests"][0]["name"], "nic/fast");
                let device = &document["requests"][0]["devices"][0];
                assert_eq!(device["attributes"][names::POD_NETWORK_ATTRIBUTE]["string"], "blue");
            }
        }

        // What it became; the same again is no new generation.
        let became = NetworkDeviceData {
            interface_name: Some("net1".into()),
            ips: Some(vec!["10.2.0.3/32".into()]),
            hardware_address: Some("02:00:00:00:00:07".into()),
        };
        for _ in 0..2 {
            files.attached("7c3d-0", &|name| (name == "blue").then(|| became.clone())).expect("written");
            let found = documents(&files.own.join("7c3d-0/0.json"));
            assert_eq!(found.len(), 2);
            assert_eq!(found[1]["metadata"]["generation"], 2);
            assert_eq!(found[1]["podClaimName"], "net");
            assert_eq!(found[1]["requests"][0]["devices"][0]["networkData"]["interfaceName"], "net1");
        }
        let claim = ObjectRef { namespace: "shop".into(), name: "web-net-x1".into(), uid: "7c3d-0".into() };
        assert_eq!(files.claims(), BTreeSet::from([claim]));
        files.remove("7c3d-0").expect("removed");
        files.remove("7c3d-0").expect("nothing is there");
        assert!(files.claims().is_empty() && fs::read_dir(&files.cdi).expect("a folder").count() == 0);
    }

    #[test]
    fn no_name_leads_out_of_its_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        let files = DeviceFiles::new(dir.path(), dir.path().join("cdi"));
        let mut uid = data("web", None, "nic");
        uid.claim.uid = "../../x".into();
        let cases = [
            data("..", None, "nic"),
            data("web", Some("../../etc"), "nic"),
            data("web", None, "../nic"),
            uid,
        ];
        for case in cases {
            let error = files.write(&case).expect_err("a path").to_string();
            assert!(error.contains("cannot be part of a path"), "{error}");
        }
        let files: Vec<_> = fs::read_dir(dir.path().join("cdi")).into_iter().flatten().collect();
        assert!(files.is_empty(), "{files:?}");
        DeviceFiles::new(dir.path(), dir.path().into()).remove("../x").expect_err("a path");
    }
}
