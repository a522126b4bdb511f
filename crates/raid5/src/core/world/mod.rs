//! An array of a few stripes: its queues take turns in random order, its devices fail, and power is cut at any moment.

mod ask;
mod bits;
mod checks;
pub mod device;
mod disk;
mod errands;
pub mod history;
mod orders;
pub mod recovery;
mod rot;
mod start;
mod syncs;
mod ways;

use super::common::{Common, Setup};
use super::queue::{Errand, Mail, Opening, QueueCore};
use super::{Data, MemberIo, Work};
use crate::core::members::{Incoming, Members};
use crate::core::slots::Unsynced;
use crate::sums::SUMS_PAGE_BYTES;
use crate::words::{Answer, Owner, Room};
use crate::{Geometry, Layout, LogArea, Policy, STRIPE_BYTES, STRIPE_SECTORS, ppl_signature};
use bits::Bits;
use device::{Device, SECTOR};
use disk::OnDisk;
use fastrand::Rng;
use history::History;
use pvblk_block::{Buffer, Completion, Op, RequestFlags, Status};
use rot::{Rot, sums_of};
pub use start::{contents, devices_of};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
pub use ways::Ways;

/// Where data begins on each device; the log is before it.
pub const DATA_SECTORS: u64 = 40;
const UUID: [u8; 16] = [7; 16];

/// A request in flight.
struct Asked {
    begin: u64,
    queue: usize,
}

/// I/O in flight, and what it writes.
struct Io {
    queue: usize,
    io: MemberIo,
    bytes: Vec<u8>,
    /// The device's mark, of a flush.
    mark: u64,
}

/// The kinds of things that happen by themselves.
const KINDS: usize = 7;
/// Most requests in flight.
const IN_FLIGHT: usize = 12;

pub struct World {
    rng: Rng,
    geometry: Geometry,
    policy: Policy,
    /// Devices write zeros by themselves.
    zeroes: bool,
    room: Room,
    common: Arc<Common>,
    queues: Vec<Option<QueueCore>>,
    devices: Vec<Device>,
    /// Mail that was posted, by queue that posts it and queue that gets it.
    post: Vec<Vec<VecDeque<Mail>>>,
    ios: Vec<Io>,
    works: Vec<(usize, Work)>,
    errands: Vec<(usize, Errand)>,
    /// Stripes that batches are to begin with, with the queues that wait for that.
    intends: Vec<(usize, Opening)>,
    /// Sums as they are on disk, by role; they fit all blocks. A run has no more stripes than a page has sums of. Empty: the array has none.
    sums: Vec<[u8; SUMS_PAGE_BYTES]>,
    rot: Option<Rot>,
    bits: Option<Bits>,
    disk: OnDisk,
    /// Stripes whose parity wasn't right at first.
    unsynced: Unsynced,
    /// Requests in flight, by tag.
    asked: Vec<Option<Asked>>,
    /// Many writes cover several stripes whole, and may go as runs.
    runs: bool,
    /// Most requests are for these sectors, so that others' bits aren't used for a while.
    focus: Option<Range<u64>>,
    /// The end of the last write.
    written: u64,
    history: History,
    now: u64,
    weights: [u32; KINDS],
    /// Devices that have failed some I/O, as a mask. Those that aren't dead do all other I/O.
    doomed: u64,
    /// One in so many I/O of a device fails.
    fails: Option<u32>,
    most_dead: usize,
    /// Users have devices taken in and thrown out.
    orders: bool,
    /// Devices that couldn't read once, as a mask.
    unreadable: u64,
    /// A member has been missing.
    has_missed: bool,
    /// A flush has just ended, or a write with FUA.
    has_promised: bool,
    pub ways: Ways,
}

/// Most sets of pages.
fn most_sets(runs: bool) -> usize {
    if runs { 8 } else { 3 }
}

fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

