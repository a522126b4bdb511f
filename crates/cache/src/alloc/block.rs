//! Blocks of free frames that give their memory back to the system, and which frames have any.

use super::Allocator;
use crate::policy::Policy;
use std::ops::Range;

/// Order of a block that is one of the processor's larger pages: 512 frames, 2 MiB.
pub const HUGE_ORDER: usize = 9;

/// A block of free frames that is out of all lists: nobody has a frame of it, and nobody gets one until it is given back. Only the allocator
/// makes them, so its owner may do away with its data.
#[derive(Debug)]
#[must_use = "its frames are lost until it is given back"]
pub struct FreeBlock {
    first: u32,
    order: usize,
}

impl FreeBlock {
    /// Numbers of its frames.
    pub fn frames(&self) -> Range<usize> {
        let first = self.first as usize;
        first..first + (1 << self.order)
    }
}

/// Frames that were in use since their memory was given back: at most those have memory.
#[derive(Debug)]
pub(super) struct Warm {
    frames: Vec<bool>,
    count: usize,
}

impl Warm {
    /// None of them.
    pub fn new(frames: usize) -> Warm {
        Warm {
            frames: vec![false; frames],
            count: 0,
        }
    }

    /// A frame goes into use. The kernel gives a whole large page where none of it has any memory.
    pub fn touch(&mut self, frame: u32) {
        let frame = frame as usize;
        if self.frames[frame] {
            return;
        }
        let start = frame & !((1 << HUGE_ORDER) - 1);
        let huge = start..(start + (1 << HUGE_ORDER)).min(self.frames.len());
        match self.frames[huge.clone()].contains(&true) {
            true => self.set(frame..frame + 1, true),
            false => self.set(huge, true),
        }
    }

    fn set(&mut self, frames: Range<usize>, warm: bool) {
        for f in &mut self.frames[frames] {
            if *f != warm {
                *f = warm;
                self.count = if warm { self.count + 1 } else { self.count - 1 };
            }
        }
    }

    fn any(&self, frames: Range<usize>) -> bool {
        self.frames[frames].contains(&true)
    }
}

impl<P: Policy> Allocator<P> {
    /// Frames that may have memory.
    pub fn warm_frames(&self) -> usize {
        self.warm.count
    }

    /// True if a frame of this block may have memory.
    pub fn is_warm(&self, first: u32, order: usize) -> bool {
        self.warm.any(first as usize..first as usize + (1 << order))
    }

    /// Takes a block of `2^order` frames at a multiple of its size off the buddy lists, if all of it is there.
    pub fn take_block(&mut self, first: u32, order: usize) -> Option<FreeBlock> {
        let taken = self.buddy.take_block(first, order);
        taken.then_some(FreeBlock { first, order })
    }

    /// Takes a block back. `cold`: its memory is gone.
    pub fn give_block(&mut self, block: FreeBlock, cold: bool) {
        if cold {
            self.warm.set(block.frames(), false);
        }
        self.buddy.give_block(block.first, block.order);
    }
}

#[cfg(test)]
mod tests {
    use crate::alloc::{Allocator, End, Reserve};
    use crate::policy::Standard;

    #[test]
    fn frames_are_warm_from_their_use_to_their_release() {
        let mut a = Allocator::new(2048, 1, Standard);
        assert_eq!((a.warm_frames(), a.is_warm(0, 9)), (0, false));
        let frame = a.take(0, End::Cold, Reserve::None).unwrap();
        let unit = frame & !511;
        // A large page at a time.
        assert_eq!((a.warm_frames(), a.is_warm(unit, 9)), (512, true));
        assert!(a.take_block(unit, 9).is_none());
        a.give_at_once(frame);
        a.drain();
        let block = a.take_block(unit + 16, 4).unwrap();
        assert_eq!(block.frames(), unit as usize + 16..unit as usize + 32);
        a.give_block(block, true);
        assert_eq!((a.warm_frames(), a.free_frames()), (496, 2048));
        let block = a.take_block(unit, 9).unwrap();
        assert!(a.take_block(unit, 4).is_none() && a.free_frames() == 1536);
        a.give_block(block, true);
        assert_eq!(a.warm_frames(), 0);
    }
}
