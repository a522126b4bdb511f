//! The account of a modelled device: the time for which it held requests back, by its own clock. Figures of a trace are checked against it.

use pvblk_block::Error;
use serde::Deserialize;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Requests that were given back, and the time between their submission and that, together.
#[derive(Debug, Default)]
pub(super) struct Planted {
    requests: AtomicU64,
    ns: AtomicU64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    delay: String,
}

impl Planted {
    /// Counts one request that was held for `time`.
    pub(super) fn add(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.ns.fetch_add(ns, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Answers `{"delay": "held"}`; `None` if the question isn't for a modelled device.
    pub(super) fn answer(&self, question: &str) -> Option<Result<String, Error>> {
        let question: Question = serde_json::from_str(question).ok()?;
        Some(match question.delay.as_str() {
            "held" => Ok(json!({
                "requests": self.requests.load(Ordering::Relaxed),
                "held_ns": self.ns.load(Ordering::Relaxed),
            })
            .to_string()),
            other => Err(Error::config(format!(
                "delay: no question `{}`: ask for held",
                other.escape_debug()
            ))),
        })
    }
}
