//! From the client's requests to the device's: whole, in parts, or with a flush behind.

use super::{Expect, NbdSource};
use crate::nbd::slots::{Cut, Edges, Walk};
use pvblk_block::{Op, Request, RequestFlags, SECTOR};
use pvblk_protocol::nbd::{Command, NbdRequest, cflag, err};

impl NbdSource {
    pub(super) fn run(
        &mut self,
        r: &NbdRequest,
        mut edges: Edges,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        let mut r = *r;
        let op = match r.command {
            Command::Read => Op::Read,
            Command::Write => Op::Write,
            Command::Flush => Op::Flush,
            Command::Trim => Op::Discard,
            Command::WriteZeroes => Op::WriteZeroes,
            Command::Cache => Op::Read,
            Command::BlockStatus => return self.block_status(&r),
            // `check` lets nothing else through.
            Command::Disconnect | Command::Unknown(_) => {
                return self.outbox.error(r.cookie, err::EINVAL);
            }
        };
        if op == Op::Discard && !edges.is_none() {
            // Blocks that it has only a part of stay as they are.
            let Some(inside) = self.whole_blocks(&r) else {
                return self.outbox.done(r.cookie);
            };
            (r, edges) = (inside, Edges::default());
        }
        let index = self.slots.insert(&r, edges, op, &mut self.scratch);
        let slot = self.slots.get_mut(index);
        let fua = r.flags & cflag::FUA != 0;
        if op == Op::WriteZeroes {
            self.write_zeroes(index, &r);
            if !self.walks.is_empty() && self.walks.back() == Some(&Walk::new(index)) {
                return self.issue_steps(target, out);
            }
            return self.issue(index, target, out);
        }
        if r.command == Command::Cache {
            self.walks.push_back(Walk::new(index));
            return self.issue_steps(target, out);
        }
        if op == Op::Write {
            slot.flags.set(RequestFlags::FUA, fua);
            // The client can't reach the buffers any more.
            slot.flags |= RequestFlags::STABLE_BUFFERS;
            slot.look();
            self.expect = Expect::Payload {
                slot: index,
                filled: 0,
            };
            return;
        }
        if op == Op::Discard && fua {
            slot.then_flush = true;
            self.flushes_later += 1;
        }
        self.issue(index, target, out);
    }

    /// What a trim has of whole blocks.
    fn whole_blocks(&self, r: &NbdRequest) -> Option<NbdRequest> {
        let block = u64::from(self.limits.logical_sector_bytes);
        let offset = r.offset.next_multiple_of(block);
        let end = (r.offset + u64::from(r.len)) / block * block;
        let len = end.checked_sub(offset).filter(|&n| n > 0)?;
        Some(NbdRequest {
            offset,
            len: len as u32,
            ..*r
        })
    }

    /// One more request for the device.
    #[inline]
    pub(super) fn emit(&mut self, request: Box<Request>, out: &mut Vec<Box<Request>>) {
        if request.op.has_data() {
            self.left = self.left.saturating_sub(request.sectors * SECTOR);
        }
        self.partial |= request.flags.contains(RequestFlags::PARTIAL);
        out.push(request);
    }

    pub(super) fn request(&mut self) -> Box<Request> {
        self.in_flight += 1;
        self.spare.take()
    }

    /// Makes a slot's requests for the device, at least one, until `out` has `target`.
    pub(super) fn issue(&mut self, index: u32, target: usize, out: &mut Vec<Box<Request>>) {
        let slot = self.slots.get(index);
        if slot.op.has_data() && !self.part.fits(slot) {
            self.cut = Some(Cut::new(index));
            return self.issue_parts(target, out);
        }
        let mut request = self.request();
        let slot = self.slots.get_mut(index);
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

    /// Cuts the current request further up, until `out` has `target`.
    pub(super) fn issue_parts(&mut self, target: usize, out: &mut Vec<Box<Request>>) {
        while let Some(mut cut) = self.cut
            && out.len() < target
            && self.left > 0
        {
            let mut request = self.request();
            let last = cut.next(self.slots.get_mut(cut.slot), &self.part, &mut request);
            self.cut = if last { None } else { Some(cut) };
            self.emit(request, out);
        }
    }

    /// Flushes that are due, until `out` has `target`.
    pub(super) fn issue_flushes(&mut self, target: usize, out: &mut Vec<Box<Request>>) {
        while out.len() < target
            && let Some(index) = self.flushes.pop()
        {
            let mut request = self.request();
            request.reset(Op::Flush, RequestFlags::empty(), 0, 0, u64::from(index));
            self.slots.get_mut(index).pending = 1;
            self.flushes_later -= 1;
            out.push(request);
        }
    }
}
