//! Requests: cut into parts of stripes, and done when their last part has come back to the queue that took them.

use super::io::Purpose;
use super::queue::{Ended, EndedOf, Mail, QueueCore};
use super::record::{Part, PartOf, Waiting};
use super::run::Next;
use super::{Data, SharedRequest};
use crate::head_pages::segments;
use crate::words::{Arrival, Place};
use pvblk_block::{Completion, Op, Request, RequestFlags, Status};
use std::ops::Range;
use std::sync::Arc;

/// A request that isn't done.
pub struct Active {
    request: SharedRequest,
    /// Parts, spans and I/O that aren't done, and one more while it is taken apart.
    left: usize,
    failed: bool,
}

/// A range of a request whose parts haven't all arrived at their words.
pub struct Span {
    request: usize,
    sectors: Range<u64>,
    /// Stripes that have a part of it perhaps.
    stripes: Range<u64>,
}

/// A piece of a read at a member.
pub struct Direct {
    request: usize,
    sectors: Range<u64>,
}

/// A request's flush that a member failed: it ends when superblocks name the member.
pub struct HeldFlush {
    request: usize,
    slot: usize,
}

impl HeldFlush {
    pub(super) fn is_at(&self, slot: usize) -> bool {
        self.slot == slot
    }
}

impl Active {
    pub(super) fn op(&self) -> Op {
        self.request.op
    }

    pub(super) fn shared(&self) -> SharedRequest {
        Arc::clone(&self.request)
    }

    /// So many more parts aren't done.
    pub(super) fn add_parts(&mut self, count: usize) {
        self.left += count;
    }
}

impl Span {
    /// Stripes that may have parts which haven't arrived.
    pub(super) fn left(&self) -> &Range<u64> {
        &self.stripes
    }

    /// Its parts of so many stripes have gone.
    pub(super) fn went(&mut self, stripes: u64) {
        self.stripes.start += stripes;
    }

    /// Sectors of the array.
    pub(super) fn sectors(&self) -> &Range<u64> {
        &self.sectors
    }

    /// Number of its request.
    pub(super) fn request(&self) -> usize {
        self.request
    }
}

impl QueueCore {
    /// Takes a request.
    pub fn submit(&mut self, request: Box<Request>) {
        let op = request.op;
        let is_secure = op == Op::Discard && request.flags.contains(RequestFlags::SECURE);
        if is_secure {
            // The old data would stay on the members: nothing here can promise that it is gone.
            let status = Status::Unsupported;
            return self.done.push(Completion { request, status });
        }
        self.tallies.note_request();
        self.look();
        let sectors = request.sector..request.end();
        let id = self.active.insert(Active {
            request: Arc::new(request),
            left: 1,
            failed: self.now.broken,
        });
        match op {
            _ if self.now.broken => {}
            Op::Read => self.read(id, sectors),
            Op::Flush => self.flush(id),
            Op::Write => {
                if self.common.has_stripe_queues() {
                    let length = sectors.end - sectors.start;
                    self.gather.streams.note(sectors.start, length);
                }
                self.add_span(id, sectors);
            }
            Op::WriteZeroes => self.add_span(id, sectors),
            Op::Discard => self.discard(id, sectors),
        }
        self.one_done(id, true);
    }

    /// A part of a request is done, or one of its I/O.
    fn one_done(&mut self, id: usize, ok: bool) {
        self.parts_done(id, 1, ok);
    }

    /// So many parts of a request are done.
    pub(super) fn parts_done(&mut self, id: usize, count: usize, ok: bool) {
        let active = &mut self.active[id];
        active.failed |= !ok;
        active.left -= count;
        if active.left > 0 {
            return;
        }
        let Active {
            request, failed, ..
        } = self.active.remove(id);
        // Parts that are done hold no request any more.
        let Some(request) = Arc::into_inner(request) else {
            debug_assert!(false, "a request is done while something works on it");
            return;
        };
        let status = if failed { Status::IoError } else { Status::Ok };
        self.done.push(Completion { request, status });
    }

    /// Reads from the members, in pieces of a chunk; those of a missing member are parts of stripes.
    fn read(&mut self, id: usize, sectors: Range<u64>) {
        let pieces = self
            .common
            .geometry
            .pieces(sectors.start, sectors.end - sectors.start);
        for piece in pieces {
            let of = piece.array_sector..piece.array_sector + piece.sectors;
            let end = piece.place.member_sector + piece.sectors;
            let slot = self.now.reads_directly(piece.place.member, end);
            let slot = slot.filter(|_| self.common.may_read_directly(&of));
            let Some(slot) = slot else {
                self.add_span(id, of);
                continue;
            };
            let active = &mut self.active[id];
            active.left += 1;
            let (skip, len) = (
                ((of.start - sectors.start) * 512) as usize,
                (piece.sectors * 512) as usize,
            );
            let mut buffers = Vec::new();
            segments(&active.request, skip, len, |buffer, at, len| {
                buffers.extend(buffer.slice(at, len));
            });
            let purpose = Purpose::Direct(Direct {
                request: id,
                sectors: of,
            });
            let io = (slot, Op::Read, false);
            self.start(purpose, io, piece.place.member_sector, Data::Some(buffers));
        }
    }

    /// The first sector of a piece of a read, if traces follow its request.
    pub(super) fn followed(&self, direct: &Direct) -> Option<u64> {
        let follows = self.active[direct.request].request.followed;
        follows.then_some(direct.sectors.start)
    }

