//! Ids of arrays and devices, and times of superblocks, as text.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970, for superblocks.
pub fn now_secs() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_secs())
}

/// As mdadm prints ids: four groups of eight digits.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let (groups, _) = uuid.as_chunks::<4>();
    let groups: Vec<String> = groups
        .iter()
        .map(|g| format!("{:08x}", u32::from_be_bytes(*g)))
        .collect();
    groups.join(":")
}

/// Reads an id: 32 hexadecimal digits with `:`, `-` or `.` between them, as mdadm reads it. So both mdadm's form and that of RFC 9562 do.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .filter(|c| !matches!(c, ':' | '-' | '.'))
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect();
    let digits: [u8; 32] = digits?.try_into().ok()?;
    Some(std::array::from_fn(|n| {
        digits[2 * n] << 4 | digits[2 * n + 1]
    }))
}

/// A time of a superblock (seconds since 1970 in its low 40 bits) as ctime(3) writes it, in UTC: `Sat Nov 21 20:36:22 2026`.
pub fn time_text(stamp: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let seconds = stamp & ((1 << 40) - 1);
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (mut year, mut day) = (1970, days);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    format!(
        "{} {} {:>2} {:02}:{:02}:{:02} {year}",
        DAYS[(days % 7) as usize],
        MONTHS[month],
        day + 1,
        second / 3600,
        second / 60 % 60,
        second % 60,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_in_every_form_that_tools_print() {
        let uuid = std::array::from_fn(|n| (n * 17) as u8);
        for text in [
            "00112233:44556677:8899aabb:ccddeeff",
            "00112233-4455-6677-8899-aabbccddeeff",
            "00112233445566778899AABBCCDDEEFF",
            "00.11.22.33.44.55.66.77.88.99.aa.bb.cc.dd.ee.ff",
        ] {
            assert_eq!(parse_uuid(text), Some(uuid), "{text}");
        }
        assert_eq!(parse_uuid(&uuid_text(&uuid)), Some(uuid));
        for bad in [
            "",
            "00112233",
            "00112233:44556677:8899aabb:ccddeef",
            "00112233:44556677:8899aabb:ccddeeff0",
            "00112233:44556677:8899aabb:ccddeefg",
            "00112233 44556677 8899aabb ccddeeff",
        ] {
            assert_eq!(parse_uuid(bad), None, "{bad}");
        }
    }

    #[test]
    fn times_are_those_of_date() {
        // date -u -d @N '+%a %b %e %H:%M:%S %Y'
        for (stamp, text) in [
            (0, "Thu Jan  1 00:00:00 1970"),
            (951_782_400, "Tue Feb 29 00:00:00 2000"),
            (1_709_251_199, "Thu Feb 29 23:59:59 2024"),
            (1_735_689_599, "Tue Dec 31 23:59:59 2024"),
            (4_107_542_399, "Sun Feb 28 23:59:59 2100"),
            (4_107_542_400, "Mon Mar  1 00:00:00 2100"),
        ] {
            assert_eq!(time_text(stamp), text);
            assert_eq!(
                time_text(stamp | 123_456 << 40),
                text,
                "microseconds are above"
            );
        }
    }
}
