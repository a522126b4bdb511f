//! Buddy lists: free frames as blocks of powers of two, at multiples of their size. A block that comes free joins its neighbour of the same size.

/// Order of the largest block: 1024 frames, 4 MiB.
pub const MAX_ORDER: usize = 10;
const NONE: u32 = u32::MAX;
/// In `orders`: no free block begins here.
const USED: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

/// Free frames. Blocks of one order are a list, and what came last is taken first.
#[derive(Debug)]
pub struct Buddy {
    /// Order of the free block that begins at each frame.
    orders: Vec<u8>,
    links: Vec<Link>,
    heads: [u32; MAX_ORDER + 1],
    free: usize,
}

impl Buddy {
    /// All of `frames` frames are free.
    pub fn new(frames: usize) -> Buddy {
        let none = Link {
            previous: NONE,
            next: NONE,
        };
        let mut buddy = Buddy {
            orders: vec![USED; frames],
            links: vec![none; frames],
            heads: [NONE; MAX_ORDER + 1],
            free: 0,
        };
        // Largest blocks, last ones first, so that low frames are taken first.
        let mut blocks = Vec::new();
        let mut at = 0;
        while at < frames {
            let aligned = at.trailing_zeros() as usize;
            let fits = (frames - at).ilog2() as usize;
            let order = aligned.min(fits).min(MAX_ORDER);
            blocks.push((at as u32, order));
            at += 1 << order;
        }
        for &(block, order) in blocks.iter().rev() {
            buddy.push(block, order);
            buddy.free += 1 << order;
        }
        buddy
    }

    /// Number of free frames.
    pub fn free_frames(&self) -> usize {
        self.free
    }

    /// Free blocks of an order.
    pub fn blocks(&self, order: usize) -> usize {
        let mut count = 0;
        let mut at = self.heads[order];
        while at != NONE {
            count += 1;
            at = self.links[at as usize].next;
        }
        count
    }

    fn push(&mut self, block: u32, order: usize) {
        let next = std::mem::replace(&mut self.heads[order], block);
        if next != NONE {
            self.links[next as usize].previous = block;
        }
        self.links[block as usize] = Link {
            previous: NONE,
            next,
        };
        self.orders[block as usize] = order as u8;
    }

    fn unlink(&mut self, block: u32, order: usize) {
        let Link { previous, next } = self.links[block as usize];
        match previous {
            NONE => self.heads[order] = next,
            p => self.links[p as usize].next = next,
        }
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
        self.orders[block as usize] = USED;
    }

    /// Takes a frame, from the smallest block there is. One after another they rise within what was a block.
    pub fn take(&mut self) -> Option<u32> {
        let found = (0..=MAX_ORDER).find(|&order| self.heads[order] != NONE)?;
        let block = self.heads[found];
        self.unlink(block, found);
        // The upper halves stay; the lowest frame goes.
        for order in (0..found).rev() {
            self.push(block + (1 << order), order);
        }
        self.free -= 1;
        Some(block)
    }

    /// Gives a frame back.
    pub fn give(&mut self, frame: u32) {
        self.give_block(frame, 0);
    }

    /// Takes a block of `2^order` frames at a multiple of its size, if all of it is free.
    pub fn take_block(&mut self, first: u32, order: usize) -> bool {
        let within = |o: usize| first & !((1 << o) - 1);
        let is_free = |o: &usize| self.orders[within(*o) as usize] == *o as u8;
        let Some(found) = (order..=MAX_ORDER).find(is_free) else {
            return false;
        };
        let mut block = within(found);
        self.unlink(block, found);
        // The halves without it stay.
        for order in (order..found).rev() {
            let upper = block + (1 << order);
            match first >= upper {
                true => {
                    self.push(block, order);
                    block = upper;
                }
                false => self.push(upper, order),
            }
        }
        self.free -= 1 << order;
        true
    }

    /// Gives a block back.
    pub fn give_block(&mut self, first: u32, order: usize) {
        let size = 1 << order;
        let (mut block, mut order) = (first, order);
        while order < MAX_ORDER {
            let buddy = block ^ (1 << order);
            if self.orders.get(buddy as usize) != Some(&(order as u8)) {
                break;
            }
            self.unlink(buddy, order);
            block &= !(1 << order);
            order += 1;
        }
        self.push(block, order);
        self.free += size;
    }

    /// True if `frame` is in a free block; slow.
    pub fn is_free(&self, frame: u32) -> bool {
        (0..=MAX_ORDER).any(|order| {
            let block = frame & !((1 << order) - 1);
            self.orders[block as usize] == order as u8
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_rise_and_join_again() {
        let mut b = Buddy::new(1024 + 64 + 3);
        assert_eq!(b.free_frames(), 1091);
        // Smallest blocks first: the last three frames.
        let first: Vec<_> = (0..6).map(|_| b.take().unwrap()).collect();
        assert_eq!(first, [1090, 1088, 1089, 1024, 1025, 1026]);
        first.into_iter().rev().for_each(|f| b.give(f));
        let blocks: Vec<_> = (0..=MAX_ORDER).map(|o| b.blocks(o)).collect();
        assert_eq!(blocks, [1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1]);
    }

    #[test]
    fn blocks_are_taken_out_of_larger_ones_and_join_again() {
        let mut b = Buddy::new(2048);
        assert!(b.take_block(512 + 16, 4));
        assert_eq!(b.free_frames(), 2032);
        assert!(!b.take_block(512, 9) && !b.is_free(530) && b.is_free(527) && b.is_free(544));
        assert!(b.take_block(0, 9) && b.take_block(1024, 10));
        b.give_block(512 + 16, 4);
        assert!(b.take_block(512, 9));
        assert_eq!((b.free_frames(), b.take()), (0, None));
        for (first, order) in [(512, 9), (1024, 10), (0, 9)] {
            b.give_block(first, order);
        }
        assert_eq!((b.free_frames(), b.blocks(MAX_ORDER)), (2048, 2));
    }

    #[test]
    fn all_can_be_taken_once() {
        let mut b = Buddy::new(777);
        let mut all: Vec<_> = std::iter::from_fn(|| b.take()).collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..777));
        assert_eq!(b.free_frames(), 0);
        assert!(!b.is_free(5));
        b.give(5);
        assert!(b.is_free(5) && !b.is_free(4));
    }
}
