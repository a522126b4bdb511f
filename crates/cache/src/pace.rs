//! [`Pace`]: how large the windows of a stream have to be where a round trip to the device takes longer than the use of a window.
//!
//! A stream that waits for pages which are on their way already uses them faster than they come: either too few are on their way, or the device gives no more. Only a larger
//! window can tell. So the window of such a stream is doubled, and its rate (pages between two marks, by the time between them) is measured before and after over several windows.
//! If the rate grew, the larger window is kept, and the next doubling is tried; else the window goes back, and rests for a while. A stream that doesn't wait any more has
//! reached its own speed, and its window stays. So windows end at the product of bandwidth and delay, rounded up to a doubling, without knowing either.
//!
//! ```text
//!            waits: doubled                  rate grew
//!  steady ────────────────────▶ settling ──▶ measured ──▶ steady
//!    ▲                                          │ it didn't: halved
//!    └───────────── a rest is over ◀── resting ◀┘
//! ```

use std::time::{Duration, Instant};

/// Marks that the old window's rate is still seen at after a change.
const SETTLE: u32 = 3;
/// Marks over which a rate is measured.
const MEASURE: u32 = 4;
/// Marks of a rest after a larger window that brought nothing.
const REST: u32 = 64;
/// Least growth of the rate that keeps a window that was doubled.
const GROWTH: f64 = 1.1;

/// The size that the windows of one stream may have, and the way to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Pages, or 0: as without it.
    most: u64,
    /// The stream waited for a page that was on its way since the measurement began.
    waits: bool,
    phase: Phase,
    /// The page of the last mark, and its time.
    last: Option<(u64, Instant)>,
    /// Pages, time and marks since the measurement began.
    pages: u64,
    time: Duration,
    marks: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Phase {
    #[default]
    Steady,
    /// The window was doubled at a rate of so many pages a second.
    Doubled { before: f64, settle: u32 },
    /// Doubling brought nothing; so many marks until it is tried again.
    Resting(u32),
}

impl Pace {
    /// Pages of the largest window of the stream, which has at least `base` and at most `limit`.
    pub fn most(&self, base: u64, limit: u64) -> u64 {
        self.most.clamp(base, limit.max(base))
    }

    /// True if windows are larger than they are without it: then the next one is to begin early, so that two are on their way.
    pub fn is_early(&self) -> bool {
        self.most > 0
    }

    /// The stream waits for a page that was read in advance and is on its way.
    pub fn waits(&mut self) {
        self.waits = true;
    }

    /// The stream's mark at `page` is met, and its last window had `size` pages.
    pub fn marked(&mut self, page: u64, now: Instant, size: u64, (base, limit): (u64, u64)) {
        let last = self.last.replace((page, now));
        let Some((from, since)) = last.filter(|&(from, _)| from < page) else {
            self.forget();
            return;
        };
        if size < self.most(base, limit) {
            // Windows are still growing, as they do at the beginning of a stream.
            self.forget();
            return;
        }
        match &mut self.phase {
            Phase::Resting(0) => self.phase = Phase::Steady,
            Phase::Resting(marks) => {
                *marks -= 1;
                return;
            }
            Phase::Doubled { settle, .. } if *settle > 0 => {
                *settle -= 1;
                self.forget();
                return;
            }
            Phase::Doubled { .. } | Phase::Steady => {}
        }
        self.pages += page - from;
        self.time += now.saturating_duration_since(since);
        self.marks += 1;
        if self.marks < MEASURE {
            return;
        }
        let rate = self.pages as f64 / self.time.as_secs_f64().max(1e-9);
        // One that waited at none of them is as fast as its reader. Windows that come in pairs are waited for at every second mark.
        let waits = self.waits;
        self.forget();
        if let Phase::Doubled { before, .. } = self.phase {
            if rate < GROWTH * before {
                self.most = match self.most / 2 {
                    half if half > base => half,
                    _ => 0,
                };
                self.phase = Phase::Resting(REST);
                return;
            }
            self.phase = Phase::Steady;
        }
        let most = self.most(base, limit);
        if waits && most < limit {
            self.most = (2 * most).min(limit);
            self.phase = Phase::Doubled {
                before: rate,
                settle: SETTLE,
            };
        }
    }

    /// Begins a measurement anew.
    fn forget(&mut self) {
        (self.pages, self.time, self.marks) = (0, Duration::ZERO, 0);
        self.waits = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 32;
    const LIMIT: u64 = 4096;

    /// Meets `marks` marks of a stream whose windows are as large as they may be, over a device that gives at most `device` pages a second and `window` pages in each
    /// millisecond, to a reader that takes `reader` pages a second.
    fn run(pace: &mut Pace, (at, now): &mut (u64, Instant), marks: u32, device: f64, reader: f64) {
        for _ in 0..marks {
            let size = pace.most(BASE, LIMIT);
            // Two windows are on their way in a round trip of 1 ms.
            let by_delay = 2.0 * size as f64 / 1e-3;
            let rate = by_delay.min(device).min(reader);
            if rate < reader {
                pace.waits();
            }
            *at += size;
            *now += Duration::from_secs_f64(size as f64 / rate);
            pace.marked(*at, *now, size, (BASE, LIMIT));
        }
    }

    #[test]
    fn windows_grow_until_the_reader_does_not_wait() {
        let (mut pace, mut place) = (Pace::default(), (0, Instant::now()));
        // 200 pages in a millisecond are two windows of 100.
        run(&mut pace, &mut place, 200, f64::MAX, 200_000.0);
        assert_eq!(pace.most(BASE, LIMIT), 128);
        run(&mut pace, &mut place, 1000, f64::MAX, 200_000.0);
        assert_eq!(pace.most(BASE, LIMIT), 128);
        // A faster one has more.
        run(&mut pace, &mut place, 200, f64::MAX, f64::MAX);
        assert_eq!(pace.most(BASE, LIMIT), LIMIT);
    }

    #[test]
    fn windows_do_not_grow_beyond_what_the_device_gives() {
        for device in [20_000.0, 250_000.0] {
            let (mut pace, mut place) = (Pace::default(), (0, Instant::now()));
            let fills = (device * 1e-3 / 2.0) as u64;
            let mut most = 0;
            for _ in 0..2000 {
                run(&mut pace, &mut place, 1, device, f64::MAX);
                most = most.max(pace.most(BASE, LIMIT));
            }
            // Between tries it is the size that fills the pipeline, rounded up to a doubling; a try is twice that.
            assert!(most <= (4 * fills).max(2 * BASE), "{device}: {most}");
            let now = pace.most(BASE, LIMIT);
            assert!(now >= fills.max(BASE), "{device}: {now}");
        }
    }

    #[test]
    fn one_that_does_not_wait_keeps_the_windows_that_it_has() {
        let (mut pace, mut place) = (Pace::default(), (0, Instant::now()));
        run(&mut pace, &mut place, 1000, f64::MAX, 10_000.0);
        assert_eq!((pace.most(BASE, LIMIT), pace.is_early()), (BASE, false));
        // Small windows at a stream's beginning aren't measured.
        for page in 1..100 {
            pace.waits();
            let now = place.1 + Duration::from_millis(page);
            pace.marked(place.0 + page, now, 4, (BASE, LIMIT));
        }
        assert_eq!(pace.most(BASE, LIMIT), BASE);
    }
}
