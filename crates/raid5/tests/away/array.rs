//! An array of three members that can be cut off, and its user.

use super::gate::{Gate, GateState};
use super::started::prepared;
use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Consistency, CreateOptions, MemberState, Raid5,
    ReAdded, Superblock, SyncAction, read_superblock, sleepy,
};
use std::sync::Arc;
use std::time::Duration;

/// The means by which an array knows what a member that was away has missed.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub consistency: Consistency,
    /// It has a private map; else its marks are in memory, or it has a bitmap.
    pub private_map: bool,
}

impl Kind {
    pub const BITMAP: Kind = Kind::new(Consistency::Bitmap, false);
    pub const LOG: Kind = Kind::new(Consistency::Ppl, false);
    pub const LOG_AND_MAP: Kind = Kind::new(Consistency::Ppl, true);
    pub const MAP: Kind = Kind::new(Consistency::Resync, true);
    pub const ALL: [Kind; 5] = [
        Kind::LOG,
        Kind::LOG_AND_MAP,
        Kind::new(Consistency::Resync, false),
        Kind::MAP,
        Kind::BITMAP,
    ];
    /// Those that still know it after a restart.
    pub const ON_DISK: [Kind; 3] = [Kind::LOG_AND_MAP, Kind::MAP, Kind::BITMAP];

    const fn new(consistency: Consistency, private_map: bool) -> Kind {
        Kind {
            consistency,
            private_map,
        }
    }
}

pub const MEMBERS: usize = 3;
const MEMBER_BYTES: u64 = 16 << 20;
/// Sectors for each bit of the bitmap, and of the private map of members as small as these.
pub const CHUNK: u64 = 128;
pub const LIMIT: Duration = Duration::from_secs(1);

pub struct Disk {
    pub name: String,
    pub device: Arc<dyn BlockDevice>,
    pub gate: Arc<Mutex<GateState>>,
}

pub struct TestArray {
    pub disks: Vec<Disk>,
    pub array: Arc<Raid5>,
    pub background: BackgroundWork,
    pub queue: Option<Queue>,
    pub now: Duration,
    /// First sector of the members' data.
    pub data: u64,
    /// The number in each sector of the array.
    pub holds: Vec<u64>,
    pub next: u64,
    pub rng: Rng,
}

pub fn disk(name: String) -> Disk {
    let memory = pvblk_volume::open(&format!("mem:{MEMBER_BYTES}")).unwrap();
    let (device, gate) = Gate::over(&memory);
    Disk { name, device, gate }
}

