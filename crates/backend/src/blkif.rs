//! One blkif queue as a request source: it parses requests, resolves grants, and puts responses on
//! the ring.

use crate::grants::{Access, GrantError, GrantMapper, PageUse};
use crate::parse::{Bad, Parsed, Parser};
use crate::pull_batch::{PullBatch, PullChoice};
use crate::ratelimit::RateLimit;
use crate::ratelimited;
use crate::source::{Pulled, RequestSource, SourceEnd};
use crate::spare::SpareRequests;
use pvblk_block::{Completion, Error, Op, Readiness, Request, Status};
use pvblk_protocol::blkif::wire::{self, Entry, RSP_EOPNOTSUPP, RSP_ERROR, RSP_OKAY};
use pvblk_protocol::blkif::{BackRing, EventChannel};
use pvblk_sys::xen::{CopyDirection, GrantCopy, MAX_COPIES};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which a request that the system had no memory for is tried again, where no request of ours is
/// in flight that could free some.
const STALL_RETRY: Duration = Duration::from_millis(2);

/// The parts of a queue that the handshake hands over.
pub struct BlkifQueueParts {
    /// Names disk, front end and queue in the log.
    pub name: String,
    /// The ring's back end.
    pub ring: BackRing,
    /// The ring's event channel.
    pub channel: Box<dyn EventChannel>,
    /// Maps the peer's pages.
    pub mapper: Box<dyn GrantMapper>,
    /// Most segments that were offered for an indirect request; 0: indirect requests were not
    /// offered.
    pub max_indirect_segments: u16,
}

/// The data of a request that is needed for its response. It can't be read from the ring again:
/// responses overwrite the entries of older requests that are still unfinished.
#[derive(Default)]
struct BlkifSlot {
    id: u64,
    operation: u8,
    /// Pages to release before the response; empty where pages need no release.
    uses: Vec<PageUse>,
}

/// The back end of a blkif queue.
pub struct BlkifSource {
    name: String,
    ring: BackRing,
    channel: Box<dyn EventChannel>,
    mapper: Box<dyn GrantMapper>,
    parser: Parser,
    slots: Vec<BlkifSlot>,
    free_slots: Vec<u32>,
    spare: SpareRequests,
    batch: PullBatch,
    /// Copies that are to be made in one call.
    copies: Vec<GrantCopy>,
    /// True if pages have to be released after use; those of local front ends stay mapped instead.
    releases: bool,
    /// A request that was taken off the ring, but found no room for its data.
    stalled: Option<Box<Entry>>,
    /// Limits log lines on bad requests, for all sources of the disk once that is known.
    complaints: Arc<RateLimit>,
    unpublished: bool,
    /// The peer's indices were invalid: the ring is not written any more.
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
            slots: (0..entries).map(|_| BlkifSlot::default()).collect(),
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
        // Linux' back end does the same: the response to an indirect request has its inner
        // operation.
        let operation = match (entry.operation(), bad) {
            (wire::OP_INDIRECT, Bad::UnknownOperation(op)) => op,
            (wire::OP_INDIRECT, _) => entry.indirect().indirect_op,
            (op, _) => op,
        };
        self.ring.respond(entry.id(), operation, status);
        self.unpublished = true;
    }

    fn complain(&mut self, why: &dyn std::fmt::Display) {
        ratelimited!(warn, self.complaints, "{}: bad request: {why}", self.name);
    }

    /// True if a request has no response yet: its end frees memory.
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

    /// Notes the copies for the request with this tag.
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

    /// Makes all noted copies; those that failed are left in the list.
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

    /// Fetches the data of the writes among `out`; writes whose data can't be fetched fail and are taken out.
    #[cold]
    fn fetch(&mut self, out: &mut Vec<Box<Request>>) {
        self.make_copies(CopyDirection::FromGuest);
        // Their buffers are dropped first, since they must not be in use when the pages are
        // released.
        let failed: Vec<u32> = self.copies.drain(..).map(|c| c.tag).collect();
        for tag in failed {
            let Some(at) = out.iter().position(|r| r.tag == u64::from(tag)) else {
                continue; // another page of it failed, too
            };
            let request = out.remove(at);
            self.answer(tag, request, RSP_ERROR);
        }
    }

    /// Stores the data of the reads among `done`; a read whose data can't be stored fails.
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
        // This comes before the pages are released, so that no buffer of them is in use then.
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
        self.complaints = RateLimit::of(disk, "bad request");
    }

    fn pull_choice(&self) -> Option<Arc<PullChoice>> {
        Some(Arc::clone(self.batch.choice()))
    }

    fn depth(&self) -> u32 {
        self.ring.entries()
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let mut pulled = Pulled::default();
        let mut entry = Entry::default();
        // Bad requests count too: a guest that sends only those must not keep the worker here.
        let pending = self.ring.pending().map_err(|broken| self.stop(broken))?;
        let waiting = pending as usize + usize::from(self.stalled.is_some());
        let mut end = None;
        let mut taken = 0;
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
            taken += 1;
            let mut request = self.spare.take();
            let parsed = self
                .parser
                .parse(&entry, self.mapper.as_mut(), &mut request);
            let ordered = match parsed {
                Ok(Parsed { operation, ordered }) => {
                    // There is a slot for each entry, and an entry is taken only when there are fewer
                    // unanswered ones.
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
                    pulled.answered += 1;
                    false
                }
            };
            pulled.ordered |= ordered;
            if self.mapper.wants_pause() {
                break;
            }
        }
        self.batch.took(taken);
        // Requests that were taken are carried out, whatever entries follow them.
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
            let wakes = self.ring.publish();
            if wakes {
                self.channel.notify();
            }
            self.batch.pushed(wakes);
        }
        Ok(0)
    }

    fn arm(&mut self) -> Readiness {
        self.batch.sleeps();
        if self.stalled.is_some() {
            // The end of one of our requests wakes this source; a change of the system's free
            // memory doesn't.
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
