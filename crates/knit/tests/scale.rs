//! `knit lab scale` as people meet it: a report in which nothing is missing, a picture, and errors that say
//! what to change.

use std::process::{Command, Output};

use serde_json::Value;

fn scale(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_knit"));
    command.args(["lab", "scale"]).args(args).output().expect("knit runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn what_the_agent_and_the_controller_take_was_missing_without_a_word() {
    let directory = tempfile::tempdir().expect("a directory");
    let picture = directory.path().join("scale.svg");
    let output = scale(&[
        "--nodes",
        "6",
        "--whole",
        "2",
        "--networks",
        "1",
        "--services",
        "1",
        "--policies",
        "1",
        "--pods",
        "6",
        "--pods-per-second",
        "5",
        "--pod-seconds",
        "1",
        "--quiet-seconds",
        "1",
        "--busy-seconds",
        "4",
        "-o",
        "json",
        "--svg",
        &picture.display().to_string(),
    ]);
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let size = &report["sizes"][0];
    assert_eq!((&size["nodes"], &size["whole"]), (&Value::from(6), &Value::from(2)));
    assert_eq!(size["errors"], Value::Array(Vec::new()));
    let phases = size["phases"].as_array().expect("phases");
    assert_eq!(phases.iter().map(|phase| &phase["name"]).collect::<Vec<_>>(), ["quiet", "busy"]);
    for phase in phases {
        for who in ["controller", "agent"] {
            assert!(phase[who]["memoryBytes"].as_u64().is_some_and(|bytes| bytes > 0), "{who}: {phase:#}");
        }
        assert!(phase["slowestPlanSeconds"].is_number() || phase["name"] == "quiet", "{phase:#}");
    }
    let busy = &phases[1];
    assert_eq!((&busy["pods"], &busy["failed"]), (&Value::from(20), &Value::from(0)), "{busy:#}");
    assert!(busy["added"]["count"].as_u64().is_some_and(|count| count > 0), "the agent had pods: {busy:#}");
    assert!(busy["counts"]["probe"]["pods"]["events"].as_u64().is_some_and(|n| n > 0), "{busy:#}");
    let picture = std::fs::read_to_string(&picture).expect("a picture");
    assert!(picture.starts_with("<svg") && picture.contains("One agent"), "{picture}");
}

#[test]
fn impossible_input_is_an_error_that_says_what_is_possible() {
    for (args, code, words) in [
        (&["--nodes", "1"][..], 2, "--nodes"),
        (&["--nodes", "10", "--pods", "5000"], 1, "can have 110"),
        (&["--nodes", "10", "--svg", "/nonexistent/scale.svg"], 1, "cannot write the picture"),
        (&["--nodes", "10", "--api-url", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
    ] {
        let output = scale(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(words), "{args:?}: {error}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn help_has_examples_and_the_agents_process_is_not_in_it() {
    let help = text(&scale(&["--help"]).stdout);
    assert!(help.contains("knit lab scale --nodes 1000") && help.contains("--outage-seconds"), "{help}");
    let lab = Command::new(env!("CARGO_BIN_EXE_knit")).args(["lab", "--help"]).output().expect("knit runs");
    let lab = text(&lab.stdout);
    assert!(lab.contains("scale") && !lab.contains("simulated-node"), "{lab}");
}
