//! Random operations on both sides of a ring, over two mappings of one memory file, compared with a plain queue.
//!
//! Each test prints its seed; `PVBLK_SEED=N` runs it again.

use pvblk_protocol::blkif::index::{Consumer, Producer, should_notify};
use pvblk_protocol::blkif::wire::{
    DiscardRequest, ENTRY_SIZE, Entry, IndirectRequest, RequestHeader, Response, Segment,
};
use pvblk_protocol::blkif::{BackRing, FrontRing, RingSize};
use pvblk_sys::{PAGE_SIZE, Region, create_sealed};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use zerocopy::IntoBytes;

/// Offset of the entries on the pages (ring.h).
const ENTRIES: usize = 64;

/// Mappings of the same pages for the front end, the back end, and the test.
fn pages(count: usize) -> (Region, Region, Region) {
    let fd = create_sealed("ring-test", (count * PAGE_SIZE) as u64).unwrap();
    let map = || Region::shared(fd.as_fd(), 0, count * PAGE_SIZE, true).unwrap();
    (map(), map(), map())
}

/// The notification rule as plain arithmetic: the armed event lies in `(old, new]`.
fn passes(old: u64, new: u64, event: u64) -> bool {
    (old + 1..=new).any(|k| k == event)
}

/// A request that was put, with the bytes that must come out at the other side.
struct Put {
    id: u64,
    operation: u8,
    bytes: Vec<u8>,
}

/// Counters of one direction, without wrap.
#[derive(Default)]
struct Direction {
    filled: u64,
    visible: u64,
    taken: u64,
    /// The consumer's armed event; 1 at the start.
    event: u64,
    notified: u64,
}

impl Direction {
    /// Publishes; true if the consumer must be notified.
    fn publish(&mut self) -> bool {
        let notify = passes(self.visible, self.filled, self.event);
        self.visible = self.filled;
        self.notified += u64::from(notify);
        notify
    }

    /// Arms; true if there is an entry already.
    fn arm(&mut self) -> bool {
        self.event = self.taken + 1;
        self.visible > self.taken
    }
}

struct Model {
    front: FrontRing,
    back: BackRing,
    raw: Region,
    requests: Direction,
    responses: Direction,
    sent: VecDeque<Put>,
    unanswered: Vec<(u64, u8)>,
    answers: VecDeque<Response>,
    next_id: u64,
}

impl Model {
    fn new(page_count: usize) -> Model {
        let (ours, theirs, raw) = pages(page_count);
        let front = FrontRing::new(ours).unwrap();
        // Bytes of an earlier use: bytes that a side doesn't write must not matter, and padding must be written.
        raw.write(ENTRIES, &vec![0xff; page_count * PAGE_SIZE - ENTRIES]);
        let fresh = || Direction {
            event: 1,
            ..Direction::default()
        };
        Model {
            front,
            back: BackRing::new(theirs).unwrap(),
            raw,
            requests: fresh(),
            responses: fresh(),
            sent: VecDeque::new(),
            unanswered: Vec::new(),
            answers: VecDeque::new(),
            next_id: 0,
        }
    }

    fn offset_of(&self, index: u64) -> usize {
        ENTRIES + (index % u64::from(self.front.entries())) as usize * ENTRY_SIZE
    }

