//! The page allocator: which frames of a region are free. Pure data; reclaim and waiting are elsewhere.
//!
//! Frames come from buddy lists, through lists of their own for each CPU (or queue), that are refilled and drained in batches. A list has a
//! hot end for what the CPU will use at once, and a cold end for what a device fills first.

mod block;
mod buddy;
mod marks;

pub use block::{FreeBlock, HUGE_ORDER};
pub use buddy::{Buddy, MAX_ORDER};
pub use marks::{Watermarks, batch_of};

use crate::policy::{Policy, Standard};
use std::collections::VecDeque;

/// An end of a list of free frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// For what is used at once.
    Hot,
    /// For what a device fills.
    Cold,
}

/// Free frames that an allocation leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// The low watermark.
    Low,
    /// The min watermark.
    Min,
    /// Nothing: for what can't wait.
    None,
}

/// Frees frames and gives them out. Frames on lists don't count as free, as in kernels of 2009.
#[derive(Debug)]
pub struct Allocator<P = Standard> {
    buddy: Buddy,
    /// The front is hot, the back is cold.
    lists: Vec<VecDeque<u32>>,
    listed: usize,
    marks: Watermarks,
    batch: usize,
    /// A list with more gives a batch back.
    high: usize,
    policy: P,
    frames: usize,
    warm: block::Warm,
}

impl<P: Policy> Allocator<P> {
    /// `frames` free frames, and `lists` empty lists (at least one).
    pub fn new(frames: usize, lists: usize, policy: P) -> Allocator<P> {
        let batch = batch_of(frames);
        Allocator {
            buddy: Buddy::new(frames),
            lists: vec![VecDeque::new(); lists.max(1)],
            listed: 0,
            marks: Watermarks::of(frames),
            batch: batch.max(1),
            high: 6 * batch,
            policy,
            frames,
            warm: block::Warm::new(frames),
        }
    }

    /// All frames, free or not.
    pub fn frames(&self) -> usize {
        self.frames
    }

    pub fn marks(&self) -> Watermarks {
        self.marks
    }

    /// Frames that count as free.
    pub fn free_frames(&self) -> usize {
        self.buddy.free_frames()
    }

    /// Free frames on lists, which don't count.
    pub fn listed_frames(&self) -> usize {
        self.listed
    }

    /// True if more than the reserve is free.
    pub fn is_above(&self, reserve: Reserve) -> bool {
        self.free_frames()
            > match reserve {
                Reserve::Low => self.marks.low,
                Reserve::Min => self.marks.min,
                Reserve::None => return true,
            }
    }

    /// A frame from one end of a list, unless free frames are down to the reserve.
    pub fn take(&mut self, list: usize, end: End, reserve: Reserve) -> Option<u32> {
        if !self.is_above(reserve) {
            return None;
        }
        let at = list % self.lists.len();
        if self.lists[at].is_empty() {
            self.refill(at, end);
        }
        let list = &mut self.lists[at];
        let frame = match end {
            End::Hot => list.pop_front(),
            End::Cold => list.pop_back(),
        };
        self.listed -= usize::from(frame.is_some());
        frame
    }

    /// Fills an empty list, so that what is taken from `end` comes in the order of the frames; without [`Policy::keeps_frames_in_order`] against
    /// it at the cold end: until 2009 a kernel's refill had one order, and allocations from the other end got it backwards.
    fn refill(&mut self, list: usize, end: End) {
        let kept = self.policy.keeps_frames_in_order();
        for _ in 0..self.batch {
            let Some(frame) = self.buddy.take() else {
                break;
            };
            self.warm.touch(frame);
            match (end, kept) {
                (End::Cold, true) => self.lists[list].push_front(frame),
                _ => self.lists[list].push_back(frame),
            }
            self.listed += 1;
        }
    }

    /// Gives a frame back to one end of a list.
    pub fn give(&mut self, list: usize, end: End, frame: u32) {
        let at = list % self.lists.len();
        let list = &mut self.lists[at];
        match end {
            End::Hot => list.push_front(frame),
            End::Cold => list.push_back(frame),
        }
        self.listed += 1;
        if list.len() > self.high {
            for _ in 0..self.batch {
                self.unlist(at);
            }
        }
    }

    fn unlist(&mut self, list: usize) {
        if let Some(frame) = self.lists[list].pop_back() {
            self.listed -= 1;
            self.buddy.give(frame);
        }
    }

    /// Empties all lists. Returns how many frames that freed.
    pub fn drain(&mut self) -> usize {
        let drained = self.listed;
        for list in 0..self.lists.len() {
            while !self.lists[list].is_empty() {
                self.unlist(list);
            }
        }
        drained
    }

