//! Batches that count on the bit of their chunk, and a sweep that takes it away.

use super::owner;
use loom::sync::atomic::{AtomicU32, Ordering};
use pvblk_block::stacked::Primitives;
use pvblk_raid5::words::{Arrival, Chunks, Closed, Epoch, Looked, Open, Place, Table, Token};
// Not loom's: their counters panic again while a model that failed unwinds.
use std::sync::{Arc, Mutex};

/// A rule that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// A batch sees that the bit is there, and doesn't say that it uses the chunk.
    NotUsed,
    /// The sweep doesn't wait for words in flight.
    NoGrace,
    /// The sweep doesn't wait for a batch that waits for its log.
    WaitingIsDone,
    /// The sweep doesn't flush.
    NoFlush,
}

/// An array of one stripe and one chunk, whose bit is set.
pub struct Marked<P: Primitives> {
    stripes: Table<(), (), P>,
    epoch: Epoch<P>,
    chunks: Chunks<P>,
    places: Mutex<Vec<Place>>,
    /// The stripe's word, if a batch was open before the run.
    open: Mutex<Option<Token<Open, ()>>>,
    /// 1: the bit is on the members.
    bit: AtomicU32,
    /// 1: a write is in caches only.
    cached: AtomicU32,
    fault: Fault,
}

impl<P: Primitives> Marked<P> {
    /// The next sweep but one marks the chunk. Until the first of them has begun, a batch needs no exchange to use it.
    pub fn new(fault: Fault) -> Arc<Marked<P>> {
        let (stripes, places) = Table::new(1, 4, || ());
        let chunks = Chunks::new(3, std::iter::once(true));
        assert!(chunks.sweep(|_| true).is_empty(), "it is marked too early");
        assert!(chunks.may_write(&(0..8)));
        Arc::new(Marked {
            stripes,
            epoch: Epoch::default(),
            chunks,
            places: Mutex::new(places),
            open: Mutex::new(None),
            bit: AtomicU32::new(1),
            cached: AtomicU32::new(0),
            fault,
        })
    }

    fn claim(&self, queue: usize) -> Option<Token<Open, ()>> {
        let place = self.places.lock().expect("no panic").pop().expect("one");
        let Arrival::Claimed(token, _) = self.stripes.arrive(0, owner(queue), place, ()) else {
            return None;
        };
        match self.stripes.look(token, &self.epoch) {
            Looked::Open(open) => Some(open),
            Looked::Parked(..) => panic!("nobody stops words"),
        }
    }

    fn may_write(&self) -> bool {
        match self.fault {
            Fault::NotUsed => !self.chunks.is_clear(0),
            _ => self.chunks.may_write(&(0..8)),
        }
    }

    /// Opens a batch that may write, before others run.
    pub fn begin(&self, queue: usize) {
        let open = self.claim(queue).expect("nobody else runs");
        assert!(self.may_write());
        *self.open.lock().expect("no panic") = Some(open);
    }

    /// Ends the batch that [`Marked::begin`] opened.
    pub fn finish(&self) {
        let open = self.open.lock().expect("no panic").take();
        self.write(open.expect("it was opened"));
    }

    /// A batch that writes if the bit is there.
    pub fn try_write(&self, queue: usize) {
        let Some(open) = self.claim(queue) else {
            return;
        };
        match self.may_write() {
            true => self.write(open),
            false => self.release(self.stripes.close(open, &mut Vec::new())),
        }
    }

    fn write(&self, open: Token<Open, ()>) {
        let closed = self.stripes.close(open, &mut Vec::new());
        self.write_closed(closed);
    }

    /// Ends the batch that [`Marked::begin`] opened, after it has waited for its log.
    pub fn finish_after_log(&self) {
        let open = self.open.lock().expect("no panic").take();
        let closed = self
            .stripes
            .close(open.expect("it was opened"), &mut Vec::new());
        let (waiting, _) = self.stripes.wait(closed, &self.epoch);
        self.write_closed(self.stripes.resume(waiting));
    }

    fn write_closed(&self, closed: Token<Closed, ()>) {
        self.cached.store(1, Ordering::Relaxed);
        let bit = self.bit.load(Ordering::Relaxed);
        assert_eq!(bit, 1, "a write without its bit");
        self.release(closed);
    }

    fn release(&self, closed: Token<Closed, ()>) {
        assert!(self.stripes.release(closed, &self.epoch).is_ok());
    }

    /// A sweep from its begin to its end.
    pub fn sweep(&self) {
        let marked = self.chunks.sweep(|_| true);
        if marked.is_empty() {
            return;
        }
        let mut in_flight = self.stripes.in_flight(&marked);
        let mut owned = self.stripes.owned(&marked);
        loop {
            let waits = match self.fault {
                Fault::NoGrace => false,
                Fault::WaitingIsDone => self.stripes.is_in_flight(&mut in_flight),
                _ => self.stripes.is_owned(&mut owned),
            };
            if !waits {
                break;
            }
            loom::thread::yield_now();
        }
        if self.fault != Fault::NoFlush {
            self.cached.store(0, Ordering::Relaxed);
        }
        self.chunks.clear(marked);
        if self.chunks.is_clear(0) {
            self.bit.store(0, Ordering::Relaxed);
        }
    }

    /// Checks the end of a run.
    pub fn check_end(&self) {
        let (bit, cached) = (
            self.bit.load(Ordering::Relaxed),
            self.cached.load(Ordering::Relaxed),
        );
        assert!(bit == 1 || cached == 0, "a cached write without its bit");
    }
}
