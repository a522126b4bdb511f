//! One blkif queue as a request source: parse, resolve grants, answer.

use crate::grants::{Access, GrantError, GrantMapper, PageUse};
use crate::parse::{Bad, Parsed, Parser};
use crate::seldom;
use crate::seldom::Seldom;
use crate::source::{PullBatch, Pulled, RequestSource, SourceEnd};
use crate::spare::SpareRequests;
use pvblk_block::{Completion, Error, Op, Readiness, Request, Status};
use pvblk_protocol::blkif::wire::{self, Entry, RSP_EOPNOTSUPP, RSP_ERROR, RSP_OKAY};
use pvblk_protocol::blkif::{BackRing, EventChannel};
use pvblk_sys::xen::{CopyDirection, GrantCopy, MAX_COPIES};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How soon a request that the system has no memory for is tried again, where none of ours is at work that could free some.
const STALL_RETRY: Duration = Duration::from_millis(2);

/// What the handshake hands over for each queue.
pub struct BlkifQueueParts {
    /// For the log: disk, front end and queue.
    pub name: String,
    /// The ring.
    pub ring: BackRing,
    /// Its doorbell.
    pub channel: Box<dyn EventChannel>,
    /// The way to the peer's pages.
    pub mapper: Box<dyn GrantMapper>,
    /// Most segments of an indirect request that we offered; 0: indirect was not offered.
    pub max_indirect_segments: u16,
}

/// What is remembered of a request until its answer. The ring can't serve as that memory: answers
/// overwrite the entries of older requests that are still unfinished.
#[derive(Default)]
struct Slot {
    id: u64,
    operation: u8,
    /// Pages to release before the answer; empty where nothing follows their use.
    uses: Vec<PageUse>,
}

/// A blkif queue, back end side.
pub struct BlkifSource {
    name: String,
    ring: BackRing,
    channel: Box<dyn EventChannel>,
    mapper: Box<dyn GrantMapper>,
    parser: Parser,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    spare: SpareRequests,
    batch: PullBatch,
    /// Copies to be made in one call.
    copies: Vec<GrantCopy>,
    /// A page was used that has to be released: not so where all stay mapped, as those of local front ends.
    releases: bool,
    /// Taken off the ring, but its data had no room.
    stalled: Option<Box<Entry>>,
    /// Counts bad requests for the log, of all sources of the disk once that is known.
    complaints: Arc<Seldom>,
    unpublished: bool,
    /// The peer's indices made no sense: the ring is not written any more.
    broken: bool,
}

impl BlkifSource {
    /// A source over a negotiated queue.
    pub fn new(parts: BlkifQueueParts) -> BlkifSource {
        let entries = parts.ring.entries();
        BlkifSource {
            name: parts.name,
            ring: parts.ring,
            channel: parts.channel,
            parser: Parser::new(parts.max_indirect_segments),
            mapper: parts.mapper,
            slots: (0..entries).map(|_| Slot::default()).collect(),
            free_slots: (0..entries).rev().collect(),
            spare: SpareRequests::default(),
            batch: PullBatch::default(),
            copies: Vec::new(),
            releases: false,
            stalled: None,
            complaints: Arc::default(),
            unpublished: false,
            broken: false,
        }
    }

    #[cold]
    fn stop(&mut self, why: impl std::fmt::Display) -> SourceEnd {
        self.broken = true;
        SourceEnd::Broken(Error::protocol(format!(
            "{}: {why}; the disk is stopped",
            self.name
        )))
    }

    #[cold]
    fn refuse(&mut self, entry: &Entry, bad: Bad) {
        self.complain(&bad);
        let status = match bad {
            Bad::UnknownOperation(_) => RSP_EOPNOTSUPP,
            _ => RSP_ERROR,
        };
        for page in self.parser.uses.drain(..) {
            self.mapper.release(page);
        }
        // As Linux's back end answers: an indirect request is told by its inner operation.
        let operation = match (entry.operation(), bad) {
            (wire::OP_INDIRECT, Bad::UnknownOperation(op)) => op,
            (wire::OP_INDIRECT, _) => entry.indirect().indirect_op,
            (op, _) => op,
        };
        self.ring.respond(entry.id(), operation, status);
        self.unpublished = true;
    }

    fn complain(&mut self, why: &dyn std::fmt::Display) {
        seldom!(warn, self.complaints, "{}: bad request: {why}", self.name);
    }

    /// True if a request has yet to be answered, which frees memory.
    fn has_outstanding(&self) -> bool {
        self.free_slots.len() < self.slots.len()
    }

    /// Keeps a request until another has ended.
    #[cold]
    fn stall(&mut self, entry: Entry) {
        for page in self.parser.uses.drain(..) {
            self.mapper.release(page);
        }
        self.stalled = Some(Box::new(entry));
    }

    /// Notes what is to be copied for the request with this tag.
    fn note_copies(&mut self, tag: u32) {
        let copied = |page: &&PageUse| page.access == Access::Copied;
        for page in self.slots[tag as usize].uses.iter().filter(copied) {
            self.copies.push(GrantCopy {
                gref: page.gref,
                offset: page.offset,
                buffer: page.buffer.clone(),
                tag,
                failed: false,
            });
        }
    }

    /// Makes all copies noted; what is left of them are those that failed.
    #[cold]
    fn make_copies(&mut self, direction: CopyDirection) {
        for copies in self.copies.chunks_mut(MAX_COPIES) {
            self.mapper.copy(direction, copies);
        }
        self.copies.retain(|c| c.failed);
        if self.copies.is_empty() || self.mapper.is_cut_off() {
            return;
        }
        let failed = std::mem::take(&mut self.copies);
        for copy in &failed {
            self.complain(&GrantError::Bad(copy.gref));
        }
        self.copies = failed;
    }

