//! Every test that docs/security.md names exists. A guarantee whose test was renamed or removed would look as
//! if it were tested.

use std::collections::BTreeSet;

/// A name with at least this many underscores in the last column is a test's; modules and fuzz targets have
/// shorter ones.
const UNDERSCORES: usize = 3;

/// The functions of a file.
pub fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let (before, after) = line.split_once("fn ")?;
        let is_declaration = before.trim().chars().all(|c| c.is_ascii_alphabetic() || " ()".contains(c));
        let end = after.find(|c: char| !is_part_of_name(c))?;
        (is_declaration && end > 0).then(|| &after[..end])
    })
}

/// Tests that the last columns of a page's tables name and that are not among these functions, with their
/// lines.
pub fn missing<'a>(page: &'a str, functions: &BTreeSet<String>) -> Vec<(usize, &'a str)> {
    let rows = page.lines().enumerate().filter(|(_, line)| line.starts_with('|'));
    let cells = rows.filter_map(|(number, line)| {
        Some((number + 1, line.trim_end().trim_end_matches('|').rsplit('|').next()?))
    });
    cells
        .flat_map(|(number, cell)| names(cell).map(move |name| (number, name)))
        .filter(|(_, name)| !functions.contains(*name))
        .collect()
}

/// What may be a test's name in a cell. `..._over_ipv6_...` stands for one that differs in these words only.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split(|c: char| !is_part_of_name(c) && c != '.')
        .filter(|word| !word.contains('.') && word.matches('_').count() >= UNDERSCORES)
}

fn is_part_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_was_renamed_is_found_with_its_line() {
        let code =
            "    async fn what_holds_is_tested() {\n// a fn that_is_only_in_words()\npub(crate) fn x() {}\n";
        let functions: BTreeSet<String> = functions(code).map(str::to_owned).collect();
        assert_eq!(functions, BTreeSet::from(["what_holds_is_tested".into(), "x".into()]));
        let page = "what_is_said_in_prose_counts_not\n\
                    | a_metric_of_the_agent | `knit-x: a_module::what_holds_is_tested`, `..._over_ipv6_so_to_say` |\n\
                    | x | knit-x: file.rs::what_was_renamed_since, fuzz target `nri_stream` |\n";
        assert_eq!(missing(page, &functions), [(3, "what_was_renamed_since")]);
    }
}
