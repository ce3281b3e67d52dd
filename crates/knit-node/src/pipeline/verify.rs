//! Whether what a runtime made is what it was asked for. Fail closed: half an answer is none.
//!
//! That packets go there and back is the runtime's own to see, before it answers.

use knit_runtime::{AttachRequest, Attachment};

use crate::error::{Error, Reason, Result};

/// What a runtime was asked for, and what it says that it made.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) request: AttachRequest,
    pub(crate) attachment: Attachment,
}

/// What a runtime made as it was asked to.
#[derive(Debug)]
pub(crate) struct Verified(Attachment);

// === impl Answer ===

impl Answer {
    /// Compares the answer with the question. `inode` is that of the pod's namespace.
    pub(crate) fn verify(self, inode: u64) -> Result<Verified> {
        let Self { request, attachment } = self;
        match difference(&request, &attachment, inode) {
            None => Ok(Verified(attachment)),
            Some(problem) => Err(Error::new(
                Reason::AttachFailed,
                format!(
                    "the network runtime of Network {} did not create interface {} as requested: {problem}",
                    request.network, request.interface
                ),
            )),
        }
    }
}

// === impl Verified ===

impl From<Verified> for Attachment {
    fn from(verified: Verified) -> Self {
        verified.0
    }
}

fn difference(request: &AttachRequest, attachment: &Attachment, inode: u64) -> Option<String> {
    if attachment.interface != request.interface {
        return Some(format!("the interface is named {}", attachment.interface));
    }
    if attachment.network != request.network {
        return Some(format!("it is on Network {}", attachment.network));
    }
    let has = |address| attachment.addresses.iter().any(|a| a.net.addr() == address);
    if let Some(missing) = request.addresses.iter().find(|a| !has(a.net.addr())) {
        return Some(format!("it has no address {}", missing.net.addr()));
    }
    if request.mac.is_some_and(|mac| mac != attachment.mac) {
        return Some(format!("its MAC is {}", attachment.mac));
    }
    // A runtime opens the namespace by its path, and a path such as /proc/PID/ns/net may be another's
    // meanwhile.
    (![0, inode].contains(&attachment.pod_netns_inode)).then(|| {
        format!(
            "{} now refers to network namespace {}, but the pod's is {inode}",
            request.netns.display(),
            attachment.pod_netns_inode
        )
    })
}
