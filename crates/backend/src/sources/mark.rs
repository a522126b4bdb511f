//! Watermarks: memory that is left, looked at again and again, as it tells sooner than any notification.

use super::files::{limit, number_of};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Where the look after a dear one with plenty of page cache to reclaim waits.
const AFTER_PLENTY: Duration = Duration::from_millis(50);
/// How often a group without a limit is asked whether it has one now.
const NO_LIMIT: Duration = Duration::from_millis(100);
/// There is pressure if nothing would be left after this time, were memory taken as fast as since the last look: where nothing can be reclaimed
/// the kernel kills without a warning, and giving back takes its time.
const HORIZON: Duration = Duration::from_millis(60);

/// Rates of less time than that would say nothing.
const SHORTEST: Duration = Duration::from_millis(3);

/// One bound and what is used of it.
pub(super) struct Mark {
    kind: Kind,
    /// Nothing can have changed before.
    not_before: Option<Instant>,
    /// The last look, and the bytes that were left.
    last: Option<(Instant, u64)>,
    text: Vec<u8>,
}

enum Kind {
    /// `/proc/meminfo`.
    System { meminfo: File, total: u64 },
    Group {
        usage: File,
        stat: File,
        limits: Vec<File>,
        keys: [&'static str; 2],
    },
}

/// A part of the limit, but neither nothing nor more than a burst can need.
fn margin_of(total: u64) -> u64 {
    (total / 32).clamp(4 << 20, 256 << 20).min(total / 4)
}

impl Mark {
    /// The machine's memory: `proc/meminfo`.
    pub fn system(proc: &Path) -> Result<Mark, String> {
        let path = proc.join("meminfo");
        let text = std::fs::read_to_string(&path).map_err(|e| e.to_string())?;
        let total = number_of(&text, "MemTotal").ok_or("it tells no MemTotal")?;
        number_of(&text, "MemAvailable").ok_or("it tells no MemAvailable")?;
        let meminfo = File::open(path).map_err(|e| e.to_string())?;
        Ok(Mark::new(Kind::System { meminfo, total }))
    }

    /// A v1 group's limit, which it may get later.
    pub fn v1(group: &Path) -> Result<Mark, String> {
        let names = ["memory.usage_in_bytes", "memory.stat"];
        let limits = ["memory.limit_in_bytes"];
        let keys = ["total_inactive_file", "total_active_file"];
        Mark::group(group, names, &limits, keys)
    }

    /// A v2 group's limits, which it may get later.
    pub fn v2(group: &Path) -> Result<Mark, String> {
        let names = ["memory.current", "memory.stat"];
        let limits = ["memory.high", "memory.max"];
        Mark::group(group, names, &limits, ["inactive_file", "active_file"])
    }

