//! The requests in flight at a disk, and their work.

use super::Fails;
use super::image::Image;
use super::sabotage::{Fate, Flushes, Late, Sabotage, Why};
use crate::stamp::{self, FOREIGN, SECTOR_BYTES};
use pvblk_block::{Buffer, Completion, Op, Request, Status};
use pvblk_sys::EventFd;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A request at the disk.
pub struct Work {
    /// A unique number in order of submission.
    pub id: u64,
    pub request: Box<Request>,
    /// The data of a write when it was submitted, which may not change until it is done.
    pub carried: Vec<u8>,
    /// Indices of the request's sectors that are not done yet; the last is the next.
    pub left: Vec<u32>,
}

pub struct DiskQueue {
    pub work: Vec<Work>,
    /// Requests that are done and not taken: number and completion.
    pub done: Vec<(u64, Completion)>,
    pub armed: bool,
    pub wake_up: Arc<EventFd>,
    /// The user has a wake-up that it hasn't looked at.
    pub notified: bool,
    /// The user died: all later requests fail.
    pub dead: bool,
    /// The user closed the queue. Requests in flight go on.
    pub closed: bool,
}

pub struct State {
    pub image: Image,
    pub queues: Vec<DiskQueue>,
    pub late: Vec<Late>,
    /// The number of the last request or flush, which orders them.
    pub clock: u64,
    pub fails: Fails,
    /// Requests are neither done nor fail.
    pub stalled: bool,
    /// The user may give up requests of a disk that is slow, and use their memory for something else.
    pub given_up: bool,
    /// Sectors that can't be read until they are written.
    pub bad: BTreeSet<u64>,
    /// The incarnation, which changes when the cache is lost.
    pub mark: u64,
    pub trouble: Option<String>,
    pub sabotage: Sabotage,
    pub stamped: bool,
}

/// The completion of a request at a disk whose user is dead.
pub fn lost(request: Box<Request>) -> Completion {
    let status = Status::IoError;
    Completion { request, status }
}

impl DiskQueue {
    pub fn busy(&self) -> usize {
        if self.dead { 0 } else { self.work.len() }
    }
}

impl State {
    pub fn refuses(&self, op: Op) -> bool {
        match self.fails {
            _ if self.sabotage.hides_failure => false,
            Fails::Nothing => false,
            Fails::Reads => op == Op::Read,
            Fails::Writes => op != Op::Read,
            Fails::All => true,
        }
    }

    pub fn flush(&mut self, since: u64, queue: usize) {
        match self.sabotage.flushes {
            Flushes::All => self.image.flush(since, None),
            Flushes::OwnQueue => self.image.flush(since, Some(queue)),
            Flushes::None => {}
        }
    }

    /// Notes that the kernel will write the `index`-th sector of a write, though its process is
    /// dead.
    pub fn goes_on(&mut self, work: &Work, queue: usize, index: u32) {
        let at = index as usize * SECTOR_BYTES;
        let mut bytes = [0; SECTOR_BYTES];
        if let Some(carried) = work.carried.get(at..at + SECTOR_BYTES) {
            bytes.copy_from_slice(carried);
        }
        self.late.push(Late {
            sector: work.request.sector + u64::from(index),
            bytes,
            queue,
            id: work.id,
            why: Why::Killed,
        });
    }

    /// Reads or writes the `index`-th sector of a request.
    pub fn do_sector(&mut self, work: &Work, queue: usize, index: u32) -> Status {
        let r = &*work.request;
        let sector = r.sector + u64::from(index);
        let at = index as usize * SECTOR_BYTES;
        if r.op == Op::Read {
            if self.bad.contains(&sector) {
                return Status::IoError;
            }
            let bytes = self.image.current(sector);
            let (buffer, skip) = place(&r.buffers, at);
            buffer.write(skip, &bytes);
            return Status::Ok;
        }
        if r.op != Op::Write {
            if self.fails == Fails::Nothing {
                self.bad.remove(&sector);
            }
            self.image.write(sector, &[0; SECTOR_BYTES], queue, work.id);
            return Status::Ok;
        }
        let mut now = [0; SECTOR_BYTES];
        let (buffer, skip) = place(&r.buffers, at);
        buffer.read(skip, &mut now);
        if now != work.carried[at..at + SECTOR_BYTES] && !self.given_up {
            self.complain(format!(
                "a page changed while sector {sector} was written from it"
            ));
        }
        if self.stamped && stamp::name(&now, sector) & FOREIGN != 0 {
            let what = stamp::describe(&now, sector);
            self.complain(format!("a write puts {what} on sector {sector}"));
        }
        self.bad.remove(&sector);
        if self.fails != Fails::Nothing && self.sabotage.hides_failure {
            return Status::Ok;
        }
        // A late sector is written before the next write of the same sector.
        let promised = |l: &Late| l.sector == sector && l.why == Why::Promised;
        if let Some(at) = self.late.iter().position(promised) {
            let late = self.late.swap_remove(at);
            self.image.write(sector, &late.bytes, late.queue, late.id);
        }
        match self.sabotage.fate(sector, &work.carried, at) {
            Fate::Lost => {}
            Fate::Late => self.late.push(Late {
                sector,
                bytes: now,
                queue,
                id: work.id,
                why: Why::Promised,
            }),
            Fate::Instead(other) => self.image.write(sector, &other, queue, work.id),
            Fate::Done => {
                self.image.write(sector, &now, queue, work.id);
                self.sabotage.done(sector, &now, queue, work.id);
            }
        }
        Status::Ok
    }

    fn complain(&mut self, what: String) {
        self.trouble.get_or_insert(what);
    }

    /// Checks that a sector has no two writes in flight: the order of their effects isn't defined.
    pub fn check_overlap(&mut self, new: &Request) {
        let live = self.queues.iter().filter(|q| !q.dead);
        let others = live.flat_map(|q| {
            let done = q.done.iter().map(|(_, c)| &*c.request);
            q.work.iter().map(|w| &*w.request).chain(done)
        });
        let meets = |r: &&Request| r.op.is_write() && r.sector < new.end() && new.sector < r.end();
        if let Some(other) = { others }.find(meets) {
            let what = format!(
                "a write of sectors {}..{} is submitted while {}..{} is written",
                new.sector,
                new.end(),
                other.sector,
                other.end()
            );
            self.complain(what);
        }
    }
}

/// The buffer that holds byte `at` of all buffers, and the offset in it.
fn place(buffers: &[Buffer], mut at: usize) -> (&Buffer, usize) {
    for b in buffers {
        if at < b.len() {
            return (b, at);
        }
        at -= b.len();
    }
    panic!("a sector outside the request's buffers");
}
