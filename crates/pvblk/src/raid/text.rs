//! Numbers, ids and times as mdadm writes them.

/// `66.00 MiB 69.21 MB`, by the size's own measure; nothing below a MiB or so.
pub fn human(kib: u64) -> String {
    let bytes = kib as f64 * 1024.0;
    let of = |unit: f64| bytes / unit;
    match kib {
        0..2000 => String::new(),
        2000..2_000_000 => format!(" ({:.2} MiB {:.2} MB)", of(1048576.0), of(1e6)),
        2_000_000..2_000_000_000 => {
            format!(" ({:.2} GiB {:.2} GB)", of(1073741824.0), of(1e9))
        }
        _ => format!(" ({:.2} TiB {:.2} TB)", of(1099511627776.0), of(1e12)),
    }
}

/// `64K`; larger ones too.
pub fn chunk(sectors: u64) -> String {
    format!("{}K", sectors / 2)
}

/// A time of a superblock (seconds since 1970 in its low 40 bits) as ctime(3) writes it, in UTC: `Sat Nov 21 20:36:22 2026`.
pub fn time(stamp: u64) -> String {
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
            assert_eq!(time(stamp), text);
            assert_eq!(time(stamp | 123_456 << 40), text, "microseconds are above");
        }
    }

    #[test]
    fn sizes_are_those_of_mdadm() {
        assert_eq!(human(67584), " (66.00 MiB 69.21 MB)");
        assert_eq!(human(2_097_152), " (2.00 GiB 2.15 GB)");
        assert_eq!(chunk(128), "64K");
        assert_eq!(chunk(2048), "1024K");
    }
}
