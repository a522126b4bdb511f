//! From the client's requests to the device's: whole, in parts, step by step, or with a flush behind.
//!
//! One pull takes a bounded number of bytes. One request at a time is *cut* into parts, and later ones wait for that; *walks* (requests of one length whose
//! data aren't the client's) go on beside others.

use super::commands::zeros;
use crate::nbd::slots::{Cut, PartSize, Slots, Walk};
use pvblk_backend::SpareRequests;
use pvblk_block::{Limits, Op, Request, RequestFlags, SECTOR, Status};
use std::collections::VecDeque;

/// Bytes of requests that one pull takes: a worker's other lanes wait for it.
const PULLED_AT_ONCE: u64 = 256 << 10;

/// Parts of one walk that are at the device at the same time, where they are written.
const WRITES: u32 = 4;

/// Makes the device's requests. See the module's documentation.
pub(super) struct Issuer {
    /// The device writes zeros without data.
    writes_zeroes: bool,
    part: PartSize,
    /// Most requests at the device.
    depth: u32,
    /// Requests at the device.
    in_flight: u32,
    spare: SpareRequests,
    cut: Option<Cut>,
    walks: VecDeque<Walk>,
    /// Slots whose flush is due.
    flushes: Vec<u32>,
    /// Slots that will need one, those included.
    flushes_later: usize,
    /// Bytes that this pull may still take.
    left: u64,
    /// This pull has a request for a part of a block.
    partial: bool,
}

impl Issuer {
    pub(super) fn new(limits: &Limits, depth: u32) -> Issuer {
        Issuer {
            writes_zeroes: limits.write_zeroes,
            part: PartSize::of(limits),
            depth,
            in_flight: 0,
            spare: SpareRequests::default(),
            cut: None,
            walks: VecDeque::new(),
            flushes: Vec::new(),
            flushes_later: 0,
            left: 0,
            partial: false,
        }
    }

    #[inline]
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Requests that may still go to the device.
    #[inline]
    pub(super) fn room(&self) -> u32 {
        self.depth - self.in_flight
    }

