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

/// A time of a superblock as ctime(3) writes it, in UTC.
pub use pvblk_raid5::time_text as time;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_mdadm() {
        assert_eq!(human(67584), " (66.00 MiB 69.21 MB)");
        assert_eq!(human(2_097_152), " (2.00 GiB 2.15 GB)");
        assert_eq!(chunk(128), "64K");
        assert_eq!(chunk(2048), "1024K");
    }
}