    /// A piece of a read has ended. One that the member failed, or whose blocks don't fit their sums, is read by stripes, which calculate blocks that
    /// can't be had.
    pub(super) fn direct_ended(&mut self, direct: Direct, ok: bool) {
        let request = &self.active[direct.request].request;
        if !ok || !self.common.request_fits(request, &direct.sectors) {
            self.add_span(direct.request, direct.sectors);
        }
        self.one_done(direct.request, true);
    }

    /// Flushes all members, for the writes that completed before.
    fn flush(&mut self, id: usize) {
        for slot in self.common.volatile(&self.now) {
            self.active[id].left += 1;
            let io = (slot, Op::Flush, false);
            self.start(Purpose::Flush(id), io, 0, Data::None);
        }
    }

    pub(super) fn flush_ended(&mut self, request: usize, slot: usize, ok: bool) {
        match ok {
            true => self.one_done(request, true),
            false => self.flush_failed(HeldFlush { request, slot }),
        }
    }

    /// A member failed a flush: it waits until the member isn't one any more.
    pub(super) fn flush_failed(&mut self, flush: HeldFlush) {
        match self.member_failed(flush.slot) {
            true => self.held_flushes.push(flush),
            false => self.one_done(flush.request, !self.now.broken),
        }
    }

    /// Only whole rows are discarded, and none if a member is missing.
    fn discard(&mut self, id: usize, sectors: Range<u64>) {
        let row = self.common.geometry.row_sectors();
        let whole = sectors.start.next_multiple_of(row)..sectors.end / row * row;
        if self.now.members.failed().is_none() && !whole.is_empty() {
            self.add_span(id, whole);
        }
    }

    fn add_span(&mut self, request: usize, sectors: Range<u64>) {
        self.active[request].left += 1;
        self.spans.push_back(Span {
            request,
            stripes: self.common.geometry.range_stripes(&sectors),
            sectors,
        });
    }

    /// The next part of a span, or a run of them, arrives at its word, if there is a place for it; true if something was done.
    pub(super) fn next_part(&mut self) -> bool {
        match self.next_run() {
            Next::Begun => return true,
            Next::Waits => return false,
            Next::Alone => {}
        }
        let Some(span) = self.spans.front_mut() else {
            return false;
        };
        let (id, sectors) = (span.request, span.sectors.clone());
        let active = &mut self.active[id];
        let stops = match active.request.op {
            Op::Discard => self.now.members.failed().is_some(),
            _ => false,
        };
        let geometry = &self.common.geometry;
        let mut part = None;
        while !stops
            && !self.now.broken
            && part.is_none()
            && let Some(stripe) = span.stripes.next()
        {
            part = (geometry.stripe_blocks(stripe, &sectors) != 0).then(|| Part {
                of: PartOf::Request {
                    request: Arc::clone(&active.request),
                    id,
                    sectors: sectors.clone(),
                    way: None,
                },
                from: self.me,
                stripe,
            });
        }
        let Some(part) = part else {
            self.spans.pop_front();
            self.one_done(id, !self.now.broken);
            return true;
        };
        let stripe = part.stripe;
        let has_gone = match active.request.op == Op::Write {
            true => self.gather_part(part),
            false => match (self.places_beside() > 0)
                .then(|| self.places.take())
                .flatten()
            {
                Some(place) => {
                    self.arrive(place, part);
                    true
                }
                None => false,
            },
        };
        match has_gone {
            true => self.active[id].left += 1,
            // It is taken again.
            false => {
                if let Some(span) = self.spans.front_mut() {
                    span.stripes.start = stripe;
                }
            }
        }
        has_gone
    }

    /// A part that never arrived at its word fails.
    pub(super) fn fail_part(&mut self, part: Part) {
        if let PartOf::Request {
            request, id, way, ..
        } = part.of
        {
            drop(request);
            way.into_iter().for_each(|way| self.gathered_ended(way));
            self.one_done(id, false);
        }
    }

    /// A part arrives at its stripe's word.
    pub(super) fn arrive(&mut self, place: Place, part: Part) {
        let at = self.common.word_of(part.stripe);
        if let Arrival::Claimed(mut token, arrived) =
            self.common.words.arrive(at, self.me, place, part)
        {
            let record = token.record_mut();
            record.add([arrived], &self.common.geometry);
            self.send(self.me, Mail::Stripe(token));
        }
    }

    /// Parts of a batch are done: those of other queues go back to them.
    pub(super) fn end_parts(&mut self, parts: impl IntoIterator<Item = Waiting>) {
        for waiting in parts {
            let (ok, mismatch) = (!waiting.has_failed(), waiting.mismatch);
            let Waiting { place, part, .. } = waiting;
            let of = match part.of {
                PartOf::Request {
                    request, id, way, ..
                } => EndedOf::Request { request, id, way },
                PartOf::Sync(_) => EndedOf::Sync {
                    stripe: part.stripe,
                    mismatch,
                },
            };
            self.send(part.from, Mail::Ended(Ended { place, of, ok }));
        }
    }

    /// A part of this queue is done.
    pub(super) fn part_ended(&mut self, ended: Ended) {
        self.places.put(ended.place);
        match ended.of {
            EndedOf::Request { request, id, way } => {
                drop(request);
                if let Some(way) = way {
                    self.gathered_ended(way);
                }
                self.one_done(id, ended.ok);
            }
            EndedOf::Sync { stripe, mismatch } => {
                self.sync_stripe_done(stripe, ended.ok, mismatch);
            }
        }
    }
}
