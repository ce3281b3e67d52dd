//! The doors of one agent: the listeners that requests come in by, opened together and served together.
//!
//! A new door with a socket is one field here, and one without (such as that of NetworkAttachments, whose
//! requests are objects) one line in [`Doors::serve`].

use std::path::Path;

use knit_objects::Objects;
use tokio::task::JoinSet;

use super::cni::{CniDoor, DoorError};
use super::dra::{DraConfig, DraDoor, DraDoorError, ServeClaims};
use super::kni::{self, KniDoor, KniDoorError};
use super::network_attachment::ObjectsDoor;
use super::nri::{NriConfig, NriDoor};
use crate::core::Core;

/// All front doors, open: who knocks from now on is answered once they are served.
#[derive(Debug)]
pub struct Doors {
    cni: CniDoor,
    kni: KniDoor,
    dra: Option<DraDoor>,
    nri: Option<NriConfig>,
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
    /// The sockets for kubelet.
    #[error(transparent)]
    Dra(DraDoorError),
}

// === impl Doors ===

impl Doors {
    /// Opens them: the shim's at its socket, KNI's in the agent's run-time directory, that of claims in
    /// kubelet's if it is wanted. The one of NRI, if it is wanted, connects where the container runtime
    /// listens.
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
            dra: dra.map(open_dra).transpose().map_err(DoorsError::Dra)?.flatten(),
            nri,
        })
    }

    /// Serves what comes in, as long as the tasks run.
    pub fn serve(self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) {
        tracing::info!(node = core.node(), socket = %self.cni.path().display(), objects = %objects.origin(),
            "serving");
        tasks.spawn(self.cni.serve(core.clone()));
        tasks.spawn(self.kni.serve(core.clone()));
        if let Some(dra) = self.dra {
            tasks.spawn(dra.serve(core.clone()));
        }
        if let Some(NriConfig { socket, served }) = self.nri {
            tasks.spawn(NriDoor::new(core.clone(), served).serve(socket));
        }
        tasks.spawn(ObjectsDoor::new(core.clone(), objects.clone()).serve());
    }
}

/// Opens the door of claims. For those that are left it is no more than a try: the agent was told to do
/// without.
fn open_dra(config: &DraConfig) -> Result<Option<DraDoor>, DraDoorError> {
    match DraDoor::open(config) {
        Err(error) if config.serve == ServeClaims::ThoseLeft => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                error,
                "kubelet cannot release the claims that are still prepared here: start the agent with --dra"
            );
            Ok(None)
        }
        opened => opened.map(Some),
    }
}
