//! The invariants of [`WriteBack`], for tests.

use super::{State, WriteBack};
use std::collections::BTreeMap;

impl WriteBack {
    /// True if the frame has an older version, which another frame has superseded.
    pub fn is_old(&self, frame: u32) -> bool {
        self.frames[frame as usize].old
    }

    /// True if the page is listed as dirty with this frame.
    pub fn is_dirty_page(&self, page: u64, frame: u32) -> bool {
        self.dirty.get(&page) == Some(&frame)
    }

    /// Errors if an invariant doesn't hold; slow. `exists`: there is a request with this number.
    pub fn check(&self, exists: impl Fn(u32) -> bool) -> Result<(), String> {
        let mut writing = 0;
        let mut epochs: BTreeMap<u64, u32> = BTreeMap::new();
        for (at, f) in self.frames.iter().enumerate() {
            let is_awaited = self.syncs.any(at as u32);
            let is_right = match f.state {
                State::Clean => !f.behind && !f.old && !is_awaited,
                State::Dirty => !f.old,
                State::Writing => true,
            };
            if !is_right || f.fua && !is_awaited {
                return Err(format!("frame {at} is {f:?}, waited for: {is_awaited}"));
            }
            writing += usize::from(f.state == State::Writing);
            if f.state != State::Clean {
                *epochs.entry(f.epoch).or_default() += 1;
            }
        }
        for (page, &frame) in &self.dirty {
            if !self.is_dirty(frame) {
                return Err(format!("page {page} isn't dirty and listed so"));
            }
        }
        if epochs != self.epochs {
            return Err(format!(
                "{:?} frames are unwritten by their numbers, {epochs:?} are",
                self.epochs
            ));
        }
        let unwritten = epochs.values().sum::<u32>() as usize;
        if writing != self.writing || unwritten != self.dirty.len() + writing {
            return Err(format!(
                "{writing} frames are being written, {} counted, {} dirty, {unwritten} by age",
                self.writing,
                self.dirty.len()
            ));
        }
        if self.flushes.iter().any(|f| !exists(f.request)) {
            return Err("a flush is waited for that there isn't".into());
        }
        self.syncs.check(exists)
    }
}
