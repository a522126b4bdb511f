//! [`Queue`]: the handle through which all requests go, which gives the guarantees to both sides.

use crate::trace::Tracer;
use crate::{
    BlockDevice, Completion, DeviceQueue, Limits, Op, QueueContext, Readiness, Request, SECTOR,
    Status,
};
use parking_lot::Mutex;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tags of requests that a device dropped. Empty unless the device has a bug.
#[derive(Debug, Default)]
pub(crate) struct LostList {
    any: AtomicBool,
    closed: AtomicBool,
    tags: Mutex<Vec<u64>>,
}

impl LostList {
    pub(crate) fn push(&self, tag: u64) {
        self.tags.lock().push(tag);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// One queue of a device. The crate's documentation has its guarantees.
pub struct Queue {
    device: Arc<dyn BlockDevice>,
    inner: Box<dyn DeviceQueue>,
    limits: Limits,
    lost: Arc<LostList>,
    rejected: Vec<Completion>,
    in_flight: usize,
    tracer: Tracer,
}

impl Queue {
    pub(crate) fn from_parts(
        device: Arc<dyn BlockDevice>,
        inner: Box<dyn DeviceQueue>,
        context: &QueueContext,
    ) -> Queue {
        Queue {
            limits: device.limits(),
            tracer: context
                .tracing
                .tracer(&device.floor(), context.index, context.submitter),
            device,
            inner,
            lost: Arc::default(),
            rejected: Vec::new(),
            in_flight: 0,
        }
    }

    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// True if all sectors of `request` are the device's.
    pub fn has_range(&self, request: &Request) -> bool {
        is_within(request, self.device.capacity_sectors())
    }

    /// Number of requests that are submitted and not yet polled.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Submits all of `batch` in order and leaves it empty. Invalid requests complete with an error
    /// and never reach the device.
    pub fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        if batch.is_empty() {
            return;
        }
        self.in_flight += batch.len();
        let capacity = self.device.capacity_sectors();
        let mut all_valid = true;
        self.tracer.arrived(batch);
        for request in batch.iter_mut() {
            request.in_flight = true;
            if !request
                .lost
                .as_ref()
                .is_some_and(|l| Arc::ptr_eq(l, &self.lost))
            {
                request.lost = Some(Arc::clone(&self.lost));
            }
            all_valid &= check(request, &self.limits, capacity).is_ok();
        }
        if !all_valid {
            self.reject(batch, capacity);
        }
        if !batch.is_empty() {
            self.inner.submit(batch);
            debug_assert!(batch.is_empty(), "a device left requests in the batch");
        }
    }

    #[cold]
    fn reject(&mut self, batch: &mut Vec<Box<Request>>, capacity: u64) {
        let mut i = 0;
        while i < batch.len() {
            match check(&batch[i], &self.limits, capacity) {
                Ok(()) => i += 1,
                Err(status) => {
                    let request = batch.remove(i);
                    self.rejected.push(Completion { request, status });
                }
            }
        }
    }

    /// Appends completions to `out`; returns how many.
    pub fn poll(&mut self, out: &mut Vec<Completion>) -> usize {
        if self.in_flight == 0 {
            return 0;
        }
        let before = out.len();
        out.append(&mut self.rejected);
        self.inner.poll(out);
        if self.lost.any.load(Ordering::Relaxed) {
            self.complete_lost(out);
        }
        let new = &mut out[before..];
        for c in new.iter_mut() {
            c.request.in_flight = false;
        }
        self.tracer.completed(new);
        self.in_flight -= new.len();
        new.len()
    }

    /// Makes an error completion for each request that the device dropped.
    #[cold]
    fn complete_lost(&mut self, out: &mut Vec<Completion>) {
        self.lost.any.store(false, Ordering::Release);
        for tag in std::mem::take(&mut *self.lost.tags.lock()) {
            out.push(Completion {
                request: Request::new(Op::Flush, 0, 0, tag),
                status: Status::IoError,
            });
        }
    }

    /// Asks to be woken: call it when [`Queue::poll`] found nothing, and sleep only if the result
    /// says so.
    pub fn arm(&mut self) -> Readiness {
        if self.in_flight == 0 {
            return Readiness::Wait(None);
        }
        if !self.rejected.is_empty() || self.lost.any.load(Ordering::Acquire) {
            return Readiness::Ready;
        }
        self.inner.arm()
    }

    /// Clears the descriptor after it was readable; to be called before the next poll.
    pub fn woken(&mut self) {
        self.inner.woken();
    }

    /// The descriptor to wait for between [`Queue::arm`] and the next [`Queue::poll`].
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // A user that closes a queue with requests in flight gives them up; that is no fault of the
        // device.
        self.lost.closed.store(true, Ordering::Release);
        for c in &mut self.rejected {
            c.request.in_flight = false;
        }
    }
}

/// True if the request ends at sector `capacity` at the latest.
fn is_within(r: &Request, capacity: u64) -> bool {
    let end = r.sector.checked_add(r.sectors);
    end.is_some_and(|end| end <= capacity)
}

