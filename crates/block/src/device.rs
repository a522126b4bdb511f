//! The boundary between those who use blocks and those who store them.

use crate::trace::Tracing;
use crate::{Completion, Error, EventHub, Limits, Queue, Request};
use pvblk_sys::Buffer;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Something that stores or forwards blocks. Shared by all its users.
pub trait BlockDevice: Send + Sync {
    /// A short description for people, as a volume spec where there is one.
    fn describe(&self) -> String;

    /// What its floor is called in traces.
    fn floor(&self) -> String {
        self.describe()
    }

    /// What it can do; fixed while open.
    fn limits(&self) -> Limits;

    /// Capacity in sectors (512 B); may change, with a [`crate::DeviceEvent::Resized`].
    fn capacity_sectors(&self) -> u64;

    /// Opens one more queue. A queue is used by one thread at a time and shares no lock with others on its hot path.
    /// Call [`Queue::open`] instead: its handle adds the guarantees.
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error>;

    /// Where changes are told.
    fn events(&self) -> &EventHub;

    /// Looks at the backing again: it may have been resized. Slow; never on a hot path.
    fn refresh(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Which parts of `sector..sector+sectors` hold data. Adds extents in order that cover the whole range.
    /// Slow; the default says that all of it is data.
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        out.push(Extent {
            sector,
            sectors,
            kind: ExtentKind::Data,
        });
        Ok(())
    }

    /// What tells a user who comes back whether the device still holds what it held. The default knows nothing.
    fn incarnation(&self) -> Incarnation {
        Incarnation::default()
    }

    /// Ends its use in order, when all queues are closed: it may have to tell its backing that all is well. Slow; errors
    /// lose nothing, but the next start may take longer.
    fn close(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Answers a question about itself, or hands it on to what it stands on. Both texts are JSON, and each device says which questions it knows;
    /// `None`: it knows no such questions. May be slow, and may change what the device is made of. Errors say in one line what to do.
    fn ask(&self, _question: &str) -> Option<Result<String, Error>> {
        None
    }

    /// Gives memory back to the system that holds nothing anybody needs: clean pages of caches, buffers for reuse. Called on any thread
    /// when memory is short; doesn't wait for I/O. Returns bytes. Hands on to what it stands on.
    fn give_way(&self) -> u64 {
        0
    }

    /// Bytes that [`BlockDevice::give_way`] might give back, at most; cheap.
    fn spare_bytes(&self) -> u64 {
        0
    }

    /// Memory that requests to this device should use for their buffers, to save a copy; `None` if any will do.
    fn buffer_source(&self) -> Option<Arc<dyn BufferSource>> {
        None
    }
}

/// Marks that change when data may have been lost since they were read last, by whatever ended the process or the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incarnation {
    /// Changes when completed writes that were not flushed may be lost; `None`: not known, so they may be.
    pub cache: Option<u64>,
    /// Changes when everything is lost; `None`: it doesn't end with the process.
    pub contents: Option<u64>,
}

impl Incarnation {
    /// Of a device that stands on several, any of which may come, go or be replaced without a loss: its marks change when a device is among them
    /// that wasn't, by its marks, or one isn't any more. Devices with the same marks, such as files on one machine, count as one, so that it
    /// doesn't matter how many there are. One whose cache isn't known makes it not known.
    ///
    /// Contents end with the process only if those of two devices do: what one of them held can be calculated.
    pub fn of_members(members: impl IntoIterator<Item = Incarnation>) -> Incarnation {
        let members: Vec<Incarnation> = members.into_iter().collect();
        let caches: Option<Vec<u64>> = members.iter().map(|m| m.cache).collect();
        let contents: Vec<u64> = members.iter().filter_map(|m| m.contents).collect();
        Incarnation {
            cache: caches.filter(|c| !c.is_empty()).map(mark_of),
            contents: (contents.len() > 1).then(|| mark_of(contents)),
        }
    }

    /// Of a cache of this process over the device: what it holds back goes with its own mark, or with the device's.
    #[must_use]
    pub fn under_cache(self, mark: u64) -> Incarnation {
        Incarnation {
            cache: self.cache.map(|lower| mark_of(vec![mark, lower])),
            ..self
        }
    }
}

/// One mark for a set of them. The same in every process and every version: it is compared with what another process said.
fn mark_of(mut marks: Vec<u64>) -> u64 {
    marks.sort_unstable();
    marks.dedup();
    marks.iter().fold(marks.len() as u64, |sum, mark| {
        // The finalizer of splitmix64.
        let n = sum.wrapping_add(*mark).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        n ^ (n >> 31)
    })
}

/// Memory that a device reaches without copying.
pub trait BufferSource: Send + Sync {
    /// `len` bytes in one piece, or `None` if there are none left now. `len` is a multiple of 4096.
    fn allocate(&self, len: usize) -> Option<Buffer>;
    /// Gives back a buffer from [`BufferSource::allocate`], unchanged.
    fn free(&self, buffer: Buffer);
}

