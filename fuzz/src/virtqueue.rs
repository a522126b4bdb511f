//! Target `virtqueue`: a guest writes what it likes into its rings, and every request, every answer and every byte of its memory
//! is compared with the model's.

use crate::virtqueue_model::{AVAILABLE, GUEST, MEMORY, TABLE, Terms, USED, Verdict, judge};
use arbitrary::{Result, Unstructured};
use pvblk_backend::{PullBatch, RequestSource, SourceEnd};
use pvblk_block::{Completion, Readiness, Region, Request, Status};
use pvblk_export::vhost_user::memory::GuestMemory;
use pvblk_export::vhost_user::virtqueue::Virtqueue;
use pvblk_export::vhost_user::{Shared, VhostQueueParts, VhostSource};
use pvblk_protocol::virtio::Offered;
use pvblk_protocol::virtio::Place;
use std::sync::Arc;

const ID: [u8; 20] = *b"the name of the disk";

pub fn virtqueue(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

/// The model's view of the queue.
struct Model {
    memory: Vec<u8>,
    terms: Terms,
    event_index: bool,
    next_available: u16,
    next_used: u16,
    quiet: bool,
    unpublished: bool,
    /// Most chains that one pull takes.
    batch: PullBatch,
    /// Head, place of its status, writable bytes.
    in_flight: Vec<(u16, usize, u32)>,
    /// Requests that are to come out of a pull.
    expected: Vec<(u16, Verdict)>,
}

impl Model {
    fn u16_at(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.memory[at], self.memory[at + 1]])
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn answer(&mut self, head: u16, at: usize, status: u8, written: u32) {
        self.put(at, &[status]);
        let slot = USED + 4 + usize::from(self.next_used % self.terms.entries) * 8;
        self.put(slot, &u32::from(head).to_le_bytes());
        self.put(slot + 4, &written.to_le_bytes());
        self.next_used = self.next_used.wrapping_add(1);
        self.unpublished = true;
    }

    /// Takes up to `room` chains; false if the queue is broken.
    fn pull(&mut self, room: usize) -> bool {
        let mut left = match room {
            0 => 0,
            _ => self.u16_at(AVAILABLE + 2).wrapping_sub(self.next_available),
        };
        if left > self.terms.entries {
            return false;
        }
        for _ in 0..room.min(self.batch.next(left.into())) {
            if left == 0 {
                left = self.u16_at(AVAILABLE + 2).wrapping_sub(self.next_available);
                if left > self.terms.entries {
                    return false;
                }
                if left == 0 {
                    break;
                }
            }
            left -= 1;
            let slot = usize::from(self.next_available % self.terms.entries);
            let head = self.u16_at(AVAILABLE + 4 + slot * 2);
            if head >= self.terms.entries {
                return false;
            }
            self.next_available = self.next_available.wrapping_add(1);
            if self.in_flight.iter().any(|f| f.0 == head) {
                return false;
            }
            match judge(&self.memory, self.terms, head) {
                Verdict::Broken => return false,
                Verdict::Answered {
                    status,
                    at,
                    written,
                    id,
                } => {
                    let mut name = &ID[..];
                    for (from, len) in id {
                        let (now, rest) = name.split_at(len.min(name.len()));
                        self.put(from, now);
                        name = rest;
                    }
                    self.answer(head, at, status, written);
                }
                request => {
                    if let Verdict::Request { at, writable, .. } = request {
                        self.in_flight.push((head, at, writable));
                    }
                    self.expected.push((head, request));
                }
            }
        }
        if !self.event_index && !self.quiet {
            self.put(USED, &1u16.to_le_bytes());
        }
        self.quiet = true;
        true
    }

    fn push(&mut self) {
        if std::mem::take(&mut self.unpublished) {
            self.put(USED + 2, &self.next_used.to_le_bytes());
        }
    }

    fn arm(&mut self) -> bool {
        self.quiet = false;
        match self.event_index {
            true => {
                let at = USED + 4 + usize::from(self.terms.entries) * 8;
                self.put(at, &self.next_available.to_le_bytes());
            }
            false => self.put(USED, &0u16.to_le_bytes()),
        }
        self.u16_at(AVAILABLE + 2) != self.next_available
    }
}

fn check(request: &Request, head: u16, expected: &Verdict) {
    let Verdict::Request {
        op,
        flags,
        sector,
        sectors,
        runs,
        ..
    } = expected
    else {
        panic!("{request:?}, must be {expected:?}")
    };
    assert_eq!(request.tag, u64::from(head));
    assert_eq!((request.op, request.flags), (*op, *flags));
    assert_eq!((request.sector, request.sectors), (*sector, *sectors));
    let places: Vec<_> = request
        .buffers
        .iter()
        .map(|b| (b.offset(), b.len()))
        .collect();
    assert_eq!(&places, runs);
}