    /// Free blocks of each order, as in `/proc/buddyinfo`.
    pub fn blocks(&self) -> [usize; MAX_ORDER + 1] {
        std::array::from_fn(|order| self.buddy.blocks(order))
    }

    /// Gives a frame back past the lists.
    pub fn give_at_once(&mut self, frame: u32) {
        self.buddy.give(frame);
    }

    /// True if `frame` is free and on no list.
    pub fn is_at_rest(&self, frame: u32) -> bool {
        self.buddy.is_free(frame)
    }

    /// True if `frame` is free or on a list; slow.
    pub fn is_free(&self, frame: u32) -> bool {
        self.buddy.is_free(frame) || self.lists.iter().any(|l| l.contains(&frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct Order {
        kept: bool,
    }

    impl Policy for Order {
        fn keeps_frames_in_order(&self) -> bool {
            self.kept
        }
    }

    const KEPT: Order = Order { kept: true };
    const REVERSED: Order = Order { kept: false };

    fn cold(a: &mut Allocator<Order>, count: usize) -> Vec<u32> {
        let mut take = || a.take(0, End::Cold, Reserve::None).unwrap();
        (0..count).map(|_| take()).collect()
    }

    #[test]
    fn a_refill_keeps_the_order_or_turns_it_round() {
        // 256 MiB: batches of 15.
        let (frames, n) = (65536, 30);
        let kept = cold(&mut Allocator::new(frames, 1, KEPT), n);
        assert!(kept.windows(2).all(|w| w[1] == w[0] + 1), "{kept:?}");
        let turned = cold(&mut Allocator::new(frames, 1, REVERSED), n);
        let falls = turned.windows(2).filter(|w| w[1] + 1 == w[0]).count();
        assert_eq!(falls, n - 2, "{turned:?}");
        // Hot frames come in the same order.
        for order in [KEPT, REVERSED] {
            let mut a = Allocator::new(frames, 1, order);
            let hot: Vec<_> = (0..n)
                .map(|_| a.take(0, End::Hot, Reserve::None).unwrap())
                .collect();
            assert!(hot.windows(2).all(|w| w[1] == w[0] + 1), "{hot:?}");
        }
    }

    #[test]
    fn lists_hold_back_what_the_watermarks_do_not_see() {
        let mut a = Allocator::new(65536, 2, KEPT);
        let mut held = Vec::new();
        while let Some(f) = a.take(0, End::Cold, Reserve::Min) {
            held.push(f);
        }
        // The last refill may have gone below.
        assert!(a.free_frames() <= a.marks().min);
        let before = a.listed_frames();
        // What one CPU frees stays on its list, and the next allocation fails though frames were freed.
        for _ in 0..32 {
            a.give(1, End::Cold, held.pop().unwrap());
        }
        assert_eq!(a.listed_frames(), before + 32);
        assert_eq!(a.take(1, End::Cold, Reserve::Min), None);
        assert_eq!(a.drain(), before + 32);
        assert!(a.take(1, End::Cold, Reserve::Min).is_some());
    }

    #[test]
    fn random_use_loses_nothing_and_gives_nothing_twice() {
        let mut rng = pvblk_testing::random();
        for _ in 0..20 {
            let frames = rng.usize(1..6000);
            let lists = rng.usize(1..5);
            let order = Order { kept: rng.bool() };
            let mut a = Allocator::new(frames, lists, order.clone());
            let mut used = vec![false; frames];
            let mut held: Vec<u32> = Vec::new();
            for _ in 0..4000 {
                let list = rng.usize(..lists + 2);
                let end = [End::Hot, End::Cold][rng.usize(..2)];
                match rng.u8(..16) {
                    0 => {
                        let listed = a.listed_frames();
                        assert_eq!(a.drain(), listed);
                    }
                    1..9 => {
                        let reserve = [Reserve::Low, Reserve::Min, Reserve::None][rng.usize(..3)];
                        let above = a.is_above(reserve);
                        if let Some(f) = a.take(list, end, reserve) {
                            assert!(above && !std::mem::replace(&mut used[f as usize], true));
                            held.push(f);
                        }
                    }
                    _ if held.is_empty() => {}
                    _ => {
                        let f = held.swap_remove(rng.usize(..held.len()));
                        used[f as usize] = false;
                        a.give(list, end, f);
                    }
                }
                assert_eq!(a.free_frames() + a.listed_frames() + held.len(), frames);
            }
            held.into_iter().for_each(|f| a.give(0, End::Cold, f));
            a.drain();
            // Everything joins again.
            assert_eq!(a.blocks(), Allocator::new(frames, 1, order).blocks());
        }
    }
}
