//! Watermarks: memory that is left, looked at again and again, which shows pressure sooner than any
//! notification.

use super::files::{limit, number_of};
use pvblk_sys::EventFd;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval between two looks at a watermark, at least and at most.
const LOOK: Duration = Duration::from_millis(4);
/// The interval while the use of memory is still and the kernel has a threshold event.
const LOOK_STILL: Duration = Duration::from_millis(25);
/// Bytes by which the use has to change to count as moving.
const MOVES: u64 = 256 << 10;
/// A threshold event is set this many bytes above the current use.
const THRESHOLD_ABOVE: u64 = 8 << 20;
/// Watermarks whose looks are due within this time are looked at together.
const TOGETHER: Duration = Duration::from_millis(2);
/// The interval while one thread can't take what is left.
const LOOK_FAR: Duration = Duration::from_millis(50);
/// The interval while all CPUs together can't take what is left, and nobody is at the limit's file: a look
/// costs some 100 us of CPU on a machine that sleeps.
const LOOK_FARTHEST: Duration = Duration::from_secs(10);
/// After somebody opened the file of a limit the limit is read often for this time: the kernel may reclaim and
/// kill while it is being written, and tells the write when it is over.
const MAY_WRITE: Duration = Duration::from_secs(2);
/// Greatest rate at which one thread takes memory, in bytes a millisecond: one that touches large pages.
const FASTEST: u64 = 4 << 20;
/// Most threads that take memory at that rate: memory itself isn't faster.
const THREADS: u64 = 16;
/// Bytes that may be taken at that rate while pools are given back.
const MEANWHILE: u64 = 128 << 20;
/// Interval at which a group's limit is read while somebody may write it.
const ASK_LIMIT: Duration = Duration::from_millis(50);
/// Longest time between two looks from which a rate is computed.
const SAME_RATE: Duration = Duration::from_millis(100);
/// There is pressure if no memory would be left after this time, were it taken as fast as since the last
/// look: where no memory can be reclaimed the kernel kills without a warning, and giving back takes its time.
const HORIZON: Duration = Duration::from_millis(60);

/// Shortest time from which a rate is computed.
const SHORTEST: Duration = Duration::from_millis(3);

/// One limit and the memory that is used of it.
pub(super) struct Watermark {
    kind: Kind,
    /// No pressure is possible before this time.
    next_look: Option<Instant>,
    /// From this time on this watermark joins the looks of others.
    join_look: Option<Instant>,
    /// Time of the last look, and the bytes that were left.
    last: Option<(Instant, u64)>,
    /// A group's limit, if it has one, and the time at which it was read.
    limit: Option<(Instant, Option<u64>)>,
    /// [`Watermark::limit_opened`] is called when somebody opens or writes the group's limit; until this time
    /// somebody may write it without another call.
    limit_told: Option<Instant>,
    /// Threads of this machine that can take memory at once.
    threads: u64,
    threshold: Option<Threshold>,
    /// Bytes of use at which a threshold event should be set.
    threshold_at: Option<u64>,
    text: Vec<u8>,
}

/// A v1 group's threshold event: signalled when its use reaches this many bytes
/// (Documentation/admin-guide/cgroup-v1/memory.rst, 9).
struct Threshold {
    at: u64,
    event: EventFd,
}

enum Kind {
    /// `/proc/meminfo`.
    System { meminfo: File, total: u64 },
    Group {
        usage: File,
        stat: File,
        limits: Vec<(PathBuf, File)>,
        keys: [&'static str; 2],
        /// The file of a v1 group to which threshold events are written.
        control: Option<PathBuf>,
    },
}

/// The margin for a limit: a part of it, but neither nothing nor more than a burst can need.
fn margin_of(total: u64) -> u64 {
    (total / 32).clamp(4 << 20, 256 << 20).min(total / 4)
}

/// CPUs that this machine has or may get.
fn cpus() -> u64 {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = list.trim().rsplit(['-', ',']).next();
    let last = last.and_then(|last| last.parse::<u64>().ok());
    last.map_or(THREADS, |last| last + 1)
}

impl Watermark {
    /// The watermark of the machine's memory, from `/proc/meminfo`.
    pub fn system(proc: &Path) -> Result<Watermark, String> {
        let path = proc.join("meminfo");
        let text = std::fs::read_to_string(&path).map_err(|e| e.to_string())?;
        let total = number_of(&text, "MemTotal").ok_or("it tells no MemTotal")?;
        number_of(&text, "MemAvailable").ok_or("it tells no MemAvailable")?;
        let meminfo = File::open(path).map_err(|e| e.to_string())?;
        Ok(Watermark::new(Kind::System { meminfo, total }))
    }

