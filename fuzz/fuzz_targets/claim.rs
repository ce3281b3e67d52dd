//! A ResourceClaim as anybody may write it, to what it asks for; and its parameters alone.
#![no_main]

use k8s_openapi::api::resource::v1::ResourceClaim;
use knit_api::AttachmentConfig;
use knit_model::allocation::Allocation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(parameters) = serde_json::from_slice::<serde_json::Value>(data)
        && let Err(error) = AttachmentConfig::read(&parameters)
    {
        // It goes into events and logs.
        let text = error.to_string();
        assert!(text.len() < 1500 && !text.chars().any(char::is_control), "{text:?}");
    }
    if let Ok(claim) = serde_json::from_slice::<ResourceClaim>(data) {
        let _ = Allocation::of(&claim);
    }
});
