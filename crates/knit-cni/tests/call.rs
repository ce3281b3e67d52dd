//! Whatever a runtime sends is either a call that fits into a frame or an error with a code of CNI; never a
//! panic.

use knit_cni::call::{Call, Environment};
use knit_cni::code;
use knit_cni::protocol::{Request, encode, receive};
use proptest::prelude::*;

fn check(environment: &Environment, input: &[u8]) {
    match Call::parse(environment, input) {
        Ok(Call::Version { .. }) => assert_eq!(environment.command, "VERSION"),
        Ok(Call::Agent(call)) => {
            assert!(call.settings.socket.is_absolute());
            assert!((1..=600).contains(&call.settings.timeout.as_secs()));
            let frame = encode(&call.request).expect("a frame");
            assert_eq!(receive::<Request>(&mut &frame[..]).expect("it survives the way"), call.request);
        }
        Err(refusal) => {
            let known =
                [code::INCOMPATIBLE_VERSION, code::INVALID_ENVIRONMENT, code::DECODE, code::INVALID_CONFIG];
            assert!(known.contains(&refusal.error.code), "{refusal:?}");
            assert!(!refusal.error.msg.is_empty() && refusal.error.msg.len() < 2000, "{refusal:?}");
        }
    }
}

fn environments() -> impl Strategy<Value = Environment> {
    let command = prop::sample::select(vec!["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "", "X"]);
    (command, "[a-z0-9./-]{0,20}", "\\PC{0,20}", "[a-z0-9/:%\\PC]{0,17}", "\\PC{0,40}", "\\PC{0,10}")
        .prop_map(|(command, container_id, netns, ifname, args, path)| Environment {
            command: command.into(),
            container_id,
            netns,
            ifname,
            args,
            path,
        })
}

const CONFIG: &str = r#"{"cniVersion":"1.1.0","name":"knit","type":"knit-cni","socket":"/run/knit/cni.sock",
    "timeoutSeconds":30,
    "runtimeConfig":{"portMappings":[{"hostPort":80,"containerPort":8080,"hostIP":""}],"ips":null,
    "io.kubernetes.cri.pod-annotations":{"knit.dev/networks":"blue"}},
    "prevResult":{"ips":[{"address":"10.0.0.1/8"}]},
    "cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]}"#;

proptest! {
    #[test]
    fn any_bytes(environment in environments(), input in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&environment, &input);
    }

    #[test]
    fn a_sound_configuration_with_damage(
        environment in environments(),
        damage in prop::collection::vec((0..CONFIG.len(), any::<u8>()), 0..4),
        cut in 0..=CONFIG.len(),
    ) {
        let mut input = CONFIG.as_bytes().to_vec();
        for (at, byte) in damage {
            input[at] = byte;
        }
        check(&environment, &input);
        check(&environment, &input[..cut]);
    }

    #[test]
    fn valid_environments_and_configurations_are_calls(
        id in "[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}",
        ifname in "(eth|net)[0-9]{1,3}",
        version in prop::sample::select(vec!["0.3.1", "0.4.0", "1.0.0", "1.1.0"]),
    ) {
        let environment = Environment {
            command: "ADD".into(),
            container_id: id.clone(),
            netns: "/run/netns/x".into(),
            ifname,
            ..Environment::default()
        };
        let call = Call::parse(&environment, CONFIG.replace("1.1.0", version).as_bytes());
        let Ok(Call::Agent(call)) = call else { panic!("{call:?}") };
        prop_assert_eq!(call.version.as_str(), version);
        prop_assert_eq!(call.request.container_id, id);
    }
}

/// What a DEL is about is in the environment. These are not run as a program: without a configuration that is
/// the node's own agent.
#[test]
fn del_needs_nothing_of_standard_input() {
    let environment = Environment {
        command: "DEL".into(),
        container_id: "c1".into(),
        ifname: "eth0".into(),
        args: "not a list of pairs".into(),
        ..Environment::default()
    };
    let usual = knit_cni::paths::socket(knit_cni::paths::RUN_DIR.as_ref());
    let inputs: [&[u8]; 8] = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        br#"{"cniVersion":"9.9.9","name":"a name","socket":"relative","timeoutSeconds":0}"#,
        br#"{"cniVersion":7,"name":{},"socket":[],"timeoutSeconds":"x"}"#,
        br#"{"cniVersion":"1.1.0","name":"knit","runtimeConfig":{"portMappings":[{"hostPort":70000}]}}"#,
        br#"{"cniVersion":"1.1.0","name":"knit","runtimeConfig":"#,
    ];
    for input in inputs {
        let shown = String::from_utf8_lossy(input);
        let Ok(Call::Agent(call)) = Call::parse(&environment, input) else { panic!("{shown} is refused") };
        assert_eq!((call.request.container_id.as_str(), call.request.ifname.as_str()), ("c1", "eth0"));
        assert_eq!(call.settings.socket, usual, "{shown}");
        assert!(call.request.config.version().is_ok(), "the agent takes it: {shown}");
        check(&environment, input);
    }
    // What can be read counts, whatever else is wrong.
    let input = br#"{"cniVersion":"7","socket":"/run/other/cni.sock","timeoutSeconds":9,
        "prevResult":[[[]]],"ips":3}"#;
    let Ok(Call::Agent(call)) = Call::parse(&environment, input) else { panic!("it is refused") };
    assert_eq!(call.settings.socket.to_str(), Some("/run/other/cni.sock"));
    assert_eq!(call.settings.spool.to_str(), Some("/run/other/spool"));
    assert_eq!(call.settings.timeout.as_secs(), 9);
}
