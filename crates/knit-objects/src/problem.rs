//! What is wrong with an object that was read, and where. The rest goes on without it.

use std::fmt;
use std::path::PathBuf;

/// Something wrong in a file of objects, or an object of the API that cannot be understood.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Problem {
    /// The file, if it came out of one.
    pub file: Option<PathBuf>,
    /// The line, counted from 1, if it is known.
    pub line: Option<u64>,
    /// The object, for example `Network blue`, if it could be told.
    pub object: Option<String>,
    /// The field, for example `spec.subnets[0].cidr`, if it is about one.
    pub field: Option<String>,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong and what to do.
    pub message: String,
}

/// How bad a [`Problem`] is.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Severity {
    /// The object is used, less what the message names.
    Warning,
    /// The object, or the whole file, is not used; its last good version stays.
    Error,
}

// === impl Problem ===

impl Problem {
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self {
            file: None,
            line: None,
            object: None,
            field: None,
            severity: Severity::Error,
            message: message.into(),
        }
    }

    pub(crate) fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(message) }
    }

    pub(crate) fn at_line(mut self, line: Option<u64>) -> Self {
        self.line = line;
        self
    }

    pub(crate) fn about(mut self, object: impl Into<String>) -> Self {
        self.object = Some(object.into());
        self
    }

    pub(crate) fn in_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into()).filter(|f| !f.is_empty() && f != ".");
        self
    }

    /// Writes it to the log.
    pub(crate) fn log(&self) {
        match self.severity {
            Severity::Warning => tracing::warn!("{self}"),
            Severity::Error => tracing::error!("{self}"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}", file.display())?;
            if let Some(line) = self.line {
                write!(f, ":{line}")?;
            }
            f.write_str(": ")?;
        }
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        f.write_str(&self.message)
    }
}
