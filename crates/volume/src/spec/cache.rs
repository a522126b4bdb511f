//! `cache`: a page cache over a volume.

use super::parse::{size, span, unknown};
use pvblk_block::units::{Size, Span};
use pvblk_block::{BlockDevice, Error};
use pvblk_cache::{CacheConfig, Mode, PageCache};
use std::fmt;
use std::sync::Arc;

/// A page cache: `cache:SIZE[,OPTION…]:INNER`.
///
/// | option | is |
/// |---|---|
/// | `mode=write-back` | writes complete when they are in the cache; a flush writes them out (the default, if nobody else can write to the volume below) |
/// | `mode=write-through` | writes complete when the volume below has them (the default for other volumes) |
/// | `mode=read-only` | writes are refused |
/// | `readahead=SIZE` | the largest window; the kernel's for this device (`read_ahead_kb`), at least `128k`, unless given; `0`: none |
/// | `dirty=PERCENT`, `dirty-background=PERCENT` | share that may be dirty before writers wait (20), or before it is written in the background (10) |
/// | `dirty-expire=TIME` | how old dirty pages become (`30s`) |
/// | `wait-time=TIME` | how long a request sleeps at most that finds no free frame after reclaim (`20ms`) |
/// | `lists=N` | lists of free frames; one for each CPU unless given |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpec(pub CacheConfig);

const OPTIONS: &str = "mode=write-back|write-through|read-only, readahead=SIZE, dirty=PERCENT, dirty-background=PERCENT, dirty-expire=TIME, wait-time=TIME, lists=N";

impl CacheSpec {
    /// A cache of `size_bytes` with the defaults.
    pub fn new(size_bytes: u64) -> CacheSpec {
        CacheSpec(CacheConfig {
            mode: Mode::Usual,
            ..CacheConfig::new(size_bytes)
        })
    }

    /// Sets one option.
    pub(super) fn set(&mut self, key: &str, value: Option<&str>) -> Result<(), String> {
        let c = &mut self.0;
        let value = value.ok_or_else(|| unknown(key, OPTIONS))?;
        let wrong = |allowed: &str| {
            let value = value.escape_debug();
            Err(format!("{key} `{value}` is none of {allowed}"))
        };
        let percent = || {
            value
                .parse::<u8>()
                .map_err(|_| format!("{key} `{}` is not a percentage", value.escape_debug()))
        };
        match key {
            "mode" => match value {
                "write-back" => c.mode = Mode::WriteBack,
                "write-through" => c.mode = Mode::WriteThrough,
                "read-only" => c.mode = Mode::ReadOnly,
                _ => return wrong("write-back, write-through, read-only"),
            },
            "wait-time" => c.timeout = span(value)?,
            "dirty-expire" => c.dirty_expire = span(value)?,
            "dirty" => c.dirty_percent = percent()?,
            "dirty-background" => c.dirty_background_percent = percent()?,
            "readahead" => {
                let bytes = size(value)?;
                c.readahead_bytes = Some(u32::try_from(bytes).unwrap_or(u32::MAX));
            }
            "lists" => {
                c.lists = value
                    .parse()
                    .map_err(|_| format!("lists `{}` is not a number", value.escape_debug()))?;
            }
            _ => return Err(unknown(key, OPTIONS)),
        }
        Ok(())
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.0.problem()
    }

    pub(super) fn open(&self, inner: Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>, Error> {
        let cache = PageCache::new(&self.0, inner)?;
        if self.0.mode == Mode::Usual && cache.config().mode == Mode::WriteThrough {
            let below = cache.below();
            if !below.limits().read_only {
                tracing::info!(
                    "cache over {}: others may write there, so writes go through to it; mode=write-back holds them back until a flush",
                    below.describe()
                );
            }
        }
        cache.keep()?;
        Ok(Arc::new(cache))
    }
}

impl fmt::Display for CacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (c, usual) = (&self.0, CacheConfig::new(self.0.size_bytes));
        write!(f, "cache:{}", Size(c.size_bytes))?;
        match c.mode {
            Mode::Usual => {}
            Mode::WriteBack => f.write_str(",mode=write-back")?,
            Mode::WriteThrough => f.write_str(",mode=write-through")?,
            Mode::ReadOnly => f.write_str(",mode=read-only")?,
        }
        if let Some(bytes) = c.readahead_bytes {
            write!(f, ",readahead={}", Size(bytes.into()))?;
        }
        if c.dirty_percent != usual.dirty_percent {
            write!(f, ",dirty={}", c.dirty_percent)?;
        }
        if c.dirty_background_percent != usual.dirty_background_percent {
            write!(f, ",dirty-background={}", c.dirty_background_percent)?;
        }
        if c.dirty_expire != usual.dirty_expire {
            write!(f, ",dirty-expire={}", Span(c.dirty_expire))?;
        }
        if c.timeout != usual.timeout {
            write!(f, ",wait-time={}", Span(c.timeout))?;
        }
        match c.lists {
            0 => Ok(()),
            n => write!(f, ",lists={n}"),
        }
    }
}
