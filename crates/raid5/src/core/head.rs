//! Stripe heads: their allocation, the pieces that wait for them, and the order in which they run.

use super::plan::Record;
use super::round::Round;
use super::tally::Tally;
use super::waiters::Waiters;
use super::{Core, Piece};
use pvblk_block::Error;
use pvblk_block::memory::Gauge;
use pvblk_block::planted::{Plant, has};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Heads that may read at a time before others are delayed: md's preread threshold.
const PREREAD_THRESHOLD: usize = 1;

/// One stripe's place in the cache.
#[derive(Default)]
pub(super) struct Head {
    pub record: Record,
    /// Number of the recovery, resync or check that has reached the stripe.
    pub sync: Option<u64>,
    /// The queue that it holds.
    pub queue: Option<usize>,
    pub waiting: VecDeque<Piece>,
    pub round: Option<Round>,
    /// It runs at the next unplug.
    plugged: bool,
    /// It needs reads, and waits until others have read.
    delayed: bool,
    /// It may read; for whom.
    pub preread: Option<usize>,
    /// Place among the idle ones, as a mark that changes.
    idle_mark: u64,
}

impl Head {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
            && self.round.is_none()
            && self.sync.is_none()
            && self.queue.is_none()
    }
}

/// Spreads stripe numbers. Nobody gains by making them collide: there are as many heads at most.
#[derive(Default)]
pub(super) struct Spread(u64);

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

/// All stripe heads.
pub(super) struct Heads {
    pub all: Vec<Head>,
    by_stripe: HashMap<u64, usize, BuildHasherDefault<Spread>>,
    /// Number of heads that there should be; those beyond it are freed when they are idle.
    limit: usize,
    /// Heads behind the limit that are still in use.
    surplus: usize,
    never_used: Vec<usize>,
    /// Idle heads by the submitter that had them last, least recently used first, with their marks; an entry
    /// whose mark is old doesn't count.
    idle: Vec<VecDeque<(usize, u64)>>,
    /// The same, but last used first: those whose stripe was written whole. Nobody needs their pages to make parity, and they
    /// are in that submitter's CPU's caches still.
    whole: Vec<Vec<(usize, u64)>>,
    next_mark: u64,
    idle_count: usize,
    /// Pieces that found no free head.
    waiting: Waiters,
    /// No head was free; until a quarter is free, no stripe gets a new head.
    blocked: bool,
    /// To run at the next unplug.
    plugged: Vec<usize>,
    /// By the submitter whose request came first: they need reads, and others read.
    delayed: Vec<VecDeque<usize>>,
    /// Number of heads that read. Rotational members are slow if reads and writes alternate.
    prereading: Tally,
}

impl Heads {
    pub fn new(count: usize, rotational: bool) -> Heads {
        Heads {
            all: (0..count).map(|_| Head::default()).collect(),
            by_stripe: HashMap::with_capacity_and_hasher(count, BuildHasherDefault::default()),
            limit: count,
            surplus: 0,
            never_used: (0..count).rev().collect(),
            idle: Vec::new(),
            whole: Vec::new(),
            next_mark: 0,
            idle_count: 0,
            waiting: Waiters::default(),
            blocked: false,
            plugged: Vec::new(),
            delayed: Vec::new(),
            prereading: Tally::new(rotational),
        }
    }

    fn free(&self) -> usize {
        self.never_used.len() + self.idle_count
    }

    /// The head of a stripe, if it has one or one is free. It is no longer idle.
    fn get(&mut self, stripe: u64, owner: usize) -> Option<usize> {
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
        let head = self.new_head(stripe, owner);
        self.blocked = head.is_none();
        head
    }

    /// The head of a stripe as [`Heads::get`] gives it, but only if no piece has to wait because of
    /// it.
    pub fn get_if_free(&mut self, stripe: u64, owner: usize) -> Option<usize> {
        match self.by_stripe.contains_key(&stripe) {
            true => self.get(stripe, owner),
            false => self.new_head(stripe, owner),
        }
    }

    fn new_head(&mut self, stripe: u64, owner: usize) -> Option<usize> {
        let head = self.take_free(owner)?;
        let valid = match has(Plant::StaleHead) {
            true => self.all[head].record.valid,
            false => 0,
        };
        let bad = 0;
        self.all[head] = Head {
            record: Record { stripe, valid, bad },
            ..Head::default()
        };
        self.by_stripe.insert(stripe, head);
        Some(head)
    }

    /// A free head: one whose pages this submitter had last and that isn't needed, one that has no pages in
    /// use yet, or the least recently used.
    fn take_free(&mut self, owner: usize) -> Option<usize> {
        let head = self.pop_whole(owner).or_else(|| self.never_used.pop());
        if head.is_some() {
            return head;
        }
        while let Some(from) = self.whose_oldest(owner) {
            if let Some((head, mark)) = self.idle[from].pop_front()
                && self.unlink(head, mark)
            {
                return Some(head);
            }
        }
        (0..self.whole.len()).find_map(|owner| self.pop_whole(owner))
    }

