//! Requests that wait for I/O on a frame.

use slab::Slab;

const NONE: u32 = u32::MAX;

/// Entry of a request that waits for a frame, but not to copy one of its pages.
pub const NO_PAGE: u64 = u64::MAX;

struct Entry {
    request: u32,
    page: u64,
    next: u32,
}

/// One chain of waiting requests for each frame. It owns the chains and nothing else: the core knows which I/O ends a wait.
///
/// **States** of a chain: empty or not. **Events:** a request is added; the chain is detached, when the I/O has ended, or moved to another frame, when
/// the page moves there.
///
/// **Invariants.** An entry is in one chain: on a frame, or detached and in the hands of the core, which drains it before its step ends. Requests leave
/// a chain in the order in which they came. A chain has at most one entry for each page of each request, so entries are bounded by the pages that
/// requests wait for (`MOST_PENDING` each).
pub struct Waiters {
    heads: Box<[u32]>,
    entries: Slab<Entry>,
    spare: Vec<(u32, u64)>,
}

/// The waiting requests of a frame, taken off it.
#[must_use = "its requests would wait for ever: drain it"]
pub struct Chain(u32);

impl Chain {
    /// True if no request waited: there is nothing to drain.
    pub fn is_empty(&self) -> bool {
        self.0 == NONE
    }
}

impl Waiters {
    /// Bytes for each frame.
    pub const FRAME_BYTES: usize = size_of::<u32>();

    pub fn new(frames: usize) -> Waiters {
        Waiters {
            heads: vec![NONE; frames].into(),
            entries: Slab::new(),
            spare: Vec::new(),
        }
    }

    /// Adds a request to the chain of `frame`; `page` is the page to copy at the end of the wait, or [`NO_PAGE`].
    pub fn add(&mut self, frame: u32, request: u32, page: u64) {
        let head = &mut self.heads[frame as usize];
        let entry = Entry {
            request,
            page,
            next: *head,
        };
        *head = self.entries.insert(entry) as u32;
    }

    /// True if any request waits for `frame`.
    pub fn any(&self, frame: u32) -> bool {
        self.heads[frame as usize] != NONE
    }

    /// The request that was added to the chain last.
    pub fn newest(&self, frame: u32) -> Option<u32> {
        let entry = self.entries.get(self.heads[frame as usize] as usize)?;
        Some(entry.request)
    }

    /// Takes the chain off `frame`.
    pub fn detach(&mut self, frame: u32) -> Chain {
        Chain(std::mem::replace(&mut self.heads[frame as usize], NONE))
    }

    /// Moves the chain of `old` to `new`, which has none.
    pub fn move_chain(&mut self, old: u32, new: u32) {
        debug_assert!(!self.any(new));
        self.heads[new as usize] = std::mem::replace(&mut self.heads[old as usize], NONE);
    }

    /// Ends a chain: its requests and pages, in the order in which they were added. To be given back to [`Waiters::keep`].
    pub fn drain(&mut self, Chain(mut at): Chain) -> Vec<(u32, u64)> {
        let mut all = std::mem::take(&mut self.spare);
        while at != NONE {
            let entry = self.entries.remove(at as usize);
            all.push((entry.request, entry.page));
            at = entry.next;
        }
        all.reverse();
        all
    }

    /// Keeps the memory of a drained list for the next one.
    pub fn keep(&mut self, mut list: Vec<(u32, u64)>) {
        list.clear();
        self.spare = list;
    }

    /// Errors if an entry is in no frame's chain, in two, or of a request that there isn't; slow.
    pub fn check(&self, exists: impl Fn(u32) -> bool) -> Result<(), String> {
        let mut seen = 0;
        for &head in &self.heads {
            let mut at = head;
            while at != NONE {
                let Some(entry) = self.entries.get(at as usize) else {
                    return Err(format!("a chain of waiting requests goes on at {at}"));
                };
                if !exists(entry.request) && entry.page != NO_PAGE {
                    return Err(format!("request {} waits and isn't there", entry.request));
                }
                seen += 1;
                at = entry.next;
            }
        }
        match seen == self.entries.len() {
            true => Ok(()),
            false => Err(format!(
                "{seen} requests wait in chains, of {}",
                self.entries.len()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_leave_in_their_order_and_chains_move() {
        let mut w = Waiters::new(4);
        assert_eq!((w.any(1), w.newest(1)), (false, None));
        (0..3).for_each(|r| w.add(1, r, 10 + u64::from(r)));
        w.add(2, 7, NO_PAGE);
        assert_eq!((w.newest(1), w.newest(2)), (Some(2), Some(7)));
        w.move_chain(1, 3);
        assert!(!w.any(1) && w.any(3));
        w.check(|r| r < 3).unwrap();
        let chain = w.detach(3);
        // Detached, and not drained: the entries are in no chain.
        assert!(w.check(|_| true).is_err());
        let list = w.drain(chain);
        assert_eq!(list, [(0, 10), (1, 11), (2, 12)]);
        w.keep(list);
        w.check(|_| true).unwrap();
        assert!(
            w.check(|_| false).is_ok(),
            "an entry without a page may be of a request that is done"
        );
        w.add(0, 5, 4);
        assert!(w.check(|_| false).is_err());
        let chain = w.detach(0);
        assert_eq!(w.drain(chain).len(), 1);
    }
}
