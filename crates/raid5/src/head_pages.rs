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
        let to = (&*self.region, self.at(member));
        sum_blocks(of.count_ones(), self.pages(of), to);
    }

    /// A block elsewhere becomes the XOR of some pages, given as a mask that isn't empty.
    pub fn sum_to(&self, to: &Region, at: usize, of: u64) {
        sum_blocks(of.count_ones(), self.pages(of), (to, at));
    }

    /// A page becomes the XOR of some pages, given as a mask, and of a block elsewhere.
    pub fn sum_with(&self, member: usize, of: u64, other: (&Region, usize)) {
        let all = self.pages(of).chain([other]);
        let to = (&*self.region, self.at(member));
        sum_blocks(of.count_ones() + 1, all, to);
    }

    /// A page becomes the XOR of `count` blocks elsewhere: 1 to 64.
    pub fn sum_of<'a>(
        &'a self,
        member: usize,
        count: usize,
        blocks: impl Iterator<Item = (&'a Region, usize)>,
    ) {
        sum_blocks(count as u32, blocks, (&self.region, self.at(member)));
    }

    fn pages(&self, of: u64) -> impl Iterator<Item = (&Region, usize)> {
        bits(of).map(|member| (&*self.region, self.at(member)))
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
        segments(request, skip, len, |buffer, at, len| {
            let (from, at) = (buffer.region(), buffer.offset() + at);
            self.region.copy_from(to, from, at, len);
            to += len;
        });
    }

    /// Copies from a page into a request's buffers; as [`HeadPages::take`].
    pub fn give(&self, member: usize, offset: usize, request: &Request, skip: usize, len: usize) {
        let mut from = self.at(member) + offset;
        segments(request, skip, len, |buffer, at, len| {
            let (to, at) = (buffer.region(), buffer.offset() + at);
            to.copy_from(at, &self.region, from, len);
            from += len;
        });
    }
}

/// The block at `to` becomes the XOR of `count` blocks, 1 to 64, of which it may be one.
fn sum_blocks<'a>(
    count: u32,
    blocks: impl Iterator<Item = (&'a Region, usize)>,
    to: (&'a Region, usize),
) {
    // Most arrays have few members, and clearing a long list takes its time.
    match count {
        0..=8 => sum_up_to::<8>(blocks, to),
        _ => sum_up_to::<64>(blocks, to),
    }
}

fn sum_up_to<'a, const N: usize>(
    blocks: impl Iterator<Item = (&'a Region, usize)>,
    (to, at): (&'a Region, usize),
) {
    let mut sources = [(to, at); N];
    let mut count = 0;
    for block in blocks {
        sources[count] = block;
        count += 1;
    }
    to.xor_from(at, &sources[..count], STRIPE_BYTES);
}

/// The numbers of the bits of a mask, from the lowest.
pub fn bits(mut mask: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// The parts of a request's buffers that hold `len` bytes of its data from `skip`: each buffer, the place in it, and bytes there.
pub fn segments<'a>(
    request: &'a Request,
    mut skip: usize,
    mut len: usize,
    mut each: impl FnMut(&'a Buffer, usize, usize),
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
        each(buffer, skip, take);
        skip = 0;
        len -= take;
    }
}
