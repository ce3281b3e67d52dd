//! The shim as a container runtime sees it, with an agent that answers.

use crate::common::{Node, Ran, full_environment, run};
use knit_cni::protocol::{Command, PROTOCOL_VERSION, Response};
use knit_cni::{AttachmentKey, CniError, Version, code};
use serde_json::{Value, json};

#[test]
fn add_prints_what_the_agent_answers() {
    let node = Node::new();
    let result = json!({ "cniVersion": "1.1.0", "interfaces": [{ "name": "eth0" }], "ips": [], "dns": {} });
    let requests = node.answering(Response::Ok(result.clone()));
    let mut config = node.config();
    config["runtimeConfig"] = json!({
        "io.kubernetes.cri.pod-annotations": { "knit.dev/networks": "blue" },
        "portMappings": [{ "hostPort": 80, "containerPort": 8080, "protocol": "tcp" }],
    });
    config["timeoutSeconds"] = json!(20);
    let ran = node.run("ADD", &config);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.json(), result);
    let request = requests.recv().expect("the agent was asked");
    assert_eq!((request.version, request.command), (PROTOCOL_VERSION, Command::Add));
    assert_eq!(
        (request.container_id.as_str(), request.netns.as_str(), request.ifname.as_str()),
        ("c1", "/run/netns/c1", "eth0")
    );
    assert_eq!(request.args.pod_name.as_deref(), Some("web-0"));
    assert_eq!(request.path, "/opt/cni/bin");
    assert_eq!(request.config.name, "knit");
    let annotations = request.config.runtime_config.pod_annotations.expect("annotations");
    assert_eq!(annotations["knit.dev/networks"], "blue");
    assert_eq!(request.config.runtime_config.port_mappings[0].container_port, 8080);
    assert_eq!(request.config.socket, None, "where the agent is concerns the shim alone");
    let left = request.timeout_ms.expect("the agent knows how long we wait");
    assert!((1..=20_000).contains(&left), "{left}");
}

#[test]
fn other_commands_print_nothing() {
    for (name, command) in
        [("DEL", Command::Del), ("CHECK", Command::Check), ("GC", Command::Gc), ("STATUS", Command::Status)]
    {
        let node = Node::new();
        let requests = node.answering(Response::Ok(Value::Null));
        let mut config = node.config();
        config["prevResult"] = json!({ "cniVersion": "1.1.0", "ips": [] });
        config["cni.dev/valid-attachments"] = json!([{ "containerID": "c2", "ifname": "eth0" }]);
        config["runtimeConfig"] = json!({ "mac": "0a:00:00:00:00:01" });
        node.run(name, &config).silent_success();
        let request = requests.recv().expect("the agent was asked");
        assert_eq!(request.command, command);
        let kept = AttachmentKey { container_id: "c2".into(), ifname: "eth0".into() };
        assert_eq!(request.config.valid_attachments, (command == Command::Gc).then(|| vec![kept]));
        assert_eq!(request.config.prev_result.is_some(), command == Command::Check, "{name}");
        assert!(request.config.runtime_config.mac.is_none(), "{name}");
        assert!(node.notes().is_empty(), "{name}");
    }
}

#[test]
fn errors_of_the_agent_are_printed_as_they_are() {
    for command in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        let node = Node::new();
        let error =
            CniError::new(code::NOT_ALLOWED, "pod shop/web-0 may not use Network blue").with_details("d");
        let _requests = node.answering(Response::Err(error));
        let ran = node.run(command, &node.config());
        assert_eq!(ran.code, 1);
        let expected = json!({
            "cniVersion": "1.1.0", "code": 100, "msg": "pod shop/web-0 may not use Network blue",
                "details": "d"
        });
        assert_eq!(ran.json(), expected, "{command}");
    }
}

#[test]
fn del_needs_no_namespace() {
    let node = Node::new();
    let requests = node.answering(Response::Ok(Value::Null));
    let mut environment = full_environment("DEL");
    environment.retain(|(name, _)| *name != "CNI_NETNS" && *name != "CNI_ARGS" && *name != "CNI_PATH");
    run(&environment, node.config().to_string().as_bytes()).silent_success();
    assert_eq!(requests.recv().expect("the agent was asked").netns, "");
}

#[test]
fn a_configuration_too_long_for_add_does_not_keep_a_pod_from_going() {
    // 200 KiB of control characters in an annotation, as JSON.
    let mut config = Node::new().config();
    config["runtimeConfig"] =
        json!({ "io.kubernetes.cri.pod-annotations": { "a": "\u{1}".repeat(200 << 10) } });
    assert!(config.to_string().len() > knit_cni::call::MAX_INPUT);

    let node = Node::new();
    config["socket"] = json!(node.socket());
    assert_eq!(node.run("ADD", &config).error().0, 6);
    let requests = node.answering(Response::Ok(Value::Null));
    node.run("DEL", &config).silent_success();
    let request = requests.recv().expect("the agent was asked");
    assert_eq!((request.container_id.as_str(), request.ifname.as_str()), ("c1", "eth0"));
    // While the agent is away, too.
    let node = Node::new();
    config["socket"] = json!(node.socket());
    node.run("DEL", &config).silent_success();
    assert_eq!(node.notes().len(), 1);
}

