//! `cargo xtask licences`: no crate with another licence or from another place than deny.toml allows, and
//! none of those that it bans. Needs nothing but cargo; `cargo deny check` is the same and more.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

#[derive(clap::Args)]
pub struct Args {}

/// Where crates come from; those of the workspace have no such place.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

/// What deny.toml says.
#[derive(Debug, PartialEq)]
struct Rules {
    allowed: Vec<String>,
    banned: Vec<String>,
}

pub fn run(Args {}: &Args) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("deny.toml")).context("cannot read deny.toml")?;
    let rules = Rules::of(&text).context("deny.toml is not understood")?;
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = crate::cargo::command()
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform", &target])
        .current_dir(&root)
        .output()
        .context("cannot run cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("what cargo metadata says")?;
    let wrong: Vec<String> = metadata.packages.iter().filter_map(|package| rules.object(package)).collect();
    ensure!(wrong.is_empty(), "these crates are not allowed by deny.toml:\n  {}", wrong.join("\n  "));
    Ok(knit_output::print(&format!("{} crates are as deny.toml allows\n", metadata.packages.len()))?)
}

impl Rules {
    /// Of the two lists that we look at, each string.
    fn of(text: &str) -> Option<Self> {
        let list = |name: &str| {
            let (_, rest) = text.split_once(&format!("\n{name} = ["))?;
            rest.split_once(']').map(|(list, _)| list)
        };
        let strings = |text: &str| text.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        let banned = list("deny")?.lines().filter_map(|line| line.split_once("crate = "));
        let banned = banned.filter_map(|(_, name)| name.split('"').nth(1)).map(str::to_owned).collect();
        Some(Self { allowed: strings(list("allow")?), banned })
    }

    /// What is wrong with a package, if anything.
    fn object(&self, package: &Package) -> Option<String> {
        let Package { name, version, license, source } = package;
        if self.banned.contains(name) {
            return Some(format!("{name} {version} is banned"));
        }
        if let Some(source) = source.as_deref().filter(|source| *source != REGISTRY) {
            return Some(format!("{name} {version} comes from {source}"));
        }
        match license.as_deref() {
            None => Some(format!("{name} {version} names no licence")),
            Some(license) if !self.allows(license) => {
                Some(format!("{name} {version} has the licence {license}"))
            }
            Some(_) => None,
        }
    }

    /// Whether an SPDX expression can be met. `/` is an old way to write OR.
    fn allows(&self, expression: &str) -> bool {
        let expression = expression.trim();
        let split = |separator: &str| {
            let (mut parts, mut depth, mut start) = (Vec::new(), 0_usize, 0);
            for (at, character) in expression.char_indices() {
                match character {
                    '(' => depth += 1,
                    ')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                if depth == 0 && at >= start && expression[at..].starts_with(separator) {
                    parts.push(&expression[start..at]);
                    start = at + separator.len();
                }
            }
            parts.push(&expression[start..]);
            parts
        };
        for or in [" OR ", "/"] {
            let parts = split(or);
            if parts.len() > 1 {
                return parts.into_iter().any(|part| self.allows(part));
            }
        }
        let parts = split(" AND ");
        if parts.len() > 1 {
            return parts.into_iter().all(|part| self.allows(part));
        }
        match expression.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
            Some(inner) => self.allows(inner),
            None => self.allowed.iter().any(|allowed| allowed == expression),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_allowed_is_told() {
        let text = "[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0\",\n]\n[bans]\ndeny = [\n  { crate = \
                    \"openssl\", \
                    reason = \"TLS is rustls\" },\n]\n";
        let rules = Rules::of(text).unwrap();
        assert_eq!(
            rules,
            Rules { allowed: vec!["MIT".into(), "Apache-2.0".into()], banned: vec!["openssl".into()] }
        );
        for good in ["MIT", "MIT/GPL-3.0", "MIT OR GPL-3.0", "(GPL-3.0 OR MIT) AND Apache-2.0"] {
            assert!(rules.allows(good), "{good}");
        }
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR ISC) AND MIT", "MIT WITH exception", ""] {
            assert!(!rules.allows(bad), "{bad}");
        }
        let package = |name: &str, license: Option<&str>, source: Option<&str>| {
            let (name, version) = (name.to_owned(), "1.0.0".to_owned());
            let (license, source) = (license.map(str::to_owned), source.map(str::to_owned));
            rules.object(&Package { name, version, license, source })
        };
        assert_eq!(package("a", Some("MIT"), None), None);
        assert_eq!(package("a", Some("MIT"), Some(REGISTRY)), None);
        assert!(package("a", None, None).unwrap().contains("names no licence"));
        assert!(package("openssl", Some("MIT"), None).unwrap().contains("is banned"));
        assert!(
            package("a", Some("MIT"), Some("git+https://example.com/a")).unwrap().contains("comes from git")
        );
    }
}
