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

/// Names a lane while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub u64);

pub enum Command {
    Attach(LaneId, Box<Lane>, End),
    Detach(LaneId),
    Wake(LaneId),
    /// Comes from a thread that was replaced while it was in a call: the lane, or `None` if the lane was
    /// dropped there, or panicked.
    Back(LaneId, Option<Box<Lane>>),
    Exit,
}

/// Wakes a lane from any thread, when its source has work that isn't seen on its descriptor.
#[derive(Clone)]
pub struct LaneWaker {
    pub(crate) commands: Arc<CommandQueue>,
    pub(crate) lane: LaneId,
}

impl LaneWaker {
    /// Makes the lane pull from its source soon, unless it has ended. Never blocks.
    pub fn wake(&self) {
        self.commands.send(Command::Wake(self.lane));
    }
}

/// Commands for a worker, and its number of lanes.
pub struct CommandQueue {
    commands: Mutex<Vec<Command>>,
    pending: AtomicBool,
    pub(super) event: EventFd,
    /// Number of lanes that the worker has or will have.
    pub lanes: Arc<AtomicUsize>,
}

impl CommandQueue {
    pub fn new() -> std::io::Result<CommandQueue> {
        Ok(CommandQueue {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            event: EventFd::new()?,
            lanes: Arc::default(),
        })
    }

    pub fn send(&self, command: Command) {
        self.commands.lock().push(command);
        self.pending.store(true, Ordering::Release);
        self.event.notify();
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