#[test]
fn version_needs_no_agent() {
    let all = json!(["0.3.1", "0.4.0", "1.0.0", "1.1.0"]);
    for (input, said) in [
        (r#"{"cniVersion":"0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion":"1.1.0","name":"knit"}"#, "1.1.0"),
        (r#"{"cniVersion":"9.9.9"}"#, "1.1.0"),
        ("", "1.1.0"),
    ] {
        let ran = run(&[("CNI_COMMAND", "VERSION".into())], input.as_bytes());
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(ran.json(), json!({ "cniVersion": said, "supportedVersions": all }), "{input}");
    }
    assert_eq!(run(&[("CNI_COMMAND", "VERSION".into())], b"{").error().0, 6);
}

#[test]
fn each_version_has_its_commands() {
    for version in Version::ALL {
        for (command, since) in [
            ("ADD", Version::V0_3_1),
            ("DEL", Version::V0_3_1),
            ("CHECK", Version::V0_4_0),
            ("GC", Version::V1_1_0),
            ("STATUS", Version::V1_1_0),
        ] {
            let node = Node::new();
            let mut config = node.config();
            config["cniVersion"] = json!(version);
            let requests = (version >= since).then(|| node.answering(Response::Ok(json!({}))));
            let ran = node.run(command, &config);
            match requests {
                Some(requests) => {
                    assert_eq!(ran.code, 0, "{command} in {version}: {ran:?}");
                    assert_eq!(requests.recv().expect("asked").config.cni_version, version.as_str());
                }
                None => {
                    assert_eq!(ran.error().0, 1, "{command} in {version}");
                    assert_eq!(ran.json()["cniVersion"], version.as_str());
                    assert!(ran.error().1.contains(since.as_str()), "{ran:?}");
                }
            }
        }
    }
}

#[test]
fn wrong_calls_have_the_codes_of_cni() {
    let node = Node::new();
    let config = node.config();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config);
        config
    };
    // The configuration.
    for (wrong, code, word) in [
        (with(&|c| c["cniVersion"] = json!("0.2.0")), 1, "0.2.0"),
        (with(&|c| c["cniVersion"] = json!("")), 1, "cniVersion"),
        (with(&|c| c["name"] = json!("")), 7, "name"),
        (with(&|c| c["name"] = json!("a/b")), 7, "a/b"),
        (with(&|c| c["socket"] = json!("run/knit.sock")), 7, "socket"),
        (with(&|c| c["spoolDir"] = json!("spool")), 7, "spoolDir"),
        (with(&|c| c["socket"] = json!(format!("/{}", "x".repeat(120)))), 7, "socket"),
        (with(&|c| c["timeoutSeconds"] = json!(0)), 7, "timeoutSeconds"),
        (with(&|c| c["timeoutSeconds"] = json!(100_000)), 7, "timeoutSeconds"),
        (with(&|c| c["timeoutSeconds"] = json!(-1)), 6, "configuration"),
        (with(&|c| c["runtimeConfig"] = json!("text")), 6, "configuration"),
    ] {
        let (got, msg) = node.run("ADD", &wrong).error();
        assert_eq!(got, code, "{wrong}: {msg}");
        assert!(msg.contains(word), "{wrong}: {msg}");
    }
    // The environment.
    for (command, name, value) in [
        ("ADD", "CNI_CONTAINERID", ""),
        ("ADD", "CNI_CONTAINERID", "../../etc"),
        ("ADD", "CNI_CONTAINERID", ".hidden"),
        ("ADD", "CNI_CONTAINERID", &"c".repeat(191)),
        ("ADD", "CNI_NETNS", ""),
        ("ADD", "CNI_IFNAME", ""),
        ("ADD", "CNI_IFNAME", "sixteen-characte"),
        ("ADD", "CNI_IFNAME", "a/b"),
        ("ADD", "CNI_IFNAME", "lo"),
        ("ADD", "CNI_IFNAME", "all"),
        ("ADD", "CNI_IFNAME", "default"),
        ("ADD", "CNI_ARGS", "K8S_POD_NAME"),
        ("DEL", "CNI_CONTAINERID", ""),
        ("DEL", "CNI_IFNAME", ""),
        ("CHECK", "CNI_NETNS", ""),
        ("ADD", "CNI_COMMAND", ""),
        ("ADD", "CNI_COMMAND", "add"),
        ("ADD", "CNI_COMMAND", "UPDATE"),
    ] {
        let mut environment = full_environment(command);
        environment.retain(|(n, _)| *n != name);
        environment.push((name, value.to_owned()));
        let (got, msg) = run(&environment, config.to_string().as_bytes()).error();
        assert_eq!(got, 4, "{name}={value}: {msg}");
        assert!(msg.contains(name), "{name}={value}: {msg}");
    }
    assert!(node.notes().is_empty(), "a wrong DEL is no note");
}

#[test]
fn garbage_on_standard_input_is_a_decode_error() {
    let node = Node::new();
    let good = node.config().to_string();
    let mut inputs: Vec<Vec<u8>> =
        (0..good.len()).step_by(7).map(|cut| good.as_bytes()[..cut].to_vec()).collect();
    inputs.push(vec![b'['; 100_000]);
    inputs.push(format!("{{\"a\":{}", "[".repeat(5_000)).into_bytes());
    inputs.push(b"\xff\xfe\x00{}".to_vec());
    inputs.push(b"null".to_vec());
    inputs.push(format!("{good}{good}").into_bytes());
    inputs.push(format!("{}{}", &good[..good.len() - 1], r#","name":"twice"}"#).into_bytes());
    // Huge: sound JSON that is too long, and no JSON at all.
    inputs.push(format!("{}{}", " ".repeat(knit_cni::call::MAX_INPUT), good).into_bytes());
    inputs.push(vec![b'x'; 3 << 20]);
    for input in inputs {
        for command in ["ADD", "STATUS"] {
            let ran: Ran = run(&full_environment(command), &input);
            let start = String::from_utf8_lossy(&input[..input.len().min(60)]).into_owned();
            assert_eq!(ran.error().0, 6, "{command} with {start}");
            assert!(ran.stdout.len() < 1000, "{ran:?}");
        }
    }
    assert!(node.notes().is_empty());
}
