//! [`Table`]: the words, and each access to them.

use super::arrivals::{Arrivals, Arrived, Place};
use super::epoch::{Epoch, Passed, Seen};
use super::packed::{Owner, Packed, Phase};
use super::token::{Claimed, Closed, Leaves, Open, Parked, Takes, Token, Waiting};
use pvblk_block::stacked::{Lock, Native, Primitives, Word};

/// Words of a cache line. Neighbours are side by side: requests in a row touch few lines.
const LINE: usize = 8;

#[repr(align(64))]
struct Line<P: Primitives>([P::Word; LINE]);

const _: () = assert!(size_of::<Line<Native>>() == 64);

/// The record of a word. It may keep pages while its word is free.
pub trait Record: Send {
    /// Pages of one stripe, as a value.
    type Pages: Send;

    /// True if it has pages.
    fn has_pages(&self) -> bool {
        false
    }

    /// True if its last batch had a use for data that was in its pages.
    fn was_useful(&self) -> bool {
        false
    }

    /// Takes its pages out: what it knows of their data is forgotten.
    fn take_pages(&mut self) -> Option<Self::Pages> {
        None
    }
}

/// A record that never has pages.
impl Record for () {
    type Pages = ();
}

/// Words, a record for each, and the pieces that wait in their lists. Stripes have one table, and logs another.
pub struct Table<R: Record, T: Send, P: Primitives = Native> {
    lines: Box<[Line<P>]>,
    /// Records of free words. Held for a move of a pointer only, by the one who claims or releases.
    records: Box<[P::Lock<Option<Box<R>>>]>,
    arrivals: Arrivals<T, P>,
}

/// The outcome of an arrival.
#[derive(Debug)]
pub enum Arrival<R, T> {
    /// The word was free, and is the arriving queue's. The piece isn't in the list.
    Claimed(Token<Claimed, R>, Arrived<T>),
    /// The piece waits in the list of its owner.
    Joined,
}

/// Batches that weren't done at a moment, with their words.
#[derive(Debug)]
pub struct Owned(Vec<(usize, u16)>);

/// The owner's look at the epoch after a claim.
#[derive(Debug)]
pub enum Looked<R> {
    Open(Token<Open, R>),
    /// Words are stopped: the owner waits until it is told to go on, and tells this queue, if any, that the word is drained.
    Parked(Token<Parked, R>, Option<Owner>),
}

/// Words whose I/O a stop waits for.
#[derive(Debug, Default)]
pub struct InFlight {
    /// Numbers of words and of their batches.
    words: Vec<(usize, u16)>,
}

impl<R: Record, T: Send, P: Primitives> Table<R, T, P> {
    /// `count` free words, with a record for each, and places for `pieces` arrivals.
    pub fn new(
        count: usize,
        pieces: u32,
        mut record: impl FnMut() -> R,
    ) -> (Table<R, T, P>, Vec<Place>) {
        let word = |_| P::Word::new(Packed::FREE.0);
        let line = |_| Line::<P>(std::array::from_fn(word));
        let (arrivals, places) = Arrivals::new(pieces);
        let table = Table {
            lines: (0..count.div_ceil(LINE)).map(line).collect(),
            records: (0..count)
                .map(|_| P::Lock::<Option<Box<R>>>::new(Some(Box::new(record()))))
                .collect(),
            arrivals,
        };
        (table, places)
    }

    /// Number of words.
    pub fn count(&self) -> usize {
        self.records.len()
    }

    #[inline]
    fn word(&self, at: usize) -> &P::Word {
        &self.lines[at / LINE].0[at % LINE]
    }

    /// The word as it was at some moment, for traces and tests.
    pub fn peek(&self, at: usize) -> Packed {
        Packed(self.word(at).load_relaxed())
    }

    /// Exchanges a word that its owner owns: only arrivals come in between.
    fn update(
        &self,
        at: usize,
        exchange: impl Fn(&P::Word, u64, u64) -> Result<(), u64>,
        next: impl Fn(Packed) -> Packed,
    ) -> Packed {
        let word = self.word(at);
        let mut seen = word.load_relaxed();
        loop {
            match exchange(word, seen, next(Packed(seen)).0) {
                Ok(()) => return Packed(seen),
                Err(now) => seen = now,
            }
        }
    }