/// What a queue is opened for.
#[derive(Clone)]
pub struct QueueContext {
    /// Most requests that its user will have in flight: at least 1.
    pub depth: u32,
    /// Which of its user's queues this is, from 0; a hint for spreading over a device's hardware queues.
    pub index: u32,
    /// Who submits, for traces.
    pub submitter: u32,
    /// Where trace events go.
    pub tracing: Tracing,
}

impl QueueContext {
    /// A context for `depth` requests in flight, not traced.
    pub fn new(depth: u32) -> QueueContext {
        QueueContext {
            depth,
            index: 0,
            submitter: 0,
            tracing: Tracing::off(),
        }
    }

    /// The same without tracing.
    #[must_use]
    pub fn untraced(&self) -> QueueContext {
        QueueContext {
            tracing: Tracing::off(),
            ..*self
        }
    }
}

/// What a queue's user has to do before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Don't sleep: there may be completions to poll now.
    Ready,
    /// Sleep until the queue's descriptor is readable or this time has come, if there is one.
    Wait(Option<Instant>),
}

/// One queue of a device, as the device implements it. Used through [`Queue`].
///
/// A device accepts everything submitted, up to the context's depth, and completes every request
/// exactly once, in any order. It may change `scratch` of a request, and must return all else as it was.
pub trait DeviceQueue: Send {
    /// Takes all requests of `batch`, in order. The batch is where the submitter unplugs: what belongs together comes together.
    fn submit(&mut self, batch: &mut Vec<Box<Request>>);

    /// Appends completions to `out`, as many as there are now (or a bounded batch of them), without blocking.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Asks to be woken through the descriptor; the last check before sleeping.
    fn arm(&mut self) -> Readiness;

    /// The descriptor was readable: forget that, so that it isn't reported for ever. Called whether or not
    /// anything is in flight.
    fn woken(&mut self) {}

    /// Readable when there may be completions; `None` if `submit` completes everything at once or by deadline. A queue may have none before its
    /// first request, so that idle disks cost nothing: ask again after [`DeviceQueue::arm`]. Once there is one, it stays the same.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;
}

impl Queue {
    /// Opens a queue of `device` and wraps it in the handle that checks.
    pub fn open(device: &Arc<dyn BlockDevice>, context: &QueueContext) -> Result<Queue, Error> {
        let inner = device.open_device_queue(context)?;
        Ok(Queue::from_parts(Arc::clone(device), inner, context))
    }
}

/// A part of a device and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors (512 B).
    pub sectors: u64,
    /// What it holds.
    pub kind: ExtentKind,
}

/// What an extent holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated data.
    Data,
    /// Not allocated; reads as zeros.
    Hole,
    /// Allocated; reads as zeros.
    Zero,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(cache: Option<u64>, contents: Option<u64>) -> Incarnation {
        Incarnation { cache, contents }
    }

    #[test]
    fn what_stands_on_several_changes_when_one_of_them_may_have_lost_something() {
        let of = |members: &[Incarnation]| Incarnation::of_members(members.iter().copied());
        let file = marks(Some(1), None);
        let all = of(&[file, file, file]);
        assert!(all.cache.is_some() && all.contents.is_none());
        assert_eq!(all, of(&[file, file]), "one is missing, nothing is lost");
        assert_ne!(all, of(&[file, file, marks(Some(2), None)]), "another boot");
        assert_ne!(all, of(&[marks(Some(2), None); 3]));
        assert_eq!(
            of(&[file, file, marks(None, None)]).cache,
            None,
            "not known"
        );
        assert_eq!(of(&[]), Incarnation::default());
        let two = [file, marks(Some(7), None)];
        assert_eq!(of(&two), of(&[two[1], two[0]]), "in any order");
        assert_ne!(
            of(&two),
            of(&[file, marks(Some(8), None)]),
            "its cache went"
        );
        let memory = |n| marks(Some(n), Some(n));
        assert_eq!(of(&[file, file, memory(3)]).contents, None);
        let lost = of(&[file, memory(3), memory(4)]).contents;
        assert!(lost.is_some() && lost != of(&[file, memory(3), memory(5)]).contents);
    }

    #[test]
    fn a_cache_changes_with_its_process_and_with_what_is_below() {
        let file = marks(Some(1), None);
        assert_eq!(file.under_cache(5), file.under_cache(5));
        assert_ne!(file.under_cache(5), file.under_cache(6));
        assert_ne!(file.under_cache(5), marks(Some(2), None).under_cache(5));
        assert_eq!(marks(None, None).under_cache(5).cache, None);
        assert_eq!(marks(Some(1), Some(9)).under_cache(5).contents, Some(9));
    }
}
