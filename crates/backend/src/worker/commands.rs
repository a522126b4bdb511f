//! Commands for a worker, from any thread.

use super::end::End;
use crate::lane::Lane;
use crate::source::SourceEnd;
use parking_lot::Mutex;
use pvblk_sys::EventFd;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Called once when a lane is over.
pub type OnEnd = Box<dyn FnOnce(SourceEnd) + Send>;

/// Names a lane for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub u64);

pub enum Command {
    Attach(LaneId, Box<Lane>, End),
    Detach(LaneId),
    Wake(LaneId),
    /// From a thread that was replaced while it was in a call: the lane, or `None` if the lane was dropped there, or panicked.
    Back(LaneId, Option<Box<Lane>>),
    Exit,
}

/// Wakes a lane from any thread: its source has something to do that its descriptor doesn't tell.
#[derive(Clone)]
pub struct LaneWaker {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) lane: LaneId,
}

impl LaneWaker {
    /// The lane pulls from its source soon, unless it is gone. Never blocks.
    pub fn wake(&self) {
        self.mailbox.send(Command::Wake(self.lane));
    }
}

/// Commands for a worker, and how many lanes it has.
pub struct Mailbox {
    commands: Mutex<Vec<Command>>,
    pending: AtomicBool,
    pub(super) bell: EventFd,
    /// Lanes that are or will be here.
    pub lanes: Arc<AtomicUsize>,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        Ok(Mailbox {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            bell: EventFd::new()?,
            lanes: Arc::default(),
        })
    }

    pub fn send(&self, command: Command) {
        self.commands.lock().push(command);
        self.pending.store(true, Ordering::Release);
        self.bell.notify();
    }

    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    pub(super) fn take(&self, out: &mut VecDeque<Command>) {
        self.pending.store(false, Ordering::Release);
        out.extend(self.commands.lock().drain(..));
    }
}
