//! What a container runtime sends on the NRI socket: any bytes are requests and responses or an error, and
//! the same ones however the socket cuts them.
#![no_main]

use knit_nri::mux::{self, Demux, TooLong};
use knit_nri::ttrpc::{Assembler, Body, Garbled, Message};
use knit_nri::wire;
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

#[derive(Debug)]
struct Wrong;

impl From<TooLong> for Wrong {
    fn from(_: TooLong) -> Self {
        Self
    }
}

impl From<Garbled> for Wrong {
    fn from(_: Garbled) -> Self {
        Self
    }
}

fn read(bytes: &[u8], cut: usize) -> Result<Vec<Message>, Wrong> {
    let (mut demux, mut calls, mut messages) = (Demux::default(), Assembler::default(), Vec::new());
    for part in bytes.chunks(cut.max(1)) {
        demux.feed::<Wrong>(part, |connection, bytes| {
            if connection == mux::PLUGIN {
                messages.extend(calls.feed(bytes)?);
            }
            Ok(())
        })?;
    }
    Ok(messages)
}

fuzz_target!(|case: (u8, &[u8])| {
    let (cut, bytes) = case;
    let whole = read(bytes, bytes.len());
    let cut = read(bytes, usize::from(cut));
    assert_eq!(whole.is_ok(), cut.is_ok());
    let Ok(messages) = whole else { return };
    assert_eq!(cut.expect("messages"), messages);
    for message in messages {
        assert!(message.encode().is_ok());
        let Body::Request(request) = message.body else { continue };
        let payload = request.payload.as_slice();
        if let Ok(request) = wire::PodSandboxRequest::decode(payload) {
            let _ = request.pod.as_ref().map(wire::PodSandbox::network_namespace);
        }
        let _ = wire::ConfigureRequest::decode(payload);
        let _ = wire::SynchronizeRequest::decode(payload);
        let _ = wire::CreateContainerRequest::decode(payload);
        let _ = wire::StateChangeEvent::decode(payload);
    }
});
