//! Drives a block device with a fixed number of requests in flight, from one thread.

use pvblk_block::{
    BlockDevice, Buffer, BufferSource, Completion, Error, ErrorKind, Op, Queue, QueueContext,
    Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::Poller;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
pub struct DriverLoad {
    /// [`Op::Read`] or [`Op::Write`].
    pub op: Op,
    /// Bytes of each request, a multiple of 512.
    pub block: usize,
    /// Requests in flight.
    pub depth: u32,
    /// Requests in all.
    pub count: u64,
    /// Bytes of the device that are used, from its start.
    pub span: u64,
    /// The thread sleeps on the descriptor instead of polling.
    pub sleep: bool,
}

/// The result of a load.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Number of completed requests.
    pub count: u64,
    /// Time from the first submission to the last completion.
    pub elapsed: Duration,
}

impl Outcome {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.elapsed.as_secs_f64()
    }
}

/// One thread's buffers and queue, warm between runs.
pub struct Driver {
    queue: Queue,
    buffers: Vec<Buffer>,
    source: Option<Arc<dyn BufferSource>>,
    spare: Vec<Box<Request>>,
    poller: Poller,
    waits: bool,
}

impl Driver {
    /// Opens queue `index` of `device` with `depth` buffers of `block` bytes, in the device's own memory if it has some.
    pub fn open(
        device: &Arc<dyn BlockDevice>,
        index: u32,
        depth: u32,
        block: usize,
    ) -> Result<Driver, Error> {
        let mut context = QueueContext::new(depth);
        context.index = index;
        let queue = Queue::open(device, &context)?;
        let source = device.buffer_source();
        let len = block.next_multiple_of(pvblk_sys::PAGE_SIZE);
        let mut buffers = Vec::new();
        for _ in 0..depth {
            let buffer = match &source {
                Some(s) => s.allocate(len).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Exhausted,
                        "no memory for the buffers: ask for more guest memory",
                    )
                })?,
                None => Buffer::anonymous(len).map_err(|e| Error::os("buffers", e))?,
            };
            buffers.push(buffer);
        }
        let poller = Poller::new().map_err(|e| Error::os("poller", e))?;
        Ok(Driver {
            queue,
            buffers,
            source,
            spare: (0..depth)
                .map(|_| Request::new(Op::Flush, 0, 0, 0))
                .collect(),
            poller,
            waits: false,
        })
    }

    /// Runs `load`; `place` gives each request's block number, `check` sees each completed buffer and block number.
    pub fn run(
        &mut self,
        load: &DriverLoad,
        mut place: impl FnMut() -> u64,
        mut check: impl FnMut(&Buffer, u64),
    ) -> Result<Outcome, Error> {
        let mut free: Vec<u32> = (0..load.depth.min(self.buffers.len() as u32))
            .rev()
            .collect();
        let mut block_of = vec![0u64; self.buffers.len()];
        let sectors = load.block as u64 / 512;
        let mut batch = Vec::new();
        let mut done: Vec<Completion> = Vec::new();
        let (mut sent, mut received) = (0, 0);
        let start = Instant::now();
        while received < load.count {
            while sent < load.count {
                let (Some(id), true) = (free.pop(), !self.spare.is_empty()) else {
                    break;
                };
                let block = place();
                block_of[id as usize] = block;
                let Some(mut request) = self.spare.pop() else {
                    break;
                };
                request.reset(
                    load.op,
                    RequestFlags::empty(),
                    block * sectors,
                    sectors,
                    u64::from(id),
                );
                request
                    .buffers
                    .extend(self.buffers[id as usize].slice(0, load.block));
                batch.push(request);
                sent += 1;
            }
            self.queue.submit(&mut batch);
            if self.queue.poll(&mut done) == 0 {
                if load.sleep {
                    self.wait()?;
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            for Completion {
                mut request,
                status,
            } in done.drain(..)
            {
                if status != Status::Ok {
                    return Err(Error::new(
                        ErrorKind::Os,
                        format!("a request at sector {} ended as {status:?}", request.sector),
                    ));
                }
                let id = request.tag as u32;
                check(&self.buffers[id as usize], block_of[id as usize]);
                request.buffers.clear();
                self.spare.push(request);
                free.push(id);
                received += 1;
            }
        }
        Ok(Outcome {
            count: received,
            elapsed: start.elapsed(),
        })
    }

    /// Writes `word` all over block `block` (of the driver's block size), alone.
    pub fn write_block(&mut self, block: u64, word: &[u8; 8]) -> Result<(), Error> {
        let Some(buffer) = self.buffers.first() else {
            return Ok(());
        };
        for at in (0..buffer.len()).step_by(8) {
            buffer.write(at, word);
        }
        let load = DriverLoad {
            op: Op::Write,
            block: buffer.len(),
            depth: 1,
            count: 1,
            span: 0,
            sleep: false,
        };
        self.run(&load, || block, |_, _| {}).map(|_| ())
    }

    /// One flush, alone.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.queue
            .submit(&mut vec![Request::new(Op::Flush, 0, 0, 0)]);
        let mut done: Vec<Completion> = Vec::new();
        while self.queue.poll(&mut done) == 0 {
            self.wait()?;
        }
        match done.pop() {
            Some(c) if c.status == Status::Ok => Ok(()),
            other => Err(Error::new(
                ErrorKind::Os,
                format!("a flush ended as {:?}", other.map(|c| c.status)),
            )),
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        let os = |e| Error::os("waiting for completions", e);
        let Readiness::Wait(deadline) = self.queue.arm() else {
            return Ok(());
        };
        let Some(fd) = self.queue.wait_fd() else {
            return Ok(());
        };
        if !self.waits {
            self.poller.add(fd.as_fd(), 0, false).map_err(os)?;
            self.waits = true;
        }
        let timeout = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let mut events = Vec::new();
        self.poller.wait(&mut events, timeout).map_err(os)?;
        if !events.is_empty() {
            self.queue.woken();
        }
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.queue.in_flight() > 0 {
            return; // the peer may still write there
        }
        if let Some(source) = &self.source {
            for b in self.buffers.drain(..) {
                source.free(b);
            }
        }
    }
}
