//! CNI_ARGS: who the pod is, as a Kubernetes container runtime says it.

use serde::{Deserialize, Serialize};

use crate::error::{CniError, code};

/// What Kubernetes container runtimes put into CNI_ARGS. A plain CNI client sends none of it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Args {
    /// `K8S_POD_NAMESPACE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<String>,
    /// `K8S_POD_NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// `K8S_POD_UID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// `K8S_POD_INFRA_CONTAINER_ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infra_container_id: Option<String>,
}

// === impl Args ===

impl Args {
    /// Reads `KEY=VALUE;KEY=VALUE`. Keys that Knit does not use are passed over.
    ///
    /// # Errors
    /// When a part has no `=`.
    pub fn parse(text: &str) -> Result<Self, CniError> {
        let mut args = Self::default();
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                let pair: String = pair.chars().take(64).collect();
                let msg = format!("CNI_ARGS contains {pair:?}: write KEY=VALUE pairs separated by ;");
                return Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
            };
            let field = match key.trim() {
                "K8S_POD_NAMESPACE" => &mut args.pod_namespace,
                "K8S_POD_NAME" => &mut args.pod_name,
                "K8S_POD_UID" => &mut args.pod_uid,
                "K8S_POD_INFRA_CONTAINER_ID" => &mut args.infra_container_id,
                _ => continue,
            };
            *field = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_containerd_sends() {
        let args = Args::parse(
            "K8S_POD_UID=u-1;IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=c1",
        )
        .expect("it parses");
        assert_eq!(args.pod_namespace.as_deref(), Some("shop"));
        assert_eq!(args.pod_name.as_deref(), Some("web-0"));
        assert_eq!(args.pod_uid.as_deref(), Some("u-1"));
        assert_eq!(args.infra_container_id.as_deref(), Some("c1"));
        assert_eq!(Args::parse("").expect("nothing is fine"), Args::default());
        assert_eq!(Args::parse("K8S_POD_NAME=;").expect("an empty value is none"), Args::default());
    }

    #[test]
    fn a_part_without_a_value_is_an_invalid_environment() {
        assert_eq!(Args::parse("K8S_POD_NAME").expect_err("no =").code, code::INVALID_ENVIRONMENT);
    }
}