    fn group(
        group: &Path,
        [usage, stat]: [&str; 2],
        limits: &[&str],
        keys: [&'static str; 2],
    ) -> Result<Mark, String> {
        let open = |name: &str| File::open(group.join(name)).map_err(|e| format!("{name}: {e}"));
        let kind = Kind::Group {
            usage: open(usage)?,
            stat: open(stat)?,
            limits: limits.iter().map(|l| open(l)).collect::<Result<_, _>>()?,
            keys,
        };
        Ok(Mark::new(kind))
    }

    fn new(kind: Kind) -> Mark {
        Mark {
            kind,
            not_before: None,
            last: None,
            text: vec![0; 16 << 10],
        }
    }

    fn limit(&mut self) -> Option<u64> {
        let Kind::Group { limits, .. } = &self.kind else {
            return None;
        };
        let text = &mut self.text;
        limits.iter().filter_map(|f| limit(read(f, text)?)).min()
    }

    /// Bytes that may be left at least without being pressure; `None`: there is no limit now.
    pub fn margin(&mut self) -> Option<u64> {
        self.left().map(|(_, margin)| margin)
    }

    /// Below this many bytes left there is pressure.
    fn bound(&mut self, now: Instant, left: u64, margin: u64) -> u64 {
        let since = self.last.map(|(at, _)| now.saturating_duration_since(at));
        if since.is_some_and(|since| since < SHORTEST) {
            return margin;
        }
        let before = self
            .last
            .replace((now, left))
            .map_or(0, |(_, before)| before);
        let fell = before.saturating_sub(left);
        let Some(since) = since.filter(|&since| fell > 0 && since <= NO_LIMIT) else {
            return margin;
        };
        let soon = fell as f64 * HORIZON.as_secs_f64() / since.as_secs_f64();
        margin.max(soon as u64)
    }

    /// What is left changed by what this process gave back: the next rate is of two looks from here on.
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// True if less is left than the margin, or than what will soon be taken.
    pub fn is_low(&mut self, now: Instant) -> bool {
        if self.not_before.is_some_and(|t| now < t) {
            return false;
        }
        self.not_before = None;
        let Some((left, margin)) = self.left() else {
            self.not_before = Some(now + NO_LIMIT);
            return false;
        };
        let bound = self.bound(now, left, margin);
        if left >= bound {
            if let Kind::System { .. } = self.kind
                && left / 4 > bound
            {
                self.not_before = Some(now + AFTER_PLENTY / 2);
            }
            return false;
        }
        // What the page cache holds is as good as free.
        let cache = self.page_cache();
        if (left + cache) / 2 >= bound {
            self.not_before = Some(now + AFTER_PLENTY);
        }
        left + cache < bound
    }

    /// Bytes that are left, and the margin.
    fn left(&mut self) -> Option<(u64, u64)> {
        let limit = self.limit();
        let text = &mut self.text;
        match &self.kind {
            Kind::System { meminfo, total } => {
                let available = number_of(read(meminfo, text)?, "MemAvailable")?;
                Some((available, margin_of(*total)))
            }
            Kind::Group { usage, .. } => {
                let limit = limit?;
                let used = read(usage, text)?.trim().parse().ok()?;
                Some((limit.saturating_sub(used), margin_of(limit)))
            }
        }
    }

    /// Bytes of the page cache that count as used.
    fn page_cache(&mut self) -> u64 {
        let Kind::Group { stat, keys, .. } = &self.kind else {
            return 0;
        };
        let text = read(stat, &mut self.text).unwrap_or_default();
        keys.iter().filter_map(|k| number_of(text, k)).sum()
    }
}

/// A small file of the kernel's, from its beginning.
fn read<'a>(file: &File, text: &'a mut [u8]) -> Option<&'a str> {
    let n = file.read_at(text, 0).ok()?;
    std::str::from_utf8(&text[..n]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_low_when_neither_room_nor_page_cache_is_left() {
        let dir = std::env::temp_dir().join(format!("pvblk-mark-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        let mib = |n: u64| (n << 20).to_string();
        write("memory.current", &mib(500));
        write("memory.high", "max\n");
        write("memory.max", "max\n");
        write("memory.stat", "anon 1\nactive_file 0\ninactive_file 0\n");
        let mut mark = Mark::v2(&dir).unwrap();
        let now = Instant::now();
        // A limit that comes later is seen a little later.
        assert!(mark.margin().is_none() && !mark.is_low(now));
        write("memory.high", &mib(1024));
        assert_eq!(mark.margin(), Some(32 << 20));
        assert!(!mark.is_low(now));
        let now = now + NO_LIMIT;
        assert!(!mark.is_low(now));
        write("memory.current", &mib(1000));
        assert!(mark.is_low(now));
        // A lower limit than before.
        write("memory.current", &mib(500));
        write("memory.max", &mib(510));
        assert!(mark.is_low(now));
        write("memory.stat", "active_file 100000000\n");
        assert!(!mark.is_low(now));
        // That look was dear: the next one waits.
        write("memory.stat", "active_file 0\n");
        assert!(!mark.is_low(now));
        let now = now + AFTER_PLENTY;
        assert!(mark.is_low(now));
        // Enough is left, but 40 MiB less than 4 ms ago, so that it won't last for 60 ms.
        write("memory.max", "max\n");
        write("memory.current", &mib(500));
        assert!(!mark.is_low(now + Duration::from_secs(1)));
        write("memory.current", &mib(540));
        let now = now + Duration::from_millis(1004);
        assert!(mark.is_low(now));
        // Slower than that.
        write("memory.current", &mib(541));
        assert!(!mark.is_low(now + Duration::from_millis(4)));
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(Mark::v1(&dir).is_err());
    }

    #[test]
    fn this_machine_tells_what_is_left() {
        let mut mark = Mark::system(Path::new("/proc")).unwrap();
        assert!(mark.margin() > Some(0));
        mark.is_low(Instant::now());
    }
}
