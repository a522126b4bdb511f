//! One blkif queue as a request source: parse, resolve grants, answer.

use crate::grants::GrantMapper;
use crate::parse::{Bad, Parsed, Parser};
use crate::source::{PullBatch, Pulled, RequestSource, SourceEnd};
use crate::spare::SpareRequests;
use pvblk_block::{Completion, Error, Readiness, Request, Status};
use pvblk_ring::wire::{self, Entry, RSP_EOPNOTSUPP, RSP_ERROR, RSP_OKAY};
use pvblk_ring::{BackRing, EventChannel};
use std::os::fd::BorrowedFd;

/// Bad requests of one queue that are logged; the rest is only counted, so that a guest can't fill the log.
const LOGGED_BAD: u64 = 8;

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
#[derive(Clone, Default)]
struct Slot {
    id: u64,
    operation: u8,
    /// References to unmap before the answer; empty where the mapper doesn't need it.
    grefs: Vec<u32>,
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
    bad_requests: u64,
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
            parser: Parser::new(parts.max_indirect_segments, parts.mapper.needs_unmap()),
            mapper: parts.mapper,
            slots: vec![Slot::default(); entries as usize],
            free_slots: (0..entries).rev().collect(),
            spare: SpareRequests::default(),
            batch: PullBatch::default(),
            bad_requests: 0,
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
        self.bad_requests += 1;
        if self.bad_requests <= LOGGED_BAD {
            tracing::warn!(queue = %self.name, "bad request: {bad}");
        }
        let status = match bad {
            Bad::UnknownOperation(_) => RSP_EOPNOTSUPP,
            _ => RSP_ERROR,
        };
        self.unmap_all();
        // As Linux's back end answers: an indirect request is told by its inner operation.
        let operation = match (entry.operation(), bad) {
            (wire::OP_INDIRECT, Bad::UnknownOperation(op)) => op,
            (wire::OP_INDIRECT, _) => entry.indirect().indirect_op,
            (op, _) => op,
        };
        self.ring.respond(entry.id(), operation, status);
        self.unpublished = true;
    }

    fn unmap_all(&mut self) {
        for gref in self.parser.mapped.drain(..) {
            self.mapper.unmap(gref);
        }
    }
}

impl RequestSource for BlkifSource {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn depth(&self) -> u32 {
        self.ring.entries()
    }

    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let mut pulled = Pulled::default();
        let mut entry = Entry::default();
        // Counts bad requests too: a guest that sends only those must not keep the worker here.
        let pending = self.ring.pending().map_err(|broken| self.stop(broken))?;
        for _ in 0..room.min(self.batch.next(pending as usize)) {
            match self.ring.take(&mut entry) {
                Ok(true) => {}
                Ok(false) => break,
                Err(broken) => return Err(self.stop(broken)),
            }
            let mut request = self.spare.take();
            let parsed = self
                .parser
                .parse(&entry, self.mapper.as_mut(), &mut request);
            let ordered = match parsed {
                Ok(Parsed { operation, ordered }) => {
                    // There is a slot for each entry, and an entry is taken only when one is unanswered less.
                    let Some(tag) = self.free_slots.pop() else {
                        return Err(self.stop("more requests than entries"));
                    };
                    let slot = &mut self.slots[tag as usize];
                    slot.id = entry.id();
                    slot.operation = operation;
                    slot.grefs.append(&mut self.parser.mapped);
                    request.tag = u64::from(tag);
                    out.push(request);
                    ordered
                }
                Err(bad) => {
                    self.spare.keep(request);
                    self.refuse(&entry, bad);
                    false
                }
            };
            pulled.ordered |= ordered;
        }
        Ok(pulled)
    }

    fn complete(&mut self, done: &mut Vec<Completion>) {
        for Completion { request, status } in done.drain(..) {
            let tag = request.tag as u32;
            let slot = &mut self.slots[tag as usize];
            for gref in slot.grefs.drain(..) {
                self.mapper.unmap(gref);
            }
            let status = match status {
                Status::Ok => RSP_OKAY,
                Status::Unsupported => RSP_EOPNOTSUPP,
                _ => RSP_ERROR,
            };
            if !self.broken {
                self.ring.respond(slot.id, slot.operation, status);
            }
            self.free_slots.push(tag);
            self.spare.keep(request);
        }
        self.unpublished = true;
    }

    fn push(&mut self) -> Result<(), SourceEnd> {
        if self.unpublished && !self.broken {
            self.unpublished = false;
            if self.ring.publish() {
                self.channel.notify();
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> Readiness {
        if self.ring.arm() {
            Readiness::Ready
        } else {
            Readiness::Wait(None)
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.fd())
    }

    fn woken(&mut self) {
        self.channel.clear();
    }

    fn rest(&mut self) {
        self.spare.release();
    }
}
