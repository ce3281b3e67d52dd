//! The doors of one agent: the listeners that requests come in by, opened together and served together.
//!
//! A new door with a socket is one field here, and one without (such as that of NetworkAttachments, whose
//! requests are objects) one line in [`Doors::serve`].

use std::path::Path;
use std::time::Duration;

use knit_objects::Objects;
use knit_types::chain;
use tokio::task::JoinSet;

use super::cni::{CniDoor, DoorError};
use super::dra::{DraConfig, DraDoor, DraDoorError, ServeClaims};
use super::kni::{self, KniDoor, KniDoorError};
use super::network_attachment::ObjectsDoor;
use super::nri::{NriConfig, NriDoor};
use crate::core::Core;

/// The pause before the door of claims is tried again, at first and at most.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// All front doors, open: who knocks from now on is answered once they are served.
#[derive(Debug)]
pub struct Doors {
    cni: CniDoor,
    kni: KniDoor,
    dra: Option<Dra>,
    nri: Option<NriConfig>,
}

/// The door of claims.
#[derive(Debug)]
enum Dra {
    /// It is open.
    Open(DraDoor),
    /// It cannot be opened yet: the other doors do not wait for it.
    Closed(DraConfig, DraDoorError),
}

/// A door cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorsError {
    /// The socket for the shim.
    #[error(transparent)]
    Cni(DoorError),
    /// The socket for KNI clients.
    #[error(transparent)]
    Kni(KniDoorError),
}

// === impl Doors ===

impl Doors {
    /// Opens them: the shim's at its socket, KNI's in the agent's run-time directory, that of claims in
    /// kubelet's if it is wanted; where that fails, it is tried again while the others are served. The one of
    /// NRI, if it is wanted, connects where the container runtime listens.
    ///
    /// # Errors
    /// When a socket cannot be made.
    pub fn open(
        cni: &Path,
        run_dir: &Path,
        dra: Option<&DraConfig>,
        nri: Option<NriConfig>,
    ) -> Result<Self, DoorsError> {
        Ok(Self {
            cni: CniDoor::open(cni).map_err(DoorsError::Cni)?,
            kni: KniDoor::open(&run_dir.join(kni::SOCKET)).map_err(DoorsError::Kni)?,
            dra: dra.and_then(open_dra),
            nri,
        })
    }

    /// Serves what comes in, as long as the tasks run.
    pub fn serve(self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) {
        tracing::info!(node = core.node(), socket = %self.cni.path().display(), objects = %objects.origin(),
            "serving");
        tasks.spawn(self.cni.serve(core.clone()));
        tasks.spawn(self.kni.serve(core.clone()));
        match self.dra {
            Some(Dra::Open(door)) => _ = tasks.spawn(door.serve(core.clone())),
            Some(Dra::Closed(config, error)) => _ = tasks.spawn(open_later(config, error, core.clone())),
            None => {}
        }
        if let Some(NriConfig { socket, served }) = self.nri {
            tasks.spawn(NriDoor::new(core.clone(), served).serve(socket));
        }
        tasks.spawn(ObjectsDoor::new(core.clone(), objects.clone()).serve());
    }
}

/// Opens the door of claims. For those that are left it is no more than a try: the agent was told to do
/// without.
fn open_dra(config: &DraConfig) -> Option<Dra> {
    match DraDoor::open(config) {
        Ok(door) => Some(Dra::Open(door)),
        Err(error) if config.serve == ServeClaims::ThoseLeft => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                error,
                "kubelet cannot release the claims that are still prepared here: start the agent with --dra"
            );
            None
        }
        Err(error) => Some(Dra::Closed(config.clone(), error)),
    }
}

/// Says why claims are not served, and opens their door as soon as it can be.
async fn open_later(config: DraConfig, error: DraDoorError, core: Core) {
    let message = format!(
        "claims are not served on this node, and pods that have some do not start: {}; it is retried",
        chain(&error)
    );
    tracing::error!("{message}");
    core.report().say_of_node("ClaimsNotServed", message);
    let mut delay = RETRY_DELAYS.0;
    loop {
        tokio::time::sleep(delay).await;
        match DraDoor::open(&config) {
            Ok(door) => return door.serve(core).await,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::debug!(error, "claims cannot be served yet");
            }
        }
        delay = (delay * 2).min(RETRY_DELAYS.1);
    }
}
