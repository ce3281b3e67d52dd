//! One file of objects, as text, to objects and problems. Pure: no file is opened here.

use std::path::Path;

use serde_json::Value;

use super::kinds::{Kind, Kinds, Scope};
use crate::key::Key;
use crate::problem::Problem;

/// A file may be this large.
const MAX_FILE: usize = 64 << 20;

/// What a file holds.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    pub(crate) objects: Vec<ParsedObject>,
    pub(crate) problems: Vec<Problem>,
    /// Every document was understood: what an earlier version of the file held besides is gone.
    pub(crate) complete: bool,
}

/// One object of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParsedObject {
    pub(crate) group: String,
    pub(crate) kind: String,
    pub(crate) key: Key,
    pub(crate) line: Option<u64>,
    pub(crate) value: Value,
}

/// A part of a file that holds one value, and the line it starts on.
struct Document<'a> {
    text: &'a str,
    line: u64,
}

/// Checks one file as a folder would read it, without a folder: the objects it holds (`Network blue`), and
/// what is wrong. The name tells JSON from YAML.
#[must_use]
pub fn check_file(name: &Path, content: &[u8], kinds: &Kinds) -> (Vec<String>, Vec<Problem>) {
    let parsed = parse_file(name, content, kinds);
    (parsed.objects.iter().map(|o| format!("{} {}", o.kind, o.key)).collect(), parsed.problems)
}

/// Reads one file.
pub(crate) fn parse_file(path: &Path, bytes: &[u8], kinds: &Kinds) -> Parsed {
    let mut parsed = Parsed { complete: true, ..Parsed::default() };
    if bytes.len() > MAX_FILE {
        parsed.fail(Problem::error(format!("the file is larger than {} MiB: split it", MAX_FILE >> 20)));
    } else {
        match std::str::from_utf8(bytes) {
            Ok(text) if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) => {
                parse_json(text, kinds, &mut parsed);
            }
            Ok(text) => parse_yaml(text, kinds, &mut parsed),
            Err(error) => {
                let before = &bytes[..error.valid_up_to()];
                let line = 1 + before.iter().filter(|b| **b == b'\n').count() as u64;
                parsed.fail(Problem::error("the file is not UTF-8 text").at_line(Some(line)));
            }
        }
    }
    for problem in &mut parsed.problems {
        problem.file = Some(path.to_owned());
    }
    parsed
}

fn parse_json(text: &str, kinds: &Kinds, parsed: &mut Parsed) {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    loop {
        let start = stream.byte_offset();
        match stream.next() {
            None => return,
            Some(Ok(value)) => {
                let blank = text[start..].len() - text[start..].trim_start().len();
                let line = 1 + text[..start + blank].matches('\n').count() as u64;
                add(value, &Document { text: "", line }, kinds, parsed);
            }
            Some(Err(error)) => {
                parsed.fail(Problem::error(format!("not JSON: {error}")).at_line(Some(error.line() as u64)));
                return;
            }
        }
    }
}

fn parse_yaml(text: &str, kinds: &Kinds, parsed: &mut Parsed) {
    for document in documents(text) {
        match serde_saphyr::from_str_with_options::<Value>(document.text, yaml_options()) {
            Ok(Value::Null) => {}
            Ok(value) => add(value, &document, kinds, parsed),
            Err(error) => {
                let line =
                    error.location().map_or(document.line, |l| document.line + l.line().saturating_sub(1));
                parsed.fail(Problem::error(format!("not YAML: {}", one_line(&error))).at_line(Some(line)));
            }
        }
    }
}

/// How YAML is read. The limits: a list of all Services of a large cluster fits, a bomb of aliases does not.
/// Only `true` and `false` are booleans, so that a namespace may be called `no`.
pub(super) fn yaml_options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 20_000_000, max_nodes: 10_000_000, max_aliases: 1_000, max_anchors: 1_000
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 50_000 },
        with_snippet: false,
        strict_booleans: true,
    }
}