    /// A piece arrives for a word: it claims it for its queue, or joins its list.
    pub fn arrive(&self, at: usize, queue: Owner, place: Place, piece: T) -> Arrival<R, T> {
        let word = self.word(at);
        let mut piece = Some(piece);
        let mut seen = Packed(word.load_relaxed());
        loop {
            let tried = if seen.phase() == Phase::Free {
                debug_assert_eq!(seen.newest(), None, "a free word's list is empty");
                // Acquires the record, and all that the owner before did.
                word.exchange_acquire(seen.0, seen.owned(queue).0)
            } else {
                if let Some(piece) = piece.take() {
                    self.arrivals.put(&place, piece);
                }
                self.arrivals.link(&place, seen.newest());
                // Publishes the piece and its link to the owner.
                word.exchange_release(seen.0, seen.joined(place.number()).0)
            };
            match tried {
                Ok(()) if seen.phase() == Phase::Free => break,
                Ok(()) => return Arrival::Joined,
                Err(now) => seen = Packed(now),
            }
        }
        let piece = piece.unwrap_or_else(|| self.arrivals.take_back(&place));
        let token = self.claimed(at, queue);
        Arrival::Claimed(token, Arrived { place, piece })
    }

    /// The token of a queue that has just claimed a free word.
    fn claimed(&self, at: usize, queue: Owner) -> Token<Claimed, R> {
        let record = self.records[at].lock().take();
        let record = record.expect("a free word has its record");
        Token::new(at, queue, record)
    }

    /// Claims a word without a piece, if it is free and this was its last batch: for the pages that its record has kept.
    pub fn claim_idle(&self, at: usize, queue: Owner, batch: u16) -> Option<Token<Claimed, R>> {
        self.claim_if(at, queue, |word| word.batch() == batch)
    }

    /// Claims a word without a piece, if it is free.
    pub fn claim_free(&self, at: usize, queue: Owner) -> Option<Token<Claimed, R>> {
        self.claim_if(at, queue, |_| true)
    }

    /// Claims a word without a piece, if it is free and its record has kept pages.
    pub fn claim_pages(&self, at: usize, queue: Owner) -> Option<Token<Claimed, R>> {
        self.claim_if(at, queue, Packed::has_pages)
    }

    fn claim_if(
        &self,
        at: usize,
        queue: Owner,
        wanted: impl Fn(Packed) -> bool,
    ) -> Option<Token<Claimed, R>> {
        let seen = self.peek(at);
        if seen.phase() != Phase::Free || !wanted(seen) {
            return None;
        }
        // Acquires the record, as `arrive` does.
        let done = self.word(at).exchange_acquire(seen.0, seen.owned(queue).0);
        done.ok().map(|()| self.claimed(at, queue))
    }

    /// The owner looks at the epoch, and opens its batch or parks.
    pub fn look(&self, token: Token<Claimed, R>, epoch: &Epoch<P>) -> Looked<R> {
        match epoch.look_after_exchange() {
            Seen::Going(number) => Looked::Open(token.opened(number)),
            Seen::Stopped(_) => {
                let (token, tell) = self.park_any(token, epoch);
                Looked::Parked(token, tell)
            }
        }
    }

    /// The owner gives up its batch, whose I/O has ended: a member failed it, or it saw a stop. It plans anew when it is told to go on.
    /// The queue that is returned is told that the word is drained.
    pub fn park(
        &self,
        token: Token<Open, R>,
        epoch: &Epoch<P>,
    ) -> (Token<Parked, R>, Option<Owner>) {
        self.park_any(token, epoch)
    }

    fn park_any<S>(
        &self,
        token: Token<S, R>,
        epoch: &Epoch<P>,
    ) -> (Token<Parked, R>, Option<Owner>) {
        let tell = self.drained(token.at(), |word| word.with_phase(Phase::Waits), epoch);
        (token.parked(), tell)
    }

    /// The owner has no I/O in flight any more. Looks again afterwards, also if it has seen a stop before: meanwhile another may have begun.
    fn drained(
        &self,
        at: usize,
        next: impl Fn(Packed) -> Packed,
        epoch: &Epoch<P>,
    ) -> Option<Owner> {
        // Publishes the ends of the I/O to the stop that sees the word.
        self.update(at, P::Word::exchange_release, next);
        match epoch.look_after_exchange() {
            Seen::Stopped(kicker) => Some(kicker),
            Seen::Going(_) => None,
        }
    }

    /// The owner was told to go on, and looks at the epoch again as after a claim.
    pub fn go_on(&self, token: Token<Parked, R>) -> Token<Claimed, R> {
        // Without an order: the owner has all that it needs, and the look that follows has the barrier.
        let claimed = |word: Packed| word.with_phase(Phase::Claimed);
        self.update(token.at(), P::Word::exchange_relaxed, claimed);
        let owner = token.owner();
        token.claimed(owner)
    }

    /// Takes arrivals out of the list and puts them behind `all`, oldest first.
    pub fn take<S: Takes>(&self, token: &mut Token<S, R>, all: &mut Vec<Arrived<T>>) {
        if self.peek(token.at()).newest().is_none() {
            return;
        }
        // Acquires the pieces of all arrivals, of which each but the first follows the one before by an exchange.
        let seen = self.update(token.at(), P::Word::exchange_acquire, Packed::emptied);
        self.arrivals.take(seen.newest(), all);
    }

