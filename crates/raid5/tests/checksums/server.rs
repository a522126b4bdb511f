//! Members in memory, and a server of their array, one step at a time.

use fastrand::Rng;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Reclaim, Request, Status,
};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, Assembly, BackgroundWork, Blocking, Consistency, CreateOptions,
    Geometry, Raid5, STRIPE_BYTES, STRIPE_SECTORS, SyncAction, assemble, create, prepare, sleepy,
};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;

pub const MEMBER_BYTES: u64 = 24 << 20;
const CHUNK_SECTORS: u32 = 16;
/// Blocks of the array.
pub type Block = [u8; STRIPE_BYTES];

/// Members, and the server that has them.
pub struct Server {
    pub devices: Vec<(String, Arc<dyn BlockDevice>)>,
    /// None: it is stopped.
    pub array: Option<(Arc<Raid5>, BackgroundWork, Queue)>,
    pub geometry: Geometry,
    pub data_sectors: u64,
    pub now: Duration,
    /// The blocks of the array.
    pub holds: Vec<Block>,
    pub rng: Rng,
}

pub fn devices(count: usize) -> Vec<(String, Arc<dyn BlockDevice>)> {
    let open = |n: usize| {
        let device = pvblk_volume::open(&format!("mem:{MEMBER_BYTES}")).unwrap();
        (format!("m{n}"), device)
    };
    (0..count).map(open).collect()
}

pub fn again(devices: &[(String, Arc<dyn BlockDevice>)]) -> Vec<(String, Arc<dyn BlockDevice>)> {
    devices
        .iter()
        .map(|(name, device)| (name.clone(), Arc::clone(device)))
        .collect()
}

impl Server {
    pub fn new(members: usize, consistency: Consistency, seed: u64) -> Server {
        let devices = devices(members);
        let mut how = CreateOptions::new("sums");
        how.chunk_sectors = CHUNK_SECTORS;
        how.consistency = consistency;
        how.checksums = true;
        let assembly = create(again(&devices), &how, &mut sleepy()).unwrap();
        let blocks = assembly.geometry.capacity_sectors() / STRIPE_SECTORS;
        let mut server = Server {
            devices,
            array: None,
            geometry: assembly.geometry,
            data_sectors: assembly.newest().data_offset_sectors,
            now: Duration::ZERO,
            holds: vec![[0; STRIPE_BYTES]; blocks as usize],
            rng: Rng::with_seed(seed),
        };
        server.start();
        server
    }