    /// The watermark of a v1 group's limit, which may be set later.
    pub fn v1(group: &Path) -> Result<Watermark, String> {
        let names = ["memory.usage_in_bytes", "memory.stat"];
        let limits = ["memory.limit_in_bytes"];
        let keys = ["total_inactive_file", "total_active_file"];
        Watermark::group(group, names, &limits, keys)
    }

    /// The watermark of a v2 group's limits, which may be set later.
    pub fn v2(group: &Path) -> Result<Watermark, String> {
        let names = ["memory.current", "memory.stat"];
        let limits = ["memory.high", "memory.max"];
        Watermark::group(group, names, &limits, ["inactive_file", "active_file"])
    }

    fn group(
        group: &Path,
        [usage, stat]: [&str; 2],
        limits: &[&str],
        keys: [&'static str; 2],
    ) -> Result<Watermark, String> {
        let open = |name: &str| File::open(group.join(name)).map_err(|e| format!("{name}: {e}"));
        let limit = |name: &&str| Ok((group.join(name), open(name)?));
        let kind = Kind::Group {
            usage: open(usage)?,
            stat: open(stat)?,
            limits: limits.iter().map(limit).collect::<Result<_, String>>()?,
            keys,
            control: Some(group.join("cgroup.event_control")).filter(|c| c.exists()),
        };
        Ok(Watermark::new(kind))
    }

    fn new(kind: Kind) -> Watermark {
        Watermark {
            kind,
            next_look: None,
            join_look: None,
            last: None,
            limit: None,
            limit_told: None,
            threads: cpus().clamp(1, THREADS),
            threshold: None,
            threshold_at: None,
            text: vec![0; 16 << 10],
        }
    }

    /// Files with the group's limits.
    pub fn limit_files(&self) -> impl Iterator<Item = &Path> {
        let limits = match &self.kind {
            Kind::System { .. } => &[][..],
            Kind::Group { limits, .. } => limits,
        };
        limits.iter().map(|(path, _)| &**path)
    }

    /// From now on [`Watermark::limit_opened`] is called when somebody opens or writes one of the limits.
    pub fn tell_limit(&mut self, now: Instant) {
        self.limit_told = Some(now);
    }

    /// Somebody has opened or written a limit, which is read soon. A task that opens it again and again causes no more looks than there are where nothing is told.
    pub fn limit_opened(&mut self, now: Instant) {
        if let Some(until) = &mut self.limit_told {
            *until = now + MAY_WRITE;
            let next = self.next_look.map(|at| at.min(now + ASK_LIMIT));
            self.next_look = next;
        }
    }

    /// Longest time from now to the next look.
    fn farthest(&self, now: Instant) -> Duration {
        let is_group = matches!(self.kind, Kind::Group { .. });
        match is_group && self.limit_told.is_none_or(|until| now < until) {
            true => ASK_LIMIT,
            false => LOOK_FARTHEST,
        }
    }

    fn limit(&mut self, now: Instant) -> Option<u64> {
        let Kind::Group { limits, .. } = &self.kind else {
            return None;
        };
        let is_fresh = |(at, _): &(Instant, _)| now < *at + ASK_LIMIT;
        if self.limit.as_ref().is_none_or(|l| !is_fresh(l)) {
            let text = &mut self.text;
            let limits = limits.iter();
            let limit = limits.filter_map(|(_, f)| limit(read(f, text)?)).min();
            if self.limit.is_some_and(|(_, before)| before != limit) {
                // A lower limit isn't memory that was taken.
                self.last = None;
            }
            self.limit = Some((now, limit));
        }
        self.limit.and_then(|(_, limit)| limit)
    }

    /// Time from now in which tasks that touch memory can't take so many bytes. Huge pages can be set aside faster.
    fn time_to_take(&self, bytes: u64, now: Instant) -> Duration {
        let spare = bytes.saturating_sub(MEANWHILE);
        let one = Duration::from_millis(spare / FASTEST).min(LOOK_FAR);
        let all = Duration::from_millis(spare / (FASTEST * self.threads));
        one.max(all.min(self.farthest(now)))
    }

    /// Least number of bytes left that isn't pressure; `None`: there is no limit now.
    pub fn margin(&mut self, now: Instant) -> Option<u64> {
        self.left(now).map(|(_, margin)| margin)
    }

    /// Number of bytes left below which there is pressure.
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
        let Some(since) = since.filter(|&since| fell > 0 && since <= SAME_RATE) else {
            return margin;
        };
        let soon = fell as f64 * HORIZON.as_secs_f64() / since.as_secs_f64();
        margin.max(soon as u64)
    }

