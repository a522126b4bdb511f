//! [`Epoch`]: stops all words while the array changes its members.

use super::packed::Owner;
use pvblk_block::stacked::{Native, Primitives, Word};

const COUNT: u64 = 0xffff_ffff;
const KICKER_SHIFT: u32 = 32;

/// The epoch as somebody saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// Members stay as they are until words in flight are drained. Every change has a number of its own.
    Going(u32),
    /// Stopped by this queue, which changes members. An owner that leaves a word tells this queue.
    Stopped(Owner),
}

/// Counts changes of members: even while the array goes on, odd while it is stopped; and the queue that stopped it. It has
/// a cache line of its own, which only rare things write.
#[repr(align(64))]
pub struct Epoch<P: Primitives = Native> {
    word: P::Word,
}

/// The proof that a barrier has passed: words that were claimed before it are seen by a scan that follows, and the owners of others see what was
/// written before it.
pub trait Passed {}

impl Passed for Stop {}

/// The right to change members. There is one at a time, and [`Epoch::go_on`] ends it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "words are stopped until `go_on`"]
pub struct Stop {
    odd: u64,
}

impl<P: Primitives> Default for Epoch<P> {
    fn default() -> Epoch<P> {
        Epoch {
            word: P::Word::new(0),
        }
    }
}

fn read(word: u64) -> Seen {
    match Owner::new((word >> KICKER_SHIFT) as u16) {
        Some(kicker) => Seen::Stopped(kicker),
        None => Seen::Going((word & COUNT) as u32),
    }
}

impl<P: Primitives> Epoch<P> {
    /// Stops words. An error is the queue that has stopped them already.
    pub fn stop(&self, kicker: Owner) -> Result<Stop, Owner> {
        let mut seen = self.word.load_relaxed();
        loop {
            if let Seen::Stopped(by) = read(seen) {
                return Err(by);
            }
            let odd = (seen + 1) & COUNT | u64::from(kicker.number()) << KICKER_SHIFT;
            // Acquires the changes of the stop before this one.
            match self.word.exchange_acquire(seen, odd) {
                Ok(()) => break self.stopped(odd),
                Err(now) => seen = now,
            }
        }
    }

    fn stopped(&self, odd: u64) -> Result<Stop, Owner> {
        // Pairs with the barrier of `Table`'s transitions: the scan of words sees those that didn't see the stop.
        P::full_barrier();
        Ok(Stop { odd })
    }

    /// Lets words go on. The caller has changed members, and tells all queues afterwards: their parked words wait for that.
    pub fn go_on(&self, stop: Stop) {
        let even = (stop.odd + 1) & COUNT;
        // Publishes the changes to those who see the epoch, and to the next stop.
        let done = self.word.exchange_release(stop.odd, even);
        debug_assert_eq!(done, Ok(()), "the epoch is its stopper's");
    }

    /// A look without a barrier before it: it may miss a stop that has begun. Its members are visible to a queue that sees an even epoch.
    pub fn look(&self) -> Seen {
        read(self.word.load_acquire())
    }

    /// A look after an exchange of a word: it sees the stop, or the stop sees the exchange.
    pub(super) fn look_after_exchange(&self) -> Seen {
        // Pairs with the barriers in `stop`, and in a sweep's mark (`Chunks`).
        P::full_barrier();
        self.look()
    }
}