    pub fn start(&mut self) {
        let found = again(&self.devices);
        let options = AssembleOptions {
            resync_later: true,
            ..AssembleOptions::default()
        };
        let mut assembly = assemble(found, &options, &mut sleepy()).unwrap();
        prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).unwrap();
        self.serve(assembly);
    }

    pub fn serve(&mut self, assembly: Assembly) {
        let options = ArrayOptions {
            stripes: 64,
            ..ArrayOptions::default()
        };
        let array = Raid5::start(assembly, &options).unwrap();
        let background = BackgroundWork::new(&array);
        let device: Arc<dyn BlockDevice> = array.clone();
        let queue = Queue::open(&device, &QueueContext::new(64)).unwrap();
        self.array = Some((array, background, queue));
    }

    pub fn array(&self) -> &Raid5 {
        &self.array.as_ref().expect("it is served").0
    }

    /// Ends in order, or as by a crash of the server.
    pub fn end(&mut self, in_order: bool) {
        let (array, background, queue) = self.array.take().expect("it is served");
        drop(queue);
        drop(background);
        if in_order {
            array.stop(&mut sleepy()).unwrap();
        }
    }

    /// No page of the stripe cache is valid any more, and sums that are in memory go after the next sweep.
    pub fn forget(&mut self) {
        self.array().give_way();
    }

    /// The background works, as if so much time had passed.
    pub fn pass(&mut self, time: Duration) {
        let (_, background, _) = self.array.as_mut().expect("it is served");
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(100);
            (0..6).for_each(|_| background.work(self.now));
        }
    }

    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            self.pass(Duration::from_millis(100));
            if !self.array.as_ref().expect("it is served").1.is_busy() {
                return;
            }
        }
        panic!("the background never ends");
    }

    pub fn ask(&mut self, request: Box<Request>) -> Completion {
        let (_, background, queue) = self.array.as_mut().expect("it is served");
        queue.submit(&mut vec![request]);
        let mut done = Vec::new();
        let now = self.now;
        wait("a request", || {
            background.work(now);
            queue.poll(&mut done);
            !done.is_empty()
        });
        done.remove(0)
    }

    /// Writes blocks of the array, of which nothing else is like them.
    pub fn write(&mut self, block: usize, blocks: usize) {
        let buffer = Buffer::anonymous(blocks * STRIPE_BYTES).unwrap();
        for n in 0..blocks {
            self.rng.fill(&mut self.holds[block + n]);
            buffer.write(n * STRIPE_BYTES, &self.holds[block + n]);
        }
        let sector = block as u64 * STRIPE_SECTORS;
        let request = Request::with_buffers(Op::Write, sector, vec![buffer], 0);
        assert_eq!(self.ask(request).status, Status::Ok);
    }

    /// A part of a block is written, so that the rest of it is read.
    pub fn write_part(&mut self, block: usize) {
        let sector = self.rng.u64(..STRIPE_SECTORS);
        let at = sector as usize * 512;
        let part = &mut self.holds[block][at..at + 512];
        self.rng.fill(part);
        let buffer = Buffer::anonymous(4096).unwrap().slice(0, 512).unwrap();
        buffer.write(0, part);
        let sector = block as u64 * STRIPE_SECTORS + sector;
        let request = Request::with_buffers(Op::Write, sector, vec![buffer], 0);
        assert_eq!(self.ask(request).status, Status::Ok);
    }

    /// Reads sectors of the array: `None` if that failed, else whether they are as they were written.
    pub fn read_sectors(&mut self, sector: u64, sectors: u64) -> Option<bool> {
        let buffer = Buffer::anonymous(sectors as usize * 512).unwrap();
        let request = Request::with_buffers(Op::Read, sector, vec![buffer], 0);
        let done = self.ask(request);
        if done.status != Status::Ok {
            return None;
        }
        let bytes = done.request.buffers[0].to_vec();
        let is_right = |n: u64| {
            let sector = sector + n;
            let block = &self.holds[(sector / STRIPE_SECTORS) as usize];
            let at = (sector % STRIPE_SECTORS) as usize * 512;
            block[at..at + 512] == bytes[n as usize * 512..][..512]
        };
        Some((0..sectors).all(is_right))
    }

    pub fn read(&mut self, block: usize, blocks: usize) -> Option<bool> {
        let sector = block as u64 * STRIPE_SECTORS;
        self.read_sectors(sector, blocks as u64 * STRIPE_SECTORS)
    }

    /// True if all blocks are as they were written.
    pub fn is_whole(&mut self) -> bool {
        let all = self.holds.len();
        (0..all)
            .step_by(64)
            .all(|block| self.read(block, 64.min(all - block)) == Some(true))
    }

    pub fn write_all(&mut self) {
        let all = self.holds.len();
        (0..all)
            .step_by(64)
            .for_each(|block| self.write(block, 64.min(all - block)));
    }

    /// The sector of a member where its block of a stripe is.
    pub fn sector_of(&self, stripe: u64) -> u64 {
        self.data_sectors + stripe * STRIPE_SECTORS
    }

    pub fn raw(&self, member: usize, sector: u64) -> Block {
        let mut block = [0; STRIPE_BYTES];
        let mut disk = Blocking::open(&self.devices[member].1).unwrap();
        disk.read(sector, &mut block, &mut sleepy()).unwrap();
        block
    }

    pub fn set_raw(&self, member: usize, sector: u64, block: &Block) {
        let mut disk = Blocking::open(&self.devices[member].1).unwrap();
        disk.write(sector, block, &mut sleepy()).unwrap();
    }

    /// A bit of a member's block flips.
    pub fn flip(&mut self, member: usize, sector: u64) {
        let mut block = self.raw(member, sector);
        block[self.rng.usize(..STRIPE_BYTES)] ^= 1 << self.rng.u32(..8);
        self.set_raw(member, sector, &block);
    }

    /// Checksum errors by place.
    pub fn errors(&self) -> Vec<u32> {
        let mut members = self.array().state().members;
        members.sort_by_key(|member| member.place);
        members
            .iter()
            .map(|member| member.checksum_errors)
            .collect()
    }

    pub fn all_errors(&self) -> u32 {
        self.errors().iter().sum()
    }

    pub fn check(&mut self) -> u64 {
        self.sync(SyncAction::Check)
    }

    /// Sectors of members whose parity was wrong.
    pub fn sync(&mut self, action: SyncAction) -> u64 {
        self.array().sync(Some(action)).unwrap();
        self.settle();
        let state = self.array().state();
        assert_eq!(state.trouble, None);
        state.mismatch_sectors
    }

    /// The block of the array that a member's block is, unless it is parity.
    pub fn block_at(&self, member: usize, stripe: u64) -> Option<usize> {
        let sector = self
            .geometry
            .array_sector(member, stripe * STRIPE_SECTORS)?;
        Some((sector / STRIPE_SECTORS) as usize)
    }
}
