//! Errors on the wire: a gRPC status whose details carry the reason.

use knit_api::kni::v1alpha1 as wire;
use prost::Message as _;
use tonic::{Code, Status};

use crate::error::{Error, Reason};

/// An error as a status.
#[must_use]
pub fn status_from_error(error: &Error) -> Status {
    let mut message = error.message.clone();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        message += ": ";
        message += &inner.to_string();
        cause = inner.source();
    }
    let (reason, code) = to_wire(error.reason);
    let detail = wire::ErrorDetail {
        reason: reason.into(),
        retryable: error.retryable(),
        message: message.clone(),
        network: error.network.clone().unwrap_or_default(),
        interface: error.interface.clone().unwrap_or_default(),
    };
    Status::with_details(code, message, detail.encode_to_vec().into())
}

/// A status as an error; one without details is read by its code.
#[must_use]
pub fn error_from_status(status: &Status) -> Error {
    let some = |text: String| (!text.is_empty()).then_some(text);
    match wire::ErrorDetail::decode(status.details()) {
        Ok(detail) if !status.details().is_empty() => Error {
            reason: from_wire(detail.reason()).unwrap_or_else(|| from_code(status.code())),
            message: detail.message,
            network: some(detail.network),
            interface: some(detail.interface),
            source: None,
        },
        _ => Error::new(from_code(status.code()), status.message()),
    }
}

fn to_wire(reason: Reason) -> (wire::Reason, Code) {
    match reason {
        Reason::Invalid => (wire::Reason::Invalid, Code::InvalidArgument),
        Reason::NetworkNotFound => (wire::Reason::NetworkNotFound, Code::NotFound),
        Reason::AttachmentNotFound => (wire::Reason::AttachmentNotFound, Code::NotFound),
        Reason::NamespaceGone => (wire::Reason::NamespaceGone, Code::FailedPrecondition),
        Reason::Conflict => (wire::Reason::Conflict, Code::AlreadyExists),
        Reason::AddressesExhausted => (wire::Reason::AddressesExhausted, Code::ResourceExhausted),
        Reason::NotReady => (wire::Reason::NotReady, Code::Unavailable),
        Reason::NotAllowed => (wire::Reason::NotAllowed, Code::PermissionDenied),
        Reason::InUse => (wire::Reason::InUse, Code::FailedPrecondition),
        Reason::Unsupported => (wire::Reason::Unsupported, Code::Unimplemented),
        Reason::Damaged => (wire::Reason::Damaged, Code::FailedPrecondition),
        Reason::Internal => (wire::Reason::Internal, Code::Internal),
    }
}

fn from_wire(reason: wire::Reason) -> Option<Reason> {
    Some(match reason {
        wire::Reason::Unspecified => return None,
        wire::Reason::Invalid => Reason::Invalid,
        wire::Reason::NetworkNotFound => Reason::NetworkNotFound,
        wire::Reason::AttachmentNotFound => Reason::AttachmentNotFound,
        wire::Reason::NamespaceGone => Reason::NamespaceGone,
        wire::Reason::Conflict => Reason::Conflict,
        wire::Reason::AddressesExhausted => Reason::AddressesExhausted,
        wire::Reason::NotReady => Reason::NotReady,
        wire::Reason::NotAllowed => Reason::NotAllowed,
        wire::Reason::InUse => Reason::InUse,
        wire::Reason::Unsupported => Reason::Unsupported,
        wire::Reason::Damaged => Reason::Damaged,
        wire::Reason::Internal => Reason::Internal,
    })
}

fn from_code(code: Code) -> Reason {
    match code {
        Code::InvalidArgument | Code::OutOfRange => Reason::Invalid,
        Code::NotFound => Reason::NetworkNotFound,
        Code::AlreadyExists => Reason::Conflict,
        Code::ResourceExhausted => Reason::AddressesExhausted,
        Code::PermissionDenied | Code::Unauthenticated => Reason::NotAllowed,
        Code::Unimplemented => Reason::Unsupported,
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Aborted => Reason::NotReady,
        _ => Reason::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for reason in [
            Reason::Invalid,
            Reason::NetworkNotFound,
            Reason::AttachmentNotFound,
            Reason::NamespaceGone,
            Reason::Conflict,
            Reason::AddressesExhausted,
            Reason::NotReady,
            Reason::NotAllowed,
            Reason::InUse,
            Reason::Unsupported,
            Reason::Damaged,
            Reason::Internal,
        ] {
            let sent = Error::new(reason, "words").on("blue").at("net1");
            let got = error_from_status(&status_from_error(&sent));
            assert_eq!((got.reason, got.message.as_str()), (reason, "words"));
            assert_eq!((got.network.as_deref(), got.interface.as_deref()), (Some("blue"), Some("net1")));
        }
    }

    #[test]
    fn a_foreign_status_is_read_by_its_code() {
        let got = error_from_status(&Status::unavailable("starting"));
        assert_eq!((got.reason, got.retryable()), (Reason::NotReady, true));
        let garbage = Status::with_details(Code::Internal, "x", vec![0xff, 0xff, 0xff].into());
        assert_eq!(error_from_status(&garbage).reason, Reason::Internal);
    }
}