    /// Begins a pull.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.left = PULLED_AT_ONCE;
        self.partial = false;
    }

    /// False once this pull has taken its bytes.
    #[inline]
    pub(super) fn may_take_more(&self) -> bool {
        self.left > 0
    }

    /// True if this pull has a request for a part of a block, which needs an order.
    #[inline]
    pub(super) fn is_ordered(&self) -> bool {
        self.partial
    }

    /// True while a request is being cut: later ones wait.
    #[inline]
    pub(super) fn is_cutting(&self) -> bool {
        self.cut.is_some()
    }

    /// True if a request could be made now.
    #[inline]
    pub(super) fn has_work(&self, slots: &Slots) -> bool {
        self.cut.is_some()
            || !self.flushes.is_empty()
            || self.walks.iter().any(|w| may_step(slots, w))
    }

    /// True if nothing will follow from the requests that there are.
    pub(super) fn is_over(&self) -> bool {
        self.cut.is_none() && self.walks.is_empty() && self.flushes_later == 0
    }

    /// One more request for the device.
    #[inline]
    fn emit(&mut self, request: Box<Request>, out: &mut Vec<Box<Request>>) {
        if request.op.has_data() {
            self.left = self.left.saturating_sub(request.sectors * SECTOR);
        }
        self.partial |= request.flags.contains(RequestFlags::PARTIAL);
        out.push(request);
    }

    #[inline]
    fn request(&mut self) -> Box<Request> {
        self.in_flight += 1;
        self.spare.take()
    }

    /// Makes a slot's requests for the device, at least one, until `out` has `target`.
    #[inline(always)]
    pub(super) fn issue(
        &mut self,
        slots: &mut Slots,
        index: u32,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        let slot = slots.get(index);
        if slot.op.has_data() && !self.part.fits(slot) {
            return self.issue_first(slots, index, target, out);
        }
        let mut request = self.request();
        let slot = slots.get_mut(index);
        let (sector, sectors) = match slot.op {
            Op::Flush => (0, 0),
            _ => (slot.first_sector(), slot.whole_len() / SECTOR),
        };
        request.reset(slot.op, slot.flags, sector, sectors, u64::from(index));
        std::mem::swap(&mut request.buffers, &mut slot.buffers);
        slot.whole = true;
        slot.issued = true;
        slot.pending = 1;
        self.emit(request, out);
    }

    /// Begins to cut a slot's request up.
    #[cold]
    fn issue_first(
        &mut self,
        slots: &mut Slots,
        index: u32,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        self.cut = Some(Cut::new(index));
        self.issue_parts(slots, target, out);
    }

    /// Cuts the current request further up, until `out` has `target`.
    pub(super) fn issue_parts(
        &mut self,
        slots: &mut Slots,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        while let Some(mut cut) = self.cut
            && out.len() < target
            && self.left > 0
        {
            let mut request = self.request();
            let last = cut.next(slots.get_mut(cut.slot), &self.part, &mut request);
            self.cut = if last { None } else { Some(cut) };
            self.emit(request, out);
        }
    }

    /// Flushes that are due, until `out` has `target`.
    pub(super) fn issue_flushes(
        &mut self,
        slots: &mut Slots,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        while out.len() < target
            && let Some(index) = self.flushes.pop()
        {
            let mut request = self.request();
            request.reset(Op::Flush, RequestFlags::empty(), 0, 0, u64::from(index));
            slots.get_mut(index).pending = 1;
            self.flushes_later -= 1;
            out.push(request);
        }
    }

    /// Makes the slot's requests step by step from now on.
    pub(super) fn walk(&mut self, index: u32) {
        self.walks.push_back(Walk::new(index));
    }

    /// Makes steps of walks, until `out` has `target`. Returns a slot of which nothing is left since it has failed, or since `dead` says that nobody
    /// waits for it; call it again then.
    pub(super) fn issue_steps(
        &mut self,
        slots: &mut Slots,
        dead: bool,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) -> Option<u32> {
        for _ in 0..self.walks.len() {
            let mut walk = self.walks.pop_front()?;
            if slots.get(walk.slot).status != Status::Ok || dead {
                let slot = slots.get_mut(walk.slot);
                slot.issued = true;
                if slot.pending > 0 {
                    continue;
                }
                if std::mem::take(&mut slot.then_flush) {
                    self.flushes_later -= 1;
                }
                return Some(walk.slot);
            }
            let mut last = false;
            while !last && may_step(slots, &walk) && out.len() < target && self.left > 0 {
                let mut request = self.request();
                let zeros = (!self.writes_zeroes).then(zeros).flatten();
                let slot = slots.get_mut(walk.slot);
                last = walk.next(slot, &self.part, zeros, &mut request);
                self.emit(request, out);
            }
            if !last {
                self.walks.push_back(walk);
            }
        }
        None
    }

    /// A flush follows the slot's requests.
    pub(super) fn flush_later(&mut self, slots: &mut Slots, index: u32) {
        slots.get_mut(index).then_flush = true;
        self.flushes_later += 1;
    }

    /// A request came back from the device.
    #[inline]
    pub(super) fn ended(&mut self, request: Box<Request>) {
        self.in_flight -= 1;
        self.spare.keep(request);
    }

    /// All requests of a slot have ended. True if its flush is due now; else nothing of it is left.
    #[inline]
    pub(super) fn flush_follows(&mut self, slots: &mut Slots, index: u32, dead: bool) -> bool {
        let slot = slots.get_mut(index);
        if !std::mem::take(&mut slot.then_flush) {
            return false;
        }
        let follows = slot.status == Status::Ok && !dead;
        match follows {
            true => self.flushes.push(index),
            false => self.flushes_later -= 1,
        }
        follows
    }

    /// Gives back memory of requests that aren't used.
    pub(super) fn release(&mut self) {
        self.spare.release();
    }
}

fn may_step(slots: &Slots, walk: &Walk) -> bool {
    let slot = slots.get(walk.slot);
    match slot.op {
        // All of it goes to the same memory.
        Op::Read => slot.pending == 0,
        _ => slot.pending < WRITES,
    }
}
