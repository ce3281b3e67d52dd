//! One call of a container runtime: its environment and standard input, checked, before anything is done.
//!
//! Pure: nothing is read or opened here, so that whatever a runtime (or a fuzzer) sends can be tried without
//! one.

use std::path::PathBuf;
use std::time::Duration;

use knit_types::InterfaceName;
use serde::Deserialize;
use serde_json::Value;

use crate::args::Args;
use crate::config::NetworkConfig;
use crate::error::{CniError, code};
use crate::paths;
use crate::protocol::{Command, PROTOCOL_VERSION, Request};
use crate::version::Version;

/// The longest standard input that is read.
pub const MAX_INPUT: usize = 1 << 20;

/// The longest standard input of a DEL. The annotations of a pod come with it, and what was too long for its
/// ADD must not keep it from going.
pub const MAX_DEL_INPUT: usize = 16 << 20;

/// The longest CNI_CONTAINERID, since it becomes part of a file's name.
pub const MAX_CONTAINER_ID: usize = 190;

/// The values of `timeoutSeconds`.
const TIMEOUTS: std::ops::RangeInclusive<u64> = 1..=600;

/// The environment of a call. A variable that is not set, or empty, is empty here.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Environment {
    /// CNI_COMMAND.
    pub command: String,
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_NETNS.
    pub netns: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_ARGS.
    pub args: String,
    /// CNI_PATH.
    pub path: String,
}

/// What a call asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// VERSION: which versions are spoken. Nobody else is needed to answer it.
    Version {
        /// The version that the answer says it is in.
        version: Version,
    },
    /// Everything else goes to the agent.
    Agent(Box<AgentCall>),
}

/// A call for the agent.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentCall {
    /// The version that the answer has to follow.
    pub version: Version,
    /// What the agent gets, with no deadline yet.
    pub request: Request,
    /// Where the agent is, and how long to wait for it.
    pub settings: Settings,
}

/// What the configuration says to the shim itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settings {
    /// The agent's socket.
    pub socket: PathBuf,
    /// Where DELs are noted while the agent is away.
    pub spool: PathBuf,
    /// The file that is there once the agent was ready since boot.
    pub ready_file: PathBuf,
    /// How long the whole call may take.
    pub timeout: Duration,
}

/// A call that is refused, with the version that the error says it is in.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Refusal {
    /// The version.
    pub version: Version,
    /// The cause.
    pub error: CniError,
}

// === impl Call ===

impl Call {
    /// Reads a call.
    ///
    /// # Errors
    /// When it cannot be right: the error has the code that CNI wants for it.
    pub fn parse(environment: &Environment, input: &[u8]) -> Result<Self, Refusal> {
        Self::parse_inner(environment, input).map_err(|error| {
            // A configuration may be wrong elsewhere, and say its version all the same.
            let version = parse_input(input).ok().and_then(|config| config.version().ok());
            Refusal { version: version.unwrap_or(Version::LATEST), error }
        })
    }

