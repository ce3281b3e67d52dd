//! The agent in a process of its own: when it ends, the report says so.

use knit_scale::cluster::Api;
use knit_scale::run::{Error, Options, run};
use knit_scale::scenario::Scenario;

/// A run whose agent is this shell script.
async fn with_agent(script: &str) -> Result<Vec<String>, Error> {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("agent");
    // Another process writes it: what this one has open for writing cannot be run.
    let mut shell = std::process::Command::new("/bin/sh");
    shell.args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#, "sh", script]);
    assert!(shell.arg(&program).status().expect("a shell").success());
    let scenario = Scenario {
        nodes: vec![3],
        whole: 1,
        networks: 0,
        services: 0,
        policies: 0,
        pods_per_second: 0,
        quiet_seconds: 1,
        ..Scenario::default()
    };
    let options = Options { api: Api::Embedded, controller: None, agent: Some(program) };
    let report = run(&scenario, &options, &|text| println!("{text}")).await?;
    let [size] = report.sizes.as_slice() else { panic!("one size") };
    assert!(size.phases[0].agent.is_none(), "there is nobody to measure");
    Ok(size.errors.clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_whose_process_ended_was_missing_in_the_report_without_a_word() {
    let errors = with_agent(r#"echo '"ready"'; exit 3"#).await.expect("a report");
    let [error] = errors.as_slice() else { panic!("one error: {errors:?}") };
    assert!(error.contains("agent in its own process ended (exit status: 3)"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_whose_process_does_not_start_ends_the_run() {
    let error = with_agent("exit 2").await.expect_err("there is no report");
    assert!(error.to_string().contains("before its agent was up: exit status: 2"), "{error}");
}
