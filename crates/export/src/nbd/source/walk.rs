//! Requests without data of the client that are several of the device's: zeros that have to be written, and what is to be cached.

use super::NbdSource;
use crate::nbd::slots::{Edges, PART, Walk};
use pvblk_block::{Buffer, Op, Request, RequestFlags, Status};
use pvblk_protocol::nbd::{NbdRequest, cflag};
use std::sync::OnceLock;

/// Parts of one that are at the device at the same time, where they are written.
const WRITES: u32 = 4;

/// Zeros to be written; nobody writes to them, so the system backs them with its one page of zeros.
pub(super) fn zeros() -> Option<&'static Buffer> {
    static ZEROS: OnceLock<Option<Buffer>> = OnceLock::new();
    ZEROS
        .get_or_init(|| Buffer::anonymous(PART as usize).ok())
        .as_ref()
}

impl NbdSource {
    /// Bytes of buffers that a command needs whose data aren't the client's: blocks that are zeroed in part, and room for what is cached.
    pub(super) fn scratch_bytes(&self, op: Op, r: &NbdRequest, edges: Edges) -> usize {
        match op {
            Op::Read => (u64::from(r.len) + edges.bytes() as u64).min(PART) as usize,
            Op::WriteZeroes if !edges.is_none() => 2 * self.limits.logical_sector_bytes as usize,
            _ => 0,
        }
    }

    /// Zeros: by the device where it can and no block is zeroed in part, else step by step.
    pub(super) fn write_zeroes(&mut self, index: u32, r: &NbdRequest) {
        let by_device = self.limits.write_zeroes;
        let fua = r.flags & cflag::FUA != 0;
        let slot = self.slots.get_mut(index);
        if by_device && r.flags & cflag::NO_HOLE != 0 {
            slot.flags |= RequestFlags::NO_UNMAP;
        }
        if by_device && slot.edges.is_none() {
            slot.flags.set(RequestFlags::FUA, fua);
            return;
        }
        slot.buffers.iter().for_each(Buffer::zero);
        // One flush for all of the parts.
        if fua {
            slot.then_flush = true;
            self.flushes_later += 1;
        }
        self.walks.push_back(Walk::new(index));
    }

    /// True if there is a part to be made.
    pub(super) fn has_steps(&self) -> bool {
        self.walks.iter().any(|w| self.may_step(w))
    }

    fn may_step(&self, walk: &Walk) -> bool {
        let slot = self.slots.get(walk.slot);
        match slot.op {
            // All of it goes to the same memory.
            Op::Read => slot.pending == 0,
            _ => slot.pending < WRITES,
        }
    }

    /// Parts that are due, until `out` has `target`.
    pub(super) fn issue_steps(&mut self, target: usize, out: &mut Vec<Box<Request>>) {
        for _ in 0..self.walks.len() {
            let Some(mut walk) = self.walks.pop_front() else {
                return;
            };
            let failed = self.slots.get(walk.slot).status != Status::Ok || self.dead;
            if failed {
                let slot = self.slots.get_mut(walk.slot);
                slot.issued = true;
                let over = slot.pending == 0;
                if over && std::mem::take(&mut slot.then_flush) {
                    self.flushes_later -= 1;
                }
                if over {
                    self.finish(walk.slot);
                }
                continue;
            }
            let mut last = false;
            while !last && self.may_step(&walk) && out.len() < target && self.left > 0 {
                let mut request = self.request();
                let zeros = (!self.limits.write_zeroes).then(zeros).flatten();
                let slot = self.slots.get_mut(walk.slot);
                last = walk.next(slot, &self.part, zeros, &mut request);
                self.emit(request, out);
            }
            if !last {
                self.walks.push_back(walk);
            }
        }
    }
}
