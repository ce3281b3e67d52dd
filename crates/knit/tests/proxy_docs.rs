//! Runs the commands of docs/proxy.md as they stand there, in namespaces of their own, and compares what they
//! print.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use knit_kernel::testing::{eventually, in_namespaces, skip};

const PAGE: &str = include_str!("../../../docs/proxy.md");
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// What the page says, in order.
#[derive(Debug)]
enum Step {
    Run { command: String, prints: String },
    File { name: String, text: String },
}

fn steps() -> Vec<Step> {
    let mut steps = Vec::new();
    let mut lines = PAGE.lines();
    let mut file = None;
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("<!-- ").and_then(|l| l.strip_suffix(" -->")) {
            file = Some(name.to_owned());
        } else if line == "```yaml" {
            let text = lines.by_ref().take_while(|l| *l != "```").map(|l| format!("{l}\n")).collect();
            steps.push(Step::File { name: file.take().expect("a file's name before the block"), text });
        } else if line == "```console" {
            for line in lines.by_ref().take_while(|l| *l != "```") {
                match (line.strip_prefix("$ "), steps.last_mut()) {
                    (Some(command), _) => {
                        steps.push(Step::Run { command: command.to_owned(), prints: String::new() });
                    }
                    (None, Some(Step::Run { prints, .. })) => prints.push_str(&format!("{line}\n")),
                    (None, _) => panic!("output before the first command: {line}"),
                }
            }
        }
    }
    steps
}

/// Programs that go on while the page is read; they end with the test.
struct Background(Vec<Child>);

impl Drop for Background {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // They may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn shell(folder: &Path, command: &str) -> Command {
    let knit = PathBuf::from(env!("CARGO_BIN_EXE_knit"));
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", knit.parent().expect("a folder").display());
    let mut shell = Command::new("bash");
    shell
        .args(["-c", command])
        .current_dir(folder)
        .env("PATH", path)
        .env("NO_COLOR", "1")
        .env_remove("KNIT_LOG");
    shell
}

fn missing(tool: &str) -> bool {
    !Command::new("bash")
        .args(["-c", &format!("{tool} > /dev/null 2>&1")])
        .status()
        .is_ok_and(|status| status.success())
}

fn run(folder: &Path, command: &str) -> String {
    let output = shell(folder, command).stderr(Stdio::piped()).output().expect("bash runs");
    let both = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&both).lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn rules_11_33_the_commands_of_the_page_work() {
    in_namespaces(|| {
        for tool in ["python3 --version", "curl --version", "ip -V"] {
            if missing(tool) {
                return skip(format_args!("the page needs {tool:?}, which this machine has not"));
            }
        }
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let mut background = Background(Vec::new());
        let mut ran = 0;
        for step in steps() {
            match step {
                Step::File { name, text } => std::fs::write(folder.join(name), text).expect("a file"),
                // This is such a namespace already.
                Step::Run { command, .. } if command.starts_with("unshare ") => {}
                Step::Run { command, .. } if command == "kill %%" => {
                    let mut child = background.0.pop().expect("something is in the background");
                    let pid = rustix::process::Pid::from_child(&child);
                    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
                    assert!(child.wait().expect("it ends").success());
                }
                Step::Run { command, .. } if command.ends_with('&') => {
                    let command = command.trim_end_matches('&').trim_end().to_owned();
                    let log = folder.join(format!("log-{ran}"));
                    let file = std::fs::File::create(&log).expect("a file");
                    let child =
                        shell(folder, &format!("exec {command}")).stderr(file).spawn().expect("bash runs");
                    background.0.push(child);
                    if command.starts_with("knit ") {
                        let read = || std::fs::read_to_string(&log).unwrap_or_default();
                        let end = Instant::now() + TEST_TIMEOUT;
                        eventually("the proxy is in force", TEST_TIMEOUT, || {
                            assert!(Instant::now() < end - Duration::from_secs(1), "{}", read());
                            read().contains("in force")
                        });
                    }
                }
                // What was changed takes effect in its own time.
                Step::Run { command, prints } => {
                    let mut last = String::new();
                    let end = Instant::now() + TEST_TIMEOUT;
                    eventually(&command, TEST_TIMEOUT, || {
                        last = run(folder, &command);
                        assert!(
                            last == prints || Instant::now() < end - Duration::from_secs(2),
                            "{command}: {last}"
                        );
                        last == prints
                    });
                    ran += 1;
                }
            }
        }
        assert!(ran > 15, "the page has lost its commands");
        assert_eq!(background.0.len(), 4, "two servers, one proxy that reads and one that does");
    });
}
