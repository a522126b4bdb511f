//! Helpers of the volume tests: seeds, driving a queue, and an oracle of a disk's contents.
#![allow(dead_code, missing_docs)]

use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Region, Request,
    RequestFlags, SECTOR, Status,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn queue(device: &Arc<dyn BlockDevice>, depth: u32) -> Queue {
    Queue::open(device, &QueueContext::new(depth)).expect("queue")
}

/// Polls until there is something, sleeping as a worker would.
pub fn wait(queue: &mut Queue, out: &mut Vec<Completion>) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while queue.poll(out) == 0 {
        assert!(Instant::now() < give_up, "a completion never came");
        let Readiness::Wait(deadline) = queue.arm() else {
            continue;
        };
        let timeout = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        match queue.wait_fd() {
            Some(fd) => {
                let poller = Poller::new().expect("epoll");
                poller.add(fd, 0, false).expect("epoll add");
                let wait = timeout.unwrap_or(Duration::from_secs(60));
                poller.wait(&mut Vec::new(), Some(wait)).expect("wait");
            }
            None => std::thread::sleep(timeout.expect("nothing to wait for")),
        }
    }
}

/// Submits one request and waits for its end.
pub fn run(queue: &mut Queue, request: Box<Request>) -> Completion {
    queue.submit(&mut vec![request]);
    let mut out = Vec::new();
    wait(queue, &mut out);
    assert_eq!(out.len(), 1);
    out.pop().expect("one")
}

pub fn buffer_of(data: &[u8]) -> Buffer {
    let buffer = Buffer::anonymous(data.len()).expect("memory");
    buffer.write(0, data);
    buffer
}

pub fn write(queue: &mut Queue, sector: u64, data: &[u8]) -> Status {
    run(
        queue,
        Request::with_buffers(Op::Write, sector, vec![buffer_of(data)], 0),
    )
    .status
}

/// Reads sectors; the buffer has other contents before, so that bytes that aren't filled show.
pub fn read(queue: &mut Queue, sector: u64, sectors: u64) -> Vec<u8> {
    let buffer = buffer_of(&vec![0xd1; (sectors * SECTOR) as usize]);
    let done = run(
        queue,
        Request::with_buffers(Op::Read, sector, vec![buffer], 0),
    );
    assert_eq!(done.status, Status::Ok);
    done.request.buffers[0].to_vec()
}

pub fn plain(queue: &mut Queue, op: Op, flags: RequestFlags, sector: u64, sectors: u64) -> Status {
    let mut request = Request::new(op, sector, sectors, 0);
    request.flags = flags;
    run(queue, request).status
}

