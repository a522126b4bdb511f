//! Interfaces that a server of blkif front ends requires of its process.

use crate::vhost_user::Detach;
use parking_lot::Mutex;
use pvblk_backend::{
    BlkifQueueParts, BlkifSource, Fence, OnEnd, Pressure, RequestSource, SourceEnd,
};
use pvblk_block::{BlockDevice, Error};
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Callback for a queue that ended by itself (a broken ring), with a reason for the log. May be called from any
/// thread, any number of times; it only records and wakes.
pub type Ended = Arc<dyn Fn(String) + Send + Sync>;

/// The disks of a server. Its methods run on the control thread: a slow one delays other handshakes, never I/O.
pub trait DiskHost: Send + Sync {
    /// The device behind a disk's name.
    fn device(&self, disk: &str) -> Option<Arc<dyn BlockDevice>>;

    /// The fence of a disk, which all its exports share.
    fn fence(&self, disk: &str) -> Option<Arc<Fence>>;

    /// Offers to front ends.
    fn offers(&self) -> BackendOffers;

    /// Memory pressure that limits the server's buffers for front ends' data.
    fn pressure(&self) -> Arc<Pressure>;

    /// Starts to serve a connection's queues. An error refuses the connection; the front end gets its text.
    fn attach(
        &self,
        disk: &str,
        front: &str,
        queues: Vec<BlkifQueueParts>,
        ended: Ended,
    ) -> Result<Box<dyn Attachment>, Error>;
}

/// A connection's attached queues. Dropped after its detach is done.
pub trait Attachment: Send {
    /// Stops taking requests, lets those in flight end, unmaps everything, then calls `done`, from any thread. Must
    /// not wait. Called once.
    fn detach(&mut self, done: Box<dyn FnOnce() + Send>);
}

type OnDetached = Box<dyn FnOnce() + Send>;

/// Counter of the queues of a connection that are still attached.
struct RemainingQueues {
    queues: AtomicUsize,
    done: Mutex<Option<OnDetached>>,
}

impl RemainingQueues {
    fn one_less(&self) {
        if self.queues.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(done) = self.done.lock().take()
        {
            done();
        }
    }
}

struct AttachedQueues {
    queues: Vec<Detach>,
    left: Arc<RemainingQueues>,
}

impl Attachment for AttachedQueues {
    fn detach(&mut self, done: OnDetached) {
        // One more than there are queues, so that `done` is stored before it can be called.
        *self.left.done.lock() = Some(done);
        self.queues.drain(..).for_each(|detach| detach());
        self.left.one_less();
    }
}

/// Implements [`DiskHost::attach`] by an `attach` of single queues. Errors if the first can't be attached. If a later
/// one fails, the earlier ones are attached already and have to be detached: the connection then ends as if one of
/// its queues had ended.
pub fn attach_queues(
    queues: Vec<BlkifQueueParts>,
    ended: &Ended,
    mut attach: impl FnMut(Box<dyn RequestSource>, OnEnd) -> Result<Detach, Error>,
) -> Result<Box<dyn Attachment>, Error> {
    let count = queues.len();
    let left = Arc::new(RemainingQueues {
        queues: AtomicUsize::new(count + 1),
        done: Mutex::new(None),
    });
    let mut attached = AttachedQueues {
        queues: Vec::new(),
        left: Arc::clone(&left),
    };
    for parts in queues {
        let (left, tell) = (Arc::clone(&left), Arc::clone(ended));
        let source = Box::new(BlkifSource::new(parts));
        let on_end = Box::new(move |end| {
            left.one_less();
            if let SourceEnd::Broken(e) = end {
                tell(e.to_string());
            }
        });
        match attach(source, on_end) {
            Ok(detach) => attached.queues.push(detach),
            Err(e) if attached.queues.is_empty() => return Err(e),
            Err(e) => {
                (attached.queues.len()..count).for_each(|_| attached.left.one_less());
                ended(e.to_string());
                break;
            }
        }
    }
    Ok(Box::new(attached))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_backend::{Access, GrantError, GrantMapper, PageUse};
    use pvblk_block::Buffer;
    use pvblk_protocol::blkif::{BackRing, EventFdChannel};
    use pvblk_sys::{PAGE_SIZE, PeerEvent, Region};
    use std::sync::atomic::AtomicBool;

    struct NoPages;

    impl GrantMapper for NoPages {
        fn map(
            &mut self,
            gref: u32,
            _: usize,
            _: usize,
            _: bool,
        ) -> Result<(Buffer, Access), GrantError> {
            Err(GrantError::Bad(gref))
        }

        fn release(&mut self, _: PageUse) {}
    }

    fn queue() -> BlkifQueueParts {
        let event = || PeerEvent::new().unwrap();
        BlkifQueueParts {
            name: "test".into(),
            ring: BackRing::new(Region::anonymous(PAGE_SIZE).unwrap()).unwrap(),
            channel: Box::new(EventFdChannel {
                to_peer: event(),
                from_peer: event(),
            }),
            mapper: Box::new(NoPages),
            max_indirect_segments: 0,
        }
    }

    struct Outcome {
        result: Result<Box<dyn Attachment>, Error>,
        told: Vec<String>,
        ends: Vec<OnEnd>,
    }

    /// Attaches three queues, of which the first `good` succeed; returns the result, the reason of the end, and the
    /// ends of the good ones.
    fn attach(good: usize) -> Outcome {
        let (told, mut ends) = (Arc::new(Mutex::new(Vec::new())), Vec::new());
        let ended: Ended = {
            let told = Arc::clone(&told);
            Arc::new(move |why| told.lock().push(why))
        };
        let result = attach_queues(vec![queue(), queue(), queue()], &ended, |_, on_end| {
            if ends.len() == good {
                return Err(Error::config("no more descriptors"));
            }
            ends.push(on_end);
            Ok(Box::new(|| {}))
        });
        let told = told.lock().clone();
        Outcome { result, told, ends }
    }

    #[test]
    fn a_queue_that_cannot_be_attached_ends_the_connection_after_earlier_ones() {
        let Outcome { result, told, ends } = attach(2);
        assert_eq!(told, ["no more descriptors"]);
        let done = Arc::new(AtomicBool::new(false));
        let mut attachment = result.unwrap();
        let mark = Arc::clone(&done);
        attachment.detach(Box::new(move || mark.store(true, Ordering::Release)));
        for end in ends {
            assert!(!done.load(Ordering::Acquire), "a queue is still there");
            end(SourceEnd::Closed);
        }
        assert!(done.load(Ordering::Acquire));
    }

    #[test]
    fn without_any_attached_queue_it_is_an_error() {
        let Outcome { result, told, .. } = attach(0);
        assert!(result.is_err() && told.is_empty());
    }

    #[test]
    fn done_is_called_after_the_last_queue() {
        let Outcome { result, told, ends } = attach(3);
        assert!(told.is_empty());
        let done = Arc::new(AtomicBool::new(false));
        let mark = Arc::clone(&done);
        result
            .unwrap()
            .detach(Box::new(move || mark.store(true, Ordering::Release)));
        ends.into_iter().for_each(|end| end(SourceEnd::Closed));
        assert!(done.load(Ordering::Acquire));
    }
}