    /// Fetches the data of the writes among `out`; those whose data can't be had are answered and taken out.
    #[cold]
    fn fetch(&mut self, out: &mut Vec<Box<Request>>) {
        self.make_copies(CopyDirection::FromGuest);
        // Without their buffers: nobody has those when the pages are released.
        let failed: Vec<u32> = self.copies.drain(..).map(|c| c.tag).collect();
        for tag in failed {
            let Some(at) = out.iter().position(|r| r.tag == u64::from(tag)) else {
                continue; // another page of it failed, too
            };
            let request = out.remove(at);
            self.answer(tag, request, RSP_ERROR);
        }
    }

    /// Stores the data of the reads among `done`; where that can't be, it is an error.
    #[cold]
    fn store(&mut self, done: &mut [Completion]) {
        self.make_copies(CopyDirection::ToGuest);
        for copy in self.copies.drain(..) {
            let found = done
                .iter_mut()
                .find(|c| c.request.tag == u64::from(copy.tag));
            if let Some(completion) = found {
                completion.status = Status::IoError;
            }
        }
    }

    /// Ends a request that has a slot.
    #[inline]
    fn answer(&mut self, tag: u32, mut request: Box<Request>, status: i16) {
        // Before the pages are released: nobody else has them then.
        request.buffers.clear();
        let slot = &mut self.slots[tag as usize];
        for page in slot.uses.drain(..) {
            self.mapper.release(page);
        }
        if !self.broken {
            self.ring.respond(slot.id, slot.operation, status);
        }
        self.free_slots.push(tag);
        self.spare.keep(request);
        self.unpublished = true;
    }
}

impl RequestSource for BlkifSource {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn served_as(&mut self, disk: &str) {
        self.complaints = Seldom::of(disk, "bad request");
    }

    fn depth(&self) -> u32 {
        self.ring.entries()
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let mut pulled = Pulled::default();
        let mut entry = Entry::default();
        // Counts bad requests too: a guest that sends only those must not keep the worker here.
        let pending = self.ring.pending().map_err(|broken| self.stop(broken))?;
        let waiting = pending as usize + usize::from(self.stalled.is_some());
        let mut end = None;
        for _ in 0..room.min(self.batch.next(waiting)) {
            if let Some(stalled) = self.stalled.take() {
                entry = *stalled;
            } else {
                match self.ring.take(&mut entry) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(broken) => {
                        end = Some(self.stop(broken));
                        break;
                    }
                }
            }
            let mut request = self.spare.take();
            let parsed = self
                .parser
                .parse(&entry, self.mapper.as_mut(), &mut request);
            let ordered = match parsed {
                Ok(Parsed { operation, ordered }) => {
                    // There is a slot for each entry, and an entry is taken only when one is unanswered less.
                    let Some(tag) = self.free_slots.pop() else {
                        end = Some(self.stop("more requests than entries"));
                        break;
                    };
                    let slot = &mut self.slots[tag as usize];
                    slot.id = entry.id();
                    slot.operation = operation;
                    std::mem::swap(&mut slot.uses, &mut self.parser.uses);
                    self.releases |= !slot.uses.is_empty();
                    request.tag = u64::from(tag);
                    if request.op == Op::Write && !self.slots[tag as usize].uses.is_empty() {
                        self.note_copies(tag);
                    }
                    out.push(request);
                    ordered
                }
                Err(Bad::Grant(GrantError::Busy(_))) => {
                    self.spare.keep(request);
                    self.stall(entry);
                    break;
                }
                Err(bad) => {
                    self.spare.keep(request);
                    self.refuse(&entry, bad);
                    false
                }
            };
            pulled.ordered |= ordered;
            if self.mapper.wants_pause() {
                break;
            }
        }
        // Those that were taken are carried out, whatever came behind them.
        if !self.copies.is_empty() {
            self.fetch(out);
        }
        match end {
            Some(end) => Err(end),
            None => Ok(pulled),
        }
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        debug_assert!(self.copies.is_empty(), "left over from a pull");
        let answered = match self.releases && !self.broken {
            true => &done[..],
            false => &[],
        };
        for Completion { request, status } in answered {
            let tag = request.tag as u32;
            let read = request.op == Op::Read && *status == Status::Ok;
            if read && !self.slots[tag as usize].uses.is_empty() {
                self.note_copies(tag);
            }
        }
        if !self.copies.is_empty() {
            self.store(done);
        }
        for Completion { request, status } in done.drain(..) {
            let status = match status {
                Status::Ok => RSP_OKAY,
                Status::Unsupported => RSP_EOPNOTSUPP,
                _ => RSP_ERROR,
            };
            self.answer(request.tag as u32, request, status);
        }
    }

    fn push(&mut self) -> Result<usize, SourceEnd> {
        if self.unpublished && !self.broken {
            self.unpublished = false;
            if self.ring.publish() {
                self.channel.notify();
            }
        }
        Ok(0)
    }

    fn arm(&mut self) -> Readiness {
        if self.stalled.is_some() {
            // The end of a request of ours wakes us; of the system's memory nothing tells.
            let again = (!self.has_outstanding()).then(|| Instant::now() + STALL_RETRY);
            return Readiness::Wait(again);
        }
        if self.ring.arm() {
            return Readiness::Ready;
        }
        self.channel.rearm();
        Readiness::Wait(None)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.fd())
    }

    fn woken(&mut self) {
        self.channel.clear();
    }

    fn rest(&mut self) {
        self.spare.release();
        self.mapper.rest();
    }
}
