//! A device that does nothing by itself: the test sees the submitted requests, and completes them when it
//! likes.

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, DeviceQueue, Error, EventHub, Limits, Op, QueueContext,
    Readiness, Request, Status,
};
use pvblk_sys::EventFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Something that the device saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A request arrived: queue, operation, first sector.
    Submit(u32, Op, u64),
    /// The test completed it.
    Done(u32, Op, u64),
}

struct Held {
    queue: u32,
    request: Box<Request>,
}

#[derive(Default)]
struct Queue {
    done: Mutex<Vec<Completion>>,
    event: Option<EventFd>,
}

#[derive(Default)]
struct State {
    held: Vec<Held>,
    seen: Vec<Seen>,
    queues: Vec<Arc<Queue>>,
}

/// The device and its handle.
#[derive(Default)]
pub struct Device {
    events: EventHub,
    state: Arc<Mutex<State>>,
}

impl Device {
    /// All that was seen, in order.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.lock().seen.clone()
    }

    /// Requests at the device: queue, operation, first sector.
    pub fn held(&self) -> Vec<(u32, Op, u64)> {
        let state = self.state.lock();
        let all = state.held.iter();
        all.map(|h| (h.queue, h.request.op, h.request.sector))
            .collect()
    }

    /// Completes the `index`-th request at the device.
    pub fn complete(&self, index: usize, status: Status) {
        let mut state = self.state.lock();
        let Held { queue, request } = state.held.remove(index);
        let done = Seen::Done(queue, request.op, request.sector);
        state.seen.push(done);
        let q = Arc::clone(&state.queues[queue as usize]);
        drop(state);
        q.done.lock().push(Completion { request, status });
        if let Some(event) = &q.event {
            event.notify();
        }
    }

    /// Completes the request at this queue with this operation and sector.
    #[track_caller]
    pub fn complete_one(&self, what: (u32, Op, u64), status: Status) {
        let at = self.held().iter().position(|&h| h == what);
        self.complete(at.expect("it is at the device"), status);
    }
}

struct DeviceSide {
    index: u32,
    queue: Arc<Queue>,
    state: Arc<Mutex<State>>,
}

impl BlockDevice for Device {
    fn describe(&self) -> String {
        "held".into()
    }
    fn limits(&self) -> Limits {
        Limits::default()
    }
    fn capacity_sectors(&self) -> u64 {
        1 << 20
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let queue = Arc::new(Queue {
            done: Mutex::default(),
            event: Some(EventFd::new().map_err(|e| Error::os("a event", e))?),
        });
        let mut state = self.state.lock();
        let index = context.index;
        let queues = state.queues.len().max(index as usize + 1);
        state.queues.resize_with(queues, Arc::default);
        state.queues[index as usize] = Arc::clone(&queue);
        Ok(Box::new(DeviceSide {
            index,
            queue,
            state: Arc::clone(&self.state),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::none()
    }
}

impl DeviceQueue for DeviceSide {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut state = self.state.lock();
        for request in batch.drain(..) {
            state
                .seen
                .push(Seen::Submit(self.index, request.op, request.sector));
            state.held.push(Held {
                queue: self.index,
                request,
            });
        }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.woken();
        out.append(&mut self.queue.done.lock());
    }

    fn arm(&mut self) -> Readiness {
        if self.queue.done.lock().is_empty() {
            Readiness::Wait(None)
        } else {
            Readiness::Ready
        }
    }

    fn woken(&mut self) {
        if let Some(event) = &self.queue.event {
            event.drain();
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.event.as_ref().map(|b| b.as_fd())
    }
}

impl Drop for DeviceSide {
    fn drop(&mut self) {
        // Closing the queue gives its requests up.
        self.state.lock().held.retain(|h| h.queue != self.index);
    }
}
