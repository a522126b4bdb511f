//! The plug: what was submitted together is merged together, once, before it is issued.

use super::limit::LimitBounds;
use pvblk_block::planted::{self, Plant};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Completion, MergeCounts, Op, Request, RequestFlags, Status};
use std::sync::Arc;

/// Requests back in the plug that a new one is compared with. A stream is found at once; a few
/// interleaved streams are found too; random requests cost no more than this.
const LOOK_BACK: usize = 8;

/// One or more requests for neighbouring sectors that go to the ring as one.
#[derive(Debug)]
pub struct Merged {
    /// Number of the software queue that submitted it.
    pub owner: u32,
    /// First sector (512 B) of all.
    pub sector: u64,
    /// Sectors of all.
    pub sectors: u64,
    /// Segments (pages touched) of all.
    pub segments: u32,
    /// The first request by sector.
    pub first: Box<Request>,
    /// The others, in order of sectors.
    pub rest: Vec<Box<Request>>,
}

impl Merged {
    /// The original requests, in order of sectors.
    pub fn requests(&self) -> impl Iterator<Item = &Box<Request>> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// True if `next` is the same kind of request of the same submitter, begins at the end of this one, and both are within the limits.
    pub fn is_continued_by(&self, next: &Merged, limits: &MergeLimits) -> bool {
        self.owner == next.owner
            && self.first.op == next.first.op
            && self.first.op.has_data()
            && self.first.flags == next.first.flags
            && !self.first.flags.contains(RequestFlags::FUA)
            && (self.sector + self.sectors == next.sector || planted::has(Plant::JoinsOverGap))
            && self.sectors + next.sectors <= limits.sectors
            && self.segments + next.segments <= limits.segments
    }

    /// Adds `next`, by which this one is continued.
    pub fn append(&mut self, next: Merged) {
        self.sectors += next.sectors;
        self.segments += next.segments;
        self.rest.push(next.first);
        self.rest.extend(next.rest);
    }

    /// True if a sector belongs to both.
    pub fn overlaps(&self, other: &Merged) -> bool {
        self.sector < other.sector + other.sectors && other.sector < self.sector + self.sectors
    }

    /// Completes all of them.
    #[inline]
    pub(crate) fn deliver(self, status: Status, out: &mut Vec<Completion>) {
        let one = |request| Completion { request, status };
        out.push(one(self.first));
        out.extend(self.rest.into_iter().map(one));
    }
}

/// The rule by which requests are merged outside of the batch in which they were submitted.
pub trait MergePolicy: Send + Sync + 'static {
    /// Requests of a stream wait, and are merged, while the ring has a number of requests in flight that is found within these bounds.
    const IN_FLIGHT: Option<LimitBounds> = None;

    /// Requests that wait because the ring is full are merged as well.
    const JOINS_WAITING: bool = false;
}

/// Within a batch, and within a stream where the device has enough in flight: the policy of every front end that serves
/// (docs/decisions/0051-limit-in-flight.md).
#[derive(Debug)]
pub enum InStream {}

impl MergePolicy for InStream {
    const IN_FLIGHT: Option<LimitBounds> = Some(LimitBounds {
        least: 8,
        first: 32,
    });
}

/// Bounds of one ring request.
#[derive(Clone, Copy, Debug)]
pub struct MergeLimits {
    /// Sectors (512 B).
    pub sectors: u64,
    pub segments: u32,
}

/// Pages that the request's data touches: one segment for each.
pub fn count_segments(request: &Request) -> u32 {
    const PAGE: usize = pvblk_sys::PAGE_SIZE;
    request
        .buffers
        .iter()
        .map(|b| ((b.offset() % PAGE + b.len()).div_ceil(PAGE)) as u32)
        .sum()
}

/// Requests that were submitted together, before they are issued.
#[derive(Debug, Default)]
pub struct Plug {
    items: Vec<Merged>,
    /// Nothing before this is looked at: it came before a flush.
    floor: usize,
    merges: Arc<MergeCounts>,
}

impl Plug {
    /// One that counts its merges there.
    pub fn counting(merges: &Arc<MergeCounts>) -> Plug {
        Plug {
            merges: Arc::clone(merges),
            ..Plug::default()
        }
    }

