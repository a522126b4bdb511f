//! Long requests in parts, so that no step of a lane takes long and a lane's neighbours don't wait for it.

use crate::lane::INTERNAL_TAG;
use pvblk_block::{Buffer, Completion, Limits, Op, Request, SECTOR, Status};

/// Tags of parts.
const PART_TAG: u64 = INTERNAL_TAG | 1 << 61;

/// Parts of one lane at the device at a time.
pub const PARTS_IN_FLIGHT: u32 = 16;

/// Sectors (512 B) of a part of a read or write: 256 KiB, where the device has no stripes to write
/// whole.
const DATA: u64 = 512;
/// The longest stripe of a device that parts respect, in sectors: 1 MiB.
const LONGEST_ROW: u64 = 2048;
/// Sectors of a part of a discard or write-zeroes, which carry no data: 64 MiB.
const NO_DATA: u64 = 131_072;

/// Long requests of a lane. One at a time is being *cut*; others wait for their parts at the device.
pub struct Parts {
    /// Parts of data end at multiples of this, in sectors.
    unit: u64,
    longs: Vec<Option<Long>>,
    cutting: Option<usize>,
    in_flight: u32,
}

struct Long {
    request: Box<Request>,
    /// Number of sectors that were submitted.
    begun: u64,
    at_device: u32,
    /// The first error.
    status: Status,
}

impl Parts {
    pub fn new(limits: &Limits) -> Parts {
        let row = u64::from(limits.optimal_bytes) / SECTOR;
        Parts {
            unit: match row {
                0 => DATA,
                _ if row <= DATA => DATA - DATA % row,
                _ if row <= LONGEST_ROW => row,
                _ => DATA,
            },
            longs: Vec::new(),
            cutting: None,
            in_flight: 0,
        }
    }

    /// True for a request that goes to the device in parts.
    #[inline]
    pub fn is_long(&self, request: &Request) -> bool {
        request.sectors > self.longest(request)
    }

    fn longest(&self, request: &Request) -> u64 {
        match request.op.has_data() {
            true => self.unit.max(DATA),
            false => NO_DATA,
        }
    }

    /// Sectors of data that a request counts for in a step: at most as many as one step has.
    pub fn cost(request: &Request) -> u64 {
        let per_sector = match request.op {
            Op::Read | Op::Write => 1,
            _ => NO_DATA / DATA,
        };
        (request.sectors / per_sector).min(DATA)
    }

    #[inline]
    pub fn is_cutting(&self) -> bool {
        self.cutting.is_some()
    }

    /// True while only ends of the lane's own parts let it go on.
    pub fn waits_for_own(&self) -> bool {
        self.is_cutting() && !self.may_issue()
    }

    pub fn may_issue(&self) -> bool {
        self.in_flight < PARTS_IN_FLIGHT
    }

    /// Starts to cut `request`. No other request may be being cut.
    pub fn begin(&mut self, request: Box<Request>) {
        let index = match self.longs.iter().position(Option::is_none) {
            Some(i) => i,
            None => {
                self.longs.push(None);
                self.longs.len() - 1
            }
        };
        self.longs[index] = Some(Long {
            request,
            begun: 0,
            at_device: 0,
            status: Status::Ok,
        });
        self.cutting = Some(index);
    }

    /// The request that is being cut, if none of its parts has been issued.
    pub fn uncut(&self) -> Option<&Request> {
        let (_, long, _) = self.cut()?;
        (long.begun == 0).then_some(&long.request)
    }

    fn cut(&self) -> Option<(usize, &Long, u64)> {
        let index = self.cutting?;
        let long = self.longs[index].as_ref()?;
        let unit = match long.request.op.has_data() {
            true => self.unit,
            false => NO_DATA,
        };
        let at = long.request.sector + long.begun;
        let to_boundary = unit - at % unit;
        Some((
            index,
            long,
            to_boundary.min(long.request.sectors - long.begun),
        ))
    }

    /// Sectors that the next part counts for in a step.
    pub fn next_cost(&self) -> u64 {
        self.cut()
            .map_or(0, |(_, long, sectors)| match long.request.op.has_data() {
                true => sectors.min(DATA),
                false => sectors / (NO_DATA / DATA),
            })
    }

    /// The next part of the request that is being cut.
    pub fn issue(&mut self) -> Box<Request> {
        let Some((index, long, sectors)) = self.cut() else {
            unreachable!("nothing is being cut");
        };
        let whole = &long.request;
        let tag = PART_TAG | index as u64;
        let mut part = Request::new(whole.op, whole.sector + long.begun, sectors, tag);
        part.flags = whole.flags;
        part.followed = whole.followed;
        if whole.op.has_data() {
            let bytes = (long.begun * SECTOR, sectors * SECTOR);
            part.buffers = slices(&whole.buffers, bytes.0 as usize, bytes.1 as usize);
        }
        self.in_flight += 1;
        if let Some(long) = &mut self.longs[index] {
            long.begun += sectors;
            long.at_device += 1;
            if long.begun == long.request.sectors {
                self.cutting = None;
            }
        }
        part
    }