    /// Whose least recently used head goes next: one's own, which is in the CPU's caches, unless another's is much older.
    fn whose_oldest(&self, owner: usize) -> Option<usize> {
        let front = |of: usize| Some((self.idle.get(of)?.front()?.1, of));
        let oldest = (0..self.idle.len()).filter_map(front).min()?;
        match front(owner) {
            Some((mark, _)) if mark - oldest.0 <= 2 * self.limit as u64 => Some(owner),
            _ => Some(oldest.1),
        }
    }

    fn pop_whole(&mut self, owner: usize) -> Option<usize> {
        while let Some((head, mark)) = self.whole.get_mut(owner)?.pop() {
            if self.unlink(head, mark) {
                return Some(head);
            }
        }
        None
    }

    /// An idle head is taken from its stripe; false if that mark isn't its any more.
    fn unlink(&mut self, head: usize, mark: u64) -> bool {
        if self.all[head].idle_mark != mark {
            return false;
        }
        self.idle_count -= 1;
        self.by_stripe.remove(&self.all[head].record.stripe);
        true
    }

    /// The head has nothing to do now: it stays as a cache. Whose it was, and whether its stripe was written whole.
    fn rest(&mut self, head: usize, owner: usize, whole: bool) {
        if head >= self.limit {
            self.by_stripe.remove(&self.all[head].record.stripe);
            self.surplus -= 1;
            return;
        }
        self.next_mark += 1;
        self.all[head].idle_mark = self.next_mark;
        self.idle_count += 1;
        let owners = self.idle.len().max(owner + 1);
        self.idle.resize_with(owners, VecDeque::new);
        self.whole.resize_with(owners, Vec::new);
        match whole {
            true => self.whole[owner].push((head, self.next_mark)),
            false => self.idle[owner].push_back((head, self.next_mark)),
        }
        if self.whole[owner].len().max(self.idle[owner].len()) > 4 * self.limit {
            let all = &self.all;
            let is_current = |(head, mark): &(usize, u64)| all[*head].idle_mark == *mark;
            self.idle[owner].retain(is_current);
            self.whole[owner].retain(is_current);
        }
        if self.blocked && self.free() * 4 >= self.limit {
            self.blocked = false;
        }
    }

    /// True if a quarter of the heads is free.
    pub fn has_quarter(&self) -> bool {
        self.free() * 4 >= self.limit
    }

    /// True if few enough heads read for others to begin: heads of that queue, where members can do several
    /// requests at once.
    pub fn may_activate(&self, owner: usize) -> bool {
        self.prereading.get(owner) < PREREAD_THRESHOLD
    }

    fn set_preread(&mut self, head: usize, owner: usize) {
        if self.all[head].preread.replace(owner).is_none() {
            self.prereading.add(owner);
        }
    }

    /// Lets the head of a stripe read: its stripe queue has waited for that.
    pub fn may_read(&mut self, stripe: u64, owner: usize) {
        if let Some(&head) = self.by_stripe.get(&stripe) {
            self.set_preread(head, owner);
        }
    }

    /// Number of heads.
    pub fn count(&self) -> usize {
        self.limit
    }

    /// Number of heads that have work.
    pub fn active(&self) -> usize {
        self.limit + self.surplus - self.free()
    }

    /// True if a head is in use, or may be.
    pub fn is_used(&self, head: usize) -> bool {
        head < self.limit || (head < self.all.len() && self.is_linked(head))
    }

    /// From now on there are so many.
    fn set_limit(&mut self, limit: usize) {
        let before = std::mem::replace(&mut self.limit, limit);
        while self.all.len() < limit {
            self.all.push(Head::default());
        }
        // Those that were given up and come back.
        for head in before..limit {
            match self.is_linked(head) {
                true => self.surplus -= 1,
                false => self.never_used.push(head),
            }
        }
        self.never_used.retain(|h| *h < limit);
        for head in limit..before {
            if !self.is_linked(head) {
                continue;
            }
            if self.all[head].idle_mark == 0 {
                self.surplus += 1;
                continue;
            }
            self.all[head].idle_mark = 0;
            self.idle_count -= 1;
            self.by_stripe.remove(&self.all[head].record.stripe);
        }
        self.blocked = false;
    }

    /// Makes heads forget their data, if none of them has work; otherwise does nothing.
    fn forget(&mut self, heads: std::ops::Range<usize>) -> bool {
        let heads = heads.start..heads.end.min(self.all.len());
        // One that no stripe has was never used, or forgotten before. Those behind the limit that are in use still count.
        let is_busy = |h: usize| self.is_linked(h) && self.all[h].idle_mark == 0;
        if heads.clone().any(is_busy) {
            return false;
        }
        if has(Plant::GivenBackIsValid) {
            return true;
        }
        for head in heads.rev() {
            if !self.is_linked(head) || head >= self.limit {
                continue;
            }
            self.idle_count -= 1;
            self.by_stripe.remove(&self.all[head].record.stripe);
            self.all[head] = Head::default();
            self.never_used.push(head);
        }
        true
    }

