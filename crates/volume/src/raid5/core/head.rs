//! Stripe heads: which there are, who waits for them, and when they run.

use super::super::planted::{Raid5Bug, has};
use super::round::Round;
use super::{Core, Piece};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Heads that may read at a time before others are delayed: md's preread threshold.
const PREREAD_THRESHOLD: usize = 1;

/// One stripe's place in the cache.
#[derive(Default)]
pub(super) struct Head {
    pub stripe: u64,
    /// Bit for each member whose page holds what the member holds, or would.
    pub valid: u64,
    pub waiting: VecDeque<Piece>,
    pub round: Option<Round>,
    /// It runs at the next unplug.
    plugged: bool,
    /// It needs reads, and waits until others have read.
    delayed: bool,
    /// It may read.
    pub preread: bool,
    /// Place among the idle ones, as a mark that changes.
    idle_mark: u64,
}

impl Head {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.round.is_none()
    }
}

/// Spreads stripe numbers. Nobody gains by making them collide: there are as many heads at most.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }
    fn write_u64(&mut self, n: u64) {
        // Fibonacci hashing; the upper bits are the good ones, and the map looks at both ends.
        self.0 = (self.0 ^ n)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

/// All heads.
pub(super) struct Heads {
    pub all: Vec<Head>,
    by_stripe: HashMap<u64, usize, BuildHasherDefault<Spread>>,
    never_used: Vec<usize>,
    /// Idle heads, least recently used first, with their marks; an entry whose mark is old doesn't count.
    idle: VecDeque<(usize, u64)>,
    next_mark: u64,
    idle_count: usize,
    /// Pieces that found no free head.
    waiting: VecDeque<Piece>,
    /// Nothing free was found; until a quarter is free, nobody gets a new head.
    blocked: bool,
    /// To run at the next unplug.
    plugged: Vec<usize>,
    /// They need reads, and others read.
    delayed: VecDeque<usize>,
    prereading: usize,
}

impl Heads {
    pub fn new(count: usize) -> Heads {
        Heads {
            all: (0..count).map(|_| Head::default()).collect(),
            by_stripe: HashMap::with_capacity_and_hasher(count, BuildHasherDefault::default()),
            never_used: (0..count).rev().collect(),
            idle: VecDeque::new(),
            next_mark: 0,
            idle_count: 0,
            waiting: VecDeque::new(),
            blocked: false,
            plugged: Vec::new(),
            delayed: VecDeque::new(),
            prereading: 0,
        }
    }

    fn free(&self) -> usize {
        self.never_used.len() + self.idle_count
    }

    /// The head of a stripe, if it has one or one is free. It is no longer idle.
    fn get(&mut self, stripe: u64) -> Option<usize> {
        if let Some(&head) = self.by_stripe.get(&stripe) {
            if self.all[head].is_idle() {
                self.idle_count -= 1;
                self.all[head].idle_mark = 0;
            }
            return Some(head);
        }
        if self.blocked {
            return None;
        }
        let Some(head) = self.take_free() else {
            self.blocked = true;
            return None;
        };
        let valid = match has(Raid5Bug::StaleCache) {
            true => self.all[head].valid,
            false => 0,
        };
        self.all[head] = Head {
            stripe,
            valid,
            ..Head::default()
        };
        self.by_stripe.insert(stripe, head);
        Some(head)
    }

    fn take_free(&mut self) -> Option<usize> {
        if let Some(head) = self.never_used.pop() {
            return Some(head);
        }
        loop {
            let (head, mark) = self.idle.pop_front()?;
            if self.all[head].idle_mark == mark {
                self.idle_count -= 1;
                self.by_stripe.remove(&self.all[head].stripe);
                return Some(head);
            }
        }
    }

    /// The head has nothing to do now: it stays as a cache. One whose stripe was written whole is the first to be used
    /// again: nobody needs its pages to make parity, and they are in the CPU's caches still.
    fn rest(&mut self, head: usize, whole: bool) {
        self.next_mark += 1;
        self.all[head].idle_mark = self.next_mark;
        match whole {
            true => self.idle.push_front((head, self.next_mark)),
            false => self.idle.push_back((head, self.next_mark)),
        }
        self.idle_count += 1;
        if self.idle.len() > 4 * self.all.len() {
            let all = &self.all;
            self.idle
                .retain(|(head, mark)| all[*head].idle_mark == *mark);
        }
        if self.blocked && self.free() * 4 >= self.all.len() {
            self.blocked = false;
        }
    }

    pub fn take_waiting(&mut self) -> VecDeque<Piece> {
        std::mem::take(&mut self.waiting)
    }
}

impl Core {
    /// Hands a piece to its stripe's head.
    pub(super) fn place(&mut self, piece: Piece) {
        match self.heads.get(piece.stripe) {
            None => self.heads.waiting.push_back(piece),
            Some(head) => {
                self.heads.all[head].waiting.push_back(piece);
                self.plug(head);
            }
        }
    }

    /// Also one that is delayed: with what came it may do without reads.
    fn plug(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        if !h.plugged && h.round.is_none() {
            h.plugged = true;
            h.delayed = false;
            self.heads.plugged.push(head);
        }
    }

    /// Runs what is plugged, and goes on until nothing more can be done without I/O.
    pub fn unplug(&mut self) {
        loop {
            while !self.heads.blocked
                && let Some(piece) = self.heads.waiting.pop_front()
            {
                self.place(piece);
            }
            let mut plugged = std::mem::take(&mut self.heads.plugged);
            if plugged.is_empty() {
                if self.activate_delayed() {
                    continue;
                }
                self.start_logs();
                // Where the array has stopped, rounds end without I/O, and make way for others.
                if self.heads.plugged.is_empty() && !self.activate_delayed() {
                    break;
                }
                continue;
            }
            for head in plugged.drain(..) {
                self.heads.all[head].plugged = false;
                self.run_head(head);
            }
        }
    }

    /// A round that needs reads: now, or later.
    pub(super) fn may_preread(&mut self, head: usize) -> bool {
        let h = &mut self.heads.all[head];
        if h.preread {
            return true;
        }
        h.delayed = true;
        self.heads.delayed.push_back(head);
        false
    }

    /// True if heads were activated: all that were delayed, as md does, once few enough read.
    fn activate_delayed(&mut self) -> bool {
        if self.heads.prereading >= PREREAD_THRESHOLD {
            return false;
        }
        let mut any = false;
        for head in std::mem::take(&mut self.heads.delayed) {
            // Some were plugged again since.
            if self.heads.all[head].delayed {
                self.plug(head);
                self.heads.all[head].preread = true;
                self.heads.prereading += 1;
                any = true;
            }
        }
        any
    }

    /// A round has ended: another one, or rest.
    pub(super) fn round_over(&mut self, head: usize) {
        let blocks = self.geometry.data_members();
        let h = &mut self.heads.all[head];
        let whole = h.round.take().is_some_and(|r| r.blocks().1 == blocks);
        if std::mem::take(&mut h.preread) {
            self.heads.prereading -= 1;
        }
        if self.heads.all[head].waiting.is_empty() {
            self.heads.rest(head, whole);
        } else {
            self.plug(head);
        }
    }
}
