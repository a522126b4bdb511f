//! Counters of a hardware queue, in the terms of `iostat -x`.

use super::plug::Merged;
use pvblk_block::Op;
use std::time::Instant;

/// Sums since counting began; two of them, subtracted, describe the time between. Names as in iostat(1).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Requests that went to the ring, or will: after merging. Over time: r/s and w/s.
    pub requests: u64,
    /// Requests that were merged into another one. Over time: rrqm/s and wrqm/s.
    pub merged: u64,
    /// Sectors (512 B) of all. Over time and in KiB: rkB/s and wkB/s.
    pub sectors: u64,
    /// Requests that waited for a ring entry or were on the ring, summed over time in seconds. Over time: aqu-sz.
    pub queue_seconds: f64,
    /// The same for requests on the ring alone: in-flight, on average.
    pub ring_seconds: f64,
    /// Time of this measurement, in seconds.
    pub seconds: f64,
}

impl Statistics {
    /// Those of all queues of a device together.
    pub fn add(&mut self, other: &Statistics) {
        self.requests += other.requests;
        self.merged += other.merged;
        self.sectors += other.sectors;
        self.queue_seconds += other.queue_seconds;
        self.ring_seconds += other.ring_seconds;
        self.seconds = self.seconds.max(other.seconds);
    }

    /// The counts since `earlier`.
    pub fn since(&self, earlier: &Statistics) -> Statistics {
        Statistics {
            requests: self.requests - earlier.requests,
            merged: self.merged - earlier.merged,
            sectors: self.sectors - earlier.sectors,
            queue_seconds: self.queue_seconds - earlier.queue_seconds,
            ring_seconds: self.ring_seconds - earlier.ring_seconds,
            seconds: self.seconds - earlier.seconds,
        }
    }
}

/// Counts for one queue, under its lock.
#[derive(Debug)]
pub struct Counting {
    begin: Instant,
    last: Instant,
    sums: Statistics,
}

impl Counting {
    pub fn new() -> Counting {
        let now = Instant::now();
        Counting {
            begin: now,
            last: now,
            sums: Statistics::default(),
        }
    }

    /// Up to now `waiting` requests waited and `in_flight` were on the ring. To be called before either changes.
    pub fn tick(&mut self, waiting: usize, in_flight: usize) {
        let now = Instant::now();
        let time = (now - self.last).as_secs_f64();
        self.last = now;
        self.sums.queue_seconds += (waiting + in_flight) as f64 * time;
        self.sums.ring_seconds += in_flight as f64 * time;
    }

    /// A request is inserted.
    pub fn inserted(&mut self, merged: &Merged) {
        if merged.first.op != Op::Flush {
            self.sums.requests += 1;
            self.sums.merged += merged.rest.len() as u64;
            self.sums.sectors += merged.sectors;
        }
    }

    /// A request that was inserted is merged into one that waits.
    pub fn joined(&mut self) {
        self.sums.requests -= 1;
        self.sums.merged += 1;
    }

    /// The sums now.
    pub fn sums(&self) -> Statistics {
        Statistics {
            seconds: (self.last - self.begin).as_secs_f64(),
            ..self.sums
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn littles_law_holds_for_the_sums() {
        let mut c = Counting::new();
        let before = c.sums();
        let until = Instant::now() + std::time::Duration::from_millis(20);
        while Instant::now() < until {
            c.tick(3, 2);
        }
        let s = c.sums().since(&before);
        assert!((s.queue_seconds / s.seconds - 5.0).abs() < 1e-6);
        assert!((s.ring_seconds / s.seconds - 2.0).abs() < 1e-6);
    }
}