    fn put(&mut self, rng: &mut fastrand::Rng) {
        let outstanding = self.requests.filled - self.responses.taken;
        assert_eq!(u64::from(self.front.outstanding()), outstanding);
        if self.front.room() == 0 {
            return;
        }
        self.next_id = self
            .next_id
            .wrapping_mul(6364136223846793005)
            .wrapping_add(rng.u64(..));
        let id = self.next_id;
        let operation = rng.u8(..);
        let bytes = match rng.u8(0..3) {
            0 => {
                let header = RequestHeader {
                    operation,
                    nr_segments: rng.u8(..),
                    handle: rng.u16(..),
                    pad: 0,
                    id,
                    sector_number: rng.u64(..),
                };
                let segments: Vec<Segment> = (0..rng.usize(0..=11))
                    .map(|_| Segment {
                        gref: rng.u32(..),
                        first_sect: rng.u8(..),
                        last_sect: rng.u8(..),
                        pad: 0,
                    })
                    .collect();
                self.front.put_rw(&header, &segments);
                [header.as_bytes(), segments.as_bytes()].concat()
            }
            1 => {
                let discard = DiscardRequest {
                    operation,
                    flag: rng.u8(..),
                    handle: 0,
                    pad: 0,
                    id,
                    sector_number: rng.u64(..),
                    nr_sectors: rng.u64(..),
                };
                self.front.put(&discard);
                discard.as_bytes().to_vec()
            }
            _ => {
                let indirect = IndirectRequest {
                    operation,
                    indirect_op: rng.u8(..),
                    nr_segments: rng.u16(..),
                    pad: 0,
                    id,
                    sector_number: rng.u64(..),
                    handle: 0,
                    pad2: 0,
                    indirect_grefs: std::array::from_fn(|_| rng.u32(..)),
                    pad3: 0,
                };
                self.front.put(&indirect);
                indirect.as_bytes().to_vec()
            }
        };
        self.requests.filled += 1;
        self.sent.push_back(Put {
            id,
            operation,
            bytes,
        });
    }

    fn take_request(&mut self) {
        let mut entry = Entry::default();
        let got = self.back.take(&mut entry).unwrap();
        assert_eq!(got, self.requests.visible > self.requests.taken);
        if got {
            let put = self.sent.pop_front().unwrap();
            assert_eq!((entry.id(), entry.operation()), (put.id, put.operation));
            assert_eq!(&entry.bytes()[..put.bytes.len()], &put.bytes[..]);
            self.requests.taken += 1;
            self.unanswered.push((put.id, put.operation));
        }
        assert_eq!(self.back.unanswered() as usize, self.unanswered.len());
    }

    fn respond(&mut self, rng: &mut fastrand::Rng) {
        if self.unanswered.is_empty() {
            return;
        }
        let at = rng.usize(..self.unanswered.len());
        let (id, operation) = self.unanswered.swap_remove(at);
        let status = rng.i16(..);
        let slot = self.offset_of(self.responses.filled);
        let mut before = [0; ENTRY_SIZE];
        self.raw.read(slot, &mut before);
        self.back.respond(id, operation, status);
        let mut after = [0; ENTRY_SIZE];
        self.raw.read(slot, &mut after);
        assert_eq!(after[..8], id.to_ne_bytes());
        assert_eq!(after[8], operation);
        assert_eq!(after[9], 0, "padding leaks");
        assert_eq!(after[10..12], status.to_ne_bytes());
        assert_eq!(after[12..16], [0; 4], "padding leaks");
        assert_eq!(after[16..], before[16..], "only the response is written");
        self.responses.filled += 1;
        self.answers.push_back(Response {
            id,
            operation,
            pad: 0,
            status,
            pad2: 0,
        });
    }

    fn take_response(&mut self) {
        let got = self.front.take().unwrap();
        assert_eq!(got.is_some(), self.responses.visible > self.responses.taken);
        if let Some(response) = got {
            assert_eq!(Some(response), self.answers.pop_front());
            self.responses.taken += 1;
        }
    }

    fn step(&mut self, rng: &mut fastrand::Rng, eager: u8) {
        match rng.u8(0..8) {
            // The share of turns of the producing side decides how full the ring gets.
            0 => (0..rng.u8(0..=eager)).for_each(|_| self.put(rng)),
            1 => assert_eq!(self.front.publish(), self.requests.publish()),
            2 => (0..rng.u8(0..=eager)).for_each(|_| self.take_request()),
            3 => (0..rng.u8(0..=eager)).for_each(|_| self.respond(rng)),
            4 => assert_eq!(self.back.publish(), self.responses.publish()),
            5 => (0..rng.u8(0..=eager)).for_each(|_| self.take_response()),
            6 => assert_eq!(self.back.arm(), self.requests.arm()),
            _ => assert_eq!(self.front.arm(), self.responses.arm()),
        }
    }
}

