//! Bugs on purpose, for the simulation to find: writes that were answered are replayed at the next connection; a lost cache is
//! taken for the one that was there.

use crate::plug::Merged;
use pvblk_block::{Buffer, Op, Request};
use std::cell::{Cell, RefCell};

thread_local! {
    static IGNORES_CACHE: Cell<bool> = const { Cell::new(false) };
    static ON: Cell<bool> = const { Cell::new(false) };
    /// The last writes that were answered, with the queue's key.
    static KEPT: RefCell<Vec<(usize, Merged)>> = const { RefCell::new(Vec::new()) };
}

/// Writes kept of all queues.
const MOST: usize = 8;
/// Tag of a copy, whose completion nobody waits for.
const SWALLOWED: u64 = u64::MAX;

/// Switches the bug on or off for front ends that this thread drives, and forgets what was kept.
pub fn replay_answered(on: bool) {
    ON.set(on);
    KEPT.take();
}

/// Switches the bug on or off for front ends that this thread drives: the mark of the disk's cache isn't looked at.
pub fn ignore_cache_mark(on: bool) {
    IGNORES_CACHE.set(on);
}

pub(crate) fn ignores_cache_mark() -> bool {
    IGNORES_CACHE.get()
}

/// A request is answered.
pub(crate) fn keep(key: usize, merged: &Merged) {
    if !ON.get() || merged.first.op != Op::Write || swallows(merged) {
        return;
    }
    let copy = |r: &Request| -> Option<Box<Request>> {
        let all: Vec<u8> = r.buffers.iter().flat_map(Buffer::to_vec).collect();
        let buffer = Buffer::anonymous(all.len()).ok()?;
        buffer.write(0, &all);
        let buffers = vec![buffer];
        Some(Request::with_buffers(r.op, r.sector, buffers, SWALLOWED))
    };
    let mut copies = merged.requests().map(|r| copy(r));
    let Some(Some(first)) = copies.next() else {
        return;
    };
    let merged = Merged {
        first,
        rest: copies.flatten().collect(),
        ..*merged
    };
    KEPT.with_borrow_mut(|kept| {
        if kept.len() == MOST {
            kept.remove(0);
        }
        kept.push((key, merged));
    });
}

/// Hands out what was kept of a queue that is parked.
pub(crate) fn replay(key: usize) -> Vec<Merged> {
    let all = KEPT.take();
    let (ours, others) = all.into_iter().partition(|(k, _)| *k == key);
    KEPT.set(others);
    let ours: Vec<(usize, Merged)> = ours;
    ours.into_iter().map(|(_, merged)| merged).collect()
}

/// True for a copy.
pub(crate) fn swallows(merged: &Merged) -> bool {
    merged.first.tag == SWALLOWED
}