    /// Index of the request that a part's tag belongs to.
    #[inline]
    pub fn index_of(tag: u64) -> Option<usize> {
        (tag & PART_TAG == PART_TAG).then_some((tag & !PART_TAG) as usize)
    }

    /// Notes that a part has ended; returns the whole request's completion if it was the last. After an error no more parts are cut.
    pub fn complete(&mut self, index: usize, status: Status) -> Option<Completion> {
        self.in_flight -= 1;
        let long = self.longs.get_mut(index)?.as_mut()?;
        long.at_device -= 1;
        if long.status == Status::Ok {
            long.status = status;
        }
        if long.status != Status::Ok {
            self.cutting.take_if(|cutting| *cutting == index);
        }
        if long.at_device > 0 || self.cutting == Some(index) {
            return None;
        }
        let long = self.longs[index].take()?;
        Some(Completion {
            request: long.request,
            status: long.status,
        })
    }
}

/// `len` bytes of the buffers from `skip` on.
fn slices(buffers: &[Buffer], mut skip: usize, mut len: usize) -> Vec<Buffer> {
    let mut out = Vec::new();
    for segment in buffers {
        if skip >= segment.len() {
            skip -= segment.len();
            continue;
        }
        let here = len.min(segment.len() - skip);
        out.extend(segment.slice(skip, here));
        skip = 0;
        len -= here;
        if len == 0 {
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts_of(parts: &mut Parts, request: Box<Request>) -> Vec<(u64, u64)> {
        parts.begin(request);
        let mut all = Vec::new();
        while parts.is_cutting() {
            assert!(parts.may_issue() && parts.next_cost() <= DATA);
            let part = parts.issue();
            if part.op.has_data() {
                assert_eq!(
                    pvblk_sys::total_len(&part.buffers) as u64,
                    part.sectors * SECTOR
                );
            }
            all.push((part.sector, part.sectors));
            let index = Parts::index_of(part.tag).unwrap();
            let whole = parts.complete(index, Status::Ok);
            assert_eq!(whole.is_some(), !parts.is_cutting());
        }
        all
    }

    #[test]
    fn parts_cover_the_request_and_end_at_multiples_of_the_unit() {
        let data = Buffer::anonymous(1 << 20).unwrap();
        let segments = || {
            let cuts = [(0, 300 << 10), (300 << 10, 4096), (304 << 10, 720 << 10)];
            cuts.map(|(at, len)| data.slice(at, len).unwrap()).to_vec()
        };
        for (optimal, unit) in [
            (0, 512),
            (192 << 10, 384),
            (768 << 10, 1536),
            (8 << 20, 512),
        ] {
            let limits = Limits {
                optimal_bytes: optimal,
                ..Limits::default()
            };
            let mut parts = Parts::new(&limits);
            let request = Request::with_buffers(Op::Write, 1000, segments(), 1);
            assert!(parts.is_long(&request));
            let all = parts_of(&mut parts, request);
            let mut at = 1000;
            for (sector, sectors) in &all {
                assert_eq!(*sector, at);
                at += sectors;
                assert!(at.is_multiple_of(unit) || at == 1000 + 2048);
            }
            assert_eq!(at, 1000 + 2048);
            assert_eq!(parts.in_flight, 0);
        }
    }

    #[test]
    fn a_discard_of_a_whole_disk_is_many_parts() {
        let mut parts = Parts::new(&Limits::default());
        let request = Request::new(Op::Discard, 5, 1 << 21, 1);
        assert!(parts.is_long(&request) && Parts::cost(&request) == DATA);
        assert_eq!(parts_of(&mut parts, request).len(), 17);
        assert!(!parts.is_long(&Request::new(Op::Discard, 0, NO_DATA, 1)));
    }

    #[test]
    fn after_an_error_no_more_is_cut() {
        let mut parts = Parts::new(&Limits::default());
        parts.begin(Request::new(Op::Discard, 0, 100 * NO_DATA, 9));
        let index = Parts::index_of(parts.issue().tag).unwrap();
        parts.issue();
        assert!(parts.complete(index, Status::IoError).is_none());
        assert!(!parts.is_cutting());
        let whole = parts.complete(index, Status::Ok).unwrap();
        assert_eq!(whole.status, Status::IoError);
    }

    #[test]
    fn the_first_error_is_the_requests() {
        let mut parts = Parts::new(&Limits::default());
        parts.begin(Request::new(Op::WriteZeroes, 0, 3 * NO_DATA, 9));
        let tags: Vec<_> = (0..3).map(|_| parts.issue().tag).collect();
        let index = Parts::index_of(tags[0]).unwrap();
        assert!(parts.complete(index, Status::Ok).is_none());
        assert!(parts.complete(index, Status::NoSpace).is_none());
        let whole = parts.complete(index, Status::IoError).unwrap();
        assert_eq!((whole.status, whole.request.tag), (Status::NoSpace, 9));
    }
}
