//! Requests that need an order: flushes before writes, barriers, writes of a part of a block; and long requests, which go to the device in parts.

use super::parts::Parts;
use super::{INTERNAL_TAG, Lane, STEP_SECTORS};
use pvblk_block::trace::Phase;
use pvblk_block::{Completion, Op, Request, RequestFlags, Status};

const BARRIER_TAG: u64 = INTERNAL_TAG | 1 << 62;

/// Progress of a barrier: flush, write (if there is data), flush. Earlier writes are stable before
/// the barrier's, and the barrier's before any later one. For a part of a block it is read, write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BarrierStage {
    Draining,
    FlushBefore,
    Writing,
    FlushAfter,
    ReadingBlock,
    WritingBlock,
}

pub(super) struct Barrier {
    stage: BarrierStage,
    request: Option<Box<Request>>,
}

/// A write of a part of a block, while the block is read.
#[derive(Default)]
pub(super) struct Partial {
    flags: RequestFlags,
    /// Bytes of the block that stay as they are: at its beginning and at its end.
    stay: (usize, usize),
    pub(super) bytes: Vec<u8>,
}

impl Lane {
    /// Moves held requests on, in order, as far as orders and the gate allow.
    #[cold]
    pub(super) fn advance_held(&mut self) -> bool {
        let mut moved = self.advance_barrier();
        let mut room = STEP_SECTORS;
        while self.barrier.is_none() {
            if self.parts.is_cutting() {
                if !self.issue_part(&mut room) {
                    break;
                }
                moved = true;
                continue;
            }
            let Some(first) = self.held.front() else {
                break;
            };
            let flags = first.flags;
            if flags.intersects(RequestFlags::BARRIER | RequestFlags::PARTIAL) {
                if !self.pass.try_close() {
                    break;
                }
                self.barrier = Some(Barrier {
                    stage: BarrierStage::Draining,
                    request: self.held.pop_front(),
                });
                moved |= self.advance_barrier();
            } else if flags.contains(RequestFlags::PREFLUSH) {
                if !self.pass.enter(1) {
                    break;
                }
                let request = self.held.pop_front();
                let index = self.park(request);
                self.submit_special(Request::new(Op::Flush, 0, 0, INTERNAL_TAG | index));
                moved = true;
            } else if self.goes_in_parts(first) {
                if let Some(request) = self.held.pop_front() {
                    self.parts.begin(request);
                }
            } else {
                let ordered =
                    RequestFlags::BARRIER | RequestFlags::PREFLUSH | RequestFlags::PARTIAL;
                let (mut run, mut sectors) = (0, 0);
                for request in &self.held {
                    let cost = Parts::cost(request);
                    let waits = request.flags.intersects(ordered) || self.goes_in_parts(request);
                    if waits || cost > room {
                        break;
                    }
                    room -= cost;
                    sectors += cost;
                    run += 1;
                }
                if run == 0 {
                    break; // in the next step
                }
                if !self.pass.enter(run as u32) {
                    break;
                }
                self.batch.extend(self.held.drain(..run));
                self.turn.copied(sectors);
                self.turn.submitted(run);
                self.issue();
                moved = true;
            }
        }
        moved
    }

    /// True for a long request. One beyond the device's end isn't cut: the queue refuses it whole, and parts of what a peer made up had no end.
    fn goes_in_parts(&self, request: &Request) -> bool {
        self.parts.is_long(request) && self.queue.has_range(request)
    }

    /// Submits the next part of a long request, if it may be at the device now.
    fn issue_part(&mut self, room: &mut u64) -> bool {
        if self.parts.next_cost() > *room || !self.parts.may_issue() || !self.pass.enter(1) {
            return false;
        }
        self.tracer.requests(Phase::Issue, self.parts.uncut());
        let part = self.parts.issue();
        *room -= Parts::cost(&part);
        self.turn.copied(Parts::cost(&part));
        self.turn.submitted(1);
        self.special += 1;
        self.batch.push(part);
        self.queue.submit(&mut self.batch);
        true
    }

