//! All objects of a folder, out of all its files. Pure: files come in parsed, objects and problems go out.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::parse::{Parsed, ParsedObject};
use crate::key::Key;
use crate::problem::Problem;

/// Group and kind.
pub(crate) type GroupKind = (String, String);

/// Group, kind and key.
type Identity = (String, String, Key);

/// Every file, the objects that are in force, and what is wrong.
#[derive(Debug, Default)]
pub(crate) struct Table {
    files: BTreeMap<PathBuf, File>,
    objects: HashMap<GroupKind, BTreeMap<Key, Entry>>,
    problems: Vec<Problem>,
    generation: u64,
}

/// An object in force.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) value: Arc<Value>,
    /// Grows with each change of this object.
    pub(crate) version: u64,
}

#[derive(Debug, Default)]
struct File {
    objects: BTreeMap<Identity, (Option<u64>, Arc<Value>)>,
    problems: Vec<Problem>,
}

// === impl Table ===

impl Table {
    /// A file was read: its objects take the place of those of its last version. If part of it could not be
    /// understood, what it held before and does not hold now stays.
    pub(crate) fn set_file(&mut self, path: &Path, parsed: Parsed) {
        let file = self.files.entry(path.to_owned()).or_default();
        let mut problems = parsed.problems;
        let mut objects = BTreeMap::new();
        for ParsedObject { group, kind, key, line, value } in parsed.objects {
            let name = format!("{kind} {key}");
            let id = (group, kind, key);
            if let Some((first, _)) = objects.get(&id) {
                let at = Option::map_or(*first, String::new(), |l| format!(" (line {l})"));
                let problem = Problem::error(format!("is in this file twice: the first one{at} is used"));
                problems.push(Problem { file: Some(path.to_owned()), ..problem.about(name).at_line(line) });
            } else {
                objects.insert(id, (line, Arc::new(value)));
            }
        }
        if !parsed.complete {
            for (id, object) in std::mem::take(&mut file.objects) {
                objects.entry(id).or_insert(object);
            }
        }
        file.objects = objects;
        file.problems = problems;
    }

    /// A file could not be read at all: what it held stays.
    pub(crate) fn set_unreadable(&mut self, path: &Path, problem: Problem) {
        let file = self.files.entry(path.to_owned()).or_default();
        file.problems = vec![Problem { file: Some(path.to_owned()), ..problem }];
    }

    /// Only these files are there: what the others held is gone.
    pub(crate) fn retain_files(&mut self, keep: impl Fn(&Path) -> bool) {
        self.files.retain(|path, _| keep(path));
    }

    /// Works out again what is in force. Says whether anything changed.
    pub(crate) fn settle(&mut self) -> bool {
        let mut next: HashMap<GroupKind, BTreeMap<Key, Entry>> = HashMap::new();
        let mut owners: HashMap<(&str, &str, &Key), (&Path, Option<u64>)> = HashMap::new();
        let mut problems = Vec::new();
        let mut changed = false;
        let version = self.generation + 1;
        for (path, file) in &self.files {
            problems.extend(file.problems.iter().cloned());
            for ((group, kind, key), (line, value)) in &file.objects {
                if let Some((first, first_line)) = owners.get(&(group.as_str(), kind.as_str(), key)) {
                    let at = first_line.map_or(String::new(), |l| format!(":{l}"));
                    let message = format!(
                        "it is already in {}{at}, which is used: remove one of them",
                        first.display()
                    );
                    let problem = Problem::error(message).about(format!("{kind} {key}")).at_line(*line);
                    problems.push(Problem { file: Some(path.clone()), ..problem });
                    continue;
                }
                owners.insert((group, kind, key), (path, *line));
                let group_kind = (group.clone(), kind.clone());
                let old = self.objects.get(&group_kind).and_then(|objects| objects.get(key));
                let entry = match old {
                    Some(old) if old.value == *value => old.clone(),
                    _ => {
                        changed = true;
                        Entry { value: Arc::clone(value), version }
                    }
                };
                next.entry(group_kind).or_default().insert(key.clone(), entry);
            }
        }
        let count = |objects: &HashMap<GroupKind, BTreeMap<Key, Entry>>| -> usize {
            objects.values().map(BTreeMap::len).sum()
        };
        // Nothing new and as many as before: nothing was taken away either.
        changed |= count(&next) != count(&self.objects);
        if changed {
            self.generation = version;
            self.objects = next;
        }
        self.problems = problems;
        changed
    }

    /// The objects of a kind that are in force.
    pub(crate) fn of_kind(&self, group: &str, kind: &str) -> impl Iterator<Item = (&Key, &Entry)> {
        self.objects.get(&(group.to_owned(), kind.to_owned())).into_iter().flatten()
    }

    /// What is wrong.
    pub(crate) fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// How many objects are in force.
    pub(crate) fn len(&self) -> usize {
        self.objects.values().map(BTreeMap::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::Kinds;
    use super::super::parse::parse_file;
    use super::*;

    fn set(table: &mut Table, name: &str, text: &str) {
        table.set_file(Path::new(name), parse_file(Path::new(name), text.as_bytes(), &Kinds::default()));
    }

    fn namespaces(table: &Table) -> Vec<String> {
        table.of_kind("", "Namespace").map(|(key, entry)| format!("{key}@{}", entry.version)).collect()
    }

    fn namespace(name: &str) -> String {
        format!("---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")
    }

    #[test]
    fn first_file_by_path_wins_and_the_other_is_a_problem() {
        let mut table = Table::default();
        set(&mut table, "b.yaml", &namespace("x"));
        assert!(table.settle());
        set(
            &mut table,
            "a.yaml",
            &format!("{}  # mine\n", namespace("x").replace("{name", "{labels: {a: b}, name")),
        );
        assert!(table.settle());
        assert_eq!(namespaces(&table), ["x@2"]);
        let problems: Vec<_> = table.problems().iter().map(ToString::to_string).collect();
        assert_eq!(
            problems,
            ["b.yaml:2: Namespace x: it is already in a.yaml:2, which is used: remove one of them"]
        );
        table.retain_files(|p| p == Path::new("b.yaml"));
        assert!(table.settle());
        assert_eq!(namespaces(&table), ["x@3"]);
        assert!(table.problems().is_empty());
    }

    #[test]
    fn a_broken_file_keeps_what_it_had() {
        let mut table = Table::default();
        set(&mut table, "a.yaml", &(namespace("x") + &namespace("y")));
        table.settle();
        set(&mut table, "a.yaml", &(namespace("z") + "---\n{{{\n"));
        assert!(table.settle());
        assert_eq!(namespaces(&table), ["x@1", "y@1", "z@2"]);
        assert_eq!(table.problems().len(), 1);
        set(&mut table, "a.yaml", &namespace("z"));
        assert!(table.settle());
        assert_eq!(namespaces(&table), ["z@2"]);
        assert!(table.problems().is_empty());
        assert!(!table.settle());
    }
}
