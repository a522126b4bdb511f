//! An event as JSON, and as a line of text.

use crate::log::rfc3339;
use pvblk_backend::events::{Event, EventLog, Value};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// An event as programs get it: docs/reference/json.md.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct EventForm {
    pub number: u64,
    /// The run of the server that the number belongs to.
    pub run: String,
    /// RFC 3339, in UTC.
    pub time: String,
    pub kind: String,
    pub severity: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    pub text: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, FieldForm>,
}

/// The value of a field.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(untagged)]
pub enum FieldForm {
    Number(u64),
    Text(String),
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl EventForm {
    /// The form of an event of this log.
    pub fn new(event: &Event, log: &EventLog) -> EventForm {
        let field = |(name, value): &(&str, Value)| {
            let value = match value {
                Value::Number(number) => FieldForm::Number(*number),
                Value::Text(text) => FieldForm::Text(text.clone()),
            };
            ((*name).to_owned(), value)
        };
        EventForm {
            number: event.number,
            run: log.run().to_owned(),
            time: rfc3339(event.time),
            kind: event.kind.name().into(),
            severity: event.severity().name().into(),
            disk: event.disk.clone(),
            text: event.text.clone(),
            left_out: event.left_out,
            fields: event.fields.iter().map(field).collect(),
        }
    }
}

impl fmt::Display for FieldForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldForm::Number(number) => number.fmt(f),
            FieldForm::Text(text) => text.fmt(f),
        }
    }
}

impl fmt::Display for EventForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EventForm {
            time,
            severity,
            kind,
            text,
            ..
        } = self;
        write!(f, "{time} {severity:7} {kind:16} ")?;
        if let Some(disk) = &self.disk {
            write!(f, "disk {disk}: ")?;
        }
        f.write_str(text)?;
        match self.left_out {
            0 => Ok(()),
            n => write!(f, " ({n} of these before it left out)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_backend::events::Kind;
    use std::sync::Arc;

    #[test]
    fn the_form_is_read_back_as_it_was_written() {
        let log = Arc::new(EventLog::default());
        let event = Event::new(Kind::MemberFailed, "its member at place 2 failed");
        log.put(event.of("vm1").with("place", 2u32).with("member", "file:c"));
        let event = log.kept(None).remove(0);
        let form = EventForm::new(&event, &log);
        let text = serde_json::to_string(&form).unwrap();
        assert_eq!(serde_json::from_str::<EventForm>(&text).unwrap(), form);
        assert!(text.contains(r#""kind":"member-failed","severity":"error","disk":"vm1""#));
        assert!(
            text.contains(r#""fields":{"member":"file:c","place":2}"#),
            "{text}"
        );
        assert!(!text.contains("left_out"));
        let line = form.to_string();
        assert!(
            line.ends_with("Z error   member-failed    disk vm1: its member at place 2 failed"),
            "{line}"
        );
    }
}
