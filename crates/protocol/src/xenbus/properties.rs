//! A disk's properties, published by the back end when it connects.

use super::Change;
use super::number::{flag, optional_mark, optional_u32, parse_u64, quote};
use pvblk_block::{Error, SECTOR};

/// `VDISK_READONLY` of the `info` bitmap (blkif.h).
const INFO_READ_ONLY: u32 = 4;

/// Keys for [`pvblk_block::Incarnation`], private to pvblk; other front ends ignore unknown keys.
const CACHE_MARK: &str = "x-pvblk-cache";
const CONTENTS_MARK: &str = "x-pvblk-contents";

/// A disk as its back end describes it when it goes to Connected (blkif.h names in brackets).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskProperties {
    /// Capacity in 512-byte sectors (`sectors`).
    pub sectors: u64,
    /// Logical sector in bytes (`sector-size`).
    pub sector_size: u32,
    /// Physical sector in bytes (`physical-sector-size`).
    pub physical_sector_size: u32,
    /// Writes are refused (`info` bit 2, or mode `r`).
    pub read_only: bool,
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `discard-secure`.
    pub discard_secure: bool,
    /// `discard-granularity`, bytes.
    pub discard_granularity: u32,
    /// `feature-persistent` on both sides: grants stay for the life of the connection.
    pub persistent: bool,
    /// `feature-max-indirect-segments`; 0: not offered.
    pub max_indirect_segments: u16,
    /// Another value: writes that were answered and not flushed may be lost (`x-pvblk-cache`; ours). `None`: not told.
    pub cache_mark: Option<u64>,
    /// Another value: all that the disk held is lost (`x-pvblk-contents`; ours). `None`: it isn't lost with the back end.
    pub contents_mark: Option<u64>,
}

/// The keys that describe a disk, without `state` (blkif.h, "Backend Device Properties").
pub fn publish_properties(p: &DiskProperties) -> Vec<Change> {
    let info = if p.read_only { INFO_READ_ONLY } else { 0 };
    let mark = |key, mark: Option<u64>| match mark {
        Some(mark) => Change::set(key, format!("{mark:x}")),
        None => Change::remove(key),
    };
    vec![
        Change::set("sectors", p.sectors),
        Change::set("sector-size", p.sector_size),
        Change::set("physical-sector-size", p.physical_sector_size),
        Change::set("info", info),
        Change::set("mode", if p.read_only { "r" } else { "w" }),
        Change::flag("feature-flush-cache", p.flush),
        Change::flag("feature-barrier", p.barrier),
        Change::flag("feature-persistent", p.persistent),
        Change::flag("feature-discard", p.discard),
        Change::set("discard-granularity", p.discard_granularity),
        Change::set("discard-alignment", 0),
        Change::flag("discard-secure", p.discard_secure),
        mark(CACHE_MARK, p.cache_mark),
        mark(CONTENTS_MARK, p.contents_mark),
    ]
}

/// Reads `sectors` of a disk with this logical sector size in bytes. Errors if it is absent, not a number, not whole
/// logical sectors, or more bytes than fit in 64 bits.
pub fn parse_sectors(
    read: &dyn Fn(&str) -> Option<String>,
    sector_size: u32,
) -> Result<u64, Error> {
    let text = read("sectors").ok_or_else(|| Error::protocol("sectors is missing"))?;
    let sectors = parse_u64("sectors", &text)?;
    if sectors > u64::MAX / SECTOR {
        return Err(Error::protocol(format!(
            "sectors is {sectors}: more bytes than 64 bits count"
        )));
    }
    if !sectors.is_multiple_of(u64::from(sector_size) / SECTOR) {
        return Err(Error::protocol(format!(
            "sectors is {sectors}: not whole sectors of {sector_size} bytes"
        )));
    }
    Ok(sectors)
}

