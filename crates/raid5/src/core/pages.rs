//! The pages of stripe heads: private memory that members read and write.

use crate::STRIPE_BYTES;
pub(super) use crate::head_pages::{Block, HeadPages, bits, memory, segments};
use pvblk_block::memory::Gauge;
use pvblk_block::{Error, Region};
use std::ops::Range;
use std::sync::Arc;

/// Heads whose pages share a piece of memory, which comes and goes as a whole.
const SEGMENT_HEADS: usize = 8;

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
        let base = head % SEGMENT_HEADS * self.members * STRIPE_BYTES;
        HeadPages::new(region, base)
    }
}
