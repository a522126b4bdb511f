//! What a server of blkif front ends needs from the process that it is in.

use super::BackendOffers;
use crate::vhost_user::Detach;
use parking_lot::Mutex;
use pvblk_backend::{BlkifQueueParts, BlkifSource, OnEnd, Pressure, RequestSource, SourceEnd};
use pvblk_block::{BlockDevice, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tells the server that a connection's queue ended by itself (a broken ring), with a reason for people.
/// From any thread, any number of times; only marks and wakes.
pub type Ended = Arc<dyn Fn(String) + Send + Sync>;

/// The disks that a server serves. Called on its control thread: a slow call delays other handshakes, never I/O.
pub trait DiskHost: Send + Sync {
    /// The device behind a disk's name.
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>>;

    /// What to offer to front ends.
    fn offers(&self) -> BackendOffers;

    /// What buffers that a server needs for its front ends' data give way to.
    fn pressure(&self) -> Arc<Pressure>;

    /// Starts to serve a connection's queues. An error refuses the connection, with its text for the front end.
    fn attach(
        &self,
        disk: &str,
        front: &str,
        queues: Vec<BlkifQueueParts>,
        ended: Ended,
    ) -> Result<Box<dyn Attachment>, Error>;
}

/// A connection's queues at work. Dropped after its detach is done.
pub trait Attachment: Send {
    /// Stops taking requests, lets those in flight end, unmaps everything, then calls `done`, from any thread.
    /// Must not wait. Called once.
    fn detach(&mut self, done: Box<dyn FnOnce() + Send>);
}

type Done = Box<dyn FnOnce() + Send>;

/// Counts the queues of one connection that are still there.
struct Left {
    queues: AtomicUsize,
    done: Mutex<Option<Done>>,
}

impl Left {
    fn one_less(&self) {
        if self.queues.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(done) = self.done.lock().take()
        {
            done();
        }
    }
}

struct Attached {
    queues: Vec<Detach>,
    left: Arc<Left>,
}

impl Attachment for Attached {
    fn detach(&mut self, done: Done) {
        // One more than there are queues, so that `done` is in place before it can be called.
        *self.left.done.lock() = Some(done);
        self.queues.drain(..).for_each(|detach| detach());
        self.left.one_less();
    }
}

/// [`DiskHost::attach`] by an `attach` of one source: each queue becomes one. After an error those attached before are detached.
pub fn attach_queues(
    queues: Vec<BlkifQueueParts>,
    ended: &Ended,
    mut attach: impl FnMut(Box<dyn RequestSource>, OnEnd) -> Result<Detach, Error>,
) -> Result<Box<dyn Attachment>, Error> {
    let left = Arc::new(Left {
        queues: AtomicUsize::new(queues.len() + 1),
        done: Mutex::new(None),
    });
    let mut attached = Attached {
        queues: Vec::new(),
        left: Arc::clone(&left),
    };
    for parts in queues {
        let (left, ended) = (Arc::clone(&left), Arc::clone(ended));
        let source = Box::new(BlkifSource::new(parts));
        let on_end = Box::new(move |end| {
            left.one_less();
            if let SourceEnd::Broken(e) = end {
                ended(e.to_string());
            }
        });
        match attach(source, on_end) {
            Ok(detach) => attached.queues.push(detach),
            Err(e) => {
                attached.queues.drain(..).for_each(|detach| detach());
                return Err(e);
            }
        }
    }
    Ok(Box::new(attached))
}
