//! I/O of the cache at the device below it.

use super::Io;
use crate::config::{CacheConfig, PAGE_BYTES, PAGE_SECTORS};
use crate::counters::Counters;
use pvblk_block::{Buffer, Limits, Op, Region, Request, RequestFlags, SECTOR};
use slab::Slab;
use std::sync::Arc;

/// The largest read or write of pages.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pages: u64,
    segments: usize,
}

impl Shape {
    fn new(config: &CacheConfig, limits: &Limits) -> Shape {
        let pages = (u64::from(config.max_io_bytes) / PAGE_BYTES as u64)
            .min(u64::from(limits.max_sectors) / PAGE_SECTORS)
            .max(1);
        Shape {
            pages,
            segments: limits.max_segments.max(1) as usize,
        }
    }

    /// True if the frame `next` may join a run of frames that has `segments` segments.
    pub fn fits(&self, frames: &[u32], segments: usize, next: u32) -> bool {
        let joins = frames.last().is_some_and(|&l| l + 1 == next);
        (frames.len() as u64) < self.pages && (joins || segments < self.segments)
    }
}

/// The purpose of one I/O.
pub enum Purpose {
    /// The pages from `first` on are read into `frames`.
    Read { first: u64, frames: Vec<u32> },
    /// The pages from `first` on are written from `frames`.
    Write { first: u64, frames: Vec<u32> },
    /// A flush, a discard or a write-zeroes is passed on.
    Pass {
        /// Number of the request.
        request: u32,
    },
}

/// I/O that the core has started and the device has not completed.
///
/// **Owns** the table of I/O under way, the requests that are made for it, and the size of the device. **States** of an I/O: ready (in [`Io`], until the
/// queue takes it), under way, ended. **Events:** a read, a write or a request to pass on is started; the device has completed one, which gives back its
/// purpose, once.
///
/// **Invariants.** A tag is that of one I/O under way. Data that is written doesn't change until it has ended (a write to the page meanwhile gets another frame),
/// so writes are marked `STABLE_BUFFERS`. No I/O reaches beyond the end of the device, is larger than its [`Shape`], or goes in a circle: requests and
/// their memory are used again. I/O is bounded by frames and by requests that are passed on.
pub struct DeviceIo {
    region: Arc<Region>,
    shape: Shape,
    /// Size of the device in sectors.
    sectors: u64,
    under_way: Slab<Purpose>,
    ready: Vec<Io>,
    spare: Vec<Box<Request>>,
    counters: Counters,
}