fn one_line(error: &serde_saphyr::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Cuts a file at its document markers. A line that starts with `---` is one wherever it stands: YAML allows
/// it in no scalar. So a document that cannot be read does not take its neighbours away.
fn documents(text: &str) -> Vec<Document<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let is_marker = |line: &str| {
        let rest = line.strip_prefix("---").or_else(|| line.strip_prefix("..."));
        rest.is_some_and(|r| r.is_empty() || r.starts_with([' ', '\t', '\r', '\n']))
    };
    let (mut found, mut start, mut start_line, mut at) = (Vec::new(), 0, 1, 0);
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        if is_marker(line) && at > start {
            found.push(Document { text: &text[start..at], line: start_line });
        }
        if is_marker(line) {
            // What follows on the marker's own line belongs to the document; the marker itself is left out.
            let rest = line[3..].trim();
            (start, start_line) = if rest.is_empty() || rest.starts_with('#') {
                (at + line.len(), number + 1)
            } else {
                (at, number)
            };
        }
        at += line.len();
    }
    found.push(Document { text: &text[start.min(text.len())..], line: start_line });
    found
}

/// One value: an object, or a list of them.
fn add(value: Value, document: &Document<'_>, kinds: &Kinds, parsed: &mut Parsed) {
    let line = Some(document.line);
    let Value::Object(mut map) = value else {
        parsed.fail(
            Problem::error("this is not a Kubernetes object; write apiVersion, kind and metadata")
                .at_line(line),
        );
        return;
    };
    let text = |field: &str| map.get(field).and_then(Value::as_str).map(str::to_owned);
    let (Some(api_version), Some(kind)) = (text("apiVersion"), text("kind")) else {
        parsed.fail(Problem::error("an object needs apiVersion and kind").at_line(line));
        return;
    };
    let Some(item_kind) = kind.strip_suffix("List") else {
        add_object(Value::Object(map), &api_version, &kind, document, kinds, parsed);
        return;
    };
    let Some(Value::Array(items)) = map.remove("items") else {
        parsed.fail(Problem::error(format!("a {kind} needs items: a list of objects")).at_line(line));
        return;
    };
    // The items stand inside a larger document, whose text would give wrong lines for them.
    let inside = Document { text: "", line: document.line };
    for mut item in items {
        // Items of a typed list (PodList) need not repeat what they are.
        if let Value::Object(map) = &mut item
            && !item_kind.is_empty()
        {
            map.entry("apiVersion").or_insert_with(|| api_version.clone().into());
            map.entry("kind").or_insert_with(|| item_kind.into());
        }
        let of = |field: &str| item.get(field).and_then(Value::as_str).map(str::to_owned);
        match (of("apiVersion"), of("kind")) {
            (Some(api_version), Some(kind)) => add_object(item, &api_version, &kind, &inside, kinds, parsed),
            _ => parsed.fail(Problem::error("an item of a List needs apiVersion and kind").at_line(line)),
        }
    }
}

fn add_object(
    mut value: Value,
    api_version: &str,
    kind_name: &str,
    document: &Document<'_>,
    kinds: &Kinds,
    parsed: &mut Parsed,
) {
    let line = Some(document.line);
    let named = value.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("(no name)");
    let object = format!("{kind_name} {named}");
    let Some(kind) = kinds.get(api_version, kind_name) else {
        parsed.fail(unknown_kind(api_version, kind_name, kinds).about(object).at_line(line));
        return;
    };
    let Some(key) = complete_metadata(&mut value, kind, parsed, &object, line) else { return };
    let object = format!("{kind_name} {key}");
    let mut unknown = Vec::new();
    let result = (kind.check)(&value, &mut unknown);
    if let Err(error) = result {
        let offset = |l: u64| document.line + l.saturating_sub(1);
        let line = (kind.locate)(document.text).filter(|_| !document.text.is_empty()).map(offset).or(line);
        parsed.fail(Problem::error(error.message).about(object).in_field(error.path).at_line(line));
        return;
    }
    for field in unknown {
        parsed.problems.push(
            Problem::warning("unknown field, ignored: misspelled, or newer than this version")
                .about(object.clone())
                .in_field(field)
                .at_line(line),
        );
    }
    parsed.objects.push(ParsedObject {
        group: kind.group.clone(),
        kind: kind.kind.clone(),
        key,
        line,
        value,
    });
}

