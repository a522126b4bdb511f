//! A line of the log, and its four forms.

use super::journal;
use pvblk_block::Error;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};
use tracing::Level;

/// The form of the log's lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Time, level and text.
    Text,
    /// One JSON object in each line.
    Json,
    /// Entries of the system's journal, with fields.
    Journald,
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Format, Error> {
        match text {
            "text" => Ok(Format::Text),
            "json" => Ok(Format::Json),
            "journald" => Ok(Format::Journald),
            "auto" => Ok(match journal::is_standard_error() {
                true => Format::Journald,
                false => Format::Text,
            }),
            other => Err(Error::config(format!(
                "log format {other}: text, json, journald or auto"
            ))),
        }
    }
}

/// A line of the log.
pub(super) struct Record<'a> {
    pub level: Level,
    /// The module that it comes from; `None`: the command itself, whose lines are plain text.
    pub module: Option<&'a str>,
    pub message: &'a str,
    pub fields: &'a [(&'static str, String)],
}

impl Record<'_> {
    /// The record in a form, as it goes to the log's writer.
    pub fn encode(&self, format: Format, now: SystemTime) -> Vec<u8> {
        match format {
            Format::Text => self.text(now).into_bytes(),
            Format::Json => self.json(now).into_bytes(),
            Format::Journald => journal::frame(self),
        }
    }

    fn text(&self, now: SystemTime) -> String {
        match self.module {
            Some(_) => {
                // A peer's words don't move the cursor of a terminal.
                let is_bad = |c: char| c.is_control() && c != '\n' && c != '\t';
                let message = self.message.replace(is_bad, "?");
                format!("{} {:>5} {message}\n", rfc3339(now), self.level)
            }
            None => format!("{}\n", self.message),
        }
    }

    fn json(&self, now: SystemTime) -> String {
        let mut object = Map::new();
        let mut add = |name: &str, value: String| object.insert(name.into(), Value::String(value));
        add("time", rfc3339(now));
        add("level", self.level.as_str().to_ascii_lowercase());
        if let Some(module) = self.module {
            add("module", module.to_owned());
        }
        add("message", self.message.to_owned());
        for (name, value) in self.fields {
            add(name, value.clone());
        }
        let mut line = Value::Object(object).to_string();
        line.push('\n');
        line
    }
}

/// A time in UTC, to the microsecond, such as `2026-11-23T12:00:00.000000Z`.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut text = String::with_capacity(27);
    let _ = write!(
        text,
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z",
        since.subsec_micros()
    );
    text
}

/// The date of a day since 1970, in years that begin in March, so that a leap day is the last one.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // since March 1st of year 0
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000000Z"),
            (1_709_251_200, "2024-03-01T00:00:00.000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_record_has_a_form_for_people_and_one_for_programs() {
        let fields = [("event", "peer-left".to_owned())];
        let mut record = Record {
            level: Level::WARN,
            module: Some("pvblk_backend::events"),
            message: "disk a: \"x\"\nhas left",
            fields: &fields,
        };
        let of = |record: &Record<'_>, format| {
            String::from_utf8(record.encode(format, UNIX_EPOCH)).unwrap()
        };
        let text = of(&record, Format::Text);
        let start = "1970-01-01T00:00:00.000000Z  WARN disk a: ";
        assert!(text.starts_with(start), "{text}");
        let json = of(&record, Format::Json);
        assert_eq!(json.matches('\n').count(), 1);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["level"], "warn");
        assert_eq!(json["event"], "peer-left");
        assert_eq!(json["message"], "disk a: \"x\"\nhas left");
        record.module = None;
        assert_eq!(of(&record, Format::Text), "disk a: \"x\"\nhas left\n");
    }

    #[test]
    fn formats_have_names() {
        assert_eq!("json".parse::<Format>().unwrap(), Format::Json);
        let e = "xml".parse::<Format>().unwrap_err();
        assert_eq!(
            e.to_string(),
            "log format xml: text, json, journald or auto"
        );
    }
}