/// A guest address: mostly one of the memory, with its edges.
fn address(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=15u8)? {
        0 => u.arbitrary()?,
        1 => GUEST + MEMORY as u64 - u.int_in_range(0..=520)?,
        2 => GUEST - u.int_in_range(0..=1)?,
        3 => GUEST + u64::from(u.arbitrary::<u16>()?) % MEMORY as u64,
        n => GUEST + 0x1000 + u64::from(n) * 0x400 + 512 * u.int_in_range(0..=1u64)?,
    })
}

fn descriptor(u: &mut Unstructured<'_>, index: u16) -> Result<[u8; 16]> {
    let len: u32 = match u.int_in_range(0..=11u8)? {
        0 => u.arbitrary()?,
        1 => u.int_in_range(0..=40)?,
        2 => u.int_in_range(0..=3)? * 512,
        3 | 4 => 1,
        5 => 513,
        6 => u.int_in_range(1..=4)? * 16,
        7 | 8 => 512,
        _ => 16,
    };
    let flags: u16 = match u.int_in_range(0..=31u8)? {
        0 => u.arbitrary()?,
        n => u16::from(n % 5),
    };
    let next = match u.int_in_range(0..=7u8)? {
        0 => u.arbitrary()?,
        1 => index,
        _ => index + 1,
    };
    let mut raw = [0; 16];
    raw[..8].copy_from_slice(&address(u)?.to_le_bytes());
    raw[8..12].copy_from_slice(&len.to_le_bytes());
    raw[12..14].copy_from_slice(&flags.to_le_bytes());
    raw[14..].copy_from_slice(&next.to_le_bytes());
    Ok(raw)
}

/// A good chain of descriptors from `head` on, to be spoilt by what comes after.
fn chain(u: &mut Unstructured<'_>, memory: &mut [u8], entries: u16) -> Result<()> {
    let head = u.int_in_range(0..=entries - 1)?;
    let kind = *u.choose(&[0u32, 0, 1, 1, 4, 8, 11, 13, 2])?;
    let place = 0x1000 + usize::from(head) * 64;
    memory[place..place + 4].copy_from_slice(&kind.to_le_bytes());
    memory[place + 8] = u.arbitrary()?;
    let at = |offset: usize| GUEST + offset as u64;
    let data = at(0x4000 + usize::from(head) * 0x400);
    let mut list = vec![(at(place), 16u32, 0u16)];
    match kind {
        0 => list.push((data, 512 * u.int_in_range(1..=2)?, 2)),
        1 => list.push((data, 512 * u.int_in_range(1..=2)?, 0)),
        8 => list.push((data, u.int_in_range(18..=24)?, 2)),
        11 | 13 => {
            memory[place + 16] = u.arbitrary()?;
            memory[place + 24] = 1;
            memory[place + 28] = u.int_in_range(0..=2)?;
            list.push((at(place + 16), 16, 0));
        }
        _ => {}
    }
    list.push((at(place + 63), 1, 2));
    let indirect = u.ratio(1, 3)?;
    let table = 0x2000 + usize::from(head) * 64;
    let count = list.len();
    for (i, (address, len, write)) in list.into_iter().enumerate() {
        let here = if indirect {
            i
        } else {
            (usize::from(head) + i) % usize::from(entries)
        };
        let from = if indirect {
            table + i * 16
        } else {
            TABLE + here * 16
        };
        let next = if indirect {
            i + 1
        } else {
            (here + 1) % usize::from(entries)
        };
        let more = u16::from(i + 1 < count);
        memory[from..from + 8].copy_from_slice(&address.to_le_bytes());
        memory[from + 8..from + 12].copy_from_slice(&len.to_le_bytes());
        memory[from + 12..from + 14].copy_from_slice(&(write | more).to_le_bytes());
        memory[from + 14..from + 16].copy_from_slice(&(next as u16).to_le_bytes());
    }
    if indirect {
        let from = TABLE + usize::from(head) * 16;
        memory[from..from + 8].copy_from_slice(&at(table).to_le_bytes());
        memory[from + 8..from + 12].copy_from_slice(&(count as u32 * 16).to_le_bytes());
        memory[from + 12..from + 16].copy_from_slice(&[4, 0, 0, 0]);
    }
    available(memory, entries, head);
    Ok(())
}

