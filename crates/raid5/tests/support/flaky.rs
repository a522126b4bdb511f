//! A device of tests that counts reads, and that fails or holds requests when the test says so.

use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Limits, Op,
    QueueContext, Readiness, Request, Status,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A member in memory that can fail, and says that its cache is volatile.
pub struct Flaky {
    pub inner: Arc<dyn BlockDevice>,
    /// It writes zeros by itself.
    pub zeroes: bool,
    pub dead: Arc<AtomicBool>,
    pub reads: Arc<AtomicU64>,
    /// Requests of the first queue complete only when this is false.
    pub held: Arc<AtomicBool>,
}

struct FlakyQueue {
    inner: Box<dyn DeviceQueue>,
    dead: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    done: Vec<Completion>,
    held: Option<Arc<AtomicBool>>,
}

impl Decorator for Flaky {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn limits(&self) -> Limits {
        Limits {
            volatile_cache: true,
            write_zeroes: self.zeroes,
            ..self.inner.limits()
        }
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(FlakyQueue {
            inner: self.inner.open_device_queue(context)?,
            dead: Arc::clone(&self.dead),
            reads: Arc::clone(&self.reads),
            done: Vec::new(),
            held: (context.index == 0).then(|| Arc::clone(&self.held)),
        }))
    }
    fn forward<'a>(&'a self, inner: Capabilities<'a>) -> Forwards<'a> {
        Forwards {
            refresh: None,
            extents: inner.extents,
            cached: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: None,
        }
    }
}

impl DeviceQueue for FlakyQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let reads = batch.iter().filter(|r| r.op == Op::Read).count() as u64;
        self.reads.fetch_add(reads, Ordering::Relaxed);
        if !self.dead.load(Ordering::Relaxed) {
            return self.inner.submit(batch);
        }
        for request in batch.drain(..) {
            let status = Status::IoError;
            self.done.push(Completion { request, status });
        }
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        let held = self.held.as_ref();
        if held.is_some_and(|held| held.load(Ordering::Relaxed)) {
            return;
        }
        out.append(&mut self.done);
        self.inner.poll(out);
    }
    fn arm(&mut self) -> Readiness {
        match self.done.is_empty() {
            true => self.inner.arm(),
            false => Readiness::Ready,
        }
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
