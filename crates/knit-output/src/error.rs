//! Errors as people read them: one line that says what failed, the chain of causes below it, and what to do.

use std::error::Error;
use std::fmt::Write as _;

use owo_colors::OwoColorize as _;

/// A line beside the work: progress, a hint, a warning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Note {
    /// What is being done.
    Info,
    /// Something the reader should know.
    Warning,
}

/// Says something on standard error.
pub fn note(kind: Note, text: impl std::fmt::Display) {
    match kind {
        Note::Info => anstream::eprintln!("{text}"),
        Note::Warning => anstream::eprintln!("{} {text}", "warning:".yellow().bold()),
    }
}

/// Prints an error with its causes to standard error.
pub fn error(error: &(dyn Error + 'static)) {
    anstream::eprint!("{}", report(error));
}

/// An error with its causes, as text: each cause on a line of its own, none twice.
#[must_use]
pub fn report(error: &(dyn Error + 'static)) -> String {
    let messages = knit_types::chain_messages(error);
    let mut lines = messages.iter();
    let first = lines.next().map_or("", String::as_str);
    let mut text = format!("{} {first}\n", "error:".red().bold());
    for cause in lines {
        let _ = writeln!(text, "  because: {cause}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Outer(std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("cannot read the ledger")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn the_chain_is_told_once() {
        let text = report(&Outer(std::io::Error::other("no such file")));
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(plain, "error: cannot read the ledger\n  because: no such file\n");
    }
}
