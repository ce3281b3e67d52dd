//! Errors on the wire: a gRPC status whose details carry the reason.
//!
//! Details are sent in gRPC's richer error model, which the libraries of every language read and write: a
//! `google.rpc.Status` with one `google.protobuf.Any`. A bare `ErrorDetail` in its place is understood, too.

use knit_api::kni::v1alpha1 as wire;
use prost::Message as _;
use tonic::{Code, Status};

use crate::error::{Error, Reason};

/// What the details' type is called.
const TYPE_URL: &str = "type.googleapis.com/kni.v1alpha1.ErrorDetail";

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, prost::Message)]
struct RichStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, prost::Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// An error as a status.
#[must_use]
pub fn status_from_error(error: &Error) -> Status {
    let message = knit_types::chain(error);
    let (reason, code) = to_wire(error.reason);
    let detail = wire::ErrorDetail {
        reason: reason.into(),
        retryable: error.retryable(),
        message: message.clone(),
        network: error.network.clone().map(String::from).unwrap_or_default(),
        interface: error.interface.clone().unwrap_or_default(),
    };
    let any = Any { type_url: TYPE_URL.to_owned(), value: detail.encode_to_vec() };
    let rich = RichStatus { code: code.into(), message: message.clone(), details: vec![any] };
    Status::with_details(code, message, rich.encode_to_vec().into())
}

/// The `ErrorDetail` that a status carries, if it carries one.
#[must_use]
pub fn error_detail(status: &Status) -> Option<wire::ErrorDetail> {
    let name = |any: &Any| any.type_url.rsplit_once('/').map(|(_, name)| name.to_owned());
    if let Ok(rich) = RichStatus::decode(status.details())
        && rich.details.iter().any(|any| name(any).is_some())
    {
        let ours =
            rich.details.iter().find(|any| name(any).as_deref() == Some("kni.v1alpha1.ErrorDetail"))?;
        return wire::ErrorDetail::decode(ours.value.as_slice()).ok();
    }
    // A Status without details may look like an ErrorDetail with nothing but a reason: that one needs its
    // words.
    wire::ErrorDetail::decode(status.details()).ok().filter(|detail| !detail.message.is_empty())
}

/// A status as an error; one without details is read by its code.
#[must_use]
pub fn error_from_status(status: &Status) -> Error {
    let some = |text: String| (!text.is_empty()).then_some(text);
    match error_detail(status) {
        Some(detail) => Error {
            reason: from_wire(detail.reason()).unwrap_or_else(|| from_code(status.code())),
            message: if detail.message.is_empty() { status.message().to_owned() } else { detail.message },
            network: detail.network.parse().ok(),
            interface: some(detail.interface),
            source: None,
        },
        None => Error::new(from_code(status.code()), status.message()),
    }
}

fn to_wire(reason: Reason) -> (wire::Reason, Code) {
    match reason {
        Reason::Invalid => (wire::Reason::Invalid, Code::InvalidArgument),
        Reason::NetworkNotFound => (wire::Reason::NetworkNotFound, Code::NotFound),
        Reason::AttachmentNotFound => (wire::Reason::AttachmentNotFound, Code::NotFound),
        Reason::NamespaceGone => (wire::Reason::NamespaceGone, Code::FailedPrecondition),
        Reason::Conflict => (wire::Reason::Conflict, Code::AlreadyExists),
        Reason::AddressInUse => (wire::Reason::AddressInUse, Code::AlreadyExists),
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
        wire::Reason::AddressInUse => Reason::AddressInUse,
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
            Reason::AddressInUse,
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

    /// What Python's protobuf makes of a CONFLICT in a `google.rpc.Status`.
    const PYTHON: &[u8] = b"\x08\x06\x12\x06in use\x1a>\n,type.googleapis.com/kni.v1alpha1.ErrorDetail\
        \x12\x0e\x08\x05\x1a\nis another";

    #[test]
    fn the_standard_encoding_of_other_languages_was_not_understood() {
        let foreign = Status::with_details(Code::AlreadyExists, "in use", PYTHON.to_vec().into());
        let got = error_from_status(&foreign);
        assert_eq!((got.reason, got.message.as_str()), (Reason::Conflict, "is another"));
        // And ours is what those languages decode.
        let ours = status_from_error(&Error::new(Reason::Conflict, "is another"));
        let rich = RichStatus::decode(ours.details()).expect("a google.rpc.Status");
        assert_eq!((rich.code, rich.message.as_str(), rich.details.len()), (6, "is another", 1));
        assert_eq!(rich.details[0].type_url, TYPE_URL);
    }

    #[test]
    fn bare_details_are_understood() {
        let detail = wire::ErrorDetail {
            reason: wire::Reason::InUse.into(),
            message: "pods".into(),
            ..wire::ErrorDetail::default()
        };
        let bare = Status::with_details(Code::FailedPrecondition, "pods", detail.encode_to_vec().into());
        assert_eq!(error_from_status(&bare).reason, Reason::InUse);
    }

    #[test]
    fn a_standard_status_with_other_details_is_read_by_its_code() {
        let other = Any { type_url: "type.googleapis.com/google.rpc.DebugInfo".into(), value: Vec::new() };
        for details in [Vec::new(), vec![other]] {
            // Code 5 is NOT_FOUND; as a bare ErrorDetail it would be reason 5, CONFLICT.
            let rich = RichStatus { code: 5, message: String::new(), details };
            let status = Status::with_details(Code::NotFound, "gone", rich.encode_to_vec().into());
            assert_eq!(error_from_status(&status).reason, Reason::NetworkNotFound);
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
