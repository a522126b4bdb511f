//! The arrays that are measured: four members, chunks of 64 KiB, and their counters.

use parking_lot::RwLock;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Op,
    Queue, QueueContext, Readiness, Request, Status,
};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Consistency, Layout, Member, NewArray, Raid5, WritePath,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Members of each array.
pub const MEMBERS: usize = 4;
/// Sectors of a chunk: 64 KiB.
pub const CHUNK_SECTORS: u64 = 128;
/// Sectors of the array in the chunks at one offset of all members.
pub const ROW_SECTORS: u64 = CHUNK_SECTORS * (MEMBERS as u64 - 1);

/// Reads of all members of an array, in blocks of 4 KiB.
#[derive(Default)]
pub struct Reads {
    /// Reads are skipped: they cost nothing and return nothing, so parity is wrong from then on.
    free: AtomicBool,
    inside: AtomicU64,
    at_edges: AtomicU64,
    /// Number of requests of any kind that members have now.
    in_flight: AtomicUsize,
    /// Rows of chunks in which streams begin or end, sorted, and the sector at which data begins on
    /// a member.
    edges: RwLock<(Vec<u64>, u64)>,
}

impl Reads {
    fn note(&self, request: &Request) {
        let edges = self.edges.read();
        let row = request.sector.saturating_sub(edges.1) / CHUNK_SECTORS;
        let count = match edges.0.binary_search(&row) {
            Ok(_) => &self.at_edges,
            Err(_) => &self.inside,
        };
        count.fetch_add(request.sectors.div_ceil(8), Relaxed);
    }
}

/// A member that counts its reads.
struct Counted {
    inner: Arc<dyn BlockDevice>,
    reads: Arc<Reads>,
}

struct CountedQueue {
    inner: Box<dyn DeviceQueue>,
    reads: Arc<Reads>,
    freed: Vec<Completion>,
    below: usize,
}

impl Decorator for Counted {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Ok(Box::new(CountedQueue {
            inner: self.inner.open_device_queue(context)?,
            reads: Arc::clone(&self.reads),
            freed: Vec::new(),
            below: 0,
        }))
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        // Only requests are counted.
        Forwards::none()
    }
}

impl DeviceQueue for CountedQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let reads = batch.iter().filter(|r| r.op == Op::Read);
        reads.for_each(|r| self.reads.note(r));
        if self.reads.free.load(Relaxed) {
            let free = batch.extract_if(.., |r| r.op == Op::Read);
            self.freed.extend(free.map(|request| Completion {
                request,
                status: Status::Ok,
            }));
        }
        self.below += batch.len();
        self.reads.in_flight.fetch_add(batch.len(), Relaxed);
        if !batch.is_empty() {
            self.inner.submit(batch);
        }
    }
    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.freed);
        if self.below > 0 {
            let before = out.len();
            self.inner.poll(out);
            self.below -= out.len() - before;
            let in_flight = &self.reads.in_flight;
            in_flight.fetch_sub(out.len() - before, Relaxed);
        }
    }
    fn arm(&mut self) -> Readiness {
        match self.freed.is_empty() {
            true => self.inner.arm(),
            false => Readiness::Ready,
        }
    }
    fn woken(&mut self) {
        self.inner.woken();
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

/// A write path, and whether its prereads are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Direct writes, as md has.
    Direct,
    /// The stripe queue.
    Queue,
    /// Direct writes, whose reads for parity cost nothing.
    DirectFree,
    /// The stripe queue, whose reads for parity cost nothing.
    QueueFree,
}

impl Way {
    fn path(self) -> WritePath {
        match self {
            Way::Direct | Way::DirectFree => WritePath::Direct,
            Way::Queue | Way::QueueFree => WritePath::StripeQueue,
        }
    }

    fn free(self) -> bool {
        matches!(self, Way::DirectFree | Way::QueueFree)
    }
}

/// Counters of a sample.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted4k {
    /// Blocks that members read, in rows of chunks that no stream begins or ends in.
    pub inside: u64,
    /// Blocks that members read, in rows of chunks that a stream begins or ends in.
    pub at_edges: u64,
    /// Rounds of stripes that were written.
    pub rounds: u64,
    /// Rounds of whole stripes that were written.
    pub whole: u64,
}

