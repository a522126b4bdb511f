//! The end of a lane, which is reported exactly once.

use super::commands::{LaneHome, OnEnd};
use crate::lane::Lane;
use crate::source::SourceEnd;
use pvblk_block::{Error, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The callback for a lane's end. If a bug drops it before the end was reported, the drop reports the bug.
pub struct End {
    on_end: Option<OnEnd>,
    home: Arc<LaneHome>,
}

impl End {
    pub fn new(on_end: OnEnd, home: &Arc<LaneHome>) -> End {
        home.begin();
        End {
            on_end: Some(on_end),
            home: Arc::clone(home),
        }
    }

    fn take(&mut self) -> Option<OnEnd> {
        let on_end = self.on_end.take()?;
        self.home.end();
        Some(on_end)
    }

    /// Gives up the lane's place without calling the callback.
    pub fn forget(mut self) {
        self.take();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(on_end) = self.take() {
            tell(on_end, panicked());
        }
    }
}

/// Calls the callback. A panic in it has printed its message, and has no other effect.
fn tell(on_end: OnEnd, end: SourceEnd) {
    let _ = catch_unwind(AssertUnwindSafe(|| on_end(end)));
}

/// Drops a lane, its queue and its mappings, and then reports its end. If the lane panics there, that is its
/// end.
pub fn finish(lane: Option<Box<Lane>>, told: Option<End>, end: SourceEnd) {
    // First: nobody is to look for the lane any more.
    let on_end = told.and_then(|mut t| t.take());
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(lane)));
    if let Some(on_end) = on_end {
        tell(on_end, dropped.map_or_else(|_| panicked(), |()| end));
    }
}

/// The end of a lane that a panic ended.
pub fn panicked() -> SourceEnd {
    let why = "a bug: its worker panicked; see the log";
    SourceEnd::Broken(Error::new(ErrorKind::Os, why))
}