impl DeviceIo {
    pub fn new(
        config: &CacheConfig,
        limits: &Limits,
        region: Arc<Region>,
        sectors: u64,
    ) -> DeviceIo {
        DeviceIo {
            region,
            shape: Shape::new(config, limits),
            sectors,
            under_way: Slab::new(),
            ready: Vec::new(),
            spare: Vec::new(),
            counters: Counters::default(),
        }
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Pages of the device; the last one may be a part.
    pub fn pages(&self) -> u64 {
        self.sectors.div_ceil(PAGE_SECTORS)
    }

    /// Sectors of a page that the device has.
    pub fn sectors_of(&self, page: u64) -> u64 {
        PAGE_SECTORS.min(self.sectors.saturating_sub(page * PAGE_SECTORS))
    }

    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    pub fn set_sectors(&mut self, sectors: u64) {
        self.sectors = sectors;
    }

    /// True if nothing is under way, so nothing will end.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Moves the I/O that was started since the last call to an empty list.
    pub fn take_ready(&mut self, ready: &mut Vec<Io>) {
        debug_assert!(ready.is_empty());
        if !self.ready.is_empty() {
            std::mem::swap(&mut self.ready, ready);
        }
    }

    /// Starts a read of neighbouring pages, which the queue `runner` is to submit. `followed`: as the request that waits for it ([`Request::followed`]).
    pub fn read(&mut self, first: u64, frames: Vec<u32>, runner: usize, followed: bool) {
        let mut request = self.spare_request();
        let sectors = self.fill(&mut request, first, &frames);
        self.counters.pgpgin += sectors / 2;
        self.counters.read_requests += 1;
        self.counters.read_segments += request.buffers.len() as u64;
        let tag = self.under_way.insert(Purpose::Read { first, frames }) as u64;
        let flags = RequestFlags::empty();
        request.reset(Op::Read, flags, first * PAGE_SECTORS, sectors, tag);
        request.followed = followed;
        self.ready.push(Io { runner, request });
    }

    /// Starts a write of neighbouring pages, which the queue `runner` is to submit. `followed`: as the request that waits for it.
    pub fn write(
        &mut self,
        fua: bool,
        first: u64,
        frames: Vec<u32>,
        runner: usize,
        followed: bool,
    ) {
        let mut request = self.spare_request();
        let sectors = self.fill(&mut request, first, &frames);
        self.counters.pgpgout += sectors / 2;
        self.counters.write_requests += 1;
        self.counters.write_segments += request.buffers.len() as u64;
        let mut flags = RequestFlags::STABLE_BUFFERS;
        flags.set(RequestFlags::FUA, fua);
        let tag = self.under_way.insert(Purpose::Write { first, frames }) as u64;
        request.reset(Op::Write, flags, first * PAGE_SECTORS, sectors, tag);
        request.followed = followed;
        self.ready.push(Io { runner, request });
    }

    /// Passes a request without data on; `number` is its number in the core.
    pub fn pass(&mut self, number: u32, passed: &Request, runner: usize) {
        let mut request = self.spare_request();
        let purpose = Purpose::Pass { request: number };
        let tag = self.under_way.insert(purpose) as u64;
        let flags = passed.flags - RequestFlags::STABLE_BUFFERS;
        request.reset(passed.op, flags, passed.sector, passed.sectors, tag);
        request.followed = passed.followed;
        self.ready.push(Io { runner, request });
    }

    /// The device has completed a request of [`Io`].
    pub fn ended(&mut self, mut request: Box<Request>) -> Purpose {
        let purpose = self.under_way.remove(request.tag as usize);
        request.buffers.clear();
        self.spare.push(request);
        purpose
    }

    fn spare_request(&mut self) -> Box<Request> {
        let spare = self.spare.pop();
        spare.unwrap_or_else(|| Request::new(Op::Flush, 0, 0, 0))
    }

    /// Gives a request the frames of neighbouring pages as buffers. Returns sectors.
    fn fill(&self, request: &mut Request, first: u64, frames: &[u32]) -> u64 {
        let mut sectors = 0;
        let mut segment = (0, 0);
        for (page, &frame) in (first..).zip(frames) {
            let len = self.sectors_of(page) * SECTOR;
            if len == 0 {
                break; // the device has become smaller
            }
            sectors += len / SECTOR;
            let (offset, len) = (frame as usize * PAGE_BYTES, len as usize);
            if segment.0 + segment.1 == offset && segment.1 > 0 {
                segment.1 += len;
            } else {
                let full = Buffer::new(&self.region, segment.0, segment.1);
                request.buffers.extend(full.filter(|b| !b.is_empty()));
                segment = (offset, len);
            }
        }
        request
            .buffers
            .extend(Buffer::new(&self.region, segment.0, segment.1));
        sectors
    }

    /// I/O under way, for people who look for a hang.
    pub fn describe(&self) -> impl Iterator<Item = String> {
        self.under_way.iter().map(|(id, purpose)| match purpose {
            Purpose::Read { first, frames } => format!("read {id} of {} at {first}", frames.len()),
            Purpose::Write { first, frames } => {
                format!("write {id} of {} at {first}", frames.len())
            }
            Purpose::Pass { request } => format!("pass {id} for {request}"),
        })
    }

    /// Frames that are being read and frames that are being written; errors if a frame is in two I/Os.
    pub fn frames(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (_, purpose) in &self.under_way {
            match purpose {
                Purpose::Read { frames, .. } => reads.extend(frames),
                Purpose::Write { frames, .. } => writes.extend(frames),
                Purpose::Pass { .. } => {}
            }
        }
        let mut all: Vec<u32> = reads.iter().chain(&writes).copied().collect();
        all.sort_unstable();
        match all.windows(2).find(|w| w[0] == w[1]) {
            Some(twice) => Err(format!("frame {} is in two I/Os", twice[0])),
            None => Ok((reads, writes)),
        }
    }
}
