//! Primitives that break a rule, and a device whose medium is a thread of the model.

pub mod explore;
#[macro_use]
pub mod primitives;

use loom::sync::atomic::{Ordering, fence};
use primitives::{LoomCount, LoomEvent, LoomFlag, LoomLock, LoomWord};
use pvblk_block::stacked::{Count, Event, Flag, Primitives, WaitEntry};
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op, QueueContext,
    Readiness, Request, Status,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

primitives!(
    /// Primitives without the barrier between a store and the load of the other side's word.
    NoBarrier,
    LoomFlag,
    ()
);
primitives!(
    /// Primitives whose flags are raised by a store, which hides the data that an earlier raise
    /// published.
    StoreOnly,
    StoredFlag,
    fence(Ordering::SeqCst)
);

pub struct StoredFlag(LoomFlag);

impl Flag for StoredFlag {
    fn new(value: bool) -> StoredFlag {
        StoredFlag(LoomFlag::new(value))
    }
    fn load_relaxed(&self) -> bool {
        self.0.load_relaxed()
    }
    fn load_acquire(&self) -> bool {
        self.0.load_acquire()
    }
    fn store_relaxed(&self, value: bool) {
        self.0.store_relaxed(value);
    }
    fn raise(&self) {
        self.0.0.store(true, Ordering::Release);
    }
    fn take(&self) -> bool {
        self.0.take()
    }
}

/// A completion: number of the queue, and number of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedCompletion {
    pub owner: usize,
    pub which: u64,
}

impl OwnedCompletion {
    pub fn request(owner: usize, which: u64) -> Box<Request> {
        Request::new(Op::Flush, 0, 0, (owner as u64) << 32 | which)
    }

    pub fn of(completion: &Completion) -> OwnedCompletion {
        let tag = completion.request.tag;
        OwnedCompletion {
            owner: (tag >> 32) as usize,
            which: tag & 0xffff_ffff,
        }
    }
}

/// A device that ends requests, in order, when the model says so, and wakes only queues that have armed, as a
/// ring or another stacked device does.
pub struct Device<P: Primitives> {
    pub wait: WaitEntry<P>,
    /// Number of requests that may end.
    may_end: P::Count,
    events: EventHub,
    weak: std::sync::Weak<Device<P>>,
}

impl<P: Primitives> Device<P> {
    pub fn new() -> Arc<Device<P>> {
        Arc::new_cyclic(|weak| Device {
            wait: WaitEntry::new().expect("an event"),
            may_end: P::Count::new(),
            events: EventHub::default(),
            weak: weak.clone(),
        })
    }

    /// Lets the medium end `more` requests; requests that aren't submitted yet end at their
    /// submission.
    pub fn complete(&self, more: usize) {
        self.may_end.add(more);
        self.wait.wake();
    }
}

struct ModelQueue<P: Primitives> {
    device: Arc<Device<P>>,
    at_device: std::collections::VecDeque<Box<Request>>,
}

impl<P: Primitives> DeviceQueue for ModelQueue<P> {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.at_device.extend(batch.drain(..));
        // The medium may have been ready in advance.
        self.device.wait.wake();
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let device = &self.device;
        device.wait.finish_wait();
        if !device.wait.take_pending() {
            return;
        }
        while device.may_end.load() > 0
            && let Some(request) = self.at_device.pop_front()
        {
            device.may_end.sub(1);
            out.push(Completion {
                request,
                status: Status::Ok,
            });
        }
    }

    fn arm(&mut self) -> Readiness {
        self.device.wait.prepare_to_wait();
        match self.device.wait.is_pending() {
            true => Readiness::Ready,
            false => Readiness::Wait(None),
        }
    }

    fn woken(&mut self) {
        self.device.wait.event().drain();
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<P: Primitives> BlockDevice for Device<P> {
    fn describe(&self) -> String {
        "model".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        8
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(ModelQueue {
            device: self.weak.upgrade().expect("it is open"),
            at_device: std::collections::VecDeque::new(),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}
