//! The serving side of `pvblk events`.

use super::form::EventForm;
use pvblk_backend::events::{EventLog, Kind, Start};
use pvblk_block::Error;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Period in which a quiet stream looks whether its reader is still there.
const LOOK: Duration = Duration::from_millis(250);

/// A question for events.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventsQuery {
    /// Go on as events happen.
    #[serde(default)]
    pub follow: bool,
    /// Only those about this disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Only those after this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
}

impl EventsQuery {
    /// The question from its JSON; null asks for all that there is.
    pub fn parse(params: Value) -> Result<EventsQuery, Error> {
        if params.is_null() {
            return Ok(EventsQuery::default());
        }
        serde_json::from_value(params).map_err(|e| Error::config(format!("events: {e}")))
    }
}

/// Gives each event that is asked for to `put`, in JSON, one at a time. With `follow` it goes on until the log is closed or `is_over`, which is
/// asked a few times a second.
pub fn answer(
    log: &Arc<EventLog>,
    query: &EventsQuery,
    mut is_over: impl FnMut() -> io::Result<bool>,
    mut put: impl FnMut(&str) -> io::Result<()>,
) -> io::Result<()> {
    let mut follower = log.follow(match query.after {
        Some(number) => Start::After(number),
        None => Start::Oldest,
    });
    loop {
        let patience = match query.follow {
            true => LOOK,
            false => Duration::ZERO,
        };
        let Some(event) = follower.next(patience) else {
            if !query.follow || follower.is_over() || is_over()? {
                return Ok(());
            }
            continue;
        };
        let of_disk = query.disk.is_none() || event.disk == query.disk;
        if of_disk || event.kind == Kind::EventsLost {
            put(&serde_json::to_string(&EventForm::new(&event, log))?)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_backend::events::Event;
    use serde_json::json;

    fn kinds(log: &Arc<EventLog>, query: Value) -> Vec<String> {
        let mut lines = Vec::new();
        let query = EventsQuery::parse(query).unwrap();
        let put = |line: &str| {
            let form: EventForm = serde_json::from_str(line).unwrap();
            lines.push(format!("{} {}", form.number, form.kind));
            Ok(())
        };
        answer(log, &query, || Ok(true), put).unwrap();
        lines
    }

    #[test]
    fn a_reader_gets_the_events_that_it_asks_for() {
        let log = Arc::new(EventLog::default());
        log.put(Event::new(Kind::DiskAdded, "served").of("a"));
        log.put(Event::new(Kind::DiskAdded, "served").of("b"));
        log.put(Event::new(Kind::MemorySqueezed, "short"));
        let all = ["1 disk-added", "2 disk-added", "3 memory-squeezed"];
        assert_eq!(kinds(&log, json!({})), all);
        assert_eq!(kinds(&log, Value::Null), all);
        // The end comes when the reader is gone.
        assert_eq!(kinds(&log, json!({"follow": true})), all);
        assert_eq!(kinds(&log, json!({"disk": "b"})), ["2 disk-added"]);
        assert_eq!(kinds(&log, json!({"after": 2})), ["3 memory-squeezed"]);
        for wrong in [json!({"more": 1}), json!({"after": "2"}), json!("all")] {
            assert!(EventsQuery::parse(wrong).is_err());
        }
    }
}
