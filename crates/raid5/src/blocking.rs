//! Blocking I/O, for everything before and after serving.
//!
//! The caller decides how to wait: between two looks for completions [`Idle`] is called. In production that
//! sleeps; a simulation moves its disks on, cuts the power, or ends the operation.

use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{
    BlockDevice, Buffer, Completion, Error, ErrorKind, Op, Queue, QueueContext, Request,
    RequestFlags, SECTOR, Status,
};
use std::sync::Arc;
use std::time::Duration;

/// Requests in flight.
const DEPTH: usize = 8;
/// Most bytes of one request.
const PIECE_BYTES: usize = 64 << 10;
/// Sleep of production between two looks.
const NAP: Duration = Duration::from_micros(50);

/// Called while no request has completed: production sleeps, a simulation moves its disks. An error ends the
/// operation.
pub type Idle<'a> = dyn FnMut() -> Result<(), Error> + 'a;

/// Sleeps a little.
pub fn sleepy() -> impl FnMut() -> Result<(), Error> {
    || {
        std::thread::sleep(NAP);
        Ok(())
    }
}

/// A device with blocking I/O. Data goes through memory of its own, so callers may use any slice.
pub struct Blocking {
    queue: Queue,
    name: String,
    bounce: Buffer,
    piece_bytes: usize,
    batch: Vec<Box<Request>>,
    done: Vec<Completion>,
    free: Vec<Box<Request>>,
    /// The read that was begun and not yet taken: sector and bytes.
    begun: Option<(u64, usize)>,
    /// The first error of the requests in flight.
    failed: Option<Error>,
    /// An operation was given up with requests in flight, which may still use the buffer.
    ended: bool,
    /// Keeps the buffer on the memory bill.
    _gauge: Gauge,
}

impl Blocking {
    /// Opens a queue of the device.
    pub fn open(device: &Arc<dyn BlockDevice>) -> Result<Blocking, Error> {
        let name = device.describe();
        let queue = Queue::open(device, &QueueContext::new(DEPTH as u32))?;
        let most = u64::from(queue.limits().max_sectors) * SECTOR;
        let unit = u64::from(queue.limits().logical_sector_bytes);
        let piece_bytes = (most - most % unit).clamp(unit, PIECE_BYTES as u64) as usize;
        let bytes = DEPTH * piece_bytes;
        let bounce = Buffer::anonymous(bytes)
            .map_err(|e| Error::os(format!("{name}: memory to read and write it"), e))?;
        Ok(Blocking {
            _gauge: Gauge::fixed(
                format!("{name}: blocking I/O"),
                MemoryKind::Anonymous,
                bytes as u64,
            ),
            queue,
            name,
            bounce,
            piece_bytes,
            batch: Vec::with_capacity(DEPTH),
            done: Vec::with_capacity(DEPTH),
            free: Vec::with_capacity(DEPTH),
            begun: None,
            failed: None,
            ended: false,
        })
    }

    /// Most bytes that [`Blocking::begin_read`] takes.
    pub fn window_bytes(&self) -> usize {
        self.bounce.len()
    }

    /// The smallest unit of I/O, in bytes.
    pub fn unit_bytes(&self) -> usize {
        self.queue.limits().logical_sector_bytes as usize
    }

    /// True if an operation was ended by its `idle`: then this can't be used any more, and the device isn't
    /// to blame.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Reads; sector and length are multiples of the device's logical sector.
    pub fn read(&mut self, sector: u64, to: &mut [u8], idle: &mut Idle<'_>) -> Result<(), Error> {
        let mut at = sector;
        for window in to.chunks_mut(self.window_bytes()) {
            self.begin_read(at, window.len())?;
            self.finish_read(window, idle)?;
            at += window.len() as u64 / SECTOR;
        }
        Ok(())
    }

    /// Writes. It is on stable storage when this returns.
    pub fn write(&mut self, sector: u64, from: &[u8], idle: &mut Idle<'_>) -> Result<(), Error> {
        self.write_with(sector, from, RequestFlags::FUA, idle)
    }

