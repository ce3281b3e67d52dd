//! Services and EndpointSlices as anybody may write them, to a node view.
#![no_main]

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_proxy::kubernetes::Kubernetes;
use knit_proxy::model::NodeInfo;
use knit_proxy::source::Event;
use knit_proxy::view::{View, ViewConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
    let mut convert = Kubernetes::new();
    // One object a line.
    for line in data.split(|byte| *byte == b'\n') {
        if let Ok(service) = serde_json::from_slice::<Service>(line)
            && let Event::SetService(service) = convert.service(&service).event
        {
            view.set_service(*service);
        }
        if let Ok(slice) = serde_json::from_slice::<EndpointSlice>(line)
            && let Event::SetGroup(group) = convert.slice(&slice).event
        {
            view.set_group(*group);
        }
    }
    let _ = view.take_changes();
});
