//! The table from pages to frames, for look-ups without a lock.
//!
//! A hash table of chains, as large as there are frames. Only the core, under its lock, changes it. A look-up walks a chain while it may change
//! under it, a bounded number of steps; what it finds is checked against the frame's word. A page that isn't found may be there all the
//! same: the core looks again.
//!
//! A frame's word is a counter and flags. Data is copied between two looks at it, as with a sequence lock:
//!
//! ```text
//! reader:  begin (VALID, and the page is right) → copy → end: the same word?
//! writer:  shut (counter + 1, not VALID) → change → open (counter + 1, VALID)
//! ```

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

const NONE: u32 = u32::MAX;
/// The frame holds its page's data.
const VALID: u64 = 1;
/// The read of this page is to start the next window.
const MARKED: u64 = 2;
const COUNT: u64 = 256;
/// In the count of accesses: none, and it was read in advance.
const AHEAD: u8 = 128;
/// Longest walk; then the core looks.
const LONGEST_WALK: usize = 64;

#[derive(Debug)]
struct Slot {
    page: AtomicU64,
    word: AtomicU64,
    next: AtomicU32,
    /// Accesses since it was read or looked at by reclaim: 0, 1, or 2 for more.
    uses: AtomicU8,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Table {
    heads: Box<[AtomicU32]>,
    slots: Box<[Slot]>,
    shift: u32,
}

/// A look at a frame that may be read.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Number of the frame.
    pub frame: u32,
    word: u64,
}

impl Table {
    /// For `frames` frames; none holds a page.
    pub fn new(frames: usize) -> Table {
        let heads = (2 * frames).next_power_of_two().max(2);
        let slot = || Slot {
            page: AtomicU64::new(u64::MAX),
            word: AtomicU64::new(0),
            next: AtomicU32::new(NONE),
            uses: AtomicU8::new(0),
        };
        Table {
            heads: (0..heads).map(|_| AtomicU32::new(NONE)).collect(),
            slots: (0..frames).map(|_| slot()).collect(),
            shift: 64 - heads.trailing_zeros(),
        }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        (self.heads.len() * size_of::<AtomicU32>() + self.slots.len() * size_of::<Slot>()) as u64
    }

    #[inline]
    fn head(&self, page: u64) -> &AtomicU32 {
        // Neighbours go to different lines; an odd multiplier spreads them.
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift;
        &self.heads[hash as usize]
    }

    /// The frame that holds `page`. Without the core's lock it may be missed, or wrong by the time it is used.
    #[inline]
    pub fn find(&self, page: u64) -> Option<u32> {
        let mut at = self.head(page).load(Ordering::Acquire);
        for _ in 0..LONGEST_WALK {
            if at == NONE {
                return None;
            }
            let slot = &self.slots[at as usize];
            if slot.page.load(Ordering::Relaxed) == page {
                return Some(at);
            }
            at = slot.next.load(Ordering::Acquire);
        }
        None
    }

    /// The same under the core's lock, where chains are whole and may be long.
    pub fn find_locked(&self, page: u64) -> Option<u32> {
        let mut at = self.head(page).load(Ordering::Relaxed);
        while at != NONE {
            let slot = &self.slots[at as usize];
            if slot.page.load(Ordering::Relaxed) == page {
                return Some(at);
            }
            at = slot.next.load(Ordering::Relaxed);
        }
        None
    }

    /// Begins to read `page`, if its data is there and nobody is to read ahead of it.
    #[inline]
    pub fn begin(&self, page: u64) -> Option<Look> {
        let frame = self.find(page)?;
        let slot = &self.slots[frame as usize];
        let word = slot.word.load(Ordering::Acquire);
        let right = word & (VALID | MARKED) == VALID && slot.page.load(Ordering::Relaxed) == page;
        right.then_some(Look { frame, word })
    }

    /// True if what was copied since [`Table::begin`] is the page's data.
    #[inline]
    pub fn end(&self, look: Look) -> bool {
        // The copy's loads come before this one.
        fence(Ordering::Acquire);
        self.slots[look.frame as usize].word.load(Ordering::Relaxed) == look.word
    }

    /// Counts an access. True if it is the first, of a page that was read in advance.
    #[inline]
    pub fn touch(&self, frame: u32) -> bool {
        let uses = &self.slots[frame as usize].uses;
        let seen = uses.load(Ordering::Relaxed);
        // Most frames in use have two already: nothing is stored, and their line stays shared.
        if seen == 2 {
            return false;
        }
        uses.store((seen & !AHEAD) + 1, Ordering::Relaxed);
        seen == AHEAD
    }

    /// The page is read in advance.
    pub fn set_ahead(&self, frame: u32) {
        self.slots[frame as usize]
            .uses
            .store(AHEAD, Ordering::Relaxed);
    }

    /// True if it was read in advance and hasn't been accessed.
    pub fn is_ahead(&self, frame: u32) -> bool {
        self.slots[frame as usize].uses.load(Ordering::Relaxed) == AHEAD
    }

    /// Accesses, up to two.
    pub fn uses(&self, frame: u32) -> u8 {
        self.slots[frame as usize].uses.load(Ordering::Relaxed) & !AHEAD
    }

    /// Forgets all accesses but so many.
    pub fn set_uses(&self, frame: u32, uses: u8) {
        self.slots[frame as usize]
            .uses
            .store(uses, Ordering::Relaxed);
    }

