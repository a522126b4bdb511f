//! Events: a member of an array failed, a backing is full, a front end came. docs/decisions/0029-events-and-logs.md
//! says why they are as they are.
//!
//! ```text
//!  lanes, devices ──▶ Health of a disk ─┐                                   ┌─▶ Follower: `pvblk events`
//!  servers of exports ──────────────────┼─ put ─▶ limits ─▶ EventLog (ring) ┤
//!  the command ─────────────────────────┘                                   └─▶ Follower: the program of `on_event`
//! ```

mod flood;
mod health;
mod kind;
mod log;
mod peer;

pub use health::{Health, HealthState};
pub use kind::{Kind, Severity, UnknownKind};
pub use log::{EventLog, Follower, Start};
pub use peer::{Peer, Presence, Present};

use std::fmt;
use std::time::SystemTime;

/// Longest text of an event in bytes.
const LONGEST_TEXT: usize = 512;
/// Longest text of a field in bytes.
const LONGEST_FIELD: usize = 256;
/// Most fields of an event.
const MOST_FIELDS: usize = 8;

/// The value of an event's field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Number(u64),
    Text(String),
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Value {
        Value::Number(number.into())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(one_line(text, LONGEST_FIELD))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => number.fmt(f),
            Value::Text(text) => text.fmt(f),
        }
    }
}

/// Something that happened, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number in the [`EventLog`], from 1; 0 until it is put there.
    pub number: u64,
    /// Time at which it was put there.
    pub time: SystemTime,
    pub kind: Kind,
    /// The disk that it is about; `None`: it is about the process.
    pub disk: Option<String>,
    /// One line for people, without the disk's name.
    pub text: String,
    /// Fields by name. Names are words of lower-case letters and underscores.
    pub fields: Vec<(&'static str, Value)>,
    /// Number of events of this kind and disk before this one that were left out because there were too many.
    pub left_out: u64,
}

impl Event {
    /// An event about the process, with a line for people.
    pub fn new(kind: Kind, text: impl AsRef<str>) -> Event {
        Event {
            number: 0,
            time: SystemTime::UNIX_EPOCH,
            kind,
            disk: None,
            text: one_line(text.as_ref(), LONGEST_TEXT),
            fields: Vec::new(),
            left_out: 0,
        }
    }

    /// The event about a disk of this name.
    #[must_use]
    pub fn of(mut self, disk: &str) -> Event {
        self.disk = Some(one_line(disk, LONGEST_FIELD));
        self
    }

    /// The event with one more field; eight are the most.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Event {
        debug_assert!(self.fields.len() < MOST_FIELDS, "too many fields");
        if self.fields.len() < MOST_FIELDS {
            self.fields.push((name, value.into()));
        }
        self
    }

    pub fn severity(&self) -> Severity {
        self.kind.severity()
    }

    /// The value of a field.
    pub fn field(&self, name: &str) -> Option<&Value> {
        let mut fields = self.fields.iter();
        fields.find(|(n, _)| *n == name).map(|(_, value)| value)
    }
}

/// The line of the log: the disk, then the text.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(disk) = &self.disk {
            write!(f, "disk {disk}: ")?;
        }
        f.write_str(&self.text)?;
        match self.left_out {
            0 => Ok(()),
            n => write!(f, " ({n} of these before it left out)"),
        }
    }
}

/// `text` without control characters, and at most `most` bytes of it: peers choose names.
fn one_line(text: &str, most: usize) -> String {
    let end = match text.len() <= most {
        true => text.len(),
        false => text.floor_char_boundary(most),
    };
    text[..end].replace(|c: char| c.is_control(), " ")
}

#[cfg(test)]
mod tests;
