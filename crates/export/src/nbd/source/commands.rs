//! The requests of the device that each command of the client becomes.

use super::NbdSource;
use crate::nbd::reply::ReplyTo;
use crate::nbd::slots::{Edges, PART};
use pvblk_block::{Buffer, Op, Request, RequestFlags};
use pvblk_protocol::nbd::{Command, NbdRequest, cflag, err};
use std::sync::OnceLock;

/// Zeros to be written; nobody writes to them, so the system backs them with its one page of zeros.
pub(super) fn zeros() -> Option<&'static Buffer> {
    static ZEROS: OnceLock<Option<Buffer>> = OnceLock::new();
    ZEROS
        .get_or_init(|| Buffer::anonymous(PART as usize).ok())
        .as_ref()
}

impl NbdSource {
    /// Bytes of buffers that a command needs: for its data, for blocks that are zeroed in part, or as room for what is cached.
    #[inline]
    pub(super) fn memory_of(&self, r: &NbdRequest, edges: Edges) -> usize {
        match r.command {
            Command::Read | Command::Write => r.len as usize + edges.bytes(),
            Command::Cache => (r.len + edges.bytes() as u64).min(PART) as usize,
            Command::WriteZeroes if !edges.is_none() => {
                2 * self.limits.logical_sector_bytes as usize
            }
            _ => 0,
        }
    }

    /// Starts a request that was admitted, and whose memory was taken.
    pub(super) fn run(
        &mut self,
        r: &NbdRequest,
        mut edges: Edges,
        target: usize,
        out: &mut Vec<Box<Request>>,
    ) {
        let to = ReplyTo::from(r);
        let mut r = *r;
        let op = match r.command {
            Command::Read => Op::Read,
            Command::Write => Op::Write,
            Command::Flush => Op::Flush,
            Command::Trim => Op::Discard,
            Command::WriteZeroes => Op::WriteZeroes,
            Command::Cache => Op::Read,
            Command::BlockStatus => return self.block_status(&r, self.terms.contexts),
            // `check` lets nothing else through.
            Command::Disconnect | Command::Unknown(_) => {
                return self.outbox.error((&r).into(), err::EINVAL);
            }
        };
        if op == Op::Discard && !edges.is_none() {
            // Blocks that it has only a part of stay as they are.
            let Some(inside) = self.whole_blocks(&r) else {
                return self.outbox.done((&r).into());
            };
            (r, edges) = (inside, Edges::default());
        }
        let buffers = self.memory.taken();
        let index = self.slots.insert(to, &r, edges, op, buffers);
        let fua = r.flags & cflag::FUA != 0;
        if op == Op::WriteZeroes && !self.zeroes_at_once(index, &r) || r.command == Command::Cache {
            self.issuer.walk(index);
            return self.issue_steps(target, out);
        }
        if op == Op::Write {
            let slot = self.slots.get_mut(index);
            slot.flags.set(RequestFlags::FUA, fua);
            // The client can't reach the buffers any more.
            slot.flags |= RequestFlags::STABLE_BUFFERS;
            slot.look();
            return self.incoming.expect_data(index);
        }
        if op == Op::Discard && fua {
            self.issuer.flush_later(&mut self.slots, index);
        }
        self.issuer.issue(&mut self.slots, index, target, out);
    }

    /// The part of a trim that is whole blocks.
    fn whole_blocks(&self, r: &NbdRequest) -> Option<NbdRequest> {
        let block = u64::from(self.limits.logical_sector_bytes);
        let offset = r.offset.next_multiple_of(block);
        let end = (r.offset + r.len) / block * block;
        let len = end.checked_sub(offset).filter(|&n| n > 0)?;
        Some(NbdRequest { offset, len, ..*r })
    }

    /// True for zeros that are one request of the device, which can write zeros; no block is zeroed in part then.
    fn zeroes_at_once(&mut self, index: u32, r: &NbdRequest) -> bool {
        let by_device = self.limits.write_zeroes;
        let fua = r.flags & cflag::FUA != 0;
        let slot = self.slots.get_mut(index);
        if by_device && r.flags & cflag::NO_HOLE != 0 {
            slot.flags |= RequestFlags::NO_UNMAP;
        }
        if by_device && slot.edges.is_none() {
            slot.flags.set(RequestFlags::FUA, fua);
            return true;
        }
        slot.buffers.iter().for_each(Buffer::zero);
        if fua {
            // One flush for all of the parts.
            self.issuer.flush_later(&mut self.slots, index);
        }
        false
    }

    /// Steps that are due, until `out` has `target`.
    #[inline]
    pub(super) fn issue_steps(&mut self, target: usize, out: &mut Vec<Box<Request>>) {
        while let Some(over) = self
            .issuer
            .issue_steps(&mut self.slots, self.dead, target, out)
        {
            self.finish_step(over);
        }
    }

    #[cold]
    fn finish_step(&mut self, index: u32) {
        self.finish(index);
    }
}
