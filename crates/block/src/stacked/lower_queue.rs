//! [`LowerQueue`]: a queue of the device below.

use crate::{BlockDevice, Completion, Error, Limits, Queue, QueueContext, Readiness, Request};
use pvblk_sys::Poller;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A queue of the device below. Requests beyond its depth wait in a backlog, whose length is bounded by the
/// number of stripes or pages of its owner's core.
pub struct LowerQueue {
    queue: Queue,
    /// Most requests at the device.
    depth: usize,
    backlog: VecDeque<Box<Request>>,
    batch: Vec<Box<Request>>,
    /// True if the owner's poller has the descriptor.
    in_poller: bool,
}

impl LowerQueue {
    /// Opens a queue of `device` for `context.depth` requests at a time.
    pub fn open(
        device: &Arc<dyn BlockDevice>,
        context: &QueueContext,
    ) -> Result<LowerQueue, Error> {
        Ok(LowerQueue {
            queue: Queue::open(device, context)?,
            depth: context.depth as usize,
            backlog: VecDeque::new(),
            batch: Vec::new(),
            in_poller: false,
        })
    }

    /// The device below.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        self.queue.device()
    }

    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    /// Number of requests that haven't completed, including the backlog.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.backlog.len()
    }

    /// True if no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }

    /// Adds a request, which goes to the device with the next [`LowerQueue::submit`].
    pub fn push(&mut self, request: Box<Request>) {
        self.backlog.push_back(request);
    }

    /// Gives the device as many requests as it has room for, in order and as one batch.
    pub fn submit(&mut self) {
        while self.queue.in_flight() + self.batch.len() < self.depth
            && let Some(request) = self.backlog.pop_front()
        {
            self.batch.push(request);
        }
        if !self.batch.is_empty() {
            self.queue.submit(&mut self.batch);
        }
    }

    /// Appends completions, submits requests of the backlog in their place, and returns the number
    /// of completions.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        let count = self.queue.poll(out);
        if count > 0 {
            self.submit();
        }
        count
    }

    /// Asks for a wake-up; the last check before sleeping.
    pub fn arm(&mut self) -> Readiness {
        self.queue.arm()
    }

    /// Asks for a wake-up as [`LowerQueue::arm`], and puts the descriptor into the owner's poller once there
    /// is one: before the first request there may be none.
    pub fn arm_in(&mut self, poller: &Poller, token: u64) -> io::Result<Readiness> {
        let readiness = self.queue.arm();
        if readiness != Readiness::Ready
            && !self.in_poller
            && let Some(fd) = self.queue.wait_fd()
        {
            poller.add(fd, token, false)?;
            self.in_poller = true;
        }
        Ok(readiness)
    }

    /// Takes the descriptor out of its owner's poller.
    pub fn leave_poller(&mut self, poller: &Poller) {
        if std::mem::take(&mut self.in_poller)
            && let Some(fd) = self.queue.wait_fd()
        {
            // Removing fails only for a descriptor that isn't there.
            let _ = poller.remove(fd);
        }
    }

    /// Clears the descriptor, as [`crate::DeviceQueue::woken`].
    pub fn woken(&mut self) {
        self.queue.woken();
    }

    /// The descriptor to wait for after [`LowerQueue::arm`].
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wait_fd()
    }
}
