//! How Knit's commands speak: tables for people, JSON and YAML for scripts, errors that say what to do.
//!
//! Every command prints through here, so that colour, width and format are decided in one place. Colour and
//! terminal detection (`NO_COLOR`, pipes) come from `anstream`.

mod error;
mod table;

pub use error::{Note, error, note, report};
pub use table::{Cell, Table, Tone};

use std::io::{self, Write};

use serde::Serialize;

/// How a command prints what it found.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Format {
    /// A table, for people.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// One JSON document per line.
    JsonLines,
    /// YAML.
    Yaml,
}

/// Prints to standard output; a reader that went away (`knit get ... | head`) is no error.
///
/// # Errors
/// When standard output cannot be written.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Prints rows in the wanted format: the table as it is drawn, or the values as they are.
///
/// # Errors
/// When standard output cannot be written, or a value cannot be expressed in the format.
pub fn print_rows<T: Serialize>(
    format: Format,
    values: &[T],
    table: impl FnOnce() -> Table,
) -> io::Result<()> {
    let text = match format {
        Format::Table => table().to_string() + "\n",
        Format::Json => serde_json::to_string_pretty(values)? + "\n",
        Format::JsonLines => {
            let mut text = String::new();
            for value in values {
                text += &serde_json::to_string(value)?;
                text.push('\n');
            }
            text
        }
        Format::Yaml => serde_saphyr::to_string(&values).map_err(io::Error::other)?,
    };
    print(&text)
}
