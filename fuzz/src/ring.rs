//! Target `ring`: a back end's queue against a front end that writes anything anywhere at any time.
//!
//! The oracle is exact: which requests come out and from which bytes, which responses are written when,
//! whether the peer is notified, which references are in use; and every byte of the shared memory.

use crate::guest::{CountingChannel, Guest, Maps, TableMapper};
use crate::parse_model::{Expected, Verdict, judge};
use crate::ring_model::{ENTRY, Indices, response};
use arbitrary::{Result, Unstructured};
use pvblk_backend::{BlkifQueueParts, BlkifSource, PullBatch, RequestSource, SourceEnd};
use pvblk_block::{Completion, Op, Readiness, Request, RequestFlags, Status};
use pvblk_protocol::blkif::BackRing;
use pvblk_sys::PAGE_SIZE;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Most steps of one input.
const STEPS: usize = 400;

struct Play {
    guest: Guest,
    source: BlkifSource,
    rung: Arc<AtomicU32>,
    maps: Arc<Mutex<Maps>>,
    counted: bool,
    max_indirect: u16,
    model: Indices,
    /// Most requests that one pull takes.
    batch: PullBatch,
    expected: BTreeMap<u64, Expected>,
    at_device: Vec<Box<Request>>,
    broken: bool,
    /// The peer's own producer index, when it is honest.
    honest: u32,
    written: u8,
}

pub fn ring(data: &[u8]) {
    let mut u = Unstructured::new(data);
    // Ends when the bytes do.
    let _ = play(&mut u);
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let pages = *u.choose(&[1, 1, 1, 1, 2, 4, 8, 16])?;
    let mut guest = Guest::new(pages);
    let counted = u.arbitrary()?;
    let budget = if u.ratio(1, 4)? {
        u.int_in_range(0..=40)?
    } else {
        usize::MAX
    };
    let maps = Arc::new(Mutex::new(Maps {
        budget,
        ..Maps::default()
    }));
    let max_indirect = *u.choose(&[0, 1, 32, 256, 513, 5000])?;
    let (channel, rung) = CountingChannel::new();
    let ring = guest
        .ring
        .take()
        .and_then(BackRing::new)
        .expect("a ring's size");
    let size = ring.entries();
    let source = BlkifSource::new(BlkifQueueParts {
        name: "fuzz".into(),
        ring,
        channel: Box::new(channel),
        mapper: Box::new(TableMapper::new(&guest, counted, Arc::clone(&maps))),
        max_indirect_segments: max_indirect,
    });
    assert_eq!(source.depth(), size);
    let batch = PullBatch::default();
    // Both would go by the time that passes here.
    for choice in [Some(Arc::clone(batch.choice())), source.pull_choice()] {
        choice.expect("it chooses").fix(8);
    }
    let mut play = Play {
        guest,
        source,
        rung,
        maps,
        counted,
        max_indirect,
        model: Indices {
            size,
            ..Indices::default()
        },
        batch,
        expected: BTreeMap::new(),
        at_device: Vec::new(),
        broken: false,
        honest: 0,
        written: 0,
    };
    let result = (0..STEPS).try_for_each(|_| play.step(u));
    // The lane lets everything complete, then drops the source.
    play.complete(play.at_device.len(), &mut Unstructured::new(&[]));
    play.push();
    assert_eq!(play.model.unanswered(), 0, "a request without an answer");
    assert_eq!(play.maps.lock().expect("one thread").total, 0);
    result
}

