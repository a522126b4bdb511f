//! Requests that wait in a hardware queue: for a tag, or until the device can use them.

use super::plug::{MergeLimits, Merged};
use pvblk_block::Op;
use pvblk_block::planted::{self, Plant};
use std::collections::VecDeque;

/// Waiting requests that a new one is compared with. Linux finds any request by its end.
const LOOK_BACK: usize = 256;

/// The requests of a hardware queue that aren't on its ring.
///
/// Invariant: a held request overlaps none that came after it and is not held, so those may go first.
#[derive(Debug, Default)]
pub struct Backlog {
    /// They go to the ring as tags go round, oldest first.
    ready: VecDeque<Merged>,
    /// They wait while the limit is in flight, oldest first.
    held: VecDeque<Held>,
}

#[derive(Debug)]
struct Held {
    merged: Merged,
    /// Number of the answer with which it becomes ready, whatever is in flight then.
    until: u64,
    /// Its submitter hasn't polled since, so more of the stream may follow at once.
    plugged: bool,
}

impl Backlog {
    /// Requests that wait, of both kinds.
    #[inline]
    pub fn len(&self) -> usize {
        self.ready.len() + self.held.len()
    }

    /// Requests that wait for a tag.
    #[inline]
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// True if requests are held.
    #[inline]
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// The requests that wait for a tag, newest first.
    pub fn newest(&self) -> impl Iterator<Item = &Merged> {
        self.ready.iter().rev()
    }

    /// Adds one that waits for a tag, as the last.
    #[inline]
    pub fn push(&mut self, merged: Merged) {
        self.ready.push_back(merged);
    }

    /// Puts one back that was taken, or parts of it.
    pub fn put_back(&mut self, merged: Merged) {
        self.ready.push_front(merged);
    }

    /// Takes the oldest that waits for a tag.
    #[inline]
    pub fn pop(&mut self) -> Option<Merged> {
        self.ready.pop_front()
    }

    /// Adds one that is held: until `until` answers are there, or its submitter has polled and there is room.
    pub fn hold(&mut self, merged: Merged, until: u64) {
        self.held.push_back(Held {
            merged,
            until,
            plugged: true,
        });
    }

    /// The newest request that is held and ends where `next` begins, or with `ready` that waits for a tag; `None` if `next` would pass one that it
    /// overlaps.
    pub fn continued_by(
        &mut self,
        next: &Merged,
        limits: &MergeLimits,
        ready: bool,
    ) -> Option<&mut Merged> {
        if ready {
            let at = find(self.ready.iter(), next, limits)?;
            return self.ready.get_mut(at);
        }
        let at = find(self.held.iter().map(|held| &held.merged), next, limits)?;
        self.held.get_mut(at).map(|held| &mut held.merged)
    }

    /// `next` is to wait for a tag: where it may not pass those that are held, they become ready before it.
    pub fn make_way(&mut self, next: &Merged) {
        let stays = next.first.op == Op::Flush;
        if stays || self.held.iter().any(|held| held.merged.overlaps(next)) {
            self.release_all();
        }
    }

    /// `owner` polls or sleeps: it has submitted all that it wanted to for now.
    pub fn unplug(&mut self, owner: u32) {
        let own = |held: &&mut Held| held.merged.owner == owner;
        self.held
            .iter_mut()
            .filter(own)
            .for_each(|held| held.plugged = false);
    }

    /// True if [`Backlog::release`] would make one ready.
    pub fn releases(&self, room: usize, answers: u64) -> bool {
        let oldest = self.held.front();
        oldest.is_some_and(|held| room > 0 && !held.plugged || held.until <= answers)
    }

    /// Makes the oldest held requests ready: `room` of them, and those that have waited for their number of `answers`.
    pub fn release(&mut self, mut room: usize, answers: u64) {
        while self.releases(room, answers) {
            room = room.saturating_sub(1);
            self.ready
                .extend(self.held.pop_front().map(|held| held.merged));
        }
    }

    /// Makes all held requests ready.
    pub fn release_all(&mut self) {
        self.ready
            .extend(self.held.drain(..).map(|held| held.merged));
    }

    /// Drops the requests of `owner`.
    pub fn forget(&mut self, owner: u32) {
        self.ready.retain(|merged| merged.owner != owner);
        self.held.retain(|held| held.merged.owner != owner);
    }

    /// Takes all requests, in an order in which they may be issued.
    pub fn take_all(&mut self) -> VecDeque<Merged> {
        if planted::has(Plant::HeldNotParked) {
            // Dropped requests in flight would panic.
            self.held.drain(..).for_each(std::mem::forget);
        }
        self.release_all();
        std::mem::take(&mut self.ready)
    }
}