fn available(memory: &mut [u8], entries: u16, head: u16) {
    let index = u16::from_le_bytes([memory[AVAILABLE + 2], memory[AVAILABLE + 3]]);
    let slot = AVAILABLE + 4 + usize::from(index % entries) * 2;
    memory[slot..slot + 2].copy_from_slice(&head.to_le_bytes());
    memory[AVAILABLE + 2..AVAILABLE + 4].copy_from_slice(&index.wrapping_add(1).to_le_bytes());
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let entries = *u.choose(&[1u16, 4, 16])?;
    let terms = Terms {
        entries,
        indirect: u.ratio(7, 8)?,
        discard: u.arbitrary()?,
        write_zeroes: u.arbitrary()?,
    };
    let event_index = u.arbitrary()?;
    let base = if u.arbitrary()? { 0 } else { u.arbitrary()? };
    let region = Arc::new(Region::anonymous(MEMORY).expect("memory"));
    let part = |at| (Arc::clone(&region), at);
    let mut model = Model {
        memory: vec![0; MEMORY],
        terms,
        event_index,
        next_available: base,
        next_used: base,
        quiet: false,
        unpublished: false,
        batch: PullBatch::default(),
        in_flight: Vec::new(),
        expected: Vec::new(),
    };
    for at in [AVAILABLE + 2, USED + 2] {
        model.put(at, &base.to_le_bytes());
    }
    region.write(0, &model.memory);
    let place = Place {
        table: part(TABLE),
        available: part(AVAILABLE),
        used: part(USED),
    };
    let mut source = VhostSource::new(VhostQueueParts {
        name: "fuzz".into(),
        queue: Virtqueue::new(place, entries, base, event_index, terms.indirect),
        memory: GuestMemory::of_regions(vec![(GUEST, Arc::clone(&region))]),
        shared: Arc::new(Shared::default()),
        kick: None,
        inflight: None,
        offered: Offered {
            discard: terms.discard,
            write_zeroes: terms.write_zeroes,
        },
        id: ID,
    });
    // Both would go by the time that passes here.
    for choice in [Some(Arc::clone(model.batch.choice())), source.pull_choice()] {
        choice.expect("it chooses").fix(8);
    }
    let mut at_disk: Vec<Box<Request>> = Vec::new();
    let mut broken = false;
    while !u.is_empty() && !broken {
        let action = u.int_in_range(0..=9u8)?;
        match action {
            0 => {
                let index = u.int_in_range(0..=entries - 1)?;
                let raw = descriptor(u, index)?;
                model.put(TABLE + usize::from(index) * 16, &raw);
            }
            1 => {
                let (table, i) = (u.int_in_range(0..=entries - 1)?, u.int_in_range(0..=3u16)?);
                let raw = descriptor(u, i)?;
                model.put(0x2000 + usize::from(table) * 64 + usize::from(i) * 16, &raw);
            }
            2 => {
                let at = usize::from(u.arbitrary::<u16>()?) % MEMORY;
                // Not the used ring, which only the device writes; a guest that does breaks only what it reads itself.
                if !(USED..USED + 0x100).contains(&at) {
                    model.put(at, &[u.arbitrary()?]);
                }
            }
            3 => {
                let head = u.int_in_range(0..=entries)?;
                available(&mut model.memory, entries, head);
            }
            4..=6 => chain(u, &mut model.memory, entries)?,
            7 => {
                // The disk answers some.
                let n = u.int_in_range(0..=at_disk.len())?;
                let mut done: Vec<Completion> = Vec::new();
                for request in at_disk.drain(..n) {
                    let status = *u.choose(&[
                        Status::Ok,
                        Status::IoError,
                        Status::Unsupported,
                        Status::Invalid,
                    ])?;
                    let code = match status {
                        Status::Ok => 0,
                        Status::Unsupported => 2,
                        _ => 1,
                    };
                    let i = model
                        .in_flight
                        .iter()
                        .position(|f| u64::from(f.0) == request.tag);
                    let (head, at, writable) = model.in_flight.remove(i.expect("it is in flight"));
                    let read = request.op == pvblk_block::Op::Read;
                    model.answer(head, at, code, if read { writable } else { 1 });
                    done.push(Completion { request, status });
                }
                source.complete(&mut done);
                model.push();
                assert!(source.push().is_ok());
            }
            8 => {
                let ready = source.arm() == Readiness::Ready;
                assert_eq!(ready, model.arm());
            }
            _ => {
                region.write(0, &model.memory);
                let room = usize::from(entries) - at_disk.len();
                let mut out = Vec::new();
                let result = source.pull(room, &mut out);
                let good = model.pull(room);
                assert_eq!(result.is_ok(), good, "{:?}", result.err());
                let expected = std::mem::take(&mut model.expected);
                assert_eq!(out.len(), expected.len());
                for (request, (head, verdict)) in out.iter().zip(&expected) {
                    check(request, *head, verdict);
                }
                at_disk.append(&mut out);
                match result {
                    Ok(_) => {
                        model.push();
                        assert!(source.push().is_ok());
                    }
                    Err(SourceEnd::Broken(_)) => broken = true,
                    Err(SourceEnd::Closed) => panic!("closed"),
                }
            }
        }
        // What the device did shows in every byte; what the guest did is not in the region yet.
        if action >= 7 && !broken {
            let mut real = vec![0; MEMORY];
            region.read(0, &mut real);
            assert!(real == model.memory, "the device wrote something else");
        }
        if !broken {
            region.write(0, &model.memory);
        }
    }
    // A broken queue is not written any more.
    let mut before = vec![0; MEMORY];
    region.read(0, &mut before);
    let mut done: Vec<Completion> = at_disk
        .drain(..)
        .map(|request| Completion {
            request,
            status: Status::Ok,
        })
        .collect();
    source.complete(&mut done);
    let _ = source.push();
    if broken {
        let mut after = vec![0; MEMORY];
        region.read(0, &mut after);
        assert_eq!(before, after, "a broken queue was written");
    }
    Ok(())
}
