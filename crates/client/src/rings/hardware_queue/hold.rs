//! Requests on their way into the backlog, where those of streams are held while the limit is in flight.

use super::super::limit::Limit;
use super::super::plug::{MergePolicy, Merged};
use super::HardwareQueue;
use pvblk_block::MergeCounts;
use pvblk_block::trace::{Phase, Tracer};
use std::time::{Duration, Instant};

/// Most sectors (16 KiB) of a request that is held: longer ones gain little.
const SMALL: u64 = 32;
/// Longest time without an answer for which requests are held.
const PATIENCE: Duration = Duration::from_millis(100);
/// When requests are held.
pub(super) struct Held {
    pub(super) limit: Limit,
    /// Time of the last answer, or since which requests are held.
    pub(super) quiet_since: Instant,
}

impl<M: MergePolicy> HardwareQueue<M> {
    /// Queues what came out of `number`'s plug, in order. Returns how many of them aren't held.
    pub fn insert(
        &mut self,
        number: u32,
        pulled: impl Iterator<Item = Merged>,
        merges: &MergeCounts,
        tracer: &mut Tracer,
    ) -> usize {
        self.account();
        let (before, ready) = (self.backlog.len(), self.backlog.ready());
        let (mut stream, work) = match M::IN_FLIGHT {
            Some(_) => self.owners.stream(number),
            None => Default::default(),
        };
        for merged in pulled {
            if let Some(counting) = &mut self.counting {
                counting.inserted(&merged);
            }
            let others = work + self.backlog.len() - before;
            let continues = M::IN_FLIGHT.is_some() && stream.passes(&merged, others);
            let waits = self.backlog.holds() || continues && self.holds_next();
            if !waits && !M::JOINS_WAITING {
                self.backlog.push(merged);
            } else {
                self.insert_late(merged, continues, merges, tracer);
            }
        }
        let more = self.backlog.len() - before;
        match M::IN_FLIGHT {
            Some(_) => self.owners.add_streamed(number, more, stream),
            None => self.owners.add_work(number, more),
        }
        self.backlog.ready().saturating_sub(ready)
    }

    /// Queues a request that may be merged into one that waits, or with `continues` be held, or may have to wait for one that is held.
    #[cold]
    fn insert_late(
        &mut self,
        next: Merged,
        continues: bool,
        merges: &MergeCounts,
        tracer: &mut Tracer,
    ) {
        let small = continues && next.sectors <= SMALL;
        let joins = small || M::JOINS_WAITING;
        let limits = &self.setup.merge;
        if joins && let Some(before) = self.backlog.continued_by(&next, limits, M::JOINS_WAITING) {
            merges.add(next.first.op);
            tracer.request(Phase::BackMerge, &next.first);
            before.append(next);
            if let Some(counting) = &mut self.counting {
                counting.joined();
            }
            return;
        }
        if !small || !self.is_full() {
            self.backlog.make_way(&next);
            self.backlog.push(next);
            return;
        }
        let before = self.in_flight() + self.backlog.len();
        if let Some(held) = &mut self.limit
            && !self.backlog.holds()
        {
            held.quiet_since = self.setup.clock.now();
            held.limit.holds_again(held.quiet_since, self.work);
        }
        let until = self.work.pieces + before as u64;
        self.backlog.hold(next, until);
    }

    /// True if a request that continues a stream is to be held, and none is held yet.
    #[inline]
    fn holds_next(&mut self) -> bool {
        if self.is_full() {
            return true;
        }
        let taken = self.taken();
        if let Some(held) = &mut self.limit
            && held.limit.is_raised()
        {
            held.limit.goes_unused(taken, self.work);
        }
        false
    }

    /// True if a request of a stream has to wait: for room, or because there would be none if those in flight weren't merged.
    #[inline]
    fn is_full(&self) -> bool {
        let taken = self.taken().max(self.carried);
        self.limit
            .as_ref()
            .is_some_and(|held| taken >= held.limit.get())
    }

    /// Requests on the ring, and those that only wait for a tag.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        self.in_flight() + self.backlog.ready()
    }

    /// Held requests that may go on now.
    pub(super) fn room(&self) -> usize {
        let limit = self.limit.as_ref().map_or(0, |held| held.limit.get());
        limit.saturating_sub(self.taken())
    }

    /// Requests on the ring.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.shadow.len() - self.free_tags.len()
    }

    /// Lets those that are held go on that may.
    #[cold]
    pub(super) fn release(&mut self) {
        self.backlog.release(self.room(), self.work.pieces);
        let late = |held: &Held| self.setup.clock.now() >= held.quiet_since + PATIENCE;
        let waits = self.backlog.holds();
        if waits && (self.taken() == 0 || self.limit.as_ref().is_some_and(late)) {
            self.backlog.release_all();
        }
    }

    /// Answers came while requests are held.
    #[cold]
    pub(super) fn note_answers(&mut self) {
        if let Some(held) = &mut self.limit {
            held.quiet_since = self.setup.clock.now();
            held.limit.answered(held.quiet_since, self.work);
        }
    }

    /// `number` has submitted all that it wanted to for now.
    #[inline]
    pub fn unplug(&mut self, number: u32) {
        if self.backlog.holds() {
            self.backlog.unplug(number);
        }
    }

    /// Time until which requests are held at most, if any are.
    pub fn held_until(&self) -> Option<Instant> {
        let held = self.limit.as_ref().filter(|_| self.backlog.holds())?;
        Some(held.quiet_since + PATIENCE)
    }
}
