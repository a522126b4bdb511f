//! Target `front`: the front end as a device, against a back end that answers honestly, wrongly, or with anything.
//!
//! Always: no panic, each request completes exactly once, to its submitter, and no grant is ended twice.
//! As long as the back end is honest: all data arrives where it belongs, errors come only from the back end,
//! and nothing stays granted.

use crate::front_table::{FRAMES, Seen, Table};
use crate::guest::CountingChannel;
use arbitrary::{Result, Unstructured};
use pvblk_block::{
    BlockDevice, Buffer, Op, Queue, QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_client::rings::{FrontParts, FrontQueueParts, Frontend, Granter};
use pvblk_protocol::blkif::FrontRing;
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_sys::{PAGE_SIZE, Region, create_sealed};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SLOTS: usize = 24;
/// Bytes of a slot.
const SLOT: usize = 4 * PAGE_SIZE;
const SECTORS: u64 = 4096;
const STEPS: usize = 300;

struct Ring {
    pages: Region,
    entries: u32,
    req_cons: u32,
    rsp_prod: u32,
    seen: Vec<Seen>,
}

struct Play {
    frontend: Arc<Frontend>,
    queues: Vec<Queue>,
    table: Arc<Table>,
    memory: Region,
    rings: Vec<Ring>,
    slots: Vec<Buffer>,
    free: Vec<usize>,
    /// By tag: submitter and slot.
    in_flight: BTreeMap<u64, (usize, usize)>,
    next_tag: u64,
    /// The back end was dishonest, or gone.
    tampered: bool,
    /// It gave an error.
    errors: bool,
    persistent: bool,
}

pub fn front(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

fn pattern(sector: u64) -> [u8; 512] {
    let word = (sector + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_ne_bytes();
    let mut b = [0; 512];
    b.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&word));
    b
}

fn setup(u: &mut Unstructured<'_>) -> Result<Play> {
    let queues = u.int_in_range(1..=2usize)?;
    let persistent = u.arbitrary()?;
    let fd = create_sealed("fuzz", (FRAMES * PAGE_SIZE) as u64).expect("memory");
    let all = || Region::shared(fd.as_fd(), 0, FRAMES * PAGE_SIZE, true).expect("memory");
    let page = |q| Region::from_frames(fd.as_fd(), &[q as u64], true).expect("memory");
    let grants = if persistent {
        400
    } else {
        u.int_in_range(34..=400)?
    };
    let table = Arc::new(Table::new(all(), queues as u32, grants));
    let (mut parts, mut rings) = (Vec::new(), Vec::new());
    for q in 0..queues {
        let ring = FrontRing::new(page(q)).expect("a ring's size");
        rings.push(Ring {
            pages: page(q),
            entries: ring.entries(),
            req_cons: 0,
            rsp_prod: 0,
            seen: Vec::new(),
        });
        let (channel, _) = CountingChannel::new();
        parts.push(FrontQueueParts {
            ring,
            channel: Box::new(channel),
        });
    }
    let frontend = Frontend::new(FrontParts {
        name: "fuzz".into(),
        properties: DiskProperties {
            sectors: SECTORS,
            sector_size: 512,
            physical_sector_size: 4096,
            read_only: u.ratio(1, 16)?,
            flush: u.arbitrary()?,
            barrier: u.arbitrary()?,
            discard: u.arbitrary()?,
            discard_secure: u.arbitrary()?,
            discard_granularity: 512,
            persistent,
            max_indirect_segments: *u.choose(&[0, 12, 32])?,
            cache_mark: None,
            contents_mark: None,
        },
        queues: parts,
        granter: Arc::clone(&table) as Arc<dyn Granter>,
    })
    .expect("the memory is large enough");
    let device: Arc<dyn BlockDevice> = Arc::clone(&frontend) as Arc<dyn BlockDevice>;
    let open = |index| {
        let mut context = QueueContext::new(SLOTS as u32);
        context.index = index;
        Queue::open(&device, &context).expect("a queue")
    };
    // Half of the buffers in memory that the back end reaches, half elsewhere.
    let own = Arc::new(Region::anonymous(SLOTS * SLOT).expect("memory"));
    let source = device.buffer_source().expect("the front end's memory");
    let slot = |i| match i % 2 {
        0 => source.allocate(SLOT),
        _ => Buffer::new(&own, i * SLOT, SLOT),
    };
    Ok(Play {
        queues: (0..3).map(open).collect(),
        frontend,
        table,
        memory: all(),
        rings,
        slots: (0..SLOTS).map(|i| slot(i).expect("memory")).collect(),
        free: (0..SLOTS).collect(),
        in_flight: BTreeMap::new(),
        next_tag: 0,
        tampered: false,
        errors: false,
        persistent,
    })
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let mut play = setup(u)?;
    let result = (0..STEPS).try_for_each(|_| play.step(u));
    play.end();
    result
}

impl Play {
    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let s = u.int_in_range(0..=self.queues.len() - 1)?;
        let r = u.int_in_range(0..=self.rings.len() - 1)?;
        match u.int_in_range(0..=19)? {
            0..=5 => self.submit(s, u)?,
            6..=8 => {
                self.poll(s);
            }
            9..=14 => {
                self.look(r);
                for _ in 0..u.int_in_range(0..=6)? {
                    let (pick, status) = (u.arbitrary()?, *u.choose(&[0, 0, 0, 0, -1, -2])?);
                    self.answer(r, pick, status);
                }
                self.rings[r].publish();
            }
            15 => {
                let ready = self.queues[s].arm();
                assert!(ready == Readiness::Ready || ready == Readiness::Wait(None));
            }
            16 => {
                self.tampered = true;
                let at = u.int_in_range(0..=PAGE_SIZE - 64)?;
                let n = u.int_in_range(1..=64)?;
                self.rings[r].pages.write(at, u.bytes(n)?);
            }
            17 => {
                self.tampered = true;
                let near = self.rings[r]
                    .rsp_prod
                    .wrapping_add_signed(u.int_in_range(-3..=40)?);
                let at = 4 * u.int_in_range(0..=3usize)?;
                self.rings[r].pages.write(at, &near.to_ne_bytes());
            }
            18 => {
                self.tampered = true;
                let id = u.int_in_range(0..=33)?;
                self.rings[r].respond(id, u.int_in_range(0..=6)?, u.arbitrary()?);
                self.rings[r].publish();
            }
            _ if !self.tampered && u.ratio(1, 8)? => {
                self.wrong_operation(r, u.int_in_range(0..=6)?)
            }
            _ if u.ratio(1, 8)? => {
                self.tampered = true;
                self.frontend.disconnect("fuzz");
            }
            _ => {}
        }
        Ok(())
    }

    fn submit(&mut self, s: usize, u: &mut Unstructured<'_>) -> Result<()> {
        let mut batch = Vec::new();
        let mut at = u.int_in_range(0..=SECTORS - 1)?;
        for _ in 0..u.int_in_range(1..=6)? {
            let Some(slot) = self.free.pop() else { break };
            let op = *u.choose(&[
                Op::Read,
                Op::Write,
                Op::Read,
                Op::Write,
                Op::Flush,
                Op::Discard,
            ])?;
            let sectors = u.int_in_range(1..=16u64)?;
            if u.ratio(1, 4)? {
                at = u.int_in_range(0..=SECTORS - 1)?;
            }
            let mut request = match op {
                Op::Flush => Request::new(op, 0, 0, self.next_tag),
                Op::Discard => Request::new(op, at, sectors, self.next_tag),
                _ => {
                    let skip = u.int_in_range(0..=15usize)? * 512;
                    let buffer = self.slots[slot].slice(skip, sectors as usize * 512);
                    Request::with_buffers(op, at, buffer.into_iter().collect(), self.next_tag)
                }
            };
            for b in &request.buffers {
                for i in 0..sectors {
                    let bytes = if op == Op::Write {
                        pattern(at + i)
                    } else {
                        [0; 512]
                    };
                    b.write(i as usize * 512, &bytes);
                }
            }
            if u.ratio(1, 6)? {
                request.flags = match op {
                    Op::Discard => RequestFlags::SECURE,
                    _ => RequestFlags::FUA,
                };
            }
            self.in_flight.insert(self.next_tag, (s, slot));
            self.next_tag += 1;
            at = if at + sectors < SECTORS {
                at + sectors
            } else {
                0
            };
            batch.push(request);
        }
        self.queues[s].submit(&mut batch);
        Ok(())
    }

    /// Returns how many succeeded.
    fn poll(&mut self, s: usize) -> usize {
        let mut done = Vec::new();
        let mut good = 0;
        self.queues[s].poll(&mut done);
        for c in done {
            let r = &c.request;
            let (submitter, slot) = self.in_flight.remove(&r.tag).expect("completed twice");
            assert_eq!(submitter, s, "somebody else's");
            self.free.push(slot);
            good += usize::from(c.status == Status::Ok);
            if self.tampered {
                continue;
            }
            if c.status == Status::Ok && r.op == Op::Read {
                let data: Vec<u8> = r.buffers.iter().flat_map(Buffer::to_vec).collect();
                for (i, got) in data.chunks(512).enumerate() {
                    assert_eq!(got, pattern(r.sector + i as u64), "sector {} of {r:?}", i);
                }
            }
            // The handle refuses what the disk can't do; everything else is the back end's word.
            let refused = match c.status {
                Status::Ok => true,
                Status::Invalid => r.end() > SECTORS,
                Status::ReadOnly => self.frontend.limits().read_only && r.op.is_write(),
                Status::Unsupported => r.op == Op::Discard || self.errors,
                _ => self.errors,
            };
            assert!(refused, "{:?} without a reason: {r:?}", c.status);
        }
        good
    }

    /// The back end answers a request as if it had been another operation: that is never a success.
    fn wrong_operation(&mut self, r: usize, operation: u8) {
        self.look(r);
        let all = 0..self.queues.len();
        // First whatever was answered honestly.
        for s in all.clone() {
            self.poll(s);
        }
        let ring = &mut self.rings[r];
        let other = |seen: &mut Seen| seen.echo != operation;
        let Some(seen) = ring.seen.pop_if(other) else {
            return;
        };
        ring.respond(seen.id, operation, 0);
        ring.publish();
        self.tampered = true;
        let good: usize = all.map(|s| self.poll(s)).sum();
        assert_eq!(good, 0, "an answer to another operation is taken");
    }

    /// The back end takes what is new.
    fn look(&mut self, r: usize) {
        let honest = !self.tampered;
        let ring = &mut self.rings[r];
        let prod = ring.pages.atomic_u32(0).load(Ordering::Acquire);
        let new = prod.wrapping_sub(ring.req_cons);
        assert!(!honest || new <= ring.entries, "more requests than entries");
        for _ in 0..new.min(ring.entries) {
            let mut e = [0u8; 112];
            ring.pages.read(ring.slot(ring.req_cons), &mut e);
            ring.req_cons = ring.req_cons.wrapping_add(1);
            let seen = self.table.read(&self.memory, &e);
            assert!(!honest || seen.is_some(), "a malformed request: {e:?}");
            if let Some(seen) = seen {
                let twice = ring.seen.iter().any(|s| s.id == seen.id);
                assert!(!honest || !twice, "an id is used twice");
                ring.seen.push(seen);
            }
        }
    }

    /// The back end does one request and prepares its answer.
    fn answer(&mut self, r: usize, pick: usize, status: i16) {
        let ring = &mut self.rings[r];
        if ring.seen.is_empty() {
            return;
        }
        let seen = ring.seen.swap_remove(pick % ring.seen.len());
        self.errors |= status != 0;
        let mut sector = seen.sector;
        for raw in &seen.segments {
            let Some((at, read_only)) = self.table.resolve(raw) else {
                assert!(self.tampered, "the grant ended before the request");
                continue;
            };
            for i in 0..=usize::from(raw[5] - raw[4]) {
                let at = at + i * 512;
                if seen.echo == 0 && status == 0 {
                    assert!(self.tampered || !read_only, "a read into a read-only page");
                    self.memory.write(at, &pattern(sector));
                } else if seen.echo == 1 && !self.tampered {
                    let mut got = [0; 512];
                    self.memory.read(at, &mut got);
                    assert_eq!(got, pattern(sector), "wrong data for sector {sector}");
                }
                sector += 1;
            }
        }
        ring.respond(seen.id, seen.echo, status);
    }

    fn end(&mut self) {
        if self.tampered {
            self.frontend.disconnect("the end");
        }
        for _ in 0..200 {
            for r in 0..self.rings.len() {
                if !self.tampered {
                    self.look(r);
                    while !self.rings[r].seen.is_empty() {
                        self.answer(r, 0, 0);
                    }
                    self.rings[r].publish();
                }
            }
            for s in 0..self.queues.len() {
                self.poll(s);
            }
            if self.in_flight.is_empty() {
                break;
            }
        }
        assert!(
            self.in_flight.is_empty(),
            "requests never complete (honest: {}): {:?}",
            !self.tampered,
            self.in_flight
        );
        assert!(self.queues.iter().all(|q| q.in_flight() == 0));
        if !self.tampered && !self.persistent {
            assert!(self.table.is_empty(), "a grant is left");
        }
    }
}

impl Ring {
    fn slot(&self, index: u32) -> usize {
        64 + (index % self.entries) as usize * 112
    }

    fn respond(&mut self, id: u64, operation: u8, status: i16) {
        let bytes = crate::ring_model::response(id, operation, status);
        self.pages.write(self.slot(self.rsp_prod), &bytes);
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    fn publish(&mut self) {
        self.pages
            .atomic_u32(8)
            .store(self.rsp_prod, Ordering::Release);
    }
}
