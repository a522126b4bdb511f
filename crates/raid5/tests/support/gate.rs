//! A device of tests that holds requests while its gate is closed, and does them when it is opened.

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, EventHub, Forwards, Op,
    QueueContext, Readiness, Request,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The state of a gate.
#[derive(Default)]
pub struct GateState {
    pub closed: bool,
    /// Writes by sector and length, in the order in which they reached the device below.
    pub written: Vec<(u64, u64)>,
    /// Requests that are held.
    pub held: usize,
}

/// A device over `inner`, without its capabilities.
pub struct Gate {
    inner: Arc<dyn BlockDevice>,
    state: Arc<Mutex<GateState>>,
    events: EventHub,
}

impl Gate {
    pub fn over(inner: &Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, Arc<Mutex<GateState>>) {
        let state: Arc<Mutex<GateState>> = Arc::default();
        let gate = Arc::new(Gate {
            inner: Arc::clone(inner),
            state: Arc::clone(&state),
            events: EventHub::default(),
        });
        (gate, state)
    }
}

impl Decorator for Gate {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn describe(&self) -> String {
        "gate".into()
    }

    fn limits(&self) -> pvblk_block::Limits {
        pvblk_block::Limits {
            volatile_cache: true,
            ..self.inner.limits()
        }
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(GateQueue {
            inner: self.inner.open_device_queue(context)?,
            state: Arc::clone(&self.state),
            held: Vec::new(),
        }))
    }

    fn events(&self) -> &EventHub {
        &self.events
    }

    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

struct GateQueue {
    inner: Box<dyn DeviceQueue>,
    state: Arc<Mutex<GateState>>,
    held: Vec<Box<Request>>,
}

impl GateQueue {
    fn pass(&mut self) {
        let mut state = self.state.lock();
        if state.closed || self.held.is_empty() {
            return;
        }
        state.held -= self.held.len();
        for request in self.held.iter().filter(|r| r.op == Op::Write) {
            state.written.push((request.sector, request.sectors));
        }
        drop(state);
        self.inner.submit(&mut self.held);
    }
}

impl DeviceQueue for GateQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.state.lock().held += batch.len();
        self.held.append(batch);
        self.pass();
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.pass();
        self.inner.poll(out);
    }

    fn arm(&mut self) -> Readiness {
        self.inner.arm()
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
