//! Merges the events of several servers in order of time.

use crate::{Event, Sorter};

/// Nanoseconds by which one server's events may be out of order among themselves.
const HOLD_BACK_NS: u64 = 200_000_000;
/// Nanoseconds, by the events' own times, for which those of the others wait for a server that sends none: it is late, has no requests, or has ended.
const PATIENCE_NS: u64 = 2_000_000_000;
/// Fewest waiting events that are worth sorting.
const LEAST: usize = 1 << 14;
/// Events beyond which no server is waited for: 128 MiB.
const MOST: usize = 1 << 21;

/// Holds events back until each server has sent younger ones, so that those of a server that is slow to send still come in order.
#[derive(Debug)]
pub struct Merge {
    sorter: Sorter,
    /// Time of the youngest event of each server, 0 before its first.
    newest_ns: Vec<u64>,
    /// Number of waiting events at which they are sorted.
    enough: usize,
}

impl Merge {
    pub fn new(servers: usize) -> Merge {
        Merge {
            sorter: Sorter::default(),
            newest_ns: vec![0; servers],
            enough: LEAST,
        }
    }

    /// Takes an event of the server with this index. Returns those that are due, in order, once there are enough of them.
    pub fn push(&mut self, server: usize, event: Event) -> Vec<Event> {
        let newest = &mut self.newest_ns[server];
        *newest = (*newest).max(event.time_ns);
        self.sorter.input().push(event);
        match self.sorter.input().len() < self.enough {
            true => Vec::new(),
            false => self.due(),
        }
    }

    /// The events that are due now, in order.
    pub fn due(&mut self) -> Vec<Event> {
        let newest_ns = self.newest_ns.iter().max().copied().unwrap_or_default();
        let slowest_ns = self.newest_ns.iter().min().copied().unwrap_or_default();
        let patient_ns = slowest_ns.max(newest_ns.saturating_sub(PATIENCE_NS));
        let mut events = self.take_until(patient_ns.saturating_sub(HOLD_BACK_NS));
        if self.sorter.input().len() > MOST {
            events.append(&mut self.take_until(newest_ns.saturating_sub(HOLD_BACK_NS)));
        }
        events
    }

    /// All events that are left, in order.
    pub fn rest(&mut self) -> Vec<Event> {
        self.take_until(u64::MAX)
    }

    fn take_until(&mut self, until_ns: u64) -> Vec<Event> {
        let events = self.sorter.take_until(until_ns);
        // Sorting looks at all waiting events, so it isn't done for each new one.
        let left = self.sorter.input().len();
        self.enough = (2 * left).min(left.max(MOST)) + LEAST;
        events
    }

    /// Number of events that came after younger ones had been given out.
    pub fn late(&self) -> u64 {
        self.sorter.late()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(time_ns: u64) -> Event {
        Event {
            time_ns,
            ..crate::event::tests::event()
        }
    }

    fn times(events: &[Event]) -> Vec<u64> {
        events.iter().map(|e| e.time_ns).collect()
    }

    #[test]
    fn events_wait_for_a_server_that_is_late() {
        let mut merge = Merge::new(2);
        merge.push(1, at(SECOND / 4));
        for n in 1..=4 {
            merge.push(0, at(n * SECOND / 2));
        }
        assert!(merge.due().is_empty(), "the other one may be late");
        merge.push(1, at(SECOND + 1));
        let until_now = [SECOND / 4, SECOND / 2];
        assert_eq!(times(&merge.due()), until_now);
        let left = [SECOND, SECOND + 1, SECOND * 3 / 2, SECOND * 2];
        assert_eq!(times(&merge.rest()), left);
        assert_eq!(merge.late(), 0);
    }

    #[test]
    fn a_server_without_events_is_waited_for_only_so_long() {
        let mut merge = Merge::new(2);
        merge.push(0, at(SECOND));
        merge.push(0, at(SECOND + PATIENCE_NS));
        assert!(merge.due().is_empty());
        merge.push(0, at(SECOND + PATIENCE_NS + HOLD_BACK_NS + 1));
        assert_eq!(times(&merge.due()), [SECOND]);
        merge.push(1, at(1));
        merge.due();
        assert_eq!(merge.late(), 1);
    }

    #[test]
    fn a_server_without_events_is_waited_for_by_so_many() {
        let mut merge = Merge::new(2);
        let mut given = 0;
        for n in 0..3 * MOST as u64 {
            let events = merge.push(0, at(SECOND + n * 300));
            assert!(events.is_sorted_by_key(|e| e.time_ns));
            given += events.len();
            assert!(merge.sorter.input().len() <= MOST + LEAST);
        }
        assert!(given > MOST, "{given}");
        assert_eq!(given + merge.rest().len(), 3 * MOST);
        assert_eq!(merge.late(), 0);
    }
}