impl Play {
    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=15)? {
            0..=2 => self.pull(u.int_in_range(1..=64)?),
            3 | 4 => {
                let n = u.int_in_range(0..=self.at_device.len().min(40))?;
                self.complete(n, u);
            }
            5 => self.push(),
            6 => self.arm(),
            7..=10 => self.put(u)?,
            11 => self.indices(u)?,
            12 => {
                let at = u.int_in_range(0..=self.guest.shadow.len() - 1)?;
                let n = u.int_in_range(1..=64)?;
                self.guest.poke(at, u.bytes(n)?);
            }
            13 => self.segments(u)?,
            14 => {
                let frame = u.int_in_range(0..=self.guest.frames() as u32)?;
                self.guest
                    .grant(u.int_in_range(0..=40)?, frame, u.arbitrary()?);
            }
            _ => {
                let at = u.int_in_range(0..=self.guest.ring_pages * PAGE_SIZE - 1)?;
                self.guest.poke(at, &[u.arbitrary()?]);
            }
        }
        Ok(())
    }

    /// The peer puts a request that is mostly good.
    fn put(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut e = [0u8; ENTRY];
        e[0] = *u.choose(&[0, 0, 1, 1, 2, 3, 5, 6, 6, 4])?;
        e[8..16].copy_from_slice(&u.arbitrary::<u64>()?.to_ne_bytes());
        e[16..24].copy_from_slice(&u.arbitrary::<u16>().map(u64::from)?.to_ne_bytes());
        match e[0] {
            5 => {
                e[1] = u.arbitrary()?;
                e[24..32].copy_from_slice(&u.arbitrary::<u64>()?.to_ne_bytes());
            }
            6 => {
                e[1] = u.int_in_range(0..=2)?;
                let count: u16 = *u.choose(&[1, 11, 12, 32, 33, 256, 513, 4096, 4097, 0])?;
                e[2..4].copy_from_slice(&count.to_ne_bytes());
                for page in 0..8 {
                    let gref: u32 = u.int_in_range(7..=24)?;
                    e[28 + page * 4..32 + page * 4].copy_from_slice(&gref.to_ne_bytes());
                }
            }
            _ => {
                e[1] = u.int_in_range(0..=12)?;
                for i in 0..usize::from(e[1]).min(11) {
                    e[24 + i * 8..32 + i * 8].copy_from_slice(&segment(u)?);
                }
            }
        }
        let at = self.model.slot(self.honest);
        self.guest.poke(at, &e);
        self.honest = self.honest.wrapping_add(1);
        if u.ratio(3, 4)? {
            self.guest.poke(0, &self.honest.to_ne_bytes());
        }
        Ok(())
    }

    /// The peer fills a page with segments.
    fn segments(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let page = u.int_in_range(0..=crate::guest::DATA_PAGES - 1)?;
        let at = self.guest.data_frame(page) as usize * PAGE_SIZE;
        let one = segment(u)?;
        self.guest.poke(at, &one.repeat(512));
        for _ in 0..u.int_in_range(0..=8)? {
            let i = u.int_in_range(0..=511usize)?;
            self.guest.poke(at + i * 8, &segment(u)?);
        }
        Ok(())
    }

    /// The peer rewrites an index: near the true one, or anything.
    fn indices(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let at = 4 * u.int_in_range(0..=3usize)?;
        let base = *u.choose(&[self.model.next, self.model.filled, self.honest])?;
        let near =
            base.wrapping_add_signed(i32::from(u.arbitrary::<i16>()?) >> u.int_in_range(0..=12)?);
        let value = if u.ratio(1, 8)? { u.arbitrary()? } else { near };
        self.guest.poke(at, &value.to_ne_bytes());
        if at == 0 && value.wrapping_sub(self.model.next) <= self.model.size {
            self.honest = value;
        }
        Ok(())
    }

    fn respond(&mut self, id: u64, operation: u8, status: i16) {
        let at = self.model.slot(self.model.filled);
        self.guest.shadow[at..at + 16].copy_from_slice(&response(id, operation, status));
        self.model.filled = self.model.filled.wrapping_add(1);
    }

    fn pull(&mut self, room: usize) {
        // Room as the lane counts it.
        let room = room.min((self.model.size - self.model.unanswered()) as usize);
        if self.broken || room == 0 {
            return;
        }
        let mut out = Vec::new();
        let got = self.source.pull(room, &mut out);
        let mut live = self.uses_in_flight();
        let mut good = Vec::new();
        let mut breaks = false;
        let budget = self.maps.lock().expect("one thread").budget;
        let looked = self.model.look(self.guest.word(0));
        let pending = self.model.seen.wrapping_sub(self.model.next) as usize;
        let most = looked.map_or(1, |_| self.batch.next(pending));
        for _ in 0..room.min(most) {
            match self.model.look(self.guest.word(0)) {
                None => breaks = true,
                Some(false) => {}
                Some(true) => {
                    let at = self.model.slot(self.model.next);
                    let entry = self.guest.bytes::<ENTRY>(at);
                    self.model.next = self.model.next.wrapping_add(1);
                    let left = if self.counted {
                        budget - live
                    } else {
                        usize::MAX
                    };
                    match judge(&self.guest, &entry, self.max_indirect, left) {
                        Verdict::Good(e) => {
                            live += e.grefs.len();
                            good.push(e);
                        }
                        Verdict::Bad { id, echo, status } => self.respond(id, echo, status),
                    }
                    continue;
                }
            }
            break;
        }
        match got {
            Ok(pulled) => {
                assert!(!breaks, "an impossible index was not found");
                let order = RequestFlags::BARRIER | RequestFlags::PREFLUSH;
                assert_eq!(
                    pulled.ordered,
                    good.iter().any(|e| e.flags.intersects(order))
                );
            }
            Err(SourceEnd::Broken(why)) => {
                assert!(breaks, "a possible index was refused: {why}");
                self.broken = true;
            }
            Err(SourceEnd::Closed) => panic!("nobody closed"),
        }
        assert_eq!(out.len(), good.len(), "requests lost or invented");
        for (request, expected) in out.into_iter().zip(good) {
            self.compare(&request, &expected);
            let twice = self.expected.insert(request.tag, expected);
            assert!(twice.is_none(), "a tag is used twice");
            self.at_device.push(request);
        }
        assert!(self.model.unanswered() <= self.model.size);
        assert_eq!(self.model.unanswered() as usize, self.expected.len());
        self.check("pull");
    }

    fn compare(&self, request: &Request, expected: &Expected) {
        assert_eq!((request.op, request.flags), (expected.op, expected.flags));
        assert_eq!(
            (request.sector, request.sectors),
            (expected.sector, expected.sectors)
        );
        let mut data = Vec::new();
        for b in &request.buffers {
            assert!(
                Arc::ptr_eq(b.region(), &self.guest.memory),
                "memory of nobody"
            );
            assert!(!b.is_empty() && b.len().is_multiple_of(512));
            data.extend((0..b.len() / 512).map(|i| b.offset() + i * 512));
        }
        assert_eq!(data, expected.data, "data from or to the wrong place");
    }

    fn uses_in_flight(&self) -> usize {
        self.expected.values().map(|e| e.grefs.len()).sum()
    }

    /// The device completes `n` requests, in an order of the input's choice.
    fn complete(&mut self, n: usize, u: &mut Unstructured<'_>) {
        let mut done = Vec::new();
        for _ in 0..n {
            let at = u.int_in_range(0..=self.at_device.len() - 1).unwrap_or(0);
            let request = self.at_device.swap_remove(at);
            let statuses = [
                Status::Ok,
                Status::Ok,
                Status::IoError,
                Status::Unsupported,
                Status::Invalid,
            ];
            let status = *u.choose(&statuses).unwrap_or(&Status::Ok);
            let expected = self.expected.remove(&request.tag).expect("in flight");
            if request.op == Op::Read && status == Status::Ok {
                self.written = self.written.wrapping_add(1);
                for b in &request.buffers {
                    b.write(0, &vec![self.written; b.len()]);
                }
                for at in expected.data {
                    self.guest.shadow[at..at + 512].fill(self.written);
                }
            }
            done.push((request, status, expected.id, expected.echo));
        }
        for (_, status, id, echo) in &done {
            let code = match status {
                Status::Ok => 0,
                Status::Unsupported => -2,
                _ => -1,
            };
            if self.broken {
                // A ring that was found broken isn't written any more.
                self.model.filled = self.model.filled.wrapping_add(1);
            } else {
                self.respond(*id, *echo, code);
            }
        }
        let completion = |(request, status, _, _)| Completion { request, status };
        let mut done: Vec<_> = done.into_iter().map(completion).collect();
        self.source.complete(&mut done);
        assert!(done.is_empty(), "completions left");
        self.check("complete");
    }

    fn push(&mut self) {
        let before = self.rung.load(Ordering::Relaxed);
        assert!(self.source.push().is_ok());
        let mut notify = false;
        if !self.broken
            && let Some(n) = self.model.publish(self.guest.word(12))
        {
            notify = n;
            self.batch.pushed(notify);
            let prod = self.model.filled.to_ne_bytes();
            self.guest.shadow[8..12].copy_from_slice(&prod);
        }
        let rung = self.rung.load(Ordering::Relaxed) - before;
        assert_eq!(rung, u32::from(notify), "notified wrongly");
        self.check("push");
    }

    fn arm(&mut self) {
        if self.broken {
            return;
        }
        let ready = self.source.arm() == Readiness::Ready;
        let event = self.model.next.wrapping_add(1).to_ne_bytes();
        self.guest.shadow[4..8].copy_from_slice(&event);
        assert_eq!(ready, self.guest.word(0) != self.model.next);
        self.check("arm");
    }

    fn check(&mut self, after: &str) {
        self.guest.check(after);
        if self.counted {
            let mut uses: BTreeMap<u32, u32> = BTreeMap::new();
            for gref in self.expected.values().flat_map(|e| &e.grefs) {
                *uses.entry(*gref).or_default() += 1;
            }
            let maps = self.maps.lock().expect("one thread");
            assert_eq!(maps.live, uses, "references in use after {after}");
        }
    }
}

/// A segment that is mostly good.
fn segment(u: &mut Unstructured<'_>) -> Result<[u8; 8]> {
    let gref: u32 = if u.ratio(1, 16)? {
        u.arbitrary()?
    } else {
        u.int_in_range(8..=21)?
    };
    let (a, b) = (u.int_in_range(0..=8u8)?, u.int_in_range(0..=8u8)?);
    let whole = u.arbitrary::<bool>()?;
    let mut raw = [0; 8];
    raw[..4].copy_from_slice(&gref.to_ne_bytes());
    (raw[4], raw[5]) = if whole { (0, 7) } else { (a.min(b), a.max(b)) };
    Ok(raw)
}