    /// Adds `request`, merged with one of the last few if it touches it.
    pub fn add(
        &mut self,
        request: Box<Request>,
        owner: u32,
        limits: &MergeLimits,
        tracer: &mut Tracer,
    ) {
        let segments = count_segments(&request);
        if request.op.has_data() && !request.flags.contains(RequestFlags::FUA) {
            let (start, end) = (request.sector, request.end());
            for m in self.items[self.floor..].iter_mut().rev().take(LOOK_BACK) {
                let m_end = m.sector + m.sectors;
                if start > m_end || end < m.sector {
                    continue; // the usual case: they don't touch
                }
                if start != m_end && end != m.sector {
                    break; // they overlap: a request must not pass one that it overlaps
                }
                let fits = m.first.op == request.op
                    && m.first.flags == request.flags
                    && m.sectors + request.sectors <= limits.sectors
                    && m.segments + segments <= limits.segments;
                if !fits {
                    continue;
                }
                self.merges.add(request.op);
                m.sectors += request.sectors;
                m.segments += segments;
                if start == m_end {
                    tracer.request(Phase::BackMerge, &request);
                    m.rest.push(request);
                } else {
                    tracer.request(Phase::FrontMerge, &request);
                    m.sector = start;
                    let second = std::mem::replace(&mut m.first, request);
                    m.rest.insert(0, second);
                }
                return;
            }
        }
        let is_flush = request.op == Op::Flush;
        self.items.push(Merged {
            owner,
            sector: request.sector,
            sectors: request.sectors,
            segments,
            first: request,
            rest: Vec::new(),
        });
        if is_flush {
            self.floor = self.items.len();
        }
    }

    /// Number of requests for the ring in it.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// True if nothing is plugged.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The requests in it, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Merged> {
        self.items.iter()
    }

    /// Takes everything out, in order: the plug is pulled.
    pub fn pull(&mut self) -> std::vec::Drain<'_, Merged> {
        self.floor = 0;
        self.items.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::Buffer;

    const LIMITS: MergeLimits = MergeLimits {
        sectors: 64,
        segments: 8,
    };

    fn rw(op: Op, sector: u64, sectors: u64) -> Box<Request> {
        let b = Buffer::anonymous(sectors as usize * 512).unwrap();
        Request::with_buffers(op, sector, vec![b], sector)
    }

    fn merged(requests: Vec<Box<Request>>) -> Vec<(u64, u64, usize)> {
        let mut plug = Plug::default();
        for r in requests {
            plug.add(r, 0, &LIMITS, &mut Tracer::default());
        }
        for m in plug.iter() {
            let mut at = m.sector;
            for r in m.requests() {
                assert_eq!(r.sector, at, "in order and without gaps");
                at = r.end();
            }
            assert_eq!(at, m.sector + m.sectors);
        }
        plug.iter()
            .map(|m| (m.sector, m.sectors, 1 + m.rest.len()))
            .collect()
    }

    #[test]
    fn merges_are_counted_by_operation() {
        let counts = Arc::<MergeCounts>::default();
        let mut plug = Plug::counting(&counts);
        for (op, sector) in [
            (Op::Read, 0),
            (Op::Read, 8),
            (Op::Write, 100),
            (Op::Write, 200),
        ] {
            plug.add(rw(op, sector, 8), 0, &LIMITS, &mut Tracer::default());
        }
        assert_eq!((counts.of(Op::Read), counts.of(Op::Write)), (1, 0));
        plug.pull();
        // The next batch begins anew.
        plug.add(rw(Op::Read, 16, 8), 0, &LIMITS, &mut Tracer::default());
        plug.add(rw(Op::Write, 208, 8), 0, &LIMITS, &mut Tracer::default());
        plug.add(rw(Op::Write, 216, 8), 0, &LIMITS, &mut Tracer::default());
        assert_eq!((counts.of(Op::Read), counts.of(Op::Write)), (1, 1));
    }

    #[test]
    fn back_and_front_merges() {
        let up = (0..4).map(|i| rw(Op::Read, i * 8, 8)).collect();
        assert_eq!(merged(up), [(0, 32, 4)]);
        let down = (0..4).rev().map(|i| rw(Op::Write, i * 8, 8)).collect();
        assert_eq!(merged(down), [(0, 32, 4)]);
        let two = (0..6)
            .map(|i| rw(Op::Read, (i % 2) * 1000 + i / 2 * 8, 8))
            .collect();
        assert_eq!(merged(two), [(0, 24, 3), (1000, 24, 3)]);
    }

    #[test]
    fn what_must_not_merge_does_not() {
        let different = vec![rw(Op::Read, 0, 8), rw(Op::Write, 8, 8)];
        assert_eq!(merged(different).len(), 2);
        let mut fua = rw(Op::Write, 8, 8);
        fua.flags = RequestFlags::FUA;
        assert_eq!(merged(vec![rw(Op::Write, 0, 8), fua]).len(), 2);
        let flush = vec![
            rw(Op::Write, 0, 8),
            Request::new(Op::Flush, 0, 0, 0),
            rw(Op::Write, 8, 8),
        ];
        assert_eq!(merged(flush).len(), 3);
        let long = (0..9).map(|i| rw(Op::Read, i * 8, 8)).collect();
        assert_eq!(merged(long), [(0, 64, 8), (64, 8, 1)]);
        // The third overlaps the second, so it may not join the first in front of it.
        let overlap = vec![
            rw(Op::Write, 0, 8),
            rw(Op::Write, 12, 8),
            rw(Op::Write, 8, 8),
        ];
        assert_eq!(merged(overlap).len(), 3);
    }
}
