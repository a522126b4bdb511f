//! The pages of stripe heads: private memory that members read and write.

use super::Piece;
use crate::raid5::STRIPE_BYTES;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error, Region, Request};
use std::sync::Arc;

/// A page's worth of bytes to calculate in.
pub(super) type Block = [u8; STRIPE_BYTES];

/// Puts memory of an array on the bill.
pub(super) fn memory(of: &str, bytes: usize) -> Gauge {
    Gauge::fixed(format!("raid5: {of}"), MemoryKind::Anonymous, bytes as u64)
}

/// One page for each head and member.
pub(super) struct Pages {
    region: Arc<Region>,
    members: usize,
    _memory: Gauge,
}

impl Pages {
    pub fn new(heads: usize, members: usize) -> Result<Pages, Error> {
        let region = Region::anonymous(heads * members * STRIPE_BYTES)
            .map_err(|e| Error::os("memory for stripes", e))?;
        Ok(Pages {
            _memory: memory("stripes", region.len()),
            region: Arc::new(region),
            members,
        })
    }

    fn at(&self, head: usize, member: usize) -> usize {
        (head * self.members + member) * STRIPE_BYTES
    }

    /// For a member's I/O.
    pub fn buffer(&self, head: usize, member: usize) -> Option<Buffer> {
        Buffer::new(&self.region, self.at(head, member), STRIPE_BYTES)
    }

    pub fn read(&self, head: usize, member: usize, to: &mut Block) {
        self.region.read(self.at(head, member), to);
    }

    pub fn write(&self, head: usize, member: usize, from: &Block) {
        self.region.write(self.at(head, member), from);
    }

    /// `to` becomes itself XOR a page.
    pub fn xor(&self, head: usize, member: usize, to: &mut Block) {
        self.region.xor_to(self.at(head, member), to);
    }

    /// `to` becomes the XOR of some pages; zeros if there are none.
    pub fn xor_of(&self, head: usize, mut members: impl Iterator<Item = usize>, to: &mut Block) {
        match members.next() {
            Some(first) => self.read(head, first, to),
            None => to.fill(0),
        }
        members.for_each(|member| self.xor(head, member, to));
    }

    /// Copies a piece of a request's data into a page.
    pub fn take(&self, head: usize, member: usize, piece: &Piece, request: &Request) {
        let mut to = self.at(head, member) + (piece.offset * 512) as usize;
        segments(request, piece.skip, piece.len(), |part| {
            part.copy_to(&self.region, to);
            to += part.len();
        });
    }

    /// Copies a piece of a request's data out of a page.
    pub fn give(&self, head: usize, member: usize, piece: &Piece, request: &Request) {
        let mut from = self.at(head, member) + (piece.offset * 512) as usize;
        segments(request, piece.skip, piece.len(), |part| {
            part.copy_from(&self.region, from);
            from += part.len();
        });
    }
}

/// The parts of a request's buffers that hold `len` bytes of its data from `skip`.
pub(super) fn segments(
    request: &Request,
    mut skip: usize,
    mut len: usize,
    mut each: impl FnMut(Buffer),
) {
    for buffer in &request.buffers {
        if len == 0 {
            return;
        }
        if skip >= buffer.len() {
            skip -= buffer.len();
            continue;
        }
        let take = len.min(buffer.len() - skip);
        if let Some(part) = buffer.slice(skip, take) {
            each(part);
        }
        skip = 0;
        len -= take;
    }
}
