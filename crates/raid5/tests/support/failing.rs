//! A device of tests whose requests fail as the test says.

use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, EventHub, Forwards,
    QueueContext, Readiness, Request, Status,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Called with each request in the order of submission; true if the request fails and doesn't reach the device.
pub type Fails = dyn Fn(&Request) -> bool + Send + Sync;

/// A device over `inner`, without its capabilities, that fails requests.
pub struct Failing {
    inner: Arc<dyn BlockDevice>,
    fails: Arc<Fails>,
    events: EventHub,
}

impl Failing {
    pub fn over(inner: &Arc<dyn BlockDevice>, fails: Arc<Fails>) -> Arc<dyn BlockDevice> {
        Arc::new(Failing {
            inner: Arc::clone(inner),
            fails,
            events: EventHub::default(),
        })
    }
}

impl Decorator for Failing {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        "failing".into()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(FailingQueue {
            inner: self.inner.open_device_queue(context)?,
            fails: Arc::clone(&self.fails),
            failed: Vec::new(),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

struct FailingQueue {
    inner: Box<dyn DeviceQueue>,
    fails: Arc<Fails>,
    failed: Vec<Completion>,
}

impl DeviceQueue for FailingQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let mut passed = Vec::new();
        for request in batch.drain(..) {
            if (self.fails)(&request) {
                let status = Status::IoError;
                self.failed.push(Completion { request, status });
            } else {
                passed.push(request);
            }
        }
        self.inner.submit(&mut passed);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.failed);
        self.inner.poll(out);
    }

    fn arm(&mut self) -> Readiness {
        match self.failed.is_empty() {
            true => self.inner.arm(),
            false => Readiness::Ready,
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
