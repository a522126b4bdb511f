//! The invariants of [`Memory`], for tests.

use super::{Frame, Memory};
use crate::core::writeback::WriteBack;
use crate::lists::On;
use crate::policy::Policy;

impl<P: Policy> Memory<P> {
    /// Errors if an invariant doesn't hold, also one with the write-back machine; slow. `held`: free frames that requests hold.
    pub fn check(&self, held: usize, writes: &WriteBack) -> Result<(), String> {
        let (mut used, mut reading) = (0, 0);
        for (at, &state) in self.frames.iter().enumerate() {
            let frame = at as u32;
            let err = |what: &str| Err(format!("frame {at} is {state:?} and {what}"));
            reading += usize::from(self.is_reading(frame));
            used += usize::from(state != Frame::Free);
            if self.alloc.is_free(frame) && state != Frame::Free {
                return err("free");
            }
            if (self.lists.on(frame) != On::None) != (state == Frame::Cached) {
                return err("on a list, or not, wrongly");
            }
            if self.table.is_open(frame) != (state == Frame::Cached) {
                return err("readers may use it, or not, wrongly");
            }
            let page = self.table.page(frame);
            match self.page_of(frame) {
                Some(_) if self.find(page) != Some(frame) => return err("isn't found by its page"),
                None if page != u64::MAX => return err("has a page in the table"),
                _ => {}
            }
            let is_right = match state {
                Frame::Free | Frame::Reading { .. } => writes.is_clean(frame),
                Frame::Cached => !writes.is_old(frame),
                Frame::Old => writes.is_old(frame),
            };
            if !is_right {
                return err("something else for write-back");
            }
            if writes.is_dirty(frame) && !writes.is_dirty_page(page, frame) {
                return err("isn't the dirty frame of its page");
            }
        }
        let free = self.alloc.free_frames() + self.alloc.listed_frames();
        if used + held + free != self.frames.len() {
            return Err(format!("{used} frames in use, {held} held, {free} free"));
        }
        match reading == self.reading {
            true => Ok(()),
            false => Err(format!(
                "{reading} frames are being read, {} counted",
                self.reading
            )),
        }
    }
}