/// A new array of these members. Its parity is right if they are all zeros.
pub fn assembly(
    members: Vec<Arc<dyn BlockDevice>>,
    consistency: Consistency,
) -> Result<Assembly, Error> {
    let sectors: Vec<u64> = members.iter().map(|m| m.capacity_sectors()).collect();
    let created = NewArray {
        set_uuid: [7; 16],
        name: "lab:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: CHUNK_SECTORS as u32,
        device_sectors: &sectors,
        size_sectors: None,
        consistency,
        checksums: false,
        clean: true,
    }
    .build()?;
    let members = members.into_iter().enumerate().map(|(i, device)| {
        Some(Member {
            device,
            name: format!("m{i}"),
            superblock: created.superblock(i, [i as u8; 16]),
        })
    });
    Ok(Assembly::new(created.geometry(), members.collect(), false))
}

/// An array over given members, whose parity is right if they are all zeros.
pub struct Array {
    /// The array's device, which opens queues.
    pub device: Arc<dyn BlockDevice>,
    raid: Arc<Raid5>,
    reads: Arc<Reads>,
    data_offset: u64,
    before: Counted4k,
}

impl Array {
    /// Starts the array. `wait` is called while the members' metadata is written.
    pub fn new(
        members: Vec<Arc<dyn BlockDevice>>,
        consistency: Consistency,
        stripes: usize,
        wait: &mut dyn FnMut(),
    ) -> Result<Array, Error> {
        let reads = Arc::<Reads>::default();
        let members = members.into_iter().map(|inner| {
            let reads = Arc::clone(&reads);
            Arc::new(Counted { inner, reads }) as Arc<dyn BlockDevice>
        });
        let assembly = assembly(members.collect(), consistency)?;
        let data_offset = assembly.newest().data_offset_sectors;
        let options = ArrayOptions {
            stripes,
            ..ArrayOptions::default()
        };
        let raid = Raid5::start(assembly, &options)?;
        let mut background = BackgroundWork::new(&raid);
        let mut idle = || {
            wait();
            Ok(())
        };
        write_first(&raid, || {
            background.work_with(&|| Duration::ZERO, &mut idle);
            idle()
        })?;
        Ok(Array {
            device: raid.clone(),
            raid,
            reads,
            data_offset,
            before: Counted4k::default(),
        })
    }

    /// Begins a sample, whose writes go by `way`. `edges` are the array's sectors that streams begin or end
    /// at. No request may be in flight.
    pub fn begin(&mut self, way: Way, edges: &[u64]) -> Result<(), Error> {
        self.raid.set_write_path(way.path());
        self.reads.free.store(way.free(), Relaxed);
        // The stripes that the last sample left in the stripe cache are dropped.
        let stripes = self.raid.state().stripes;
        self.raid.set_stripes(8)?;
        self.raid.set_stripes(stripes)?;
        let mut rows: Vec<u64> = edges.iter().map(|s| s / ROW_SECTORS).collect();
        rows.sort_unstable();
        *self.reads.edges.write() = (rows, self.data_offset);
        self.before = self.sum();
        Ok(())
    }

    /// True if members have requests to do.
    pub fn is_busy(&self) -> bool {
        self.reads.in_flight.load(Relaxed) > 0
    }

    /// Bytes of writes so far, and those that the array has moved for them.
    pub fn moved_bytes(&self) -> (u64, u64) {
        let counts = self.raid.counts();
        (counts.written_bytes, counts.moved_bytes)
    }

    fn sum(&self) -> Counted4k {
        let counts = self.raid.counts();
        Counted4k {
            inside: self.reads.inside.load(Relaxed),
            at_edges: self.reads.at_edges.load(Relaxed),
            rounds: counts.rounds,
            whole: counts.whole,
        }
    }

    /// The counters since [`Array::begin`].
    pub fn counted(&self) -> Counted4k {
        let (now, then) = (self.sum(), self.before);
        Counted4k {
            inside: now.inside - then.inside,
            at_edges: now.at_edges - then.at_edges,
            rounds: now.rounds - then.rounds,
            whole: now.whole - then.whole,
        }
    }
}

/// Writes zeros to the first block, so that superblocks say dirty from then on; `wait` is called until that is done.
fn write_first(
    array: &Arc<Raid5>,
    mut wait: impl FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let device: Arc<dyn BlockDevice> = array.clone();
    let mut queue = Queue::open(&device, &QueueContext::new(1))?;
    let buffer = Buffer::anonymous(4096).map_err(|e| Error::os("memory for a block", e))?;
    queue.submit(&mut vec![Request::with_buffers(
        Op::Write,
        0,
        vec![buffer],
        0,
    )]);
    let mut done = Vec::new();
    while queue.poll(&mut done) == 0 {
        wait()?;
    }
    Ok(())
}