/// Checks the name, puts a namespaced object into a namespace as kubectl does, and drops what nobody reads.
fn complete_metadata(
    value: &mut Value,
    kind: &Kind,
    parsed: &mut Parsed,
    object: &str,
    line: Option<u64>,
) -> Option<Key> {
    let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) else {
        parsed.fail(Problem::error("an object needs metadata with a name").about(object).at_line(line));
        return None;
    };
    meta.remove("managedFields");
    match kind.scope {
        Scope::Namespaced => {
            let empty = meta.get("namespace").is_none_or(|n| n.is_null() || n.as_str() == Some(""));
            if empty {
                meta.insert("namespace".into(), "default".into());
            }
        }
        Scope::Cluster => {
            if meta.remove("namespace").is_some() {
                let message = format!("a {} is not namespaced: the namespace is ignored", kind.kind);
                let problem =
                    Problem::warning(message).about(object).in_field("metadata.namespace").at_line(line);
                parsed.problems.push(problem);
            }
        }
    }
    let key = Key::of_value(value);
    let fits = |key: &Key| is_name(key.name()) && key.namespace().is_none_or(is_name);
    match key {
        Some(key) if fits(&key) => Some(key),
        _ => {
            let message = "name and namespace must be lower case letters, digits, '-' and '.', at most 253";
            parsed.fail(Problem::error(message).about(object).in_field("metadata.name").at_line(line));
            None
        }
    }
}

/// Whether this can be the name of a Kubernetes object. It never is a path, so it can be part of a file's
/// name.
pub(crate) fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.:".contains(c);
    !name.is_empty() && name.len() <= 253 && name.chars().all(fits) && !name.starts_with('.')
}

fn unknown_kind(api_version: &str, kind: &str, kinds: &Kinds) -> Problem {
    let known: Vec<_> = kinds.api_versions_of(kind).collect();
    if known.is_empty() {
        Problem::error(format!("{api_version} {kind} is a kind that Knit does not read: remove it"))
    } else {
        Problem::error(format!(
            "there is no {kind} in {api_version}: write apiVersion: {}",
            known.join(" or ")
        ))
    }
}

// === impl Parsed ===

impl Parsed {
    fn fail(&mut self, problem: Problem) {
        self.complete = false;
        self.problems.push(problem);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(name: &str, text: &str) -> Parsed {
        parse_file(Path::new(name), text.as_bytes(), &Kinds::default())
    }

    fn names(parsed: &Parsed) -> Vec<String> {
        parsed.objects.iter().map(|o| format!("{} {}", o.kind, o.key)).collect()
    }

    fn problems(parsed: &Parsed) -> String {
        parsed.problems.iter().map(|p| format!("{p}\n")).collect()
    }

    const MIXED: &str = "\
# a comment before anything
---
apiVersion: v1
kind: Namespace
metadata: {name: blue, labels: {tenant: blue}}
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: web, namespace: blue}
  spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
- apiVersion: knit.dev/v1alpha1
  kind: Network
  metadata: {name: blue, managedFields: [{manager: x}]}
  spec: {topology: Layer3, subnets: [{cidr: 10.77.0.0/16}]}
  status: {id: 7}
--- # the last one
apiVersion: v1
kind: Pod
metadata: {name: a}
spec: {containers: [{name: c, image: i}]}
...
";