/// Checks a request against a device, as the last step before it is handed over.
fn check(r: &Request, limits: &Limits, capacity: u64) -> Result<(), Status> {
    if r.op == Op::Flush {
        return if r.sectors == 0 && r.buffers.is_empty() {
            Ok(())
        } else {
            Err(Status::Invalid)
        };
    }
    if r.op.is_write() && limits.read_only {
        return Err(Status::ReadOnly);
    }
    let unit = limits.sectors_per_block();
    if r.sectors == 0 || !is_within(r, capacity) || (r.sector | r.sectors) & (unit - 1) != 0 {
        return Err(Status::Invalid);
    }
    if r.op.has_data() {
        let mut fits = r.sectors <= u64::from(limits.max_sectors)
            && r.buffers.len() <= limits.max_segments as usize;
        let mut bytes = 0;
        for len in r.buffers.iter().map(|b| b.len() as u64) {
            fits &= len > 0 && len.is_multiple_of(SECTOR);
            bytes += len;
        }
        return match fits && bytes == r.sectors * SECTOR {
            true => Ok(()),
            false => Err(Status::Invalid),
        };
    }
    if !r.buffers.is_empty() {
        return Err(Status::Invalid);
    }
    match r.op {
        Op::Discard if limits.discard_granularity_bytes == 0 => Err(Status::Unsupported),
        Op::WriteZeroes if !limits.write_zeroes => Err(Status::Unsupported),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, Capabilities, Error, EventHub};

    /// Completes every second request and drops or keeps the rest.
    struct Half {
        events: EventHub,
        lose: bool,
    }
    struct HalfQueue {
        lose: bool,
        kept: Vec<Box<Request>>,
        done: Vec<Completion>,
    }

    impl BlockDevice for Half {
        fn describe(&self) -> String {
            "half".into()
        }
        fn limits(&self) -> Limits {
            Limits {
                logical_sector_bytes: 4096,
                max_sectors: 16,
                ..Limits::default()
            }
        }
        fn capacity_sectors(&self) -> u64 {
            80
        }
        fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
            Ok(Box::new(HalfQueue {
                lose: self.lose,
                kept: vec![],
                done: vec![],
            }))
        }
        fn events(&self) -> &EventHub {
            &self.events
        }
        fn capabilities(&self) -> Capabilities<'_> {
            Capabilities::none()
        }
    }

    impl DeviceQueue for HalfQueue {
        fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
            for (i, request) in batch.drain(..).enumerate() {
                if i % 2 == 0 {
                    self.done.push(Completion {
                        request,
                        status: Status::Ok,
                    });
                } else if !self.lose {
                    self.kept.push(request);
                }
            }
        }
        fn poll(&mut self, out: &mut Vec<Completion>) {
            out.append(&mut self.done);
        }
        fn arm(&mut self) -> Readiness {
            Readiness::Wait(None)
        }
        fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    fn open(lose: bool) -> Queue {
        let device: Arc<dyn BlockDevice> = Arc::new(Half {
            events: EventHub::default(),
            lose,
        });
        Queue::open(&device, &QueueContext::new(4)).unwrap()
    }

    #[test]
    fn invalid_requests_never_reach_the_device() {
        let mut q = open(false);
        let data = Buffer::anonymous(65536).unwrap();
        let rw = |sector, len| {
            Request::with_buffers(Op::Write, sector, vec![data.slice(0, len).unwrap()], 0)
        };
        let mut mismatch = rw(0, 4096);
        mismatch.sectors = 16;
        let mut flush = Request::new(Op::Flush, 0, 0, 0);
        flush.sectors = 1;
        let bad = [
            rw(1, 4096),
            rw(0, 512),
            rw(80, 4096),
            rw(u64::MAX - 7, 4096),
            rw(72, 8192),
            rw(0, 65536),
            mismatch,
            flush,
            Request::new(Op::Read, 0, 8, 0),
            Request::new(Op::Discard, 0, 0, 0),
        ];
        let n = bad.len();
        let mut batch: Vec<_> = bad.into_iter().collect();
        q.submit(&mut batch);
        assert_eq!(q.arm(), Readiness::Ready);
        let mut out = vec![];
        assert_eq!(q.poll(&mut out), n);
        assert!(out.iter().all(|c| c.status == Status::Invalid));
        q.submit(&mut vec![rw(72, 4096), Request::new(Op::Discard, 0, 80, 1)]);
        out.clear();
        assert_eq!(q.poll(&mut out), 1);
        assert_eq!(out[0].status, Status::Ok);
        assert_eq!(q.in_flight(), 1);
    }

    #[test]
    fn a_dropped_request_is_a_bug_that_still_completes() {
        let mut q = open(true);
        let mut batch = vec![
            Request::new(Op::Flush, 0, 0, 1),
            Request::new(Op::Flush, 0, 0, 2),
        ];
        let submitted =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| q.submit(&mut batch)));
        assert_eq!(submitted.is_err(), cfg!(debug_assertions));
        let mut out = vec![];
        q.poll(&mut out);
        let lost: Vec<_> = out
            .iter()
            .filter(|c| c.status == Status::IoError)
            .map(|c| c.request.tag)
            .collect();
        assert_eq!(lost, [2]);
        assert_eq!(q.in_flight(), 0);
    }
}
