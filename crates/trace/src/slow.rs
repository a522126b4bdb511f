//! Keeps the slowest requests with all their hops.

use crate::latency::Life;
use std::collections::VecDeque;
use std::time::Duration;

/// Keeps requests over a threshold: a bounded number in all, and in each second.
#[derive(Clone, Debug)]
pub struct SlowLog {
    threshold_ns: u64,
    most: usize,
    most_per_second: u32,
    kept: VecDeque<Life>,
    second: u64,
    this_second: u32,
    seen: u64,
    suppressed: u64,
    hidden: u64,
}

impl SlowLog {
    /// Keeps the last `most` requests that took longer than `threshold` from Q to C, at most `most_per_second` in
    /// each second of the events' clock.
    pub fn new(threshold: Duration, most: usize, most_per_second: u32) -> SlowLog {
        SlowLog {
            threshold_ns: u64::try_from(threshold.as_nanos()).unwrap_or(u64::MAX),
            most,
            most_per_second,
            kept: VecDeque::new(),
            second: 0,
            this_second: 0,
            seen: 0,
            suppressed: 0,
            hidden: 0,
        }
    }

    /// Adds a request; true if it is kept, for callers that print it at once.
    pub fn record(&mut self, life: &Life) -> bool {
        if life.total_ns() <= self.threshold_ns {
            return false;
        }
        self.seen += 1;
        let second = life.complete_ns / 1_000_000_000;
        if second != self.second {
            self.second = second;
            self.this_second = 0;
        }
        if self.this_second >= self.most_per_second || self.most == 0 {
            self.suppressed += 1;
            self.hidden += 1;
            return false;
        }
        self.this_second += 1;
        if self.kept.len() == self.most {
            self.kept.pop_front();
            self.suppressed += 1;
        }
        self.kept.push_back(life.clone());
        true
    }

    /// The kept requests, oldest first.
    pub fn kept(&self) -> impl Iterator<Item = &Life> {
        self.kept.iter()
    }

    /// Number of requests over the threshold.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Number of those that [`SlowLog::record`] refused because there were too many in their second.
    pub fn hidden(&self) -> u64 {
        self.hidden
    }

    /// Number of those that are not kept.
    pub fn suppressed(&self) -> u64 {
        self.suppressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use pvblk_block::Op;

    fn life(begin_ns: u64, took_ns: u64) -> Life {
        Life {
            device: Device::new(240, 0),
            id: None,
            submitter: 0,
            op: Op::Read,
            sector: begin_ns,
            sectors: 8,
            error: 0,
            remap_ns: None,
            from: None,
            from_sector: None,
            queue_ns: begin_ns,
            get_ns: None,
            merge_ns: None,
            insert_ns: None,
            issue_ns: None,
            complete_ns: begin_ns + took_ns,
        }
    }

    #[test]
    fn bounded_in_number_and_rate() {
        const SECOND: u64 = 1_000_000_000;
        let mut log = SlowLog::new(Duration::from_nanos(1000), 5, 3);
        assert!(!log.record(&life(0, 1000)));
        let kept = (0..10).filter(|n| log.record(&life(*n, 2000))).count();
        assert_eq!((kept, log.seen(), log.suppressed()), (3, 10, 7));
        for second in 1..=3 {
            assert!(log.record(&life(second * SECOND, 2000)));
        }
        let kept: Vec<u64> = log.kept().map(|l| l.queue_ns).collect();
        assert_eq!(kept, [1, 2, SECOND, 2 * SECOND, 3 * SECOND]);
        assert_eq!((log.seen(), log.suppressed(), log.hidden()), (13, 8, 7));
    }
}