    /// To be called when this process gave memory back: the next rate is computed from two looks from here
    /// on.
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// Time of the next look.
    pub fn next_look(&self, now: Instant) -> Instant {
        self.next_look.unwrap_or(now)
    }

    /// True if the time of the next look has come, or comes within [`TOGETHER`]: a look now saves a wake-up.
    pub fn is_due(&self, now: Instant) -> bool {
        self.next_look(now) <= now + TOGETHER
    }

    /// True if a look that another watermark needs is to be made here, too: half of the wait is over, and [`LOOK_FAR`]. So watermarks that
    /// nobody can come near share a wake-up, although their waits differ.
    pub fn joins(&self, now: Instant) -> bool {
        self.is_due(now) || self.join_look.is_some_and(|at| at <= now)
    }

    fn look_after(&mut self, now: Instant, wait: Duration) {
        self.next_look = Some(now + wait);
        self.join_look = Some(now + (wait / 2).max(LOOK_FAR));
    }

    /// A new threshold event, if the kernel has them, the last look found that the use doesn't move, and
    /// there is none nearby.
    pub fn new_threshold(&mut self) -> Option<&EventFd> {
        let at = self.threshold_at.take()?;
        let Kind::Group {
            control: Some(control),
            usage,
            ..
        } = &self.kind
        else {
            return None;
        };
        // The kernel forgets an event whose descriptor is closed.
        self.threshold = None;
        let event = EventFd::new().ok()?;
        let text = format!("{} {} {at}", event.number(), usage.as_raw_fd());
        std::fs::write(control, text).ok()?;
        let threshold = self.threshold.insert(Threshold { at, event });
        Some(&threshold.event)
    }

    /// True if a threshold event will come soon after the use begins to grow; if there is none and the use
    /// doesn't move, one is asked for.
    fn has_threshold(&mut self, used: u64, margin_at: u64) -> bool {
        let near = used + THRESHOLD_ABOVE / 4..=used + THRESHOLD_ABOVE * 2;
        let is_good = |b: &Threshold| b.at == margin_at || b.at < margin_at && near.contains(&b.at);
        let has = self.threshold.as_ref().is_some_and(is_good);
        self.threshold_at = (!has).then_some(margin_at.min(used + THRESHOLD_ABOVE));
        has
    }

    /// The threshold event came: the watermark is to be looked at now.
    pub fn rang(&mut self) {
        if let Some(threshold) = &self.threshold {
            threshold.event.drain();
        }
        self.next_look = None;
    }

    /// True if less is left than the margin, or than will soon be taken.
    pub fn is_low(&mut self, now: Instant) -> bool {
        let Some((left, margin)) = self.left(now) else {
            self.look_after(now, self.farthest(now));
            return false;
        };
        let is_still = self.last.is_some_and(|(_, l)| l.abs_diff(left) < MOVES);
        let bound = self.bound(now, left, margin);
        if left >= bound {
            let limit = self.limit.and_then(|(_, limit)| limit).unwrap_or(left);
            let (used, margin_at) = (limit.saturating_sub(left), limit.saturating_sub(margin));
            let least = match is_still && self.has_threshold(used, margin_at) {
                true => LOOK_STILL,
                false => LOOK,
            };
            self.look_after(now, self.time_to_take(left - bound, now).max(least));
            return false;
        }
        // Memory of the page cache is as good as free; reading its size is expensive.
        let cache = self.page_cache();
        let wait = match ((left + cache) / 2).checked_sub(bound) {
            Some(more) => self.time_to_take(more, now).max(LOOK_FAR),
            None => LOOK,
        };
        self.look_after(now, wait);
        left + cache < bound
    }

