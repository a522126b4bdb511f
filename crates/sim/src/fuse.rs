//! Killing a process in the middle of a call.

use std::sync::atomic::{AtomicU32, Ordering};

/// Which process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one with the front end and its users.
    Front,
    /// The one with the lanes.
    Back,
}

/// What unwinds out of a call that was cut: this process is dead.
pub struct Killed(pub Side);

/// Counts the calls that a side makes into the simulated world, and cuts it off at one of them.
#[derive(Debug, Default)]
pub struct Fuse {
    front: AtomicU32,
    back: AtomicU32,
}

impl Fuse {
    fn of(&self, side: Side) -> &AtomicU32 {
        match side {
            Side::Front => &self.front,
            Side::Back => &self.back,
        }
    }

    /// The side dies at its `calls`-th call from now, 1 or more.
    pub fn light(&self, side: Side, calls: u32) {
        self.of(side).store(calls, Ordering::Relaxed);
    }

    /// Puts out both sides' fuses.
    pub fn douse(&self) {
        self.light(Side::Front, 0);
        self.light(Side::Back, 0);
    }

    /// To be called wherever code under test calls out. Doesn't return if this is where it dies.
    #[inline]
    pub fn tick(&self, side: Side) {
        let left = self.of(side).load(Ordering::Relaxed);
        // What is dropped while a call unwinds calls out too.
        if left == 0 || std::thread::panicking() {
            return;
        }
        self.of(side).store(left - 1, Ordering::Relaxed);
        if left == 1 {
            // Not `panic!`: no message, no backtrace.
            std::panic::resume_unwind(Box::new(Killed(side)));
        }
    }
}
