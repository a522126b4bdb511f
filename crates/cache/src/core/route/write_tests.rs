//! Writes with write-through on a device that fails, and the reads after them; requests to a device that has become smaller.

use crate::config::{CacheConfig, Mode};
use crate::core::{Copies, Core, Io, Out, Store};
use crate::policy::Standard;
use crate::readahead::Hint;
use crate::table::Table;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Limits, Op, Region, Request, SECTOR, Status};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

const FRAMES: usize = 16;
const SECTORS: u64 = 64;
const HINT: Hint = Hint {
    stream: 0,
    sequential: false,
};

/// A core, most with write-through, over a device that does each I/O when it is told to. A sector's first byte is its contents.
struct Bench {
    core: Core,
    medium: [u8; SECTORS as usize],
    at_device: VecDeque<Io>,
    /// Tags of requests that have completed, how, and what they read.
    done: Vec<(u64, Status, u8)>,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(Mode::WriteThrough)
    }

    fn with(mode: Mode) -> Bench {
        let mut config = CacheConfig::new((FRAMES * 4096) as u64);
        config.mode = mode;
        config.readahead_bytes = Some(0);
        config.lists = 1;
        let store = Store {
            table: Arc::new(Table::new(FRAMES)),
            region: Arc::new(Region::anonymous(FRAMES * 4096).unwrap()),
            memory: Gauge::new("test", MemoryKind::Anonymous, 1 << 20),
        };
        let limits = Limits::default();
        let now = Instant::now();
        let mut core = Core::new(&config, Standard, limits, SECTORS, store, 1, now);
        core.open(1, 0);
        Bench {
            core,
            medium: [0; SECTORS as usize],
            at_device: VecDeque::new(),
            done: Vec::new(),
        }
    }

    fn submit(&mut self, op: Op, sector: u64, sectors: usize, contents: u8, tag: u64) {
        let buffer = Buffer::anonymous(sectors * SECTOR as usize).unwrap();
        buffer.write(0, &vec![contents; buffer.len()]);
        let request = Request::with_buffers(op, sector, vec![buffer], tag);
        self.core.submit(1, request, HINT, Copies::Inside);
        self.take_out();
    }

    fn take_out(&mut self) {
        let mut out = Out::default();
        self.core.take_out(&mut out);
        self.at_device.extend(out.ios);
        for done in out.done.into_iter().map(|done| done.completion) {
            let contents = done.request.buffers.first().map_or(0, first_byte);
            self.done.push((done.request.tag, done.status, contents));
        }
        self.core.check().unwrap();
    }

    /// The oldest I/O at the device ends.
    fn end_one(&mut self, status: Status) {
        let io = self
            .at_device
            .pop_front()
            .expect("nothing is at the device");
        if status == Status::Ok {
            self.transfer(&io.request);
        }
        self.core.ended(io.request, status);
        self.take_out();
    }

    fn transfer(&mut self, request: &Request) {
        let mut sector = request.sector as usize;
        for buffer in &request.buffers {
            for at in (0..buffer.len()).step_by(SECTOR as usize) {
                let contents = &mut self.medium[sector];
                match request.op {
                    Op::Read => buffer.write(at, &[*contents; SECTOR as usize]),
                    Op::Write => buffer.read(at, std::slice::from_mut(contents)),
                    _ => {}
                }
                sector += 1;
            }
        }
    }

    /// All I/O at the device ends well.
    fn end_all(&mut self) {
        while !self.at_device.is_empty() {
            self.end_one(Status::Ok);
        }
    }

    /// Writes at the device fail and reads work, until none is there.
    fn fail_writes(&mut self) {
        while let Some(io) = self.at_device.front() {
            let status = match io.request.op {
                Op::Write => Status::IoError,
                _ => Status::Ok,
            };
            self.end_one(status);
        }
    }

    /// Reads a sector, with the reads at the device that it needs. Returns its contents.
    fn read(&mut self, sector: u64) -> u8 {
        const TAG: u64 = 1000;
        self.submit(Op::Read, sector, 1, 0, TAG);
        loop {
            if let Some(at) = self.done.iter().position(|d| d.0 == TAG) {
                let (_, status, contents) = self.done.remove(at);
                assert_eq!(status, Status::Ok);
                return contents;
            }
            let is_read = |io: &Io| io.request.op == Op::Read;
            let at = self.at_device.iter().position(is_read);
            let read = self.at_device.remove(at.unwrap()).unwrap();
            self.at_device.push_front(read);
            self.end_one(Status::Ok);
        }
    }

    fn statuses(&self) -> Vec<(u64, Status)> {
        let mut all: Vec<_> = self.done.iter().map(|d| (d.0, d.1)).collect();
        all.sort_by_key(|d| d.0);
        all
    }
}

fn first_byte(buffer: &Buffer) -> u8 {
    let mut byte = 0;
    buffer.read(0, std::slice::from_mut(&mut byte));
    byte
}