    /// A cheap look while there is nothing to give: it says only when the next one is due.
    pub fn glance(&mut self, now: Instant) {
        let far = match self.left(now) {
            Some((left, margin)) => self.time_to_take(left.saturating_sub(margin), now),
            None => self.farthest(now),
        };
        self.look_after(now, far.max(LOOK_FAR));
    }

    /// Bytes that are left, and the margin.
    fn left(&mut self, now: Instant) -> Option<(u64, u64)> {
        let limit = self.limit(now);
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

/// Reads a small file of the kernel's, from its beginning.
fn read<'a>(file: &File, text: &'a mut [u8]) -> Option<&'a str> {
    let n = file.read_at(text, 0).ok()?;
    std::str::from_utf8(&text[..n]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::tests::TestGroup;

    #[test]
    fn a_group_is_low_when_neither_room_nor_page_cache_is_left() {
        let group = TestGroup::v2("mark");
        let write = |name: &str, text: &str| group.write(name, text);
        let mib = |n: u64| (n << 20).to_string();
        write("memory.current", &mib(500));
        let mut mark = Watermark::v2(group.path()).unwrap();
        let now = Instant::now();
        // A limit that is set later is seen a little later.
        assert!(mark.margin(now).is_none() && !mark.is_low(now));
        write("memory.high", &mib(1024));
        let now = now + ASK_LIMIT;
        assert_eq!(mark.margin(now), Some(32 << 20));
        assert!(!mark.is_low(now));
        let now = now + ASK_LIMIT;
        assert!(!mark.is_low(now));
        write("memory.current", &mib(1000));
        assert!(mark.is_low(now));
        // A lower limit than before.
        write("memory.current", &mib(500));
        write("memory.max", &mib(510));
        let now = now + ASK_LIMIT;
        assert!(mark.is_low(now));
        write("memory.stat", "active_file 100000000\n");
        assert!(!mark.is_low(now));
        // That look was expensive: the next one waits.
        write("memory.stat", "active_file 0\n");
        assert_eq!(mark.next_look(now), now + LOOK_FAR);
        let now = now + LOOK_FAR;
        assert!(mark.is_low(now));
        // A watermark that is far from pressure is looked at less often.
        write("memory.max", &mib(510 + 32 + 128 + 60));
        mark.forget();
        let now = now + ASK_LIMIT;
        assert!(!mark.is_low(now));
        let wait = mark.next_look(now) - now;
        assert!(wait > 3 * LOOK && wait < LOOK_FAR, "{wait:?}");
        mark.forget();
        write("memory.max", &mib(500 + 34));
        let now = now + ASK_LIMIT;
        assert!(!mark.is_low(now) && mark.next_look(now) - now == LOOK);
        // Enough is left, but 40 MiB less than 4 ms ago, so that it won't last for 60 ms.
        write("memory.max", "max\n");
        write("memory.current", &mib(500));
        assert!(!mark.is_low(now + Duration::from_secs(1)));
        write("memory.current", &mib(540));
        let now = now + Duration::from_millis(1004);
        assert!(mark.is_low(now));
        // The use grows more slowly than that.
        write("memory.current", &mib(541));
        assert!(!mark.is_low(now + Duration::from_millis(4)));
        let path = group.path().to_owned();
        drop(group);
        assert!(Watermark::v1(&path).is_err());
    }

    #[test]
    fn a_threshold_is_set_where_the_use_is_still_and_again_where_it_has_moved_to() {
        let mib = |n: u64| (n << 20).to_string();
        let files = [
            ("memory.usage_in_bytes", &*mib(600)),
            ("memory.stat", "total_active_file 0\n"),
            ("memory.limit_in_bytes", &*mib(640)),
            ("cgroup.event_control", ""),
        ];
        let group = TestGroup::new("threshold", &files);
        let mut mark = Watermark::v1(group.path()).unwrap();
        let mut now = Instant::now();
        for used in [600, 610, 617] {
            group.write("memory.usage_in_bytes", &mib(used));
            // The use counts as moving after `forget`; then as still.
            mark.forget();
            now += LOOK;
            assert!(!mark.is_low(now) && mark.next_look(now) - now < LOOK_STILL);
            assert!(mark.new_threshold().is_none());
            now += LOOK;
            assert!(!mark.is_low(now) && mark.next_look(now) - now < LOOK_STILL);
            let number = mark.new_threshold().expect("a threshold").number();
            let text = std::fs::read_to_string(group.path().join("cgroup.event_control"));
            let text = text.unwrap();
            let words: Vec<_> = text.split(' ').collect();
            assert_eq!(
                (words[0], words[2]),
                (&*number.to_string(), &*mib((used + 8).min(620)))
            );
            now += LOOK;
            assert!(!mark.is_low(now) && mark.next_look(now) - now == LOOK_STILL);
            assert!(mark.new_threshold().is_none());
            mark.rang();
            assert_eq!(mark.next_look(now), now);
        }
    }

    #[test]
    fn a_watermark_that_nobody_can_come_near_is_looked_at_seldom() {
        let group = TestGroup::v2("far");
        let write = |name: &str, text: &str| group.write(name, text);
        write("memory.max", &(1u64 << 40).to_string());
        let mut mark = Watermark::v2(group.path()).unwrap();
        mark.threads = 2;
        let start = Instant::now();
        let wait = |mark: &mut Watermark, now| {
            assert!(!mark.is_low(now));
            let wait = mark.next_look(now) - now;
            // Another watermark's look brings a far one forward, but not while the last one is fresh.
            let least = (wait / 2).max(LOOK_FAR);
            if wait > LOOK_FAR + TOGETHER {
                assert!(!mark.joins(now + least - Duration::from_millis(1)));
                assert!(mark.joins(now + least) && !mark.is_due(now + least));
            }
            wait
        };
        // Its limit may change unseen.
        assert_eq!(wait(&mut mark, start), ASK_LIMIT);
        mark.tell_limit(start);
        assert_eq!(wait(&mut mark, start), LOOK_FARTHEST);
        mark.limit_opened(start);
        assert_eq!(mark.next_look(start) - start, ASK_LIMIT);
        assert_eq!(wait(&mut mark, start), ASK_LIMIT);
        let start = start + MAY_WRITE;
        assert_eq!(wait(&mut mark, start), LOOK_FARTHEST);
        // Two threads can take 4 GiB in half a second.
        write("memory.max", &(4u64 << 30).to_string());
        let start = start + ASK_LIMIT;
        let some = wait(&mut mark, start);
        let half = Duration::from_millis(500);
        assert!(some > half - LOOK_FAR && some < half, "{some:?}");
        mark.glance(start);
        assert_eq!(mark.next_look(start) - start, some);
        // A limit that is set later is told.
        write("memory.max", "max\n");
        let start = start + ASK_LIMIT;
        assert_eq!(wait(&mut mark, start), LOOK_FARTHEST);
        // Its page cache can be had, but only as fast as anything else.
        write("memory.max", &(4u64 << 30).to_string());
        write("memory.current", &((4u64 << 30) - 1).to_string());
        write("memory.stat", &format!("active_file {}\n", 3u64 << 30));
        mark.forget();
        let start = start + ASK_LIMIT;
        let some = wait(&mut mark, start);
        assert!(some > LOOK_FAR && some < half, "{some:?}");
        mark.glance(start);
        assert_eq!(mark.next_look(start) - start, LOOK_FAR);
    }

    #[test]
    fn this_machine_tells_what_is_left() {
        let mut mark = Watermark::system(Path::new("/proc")).unwrap();
        let now = Instant::now();
        assert!(mark.margin(now) > Some(0));
        mark.is_low(now);
    }
}