/// Reads a back end's disk, with sectors of 512 or 4096 bytes. The caller adds `max_indirect_segments` and its own
/// wish for persistent grants. Errors name the key.
pub fn parse_properties(read: &dyn Fn(&str) -> Option<String>) -> Result<DiskProperties, Error> {
    let refuse = |why: String| Err(Error::protocol(why));
    let sector_size = optional_u32(read, "sector-size")?.unwrap_or(512);
    if sector_size != 512 && sector_size != 4096 {
        return refuse(format!("sector-size is {sector_size}, not 512 or 4096"));
    }
    let sectors = parse_sectors(read, sector_size)?;
    let physical = optional_u32(read, "physical-sector-size")?.unwrap_or(sector_size);
    if !physical.is_power_of_two() || physical < sector_size {
        return refuse(format!(
            "physical-sector-size is {physical}, not a multiple of {sector_size} by a power of two"
        ));
    }
    let info = optional_u32(read, "info")?.unwrap_or(0);
    let read_only = match read("mode").as_deref() {
        None | Some("w") => info & INFO_READ_ONLY != 0,
        Some("r") => true,
        Some(other) => return refuse(format!("mode is {}, not r or w", quote(other))),
    };
    let discard = flag(read, "feature-discard")?;
    let granularity = optional_u32(read, "discard-granularity")?.unwrap_or(sector_size);
    if discard && (granularity == 0 || !granularity.is_multiple_of(sector_size)) {
        return refuse(format!(
            "discard-granularity is {granularity}, not a multiple of {sector_size}"
        ));
    }
    Ok(DiskProperties {
        sectors,
        sector_size,
        physical_sector_size: physical,
        read_only,
        flush: flag(read, "feature-flush-cache")?,
        barrier: flag(read, "feature-barrier")?,
        discard,
        discard_secure: discard && flag(read, "discard-secure")?,
        discard_granularity: if discard { granularity } else { 0 },
        persistent: flag(read, "feature-persistent")?,
        max_indirect_segments: 0,
        cache_mark: optional_mark(read, CACHE_MARK)?,
        contents_mark: optional_mark(read, CONTENTS_MARK)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xenbus::KeyMap;

    fn disk() -> DiskProperties {
        DiskProperties {
            sectors: 8000,
            sector_size: 4096,
            physical_sector_size: 16384,
            read_only: true,
            flush: true,
            barrier: false,
            discard: true,
            discard_secure: true,
            discard_granularity: 65536,
            persistent: true,
            max_indirect_segments: 0,
            cache_mark: Some(u64::MAX),
            contents_mark: None,
        }
    }

    #[test]
    fn a_disk_survives_its_keys() {
        for p in [
            disk(),
            DiskProperties {
                read_only: false,
                discard: false,
                discard_secure: false,
                discard_granularity: 0,
                cache_mark: None,
                contents_mark: Some(0),
                ..disk()
            },
        ] {
            let mut map = KeyMap::new();
            map.apply(publish_properties(&p)).unwrap();
            let read = |k: &str| map.get(k).map(str::to_owned);
            assert_eq!(parse_properties(&read).unwrap(), p);
        }
    }

    #[test]
    fn a_lying_back_end_is_refused_by_key() {
        for (key, value) in [
            ("sectors", "-1"),
            ("sectors", ""),
            ("sectors", "18446744073709551615"),
            ("sectors", "99999999999999999999999"),
            ("sectors", "7"),
            ("sector-size", "0"),
            ("sector-size", "513"),
            ("sector-size", "8192"),
            ("physical-sector-size", "0"),
            ("physical-sector-size", "2048"),
            ("physical-sector-size", "12288"),
            ("discard-granularity", "0"),
            ("discard-granularity", "5000"),
            ("mode", "rw"),
            ("info", "x"),
            ("x-pvblk-cache", ""),
            ("x-pvblk-cache", "+1"),
            ("x-pvblk-contents", "10000000000000000"),
        ] {
            let mut map = KeyMap::new();
            map.apply(publish_properties(&disk())).unwrap();
            map.apply(vec![Change::set(key, value)]).unwrap();
            let e = parse_properties(&|k| map.get(k).map(str::to_owned)).unwrap_err();
            assert!(e.to_string().contains(key), "{key}={value}: {e}");
        }
        assert!(parse_properties(&|_| None).is_err());
    }
}
