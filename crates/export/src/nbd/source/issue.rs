//! From the client's requests to the device's: whole, in parts, or with a flush behind.

use super::{Expect, NbdSource};
use crate::nbd::block_status;
use crate::nbd::proto::{Command, NbdRequest, cflag, err};
use crate::nbd::slots::{Cut, fits};
use pvblk_block::{Op, Request, RequestFlags, SECTOR};

impl NbdSource {
    pub(super) fn run(&mut self, r: &NbdRequest, target: usize, out: &mut Vec<Box<Request>>) {
        let op = match r.command {
            Command::Read => Op::Read,
            Command::Write => Op::Write,
            Command::Flush => Op::Flush,
            Command::Trim => Op::Discard,
            Command::WriteZeroes => Op::WriteZeroes,
            Command::BlockStatus => return self.block_status(r),
            // `check` lets nothing else through.
            Command::Disconnect | Command::Cache | Command::Unknown(_) => {
                return self.outbox.error(r.cookie, err::EINVAL);
            }
        };
        let index = self.slots.insert(r, op, &mut self.scratch);
        let slot = self.slots.get_mut(index);
        let fua = r.flags & cflag::FUA != 0;
        if fua && matches!(op, Op::Write | Op::WriteZeroes) {
            slot.flags |= RequestFlags::FUA;
        }
        if op == Op::WriteZeroes && r.flags & cflag::NO_HOLE != 0 {
            slot.flags |= RequestFlags::NO_UNMAP;
        }
        if op == Op::Write {
            // The client can't reach the buffers any more.
            slot.flags |= RequestFlags::STABLE_BUFFERS;
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

    fn block_status(&mut self, r: &NbdRequest) {
        self.described = true;
        let one = r.flags & cflag::REQ_ONE != 0;
        let (sector, sectors) = (r.offset / SECTOR, u64::from(r.len) / SECTOR);
        match block_status::describe(&*self.device, sector, sectors, one) {
            Ok(payload) => self.outbox.block_status(r.cookie, payload),
            Err(e) => {
                tracing::warn!("{}: block status: {e}", self.name);
                self.outbox.error(r.cookie, err::EIO);
            }
        }
    }

    fn request(&mut self) -> Box<Request> {
        self.in_flight += 1;
        self.spare.take()
    }

    /// Makes a slot's requests for the device, at least one, until `out` has `target`.
    pub(super) fn issue(&mut self, index: u32, target: usize, out: &mut Vec<Box<Request>>) {
        let slot = self.slots.get(index);
        if slot.op.has_data() && !fits(slot, &self.limits) {
            self.cut = Some(Cut::new(index));
            return self.issue_parts(target, out);
        }
        let mut request = self.request();
        let slot = self.slots.get_mut(index);
        let (sector, sectors) = match slot.op {
            Op::Flush => (0, 0),
            _ => (slot.offset / SECTOR, u64::from(slot.len) / SECTOR),
        };
        request.reset(slot.op, slot.flags, sector, sectors, u64::from(index));
        std::mem::swap(&mut request.buffers, &mut slot.buffers);
        slot.whole = true;
        slot.issued = true;
        slot.pending = 1;
        out.push(request);
    }

    /// Cuts the current request further up, until `out` has `target`.
    pub(super) fn issue_parts(&mut self, target: usize, out: &mut Vec<Box<Request>>) {
        while let Some(mut cut) = self.cut
            && out.len() < target
        {
            let mut request = self.request();
            let last = cut.next(self.slots.get_mut(cut.slot), &self.limits, &mut request);
            self.cut = if last { None } else { Some(cut) };
            out.push(request);
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