    /// Closes the batch. Takes those who have arrived until then by the same exchange; others wait for the next batch.
    pub fn close(&self, token: Token<Open, R>, all: &mut Vec<Arrived<T>>) -> Token<Closed, R> {
        let closed = |word: Packed| word.emptied().with_phase(Phase::Closed);
        // Acquires the pieces, as `take` does.
        let seen = self.update(token.at(), P::Word::exchange_acquire, closed);
        self.arrivals.take(seen.newest(), all);
        token.closed()
    }

    /// The closed batch has no I/O in flight, and waits for its log or for superblocks. The queue that is returned is told so.
    pub fn wait(
        &self,
        token: Token<Closed, R>,
        epoch: &Epoch<P>,
    ) -> (Token<Waiting, R>, Option<Owner>) {
        let tell = self.drained(token.at(), |word| word.with_phase(Phase::Waits), epoch);
        (token.waiting(), tell)
    }

    /// The wait is over. The owner has I/O only if something else makes stops wait for it: its log's word.
    pub fn resume(&self, token: Token<Waiting, R>) -> Token<Closed, R> {
        // Without an order: the owner has all that it needs, and stops don't depend on it.
        let closed = |word: Packed| word.with_phase(Phase::Closed);
        self.update(token.at(), P::Word::exchange_relaxed, closed);
        token.resumed()
    }

    /// The batch is done, or never began: frees the word, and returns the queue to tell, if any. The record stays with the word. An error
    /// gives the token back, since somebody has arrived: the owner takes the list and hands the word over.
    pub fn release<S: Leaves>(
        &self,
        token: Token<S, R>,
        epoch: &Epoch<P>,
    ) -> Result<Option<Owner>, Token<S, R>> {
        let at = token.at();
        let seen = self.peek(at);
        if seen.newest().is_some() {
            return Err(token);
        }
        let free = seen.released(token.record().has_pages());
        let (token, record) = token.split();
        // Before the exchange: the next owner finds it.
        *self.records[at].lock() = Some(record);
        // Publishes the record, what the owner did, and the ends of its I/O.
        if self.word(at).exchange_release(seen.0, free.0).is_err() {
            let record = self.records[at].lock().take();
            return Err(token.with(record.expect("the word is its owner's still")));
        }
        Ok(match epoch.look_after_exchange() {
            Seen::Stopped(kicker) => Some(kicker),
            Seen::Going(_) => None,
        })
    }

    /// The batch is done, or never began, and the next one is this queue's, to which the caller posts the token; it may be its own. Its
    /// owner's look at the epoch is also the one for the batch that is done.
    pub fn hand_over<S: Leaves>(&self, token: Token<S, R>, to: Owner) -> Token<Claimed, R> {
        // Publishes the ends of the I/O to a stop that sees the next batch.
        self.update(token.at(), P::Word::exchange_release, |word| word.owned(to));
        token.claimed(to)
    }

    /// The number of words that somebody owns now.
    pub fn busy(&self) -> usize {
        let words = (0..self.count()).map(|at| self.acquire(at));
        words.filter(|word| word.owner().is_some()).count()
    }

    /// Words with I/O in flight, after a barrier.
    pub fn in_flight(&self, _: &impl Passed) -> InFlight {
        InFlight {
            words: self.batches(Packed::is_in_flight),
        }
    }

    /// Forgets words that are drained; true if there are others still. A word that was handed over is drained: its new owner looks
    /// at the epoch.
    pub fn is_in_flight(&self, left: &mut InFlight) -> bool {
        self.retain(&mut left.words, Packed::is_in_flight)
    }

    /// The batches that own words now. The caller has passed a barrier.
    pub fn owned(&self, _: &impl Passed) -> Owned {
        Owned(self.batches(|word| word.owner().is_some()))
    }

    /// Forgets words whose batches are done; true if there are others still. Unlike a word in flight, one that waits isn't done.
    pub fn is_owned(&self, left: &mut Owned) -> bool {
        self.retain(&mut left.0, |word| word.owner().is_some())
    }

    /// Words for which this is true, with their batches.
    fn batches(&self, is: fn(Packed) -> bool) -> Vec<(usize, u16)> {
        let words = (0..self.count()).map(|at| (at, self.acquire(at)));
        let words = words.filter(|(_, word)| is(*word));
        words.map(|(at, word)| (at, word.batch())).collect()
    }

    /// Keeps those of these batches for which this is still true; returns true if there are any.
    fn retain(&self, left: &mut Vec<(usize, u16)>, is: fn(Packed) -> bool) -> bool {
        left.retain(|&(at, batch)| {
            let word = self.acquire(at);
            is(word) && word.batch() == batch
        });
        !left.is_empty()
    }

    /// Acquires the ends of the I/O of an owner that says that it has none.
    fn acquire(&self, at: usize) -> Packed {
        Packed(self.word(at).load_acquire())
    }
}