#[test]
fn rings_of_all_sizes_are_queues() {
    let mut rng = pvblk_testing::random();
    for page_count in [1, 2, 4, 8, 16] {
        let mut model = Model::new(page_count);
        let entries = u64::from(model.front.entries());
        while model.requests.filled < 1 << 17 {
            let eager = rng.u8(1..=64);
            for _ in 0..1000 {
                model.step(&mut rng, eager);
            }
        }
        let rounds = model.responses.taken / entries;
        assert!(rounds > 10, "the ring went round only {rounds} times");
        assert!(model.requests.notified > 10 && model.responses.notified > 10);
        assert!(
            model.requests.notified < model.requests.filled,
            "some were suppressed"
        );
    }
}

/// The same indices at the 32-bit wrap, which pages that start at zero reach only after 2^32 entries.
#[test]
fn indices_wrap_in_the_middle_of_everything() {
    let mut rng = pvblk_testing::random();
    for _ in 0..200 {
        let start = 0u32.wrapping_sub(rng.u32(0..200));
        let (prod, event) = (AtomicU32::new(start), AtomicU32::new(start.wrapping_add(1)));
        let mut p = Producer::starting_at(start);
        let mut c = Consumer::starting_at(start);
        let size = 1u32 << rng.u32(0..7);
        let mut model = Direction {
            event: 1,
            ..Direction::default()
        };
        for _ in 0..600 {
            match rng.u8(0..4) {
                0 if model.filled - model.taken < u64::from(size) => {
                    p.advance();
                    model.filled += 1;
                }
                0 => {}
                1 => assert_eq!(p.publish(&prod, &event), model.publish()),
                2 => {
                    let found = c.refresh(&prod, size).unwrap();
                    assert_eq!(u64::from(found), model.visible - model.taken);
                    for _ in 0..rng.u32(0..=found) {
                        c.advance();
                        model.taken += 1;
                    }
                }
                _ => assert_eq!(c.arm(&prod, &event), model.arm()),
            }
            assert_eq!(c.next(), start.wrapping_add(model.taken as u32));
            assert_eq!(
                prod.load(Ordering::Relaxed),
                start.wrapping_add(model.visible as u32)
            );
            assert_eq!(
                event.load(Ordering::Relaxed),
                start.wrapping_add(model.event as u32)
            );
        }
    }
}

#[test]
fn the_notification_rule_is_the_interval() {
    let mut rng = pvblk_testing::random();
    for _ in 0..100_000 {
        let old = rng.u32(..);
        let ahead = rng.u32(0..1000);
        let away = rng.i32(-1500..1500);
        let new = old.wrapping_add(ahead);
        let event = old.wrapping_add_signed(away);
        let expected = (1..=i64::from(ahead)).contains(&i64::from(away));
        assert_eq!(
            should_notify(old, new, event),
            expected,
            "{old} {new} {event}"
        );
    }
}

/// As many entries as the ring has room for are valid; one more is not, and each side reports it.
#[test]
fn an_index_too_far_ahead_is_detected_by_both_sides() {
    for page_count in [1, 16] {
        let entries = RingSize::from_pages(page_count).unwrap().entries();
        let mut entry = Entry::default();

        let (_, theirs, raw) = pages(page_count);
        let mut back = BackRing::new(theirs).unwrap();
        raw.atomic_u32(0).store(entries, Ordering::Relaxed);
        for _ in 0..entries {
            assert!(back.take(&mut entry).unwrap());
        }
        assert!(!back.take(&mut entry).unwrap());
        back.respond(1, 0, 0);
        raw.atomic_u32(0).store(entries + 2, Ordering::Relaxed);
        let broken = back.take(&mut entry).unwrap_err();
        assert_eq!((broken.distance, broken.limit), (2, 1));
        raw.atomic_u32(0).store(entries - 1, Ordering::Relaxed);
        assert_eq!(back.take(&mut entry).unwrap_err().distance, u32::MAX);

        let (ours, _, raw) = pages(page_count);
        let mut front = FrontRing::new(ours).unwrap();
        raw.atomic_u32(8).store(1, Ordering::Relaxed);
        assert_eq!(front.take().unwrap_err().limit, 0);
        front.put(&RequestHeader::default());
        assert!(front.publish());
        assert!(front.take().unwrap().is_some());
        assert!(front.take().unwrap().is_none());
    }
}
