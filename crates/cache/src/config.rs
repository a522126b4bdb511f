//! Configuration of a cache.

use pvblk_block::Limits;
use std::time::Duration;

/// Bytes of a page and of a frame.
pub const PAGE_BYTES: usize = pvblk_sys::PAGE_SIZE;
/// Sectors (512 B) of a page.
pub const PAGE_SECTORS: u64 = 8;

/// The largest window that may be asked for, in bytes.
const MOST_READAHEAD: u32 = 64 << 20;
/// Linux' default, in bytes.
const USUAL_READAHEAD: u32 = 128 << 10;

/// The moment at which writes complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They complete when they are in the cache; a flush writes them out.
    #[default]
    WriteBack,
    /// They complete when the device has them.
    WriteThrough,
    /// They are refused.
    ReadOnly,
    /// Write-back if nobody else writes to the device ([`Limits::exclusive`]), else write-through: others don't see writes that are held back, and lose theirs
    /// when those come.
    Usual,
}

impl Mode {
    /// The mode over a device with these limits.
    pub fn over(self, below: &Limits) -> Mode {
        match self {
            Mode::Usual if below.exclusive => Mode::WriteBack,
            Mode::Usual => Mode::WriteThrough,
            other => other,
        }
    }
}

/// Size, mode and bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Bytes of all frames together: a multiple of 4096, at least 64 KiB, at most 16 TiB.
    pub size_bytes: u64,
    /// The moment at which writes complete.
    pub mode: Mode,
    /// Longest sleep of one wait for memory.
    pub timeout: Duration,
    /// Largest read-ahead window in bytes, a multiple of 4096; 0: none; `None`: the device's own, and where that is unknown 128 KiB and as much more as
    /// the round trip to the device takes.
    pub readahead_bytes: Option<u32>,
    /// Lists of free frames, one for each CPU; 0: as many as the process may use CPUs.
    pub lists: u32,
    /// Share of the cache in percent that may be dirty before it is written in the background; 1 to 99.
    pub dirty_background_percent: u8,
    /// Share of the cache in percent that may be dirty before writers wait; more than the other, up to 99.
    pub dirty_percent: u8,
    /// Age at which dirty pages are written though there are few.
    pub dirty_expire: Duration,
    /// Largest read or write of the cache itself in bytes, a multiple of 4096.
    pub max_io_bytes: u32,
}

impl CacheConfig {
    /// A cache of `size_bytes` with write-back.
    pub fn new(size_bytes: u64) -> CacheConfig {
        CacheConfig {
            size_bytes,
            mode: Mode::default(),
            timeout: Duration::from_millis(20),
            readahead_bytes: None,
            lists: 0,
            dirty_background_percent: 10,
            dirty_percent: 20,
            dirty_expire: Duration::from_secs(30),
            max_io_bytes: 1 << 20,
        }
    }

    /// The first mistake, in one line.
    pub fn problem(&self) -> Option<String> {
        let page = PAGE_BYTES as u64;
        let text = if !(16 * page..=16 << 40).contains(&self.size_bytes)
            || !self.size_bytes.is_multiple_of(page)
        {
            "a cache's size must be a multiple of 4096 bytes, from 64k to 16T"
        } else if self
            .readahead_bytes
            .is_some_and(|bytes| !u64::from(bytes).is_multiple_of(page) || bytes > MOST_READAHEAD)
        {
            "readahead must be a multiple of 4096 bytes, up to 64M"
        } else if u64::from(self.max_io_bytes) < page
            || !u64::from(self.max_io_bytes).is_multiple_of(page)
        {
            "the largest I/O must be a multiple of 4096 bytes"
        } else if !(1..=99).contains(&self.dirty_background_percent)
            || !(self.dirty_background_percent..=99).contains(&self.dirty_percent)
        {
            "dirty and dirty-background must be 1 to 99 percent, dirty not the smaller one"
        } else {
            return None;
        };
        Some(text.into())
    }

    /// The options of a volume that differ from the defaults, each with its comma.
    pub fn options(&self) -> String {
        let usual = CacheConfig::new(self.size_bytes);
        let mut text = String::new();
        text += match self.mode {
            Mode::WriteBack | Mode::Usual => "",
            Mode::WriteThrough => ",mode=write-through",
            Mode::ReadOnly => ",mode=read-only",
        };
        if let Some(bytes) = self.readahead_bytes {
            text += &format!(",readahead={}k", bytes >> 10);
        }
        if self.dirty_percent != usual.dirty_percent {
            text += &format!(",dirty={}", self.dirty_percent);
        }
        text
    }

    /// Pages of the largest read-ahead window over a device.
    pub(crate) fn most_ahead(&self, below: &Limits) -> u64 {
        let of_device = below.readahead_bytes.clamp(USUAL_READAHEAD, MOST_READAHEAD);
        u64::from(self.readahead_bytes.unwrap_or(of_device)) / PAGE_BYTES as u64
    }

    /// Pages to which the windows of a stream that waits may grow: more than [`CacheConfig::most_ahead`] only where nobody has said how many are right.
    pub(crate) fn most_ahead_of_waiting(&self, below: &Limits) -> u64 {
        match (self.readahead_bytes, below.readahead_bytes) {
            (None, 0) => u64::from(MOST_READAHEAD) / PAGE_BYTES as u64,
            _ => self.most_ahead(below),
        }
    }

    /// Frames of 4 KiB.
    pub fn frames(&self) -> usize {
        (self.size_bytes / PAGE_BYTES as u64) as usize
    }
}
