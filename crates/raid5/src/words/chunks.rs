//! [`Chunks`]: the chunks of the write-intent bitmap behind words. A chunk's word says whether its bit is on all members, so that a batch
//! finds that out without a lock.
//!
//! The background alone sets bits and takes them away; batches take chunks back that are about to be cleared.

use super::epoch::Passed;
use pvblk_block::stacked::{Native, Primitives, Word};
use std::ops::Range;

/// The state of a chunk, in the low bits of its word. The number of the sweep in which it was last used is above.
const STATE: u64 = 3;
/// The bit isn't on all members, or needn't stay there.
const CLEAR: u64 = 0;
/// The bit is on all members, and stays.
const SET: u64 = 1;
/// The bit is on all members, and is taken away unless a batch uses the chunk.
const CLEARING: u64 = 2;
const SWEEP_SHIFT: u32 = 2;

/// A chunk is cleared at this sweep after the one before its last use, or later: so it wasn't used between two sweeps.
const UNUSED: u64 = 2;

/// A word of its own line, which sweeps write only.
#[repr(align(64))]
struct Apart<W>(W);

/// See the module's documentation.
pub struct Chunks<P: Primitives = Native> {
    words: Box<[P::Word]>,
    /// The number of sweeps that have begun.
    sweeps: Apart<P::Word>,
    /// A chunk has two to the power of this sectors of each member.
    shift: u32,
}

/// Chunks that are being cleared. A batch that uses one of them and that doesn't know of it has owned its word since before a barrier that has passed.
#[derive(Debug, Default)]
#[must_use = "they stay as they are until `clear`"]
pub struct Marked(Vec<usize>);

impl Passed for Marked {}

/// A chunk as [`Chunks::peek`] found it.
#[derive(Clone, Copy, Debug)]
pub struct SeenChunk {
    chunk: usize,
    word: u64,
}

impl Marked {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn all(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }
}

impl<P: Primitives> Chunks<P> {
    /// Chunks of two to the power of `shift` sectors, and whether their bits are on all members.
    pub fn new(shift: u32, set: impl Iterator<Item = bool>) -> Chunks<P> {
        let word = |is_set: bool| P::Word::new(if is_set { SET } else { CLEAR });
        Chunks {
            words: set.map(word).collect(),
            sweeps: Apart(P::Word::new(0)),
            shift,
        }
    }

    /// The number of chunks.
    pub fn count(&self) -> usize {
        self.words.len()
    }

    /// Chunks of a range of a member's sectors, which isn't empty.
    fn of(&self, sectors: &Range<u64>) -> Range<usize> {
        let at = |sector: u64| (sector >> self.shift) as usize;
        at(sectors.start)..at(sectors.end - 1) + 1
    }

    /// Sectors of a chunk.
    pub fn sectors(&self, chunk: usize) -> Range<u64> {
        let chunk = chunk as u64;
        chunk << self.shift..(chunk + 1) << self.shift
    }

    fn state(&self, chunk: usize) -> u64 {
        self.words[chunk].load_acquire() & STATE
    }

    /// True if the bits of these sectors stay on all members until the caller, whose word is in flight and has passed its look at the epoch,
    /// leaves the word, though it may wait before, and members are flushed after that. False: one of them isn't there.
    pub fn may_write(&self, sectors: &Range<u64>) -> bool {
        let now = self.sweeps.0.load_relaxed();
        self.of(sectors).all(|chunk| self.use_chunk(chunk, now))
    }

    fn use_chunk(&self, chunk: usize, now: u64) -> bool {
        let word = &self.words[chunk];
        let mut seen = word.load_acquire();
        loop {
            match seen & STATE {
                CLEAR => return false,
                SET if seen >> SWEEP_SHIFT >= now => return true,
                _ => {}
            }
            match word.exchange_acquire(seen, now << SWEEP_SHIFT | SET) {
                Ok(()) => return true,
                Err(other) => seen = other,
            }
        }
    }

