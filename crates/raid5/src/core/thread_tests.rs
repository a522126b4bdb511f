//! Queues on threads of their own, on one array: what they write is there, and every request ends. The order is the machine's, so a seed gives
//! the requests only.

use super::common::{Common, Setup};
use super::queue::{Errand, Mail, QueueCore};
use super::world::device::{Device, SECTOR};
use super::world::history::{History, sector_of};
use super::world::recovery::AfterCut;
use super::world::{DATA_SECTORS, bytes_of, contents, devices_of, value};
use super::{MemberIo, Work};
use crate::core::members::Members;
use crate::core::slots::Unsynced;
use crate::words::{Owner, Room};
use crate::{Geometry, Layout, LogArea, Policy, STRIPE_BYTES, STRIPE_SECTORS};
use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_block::stacked::CompletionQueue;
use pvblk_block::{Buffer, Completion, Op, Request, RequestFlags, Status};
use pvblk_testing::seeds;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const QUEUES: usize = 3;
/// Requests of each queue, and how many are in flight.
const REQUESTS: usize = 60;
const IN_FLIGHT: usize = 4;

/// An array, and the machine around it.
struct SharedRequest {
    geometry: Geometry,
    common: Arc<Common>,
    devices: Vec<Mutex<Device>>,
    /// I/O until a device dies.
    until_death: AtomicU64,
    named: AtomicU64,
    post: Vec<CompletionQueue<Vec<Mail>>>,
    history: Mutex<(u64, History)>,
    /// Queues that have no requests any more.
    over: AtomicUsize,
}

/// A queue on its thread.
struct Thread<'a> {
    me: usize,
    rng: Rng,
    shared: &'a SharedRequest,
    queue: QueueCore,
    ios: Vec<MemberIo>,
    works: Vec<Work>,
    asked: usize,
    /// When each request began.
    begins: Vec<u64>,
    done: usize,
}

fn owner(queue: usize) -> Owner {
    Owner::new(queue as u16 + 1).expect("a number")
}

impl SharedRequest {
    fn new(rng: &mut Rng) -> SharedRequest {
        let geometry = Geometry::new(4, 16, Layout::LeftSymmetric, 6 * STRIPE_SECTORS);
        let geometry = geometry.expect("a geometry");
        let policy = match rng.bool() {
            true => Policy::Resync,
            false => Policy::Ppl(LogArea {
                sector: 0,
                sectors: DATA_SECTORS,
            }),
        };
        let members = geometry.members();
        let room = Room {
            bytes: 4 * STRIPE_BYTES as u64,
            segments: 6,
        };
        let common = Common::new(Setup {
            geometry,
            policy,
            devices: devices_of(members, true, false, room),
            members: Members::new((0..members).map(Some).collect(), None),
            unsynced: Unsynced::default(),
            dirty: rng.bool(),
            chunks: None,
            in_memory: false,
            has_sums: false,
            unsummed: Vec::new(),
            limited: false,
            rotational: false,
            most_read_errors: rng.u32(..3),
            words: 4,
            sets: 3,
            queues: QUEUES,
            parts: 4,
            signature: 7,
        });
        let devices = contents(&geometry).into_iter();
        let devices = devices.map(|bytes| Mutex::new(Device::new(bytes, true)));
        let values = (0..geometry.capacity_sectors()).map(|sector| value(0, sector));
        SharedRequest {
            geometry,
            common: common.expect("memory"),
            devices: devices.collect(),
            until_death: AtomicU64::new(rng.u64(..3000)),
            named: AtomicU64::new(0),
            post: (0..QUEUES)
                .map(|_| CompletionQueue::new().expect("a descriptor"))
                .collect(),
            history: Mutex::new((0, History::new(values))),
            over: AtomicUsize::new(0),
        }
    }
}

impl<'a> Thread<'a> {
    fn new(me: usize, shared: &'a SharedRequest, seed: u64) -> Thread<'a> {
        Thread {
            me,
            rng: Rng::with_seed(seed.wrapping_mul(31) + me as u64),
            queue: QueueCore::open(&shared.common, owner(me)).expect("room for it"),
            shared,
            ios: Vec::new(),
            works: Vec::new(),
            asked: 0,
            begins: Vec::new(),
            done: 0,
        }
    }

    fn run(mut self) {
        let begin = Instant::now();
        let mut was_over = false;
        loop {
            // Only a guard against a hang.
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "{:?}",
                self.queue
            );
            let is_over = self.done == REQUESTS;
            if is_over && !std::mem::replace(&mut was_over, true) {
                self.shared.over.fetch_add(1, Ordering::AcqRel);
            }
            let all = self.shared.over.load(Ordering::Acquire) == QUEUES;
            // A queue without requests owns no words, but its mail may have pages for others.
            let any = self.turn();
            if all && !any && self.queue.is_idle() {
                break;
            }
            if !any {
                std::thread::yield_now();
            }
        }
        let mail = self.queue.close();
        assert!(mail.iter().all(|(_, mail)| matches!(mail, Mail::Pages)));
    }

