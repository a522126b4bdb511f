//! Numbers with units: sizes in powers of 1024, rates in powers of 1000, times.

use std::fmt;
use std::time::Duration;

const SUFFIXES: [(&str, u32); 5] = [("T", 4), ("G", 3), ("M", 2), ("k", 1), ("", 0)];

/// Bytes: a number with `k`, `M`, `G` or `T`, powers of 1024. A fraction must give whole bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    parse_scaled(text, 1024)
}

/// A rate: a number with `k`, `M`, `G` or `T`, powers of 1000.
pub fn parse_rate(text: &str) -> Option<u64> {
    parse_scaled(text, 1000)
}

/// A time: a number with `ns`, `us`, `ms` or `s`, in whole nanoseconds.
pub fn parse_span(text: &str) -> Option<Duration> {
    // Longest suffixes first: "us" ends in "s" too.
    for (suffix, nanos) in [
        ("ns", 1),
        ("us", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
    ] {
        if let Some(number) = text.strip_suffix(suffix) {
            return parse_decimal(number, nanos).map(Duration::from_nanos);
        }
    }
    (text == "0").then_some(Duration::ZERO)
}

/// A probability, from 0 to 1.
pub fn parse_probability(text: &str) -> Option<f64> {
    let p: f64 = text.parse().ok()?;
    (0.0..=1.0).contains(&p).then_some(p)
}

fn parse_scaled(text: &str, base: u64) -> Option<u64> {
    let (number, power) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1),
        b'M' | b'm' => (&text[..text.len() - 1], 2),
        b'G' | b'g' => (&text[..text.len() - 1], 3),
        b'T' | b't' => (&text[..text.len() - 1], 4),
        _ => (text, 0),
    };
    parse_decimal(number, base.pow(power))
}

/// `digits[.digits]` times `scale`, if that is a whole number that fits.
fn parse_decimal(text: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |s: &str| !s.is_empty() && s.len() <= 20 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 12 {
        return None;
    }
    let tenth = 10u128.pow(fraction.len() as u32);
    let value = whole.parse::<u128>().ok()? * tenth + fraction.parse::<u128>().ok()?;
    let scaled = value.checked_mul(scale.into())?;
    if !scaled.is_multiple_of(tenth) {
        return None;
    }
    u64::try_from(scaled / tenth).ok()
}

/// Prints bytes as [`parse_size`] reads them.
#[derive(Clone, Copy, Debug)]
pub struct Size(pub u64);
/// Prints a rate as [`parse_rate`] reads it.
#[derive(Clone, Copy, Debug)]
pub struct Rate(pub u64);
/// Prints a time as [`parse_span`] reads it.
#[derive(Clone, Copy, Debug)]
pub struct Span(pub Duration);

fn scaled(f: &mut fmt::Formatter<'_>, value: u64, base: u64) -> fmt::Result {
    let (suffix, power) = SUFFIXES
        .into_iter()
        .find(|&(_, power)| value != 0 && value.is_multiple_of(base.pow(power)))
        .unwrap_or(("", 0));
    write!(f, "{}{suffix}", value / base.pow(power))
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, 1024)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, 1000)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let (suffix, unit) = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)]
            .into_iter()
            .find(|&(_, unit)| nanos.is_multiple_of(unit))
            .unwrap_or(("ns", 1));
        write!(f, "{}{suffix}", nanos / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units() {
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        assert_eq!(parse_size("4k"), Some(4096));
        assert_eq!(parse_size("0.3k"), None, "not whole bytes");
        assert_eq!(parse_rate("2.4G"), Some(2_400_000_000));
        assert_eq!(parse_rate("209k"), Some(209_000));
        assert_eq!(parse_span("210us"), Some(Duration::from_micros(210)));
        assert_eq!(parse_span("1.5s"), Some(Duration::from_millis(1500)));
        assert_eq!(parse_span("0"), Some(Duration::ZERO));
        for bad in [
            "",
            "k",
            "-1",
            "1e3",
            "1kk",
            ".5k",
            "1.",
            "99999999999999999999T",
            "1µ",
        ] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
        for bad in ["", "5", "us", "1.5ns", "-1s", "1 s"] {
            assert_eq!(parse_span(bad), None, "{bad}");
        }
        for bad in ["", "1.1", "-0.1", "NaN", "x"] {
            assert_eq!(parse_probability(bad), None, "{bad}");
        }
    }

    #[test]
    fn printed_as_they_are_read() {
        for n in [0, 1, 512, 1000, 1024, 4 << 20, 1 << 40, (1 << 40) + 512] {
            assert_eq!(parse_size(&Size(n).to_string()), Some(n));
            assert_eq!(parse_rate(&Rate(n).to_string()), Some(n));
            let span = Duration::from_nanos(n);
            assert_eq!(parse_span(&Span(span).to_string()), Some(span));
        }
        assert_eq!(Size(1 << 30).to_string(), "1G");
        assert_eq!(Span(Duration::from_micros(210)).to_string(), "210us");
    }
}
