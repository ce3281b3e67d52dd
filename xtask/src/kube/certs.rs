//! The cluster's certificates: one authority, a client certificate for each component, kubeconfigs.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

use super::net;
use super::paths::State;

/// Who signs.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, as PEM.
struct Pair {
    certificate: String,
    key: String,
}

/// Whom a certificate names.
struct Subject<'a> {
    name: &'a str,
    group: Option<&'a str>,
    /// As a server, under these names and addresses.
    server: Vec<SanType>,
    client: bool,
}

/// Makes everything in the state's folder: certificates, keys, kubeconfigs.
pub fn make(state: &State, nodes: &[String]) -> Result<()> {
    let pki = state.pki();
    fs::create_dir_all(&pki)?;
    fs::create_dir_all(state.path().join("conf"))?;
    let authority = Authority::new()?;
    write(&pki.join("ca.crt"), &authority.issuer.pem())?;
    write(&pki.join("ca.key"), &authority.issuer.key().serialize_pem())?;

    let accounts = KeyPair::generate().context("cannot create the key of service accounts")?;
    write(&pki.join("sa.key"), &accounts.serialize_pem())?;
    write(&pki.join("sa.pub"), &accounts.public_key_pem())?;

    let mut names = Vec::new();
    for name in ["", ".default", ".default.svc", ".default.svc.cluster.local"] {
        names.push(dns(&format!("kubernetes{name}"))?);
    }
    names.push(dns("localhost")?);
    let loopback = IpAddr::from([127, 0, 0, 1]);
    names.extend(net::api_addresses().into_iter().chain([loopback]).map(SanType::IpAddress));
    let server = Subject { name: "kube-apiserver", group: None, server: names, client: false };
    authority.issue(&server)?.write(&pki, "apiserver")?;

    let masters = Some("system:masters");
    let to_kubelets = authority.issue(&Subject::client("kube-apiserver-kubelet-client", masters))?;
    to_kubelets.write(&pki, "apiserver-kubelet-client")?;

    // The control plane's own reach the API server on their loopback; so does this machine, through the
    // relay.
    let local = format!("https://127.0.0.1:{}", net::API_PORT);
    let remote = format!("https://{}:{}", net::control_plane_v4(), net::API_PORT);
    let config = |name: &str, group: Option<&str>, path: &Path, server: &str| -> Result<()> {
        let pair = authority.issue(&Subject::client(name, group))?;
        authority.kubeconfig(&pair, server, path)
    };
    config("admin", masters, &state.kubeconfig(), &local)?;
    for component in ["kube-controller-manager", "kube-scheduler"] {
        config(&format!("system:{component}"), None, &state.kubeconfig_of(component), &local)?;
    }
    config("system:kube-proxy", None, &state.kubeconfig_of("kube-proxy"), &remote)?;

    for (index, node) in nodes.iter().enumerate() {
        let mut names = vec![dns(node)?];
        names.extend(net::node_addresses(index).map(|net| SanType::IpAddress(net.addr())));
        let name = format!("system:node:{node}");
        let subject = Subject { name: &name, group: Some("system:nodes"), server: names, client: true };
        let pair = authority.issue(&subject)?;
        pair.write(&pki, node)?;
        authority.kubeconfig(&pair, &remote, &state.kubeconfig_of(node))?;
    }
    Ok(())
}

/// Writes `PATH.crt` and `PATH.key`, signed by nobody else: for a server of tests that no client checks.
pub fn self_signed(path: &Path, name: &str) -> Result<()> {
    let made = rcgen::generate_simple_self_signed([name.to_owned()]);
    let made = made.with_context(|| format!("cannot create a certificate for {name}"))?;
    write(&path.with_extension("crt"), &made.cert.pem())?;
    write(&path.with_extension("key"), &made.signing_key.serialize_pem())
}

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, "knit-test-bed");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().context("cannot create the authority's key")?;
        let issuer = CertifiedIssuer::self_signed(params, key).context("cannot create the authority")?;
        Ok(Self { issuer })
    }

    fn issue(&self, subject: &Subject<'_>) -> Result<Pair> {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, subject.name);
        if let Some(group) = subject.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        if subject.client {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        if !subject.server.is_empty() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
            params.subject_alt_names.clone_from(&subject.server);
        }
        let signed = || -> Result<Pair, rcgen::Error> {
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
        };
        signed().with_context(|| format!("cannot create a certificate for {}", subject.name))
    }

    fn kubeconfig(&self, pair: &Pair, server: &str, path: &Path) -> Result<()> {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "bed", "cluster": {
                "server": server,
                "certificate-authority-data": STANDARD.encode(self.issuer.pem()),
            }}],
            "users": [{ "name": "user", "user": {
                "client-certificate-data": STANDARD.encode(&pair.certificate),
                "client-key-data": STANDARD.encode(&pair.key),
            }}],
            "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": "user" } }],
            "current-context": "bed",
        });
        write(path, &serde_json::to_string_pretty(&config)?)
    }
}

impl<'a> Subject<'a> {
    fn client(name: &'a str, group: Option<&'a str>) -> Self {
        Self { name, group, server: Vec::new(), client: true }
    }
}

impl Pair {
    fn write(&self, folder: &Path, name: &str) -> Result<()> {
        write(&folder.join(format!("{name}.crt")), &self.certificate)?;
        write(&folder.join(format!("{name}.key")), &self.key)
    }
}

fn dns(name: &str) -> Result<SanType> {
    Ok(SanType::DnsName(
        name.try_into().with_context(|| format!("{name} is not a valid name for a certificate"))?,
    ))
}

/// Only for its owner: there are keys in most of these files.
fn write(path: &Path, content: &str) -> Result<()> {
    use std::io::Write as _;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(path).and_then(|mut file| file.write_all(content.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))
}
