//! The part of JSONPath that printer columns use: fields, indexes, `[*]` and `[?(@.type=="Ready")]`.

use serde_json::Value;

#[derive(Debug, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    All,
    Equal(String, String),
}

/// The values at a path; none if the path is not understood.
pub fn find<'a>(value: &'a Value, path: &str) -> Vec<&'a Value> {
    let Some(steps) = parse(path) else { return Vec::new() };
    let mut found = vec![value];
    for step in &steps {
        found = found.into_iter().flat_map(|value| follow(value, step)).collect();
    }
    found
}

fn follow<'a>(value: &'a Value, step: &Step) -> Vec<&'a Value> {
    match (step, value) {
        (Step::Field(name), _) => value.get(name).into_iter().collect(),
        (Step::Index(index), Value::Array(list)) => {
            let at = if *index < 0 { list.len() as i64 + index } else { *index };
            usize::try_from(at).ok().and_then(|at| list.get(at)).into_iter().collect()
        }
        (Step::All, Value::Array(list)) => list.iter().collect(),
        (Step::All, Value::Object(map)) => map.values().collect(),
        (Step::Equal(path, wanted), Value::Array(list)) => list
            .iter()
            .filter(|item| {
                find(item, path).first().is_some_and(|found| match found {
                    Value::String(text) => text == wanted,
                    other => other.to_string() == *wanted,
                })
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn parse(path: &str) -> Option<Vec<Step>> {
    let path = path.trim().trim_start_matches('{').trim_end_matches('}').trim_start_matches('$');
    let mut steps = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let end = closing(inner)?;
            steps.push(bracket(inner[..end].trim())?);
            rest = &inner[end + 1..];
        } else {
            let inner = rest.strip_prefix('.').unwrap_or(rest);
            let (mut name, mut used, mut escaped) = (String::new(), 0, false);
            for c in inner.chars() {
                if escaped {
                    name.push(c);
                    escaped = false;
                } else if c == '\\' {
                    escaped = true;
                } else if c == '.' || c == '[' {
                    break;
                } else {
                    name.push(c);
                }
                used += c.len_utf8();
            }
            rest = &inner[used..];
            match name.as_str() {
                "" if rest.is_empty() => {}
                "*" => steps.push(Step::All),
                "" => {}
                _ => steps.push(Step::Field(name)),
            }
        }
    }
    Some(steps)
}

/// Where the bracket closes, quotes respected.
fn closing(text: &str) -> Option<usize> {
    let mut quote = None;
    let mut depth = 0;
    for (index, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') if depth == 0 => return Some(index),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn bracket(text: &str) -> Option<Step> {
    if text == "*" {
        return Some(Step::All);
    }
    if let Some(condition) = text.strip_prefix("?(").and_then(|text| text.strip_suffix(')')) {
        let (path, wanted) = condition.split_once("==")?;
        let wanted = wanted.trim().trim_matches(['"', '\'']);
        return Some(Step::Equal(path.trim().trim_start_matches('@').to_owned(), wanted.to_owned()));
    }
    if let Ok(index) = text.parse() {
        return Some(Step::Index(index));
    }
    Some(Step::Field(text.trim_matches(['"', '\'']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_of_printer_columns() {
        let value = json!({"metadata": {"annotations": {"a.b/c": "x"}}, "spec": {"subnets": ["1", "2"]},
            "status": {"conditions": [{"type": "A", "status": "True"}, {"type": "Ready",
                "status": "False"}]}});
        for (path, expected) in [
            (".spec.subnets[0]", vec![json!("1")]),
            (".spec.subnets[-1]", vec![json!("2")]),
            (".spec.subnets[*]", vec![json!("1"), json!("2")]),
            (".spec.subnets", vec![json!(["1", "2"])]),
            (".status.conditions[?(@.type==\"Ready\")].status", vec![json!("False")]),
            ("{.status.conditions[?(@.type=='A')].status}", vec![json!("True")]),
            (".metadata.annotations.a\\.b/c", vec![json!("x")]),
            (".metadata.annotations['a.b/c']", vec![json!("x")]),
            (".spec.missing.deep", vec![]),
        ] {
            let found: Vec<Value> = find(&value, path).into_iter().cloned().collect();
            assert_eq!(found, expected, "{path}");
        }
    }
}