    /// True if a stripe has this head.
    fn is_linked(&self, head: usize) -> bool {
        let h = &self.all[head];
        self.by_stripe.get(&h.record.stripe) == Some(&head)
    }

    pub fn take_waiting(&mut self) -> Vec<Piece> {
        self.waiting.take()
    }
}

impl Core {
    /// Sets the number of heads from now on.
    pub fn set_stripes(&mut self, count: usize) -> Result<(), Error> {
        self.pages.grow(count)?;
        self.heads.set_limit(count);
        self.queues.set_heads(count);
        self.free_pages();
        Ok(())
    }

    /// Gives the memory of idle heads back to the system, a segment at a time: this is the one that is asked about. Returns bytes; `None`: there
    /// is no such segment.
    pub fn give_way(&mut self, segment: usize) -> Option<u64> {
        if segment >= self.pages.segments() {
            return None;
        }
        let heads = &mut self.heads;
        let forget = |these| heads.forget(these) || has(Plant::BusyGivenBack);
        Some(self.pages.give_way(segment, forget))
    }

    /// Bytes of stripes that may be the system's.
    pub fn stripe_memory(&self) -> &Gauge {
        self.pages.gauge()
    }

    fn free_pages(&mut self) {
        let heads = &self.heads;
        self.pages.shrink(heads.limit, |head| heads.is_used(head));
    }

    /// Hands a piece to its stripe's head.
    pub(super) fn place(&mut self, piece: Piece) {
        let owner = self.owner(piece.request);
        match self.heads.get(piece.stripe, owner) {
            None => self.heads.waiting.push(owner, piece),
            Some(head) => {
                self.heads.all[head].waiting.push_back(piece);
                self.plug(head);
            }
        }
    }

    /// Plugs a head, even if it is delayed: with the new pieces it may need no reads.
    pub(super) fn plug(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        if !h.plugged && h.round.is_none() {
            h.plugged = true;
            h.delayed = false;
            self.heads.plugged.push(head);
        }
    }

    /// Runs the plugged heads, until no more can be done without I/O or computations.
    pub fn unplug(&mut self) {
        loop {
            while !self.heads.blocked
                && let Some(piece) = self.heads.waiting.pop(self.heads.limit)
            {
                self.place(piece);
            }
            let mut plugged = std::mem::take(&mut self.heads.plugged);
            if plugged.is_empty() {
                if self.run_queues() || self.activate_delayed() {
                    continue;
                }
                self.start_logs();
                self.start_intents();
                // Where the array has stopped, rounds end without I/O, and make way for others.
                if self.heads.plugged.is_empty() && !self.run_queues() && !self.activate_delayed() {
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
        if h.preread.is_some() {
            return true;
        }
        h.delayed = true;
        let first = h.waiting.front().map(|p| p.request);
        let owner = first.map_or(0, |request| self.owner(request));
        let key = self.heads.prereading.key(owner);
        let delayed = &mut self.heads.delayed;
        delayed.resize_with(delayed.len().max(key + 1), VecDeque::new);
        delayed[key].push_back(head);
        false
    }

    /// True if heads were activated: all that were delayed, as md does, once few enough read.
    fn activate_delayed(&mut self) -> bool {
        let mut any = false;
        for key in 0..self.heads.delayed.len() {
            if self.heads.delayed[key].is_empty() || !self.heads.may_activate(key) {
                continue;
            }
            for head in std::mem::take(&mut self.heads.delayed[key]) {
                // Some were plugged again since.
                if self.heads.all[head].delayed {
                    self.plug(head);
                    self.heads.set_preread(head, key);
                    any = true;
                }
            }
        }
        any
    }

    /// A round has ended: another one, or rest.
    pub(super) fn round_over(&mut self, head: usize) {
        let blocks = self.geometry.data_members();
        let round = self.take_round(head);
        let is_whole = |r: &Round| r.plan.blocks().1 == blocks;
        let (runner, whole) = round.map_or((0, false), |r| (r.runner, is_whole(&r)));
        self.rest_or_go_on(head, runner, whole);
    }

    /// The round is over.
    pub(super) fn take_round(&mut self, head: usize) -> Option<Round> {
        let round = self.heads.all[head].round.take();
        if let Some(runner) = round.as_ref().filter(|r| r.writes()).map(|r| r.runner) {
            self.queues.writing.sub(runner);
            self.queues.ended += 1;
        }
        round
    }

    /// The head has no round.
    pub(super) fn rest_or_go_on(&mut self, head: usize, owner: usize, whole: bool) {
        let h = &mut self.heads.all[head];
        if let Some(owner) = h.preread.take() {
            self.heads.prereading.sub(owner);
        }
        if self.heads.all[head].waiting.is_empty() {
            // It may come back with more at once, if its stripe is whole.
            self.release_queue(head);
        }
        if !self.heads.all[head].is_idle() {
            self.plug(head);
            return;
        }
        self.heads.all[head].record.bad = 0;
        self.heads.rest(head, owner, whole);
        if head >= self.heads.limit && self.heads.surplus == 0 {
            self.free_pages();
        }
    }
}
