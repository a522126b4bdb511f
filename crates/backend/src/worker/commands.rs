//! Commands for a worker, from any thread.

use super::end::End;
use crate::lane::Lane;
use crate::source::SourceEnd;
use parking_lot::Mutex;
use pvblk_sys::EventFd;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Called once when a lane is over.
pub type OnEnd = Box<dyn FnOnce(SourceEnd) + Send>;

/// Names a lane while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneId(pub u64);

/// A lane's name, and the worker that has the lane, which may change. The worker counts the lane.
pub struct LaneHome {
    id: LaneId,
    workers: Arc<[Arc<CommandQueue>]>,
    at: AtomicUsize,
    /// A worker has it, or it is on its way to one.
    exists: AtomicBool,
}

impl LaneHome {
    /// A lane that begins at this one of the workers.
    pub fn new(id: LaneId, workers: &Arc<[Arc<CommandQueue>]>, at: usize) -> Arc<LaneHome> {
        Arc::new(LaneHome {
            id,
            workers: Arc::clone(workers),
            at: AtomicUsize::new(at),
            exists: AtomicBool::new(false),
        })
    }

    pub fn id(&self) -> LaneId {
        self.id
    }

    /// The lane's worker, which may be about to give it away.
    pub fn worker(&self) -> &Arc<CommandQueue> {
        // Acquires nothing: the queue's lock orders a command after the lane's arrival.
        &self.workers[self.number()]
    }

    /// Number of the lane's worker.
    pub fn number(&self) -> usize {
        self.at.load(Ordering::Relaxed)
    }

    /// Makes the lane pull from its source, or stop.
    pub fn reach(self: &Arc<LaneHome>, stop: bool) {
        self.worker().send(Command::Reach(Arc::clone(self), stop));
    }

    /// As [`LaneHome::reach`], for a worker that was asked and doesn't have the lane: it has given it away, and it may be on its way back.
    pub(super) fn pass_on(self: &Arc<LaneHome>, stop: bool) {
        if self.exists.load(Ordering::Relaxed) {
            self.reach(stop);
        }
    }

    /// Gives the lane to another worker. Only the worker that has it may. Gives it back if the other one is over.
    pub(super) fn move_to(
        self: &Arc<LaneHome>,
        worker: usize,
        lane: Box<Lane>,
        end: End,
    ) -> Result<(), (Box<Lane>, End)> {
        let (from, to) = (self.worker(), &self.workers[worker]);
        let arrival = Command::Arrive(Arc::clone(self), lane, end);
        // With the queue's lock: who finds the lane there sends behind its arrival, and the other worker can't have given it away before.
        let moved = to.send_and(arrival, || {
            to.lanes.fetch_add(1, Ordering::Relaxed);
            from.lanes.fetch_sub(1, Ordering::Relaxed);
            self.at.store(worker, Ordering::Relaxed);
        });
        match moved {
            Err(Command::Arrive(_, lane, end)) => Err((lane, end)),
            _ => Ok(()),
        }
    }

    /// The lane is there, or is on its way to its first worker.
    pub(super) fn begin(&self) {
        self.exists.store(true, Ordering::Relaxed);
        self.worker().lanes.fetch_add(1, Ordering::Relaxed);
    }

    /// The lane is over: no worker has it any more.
    pub(super) fn end(&self) {
        self.exists.store(false, Ordering::Relaxed);
        self.worker().lanes.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for LaneHome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}", self.id.0)
    }
}

/// A lane that a worker is to give away.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// The worker that gets it.
    pub to: usize,
    /// The most of its worker's work that it may have, in thousandths. Of those lanes it is the busiest.
    pub most: u64,
    /// It hasn't come from another worker within this time.
    pub stays: Duration,
}

pub enum Command {
    /// A new lane.
    Attach(Arc<LaneHome>, Box<Lane>, End),
    /// A lane that another worker had.
    Arrive(Arc<LaneHome>, Box<Lane>, End),
    /// Makes a lane pull from its source or stop, as [`LaneHome::reach`].
    Reach(Arc<LaneHome>, bool),
    /// Comes from a thread that was replaced while it was in a call: the lane, or `None` if the lane was
    /// dropped there, or panicked.
    Back(LaneId, Option<Box<Lane>>),
    /// Gives a lane to another worker.
    Share(Wish),
    Exit,
}

/// Wakes a lane from any thread, when its source has work that isn't seen on its descriptor.
#[derive(Clone, Debug)]
pub struct LaneWaker(pub(crate) Arc<LaneHome>);

impl LaneWaker {
    /// Makes the lane pull from its source soon, unless it has ended. Never blocks.
    pub fn wake(&self) {
        self.0.reach(false);
    }
}

/// Commands for a worker, and its number of lanes.
pub struct CommandQueue {
    /// `None` when the worker is over: who still has commands for it drops them.
    commands: Mutex<Option<Vec<Command>>>,
    pending: AtomicBool,
    pub(super) event: EventFd,
    /// Number of lanes that the worker has or will have.
    pub lanes: AtomicUsize,
}

impl CommandQueue {
    pub fn new() -> std::io::Result<CommandQueue> {
        Ok(CommandQueue {
            commands: Mutex::new(Some(Vec::new())),
            pending: AtomicBool::new(false),
            event: EventFd::new()?,
            lanes: AtomicUsize::new(0),
        })
    }

    /// Sends a command. It is dropped if the worker is over.
    pub fn send(&self, command: Command) {
        drop(self.send_and(command, || ()));
    }

    /// Sends a command, and does something before the worker can take it. Gives the command back if the worker is over.
    fn send_and(&self, command: Command, also: impl FnOnce()) -> Result<(), Command> {
        let mut commands = self.commands.lock();
        let Some(all) = &mut *commands else {
            return Err(command);
        };
        also();
        all.push(command);
        drop(commands);
        self.pending.store(true, Ordering::Release);
        self.event.notify();
        Ok(())
    }

    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    pub(super) fn take(&self, out: &mut VecDeque<Command>) {
        self.pending.store(false, Ordering::Release);
        out.extend(
            self.commands
                .lock()
                .iter_mut()
                .flat_map(|all| all.drain(..)),
        );
    }

    /// Takes the last commands: from now on none are taken. Otherwise those that name lanes would keep all queues, and so one another.
    pub(super) fn close(&self, out: &mut VecDeque<Command>) {
        out.extend(self.commands.lock().take().into_iter().flatten());
    }
}
