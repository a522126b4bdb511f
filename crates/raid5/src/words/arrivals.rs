//! [`Arrivals`]: pieces of requests that wait, each in a place with a number. A place also has the number of the piece before its own, so a word
//! needs only that of the newest one to hold a whole list.

use pvblk_block::stacked::{Lock, Native, Primitives, Word};
use std::num::NonZeroU32;

/// A numbered place for a piece. A queue has as many as it has pieces in flight at most. A place goes with its piece to
/// the owner of the word, and comes back to its queue with the piece's end.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a place that is dropped is lost"]
pub struct Place(NonZeroU32);

impl Place {
    /// Number of the place, from 1.
    pub fn number(&self) -> NonZeroU32 {
        self.0
    }
}

/// A piece that was in a list, and its place.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived<T> {
    pub place: Place,
    pub piece: T,
}

struct Slot<T: Send, P: Primitives> {
    /// Number of the arrival before this one; 0: none.
    before: P::Word,
    /// Held for a move only, and by one side at a time: the holder of the place puts, and the owner of the word takes.
    piece: P::Lock<Option<T>>,
}

/// Pieces that wait in lists, each with the number of the one that came before it.
pub struct Arrivals<T: Send, P: Primitives = Native> {
    slots: Box<[Slot<T, P>]>,
}

impl<T: Send, P: Primitives> Arrivals<T, P> {
    /// Room for so many pieces, and its places.
    pub fn new(count: u32) -> (Arrivals<T, P>, Vec<Place>) {
        let slot = |_| Slot {
            before: P::Word::new(0),
            piece: P::Lock::new(None),
        };
        let slots = (0..count).map(slot).collect();
        let places = (1..=count).filter_map(NonZeroU32::new).map(Place);
        (Arrivals { slots }, places.collect())
    }

    fn slot(&self, number: NonZeroU32) -> &Slot<T, P> {
        &self.slots[number.get() as usize - 1]
    }

    /// Puts a piece at its place. Nobody finds it before it is linked and a word has its number.
    pub(super) fn put(&self, place: &Place, piece: T) {
        let old = self.slot(place.0).piece.lock().replace(piece);
        debug_assert!(old.is_none(), "two pieces at place {}", place.0);
    }

    /// Says which arrival came before it, as the word has it.
    pub(super) fn link(&self, place: &Place, before: Option<NonZeroU32>) {
        let before = before.map_or(0, NonZeroU32::get);
        // The exchange of the word publishes it.
        self.slot(place.0).before.store_relaxed(u64::from(before));
    }

    /// Takes out the piece that was put at this place.
    pub(super) fn take_back(&self, place: &Place) -> T {
        let piece = self.slot(place.0).piece.lock().take();
        piece.expect("a piece is taken once")
    }

    /// Takes out the pieces of a list, for the owner that emptied it and acquired its word, and puts them behind `all`, oldest first.
    pub(super) fn take(&self, newest: Option<NonZeroU32>, all: &mut Vec<Arrived<T>>) {
        let from = all.len();
        let mut next = newest;
        while let Some(number) = next {
            // Before the piece is taken: its place is its queue's again soon after.
            next = NonZeroU32::new(self.slot(number).before.load_relaxed() as u32);
            let place = Place(number);
            let piece = self.take_back(&place);
            all.push(Arrived { place, piece });
        }
        all[from..].reverse();
    }
}
