//! The real controller, run in the lab's own process: it numbers Networks, gives nodes their blocks, writes
//! statuses.

use std::time::Duration;

use knit_controller::{Config, Controller};
use knit_objects::{Objects, Source};
use serde_json::json;

use super::Lab;
use super::error::{Error, Result};
use super::manifests::{self, DEFAULT_SUBNETS};
use super::objects::{self, NETWORK};

/// Starts it, and waits until the default Network is there.
pub(crate) async fn start(lab: &Lab) -> Result<()> {
    let mut config = Config::new("knit-lab");
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": config.namespace}});
    manifests::apply(lab.store(), &namespace)?;
    config.default_subnets = DEFAULT_SUBNETS
        .map(|cidr| knit_api::Subnet { cidr: cidr.to_owned(), ..knit_api::Subnet::default() })
        .to_vec();
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::io("cannot start the controller")(std::io::Error::other(error))
    };
    let url = format!("http://{}", super::api_address());
    let source = Objects::open(Source::Url(url)).await.map_err(|error| failed(error.into()))?;
    let controller = Controller::new(source, config).map_err(|error| failed(error.into()))?;
    lab.spawn(controller.run(std::future::pending()));
    wait_for_default(lab).await
}

/// Waits until the default Network has its number.
async fn wait_for_default(lab: &Lab) -> Result<()> {
    let limit = Duration::from_secs(10);
    let end = tokio::time::Instant::now() + limit;
    let mut changes = objects::Changes::of(lab.store(), &[NETWORK]);
    loop {
        let network = objects::get(lab.store(), NETWORK, "", knit_api::names::DEFAULT_NETWORK);
        if network.is_some_and(|network| network.value["status"]["id"].is_number()) {
            return Ok(());
        }
        if tokio::time::timeout_at(end, changes.wait()).await.is_err() {
            return Err(Error::TooLate {
                seconds: limit.as_secs(),
                what: "the controller has not created the default Network".to_owned(),
                details: String::new(),
            });
        }
    }
}
