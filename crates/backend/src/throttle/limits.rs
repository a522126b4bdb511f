//! The limits of a disk as text: `read-iops=1000,write-bw=50M,burst=20ms`.

use pvblk_block::Error;
use pvblk_block::units::{Rate, Span, parse_rate, parse_span};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Kinds of limits: requests and bytes per second, of reads, of writes, and of both together.
pub(super) const KEYS: [&str; RATES] = [
    "read-iops",
    "write-iops",
    "iops",
    "read-bw",
    "write-bw",
    "bw",
];
pub(super) const RATES: usize = 6;
/// Before a key: the limit is that of each connection, and not of the disk.
const CONNECTION: &str = "connection-";

/// Least and greatest rates: requests per second, bytes per second.
const MOST_IOPS: u64 = 1_000_000_000;
const MOST_BW: u64 = 1_000_000_000_000_000;
/// The credit that an idle disk has when none is given, as a time at its limit: QEMU's. Half of it is the longest time that a worker may come late without
/// a loss; a thread waits about as long where ten others run on its CPU. Over 10 s it adds 1 % to a limit.
const BURST: Duration = Duration::from_millis(100);
const BURSTS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));

/// Limits of a disk and of each of its connections, in each second; read from text and printed as it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ThrottleLimits {
    /// By [`KEYS`]; 0: no limit.
    pub(super) disk: [u64; RATES],
    pub(super) connection: [u64; RATES],
    pub(super) burst: Duration,
}

impl Default for ThrottleLimits {
    fn default() -> ThrottleLimits {
        ThrottleLimits {
            disk: [0; RATES],
            connection: [0; RATES],
            burst: BURST,
        }
    }
}

impl ThrottleLimits {
    /// True if nothing is limited.
    pub fn is_none(&self) -> bool {
        self.disk == [0; RATES] && self.connection == [0; RATES]
    }

    fn entries(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + '_ {
        let of = |before, rates: &[u64; RATES]| {
            let all = KEYS.into_iter().zip(*rates);
            all.map(move |(key, rate)| (before, key, rate))
        };
        let all = of("", &self.disk).chain(of(CONNECTION, &self.connection));
        all.filter(|(_, _, rate)| *rate > 0)
    }

    fn read(&mut self, key: &str, value: &str) -> Result<bool, String> {
        if key == "burst" {
            let (least, most) = BURSTS;
            let span = parse_span(value).filter(|t| (least..=most).contains(t));
            self.burst = span.ok_or_else(|| {
                let range = format!("{} to {}", Span(least), Span(most));
                format!("burst `{}` is not a time of {range}", value.escape_debug())
            })?;
            return Ok(true);
        }
        let (rates, of_kind) = match key.strip_prefix(CONNECTION) {
            Some(rest) => (&mut self.connection, rest),
            None => (&mut self.disk, key),
        };
        let Some(index) = KEYS.iter().position(|k| *k == of_kind) else {
            return Ok(false);
        };
        let (most, what) = match of_kind.ends_with("iops") {
            true => (MOST_IOPS, "1 to 1000M requests"),
            false => (MOST_BW, "1 to 1000T bytes"),
        };
        let rate = parse_rate(value).filter(|r| (1..=most).contains(r));
        rates[index] = rate.ok_or_else(|| {
            let value = value.escape_debug();
            format!(
                "{key} `{value}` is not a rate of {what} per second, with k, M, G or T (powers of 1000)"
            )
        })?;
        Ok(true)
    }
}

impl FromStr for ThrottleLimits {
    type Err = Error;

    /// `none`, or entries `KEY=VALUE` with commas between them.
    fn from_str(text: &str) -> Result<ThrottleLimits, Error> {
        let mut limits = ThrottleLimits::default();
        if text == "none" {
            return Ok(limits);
        }
        let wrong = |why: String| Error::config(format!("limit `{}`: {why}", text.escape_debug()));
        let mut seen = Vec::new();
        for entry in text.split(',') {
            let (key, value) = entry
                .split_once('=')
                .ok_or_else(|| wrong(format!("`{}` is not KEY=VALUE", entry.escape_debug())))?;
            if !limits.read(key, value).map_err(wrong)? {
                let keys = KEYS.join(", ");
                return Err(wrong(format!(
                    "there is no `{}`; there are {keys}, each with {CONNECTION} before it too, and burst",
                    key.escape_debug()
                )));
            }
            if seen.contains(&key) {
                return Err(wrong(format!("{key} twice: write it once")));
            }
            seen.push(key);
        }
        if limits.is_none() {
            return Err(wrong("a burst without a limit: write one, or none".into()));
        }
        Ok(limits)
    }
}

impl fmt::Display for ThrottleLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        for (i, (before, key, rate)) in self.entries().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma}{before}{key}={}", Rate(rate))?;
        }
        if self.burst != BURST {
            write!(f, ",burst={}", Span(self.burst))?;
        }
        Ok(())
    }
}

impl TryFrom<String> for ThrottleLimits {
    type Error = Error;

    fn try_from(text: String) -> Result<ThrottleLimits, Error> {
        text.parse()
    }
}

impl From<ThrottleLimits> for String {
    fn from(limits: ThrottleLimits) -> String {
        limits.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_printed_as_they_are_read() {
        for (text, printed) in [
            ("iops=1000", "iops=1k"),
            ("write-bw=50M,read-iops=1.5k", "read-iops=1500,write-bw=50M"),
            (
                "connection-bw=1G,read-bw=1,write-iops=7,bw=2T,burst=20ms",
                "write-iops=7,read-bw=1,bw=2T,connection-bw=1G,burst=20ms",
            ),
            ("iops=5,burst=100ms", "iops=5"),
            ("none", "none"),
        ] {
            let limits: ThrottleLimits = text.parse().unwrap();
            assert_eq!(limits.to_string(), printed);
            assert_eq!(printed.parse::<ThrottleLimits>().unwrap(), limits);
            assert_eq!(limits.is_none(), text == "none");
        }
    }

    #[test]
    fn limits_that_cannot_be_read_say_what_to_write() {
        for (text, why) in [
            ("", "is not KEY=VALUE"),
            ("iops", "is not KEY=VALUE"),
            ("iops=0", "1 to 1000M requests per second"),
            ("bw=fast", "1 to 1000T bytes per second"),
            ("iops=1,iops=2", "iops twice"),
            ("burst=10ms", "a burst without a limit"),
            ("iops=1,burst=2", "burst `2` is not a time of 1ms to 60s"),
            ("iops=1,burst=0ms", "burst `0ms` is not a time"),
            ("reads=1", "there are read-iops, write-iops, iops"),
            ("connection-burst=1s", "there is no `connection-burst`"),
            ("iops=1,", "`` is not KEY=VALUE"),
        ] {
            let error = text.parse::<ThrottleLimits>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(!error.contains('\n'));
        }
    }
}
