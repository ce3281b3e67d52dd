//! Lengths of time as Kubernetes configuration writes them: `30s`, `1h0m0s`, `1.5h`.

use std::fmt;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};

/// A length of time, read from such a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoDuration(pub Duration);

/// Reads one; `None` if it is none.
fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let unit = match &rest[..end] {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        sum += number * unit;
        rest = &rest[end..];
    }
    (!text.is_empty()).then(|| Duration::try_from_secs_f64(sum).ok())?
}

impl<'de> de::Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = GoDuration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as 30s or 1h0m0s")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<GoDuration, E> {
                parse(text).map(GoDuration).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }

            // A bare 0 is the default, as everywhere in such files.
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<GoDuration, E> {
                match number {
                    0 => Ok(GoDuration(Duration::ZERO)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(number), &self)),
                }
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_what_they_mean() {
        for (text, millis) in [
            ("0s", Some(0)),
            ("0", Some(0)),
            ("30s", Some(30_000)),
            ("1h0m0s", Some(3_600_000)),
            ("1.5h", Some(5_400_000)),
            ("250ms", Some(250)),
            ("", None),
            ("30", None),
            ("s", None),
            ("-1s", None),
            ("1d", None),
            ("1..5s", None),
        ] {
            assert_eq!(parse(text).map(|d| d.as_millis()), millis, "{text:?}");
        }
    }
}
