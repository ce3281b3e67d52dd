//! Tables in the manner of `kubectl get`: aligned columns, no borders, and colour only where it says
//! something.

use std::fmt;

use comfy_table::{Attribute, Color, ContentArrangement, presets};

/// A table for people.
#[derive(Debug)]
pub struct Table {
    inner: comfy_table::Table,
}

/// One cell: words, and how they are meant.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cell {
    text: String,
    tone: Tone,
}

/// How a cell is meant.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Tone {
    /// Plain information.
    #[default]
    Plain,
    /// As it should be.
    Good,
    /// Worth a look.
    Warning,
    /// Wrong.
    Bad,
}

// === impl Table ===

impl Table {
    /// A table with these column names.
    #[must_use]
    pub fn new(columns: &[&str]) -> Self {
        let mut inner = comfy_table::Table::new();
        // Always styled here: `anstream` takes colour away where standard output shows none.
        inner
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .enforce_styling();
        inner.set_header(columns.iter().map(|c| comfy_table::Cell::new(c).add_attribute(Attribute::Bold)));
        // Columns stand apart by three blanks, the first one flush with the margin, as kubectl prints them.
        for (index, column) in inner.column_iter_mut().enumerate() {
            column.set_padding((0, if index + 1 < columns.len() { 3 } else { 0 }));
        }
        Self { inner }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<Cell>>) -> &mut Self {
        self.inner.add_row(cells.into_iter().map(|cell| {
            let cell = cell.into();
            let inner = comfy_table::Cell::new(if cell.text.is_empty() { "-" } else { &cell.text });
            match cell.tone {
                Tone::Plain => inner,
                Tone::Good => inner.fg(Color::Green),
                Tone::Warning => inner.fg(Color::Yellow),
                Tone::Bad => inner.fg(Color::Red).add_attribute(Attribute::Bold),
            }
        }));
        self
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, line) in self.inner.lines().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            f.write_str(line.trim_end())?;
        }
        Ok(())
    }
}

// === impl Cell ===

impl Cell {
    /// A cell with a meaning.
    #[must_use]
    pub fn new(text: impl fmt::Display, tone: Tone) -> Self {
        Self { text: text.to_string(), tone }
    }

    /// `yes` in green or `no` in red.
    #[must_use]
    pub fn yes_no(value: bool) -> Self {
        if value { Self::new("yes", Tone::Good) } else { Self::new("no", Tone::Bad) }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, tone: Tone::Plain }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_empty_cells_show() {
        let mut table = Table::new(&["NAME", "READY"]);
        table.row(["blue", ""]).row(["a-longer-name", "yes"]);
        let plain = anstream::adapter::strip_str(&table.to_string()).to_string();
        assert_eq!(plain, "NAME            READY\nblue            -\na-longer-name   yes");
    }
}
