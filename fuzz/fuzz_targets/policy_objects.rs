//! Policies of every kind as anybody may write them, to verdicts and sets.
#![no_main]

use knit_policy::kubernetes as convert;
use knit_policy::model::{Attachment, Pod, Traffic};
use knit_policy::sets::Engine;
use knit_policy::verdict::{Flow, State};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut engine = Engine::new("here");
    for last in 1..4_u8 {
        let address = [10, 0, 0, last].into();
        engine.set_pod(Pod {
            node: "here".into(),
            attachments: [Attachment {
                network: "default".into(),
                primary: true,
                addresses: [address].into(),
            }]
            .into(),
            ..Pod::new("default", if last == 1 { "a" } else { "b" })
        });
    }
    // One object a line.
    for line in data.split(|byte| *byte == b'\n') {
        let policies = [
            serde_json::from_slice(line).ok().map(|o| convert::network_policy(&o)),
            serde_json::from_slice(line).ok().map(|o| convert::multi_network_policy(&o)),
            serde_json::from_slice(line).ok().map(|o| convert::cluster_network_policy(&o)),
            serde_json::from_slice(line).ok().map(|o| convert::admin_network_policy(&o)),
            serde_json::from_slice(line).ok().map(|o| convert::baseline_admin_network_policy(&o)),
        ];
        for converted in policies.into_iter().flatten() {
            // What is refused says why.
            assert!(converted.object.is_some() || !converted.problems.is_empty());
            if let Some(policy) = converted.object {
                engine.set_policy(policy);
            }
        }
    }
    let _ = engine.settle();
    let flow = Flow {
        network: "default".into(),
        source: [10, 0, 0, 1].into(),
        destination: [10, 0, 0, 3].into(),
        traffic: Traffic::Other,
        state: State::New,
    };
    let _ = engine.cluster().judge(&flow);
});
