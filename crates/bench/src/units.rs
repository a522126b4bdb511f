//! fio's notation of sizes, times, shares and switches.

use std::time::Duration;

/// Bytes of `4k`, `1m`, `4g` or `1t`: powers of 1024, as fio reads them by default.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = lower.split_at(digits.unwrap_or(lower.len()));
    let shift = match unit {
        "" | "b" => 0,
        "k" | "kb" => 10,
        "m" | "mb" => 20,
        "g" | "gb" => 30,
        "t" | "tb" => 40,
        "p" | "pb" => 50,
        _ => {
            return Err(format!(
                "{text:?} is not a size: write one such as 4k or 1g"
            ));
        }
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .ok_or_else(|| format!("{text:?} is not a size: write one such as 4k or 1g"))
}

/// A time such as `10`, `500ms`, `2m`; a bare number counts `unit`s.
pub(super) fn time(text: &str, unit: Duration) -> Result<Duration, String> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit());
    let (number, suffix) = lower.split_at(digits.unwrap_or(lower.len()));
    let bad = || format!("{text:?} is not a time: write one such as 10s, 500ms or 2m");
    let n: u32 = number.parse().map_err(|_| bad())?;
    let unit = match suffix {
        "" => unit,
        "us" | "usec" => Duration::from_micros(1),
        "ms" | "msec" => Duration::from_millis(1),
        "s" | "sec" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        "d" => Duration::from_secs(86400),
        _ => return Err(bad()),
    };
    unit.checked_mul(n).ok_or_else(bad)
}

/// A whole number from `least` to `most`.
pub(super) fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    match text.trim().parse::<u64>() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("{text:?} is not a number from {least} to {most}")),
    }
}

/// A switch: an option alone, or with 0 or 1.
pub(super) fn switch(text: Option<&str>) -> Result<bool, String> {
    match text.map(str::trim) {
        None | Some("" | "1") => Ok(true),
        Some("0") => Ok(false),
        Some(other) => Err(format!("{other:?} is neither 0 nor 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_as_fio_does() {
        for (text, bytes) in [("512", 512), ("4k", 4096), ("1M", 1 << 20), ("4g", 4 << 30)] {
            assert_eq!(size(text), Ok(bytes));
        }
        for bad in ["", "k", "4x", "1.5g", "-1", "99999999p", "4kib"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        let second = Duration::from_secs(1);
        assert_eq!(time("10", second), Ok(Duration::from_secs(10)));
        assert_eq!(time("500ms", second), Ok(Duration::from_millis(500)));
        assert_eq!(time("2m", second), Ok(Duration::from_secs(120)));
        assert!(time("soon", second).is_err());
        assert_eq!(switch(None), Ok(true));
        assert_eq!(switch(Some("0")), Ok(false));
        assert!(switch(Some("yes")).is_err());
        assert!(number("5", 1, 4).is_err());
    }
}