    /// The bits of these sectors are on all members.
    pub fn set(&self, sectors: &Range<u64>) {
        let now = self.sweeps.0.load_relaxed();
        for chunk in self.of(sectors) {
            let word = &self.words[chunk];
            let mut seen = word.load_relaxed();
            while seen & STATE == CLEAR {
                // Publishes what was before it to batches that wait for the bit.
                match word.exchange_release(seen, now << SWEEP_SHIFT | SET) {
                    Ok(()) => break,
                    Err(other) => seen = other,
                }
            }
        }
    }

    /// A sweep begins: chunks that weren't used between two sweeps, and that may be cleared, are to be. They are clear when the batches of all
    /// owned words are done ([`super::Table::owned`]), members were flushed then, and [`Chunks::clear`] was called.
    pub fn sweep(&self, may_clear: impl Fn(usize) -> bool) -> Marked {
        let now = self.sweeps.0.load_relaxed() + 1;
        self.sweeps.0.store_relaxed(now);
        let mut marked = Vec::new();
        for (chunk, word) in self.words.iter().enumerate() {
            let seen = word.load_relaxed();
            let is_due = match seen & STATE {
                // An earlier sweep was given up.
                CLEARING => true,
                SET => (seen >> SWEEP_SHIFT) + UNUSED <= now,
                _ => false,
            };
            if is_due && may_clear(chunk) && word.exchange_relaxed(seen, CLEARING).is_ok() {
                marked.push(chunk);
            }
        }
        // Pairs with the barrier of an owner's look at the epoch: the scan of words sees those that didn't see the mark.
        P::full_barrier();
        Marked(marked)
    }

    /// Chunks that are still unused become clear; their bits may be taken away. Returns their number.
    pub fn clear(&self, mut marked: Marked) -> usize {
        marked.0.retain(|chunk| self.clear_one(*chunk));
        marked.0.len()
    }

    fn clear_one(&self, chunk: usize) -> bool {
        let word = &self.words[chunk];
        word.exchange_relaxed(CLEARING, CLEAR).is_ok()
    }

    /// The same, and names the chunks that became clear. A look that finds their memory changed after this finds that they were cleared.
    pub fn clear_each(&self, mut marked: Marked) -> Vec<usize> {
        marked.0.retain(|chunk| self.clear_one(*chunk));
        // Pairs with the barrier of `is_as_seen`.
        P::full_barrier();
        marked.0
    }

    /// A look at a chunk without a word of one's own; `None`: it is clear. While [`Chunks::is_as_seen`], it wasn't clear since then.
    pub fn peek(&self, chunk: usize) -> Option<SeenChunk> {
        let now = self.sweeps.0.load_relaxed();
        // Noted as used, so that the next sweeps leave it.
        if !self.use_chunk(chunk, now) {
            return None;
        }
        let word = self.words[chunk].load_acquire();
        (word & STATE == SET).then_some(SeenChunk { chunk, word })
    }

    /// True if a chunk that was looked at wasn't cleared since: a chunk that is set again has a later sweep's number.
    pub fn is_as_seen(&self, seen: &SeenChunk) -> bool {
        P::full_barrier();
        self.words[seen.chunk].load_relaxed() == seen.word
    }

    /// True if a chunk's bit may be taken away. Only the thread that sets bits may count on it.
    pub fn is_clear(&self, chunk: usize) -> bool {
        self.state(chunk) == CLEAR
    }

    /// True if there are bits that a sweep may clear, now or later.
    pub fn any(&self) -> bool {
        (0..self.count()).any(|chunk| !self.is_clear(chunk))
    }

    /// The first sector from `sector` on that lies in a chunk whose bit is set; `None`: there is none.
    pub fn next_set(&self, sector: u64) -> Option<u64> {
        let first = (sector >> self.shift) as usize;
        let set = (first..self.count()).find(|chunk| !self.is_clear(*chunk))?;
        Some(sector.max(self.sectors(set).start))
    }

    /// The number of sectors of a range that lie in chunks whose bits are set.
    pub fn set_sectors(&self, range: Range<u64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let set = self.of(&range).filter(|chunk| !self.is_clear(*chunk));
        set.map(|chunk| {
            let Range { start, end } = self.sectors(chunk);
            end.min(range.end) - start.max(range.start)
        })
        .sum()
    }
}
