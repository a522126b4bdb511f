//! A small device in memory, and random numbers.

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, CacheState, Cached, Capabilities, Completion, DeviceQueue, Error, EventHub,
    Extent, ExtentKind, Extents, Limits, Op, QueueContext, Readiness, Request, RequestFlags,
    Status,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A seeded generator (splitmix64), so that tests print what they need to be repeated.
pub struct Rng(pub u64);

impl Rng {
    /// The seed from `PVBLK_SEED`, or this one; prints it.
    pub fn from_env(default: u64) -> Rng {
        Rng(pvblk_testing::seed_or(default))
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    /// A number of any size below `1 << bits`.
    pub fn power(&mut self, bits: u64) -> u64 {
        let n = self.below(bits);
        self.below(1 << n)
    }
}

/// Bytes that differ by place and seed.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| ((i as u32 * 31) >> 3) as u8 ^ seed)
        .collect()
}

/// Bytes in memory. Requests take effect at once and in order; completions come in a shuffled order.
pub struct MemDevice {
    pub data: Arc<Mutex<Vec<u8>>>,
    pub limits: Limits,
    pub sectors: AtomicU64,
    /// Requests that touch this sector fail.
    pub fail_at: Arc<AtomicU64>,
    /// Completions are kept back.
    pub hold: Arc<AtomicBool>,
    /// Questions about extents aren't answered.
    pub hang_extents: AtomicBool,
    /// It has a page cache, with dirty data in sectors 8 to 15 and clean data in 16 to 31.
    pub has_cache: AtomicBool,
    /// Held by a test while no queue is to be opened.
    pub door: Mutex<()>,
    /// Attempts to open a queue, and those that passed the door.
    pub entered: AtomicU64,
    pub passed: AtomicU64,
    pub about: Mutex<String>,
    /// The requests that reached the device.
    pub log: Arc<Mutex<Vec<(Op, RequestFlags)>>>,
    events: EventHub,
}

impl MemDevice {
    pub fn sized(bytes: usize) -> Arc<MemDevice> {
        MemDevice::with(bytes, Limits::default())
    }

    pub fn with(bytes: usize, limits: Limits) -> Arc<MemDevice> {
        Arc::new(MemDevice {
            data: Arc::new(Mutex::new(vec![0; bytes])),
            limits,
            sectors: AtomicU64::new(bytes as u64 / 512),
            fail_at: Arc::new(AtomicU64::new(u64::MAX)),
            hold: Arc::default(),
            hang_extents: AtomicBool::new(false),
            has_cache: AtomicBool::new(false),
            door: Mutex::default(),
            entered: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            about: Mutex::new("memory for tests".into()),
            log: Arc::default(),
            events: EventHub::default(),
        })
    }
}

impl BlockDevice for MemDevice {
    fn describe(&self) -> String {
        self.about.lock().clone()
    }
    fn limits(&self) -> Limits {
        self.limits
    }
    fn capacity_sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }
    fn open_device_queue(&self, c: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        self.entered.fetch_add(1, Ordering::AcqRel);
        drop(self.door.lock());
        self.passed.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(MemQueue {
            data: Arc::clone(&self.data),
            fail_at: Arc::clone(&self.fail_at),
            hold: Arc::clone(&self.hold),
            log: Arc::clone(&self.log),
            depth: c.depth as usize,
            block: self.limits.logical_sector_bytes as usize,
            done: Vec::new(),
            rng: Rng(7),
        }))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            extents: Some(self),
            cached: self.has_cache.load(Ordering::Relaxed).then_some(self as _),
            ..Capabilities::none()
        }
    }
}

impl Extents for MemDevice {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        while self.hang_extents.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let data = self.data.lock();
        for s in sector..sector + sectors {
            let bytes = &data[s as usize * 512..][..512];
            let kind = if bytes.iter().all(|&b| b == 0) {
                ExtentKind::Hole
            } else {
                ExtentKind::Data
            };
            out.push(Extent {
                sector: s,
                sectors: 1,
                kind,
            });
        }
        Ok(())
    }
}

impl Cached for MemDevice {
    fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>) {
        for at in sector..sector + sectors {
            let state = match at {
                8..16 => CacheState::Dirty,
                16..32 => CacheState::Clean,
                _ => CacheState::Absent,
            };
            Extent::push(out, 0, at, at + 1, state);
        }
    }
}

struct MemQueue {
    data: Arc<Mutex<Vec<u8>>>,
    fail_at: Arc<AtomicU64>,
    hold: Arc<AtomicBool>,
    log: Arc<Mutex<Vec<(Op, RequestFlags)>>>,
    depth: usize,
    block: usize,
    done: Vec<Completion>,
    rng: Rng,
}

impl MemQueue {
    fn execute(&self, r: &Request) -> Status {
        self.log.lock().push((r.op, r.flags));
        let bad = self.fail_at.load(Ordering::Relaxed);
        if r.op != Op::Flush && (r.sector..r.end()).contains(&bad) {
            return Status::IoError;
        }
        let mut data = self.data.lock();
        let range = r.sector as usize * 512..r.end() as usize * 512;
        let bytes = &mut data[range];
        let mut at = 0;
        // As the lane does for the disk: a part of one block is written.
        let keep = match r.flags.contains(RequestFlags::PARTIAL) {
            true => [r.scratch & 0xffff, r.scratch >> 16].map(|n| n as usize),
            false => [0; 2],
        };
        assert!(keep == [0; 2] || bytes.len() == self.block);
        for b in &r.buffers {
            let piece = &mut bytes[at..at + b.len()];
            match r.op {
                Op::Read => b.write(0, piece),
                _ => b.read(keep[0], &mut piece[keep[0]..b.len() - keep[1]]),
            }
            at += b.len();
        }
        if matches!(r.op, Op::Discard | Op::WriteZeroes) {
            bytes.fill(0);
        }
        Status::Ok
    }
}

impl DeviceQueue for MemQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        for request in batch.drain(..) {
            let status = self.execute(&request);
            self.done.push(Completion { request, status });
        }
        assert!(
            self.done.len() <= self.depth,
            "more requests than agreed on"
        );
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        if self.hold.load(Ordering::Relaxed) {
            return;
        }
        for _ in 0..self.rng.below(self.done.len() as u64 + 1) {
            let i = self.rng.below(self.done.len() as u64) as usize;
            out.push(self.done.swap_remove(i));
        }
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