    fn parse_inner(environment: &Environment, input: &[u8]) -> Result<Self, CniError> {
        let command = match environment.command.as_str() {
            "ADD" => Command::Add,
            "DEL" => Command::Del,
            "CHECK" => Command::Check,
            "GC" => Command::Gc,
            "STATUS" => Command::Status,
            "VERSION" => return version_call(input),
            "" => {
                let msg = "CNI_COMMAND is not set: this program is for container runtimes; users run knit";
                return Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
            }
            other => {
                let other: String = other.chars().take(64).collect();
                let msg = format!(
                    "CNI_COMMAND {other:?} is not supported: it must be ADD, DEL, CHECK, GC, STATUS or \
                    VERSION"
                );
                return Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
            }
        };
        check_environment(command, environment)?;
        if command == Command::Del {
            return Ok(del_call(environment, input));
        }
        let mut config = parse_input(input)?;
        let version =
            config.version().map_err(|e| CniError::new(code::INCOMPATIBLE_VERSION, e.to_string()))?;
        let since = match command {
            Command::Add | Command::Del => Version::V0_3_1,
            Command::Check => Version::V0_4_0,
            Command::Gc | Command::Status => Version::V1_1_0,
        };
        if version < since {
            let msg = format!(
                "{} is not in CNI {version}: set cniVersion to {since} or later",
                environment.command
            );
            return Err(CniError::new(code::INCOMPATIBLE_VERSION, msg));
        }
        check_name(&config.name)?;
        let settings = Settings::take(&mut config, command)?;
        // Only ADD needs what the runtime knows of the pod, and only CHECK and ADD look at an earlier answer.
        if command != Command::Add {
            config.runtime_config = Default::default();
        }
        if !matches!(command, Command::Add | Command::Check) {
            config.prev_result = None;
        }
        if command != Command::Gc {
            config.valid_attachments = None;
        }
        let request = Request {
            version: PROTOCOL_VERSION,
            command,
            container_id: environment.container_id.clone(),
            netns: environment.netns.clone(),
            ifname: environment.ifname.clone(),
            args: Args::parse(&environment.args)?,
            path: environment.path.clone(),
            config,
            timeout_ms: None,
        };
        Ok(Self::Agent(Box::new(AgentCall { version, request, settings })))
    }
}

// === impl Settings ===

impl Settings {
    /// Takes what is meant for the shim out of the configuration.
    fn take(config: &mut NetworkConfig, command: Command) -> Result<Self, CniError> {
        let absolute = |field: &str, value: Option<String>| match value.map(PathBuf::from) {
            Some(path) if !path.is_absolute() => {
                let msg = format!("{field} {path:?} in the network configuration is not an absolute path");
                Err(CniError::new(code::INVALID_CONFIG, msg))
            }
            path => Ok(path),
        };
        let socket = absolute("socket", config.socket.take())?;
        let spool = absolute("spoolDir", config.spool_dir.take())?;
        let ready_file = absolute("readyFile", config.ready_file.take())?;
        let socket = socket.unwrap_or_else(|| paths::socket(paths::RUN_DIR.as_ref()));
        // The rest is beside the socket unless it is said to be elsewhere.
        let run_dir = socket.parent().unwrap_or(paths::RUN_DIR.as_ref()).to_owned();
        let usual = match command {
            Command::Add | Command::Gc => 60,
            Command::Del | Command::Check => 30,
            Command::Status => 5,
        };
        let seconds = match config.timeout_seconds.take() {
            None => usual,
            // A container runtime asks for STATUS every few seconds and waits for it.
            Some(seconds) if TIMEOUTS.contains(&seconds) && command == Command::Status => seconds.min(usual),
            Some(seconds) if TIMEOUTS.contains(&seconds) => seconds,
            Some(other) => {
                let msg = format!(
                    "timeoutSeconds {other} in the network configuration is out of range: use 1 to 600"
                );
                return Err(CniError::new(code::INVALID_CONFIG, msg));
            }
        };
        Ok(Self {
            spool: spool.unwrap_or_else(|| paths::spool(&run_dir)),
            ready_file: ready_file.unwrap_or_else(|| paths::ready_marker(&run_dir)),
            socket,
            timeout: Duration::from_secs(seconds),
        })
    }
}

/// The parts of a configuration that DEL reads: where the agent is, and how long to wait for it. Each is what
/// it usually is where it is missing or wrong.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DelConfig {
    cni_version: Value,
    name: Value,
    socket: Value,
    spool_dir: Value,
    ready_file: Value,
    timeout_seconds: Value,
}

