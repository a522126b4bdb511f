//! Queues of the blocking calls: each call has one for its time.

use crate::queue::Queue;
use crate::shared::Shared;
use crate::{Buffer, Completion, Error, Request};
use parking_lot::{Condvar, Mutex};
use pvblk_block::Op;
use std::sync::Arc;

/// Most requests of a call that are in flight.
const WINDOW: u32 = 8;
/// Longest request of a call with data, in bytes.
const PIECE: u64 = 128 << 10;
/// The same without data.
const RANGE: u64 = 64 << 20;

/// The data of a call.
pub(crate) enum Data<'a> {
    /// To be filled with what is on the disk at this offset.
    Read(&'a mut [u8], u64),
    /// To be written at this offset.
    Write(&'a [u8], u64),
    /// Zeros to be written.
    Zeros,
    Nothing,
}

impl Data<'_> {
    /// Fills a buffer that is written to the disk at `at`.
    fn fill(&self, at: u64, len: usize, buffer: &mut Buffer) {
        match self {
            Data::Write(from, begin) => {
                let skip = (at - begin) as usize;
                buffer.copy_from(0, &from[skip..skip + len]);
            }
            Data::Zeros => buffer.zero(),
            Data::Read(..) | Data::Nothing => {}
        }
    }

    /// Takes the part of a buffer, read from the disk at `at`, that was asked for.
    fn take(&mut self, at: u64, len: u64, buffer: &Buffer) {
        if let Data::Read(to, begin) = self {
            let (from, until) = (at.max(*begin), (at + len).min(*begin + to.len() as u64));
            let part = (from - *begin) as usize..(until - *begin) as usize;
            buffer.copy_to((from - at) as usize, &mut to[part]);
        }
    }
}

/// The queues that blocking calls use, and use again.
pub(crate) struct Lanes {
    most: usize,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    idle: Vec<Lane>,
    /// All that exist.
    open: usize,
}

struct Lane {
    queue: Queue,
    /// For pieces of calls; all of one length.
    buffers: Vec<Buffer>,
    done: Vec<Completion>,
}

/// A lane that a call has, until its end: also until a panic, which must not leave others waiting.
struct Held<'a> {
    lanes: &'a Lanes,
    lane: Option<Lane>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.lanes.release(lane);
        }
    }
}

impl Lanes {
    pub(crate) fn new(most: usize) -> Lanes {
        Lanes {
            most,
            state: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// Does `op` from byte `start` to byte `end`, which are multiples of the disk's sector, in as many requests as it takes, and waits for them. After an
    /// error some may have been done.
    pub(crate) fn run(
        &self,
        shared: &Arc<Shared>,
        op: Op,
        range: std::ops::Range<u64>,
        data: Data<'_>,
    ) -> Result<(), Error> {
        let mut held = Held {
            lanes: self,
            lane: Some(self.acquire(shared)?),
        };
        match &mut held.lane {
            Some(lane) => lane.run(shared, op, range, data),
            None => Ok(()),
        }
    }

    /// Closes the queues that no call uses now; true if there was one.
    pub(crate) fn close_idle(&self) -> bool {
        let mut state = self.state.lock();
        let idle = std::mem::take(&mut state.idle);
        state.open -= idle.len();
        drop(state);
        !idle.is_empty()
    }

    fn acquire(&self, shared: &Arc<Shared>) -> Result<Lane, Error> {
        let mut state = self.state.lock();
        loop {
            if let Some(lane) = state.idle.pop() {
                return Ok(lane);
            }
            if state.open < self.most {
                state.open += 1;
                drop(state);
                let opened = Queue::open(shared, WINDOW, false);
                match opened {
                    Ok(queue) => {
                        return Ok(Lane {
                            queue,
                            buffers: Vec::new(),
                            done: Vec::new(),
                        });
                    }
                    Err(e) => {
                        state = self.state.lock();
                        state.open -= 1;
                        if state.open == 0 {
                            return Err(e.advise(
                                "a blocking call needs a queue, too: close one of the disk's",
                            ));
                        }
                        // The device has no more; another call's is free soon.
                        if !state.idle.is_empty() {
                            continue;
                        }
                    }
                }
            }
            self.freed.wait(&mut state);
        }
    }

    fn release(&self, lane: Lane) {
        // With requests in flight, which a wait that failed or a panic leaves, it is of no more use.
        let reusable = lane.queue.in_flight() == 0;
        let mut state = self.state.lock();
        let useless = if reusable {
            state.idle.push(lane);
            None
        } else {
            state.open -= 1;
            Some(lane)
        };
        drop(state);
        self.freed.notify_one();
        drop(useless);
    }
}

impl Lane {
    fn run(
        &mut self,
        shared: &Shared,
        op: Op,
        range: std::ops::Range<u64>,
        mut data: Data<'_>,
    ) -> Result<(), Error> {
        if op == Op::Flush {
            self.queue.push(Request::flush())?;
            self.queue.wait(&mut self.done, None)?;
            return self.collect(&mut data, 0, 0);
        }
        let unit = u64::from(shared.limits().logical_sector_bytes);
        let most = match op.has_data() {
            true => PIECE.min(shared.limits().max_request_bytes),
            false => RANGE,
        };
        // The unit divides both, but for a limit that some server may have made up.
        let step = (most / unit).max(1) * unit;
        let (mut next, mut result) = (range.start, Ok(()));
        loop {
            while result.is_ok() && next < range.end && self.queue.in_flight() < WINDOW as usize {
                let len = step.min(range.end - next);
                match self.push(shared, op, next, len, step, &data) {
                    Ok(true) => next += len,
                    Ok(false) => break,
                    Err(e) => result = Err(e),
                }
            }
            if self.queue.in_flight() == 0 {
                return result;
            }
            self.queue.wait(&mut self.done, None)?;
            result = result.and(self.collect(&mut data, range.end, step));
        }
    }

    /// Pushes one request. False: there is no buffer for it before another one has completed.
    fn push(
        &mut self,
        shared: &Shared,
        op: Op,
        at: u64,
        len: u64,
        step: u64,
        data: &Data<'_>,
    ) -> Result<bool, Error> {
        let request = match op {
            Op::Read | Op::Write => {
                let buffer = match self.buffers.pop() {
                    Some(buffer) => Ok(buffer),
                    None => shared.buffer(step as usize),
                };
                let mut buffer = match buffer {
                    Ok(buffer) => buffer,
                    Err(_) if self.queue.in_flight() > 0 => return Ok(false),
                    Err(e) => return Err(e),
                };
                data.fill(at, len as usize, &mut buffer);
                match op {
                    Op::Read => Request::read(at, buffer).first(len as usize),
                    _ => Request::write(at, buffer).first(len as usize),
                }
            }
            Op::Discard => Request::discard(at, len),
            Op::WriteZeroes => Request::write_zeroes(at, len),
            Op::Flush => Request::flush(),
        };
        self.queue.push(request.tag(at))?;
        Ok(true)
    }

    /// Takes the completions that are there. The first error is that of the call.
    fn collect(&mut self, data: &mut Data<'_>, end: u64, step: u64) -> Result<(), Error> {
        let mut result = Ok(());
        for c in self.done.drain(..) {
            if let (Ok(()), Some(buffer)) = (&c.result, &c.buffer) {
                data.take(c.tag, step.min(end - c.tag), buffer);
            }
            result = result.and(c.result);
            self.buffers.extend(c.buffer);
        }
        result
    }
}

#[cfg(test)]
mod tests;