/// A value that no other sector or request has.
pub fn value(request: u64, sector: u64) -> u64 {
    let mut n = (request << 32 | sector).wrapping_add(0x9e37_79b9_7f4a_7c15);
    n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut rng = Rng::with_seed(seed);
        let count = rng.u32(3..=5);
        let runs = rng.u32(..3) == 0;
        let chunks = if runs { [16, 16, 32] } else { [8, 8, 16] };
        let chunk = *rng.choice(&chunks).expect("one of them");
        let most = if rng.bool() { 5 } else { 12 };
        let stripes = rng.u64(2..=most).next_multiple_of(u64::from(chunk) / 8);
        let layout = *rng.choice(&Layout::ALL).expect("one of them");
        let geometry = Geometry::new(count, chunk, layout, stripes * STRIPE_SECTORS);
        let geometry = geometry.expect("a geometry");
        let policy = match rng.u32(..4) {
            0 => Policy::Resync,
            1 => Policy::Bitmap { sector: 0 },
            2 if runs => Policy::Resync,
            _ => Policy::Ppl(LogArea {
                sector: 0,
                sectors: DATA_SECTORS,
            }),
        };
        let volatile = rng.u32(..4) > 0;
        let zeroes = rng.bool();
        let mut contents = contents(&geometry);
        let mut disk = OnDisk {
            roles: (0..count as usize).map(Some).collect(),
            incoming: None,
            by_bitmap: false,
            gone: None,
            resynced: 0,
            dirty: rng.bool(),
        };
        let spare = count as usize;
        let mut unsynced = Unsynced::default();
        let begin = rng.u32(if runs { 6..12 } else { 0..12 });
        if begin < 4 {
            disk.roles[rng.usize(..spare)] = None;
        }
        if matches!(begin, 2..6) {
            // The spare is rebuilt for the missing member, or replaces one.
            let missing = disk.roles.iter().position(Option::is_none);
            let role = missing.unwrap_or_else(|| rng.usize(..spare));
            let held = rng.u64(..=stripes) * rng.u64(..=1);
            let end = (DATA_SECTORS + held * STRIPE_SECTORS) as usize * SECTOR;
            let mut bytes = vec![0xee; contents[role].len()];
            bytes[DATA_SECTORS as usize * SECTOR..end]
                .copy_from_slice(&contents[role][DATA_SECTORS as usize * SECTOR..end]);
            contents.push(bytes);
            disk.incoming = Some((spare, role, held));
        } else {
            contents.push(vec![0xee; contents[0].len()]);
        }
        if matches!(begin, 6..8) {
            let first = rng.u64(..stripes);
            unsynced.0.push(first..rng.u64(first..stripes) + 1);
            for stripe in unsynced.0.iter().cloned().flatten() {
                let at = DATA_SECTORS + geometry.stripe_member_sector(stripe);
                let parity = &mut contents[geometry.stripe_parity(stripe)];
                rng.fill(&mut parity[at as usize * SECTOR..][..STRIPE_BYTES]);
            }
        }
        let sums = sums_of(&geometry, &contents);
        let devices = contents.into_iter();
        let devices = devices.map(|bytes| Device::new(bytes, volatile));
        let mut devices: Vec<Device> = devices.collect();
        let mut unreadable = 0;
        if begin >= 8 && rng.u32(..4) > 0 || begin < 4 && rng.bool() {
            let live: Vec<usize> = disk.live().collect();
            let slot = *rng.choice(&live).expect("some of them");
            let first = DATA_SECTORS + rng.u64(..stripes * STRIPE_SECTORS);
            devices[slot].spoil(first..first + rng.u64(1..40));
            unreadable = 1 << slot;
        }
        let incoming = disk.incoming;
        let incoming = incoming.map(|(slot, role, held)| Incoming::new(slot, role, held, false));
        let queues = rng.usize(2..=4);
        let parts = rng.usize(1..=if runs { 8 } else { 5 });
        let sets = rng.usize(1..=most_sets(runs));
        let fewest = if runs { stripes as usize } else { 1 };
        let words = rng.usize(fewest..=stripes as usize);
        let room = Room {
            bytes: rng.u64(1..=4) * STRIPE_BYTES as u64,
            segments: rng.usize(2..=6),
        };
        let shift = rng.u32(2..6);
        let has_map = match policy {
            Policy::Resync => false,
            Policy::Ppl(_) => rng.u32(..3) > 0,
            Policy::Bitmap { .. } => true,
        };
        let bits = has_map.then(|| Bits::new(shift, spare + 1, &unsynced.0));
        let chunks = bits
            .as_ref()
            .map(|bits| bits.chunks(geometry.member_sectors()));
        let sums = match bits.is_some() && !runs && rng.u32(..3) > 0 {
            true => sums,
            false => Vec::new(),
        };
        // Of whole arrays at rest one device's blocks become others.
        let may_rot = !sums.is_empty() && begin >= 8 && unreadable == 0;
        let rot = may_rot.then(|| Rot::of(rng.usize(..spare)));
        let common = Common::new(Setup {
            geometry,
            policy,
            chunks,
            in_memory: false,
            has_sums: !sums.is_empty(),
            unsummed: Vec::new(),
            devices: devices_of(spare + 1, volatile, zeroes, room),
            members: Members::new(disk.roles.clone(), incoming),
            unsynced: Unsynced(unsynced.0.clone()),
            dirty: disk.dirty,
            limited: rng.u32(..4) == 0,
            rotational: !runs && rng.u32(..3) == 0,
            most_read_errors: *rng.choice(&[0, 1, 4, 100]).expect("one of them"),
            words,
            sets,
            queues,
            parts,
            signature: ppl_signature(&UUID),
        });
        let common = common.expect("memory");
        common.set_stripe_queues(!runs && rng.bool());
        let open = |queue| Some(QueueCore::open(&common, owner(queue)).expect("room for it"));
        let capacity = geometry.capacity_sectors();
        World {
            geometry,
            policy,
            zeroes,
            room,
            queues: (0..queues).map(open).collect(),
            devices,
            post: (0..queues)
                .map(|_| (0..queues).map(|_| VecDeque::new()).collect())
                .collect(),
            ios: Vec::new(),
            works: Vec::new(),
            errands: Vec::new(),
            intends: Vec::new(),
            fails: (rot.is_none() && rng.bool()).then(|| rng.u32(5..200)),
            orders: rot.is_none() && (bits.is_some() && !runs || rng.u32(..3) == 0),
            sums,
            rot,
            has_missed: disk.missing() > 0,
            disk,
            unsynced,
            doomed: 0,
            asked: Vec::new(),
            runs,
            focus: None,
            written: 0,
            history: History::new((0..capacity).map(|sector| value(0, sector))),
            now: 0,
            weights: [0; KINDS],
            most_dead: if rng.u32(..3) == 0 { 2 } else { 1 },
            unreadable,
            has_promised: false,
            bits,
            ways: Ways::default(),
            common,
            rng,
        }
    }

    /// Runs so many requests, and cuts power some times.
    pub fn run(&mut self, requests: usize) {
        let mut left = requests;
        for turn in 0.. {
            if turn % 64 == 0 {
                self.weights = std::array::from_fn(|_| self.rng.u32(1..=8));
                let capacity = self.geometry.capacity_sectors();
                let first = self.rng.u64(..capacity);
                let focuses = self.bits.is_some() && !self.runs;
                self.focus = focuses.then_some(first..capacity.min(first + 16));
            }
            let cuts = if self.is_kicking() { 16 } else { 256 };
            let has_promised = std::mem::take(&mut self.has_promised);
            if self.rng.u32(..cuts) == 0 || has_promised && self.rng.u32(..4) == 0 {
                self.cut();
            }
            if self.rng.u32(..32) == 0 {
                self.rot();
            }
            if self.rng.u32(..64) == 0 {
                self.do_rare();
            }
            if self.rng.u32(..24) == 0 {
                self.sync_rarely();
            }
            if self.bits.is_some() && self.rng.u32(..6) == 0 {
                self.sweep_rarely();
            }
            let orders = if self.bits.is_some() { 20 } else { 48 };
            if self.orders && self.rng.u32(..orders) == 0 {
                self.order_rarely();
            }
            let in_flight = self.asked.iter().flatten().count();
            let asks = left > 0 && in_flight < IN_FLIGHT;
            if asks && self.rng.u32(..4) == 0 {
                left -= 1;
                self.ask();
            }
            if !self.turn() && !asks && !self.go_on_syncing() {
                break;
            }
            assert!(turn < 1000 * requests, "no end:\n{}", self.state());
        }
        self.finish(left);
    }

    fn is_kicking(&self) -> bool {
        let mut queues = self.queues.iter().flatten();
        queues.any(|queue| queue.kick.is_some())
    }

    /// A queue is closed or opened, memory is given back, or the number of stripes changes.
    fn do_rare(&mut self) {
        let queue = self.rng.usize(..self.queues.len());
        if self.rng.u32(..4) == 0 {
            let gathers = self.rng.u32(..if self.runs { 4 } else { 2 }) == 0;
            self.common.set_stripe_queues(gathers);
        }
        let mail = match self.rng.u32(..4) {
            0 => self.common.give_way().1,
            1 => {
                let sets = self.rng.usize(1..=most_sets(self.runs));
                self.common.set_stripes(sets).expect("memory")
            }
            _ => match self.queues[queue].take_if(|queue| queue.is_idle()) {
                Some(idle) => {
                    self.ways.closed += 1;
                    idle.close()
                }
                None => return self.open(queue),
            },
        };
        // It is nobody's mail: any order will do.
        for (to, mail) in mail {
            let to = usize::from(to.number()) - 1;
            self.post[to][to].push_back(mail);
        }
    }

    /// Something happens; false if nothing can.
    fn turn(&mut self) -> bool {
        let sum: u32 = self.weights.iter().sum();
        let mut at = self.rng.u32(..sum);
        let first = self.weights.iter().position(|weight| {
            let is_it = at < *weight;
            at = at.saturating_sub(*weight);
            is_it
        });
        let first = first.unwrap_or(0);
        (first..first + KINDS).any(|kind| match kind % KINDS {
            0 | 1 => self.step_any(),
            2 => self.end_io(),
            3 => self.do_work(),
            4 => self.deliver(),
            5 => self.set_bits(),
            _ => self.do_errand(),
        }) || self.expect_nothing()
    }

    /// A queue's user waits; false if no queue's writes wait for it.
    fn expect_nothing(&mut self) -> bool {
        let mut queues = self.queues.iter_mut().flatten();
        let Some(queue) = queues.find(|queue| queue.waits_in_vain()) else {
            return false;
        };
        self.ways.waited_in_vain += 1;
        queue.expect_nothing();
        true
    }

    fn step_any(&mut self) -> bool {
        let from = self.rng.usize(..self.queues.len());
        let count = self.queues.len();
        (from..from + count)
            .any(|queue| self.queues[queue % count].is_some() && self.step(queue % count))
    }

    /// Opens a queue that is closed.
    fn open(&mut self, queue: usize) {
        let open = || QueueCore::open(&self.common, owner(queue)).expect("room for it");
        self.queues[queue].get_or_insert_with(open);
    }

    fn queue(&mut self, queue: usize) -> &mut QueueCore {
        self.queues[queue].as_mut().expect("an open queue")
    }

    /// One step of a queue, and sometimes all that it can do by itself.
    fn step(&mut self, queue: usize) -> bool {
        let done = self.step_once(queue);
        if done && self.rng.u32(..16) == 0 {
            let mut steps = 0;
            while self.step_once(queue) {
                steps += 1;
                assert!(steps < 10_000, "no end: {:?}", self.queue(queue));
            }
        }
        done
    }

    fn step_once(&mut self, queue: usize) -> bool {
        let next = self.queue(queue).todo.front();
        let (run_of, is_again) = match next {
            Some(Mail::Answer(Answer::Again { token, .. })) => (&token.record().run, true),
            Some(Mail::Answer(Answer::Stable { token, .. })) => (&token.record().run, false),
            _ => (&None, false),
        };
        let (is_run, is_again) = (usize::from(run_of.is_some()), usize::from(is_again));
        self.ways.again += is_again;
        self.ways.runs_again += is_run & is_again;
        self.ways.runs_logged += is_run & !is_again;
        let is_impatient = self.rng.u32(..16) == 0;
        let q = self.queue(queue);
        let in_vain = is_impatient && q.waits_in_vain();
        if in_vain {
            q.expect_nothing();
        }
        let done = q.step();
        q.gather.check().expect("stripes in their places");
        let (delayed, whole) = q.gather.delayed_and_whole();
        self.ways.waited_in_vain += usize::from(in_vain);
        self.ways.delayed += delayed;
        self.ways.whole += whole;
        self.collect(queue);
        done
    }

    /// Takes a queue's outputs.
    fn collect(&mut self, queue: usize) {
        let q = self.queues[queue].as_mut().expect("an open queue");
        self.ways.parked += q.parked.len();
        self.ways.held_logs += q.held_logs.len();
        self.ways.unnamed += q.unnamed.len();
        self.ways.held_flushes += q.held_flushes.len();
        self.ways.pages_awaited += q.pageless.len();
        for (to, mail) in q.mail.drain(..) {
            match &mail {
                Mail::Stripe(token) => {
                    let stripes = &token.record().waiting;
                    let first = stripes[0].part.stripe;
                    let shares = stripes.iter().any(|w| w.part.stripe != first);
                    self.ways.shared_words += usize::from(shares);
                    self.ways.handed_over += 1;
                }
                Mail::Log(_) => self.ways.logs_handed_over += 1,
                Mail::Ended(_) => self.ways.ended_elsewhere += 1,
                Mail::MayRead => self.ways.arms_awaited += 1,
                _ => {}
            }
            self.post[queue][usize::from(to.number()) - 1].push_back(mail);
        }
        let devices = &self.devices;
        for io in q.ios.drain(..) {
            let mark = devices[io.slot].begin_flush();
            let writes = !matches!(io.op, Op::Read | Op::Flush);
            let is_incoming = self.disk.incoming.is_some_and(|(slot, ..)| slot == io.slot);
            assert!(
                self.disk.dirty || !writes || is_incoming,
                "a write before superblocks say dirty"
            );
            self.ios.push(Io {
                queue,
                bytes: bytes_of(&io),
                io,
                mark,
            });
        }
        for work in q.works.drain(..) {
            match &work {
                Work::Stripe(work) => {
                    self.ways.borrowed += usize::from(work.calculation.borrows);
                    self.ways.holes += usize::from(work.calculation.hole);
                }
                Work::Run(work) => {
                    self.ways.runs += usize::from(work.pages.len() > 1);
                    self.ways.runs_borrowed += usize::from(work.borrows);
                }
            }
            self.works.push((queue, work));
        }
        self.errands
            .extend(q.errands.drain(..).map(|errand| (queue, errand)));
        self.intends
            .extend(q.intends.drain(..).map(|opening| (queue, opening)));
        let done = std::mem::take(&mut q.done);
        for completion in done {
            self.done(completion);
        }
    }

    fn done(&mut self, Completion { request, status }: Completion) {
        self.now += 1;
        let asked = self.asked[request.tag as usize].take();
        let Asked { begin, .. } = asked.expect("a request ends once");
        let is_broken = self.common.membership().broken;
        // Two blocks of a stripe can't be read, perhaps.
        let may_fail = is_broken
            || self.has_missed && self.unreadable != 0
            || self.unreadable.count_ones() > 1;
        assert!(
            status == Status::Ok || may_fail,
            "{request:?} failed; {:?}, unreadable {:b}",
            self.disk,
            self.unreadable
        );
        if status != Status::Ok {
            return;
        }
        let fua = request.flags.contains(RequestFlags::FUA);
        self.has_promised |= fua || request.op == Op::Flush;
        match request.op {
            Op::Flush => self.history.flushed(begin),
            // Nobody counts on what a discard has done.
            Op::Discard => {}
            Op::Write | Op::WriteZeroes => {
                for sector in request.sector..request.end() {
                    self.history.end(sector, begin, self.now, fua);
                }
            }
            Op::Read => {
                let bytes: Vec<u8> = request.buffers.iter().flat_map(Buffer::to_vec).collect();
                for (n, bytes) in bytes.chunks(SECTOR).enumerate() {
                    let sector = request.sector + n as u64;
                    let is_right = self.history.is_read(sector, bytes, begin);
                    assert!(
                        is_right,
                        "sector {sector} reads {}",
                        self.history.text(sector, bytes)
                    );
                }
            }
        }
    }

    /// One in so many I/O fails: more of logs and flushes, and more when another device has failed some.
    fn deadliness(&self, slot: usize, sector: u64) -> Option<u32> {
        let fails = self.fails?;
        if self.common.first_unsynced().is_some() {
            // The member's blocks would be lost.
            return None;
        }
        if self
            .disk
            .incoming
            .is_some_and(|incoming| incoming.0 == slot)
        {
            return Some(fails.div_ceil(3));
        }
        let gone = self.disk.missing() + self.doomed_members();
        match gone {
            gone if gone >= self.most_dead => None,
            0 if sector >= DATA_SECTORS => Some(fails),
            0 => Some(fails.div_ceil(4)),
            _ => Some(fails.min(10)),
        }
    }

    /// I/O of a device ends, or fails, and perhaps the device dies of it.
    fn end_io(&mut self) -> bool {
        if self.ios.is_empty() {
            return false;
        }
        let at = self.rng.usize(..self.ios.len());
        let Io {
            queue,
            io,
            bytes,
            mark,
        } = self.ios.swap_remove(at);
        let one_in = self.deadliness(io.slot, io.sector);
        let fails = one_in.is_some_and(|many| self.rng.u32(..many) == 0);
        let sectors = io.data.buffers().iter().map(|b| b.len() / SECTOR);
        let sectors = io.sector..io.sector + sectors.sum::<usize>() as u64;
        if fails && io.op == Op::Read && self.rng.u32(..4) > 0 {
            self.ways.spoilt += 1;
            self.devices[io.slot].spoil(sectors.clone());
        } else if fails {
            self.doomed |= 1 << io.slot;
            self.devices[io.slot].dead = self.rng.bool();
        }
        let device = &mut self.devices[io.slot];
        assert_eq!(bytes, bytes_of(&io), "memory changes while it is written");
        let is_bad = io.op == Op::Read && !device.can_read(sectors);
        let ok = !device.dead && !fails && !is_bad;
        self.unreadable |= u64::from(!ok && io.op == Op::Read) << io.slot;
        match io.op {
            _ if !ok => {
                // Some of it may have been done.
                for (n, bytes) in bytes.chunks(SECTOR).enumerate() {
                    if self.rng.u32(..3) == 0 {
                        device.write(io.sector + n as u64, bytes, false);
                    }
                }
            }
            Op::Flush => device.end_flush(mark),
            Op::Read => {
                let mut sector = io.sector;
                for buffer in io.data.buffers() {
                    buffer.write(0, device.read(sector, buffer.len()));
                    sector += (buffer.len() / SECTOR) as u64;
                }
            }
            Op::Write | Op::WriteZeroes | Op::Discard => {
                device.write(io.sector, &bytes, io.fua);
                let end = io.sector + (bytes.len() / SECTOR) as u64;
                if let Some(rot) = &mut self.rot {
                    rot.written(io.slot, io.sector..end);
                }
            }
        }
        let token = io.token;
        drop(io);
        self.queue(queue).ended(token, ok);
        self.collect(queue);
        true
    }

    fn do_work(&mut self) -> bool {
        if self.works.is_empty() {
            return false;
        }
        let at = self.rng.usize(..self.works.len());
        let (queue, mut work) = self.works.swap_remove(at);
        work.run();
        self.queue(queue).worked(&mut work);
        self.collect(queue);
        true
    }

    fn deliver(&mut self) -> bool {
        let count = self.queues.len();
        let from = self.rng.usize(..count * count);
        let pairs = (from..from + count * count).map(|n| (n / count % count, n % count));
        for (from, to) in pairs {
            let Some(mail) = self.post[from][to].pop_front() else {
                continue;
            };
            match &mut self.queues[to] {
                Some(queue) => queue.receive(mail),
                None => assert!(matches!(
                    mail,
                    Mail::Drained | Mail::GoOn | Mail::Pages | Mail::MayRead
                )),
            }
            return true;
        }
        false
    }
}

/// The bytes that an I/O writes.
pub fn bytes_of(io: &MemberIo) -> Vec<u8> {
    match (&io.data, io.op) {
        (Data::Zeros, _) => vec![0; STRIPE_BYTES],
        (data, Op::Write) => data.buffers().iter().flat_map(Buffer::to_vec).collect(),
        _ => Vec::new(),
    }
}