    /// The page that a frame has, under the core's lock; [`u64::MAX`] if none.
    pub fn page(&self, frame: u32) -> u64 {
        self.slots[frame as usize].page.load(Ordering::Relaxed)
    }

    /// True if a frame may be read.
    pub fn is_open(&self, frame: u32) -> bool {
        self.slots[frame as usize].word.load(Ordering::Relaxed) & VALID != 0
    }

    /// True if the read of its page is to start the next window.
    pub fn is_marked(&self, frame: u32) -> bool {
        self.slots[frame as usize].word.load(Ordering::Relaxed) & MARKED != 0
    }

    /// From now on `frame` is found by `page`; it can't be read yet.
    pub fn insert(&self, page: u64, frame: u32) {
        let slot = &self.slots[frame as usize];
        debug_assert!(slot.word.load(Ordering::Relaxed) & VALID == 0);
        let head = self.head(page);
        slot.page.store(page, Ordering::Relaxed);
        slot.uses.store(0, Ordering::Relaxed);
        slot.next
            .store(head.load(Ordering::Relaxed), Ordering::Release);
        head.store(frame, Ordering::Release);
    }

    /// `frame` isn't found any more, and can't be read.
    pub fn remove(&self, frame: u32) {
        self.shut(frame);
        let slot = &self.slots[frame as usize];
        let next = slot.next.load(Ordering::Relaxed);
        let mut link = self.head(slot.page.load(Ordering::Relaxed));
        loop {
            let at = link.load(Ordering::Relaxed);
            if at == frame {
                link.store(next, Ordering::Release);
                break;
            }
            if at == NONE {
                debug_assert!(false, "a frame is in no chain");
                break;
            }
            link = &self.slots[at as usize].next;
        }
        slot.page.store(u64::MAX, Ordering::Relaxed);
    }

    /// From now on it can't be read: its data is about to change.
    pub fn shut(&self, frame: u32) {
        let word = &self.slots[frame as usize].word;
        let seen = word.load(Ordering::Relaxed);
        word.store((seen & !(COUNT - 1)).wrapping_add(COUNT), Ordering::Relaxed);
        // The word changes before the data does.
        fence(Ordering::Release);
    }

    /// From now on it can be read; `marked`: the read is to start the next window.
    pub fn open(&self, frame: u32, marked: bool) {
        let word = &self.slots[frame as usize].word;
        let seen = word.load(Ordering::Relaxed);
        let flags = if marked { VALID | MARKED } else { VALID };
        let next = (seen & !(COUNT - 1)).wrapping_add(COUNT) | flags;
        word.store(next, Ordering::Release);
    }

    /// From now on the read of its page is to start the next window, also if the page isn't there yet; its data stays as it is.
    pub fn mark(&self, frame: u32) {
        let word = &self.slots[frame as usize].word;
        let seen = word.load(Ordering::Relaxed);
        word.store(seen | MARKED, Ordering::Release);
    }

    /// The read of its page doesn't start a window any more.
    pub fn unmark(&self, frame: u32) {
        let word = &self.slots[frame as usize].word;
        let seen = word.load(Ordering::Relaxed);
        word.store(seen & !MARKED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn what_is_inserted_is_found_until_it_is_removed() {
        let t = Table::new(64);
        for f in 0..64u32 {
            t.insert(u64::from(f) * 7, f);
            assert!(t.begin(u64::from(f) * 7).is_none());
            t.open(f, f % 2 == 1);
        }
        for f in 0..64u32 {
            let page = u64::from(f) * 7;
            assert_eq!((t.find(page), t.find_locked(page)), (Some(f), Some(f)));
            assert_eq!(t.begin(page).is_some(), f % 2 == 0);
            t.unmark(f);
            let look = t.begin(page).unwrap();
            assert!(t.end(look));
            t.shut(f);
            assert!(!t.end(look));
            t.open(f, false);
            assert!(!t.end(look) && t.begin(page).is_some());
        }
        for f in (0..64u32).rev() {
            t.remove(f);
            assert_eq!(t.find_locked(u64::from(f) * 7), None);
            assert_eq!(t.page(f), u64::MAX);
        }
    }

    /// A reader never takes one page's data for another's, however frames move.
    #[test]
    fn readers_see_only_their_pages() {
        let (t, stop) = (Table::new(8), AtomicBool::new(false));
        let data: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|s| {
            let reader = || {
                let (mut hits, mut page) = (0u64, 0);
                while !stop.load(Ordering::Relaxed) {
                    page = (page + 1) % 24;
                    let Some(look) = t.begin(page) else { continue };
                    let seen = data[look.frame as usize].load(Ordering::Relaxed);
                    if t.end(look) {
                        assert_eq!(seen % 24, page);
                        hits += 1;
                    }
                }
                hits
            };
            let readers = [s.spawn(reader), s.spawn(reader)];
            for round in 0..60_000u64 {
                let frame = (round % 8) as u32;
                if t.page(frame) != u64::MAX {
                    t.remove(frame);
                }
                let page = (round * 5 + round / 8) % 24;
                if t.find_locked(page).is_none() {
                    t.insert(page, frame);
                    data[frame as usize].store(page + 24 * round, Ordering::Relaxed);
                    t.open(frame, false);
                }
                if round % 1024 == 0 {
                    std::thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
            let hits: u64 = readers.into_iter().map(|r| r.join().unwrap()).sum();
            println!("{hits} hits");
        });
    }
}