    #[test]
    fn kinds_lists_and_documents_mix() {
        let parsed = parse("all.yaml", MIXED);
        assert_eq!(problems(&parsed), "");
        assert!(parsed.complete);
        assert_eq!(names(&parsed), ["Namespace blue", "Service blue/web", "Network blue", "Pod default/a"]);
        assert_eq!(parsed.objects[0].line, Some(3));
        assert_eq!(parsed.objects[3].line, Some(20));
        let network = &parsed.objects[2].value;
        assert!(network["metadata"].get("managedFields").is_none());
        assert_eq!(network["status"]["id"], 7);
    }

    #[test]
    fn json_may_hold_several_values_and_typed_lists() {
        let parsed = parse(
            "a.JSON",
            r#"{"apiVersion":"v1","kind":"NamespaceList","items":[{"metadata":{"name":"x"}}]}
               {"apiVersion":"v1","kind":"Node","metadata":{"name":"n"},"spec":{}}"#,
        );
        assert_eq!(problems(&parsed), "");
        assert_eq!(names(&parsed), ["Namespace x", "Node n"]);
        assert_eq!(parsed.objects[1].line, Some(2));
    }

    #[test]
    fn one_broken_document_leaves_its_neighbours() {
        let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\nkind: [\n---\n\
                    apiVersion: v1\nkind: Namespace\nmetadata: {name: b}\n";
        let parsed = parse("x.yaml", text);
        assert_eq!(names(&parsed), ["Namespace a", "Namespace b"]);
        assert!(!parsed.complete);
        let problem = &parsed.problems[0];
        assert!(problem.message.starts_with("not YAML: "), "{problem}");
        assert!(problem.line.is_some_and(|l| (5..=6).contains(&l)), "{problem}");
    }

    #[test]
    fn problems_name_line_object_and_field() {
        let text = "\
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: blue}
spec:
  topology: Layer3
  mtu: many
---
apiVersion: knit.dev/v1
kind: Network
metadata: {name: red}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIp: 10.96.0.1
---
apiVersion: v1
kind: Node
metadata: {name: ../../etc/passwd}
---
just text
---
apiVersion: v1
kind: Node
metadata: {name: n, namespace: x}
";
        insta::assert_snapshot!(problems(&parse("net.yaml", text)));
    }

    #[test]
    fn what_is_no_text_is_said_so() {
        let parsed = parse_file(Path::new("x.yaml"), b"a: b\nc: \xff\xfe", &Kinds::default());
        assert_eq!(problems(&parsed), "x.yaml:2: the file is not UTF-8 text\n");
        let empty = parse("x.yaml", "\n# nothing\n---\n---\n");
        assert!(empty.complete && empty.objects.is_empty() && empty.problems.is_empty());
    }

    #[test]
    fn a_bomb_of_aliases_is_refused() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for i in 1..12 {
            let last = format!("*a{}, ", i - 1).repeat(10);
            text.push_str(&format!("a{i}: &a{i} [{}]\n", last.trim_end_matches(", ")));
        }
        let parsed = parse("x.yaml", &text);
        assert!(!parsed.complete && parsed.objects.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn garbage_is_a_problem_and_nothing_worse(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let yaml = parse_file(Path::new("x.yaml"), &bytes, &Kinds::default());
            let json = parse_file(Path::new("x.json"), &bytes, &Kinds::default());
            prop_assert!(yaml.complete || !yaml.problems.is_empty());
            prop_assert!(json.complete || !json.problems.is_empty());
        }

        #[test]
        fn a_good_file_with_a_hole_keeps_only_whole_objects(from in 0_usize..MIXED.len(),
            len in 1_usize..40) {
            let to = (from + len).min(MIXED.len());
            prop_assume!(MIXED.is_char_boundary(from) && MIXED.is_char_boundary(to));
            let parsed = parse("x.yaml", &format!("{}{}", &MIXED[..from], &MIXED[to..]));
            for object in &parsed.objects {
                prop_assert!(is_name(object.key.name()));
            }
        }
    }
}
