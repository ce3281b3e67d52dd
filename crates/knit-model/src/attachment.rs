//! What a NetworkAttachment says of its interface.

use std::net::IpAddr;

use knit_api::NetworkAttachmentStatus;

/// The addresses of its interface. An agent wrote them; one that is not an address is nobody's.
#[must_use]
pub fn attached_addresses(status: &NetworkAttachmentStatus) -> Vec<IpAddr> {
    status.addresses.iter().filter_map(|attached| attached.address.parse().ok()).collect()
}
