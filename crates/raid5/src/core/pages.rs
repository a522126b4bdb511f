//! The pages of stripe heads: private memory that members read and write.

use crate::STRIPE_BYTES;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error, Op, Region, Request};
use std::ops::Range;
use std::sync::Arc;

/// A page's worth of bytes to calculate in.
pub(super) type Block = [u8; STRIPE_BYTES];

/// Heads whose pages share a piece of memory, which comes and goes as a whole.
const SEGMENT_HEADS: usize = 8;

/// Puts memory of an array on the bill.
pub(super) fn memory(of: &str, bytes: usize) -> Gauge {
    Gauge::fixed(format!("raid5: {of}"), MemoryKind::Anonymous, bytes as u64)
}

/// Memory of some heads.
struct Segment {
    region: Arc<Region>,
    /// Heads used it since it was made or released: it may have the system's memory.
    warm: bool,
}

/// One page for each head and member.
pub(super) struct Pages {
    segments: Vec<Option<Segment>>,
    members: usize,
    /// Number of segments.
    present: usize,
    /// Number of segments with memory.
    warm: usize,
    memory: Gauge,
}

/// The pages of one head.
#[derive(Clone)]
pub(in super::super) struct HeadPages {
    region: Arc<Region>,
    base: usize,
}

impl Pages {
    pub fn new(heads: usize, members: usize) -> Result<Pages, Error> {
        let mut pages = Pages {
            segments: Vec::new(),
            members,
            present: 0,
            warm: 0,
            memory: memory("stripes", 0),
        };
        pages.grow(heads)?;
        Ok(pages)
    }

    fn segment_bytes(&self) -> usize {
        SEGMENT_HEADS * self.members * STRIPE_BYTES
    }

    /// Makes sure that so many heads, from the first on, have pages.
    pub fn grow(&mut self, heads: usize) -> Result<(), Error> {
        let count = heads.div_ceil(SEGMENT_HEADS);
        if self.segments.len() < count {
            self.segments.resize_with(count, || None);
        }
        let bytes = self.segment_bytes();
        for segment in self.segments[..count].iter_mut().filter(|s| s.is_none()) {
            let region =
                Region::anonymous(bytes).map_err(|e| Error::os("memory for stripes", e))?;
            *segment = Some(Segment {
                region: Arc::new(region),
                warm: false,
            });
            self.present += 1;
        }
        self.count();
        Ok(())
    }

    /// Number of segments; some may have no memory.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    fn heads_of(segment: usize) -> Range<usize> {
        segment * SEGMENT_HEADS..(segment + 1) * SEGMENT_HEADS
    }

    /// Gives a segment's memory back to the system, unless a buffer of it is in use, or its heads don't
    /// `forget` their data. Returns bytes.
    pub fn give_way(&mut self, segment: usize, forget: impl FnOnce(Range<usize>) -> bool) -> u64 {
        let Some(found) = self.segments[segment].as_mut().filter(|s| s.warm) else {
            return 0;
        };
        // The only owner: no member reads or writes here.
        let Some(region) = Arc::get_mut(&mut found.region) else {
            return 0;
        };
        let bytes = region.len();
        if !forget(Pages::heads_of(segment)) || region.release(0, bytes).is_err() {
            return 0;
        }
        found.warm = false;
        self.warm -= 1;
        self.count();
        bytes as u64
    }

    /// Bytes that may be the system's.
    pub fn gauge(&self) -> &Gauge {
        &self.memory
    }

    /// Gives back the memory of heads from this one on that aren't used, as `is_used` says.
    pub fn shrink(&mut self, heads: usize, is_used: impl Fn(usize) -> bool) {
        for at in heads.div_ceil(SEGMENT_HEADS)..self.segments.len() {
            if !Pages::heads_of(at).any(&is_used)
                && let Some(segment) = self.segments[at].take()
            {
                self.present -= 1;
                self.warm -= usize::from(segment.warm);
            }
        }
        self.count();
    }

    fn count(&self) {
        let bytes = |segments: usize| (segments * self.segment_bytes()) as u64;
        self.memory.set_cap(bytes(self.present));
        self.memory.set(bytes(self.warm));
    }

    /// The head must have pages.
    pub fn of(&mut self, head: usize) -> HeadPages {
        let segment = self.segments[head / SEGMENT_HEADS].as_mut();
        let segment = segment.expect("a head that is used has pages");
        let region = Arc::clone(&segment.region);
        if !std::mem::replace(&mut segment.warm, true) {
            self.warm += 1;
            self.count();
        }
        HeadPages {
            region,
            base: head % SEGMENT_HEADS * self.members * STRIPE_BYTES,
        }
    }
}

impl HeadPages {
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
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
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
