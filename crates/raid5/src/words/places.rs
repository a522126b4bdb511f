//! [`Places`] of pieces: each queue has some of its own.

use super::arrivals::Place;
use pvblk_block::stacked::{Lock, Native, Primitives};

/// Places that no open queue has.
pub struct Places<P: Primitives = Native> {
    free: P::Lock<Vec<Place>>,
}

/// Places of a queue: those that aren't with a piece. Each comes back with its piece's end, so that a queue that has none waits for its
/// own pieces only.
#[derive(Debug)]
#[must_use = "places that are dropped are lost"]
pub struct OwnPlaces {
    free: Vec<Place>,
    count: usize,
}

impl<P: Primitives> Places<P> {
    /// All places of a table.
    pub fn new(all: Vec<Place>) -> Places<P> {
        Places {
            free: P::Lock::new(all),
        }
    }

    /// `count` places for a queue that is opened; `None`: there aren't so many left.
    pub fn open(&self, count: usize) -> Option<OwnPlaces> {
        let mut free = self.free.lock();
        let from = free.len().checked_sub(count)?;
        Some(OwnPlaces {
            free: free.split_off(from),
            count,
        })
    }

    /// The queue is closed. Places of its pieces that aren't done come by [`Places::put`].
    pub fn close(&self, mut own: OwnPlaces) {
        self.free.lock().append(&mut own.free);
    }

    /// A place whose queue was closed before its piece was done.
    pub fn put(&self, place: Place) {
        self.free.lock().push(place);
    }
}

impl OwnPlaces {
    /// A place for a piece; `None`: all are with pieces.
    pub fn take(&mut self) -> Option<Place> {
        self.free.pop()
    }

    /// A piece is done.
    pub fn put(&mut self, place: Place) {
        debug_assert!(self.free.len() < self.count, "each place comes back once");
        self.free.push(place);
    }

    /// Number of places that the queue has.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of places that aren't with pieces.
    pub fn left(&self) -> usize {
        self.free.len()
    }

    /// Number of places that are with pieces.
    pub fn in_use(&self) -> usize {
        self.count - self.free.len()
    }
}
