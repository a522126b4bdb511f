//! One page for each member of a stripe, and calculations in them.

use crate::STRIPE_BYTES;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Op, Region, Request};
use std::sync::Arc;

/// A page's worth of bytes to calculate in.
pub type Block = [u8; STRIPE_BYTES];

/// Puts memory of an array on the bill.
pub fn memory(of: &str, bytes: usize) -> Gauge {
    Gauge::fixed(format!("raid5: {of}"), MemoryKind::Anonymous, bytes as u64)
}

/// The pages of one stripe.
#[derive(Clone)]
pub struct HeadPages {
    region: Arc<Region>,
    base: usize,
}

impl HeadPages {
    /// Pages at this offset of a region.
    pub fn new(region: Arc<Region>, base: usize) -> HeadPages {
        HeadPages { region, base }
    }

    /// The region in which they are.
    pub fn into_region(self) -> Arc<Region> {
        self.region
    }

    fn at(&self, member: usize) -> usize {
        self.base + member * STRIPE_BYTES
    }

    /// For a member's I/O.
    pub fn buffer(&self, member: usize) -> Option<Buffer> {
        Buffer::new(&self.region, self.at(member), STRIPE_BYTES)
    }

    pub fn read(&self, member: usize, to: &mut Block) {
        self.region.read(self.at(member), to);
    }

    /// A page becomes the XOR of some pages, given as a mask, which may be among them; zeros if there are none.
    pub fn sum(&self, member: usize, of: u64) {
        if of == 0 {
            self.region.zero(self.at(member), STRIPE_BYTES);
            return;
        }
        // Most arrays have few members, and clearing a long list takes its time.
        match of.count_ones() {
            0..=8 => self.sum_up_to::<8>(member, of),
            _ => self.sum_up_to::<64>(member, of),
        }
    }

    fn sum_up_to<const N: usize>(&self, member: usize, of: u64) {
        let mut sources = [(&*self.region, 0); N];
        let mut count = 0;
        for source in bits(of) {
            sources[count].1 = self.at(source);
            count += 1;
        }
        self.region
            .xor_from(self.at(member), &sources[..count], STRIPE_BYTES);
    }

    fn sources(&self, of: u64) -> Vec<(&Region, usize)> {
        let region = &*self.region;
        bits(of).map(|member| (region, self.at(member))).collect()
    }

    /// A block elsewhere becomes the XOR of some pages, given as a mask that isn't empty.
    pub fn sum_to(&self, to: &Region, at: usize, of: u64) {
        to.xor_from(at, &self.sources(of), STRIPE_BYTES);
    }

    /// A page becomes the XOR of some pages, given as a mask, and of a block elsewhere.
    pub fn sum_with(&self, member: usize, of: u64, other: (&Region, usize)) {
        let mut sources = self.sources(of);
        sources.push(other);
        self.region
            .xor_from(self.at(member), &sources, STRIPE_BYTES);
    }

    /// A page becomes the XOR of blocks elsewhere.
    pub fn sum_of_buffers(&self, member: usize, blocks: &[Buffer]) {
        let sources: Vec<(&Region, usize)> =
            blocks.iter().map(|b| (&**b.region(), b.offset())).collect();
        self.region
            .xor_from(self.at(member), &sources, STRIPE_BYTES);
    }

    /// True if a page is all zeros.
    pub fn is_zero(&self, member: usize) -> bool {
        self.region.is_zero(self.at(member), STRIPE_BYTES)
    }

    /// Copies `len` bytes of a request's data from `skip` on into a page, at `offset` bytes. One without data writes zeros.
    pub fn take(&self, member: usize, offset: usize, request: &Request, skip: usize, len: usize) {
        let mut to = self.at(member) + offset;
        if request.op != Op::Write {
            self.region.zero(to, len);
            return;
        }
        segments(request, skip, len, |part| {
            part.copy_to(&self.region, to);
            to += part.len();
        });
    }

    /// Copies from a page into a request's buffers; as [`HeadPages::take`].
    pub fn give(&self, member: usize, offset: usize, request: &Request, skip: usize, len: usize) {
        let mut from = self.at(member) + offset;
        segments(request, skip, len, |part| {
            part.copy_from(&self.region, from);
            from += part.len();
        });
    }
}

/// The numbers of the bits of a mask, from the lowest.
pub fn bits(mut mask: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// The parts of a request's buffers that hold `len` bytes of its data from `skip`.
pub fn segments(request: &Request, mut skip: usize, mut len: usize, mut each: impl FnMut(Buffer)) {
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
