//! Walks every error type of the workspace: a message never repeats its cause, and one function prints a
//! chain.
//!
//! The causes are shown behind the message by whoever shows an error ([`knit_types::Chain`]); one that stands
//! in the message as well is read twice in a pod's events. The sources are read, so that a new error type is
//! covered on the day it is written.

mod sources;

use std::fmt::Write as _;

use sources::sources;

/// An `#[error(...)]` with the variant or struct that it belongs to.
struct Shown<'a> {
    /// What stands between the parentheses.
    text: &'a str,
    name: &'a str,
    /// The field that is the cause: its name, or its number.
    cause: Option<String>,
}

#[test]
fn no_error_type_repeats_its_cause() {
    let (mut problems, mut seen) = (String::new(), 0);
    for (file, source) in sources() {
        for shown in shown(&source) {
            seen += 1;
            if shown.cause.as_ref().is_some_and(|cause| shows(shown.text, cause)) {
                writeln!(problems, "{}: {}: {}", file.display(), shown.name, shown.text.trim()).unwrap();
            }
        }
    }
    assert!(seen > 150, "only {seen} error types were found: does this test still read them?");
    assert!(
        problems.is_empty(),
        "leave the cause to #[source]; whoever shows the error shows it:\n{problems}"
    );
}

#[test]
fn no_message_repeats_the_cause_that_is_attached_to_it() {
    let (mut problems, mut seen) = (String::new(), 0);
    for (file, source) in sources() {
        for (at, _) in source.match_indices(".because(") {
            seen += 1;
            let name: String = source[at + ".because(".len()..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            // From where the cause got its name: a closure's argument, a match arm, a function's argument.
            let before = &source[..at];
            let begins =
                [format!("|{name}|"), format!("Err({name})"), format!("let {name}"), format!("{name}: ")];
            let begin = begins.iter().filter_map(|b| before.rfind(b.as_str())).max().unwrap_or(at);
            let message = &before[begin..];
            let repeats = [format!("{{{name}}}"), format!("chain(&{name})"), format!("{name}.to_string()")];
            if !name.is_empty() && repeats.iter().any(|r| message.contains(r.as_str())) {
                let line = before.matches('\n').count() + 1;
                writeln!(problems, "{}:{line}", file.display()).unwrap();
            }
        }
    }
    assert!(seen > 15, "only {seen} messages with a cause were found: does this test still read them?");
    assert!(problems.is_empty(), "the cause is in the message and behind it:\n{problems}");
}

#[test]
fn one_function_prints_a_chain() {
    // Where something else is done with the causes than printing them.
    let others = ["knit-types/src/chain.rs"];
    let mut found = Vec::new();
    for (file, source) in sources() {
        let shown = file.display().to_string();
        if others.iter().any(|other| shown.ends_with(other)) {
            continue;
        }
        let source = source.split("#[cfg(test)]").next().unwrap_or_default();
        if source.contains("while let Some(") && source.contains(".source();") {
            found.push(shown);
        }
    }
    assert!(found.is_empty(), "use knit_types::chain:\n{}", found.join("\n"));
}

#[test]
fn what_repeats_its_cause_is_found() {
    let source = r#"
        #[error("opening {path} failed: {source}")]
        Open { path: PathBuf, source: io::Error },
        #[error("{0}")]
        Wrapped(#[from] io::Error),
        #[error("starting failed")]
        Start(#[source] io::Error),
        #[error("in {place}: {}", .inner)]
        Named { place: String, #[source] inner: io::Error },
        #[error("{} is full", path.display())]
        Full { path: PathBuf, source: io::Error },
        #[error(transparent)]
        Other(#[from] io::Error),
    "#;
    let bad: Vec<&str> = shown(source)
        .iter()
        .filter(|s| s.cause.as_ref().is_some_and(|cause| shows(s.text, cause)))
        .map(|s| s.name)
        .collect();
    assert_eq!(bad, ["Open", "Wrapped", "Named"]);
}

fn shown(source: &str) -> Vec<Shown<'_>> {
    const MARK: &str = "#[error(";
    let mut found = Vec::new();
    for (at, _) in source.match_indices(MARK) {
        let open = at + MARK.len() - 1;
        let Some(close) = closing(source, open) else { continue };
        let text = &source[open + 1..close];
        let item = after_attributes(&source[close + 2..]);
        let item = ["pub(crate) ", "pub ", "struct ", "enum "]
            .iter()
            .fold(item, |item, word| item.strip_prefix(word).unwrap_or(item));
        let end = item.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(item.len());
        let (name, fields) = (&item[..end], item[end..].trim_start());
        let cause = closing(fields, 0).and_then(|last| match fields.as_bytes()[0] {
            b'{' => named_cause(&fields[1..last]),
            b'(' => numbered_cause(&fields[1..last]),
            _ => None,
        });
        found.push(Shown { text, name, cause });
    }
    found
}

/// The text behind further attributes and comments.
fn after_attributes(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        text = if text.starts_with("//") {
            text.split_once('\n').map_or("", |(_, rest)| rest)
        } else if text.starts_with("#[") {
            closing(text, 1).map_or("", |end| &text[end + 1..])
        } else {
            return text;
        };
    }
}

/// Where the bracket that opens at this byte closes again; none if none opens there.
fn closing(text: &str, open: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut wanted = Vec::new();
    let mut at = open;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while *bytes.get(at)? != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => at += text[at..].find('\n')?,
            b'(' => wanted.push(b')'),
            b'[' => wanted.push(b']'),
            b'{' => wanted.push(b'}'),
            byte if wanted.last() == Some(&byte) => {
                wanted.pop();
                if wanted.is_empty() {
                    return Some(at);
                }
            }
            _ if wanted.is_empty() => return None,
            _ => {}
        }
        at += 1;
    }
    None
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn named_cause(fields: &str) -> Option<String> {
    let fields = without_comments(fields);
    let marked = ["#[source]", "#[from]"].iter().find_map(|mark| fields.split_once(mark));
    let name = match marked {
        Some((_, rest)) => {
            let rest = after_attributes(rest);
            rest.strip_prefix("pub ").unwrap_or(rest).split(':').next()?.trim().to_owned()
        }
        None => {
            let is_source = |line: &str| line.trim_start().trim_start_matches("pub ").starts_with("source:");
            fields.split([',', '\n']).any(is_source).then(|| "source".to_owned())?
        }
    };
    Some(name)
}

fn numbered_cause(fields: &str) -> Option<String> {
    let (mut depth, mut number) = (0_i32, 0);
    let fields = without_comments(fields);
    for (at, c) in fields.char_indices() {
        match c {
            '<' | '(' | '[' => depth += 1,
            '>' | ')' | ']' => depth -= 1,
            ',' if depth == 0 => number += 1,
            _ => {}
        }
        if c == '#' && (fields[at..].starts_with("#[source]") || fields[at..].starts_with("#[from]")) {
            return Some(number.to_string());
        }
    }
    None
}

/// Whether a message shows a field as it is. What a function makes of it is another matter.
fn shows(text: &str, field: &str) -> bool {
    let inline = [format!("{{{field}}}"), format!("{{{field}:")];
    let argument = |part: &str| {
        let part = part.trim();
        part == field || part.strip_prefix('.') == Some(field)
    };
    inline.iter().any(|inline| text.contains(inline.as_str())) || text.split(',').skip(1).any(argument)
}
