//! What a feeder may send to a service proxy: bytes to messages to a node view.
#![no_main]

use knit_proxy::grpc::{decode, proto};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

fuzz_target!(|data: &[u8]| {
    if let Ok(port) = proto::Port::decode(data)
        && let Ok((key, view)) = decode::port(&port)
    {
        // What was believed makes sense.
        assert!(view.cluster.iter().chain(view.local.iter()).all(|t| t.port != 0));
        let mut all =
            knit_proxy::view::View::new(Default::default(), knit_proxy::model::NodeInfo::new("here"));
        all.set_port(key, view.into());
        assert_eq!(all.take_changes().ports.len(), 1);
    }
    if let Ok(node) = proto::NodeSettings::decode(data) {
        let _ = decode::node(&node);
    }
    if let Ok(check) = proto::HealthCheck::decode(data) {
        let _ = decode::health_check(&check);
    }
});