    fn park(&mut self, request: Option<Box<Request>>) -> u64 {
        let index = match self.preflush.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.preflush.push(None);
                self.preflush.len() - 1
            }
        };
        self.preflush[index] = request;
        index as u64
    }

    /// Submits a request that the lane has already entered the gate for.
    fn submit_special(&mut self, request: Box<Request>) {
        self.special += 1;
        self.submit_one(request);
    }

    /// As [`Lane::submit_special`], for a request whose end needs nothing more. It counts for the step as others do: a client that sends nothing else
    /// would have its worker for itself.
    fn submit_one(&mut self, request: Box<Request>) {
        let sectors = match request.op.has_data() {
            true => request.sectors,
            false => Parts::cost(&request),
        };
        self.turn.copied(sectors);
        self.turn.submitted(1);
        self.batch.push(request);
        self.issue();
    }

    /// Starts a drained barrier's first step.
    fn advance_barrier(&mut self) -> bool {
        let Some(barrier) = &mut self.barrier else {
            return false;
        };
        if barrier.stage != BarrierStage::Draining || !self.pass.is_drained() {
            return false;
        }
        self.pass.enter(1);
        let is_partial = |r: &mut Box<Request>| r.flags.contains(RequestFlags::PARTIAL);
        if let Some(request) = barrier.request.take_if(is_partial) {
            barrier.stage = BarrierStage::ReadingBlock;
            let request = self.partial.begin(request);
            self.submit_special(request);
            return true;
        }
        barrier.stage = BarrierStage::FlushBefore;
        self.submit_special(Request::new(Op::Flush, 0, 0, BARRIER_TAG));
        true
    }

    /// Takes the completions of orders out of `done` and starts their next step.
    #[cold]
    pub(super) fn sort_out_special(&mut self) {
        let mut i = 0;
        while i < self.done.len() {
            let tag = self.done[i].request.tag;
            let is_barrier = self
                .barrier
                .as_ref()
                .is_some_and(|b| b.stage != BarrierStage::Draining);
            if is_barrier {
                // No other request of this lane is at the device.
                let completion = self.done.swap_remove(i);
                self.special -= 1;
                self.barrier_step_done(completion);
                return;
            }
            if tag & INTERNAL_TAG == 0 {
                i += 1;
                continue;
            }
            let flush = self.done.swap_remove(i);
            self.special -= 1;
            if let Some(part) = Parts::index_of(tag) {
                self.done.extend(self.parts.complete(part, flush.status));
                continue;
            }
            let Some(request) = self.preflush[(tag & !INTERNAL_TAG) as usize].take() else {
                debug_assert!(false, "a flush without its write");
                continue;
            };
            if flush.status == Status::Ok {
                let mut request = request;
                request.flags.remove(RequestFlags::PREFLUSH);
                // The write goes at once, before held requests: a barrier that came later waits for
                // it.
                if self.pass.enter(1) {
                    self.submit_one(request);
                } else {
                    self.held.push_front(request);
                }
            } else {
                self.done.push(Completion {
                    request,
                    status: flush.status,
                });
            }
        }
    }

    fn barrier_step_done(&mut self, mut completion: Completion) {
        let Some(barrier) = &mut self.barrier else {
            return;
        };
        let status = completion.status;
        let next = match barrier.stage {
            BarrierStage::ReadingBlock => {
                self.partial.end(&mut completion.request);
                if status == Status::Ok {
                    barrier.stage = BarrierStage::WritingBlock;
                    self.pass.enter(1);
                    return self.submit_special(completion.request);
                }
                None
            }
            _ if status != Status::Ok => None,
            BarrierStage::FlushBefore => match &barrier.request {
                Some(r) if r.op == Op::Write => {
                    barrier.stage = BarrierStage::Writing;
                    barrier.request.take().map(|mut r| {
                        r.flags.remove(RequestFlags::BARRIER);
                        r
                    })
                }
                _ => None,
            },
            BarrierStage::Writing => {
                barrier.stage = BarrierStage::FlushAfter;
                Some(Request::new(Op::Flush, 0, 0, BARRIER_TAG))
            }
            BarrierStage::Draining | BarrierStage::FlushAfter | BarrierStage::WritingBlock => None,
        };
        if completion.request.tag & INTERNAL_TAG == 0 {
            barrier.request = Some(completion.request);
        }
        if let Some(request) = next {
            self.pass.enter(1);
            self.submit_special(request);
            return;
        }
        if let Some(Barrier {
            request: Some(request),
            ..
        }) = self.barrier.take()
        {
            self.done.push(Completion { request, status });
        }
        self.pass.open();
    }
}

impl Partial {
    /// Makes the write a read of its block, and keeps the data to be written.
    fn begin(&mut self, mut request: Box<Request>) -> Box<Request> {
        let (first, last) = (request.scratch & 0xffff, request.scratch >> 16);
        self.stay = (first as usize, last as usize);
        self.flags = request.flags;
        self.bytes.clear();
        for b in &request.buffers {
            let at = self.bytes.len();
            self.bytes.resize(at + b.len(), 0);
            b.read(0, &mut self.bytes[at..]);
        }
        request.op = Op::Read;
        request.flags = RequestFlags::empty();
        request.scratch = 0;
        request
    }

    /// Makes it the write again, with the bytes that stay from the block that was read.
    fn end(&mut self, request: &mut Request) {
        request.op = Op::Write;
        request.flags = self.flags - RequestFlags::PARTIAL;
        let end = self.bytes.len().saturating_sub(self.stay.1);
        let mut at = 0;
        for b in &request.buffers {
            let from = self.stay.0.clamp(at, at + b.len());
            let until = end.clamp(from, at + b.len());
            b.write(from - at, &self.bytes[from..until]);
            at += b.len();
        }
    }
}
