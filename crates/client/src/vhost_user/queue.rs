//! One ring as a device's queue.

use super::{Ring, Shared};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{
    Buffer, BufferSource, Completion, DeviceQueue, Op, Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::{gather, scatter, total_len};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

/// Period in which a queue that waits for memory of others looks for some.
const NO_MEMORY: Duration = Duration::from_millis(1);

/// A request that has a head.
#[derive(Default)]
struct Slot {
    request: Option<Box<Request>>,
    /// A copy of its data in shared memory.
    bounce: Option<Buffer>,
    /// Of a discard or write-zeroes: the sector behind the part that is asked for.
    reached: u64,
    /// Its data is written; it waits for a flush.
    flushes: bool,
    /// The connection on which its data was sent. A server that is gone may have lost it, whatever a flush of the next one says.
    connection: u32,
}

pub(super) struct ClientQueue {
    shared: Arc<Shared>,
    /// Goes back when the queue is closed.
    ring: Option<Ring>,
    /// The slot of each chain, by the number of its first descriptor.
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Requests that found no head, or no memory.
    backlog: VecDeque<Box<Request>>,
    done: Vec<Completion>,
    /// The available index that the server was woken for.
    kicked: u16,
    failed: bool,
    tracer: Tracer,
}

impl ClientQueue {
    pub fn new(shared: &Arc<Shared>, ring: Ring, tracer: Tracer) -> ClientQueue {
        let entries = ring.driver.entries();
        ClientQueue {
            shared: Arc::clone(shared),
            slots: (0..entries).map(|_| Slot::default()).collect(),
            free: (0..entries).rev().collect(),
            backlog: VecDeque::new(),
            done: Vec::with_capacity(entries.into()),
            kicked: ring.driver.available(),
            ring: Some(ring),
            failed: false,
            tracer,
        }
    }

    fn end(&mut self, request: Box<Request>, status: Status) {
        self.done.push(Completion { request, status });
    }

    /// Starts what was submitted, in order, as far as there are heads and memory.
    fn start_all(&mut self) {
        while let Some(request) = self.backlog.pop_front() {
            if self.failed {
                self.end(request, Status::IoError);
                continue;
            }
            let Some(head) = self.free.pop() else {
                self.backlog.push_front(request);
                return;
            };
            if let Err(request) = self.start(head, request) {
                self.free.push(head);
                if total_len(&request.buffers) > self.shared.memory.len() {
                    self.end(request, Status::NoSpace);
                    continue;
                }
                self.backlog.push_front(request);
                return;
            }
        }
    }

    /// Puts a request into the ring. It comes back if there is no memory for a copy of its data.
    fn start(&mut self, head: u16, request: Box<Request>) -> Result<(), Box<Request>> {
        if request.op == Op::Flush && !self.shared.terms.limits.volatile_cache {
            self.free.push(head);
            self.end(request, Status::Ok);
            return Ok(());
        }
        let memory = &self.shared.memory;
        let is_foreign = |b: &Buffer| memory.address(b).is_none();
        let mut bounce = None;
        if request.op.has_data() && request.buffers.iter().any(is_foreign) {
            let Some(copy) = memory.allocate(total_len(&request.buffers)) else {
                return Err(request);
            };
            if request.op == Op::Write {
                gather(&request.buffers, copy.region(), copy.offset());
            }
            bounce = Some(copy);
        }
        self.tracer.request(Phase::Issue, &request);
        self.slots[usize::from(head)] = Slot {
            reached: request.sector,
            request: Some(request),
            bounce,
            flushes: false,
            connection: 0,
        };
        self.ask(head);
        Ok(())
    }

    /// Puts the next step of a head's request into the ring.
    fn ask(&mut self, head: u16) {
        let (Some(ring), slot) = (&mut self.ring, &mut self.slots[usize::from(head)]) else {
            return;
        };
        let Some(request) = &slot.request else { return };
        let op = if slot.flushes { Op::Flush } else { request.op };
        if !slot.flushes {
            slot.connection = self.shared.connections.load(Ordering::Acquire);
        }
        match op {
            Op::Flush => ring.driver.request(head, VIRTIO_BLK_T_FLUSH, 0, []),
            Op::Read | Op::Write => {
                let (memory, most) = (&self.shared.memory, self.shared.terms.segment_bytes);
                let copy = slot.bounce.as_slice();
                let buffers = if copy.is_empty() {
                    &request.buffers
                } else {
                    copy
                };
                let read = op == Op::Read;
                let pieces = buffers.iter().flat_map(|b| {
                    let at = memory.address(b).unwrap_or_default();
                    let piece = move |skip: u32| {
                        (
                            at + u64::from(skip),
                            (b.len() as u32 - skip).min(most),
                            read,
                        )
                    };
                    (0..b.len() as u32).step_by(most as usize).map(piece)
                });
                let kind = if read {
                    VIRTIO_BLK_T_IN
                } else {
                    VIRTIO_BLK_T_OUT
                };
                ring.driver.request(head, kind, request.sector, pieces);
            }
            Op::Discard | Op::WriteZeroes => {
                let (kind, most) = match op {
                    Op::Discard => (VIRTIO_BLK_T_DISCARD, self.shared.terms.range_sectors[0]),
                    _ => (
                        VIRTIO_BLK_T_WRITE_ZEROES,
                        self.shared.terms.range_sectors[1],
                    ),
                };
                let some = (request.end() - slot.reached).min(most.into());
                let range = ring.driver.range(head, slot.reached, some as u32, 0);
                slot.reached += some;
                ring.driver.request(head, kind, 0, [(range, 16, false)]);
            }
        }
        ring.driver.enqueue(head);
    }

    /// Makes visible what was put into the ring, and wakes the server if it asked for that.
    fn publish(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        if ring.driver.available() == self.kicked {
            return;
        }
        ring.driver.publish();
        if ring.driver.needs_kick(self.kicked) {
            ring.kick.notify();
        }
        self.kicked = ring.driver.available();
    }

    /// Takes what the server has done; errors name the rule that it broke.
    fn collect(&mut self) -> Result<(), String> {
        while let Some(ring) = &mut self.ring
            && let Some((id, _)) = ring.driver.used()
        {
            let head = u16::try_from(id)
                .ok()
                .filter(|h| usize::from(*h) < self.slots.len());
            let slot = head.map(|h| &mut self.slots[usize::from(h)]);
            let Some((
                head,
                Slot {
                    request: Some(request),
                    bounce,
                    reached,
                    flushes,
                    connection,
                },
            )) = head.zip(slot)
            else {
                return Err(format!("descriptor {id} was used, and isn't in flight"));
            };
            let status = match u32::from(ring.driver.status(head)) {
                VIRTIO_BLK_S_OK => Status::Ok,
                VIRTIO_BLK_S_UNSUPP => Status::Unsupported,
                _ => Status::IoError,
            };
            if status == Status::Ok {
                let is_range = matches!(request.op, Op::Discard | Op::WriteZeroes);
                let is_fua = request.op == Op::Write && request.flags.contains(RequestFlags::FUA);
                if is_range && *reached < request.end() {
                    self.ask(head);
                    continue;
                }
                if is_fua && !*flushes && self.shared.terms.limits.volatile_cache {
                    *flushes = true;
                    self.ask(head);
                    continue;
                }
                let now = self.shared.connections.load(Ordering::Acquire);
                if is_fua && *flushes && *connection != now {
                    *flushes = false;
                    self.ask(head);
                    continue;
                }
                if let (Op::Read, Some(copy)) = (request.op, &bounce) {
                    scatter(&request.buffers, copy.region(), copy.offset());
                }
            }
            let slot = std::mem::take(&mut self.slots[usize::from(head)]);
            self.free.push(head);
            if let Some(copy) = slot.bounce {
                self.shared.memory.free(copy);
            }
            if let Some(request) = slot.request {
                self.end(request, status);
            }
        }
        Ok(())
    }

    /// All that is in flight ends with an error. The memory of copies stays taken: the server may still use it.
    fn fail(&mut self) {
        self.failed = true;
        for slot in &mut self.slots {
            if let Some(request) = slot.request.take() {
                let status = Status::IoError;
                self.done.push(Completion { request, status });
            }
        }
        self.start_all();
    }
}

impl DeviceQueue for ClientQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        self.backlog.extend(batch.drain(..));
        self.start_all();
        self.publish();
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if !self.failed {
            if let Err(why) = self.collect() {
                self.shared.fail(&why);
            }
            if self.shared.is_dead() {
                self.fail();
            }
            self.start_all();
            self.publish();
        }
        out.append(&mut self.done);
    }

    fn arm(&mut self) -> Readiness {
        let Some(ring) = &self.ring else {
            return Readiness::Wait(None);
        };
        ring.driver.want_calls(true);
        let news = ring.driver.has_used() || (self.shared.is_dead() && !self.failed);
        let is_idle = self.free.len() == self.slots.len();
        match news || !self.done.is_empty() {
            true => Readiness::Ready,
            // Other queues have the memory, and don't tell when it is free.
            false if is_idle && !self.backlog.is_empty() => {
                Readiness::Wait(Some(Instant::now() + NO_MEMORY))
            }
            false => Readiness::Wait(None),
        }
    }

    fn woken(&mut self) {
        if let Some(ring) = &self.ring {
            ring.call.clear();
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(|r| r.call.as_fd())
    }
}

impl Drop for ClientQueue {
    fn drop(&mut self) {
        // A ring with something in flight is of no use to anybody else.
        let is_idle = self.free.len() == self.slots.len();
        if let (true, Some(ring)) = (is_idle, self.ring.take()) {
            self.shared.rings.lock().push(ring);
        }
    }
}
