//! Members that end requests as they are submitted, as those in memory do. With such members a queue lets its calculations go to them when they have
//! some bytes, and goes on with what has ended: the next ones find pages and data in the CPU's cache.

use crate::core::Work;

/// Calculations of so many bytes go to the members before others begin: a part of the cache that a core has for itself.
const MUCH: usize = 192 << 10;
/// With other members fewer and longer requests are better, so after a try that has found requests under way so many occasions pass without one.
const PAUSE: u32 = 256;

/// Finds out if members are such ones.
#[derive(Default)]
pub(super) struct AtOnce {
    /// Calculations that were counted, and their bytes.
    counted: usize,
    bytes: usize,
    /// Occasions to let pass before the next try.
    pause: u32,
}

impl AtOnce {
    /// No calculation has gathered.
    pub fn begin(&mut self) {
        (self.counted, self.bytes) = (0, 0);
    }

    /// True if those that have gathered are to go to the members now.
    #[inline]
    pub fn goes(&mut self, works: &[Work]) -> bool {
        self.counted < works.len() && self.counts(works)
    }

    fn counts(&mut self, works: &[Work]) -> bool {
        let fresh = works[self.counted..].iter().map(Work::written_bytes);
        self.bytes += fresh.sum::<usize>();
        self.counted = works.len();
        self.has(self.bytes)
    }

    fn has(&mut self, bytes: usize) -> bool {
        if bytes < MUCH {
            return false;
        }
        self.bytes = 0;
        let tries = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        tries
    }

    /// They went. `ended`: so have all requests at the members.
    pub fn went(&mut self, ended: bool) {
        if !ended {
            self.pause = PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_members_are_tried_now_and_then() {
        let mut at_once = AtOnce::default();
        assert!(!at_once.has(MUCH - 1));
        for _ in 0..3 {
            assert!(at_once.has(MUCH));
            at_once.went(true);
        }
        assert!(at_once.has(MUCH));
        at_once.went(false);
        let pause = (0..).take_while(|_| !at_once.has(MUCH)).count();
        assert_eq!(pause, PAUSE as usize);
        at_once.went(true);
        assert!(at_once.has(MUCH), "they end at once");
    }
}