/// Write 2 comes while write 1 is at the device, so it has a frame of its own with a copy of write 1.
fn two_writes(second: (u64, usize)) -> Bench {
    let mut bench = Bench::new();
    bench.medium[..8].fill(7);
    bench.submit(Op::Write, 0, 1, 1, 1);
    // The rest of the page.
    bench.end_one(Status::Ok);
    bench.submit(Op::Write, second.0, second.1, 2, 2);
    assert_eq!((bench.at_device.len(), bench.done.len()), (1, 0));
    bench
}

/// Reads that begin after a write has failed find what the device has, also while another write to its page waits. Seed 50491 of the simulation found the failed write, and then the
/// contents of before.
#[test]
fn a_write_that_failed_is_not_read_and_then_gone() {
    let mut bench = two_writes((1, 1));
    bench.end_one(Status::IoError);
    assert_eq!(bench.statuses()[0], (1, Status::IoError));
    let while_others_wait = bench.read(0);
    bench.fail_writes();
    let after_all_failed = bench.read(0);
    assert_eq!((while_others_wait, after_all_failed), (7, 7));
    let failed = Status::IoError;
    assert_eq!(bench.statuses(), [(1, failed), (2, failed)]);
    // The page can be written again.
    bench.submit(Op::Write, 1, 1, 3, 3);
    bench.end_all();
    assert_eq!(bench.statuses()[2], (3, Status::Ok));
    assert_eq!(bench.medium[..3], [7, 3, 7]);
}

/// The device has what was completed, also if a later write of the page fails.
#[test]
fn the_older_version_is_written_and_the_newer_one_fails() {
    let mut bench = two_writes((1, 1));
    bench.end_one(Status::Ok);
    bench.end_one(Status::IoError);
    let expected = [(1, Status::Ok), (2, Status::IoError)];
    assert_eq!(bench.statuses(), expected);
    assert_eq!((bench.read(0), bench.read(1)), (1, 7));
}

/// A write of the whole page has no data of the one that failed: it is tried.
#[test]
fn a_whole_page_is_written_though_its_older_version_failed() {
    let mut bench = two_writes((0, 8));
    bench.end_one(Status::IoError);
    assert_eq!(bench.statuses(), [(1, Status::IoError)]);
    bench.end_one(Status::Ok);
    assert_eq!(bench.statuses()[1], (2, Status::Ok));
    assert_eq!(bench.medium[..9], [2, 2, 2, 2, 2, 2, 2, 2, 0]);
    assert_eq!(bench.read(0), 2);
}

/// The part of a page that the device still has is written, and nothing more: a request beyond the end fails, again and again.
#[test]
fn a_dirty_page_over_a_new_end_is_written_as_far_as_the_device_goes() {
    let mut bench = Bench::with(Mode::WriteBack);
    for (sector, tag) in [(32, 1), (40, 2)] {
        bench.submit(Op::Write, sector, 8, 3, tag);
    }
    bench.end_all();
    assert_eq!(bench.statuses(), [(1, Status::Ok), (2, Status::Ok)]);
    assert!(!bench.core.resize(36));
    bench.take_out();
    assert_eq!(bench.at_device.len(), 1);
    let write = &bench.at_device[0].request;
    assert_eq!((write.op, write.sector, write.sectors), (Op::Write, 32, 4));
    bench.end_one(Status::IoError);
    // Not at once: the device fails.
    assert!(!bench.core.resize(36));
    bench.take_out();
    assert!(bench.at_device.is_empty());
    let flush = Request::new(Op::Flush, 0, 0, 5);
    bench.core.submit(1, flush, HINT, Copies::Inside);
    bench.take_out();
    bench.end_all();
    assert_eq!(bench.statuses().last(), Some(&(5, Status::Ok)));
    assert!(bench.core.resize(36));
    assert_eq!(bench.medium[31..41], [0, 3, 3, 3, 3, 0, 0, 0, 0, 0]);
}

/// A request may go on after its page has gone with a part of the device. It did so for ever, with the core's lock.
#[test]
fn requests_behind_a_new_end_fail() {
    let mut bench = Bench::new();
    assert_eq!(bench.read(40), 0);
    let before = bench.done.len();
    assert!(bench.core.resize(36));
    // Of a page that has gone, over the end, and of the part that is left.
    for (sector, sectors, tag) in [(40, 1, 7), (32, 8, 8), (32, 4, 9)] {
        bench.submit(Op::Read, sector, sectors, 0, tag);
    }
    bench.end_all();
    for (sector, sectors, tag) in [(40, 1, 10), (32, 8, 11), (32, 4, 12)] {
        bench.submit(Op::Write, sector, sectors, 3, tag);
    }
    bench.end_all();
    let (failed, ok) = (Status::IoError, Status::Ok);
    let expected = [
        (7, failed),
        (8, failed),
        (9, ok),
        (10, failed),
        (11, failed),
        (12, ok),
    ];
    assert_eq!(bench.statuses()[before..], expected);
    assert_eq!(bench.medium[31..41], [0, 3, 3, 3, 3, 0, 0, 0, 0, 0]);
}
