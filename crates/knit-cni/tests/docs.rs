//! The examples of docs/cni.md are what they say they are.

use std::path::Path;

use knit_cni::call::{Call, Environment};
use knit_cni::{CniError, Version};
use serde_json::Value;

#[test]
fn the_examples_work() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cni.md");
    let text = std::fs::read_to_string(file).expect("docs/cni.md");
    let (mut lists, mut errors) = (0, 0);
    for example in text.split("```json\n").skip(1) {
        let example = example.split("```").next().expect("its end");
        let json: Value = serde_json::from_str(example).unwrap_or_else(|e| panic!("{e} in {example}"));
        let Some(plugins) = json["plugins"].as_array() else {
            let error: CniError = serde_json::from_value(json.clone()).expect("an error");
            assert_eq!(error.to_json(Version::LATEST), json);
            errors += 1;
            continue;
        };
        for plugin in plugins {
            assert_eq!(plugin["type"], "knit-cni");
            // What libcni makes of a list for one plugin.
            let mut config = plugin.clone();
            config["cniVersion"] = json["cniVersion"].clone();
            config["name"] = json["name"].clone();
            let environment = Environment {
                command: "ADD".into(),
                container_id: "c1".into(),
                netns: "/run/netns/c1".into(),
                ifname: "eth0".into(),
                ..Environment::default()
            };
            let call = Call::parse(&environment, config.to_string().as_bytes());
            let Ok(Call::Agent(call)) = call else { panic!("{call:?} for {example}") };
            let socket = plugin["socket"].as_str().unwrap_or("/run/knit/cni.sock");
            assert_eq!(call.settings.socket, Path::new(socket));
            assert_eq!(call.settings.spool, Path::new(socket).with_file_name("spool"));
            assert_eq!(call.settings.ready_file, Path::new(socket).with_file_name("ready"));
            lists += 1;
        }
    }
    assert_eq!((lists, errors), (2, 1));
}