    /// Writes. It is on stable storage after the next [`Blocking::flush`].
    pub fn write_cached(
        &mut self,
        sector: u64,
        from: &[u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        self.write_with(sector, from, RequestFlags::empty(), idle)
    }

    /// Flushes the device.
    pub fn flush(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        self.usable()?;
        let mut request = self.request();
        request.reset(Op::Flush, RequestFlags::empty(), 0, 0, 0);
        request.buffers.clear();
        self.batch.push(request);
        self.queue.submit(&mut self.batch);
        self.wait(idle)
    }

    /// Begins a read of up to [`Blocking::window_bytes`], so that several devices can be read at a time. To be followed by
    /// [`Blocking::finish_read`].
    pub fn begin_read(&mut self, sector: u64, bytes: usize) -> Result<(), Error> {
        self.usable()?;
        assert!(bytes <= self.window_bytes(), "more than fits");
        self.begun = Some((sector, bytes));
        self.start(Op::Read, RequestFlags::empty(), sector, bytes);
        Ok(())
    }

    /// Waits for the read that [`Blocking::begin_read`] began.
    pub fn finish_read(&mut self, to: &mut [u8], idle: &mut Idle<'_>) -> Result<(), Error> {
        let begun = self.begun.take();
        assert_eq!(
            begun.map(|(_, bytes)| bytes),
            Some(to.len()),
            "another read"
        );
        self.wait(idle)?;
        self.bounce.read(0, to);
        Ok(())
    }

    /// Begins a write of up to [`Blocking::window_bytes`], so that several devices can be written at a time. It is on stable storage when
    /// [`Blocking::try_finish_write`] says so. Until then nothing else may be done.
    pub fn begin_write(&mut self, sector: u64, from: &[u8]) -> Result<(), Error> {
        self.usable()?;
        assert!(from.len() <= self.window_bytes(), "more than fits");
        self.bounce.write(0, from);
        self.start(Op::Write, RequestFlags::FUA, sector, from.len());
        Ok(())
    }

    /// The end of the write that [`Blocking::begin_write`] began, if it has ended.
    pub fn try_finish_write(&mut self) -> Option<Result<(), Error>> {
        self.queue.poll(&mut self.done);
        self.take_done();
        (self.queue.in_flight() == 0).then(|| self.failed.take().map_or(Ok(()), Err))
    }

    /// Its requests in flight are given up, because `idle` has ended the operation.
    pub fn end(&mut self) {
        self.ended = true;
    }

    fn write_with(
        &mut self,
        sector: u64,
        from: &[u8],
        flags: RequestFlags,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let mut at = sector;
        for window in from.chunks(self.window_bytes()) {
            self.usable()?;
            self.bounce.write(0, window);
            self.start(Op::Write, flags, at, window.len());
            self.wait(idle)?;
            at += window.len() as u64 / SECTOR;
        }
        Ok(())
    }

    /// Submits the pieces of a range; the data is at the start of the buffer.
    fn start(&mut self, op: Op, flags: RequestFlags, sector: u64, bytes: usize) {
        for at in (0..bytes).step_by(self.piece_bytes) {
            let len = self.piece_bytes.min(bytes - at);
            let mut request = self.request();
            let first = sector + at as u64 / SECTOR;
            request.reset(op, flags, first, len as u64 / SECTOR, 0);
            request.buffers.clear();
            request.buffers.extend(self.bounce.slice(at, len));
            self.batch.push(request);
        }
        self.queue.submit(&mut self.batch);
    }

    fn request(&mut self) -> Box<Request> {
        let fresh = || Request::new(Op::Flush, 0, 0, 0);
        self.free.pop().unwrap_or_else(fresh)
    }

    /// Waits for all requests, and returns the first error.
    fn wait(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        while self.queue.in_flight() > 0 {
            if self.queue.poll(&mut self.done) == 0 {
                idle().inspect_err(|_| self.ended = true)?;
            }
            self.take_done();
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Takes requests that have ended, and the first error of them.
    fn take_done(&mut self) {
        for Completion { request, status } in self.done.drain(..) {
            if status != Status::Ok && self.failed.is_none() {
                self.failed = Some(failure(&self.name, &request, status));
            }
            self.free.push(request);
        }
    }

    fn usable(&self) -> Result<(), Error> {
        assert!(self.begun.is_none(), "a read was begun and not finished");
        match self.ended {
            true => Err(Error::new(
                ErrorKind::Os,
                format!("{}: an operation on it was ended halfway", self.name),
            )),
            false => Ok(()),
        }
    }
}

fn failure(name: &str, request: &Request, status: Status) -> Error {
    let what = match request.op {
        Op::Read => "reading",
        Op::Write => "writing",
        _ => "flushing",
    };
    let place = match request.sectors {
        0 => String::new(),
        n => format!(" {n} sectors at {}", request.sector),
    };
    let why = match status {
        Status::Ok | Status::IoError => "I/O error",
        Status::Unsupported => "not supported",
        Status::NoSpace => "no space left",
        Status::ReadOnly => "it is read-only",
        Status::Invalid => "outside of it, or not a multiple of its sectors",
    };
    Error::new(ErrorKind::Os, format!("{name}: {what}{place}: {why}"))
}

#[cfg(test)]
#[path = "blocking_tests.rs"]
mod tests;