pub fn bytes(number: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

pub fn named(disk: &Disk) -> (String, Arc<dyn BlockDevice>) {
    (disk.name.clone(), Arc::clone(&disk.device))
}

impl TestArray {
    pub fn new(kind: Kind, options: ArrayOptions) -> TestArray {
        let disks: Vec<Disk> = (0..MEMBERS).map(|n| disk(n.to_string())).collect();
        let mut how = CreateOptions::new("test:0");
        how.chunk_sectors = 16;
        how.consistency = kind.consistency;
        how.private_map = kind.private_map;
        how.assume_clean = true;
        let has_bitmap = kind.consistency == Consistency::Bitmap;
        how.bitmap_chunk_bytes = has_bitmap.then_some(CHUNK * 512);
        let all: Vec<_> = disks.iter().map(named).collect();
        let options = ArrayOptions {
            stripes: 16,
            ..options
        };
        let assembly = prepared(all, Some(&how));
        let data = assembly.newest().data_offset_sectors;
        let array = Raid5::start(assembly, &options).unwrap();
        let background = BackgroundWork::new(&array);
        let device: Arc<dyn BlockDevice> = array.clone();
        let mut world = TestArray {
            disks,
            background,
            queue: Some(Queue::open(&device, &QueueContext::new(64)).unwrap()),
            holds: vec![0; array.capacity_sectors() as usize],
            array,
            now: Duration::ZERO,
            data,
            next: 1,
            rng: Rng::with_seed(7),
        };
        world.pass(Duration::from_secs(1));
        world
    }

    /// Another server begins.
    pub fn start(&mut self, assembly: Assembly) {
        self.array = Raid5::start(assembly, &TestArray::limited(false)).unwrap();
        self.background = BackgroundWork::new(&self.array);
        let device: Arc<dyn BlockDevice> = self.array.clone();
        self.queue = Some(Queue::open(&device, &QueueContext::new(64)).unwrap());
    }

    pub fn limited(re_add: bool) -> ArrayOptions {
        ArrayOptions {
            member_timeout: Some(LIMIT),
            re_add,
            ..ArrayOptions::default()
        }
    }

    /// Time passes, and the background thread steps.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(100);
            for _ in 0..8 {
                self.background.work(self.now);
            }
        }
    }

    pub fn submit(&mut self, requests: Vec<Box<Request>>) -> usize {
        let mut batch = requests;
        let count = batch.len();
        self.queue.as_mut().unwrap().submit(&mut batch);
        count
    }

    /// Polls for the completions of so many requests, while time passes, at most for `most`.
    pub fn finish(&mut self, count: usize, most: Duration) -> Vec<Completion> {
        let (mut done, end) = (Vec::new(), self.now + most);
        while done.len() < count && self.now < end {
            for _ in 0..20 {
                self.queue.as_mut().unwrap().poll(&mut done);
            }
            self.pass(Duration::from_millis(100));
        }
        done
    }

    /// A write of a range, which is what a read finds there from now on.
    pub fn write(&mut self, sector: u64, sectors: u64, flags: RequestFlags) -> Box<Request> {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        for n in 0..sectors {
            buffer.write((n * 512) as usize, &bytes(self.next << 32 | (sector + n)));
            self.holds[(sector + n) as usize] = self.next << 32 | (sector + n);
        }
        self.next += 1;
        let mut request = Request::with_buffers(Op::Write, sector, vec![buffer], self.next);
        request.flags = flags;
        request
    }

    pub fn write_now(&mut self, sector: u64, sectors: u64) {
        let request = self.write(sector, sectors, RequestFlags::empty());
        self.submit(vec![request]);
        let done = self.finish(1, Duration::from_secs(60));
        assert_eq!(done[0].status, Status::Ok);
    }

    pub fn read(&mut self, sector: u64, sectors: u64) -> Box<Request> {
        let buffer = Buffer::anonymous((sectors * 512) as usize).unwrap();
        self.next += 1;
        Request::with_buffers(Op::Read, sector, vec![buffer], self.next)
    }

    pub fn is_right(&self, done: &Completion) -> bool {
        let request = &done.request;
        let right = |n: u64| {
            let mut found = [0; 512];
            request.buffers[0].read((n * 512) as usize, &mut found);
            found == bytes(self.holds[(request.sector + n) as usize])
        };
        done.status == Status::Ok && (0..request.sectors).all(right)
    }

    /// True if everything is as it was written.
    pub fn is_whole(&mut self) -> bool {
        let mut whole = true;
        for sector in (0..self.holds.len() as u64).step_by(1024) {
            let sectors = 1024.min(self.holds.len() as u64 - sector);
            let request = self.read(sector, sectors);
            self.submit(vec![request]);
            let done = self.finish(1, Duration::from_secs(60));
            whole &= self.is_right(&done[0]);
        }
        whole
    }

    pub fn close(&self, disk: usize) {
        self.disks[disk].gate.lock().closed = true;
    }

    pub fn open(&self, disk: usize) {
        self.disks[disk].gate.lock().closed = false;
    }

    pub fn failed(&self) -> Option<usize> {
        self.array.state().failed
    }

    /// The place that a device is recovered for.
    pub fn rebuilding(&self) -> Option<usize> {
        let members = self.array.state().members.into_iter();
        let mut rebuilt = members.filter(|m| matches!(m.state, MemberState::Rebuilding(_)));
        rebuilt.next()?.place
    }

    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            self.pass(Duration::from_millis(100));
            if !self.background.is_busy() {
                return;
            }
        }
        panic!("it never ends: {:?}", self.array.state().sync);
    }

    /// Sectors of members whose parity is wrong.
    pub fn mismatches(&mut self) -> u64 {
        self.array.sync(Some(SyncAction::Check)).unwrap();
        self.settle();
        self.array.state().mismatch_sectors
    }

    /// Bits of the bitmap are cleared.
    pub fn sweep(&mut self) {
        self.pass(Duration::from_secs(40));
    }

    /// Rebuilds the missing member onto a device that wasn't one.
    pub fn take_spare(&mut self) {
        let spare = disk("spare".into());
        let added = self
            .array
            .add(&spare.name, &spare.device, false, &mut sleepy());
        added.unwrap();
        self.disks.push(spare);
        self.settle();
    }

    pub fn superblock(&self, disk: usize) -> Superblock {
        let disk = &self.disks[disk];
        read_superblock(&disk.name, &disk.device, &mut sleepy()).unwrap()
    }

    /// Sectors of a member's data that were written since the last call.
    pub fn written(&self, disk: usize) -> Vec<(u64, u64)> {
        let all = std::mem::take(&mut self.disks[disk].gate.lock().written);
        let data = all.into_iter().filter(|(sector, _)| *sector >= self.data);
        data.map(|(sector, sectors)| (sector - self.data, sectors))
            .collect()
    }

    pub fn re_add(&mut self, disk: usize) -> Result<ReAdded, pvblk_block::Error> {
        let Disk { name, device, .. } = &self.disks[disk];
        self.array.re_add(name, device, &mut sleepy())
    }
}

pub const FOREVER: Duration = Duration::from_secs(3600);

/// Cuts a member off, writes, and returns the chunks of the bitmap that it missed.
pub fn miss(world: &mut TestArray, disk: usize) -> Vec<u64> {
    world.write_now(0, 2048);
    world.sweep();
    world.close(disk);
    let row = 32;
    let mut chunks = Vec::new();
    for n in 0..6 {
        let sector = 4096 + n * 3000;
        world.write_now(sector, 8);
        // Rows of two data chunks: a member has half of the array's sectors.
        chunks.push(sector / row * 16 / CHUNK);
        chunks.push((sector + 7) / row * 16 / CHUNK);
    }
    assert_eq!(world.failed(), Some(disk));
    chunks.sort_unstable();
    chunks.dedup();
    chunks
}
