//! Giving memory back to the system: blocks of frames that hold nothing, or clean pages that nobody needs.
//!
//! A block is checked, emptied and taken off the allocator in one step; its memory goes outside of the core's lock, and it comes back cold.
//! Large pages go as a whole: a part of one is free only when the system has split it.

use super::{Frame, Memory};
use crate::alloc::{FreeBlock, HUGE_ORDER};
use crate::core::writeback::WriteBack;
use crate::lists::On;
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};
use std::time::{Duration, Instant};

/// Blocks of one step that are looked at: others want the lock.
const LOOKS: u32 = 256;
/// Smaller blocks: 16 frames, 64 KiB.
const SMALL_ORDER: usize = 4;
/// A cache of fewer large pages than that doesn't count in them.
const FEW_HUGE: usize = 8;
/// Active pages go if they weren't used since they were looked at last, and that is so long ago.
const AGE: Duration = Duration::from_millis(100);

/// Where a pass over all frames is.
#[derive(Debug)]
pub struct Giving {
    /// Orders of blocks, one after another.
    orders: [usize; 2],
    round: usize,
    /// The next block's first frame.
    at: u32,
    /// Frames that went in this round.
    gone: usize,
    /// Active pages that weren't used may go; in the last round, pages that were used count as unused from now on.
    ages: bool,
    /// Blocks that may be looked at before others get the lock.
    left: u32,
}

/// The next step of a pass.
#[derive(Debug)]
pub enum Next {
    /// A block whose memory is to go.
    Block(FreeBlock),
    /// Another step, after others had the lock.
    More,
    /// It is over.
    End,
}

impl<P: Policy> Memory<P> {
    /// Begins to look for memory that nobody needs.
    pub fn begin_giving(&self, now: Instant) -> Giving {
        let huge = self.frames.len() >> HUGE_ORDER >= FEW_HUGE;
        Giving {
            orders: match huge {
                true => [HUGE_ORDER, SMALL_ORDER],
                false => [SMALL_ORDER, 0],
            },
            round: 0,
            at: 0,
            gone: 0,
            ages: self.aged.is_none_or(|at| now >= at + AGE),
            left: LOOKS,
        }
    }

    /// The next block, out of the cache and off the lists.
    pub fn next_to_go(&mut self, pass: &mut Giving, now: Instant, writes: &mut WriteBack) -> Next {
        while pass.left > 0 {
            pass.left -= 1;
            let order = pass.orders[pass.round];
            let (first, size) = (pass.at, 1 << order);
            if first as usize + size > self.frames.len() {
                // Pages that could go and didn't are in large pages with pages that have to stay.
                if pass.round + 1 == pass.orders.len() || pass.gone > self.clean_frames(writes) / 4
                {
                    return Next::End;
                }
                (pass.round, pass.at, pass.gone) = (pass.round + 1, 0, 0);
                if pass.ages {
                    self.aged = Some(now);
                }
                continue;
            }
            pass.at += size as u32;
            let block = first..pass.at;
            if !self.alloc.is_warm(first, order) {
                continue;
            }
            if !block.clone().all(|f| self.may_go(f, pass.ages, writes)) {
                if pass.ages && pass.round + 1 == pass.orders.len() {
                    self.forget_uses(block);
                }
                continue;
            }
            for frame in block {
                self.let_go(frame, writes);
            }
            if let Some(block) = self.alloc.take_block(first, order) {
                pass.gone += size;
                return Next::Block(block);
            }
        }
        Next::More
    }

    /// A block comes back; whether its memory has gone. Returns how many of its pages had any.
    pub fn gone(&mut self, block: FreeBlock, cold: bool) -> usize {
        let before = self.alloc.warm_frames();
        self.alloc.give_block(block, cold);
        self.count_memory();
        let gone = before - self.alloc.warm_frames();
        self.counters.pages_given_back += gone as u64;
        gone
    }

    fn clean_frames(&self, writes: &WriteBack) -> usize {
        let listed = self.lists.len(On::Inactive) + self.lists.len(On::Active);
        listed.saturating_sub(writes.unwritten_frames())
    }

    /// True if a frame holds nothing that somebody needs.
    fn may_go(&self, frame: u32, ages: bool, writes: &WriteBack) -> bool {
        match self.frames[frame as usize] {
            Frame::Free => self.alloc.is_at_rest(frame),
            Frame::Cached if writes.is_clean(frame) => match self.lists.on(frame) {
                On::Inactive => self.table.uses(frame) <= 1,
                On::Active => ages && self.table.uses(frame) == 0,
                On::None => false,
            },
            Frame::Cached => has(Plant::DirtyGivenBack) && writes.could_be_lost(frame),
            Frame::Reading { .. } | Frame::Old => false,
        }
    }

    fn let_go(&mut self, frame: u32, writes: &mut WriteBack) {
        if self.frames[frame as usize] == Frame::Free {
            return;
        }
        self.evict(frame, writes);
        self.clear(frame);
        self.alloc.give_at_once(frame);
    }

    /// Pages that aren't used again go next time: all that were used are active, and count as unused.
    fn forget_uses(&mut self, frames: std::ops::Range<u32>) {
        for frame in frames {
            if self.table.uses(frame) > 1 && self.lists.on(frame) == On::Inactive {
                self.activate(frame);
            } else if self.lists.on(frame) == On::Active && self.table.uses(frame) > 0 {
                self.table.set_uses(frame, 0);
            }
        }
    }

    /// Others had the lock: another turn. Frames on lists of CPUs count as well.
    pub fn go_on_giving(&mut self, pass: &mut Giving) {
        pass.left = LOOKS;
        self.alloc.drain();
    }

    /// Blocks that may be out at a time: an eighth of the frames, and 16 MiB of large pages at most.
    pub fn most_out(&self, pass: &Giving) -> usize {
        ((self.frames.len() / 8) >> pass.orders[pass.round]).clamp(1, 8)
    }
}
