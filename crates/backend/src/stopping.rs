//! [`Stopping`]: the order in which disks are flushed when a process stops. It moves no data and doesn't
//! wait, so that the simulation runs it too.

use std::time::{Duration, Instant};

/// Flushes that run side by side at a stop. Those that take longer than [`SLOW_FLUSH`] aren't counted, so
/// that slow disks hold up no others.
const FLUSHES: usize = 64;
const SLOW_FLUSH: Duration = Duration::from_secs(1);

/// Time limits of a stop, for each disk by itself.
#[derive(Clone, Copy, Debug)]
pub struct StopTimes {
    /// Limit for the disk's requests in flight, and for the responses to be taken.
    pub drain: Duration,
    /// Limit for the flush that follows, and for the device's end.
    pub flush: Duration,
}

/// Progress of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Draining,
    Flushing(Instant),
    Over,
}

/// A stop of several disks, which are numbered.
#[derive(Debug)]
pub struct Stopping {
    times: StopTimes,
    begin: Instant,
    disks: Vec<Stage>,
}

/// The actions that are due now.
#[derive(Debug, Default)]
pub struct Turn {
    /// Disks to be flushed and closed; true if all of the disk's requests have completed.
    pub flush: Vec<(usize, bool)>,
    /// Disks whose flush took too long: they are given up.
    pub stuck: Vec<usize>,
}

impl Stopping {
    /// A stop of `disks` disks that begins at `begin`.
    pub fn new(disks: usize, begin: Instant, times: StopTimes) -> Stopping {
        Stopping {
            times,
            begin,
            disks: vec![Stage::Draining; disks],
        }
    }

    /// The actions that are due at time `now`; `in_use` is true for disks with requests or sources.
    pub fn turn(&mut self, now: Instant, in_use: impl Fn(usize) -> bool) -> Turn {
        let quick = |s: &&Stage| match s {
            Stage::Flushing(since) => now.duration_since(*since) < SLOW_FLUSH,
            Stage::Draining | Stage::Over => false,
        };
        let mut room = FLUSHES.saturating_sub(self.disks.iter().filter(quick).count());
        let late = now >= self.begin + self.times.drain;
        let mut turn = Turn::default();
        for (disk, stage) in self.disks.iter_mut().enumerate() {
            match *stage {
                Stage::Draining => {
                    let drained = !in_use(disk);
                    if room > 0 && (drained || late) {
                        room -= 1;
                        *stage = Stage::Flushing(now);
                        turn.flush.push((disk, drained));
                    }
                }
                Stage::Flushing(since) if now.duration_since(since) >= self.times.flush => {
                    *stage = Stage::Over;
                    turn.stuck.push(disk);
                }
                Stage::Flushing(_) | Stage::Over => {}
            }
        }
        turn
    }

    /// Notes that a disk's flush and its end are done, well or not; false if it was given up
    /// before.
    pub fn ended(&mut self, disk: usize) -> bool {
        let counts = matches!(self.disks[disk], Stage::Flushing(_));
        self.disks[disk] = Stage::Over;
        counts
    }

    /// True if every disk has ended or is given up.
    pub fn is_over(&self) -> bool {
        self.disks.iter().all(|s| *s == Stage::Over)
    }
}