/// The place of the newest of `waiting` that `next` continues and may join.
fn find<'a>(
    waiting: impl DoubleEndedIterator<Item = &'a Merged> + ExactSizeIterator,
    next: &Merged,
    limits: &MergeLimits,
) -> Option<usize> {
    for (at, before) in waiting.enumerate().rev().take(LOOK_BACK) {
        if before.is_continued_by(next, limits) {
            return Some(at);
        }
        if before.overlaps(next) {
            break;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::{Request, RequestFlags};

    const LIMITS: MergeLimits = MergeLimits {
        sectors: 32,
        segments: 4,
    };

    fn waits(owner: u32, op: Op, sector: u64) -> Merged {
        Merged {
            owner,
            sector,
            sectors: 8,
            segments: 1,
            first: Request::new(op, sector, 8, sector),
            rest: Vec::new(),
        }
    }

    /// Holds `next`, or appends it.
    fn hold(backlog: &mut Backlog, next: Merged) {
        match backlog.continued_by(&next, &LIMITS, false) {
            Some(before) => before.append(next),
            None => backlog.hold(next, u64::MAX),
        }
    }

    /// First sector, sectors and number of requests of each, in the order in which they go.
    fn shown(mut backlog: Backlog) -> Vec<(u64, u64, usize)> {
        let show = |m: Merged| (m.sector, m.sectors, m.requests().count());
        backlog.take_all().into_iter().map(show).collect()
    }

    fn held(requests: impl IntoIterator<Item = Merged>) -> Vec<(u64, u64, usize)> {
        let mut backlog = Backlog::default();
        requests
            .into_iter()
            .for_each(|next| hold(&mut backlog, next));
        shown(backlog)
    }

    #[test]
    fn a_stream_joins_up_to_the_limits() {
        let stream = (0..6).map(|n| waits(0, Op::Read, n * 8));
        assert_eq!(held(stream), [(0, 32, 4), (32, 16, 2)]);
        // So it does among those that wait for a tag.
        let mut backlog = Backlog::default();
        backlog.push(waits(0, Op::Read, 0));
        let next = waits(0, Op::Read, 8);
        assert!(backlog.continued_by(&next, &LIMITS, false).is_none());
        assert!(backlog.continued_by(&next, &LIMITS, true).is_some());
    }

    #[test]
    fn what_differs_stays_alone() {
        let mut fua = waits(0, Op::Read, 8);
        fua.first.flags = RequestFlags::FUA;
        for other in [
            waits(1, Op::Read, 8),
            waits(0, Op::Write, 8),
            waits(0, Op::Read, 9),
            waits(0, Op::Flush, 8),
            fua,
        ] {
            assert_eq!(held([waits(0, Op::Read, 0), other]).len(), 2);
        }
    }

    #[test]
    fn a_request_joins_none_beyond_one_that_it_overlaps() {
        let all = [
            waits(0, Op::Write, 0),
            waits(0, Op::Write, 12),
            waits(0, Op::Write, 8),
        ];
        assert_eq!(held(all), [(0, 8, 1), (12, 8, 1), (8, 8, 1)]);
    }

    /// Those that aren't held go first, except where the order matters: then all that are held become ready before.
    #[test]
    fn a_flush_and_what_overlaps_pass_nothing_that_is_held() {
        let order = |next: Merged| {
            let mut backlog = Backlog::default();
            hold(&mut backlog, waits(0, Op::Write, 0));
            hold(&mut backlog, waits(1, Op::Write, 100));
            backlog.make_way(&next);
            backlog.push(next);
            shown(backlog).iter().map(|m| m.0).collect::<Vec<_>>()
        };
        assert_eq!(order(waits(2, Op::Read, 50)), [50, 0, 100]);
        assert_eq!(order(waits(2, Op::Read, 107)), [0, 100, 107]);
        assert_eq!(order(waits(2, Op::Write, 96)), [0, 100, 96]);
        let mut flush = waits(2, Op::Flush, 0);
        flush.sectors = 0;
        assert_eq!(order(flush), [0, 100, 0]);
    }

    #[test]
    fn held_requests_go_in_order_when_there_is_room_or_their_number_comes() {
        let mut backlog = Backlog::default();
        for n in 0..4 {
            backlog.hold(waits(n, Op::Read, u64::from(n) * 100), 10 + u64::from(n));
        }
        backlog.release(4, 9);
        assert_eq!(backlog.ready(), 0, "their submitters haven't polled yet");
        (0..4).for_each(|owner| backlog.unplug(owner));
        backlog.release(1, 9);
        assert_eq!(backlog.ready(), 1);
        backlog.release(0, 11);
        assert_eq!(backlog.ready(), 2);
        backlog.forget(2);
        assert!(!backlog.releases(0, 12));
        assert_eq!(
            shown(backlog).iter().map(|m| m.0).collect::<Vec<_>>(),
            [0, 100, 300]
        );
    }
}
