//! Networks with a router of their own.

use std::sync::Arc;

use knit_runtime::{Error, Reason, Result};

use crate::attach::Plan;
use crate::core::{Core, Net};
use crate::mark::Mark;
use crate::shape::{Facts, Shape};

impl Core {
    /// Not yet.
    pub fn setup_router(&self, shape: &Arc<Shape>, _facts: &Facts) -> Result<()> {
        let message = format!("Network {}: this version serves the default Network only", shape.network.name);
        Err(Error::new(Reason::Unsupported, message))
    }

    /// What the node itself has for a pod of another Network.
    pub fn node_side(&self, _net: &Net, _plan: &Plan) -> Result<()> {
        Ok(())
    }

    /// Takes away what the node itself has.
    pub fn take_node_side(&self, _net: &Net, _mark: &Mark) -> Result<()> {
        Ok(())
    }
}
