//! Watermarks: memory that is left, looked at again and again, as it tells sooner than any notification.

use super::files::{limit, number_of};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Where the look after a dear one with plenty of page cache to reclaim waits.
const AFTER_PLENTY: Duration = Duration::from_millis(50);

/// One bound and what is used of it.
pub(super) struct Mark {
    kind: Kind,
    /// Below this many bytes left there is pressure.
    margin: u64,
    /// Nothing can have changed before.
    not_before: Option<Instant>,
    text: Vec<u8>,
}

enum Kind {
    /// `/proc/meminfo`.
    System { meminfo: File },
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
        Ok(Mark::new(Kind::System { meminfo }, margin_of(total)))
    }

    /// A v1 group's limit. `None`: it has none.
    pub fn v1(group: &Path) -> Result<Option<Mark>, String> {
        let names = ["memory.usage_in_bytes", "memory.stat"];
        let limits = ["memory.limit_in_bytes"];
        let keys = ["total_inactive_file", "total_active_file"];
        Mark::group(group, names, &limits, keys)
    }

    /// A v2 group's limits. `None`: it has none.
    pub fn v2(group: &Path) -> Result<Option<Mark>, String> {
        let names = ["memory.current", "memory.stat"];
        let limits = ["memory.high", "memory.max"];
        Mark::group(group, names, &limits, ["inactive_file", "active_file"])
    }

    fn group(
        group: &Path,
        [usage, stat]: [&str; 2],
        limits: &[&str],
        keys: [&'static str; 2],
    ) -> Result<Option<Mark>, String> {
        let open = |name: &str| File::open(group.join(name)).map_err(|e| format!("{name}: {e}"));
        let kind = Kind::Group {
            usage: open(usage)?,
            stat: open(stat)?,
            limits: limits.iter().map(|l| open(l)).collect::<Result<_, _>>()?,
            keys,
        };
        let mut mark = Mark::new(kind, 0);
        let limit = mark.limit();
        Ok(limit.map(|l| {
            mark.margin = margin_of(l);
            mark
        }))
    }

    fn new(kind: Kind, margin: u64) -> Mark {
        Mark {
            kind,
            margin,
            not_before: None,
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

    /// Bytes that may be left at least without being pressure.
    pub fn margin(&self) -> u64 {
        self.margin
    }

    /// True if less is left than the margin.
    pub fn is_low(&mut self, now: Instant) -> bool {
        if self.not_before.is_some_and(|t| now < t) {
            return false;
        }
        self.not_before = None;
        let limit = self.limit();
        let text = &mut self.text;
        let (usage, stat, keys) = match &self.kind {
            Kind::System { meminfo } => {
                let available = read(meminfo, text).and_then(|t| number_of(t, "MemAvailable"));
                let left = available.unwrap_or(u64::MAX);
                if left > 4 * self.margin {
                    self.not_before = Some(now + AFTER_PLENTY / 2);
                }
                return left < self.margin;
            }
            Kind::Group {
                usage, stat, keys, ..
            } => (usage, stat, keys),
        };
        let Some(limit) = limit else { return false };
        let used = read(usage, text).and_then(|t| t.trim().parse().ok());
        let left = limit.saturating_sub(used.unwrap_or(0));
        if left >= self.margin {
            return false;
        }
        // What the page cache holds is as good as free.
        let cache: u64 = read(stat, text)
            .map(|t| keys.iter().filter_map(|k| number_of(t, k)).sum())
            .unwrap_or(0);
        let plenty = left + cache >= 2 * self.margin;
        if plenty {
            self.not_before = Some(now + AFTER_PLENTY);
        }
        left + cache < self.margin
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
        assert!(Mark::v2(&dir).unwrap().is_none());
        write("memory.high", &mib(1024));
        let mut mark = Mark::v2(&dir).unwrap().unwrap();
        assert_eq!(mark.margin(), 32 << 20);
        let now = Instant::now();
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
        assert!(mark.is_low(now + AFTER_PLENTY));
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(Mark::v1(&dir).is_err());
    }

    #[test]
    fn this_machine_tells_what_is_left() {
        let mut mark = Mark::system(Path::new("/proc")).unwrap();
        assert!(mark.margin() > 0);
        mark.is_low(Instant::now());
    }
}
