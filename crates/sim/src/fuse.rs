//! Kills a simulated process in the middle of a call.

use std::sync::atomic::{AtomicU32, Ordering};

/// One of the two simulated processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process with the front end and its users.
    Front,
    /// The process with the lanes.
    Back,
}

/// The payload of the panic that unwinds out of a call at which this process died.
pub struct Killed(pub Side);

/// Counts the calls that a process makes into the simulation, and kills it at one of them.
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

    /// The process dies at its `calls`-th call from now, 1 or more.
    pub fn light(&self, side: Side, calls: u32) {
        self.of(side).store(calls, Ordering::Relaxed);
    }

    /// Neither process dies at a call any more.
    pub fn douse(&self) {
        self.light(Side::Front, 0);
        self.light(Side::Back, 0);
    }

    /// To be called wherever code under test calls out. It doesn't return if the process dies at
    /// this call.
    #[inline]
    pub fn tick(&self, side: Side) {
        let left = self.of(side).load(Ordering::Relaxed);
        // Destructors that run while a call unwinds call out too.
        if left == 0 || std::thread::panicking() {
            return;
        }
        self.of(side).store(left - 1, Ordering::Relaxed);
        if left == 1 {
            // Unlike `panic!` this prints no message and no backtrace.
            std::panic::resume_unwind(Box::new(Killed(side)));
        }
    }
}
