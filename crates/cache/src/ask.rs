//! Questions to a cache: `{"cache": "counters"}` and `{"cache": "drop"}`.

use crate::PageCache;
use crate::policy::Policy;
use pvblk_block::Error;
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    cache: String,
}

/// The answer; `None` if it isn't a question to a cache.
pub(crate) fn answer<P: Policy>(
    cache: &PageCache<P>,
    question: &str,
) -> Option<Result<String, Error>> {
    let question: Question = serde_json::from_str(question).ok()?;
    Some(match question.cache.as_str() {
        "counters" => Ok(counters(cache).to_string()),
        "drop" => Ok(json!({ "dropped_pages": cache.drop_clean() }).to_string()),
        other => Err(Error::config(format!(
            "cache: no question `{}`: ask for counters or drop",
            other.escape_debug()
        ))),
    })
}

fn counters<P: Policy>(cache: &PageCache<P>) -> Value {
    let c = cache.counters();
    let mut all: Map<_, _> = c
        .all()
        .into_iter()
        .map(|(n, v)| (n.into(), v.into()))
        .collect();
    for (name, value) in [
        ("hit_ratio", c.hit_ratio()),
        ("readahead_accuracy", c.readahead_accuracy()),
        ("effectiveness", c.effectiveness()),
        ("direct_share", c.direct_share()),
        ("segments_per_read", c.segments_per_read()),
    ] {
        all.insert(name.into(), value.into());
    }
    Value::Object(all)
}