    fn turn(&mut self) -> bool {
        let (queue, post) = (&mut self.queue, &self.shared.post);
        let mut any =
            post[self.me].collect(|mail| mail.drain(..).for_each(|mail| queue.receive(mail)));
        if self.asked < REQUESTS && self.asked - self.done < IN_FLIGHT {
            self.ask();
            any = true;
        }
        for _ in 0..self.rng.u32(1..8) {
            any |= self.queue.step();
            self.collect();
        }
        if !self.works.is_empty() {
            let mut work = self.works.swap_remove(self.rng.usize(..self.works.len()));
            work.run();
            self.queue.worked(&mut work);
            any = true;
        }
        if !self.ios.is_empty() {
            let io = self.ios.swap_remove(self.rng.usize(..self.ios.len()));
            let ok = self.at_device(&io);
            let token = io.token;
            drop(io);
            self.queue.ended(token, ok);
            any = true;
        }
        self.collect();
        any
    }

    fn collect(&mut self) {
        for (to, mail) in self.queue.mail.drain(..) {
            let to = usize::from(to.number()) - 1;
            self.shared.post[to].post(|all| all.push(mail));
        }
        self.ios.append(&mut self.queue.ios);
        self.works.append(&mut self.queue.works);
        for errand in std::mem::take(&mut self.queue.errands) {
            let Errand::Name { failed: slots, .. } = errand else {
                panic!("nobody syncs");
            };
            self.shared.named.fetch_or(slots, Ordering::AcqRel);
            self.queue.named(0);
        }
        for completion in std::mem::take(&mut self.queue.done) {
            self.done(completion);
        }
    }

    fn at_device(&self, io: &MemberIo) -> bool {
        let mut device = self.shared.devices[io.slot].lock();
        let is_last = self.shared.until_death.fetch_sub(1, Ordering::AcqRel) == 0;
        device.dead |= is_last;
        if device.dead {
            return false;
        }
        match io.op {
            Op::Flush => {}
            Op::Read => {
                let mut sector = io.sector;
                for buffer in io.data.buffers() {
                    buffer.write(0, device.read(sector, buffer.len()));
                    sector += (buffer.len() / SECTOR) as u64;
                }
            }
            _ => device.write(io.sector, &bytes_of(io), true),
        }
        true
    }

    fn ask(&mut self) {
        let capacity = self.shared.geometry.capacity_sectors();
        let first = self.rng.u64(..capacity);
        let most = *self
            .rng
            .choice(&[4, STRIPE_SECTORS, capacity])
            .expect("one of them");
        let sectors = self.rng.u64(1..=most.min(capacity - first));
        let op = match self.rng.u32(..8) {
            0..5 => Op::Write,
            5..7 => Op::Read,
            _ => Op::Flush,
        };
        let (sector, sectors) = if op == Op::Flush {
            (0, 0)
        } else {
            (first, sectors)
        };
        let mut request = Request::new(op, sector, sectors, self.asked as u64);
        let mut guard = self.shared.history.lock();
        let (now, history) = &mut *guard;
        *now += 1;
        if op.has_data() {
            let memory = Buffer::anonymous(sectors as usize * SECTOR).expect("memory");
            for at in (sector..sector + sectors).filter(|_| op == Op::Write) {
                let value = value(*now, at);
                memory.write((at - sector) as usize * SECTOR, &sector_of(value));
                history.begin(at, value, *now);
            }
            request.buffers.push(memory);
        }
        if self.rng.bool() {
            request.flags |= RequestFlags::STABLE_BUFFERS;
        }
        self.begins.push(*now);
        drop(guard);
        self.asked += 1;
        self.queue.submit(request);
    }

    fn done(&mut self, Completion { request, status }: Completion) {
        assert_eq!(status, Status::Ok);
        self.done += 1;
        let begin = self.begins[request.tag as usize];
        let mut guard = self.shared.history.lock();
        let (now, history) = &mut *guard;
        *now += 1;
        let bytes: Vec<u8> = request.buffers.iter().flat_map(Buffer::to_vec).collect();
        for (sector, bytes) in (request.sector..).zip(bytes.chunks(SECTOR)) {
            match request.op {
                Op::Write => history.end(sector, begin, *now, false),
                _ => assert!(
                    history.is_read(sector, bytes, begin),
                    "sector {sector} reads {}",
                    history.text(sector, bytes)
                ),
            }
        }
    }
}

#[test]
fn queues_on_threads_share_an_array() {
    for seed in seeds(48, 40) {
        println!("seed {seed}");
        let shared = SharedRequest::new(&mut Rng::with_seed(seed));
        std::thread::scope(|scope| {
            // All are open before one begins: the end of a stop is posted to all.
            let threads: Vec<_> = (0..QUEUES)
                .map(|me| Thread::new(me, &shared, seed))
                .collect();
            for thread in threads {
                scope.spawn(|| thread.run());
            }
        });
        let named = shared.named.into_inner();
        let devices = shared.devices.into_iter().enumerate();
        let contents = |(slot, device): (usize, Mutex<Device>)| {
            (named & 1 << slot == 0).then(|| device.into_inner().contents().to_vec())
        };
        let after = AfterCut {
            geometry: shared.geometry,
            data_sectors: DATA_SECTORS,
            members: devices.map(contents).collect(),
            marked: None,
            incoming: None,
            repaired: 0,
        };
        if named == 0 {
            assert_eq!(after.wrong(), [0; 0], "parity at rest");
        }
        let history = shared.history.into_inner().1;
        for sector in 0..shared.geometry.capacity_sectors() {
            let bytes = after.sector(sector);
            let is_right = history.is_read(sector, &bytes, u64::MAX);
            assert!(
                is_right,
                "sector {sector}: {}",
                history.text(sector, &bytes)
            );
        }
    }
}