/// A DEL. All that it needs is in the environment: a container runtime tries it until it succeeds, so nothing
/// that is wrong with the rest may keep a pod from going.
fn del_call(environment: &Environment, input: &[u8]) -> Call {
    // A struct would also be read from a list of its fields.
    let object = input.trim_ascii_start().first() == Some(&b'{');
    let given: DelConfig =
        if object { serde_json::from_slice(input).unwrap_or_default() } else { DelConfig::default() };
    let version = given.cni_version.as_str().and_then(|text| text.parse().ok()).unwrap_or(Version::LATEST);
    let path = |value: &Value| value.as_str().filter(|p| p.starts_with('/')).map(str::to_owned);
    let name = given.name.as_str().filter(|name| named(name, 255)).unwrap_or_default();
    let mut config = NetworkConfig {
        cni_version: version.as_str().to_owned(),
        name: name.to_owned(),
        socket: path(&given.socket),
        spool_dir: path(&given.spool_dir),
        ready_file: path(&given.ready_file),
        timeout_seconds: given.timeout_seconds.as_u64().filter(|seconds| TIMEOUTS.contains(seconds)),
        ..NetworkConfig::default()
    };
    let settings = Settings::take(&mut config, Command::Del).expect("what would be refused is left out");
    let request = Request {
        version: PROTOCOL_VERSION,
        command: Command::Del,
        container_id: environment.container_id.clone(),
        netns: environment.netns.clone(),
        ifname: environment.ifname.clone(),
        args: Args::parse(&environment.args).unwrap_or_default(),
        path: environment.path.clone(),
        config,
        timeout_ms: None,
    };
    Call::Agent(Box::new(AgentCall { version, request, settings }))
}

fn version_call(input: &[u8]) -> Result<Call, CniError> {
    // Some clients send nothing at all.
    if input.trim_ascii().is_empty() {
        return Ok(Call::Version { version: Version::LATEST });
    }
    Ok(Call::Version { version: parse_input(input)?.version().unwrap_or(Version::LATEST) })
}

fn parse_input(input: &[u8]) -> Result<NetworkConfig, CniError> {
    if input.len() > MAX_INPUT {
        let msg = format!(
            "the network configuration on standard input is longer than the limit of {MAX_INPUT} bytes"
        );
        return Err(CniError::new(code::DECODE, msg));
    }
    NetworkConfig::parse(input)
}

fn check_environment(command: Command, environment: &Environment) -> Result<(), CniError> {
    let wrong = |msg: String| Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
    let (container, netns) = match command {
        Command::Add | Command::Check => (true, true),
        Command::Del => (true, false),
        Command::Gc | Command::Status => (false, false),
    };
    let needed = [
        ("CNI_CONTAINERID", &environment.container_id, container),
        ("CNI_NETNS", &environment.netns, netns),
        ("CNI_IFNAME", &environment.ifname, container),
    ];
    let missing: Vec<&str> =
        needed.iter().filter(|(_, value, needed)| *needed && value.is_empty()).map(|n| n.0).collect();
    if !missing.is_empty() {
        return wrong(format!("{} needs {}, which is not set", environment.command, missing.join(" and ")));
    }
    if !container {
        return Ok(());
    }
    if !named(&environment.container_id, MAX_CONTAINER_ID) {
        let id: String = environment.container_id.chars().take(64).collect();
        return wrong(format!(
            "CNI_CONTAINERID {id:?} is not valid: use at most {MAX_CONTAINER_ID} letters, digits, '.', '_' \
            and '-', starting with a letter or digit"
        ));
    }
    if let Err(error) = InterfaceName::new(&environment.ifname) {
        return wrong(format!("CNI_IFNAME is not valid: {error}"));
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), CniError> {
    if named(name, 255) {
        return Ok(());
    }
    let name: String = name.chars().take(64).collect();
    let msg = format!(
        "the network configuration's name {name:?} is not valid: use letters, digits, '.', '_' and '-', \
        starting with a letter or digit"
    );
    Err(CniError::new(code::INVALID_CONFIG, msg))
}

/// What CNI allows as a container's id and as a network's name.
fn named(text: &str, longest: usize) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    text.len() <= longest
        && text.bytes().all(fits)
        && text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
}