pub fn random_bytes(rng: &mut fastrand::Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// The expected contents of a part of a disk.
pub struct Oracle {
    /// First sector of the part.
    pub base: u64,
    pub bytes: Vec<u8>,
    /// For each sector, whether its contents are known: a discard makes them unknown.
    pub known: Vec<bool>,
}

impl Oracle {
    pub fn new(base: u64, sectors: u64) -> Oracle {
        Oracle {
            base,
            bytes: vec![0; (sectors * SECTOR) as usize],
            known: vec![true; sectors as usize],
        }
    }

    pub fn sectors(&self) -> u64 {
        self.known.len() as u64
    }

    pub fn store(&mut self, sector: u64, data: &[u8]) {
        let at = ((sector - self.base) * SECTOR) as usize;
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.mark(sector, data.len() as u64 / SECTOR, true);
    }

    pub fn mark(&mut self, sector: u64, sectors: u64, known: bool) {
        let at = (sector - self.base) as usize;
        self.known[at..at + sectors as usize].fill(known);
    }

    pub fn check(&self, sector: u64, data: &[u8], what: &str) {
        for (i, got) in data.chunks(SECTOR as usize).enumerate() {
            let at = (sector - self.base) as usize + i;
            let want = &self.bytes[at * 512..][..512];
            assert!(
                !self.known[at] || got == want,
                "{what}: sector {} holds {:02x?}…, not {:02x?}…",
                self.base + at as u64,
                &got[..8],
                &want[..8]
            );
        }
    }
}

/// Cuts `sectors` into segments of random odd and even numbers of sectors, scattered over a region.
pub fn scatter(
    rng: &mut fastrand::Rng,
    region: &Arc<Region>,
    sectors: u64,
    most: usize,
) -> Vec<Buffer> {
    let count = rng.usize(1..=most.min(sectors as usize).min(9));
    let mut cuts: Vec<u64> = (1..sectors).collect();
    rng.shuffle(&mut cuts);
    cuts.truncate(count - 1);
    cuts.extend([0, sectors]);
    cuts.sort_unstable();
    let mut at = 0;
    let mut segments: Vec<Buffer> = Vec::new();
    for pair in cuts.windows(2) {
        at += rng.usize(0..4) * 512;
        let len = ((pair[1] - pair[0]) * SECTOR) as usize;
        segments.push(Buffer::new(region, at, len).expect("room"));
        at += len;
    }
    rng.shuffle(&mut segments[1..]);
    // Shuffled lengths still add up; only their order in memory is random now.
    segments
}

pub fn fill(segments: &[Buffer], data: &[u8]) {
    let mut at = 0;
    for segment in segments {
        segment.write(0, &data[at..at + segment.len()]);
        at += segment.len();
    }
}

pub fn gather(segments: &[Buffer]) -> Vec<u8> {
    segments.iter().flat_map(Buffer::to_vec).collect()
}

struct Flying {
    sector: u64,
    sectors: u64,
    is_write: bool,
    data: Vec<u8>,
}

/// Random requests on the oracle's part of the disk, several in flight, none overlapping a write in flight.
pub fn random_ops(
    queue: &mut Queue,
    oracle: &mut Oracle,
    rng: &mut fastrand::Rng,
    ops: u32,
    depth: u64,
) {
    const LARGEST: u64 = 96;
    let unit = queue.limits().sectors_per_block();
    let room = (LARGEST * SECTOR) as usize + 16 * 2048;
    let regions: Vec<_> = (0..depth)
        .map(|_| Arc::new(Region::anonymous(room).expect("memory")))
        .collect();
    let mut flying: Vec<Option<Flying>> = (0..depth).map(|_| None).collect();
    let mut left = ops;
    while left > 0 || flying.iter().any(Option::is_some) {
        let mut batch = Vec::new();
        for _ in 0..rng.u32(0..6) {
            let free: Vec<usize> = (0..flying.len()).filter(|&i| flying[i].is_none()).collect();
            let Some(&slot) = rng.choice(&free).filter(|_| left > 0) else {
                break;
            };
            let sectors = rng.u64(1..=LARGEST / unit) * unit;
            let blocks = (oracle.sectors() - sectors) / unit;
            let sector = oracle.base + rng.u64(0..=blocks) * unit;
            let op = match rng.u32(0..20) {
                0..8 => Op::Read,
                8..16 => Op::Write,
                16 => Op::Flush,
                17 => Op::Discard,
                _ => Op::WriteZeroes,
            };
            let clash = flying.iter().flatten().any(|f| {
                (f.is_write || op.is_write())
                    && sector < f.sector + f.sectors
                    && f.sector < sector + sectors
            });
            if clash || (op == Op::Discard && queue.limits().discard_granularity_bytes == 0) {
                continue;
            }
            left -= 1;
            batch.push(make(
                rng,
                op,
                sector,
                sectors,
                slot,
                &regions[slot],
                &mut flying[slot],
            ));
        }
        queue.submit(&mut batch);
        let mut out = Vec::new();
        if rng.bool() || batch.is_empty() && flying.iter().all(Option::is_some) {
            if flying.iter().any(Option::is_some) {
                wait(queue, &mut out);
            }
        } else {
            queue.poll(&mut out);
        }
        for done in out {
            let flight = flying[done.request.tag as usize].take().expect("twice");
            settle(oracle, done, &flight);
        }
    }
}

fn make(
    rng: &mut fastrand::Rng,
    op: Op,
    sector: u64,
    sectors: u64,
    slot: usize,
    region: &Arc<Region>,
    flying: &mut Option<Flying>,
) -> Box<Request> {
    let mut flight = Flying {
        sector,
        sectors,
        is_write: op.is_write(),
        data: Vec::new(),
    };
    let mut request = Request::new(op, sector, sectors, slot as u64);
    match op {
        Op::Flush => (request.sector, request.sectors, flight.sectors) = (0, 0, 0),
        Op::Read | Op::Write => {
            request.buffers = scatter(rng, region, sectors, 1024);
            flight.data = random_bytes(rng, (sectors * SECTOR) as usize);
            fill(&request.buffers, &flight.data);
        }
        Op::Discard | Op::WriteZeroes => {}
    }
    let fua = matches!(op, Op::Write | Op::WriteZeroes) && rng.u32(0..8) == 0;
    request.flags.set(RequestFlags::FUA, fua);
    let no_unmap = op == Op::WriteZeroes && rng.bool();
    request.flags.set(RequestFlags::NO_UNMAP, no_unmap);
    *flying = Some(flight);
    request
}

fn settle(oracle: &mut Oracle, done: Completion, flight: &Flying) {
    let what = format!("{:?}", done.request.op);
    assert_eq!(done.status, Status::Ok, "{what}");
    match done.request.op {
        Op::Read => oracle.check(flight.sector, &gather(&done.request.buffers), "random read"),
        Op::Write => {
            assert!(
                gather(&done.request.buffers) == flight.data,
                "a write changed its buffers"
            );
            oracle.store(flight.sector, &flight.data);
        }
        Op::WriteZeroes => {
            oracle.store(flight.sector, &vec![0; (flight.sectors * SECTOR) as usize]);
        }
        Op::Discard => oracle.mark(flight.sector, flight.sectors, false),
        Op::Flush => {}
    }
}
