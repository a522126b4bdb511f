//! Buffer pools whose memory is taken at any step: lanes over a disk that is slow, connections that come and
//! go, and squeezes.
//!
//! ```text
//!   Client ── slots with buffers ── Lane ── CrashDisk
//!      │           └ BufferPool ◀── Pressure: squeezes, limits, time
//!      └ Checker
//! ```
//!
//! The pool, the pressure and the lanes are those of production. Released memory is poisoned, so that a user
//! of it is found by the data that it reads or writes. docs/decisions/0014-squeeze.md says what must hold.

use crate::bugs::Bug;
use crate::checker::Checker;
use crate::disk::{CrashDisk, DiskSetup};
use crate::log::Log;
use crate::scheduler::{Actors, Group};
use crate::stamp::{self, POISON};
use crate::user::{contents, put};
use crate::{ScenarioState, pick};
use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_backend::{BufferPool, Disk, Lane, Pressure, Pulled, RequestSource, SourceEnd};
use pvblk_block::trace::Tracing;
use pvblk_block::{Buffer, Completion, Op, Readiness, Request, RequestFlags, Status};
use pvblk_sys::PAGE_SIZE;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Pages of a disk.
const PAGES: u64 = 64;
/// Most pages of a request.
const LONGEST: u64 = 8;
const PAGE_SECTORS: u64 = 8;
/// Requests in flight of a connection.
const DEPTH: u32 = 16;

pub fn bugs() -> Vec<Bug> {
    vec![Bug::GiveInFlight, Bug::ReleaseInFlight, Bug::Forget]
}

/// The state of the clients of all connections.
struct Client {
    rng: Rng,
    checker: Checker,
    trouble: Option<String>,
    /// Number of the last request.
    requests: u64,
    answered: u64,
    /// Number of requests whose responses are not sent yet.
    open: u64,
    /// Number of requests that may still come.
    left: u64,
    /// No new request comes.
    ending: bool,
    /// First sector and number of sectors of writes whose client left before their response.
    orphans: Vec<(u64, u64)>,
    bug: Option<Bug>,
}

/// A request of a connection.
struct ClientRequest {
    op: Op,
    sector: u64,
    sectors: u64,
    id: u64,
    since: u64,
    answered: bool,
}

struct Connection {
    client: Arc<Mutex<Client>>,
    pool: BufferPool,
    asked: Vec<Option<ClientRequest>>,
    /// Buffers of responses that are not sent yet, with their tags.
    unsent: VecDeque<(usize, Vec<Buffer>)>,
}

impl Connection {
    fn request(&mut self) -> Option<Box<Request>> {
        let c = &mut *self.client.lock();
        if c.ending || c.left == 0 {
            return None;
        }
        let tag = self.asked.iter().position(Option::is_none)?;
        let count = c.rng.u64(1..=LONGEST);
        let first = c.rng.u64(0..=PAGES - count);
        let (sector, sectors) = (first * PAGE_SECTORS, count * PAGE_SECTORS);
        let op = if c.rng.bool() { Op::Write } else { Op::Read };
        if op == Op::Write && !c.checker.is_free(sector, sectors) {
            return None;
        }
        let mut buffers = Vec::new();
        if !self.pool.take(count as usize * PAGE_SIZE, &mut buffers) {
            return None;
        }
        c.requests += 1;
        c.open += 1;
        c.left -= 1;
        let mut since = 0;
        if op == Op::Write {
            put(&buffers, sector, c.requests);
            c.checker
                .write_submitted(sector, sectors, c.requests, false);
        } else {
            since = c.checker.read_submitted();
        }
        if c.bug == Some(Bug::GiveInFlight) && c.rng.u8(0..8) == 0 {
            self.pool.give(&mut buffers.clone());
        }
        self.asked[tag] = Some(ClientRequest {
            op,
            sector,
            sectors,
            id: c.requests,
            since,
            answered: false,
        });
        let mut request = Request::new(op, 0, 0, 0);
        request.reset(op, RequestFlags::empty(), sector, sectors, tag as u64);
        request.buffers = buffers;
        Some(request)
    }

    fn answer(&mut self, tag: usize, buffers: &[Buffer]) {
        let Some(asked) = &mut self.asked[tag] else {
            return;
        };
        asked.answered = true;
        let c = &mut *self.client.lock();
        c.answered += 1;
        let found = contents(buffers, asked.sector);
        if asked.op == Op::Read {
            let read = c.checker.read_done(asked.since, &found);
            c.trouble = c.trouble.take().or(read.err());
            return;
        }
        c.checker.write_acked(asked.sector, asked.sectors, false);
        let other = found.iter().find(|(s, b)| stamp::name(b, *s) != asked.id);
        if let Some((sector, bytes)) = other {
            let is = stamp::describe(bytes, *sector);
            let what = format!("the memory of a write of sector {sector} holds {is}");
            c.trouble.get_or_insert(what);
        }
    }
}

impl RequestSource for Connection {
    fn describe(&self) -> String {
        "connection".into()
    }
    fn depth(&self) -> u32 {
        DEPTH
    }
    fn pull(&mut self, room: usize, out: &mut Vec<Box<Request>>) -> Result<Pulled, SourceEnd> {
        let wanted = self.client.lock().rng.usize(0..=room.min(4));
        for _ in 0..wanted {
            let Some(request) = self.request() else { break };
            out.push(request);
        }
        Ok(Pulled::default())
    }
    fn complete(&mut self, done: &mut Vec<Completion>) {
        for mut completion in done.drain(..) {
            let tag = completion.request.tag as usize;
            let buffers = std::mem::take(&mut completion.request.buffers);
            if completion.status != Status::Ok {
                let what = format!("a request ends with {:?}", completion.status);
                self.client.lock().trouble.get_or_insert(what);
            }
            self.answer(tag, &buffers);
            self.unsent.push_back((tag, buffers));
        }
    }
    fn push(&mut self) -> Result<usize, SourceEnd> {
        let c = &mut *self.client.lock();
        // The peer reads slowly, until the end.
        let least = if c.ending { self.unsent.len() } else { 0 };
        let send = c.rng.usize(least..=self.unsent.len());
        for (tag, mut buffers) in self.unsent.drain(..send) {
            self.asked[tag] = None;
            c.open -= 1;
            if c.bug == Some(Bug::Forget) {
                buffers.truncate(buffers.len() / 2);
            }
            self.pool.give(&mut buffers);
        }
        self.pool.settle();
        match c.rng.u8(0..32) {
            0 => self.pool.rest(),
            1 => self.pool.decay(),
            _ => {}
        }
        Ok(0)
    }
    fn arm(&mut self) -> Readiness {
        Readiness::Ready
    }
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for (_, mut buffers) in self.unsent.drain(..) {
            self.pool.give(&mut buffers);
        }
        let c = &mut *self.client.lock();
        c.open -= self.asked.iter().flatten().count() as u64;
        for asked in self.asked.iter().flatten().filter(|a| !a.answered) {
            match asked.op {
                Op::Write => c.orphans.push((asked.sector, asked.sectors)),
                // The client is gone, so the contents that were read aren't checked.
                _ => c.checker.read_done(asked.since, &[]).unwrap_or_default(),
            }
        }
    }
}

/// The state of the scenario.
pub struct Squeezed {
    rng: Rng,
    log: Log,
    bug: Option<Bug>,
    pressure: Arc<Pressure>,
    crash_disk: Arc<CrashDisk>,
    disk: Disk,
    client: Arc<Mutex<Client>>,
    lanes: Vec<Option<Lane>>,
}

impl ScenarioState for Squeezed {
    fn new(seed: u64, bug: Option<Bug>, log: Log) -> Result<Squeezed, String> {
        let mut rng = Rng::with_seed(seed);
        let floor = pick(&mut rng, &[0, 4, 64]);
        let pressure = Arc::new(Pressure::with_clock(floor, log.clock.clone()));
        pressure.set_max_buffer_pages(pick(&mut rng, &[0, 8, 1024]));
        let crash_disk = Arc::new(CrashDisk::new(DiskSetup {
            sectors: PAGES * PAGE_SECTORS,
            stamped: true,
            ..DiskSetup::default()
        }));
        let client = Client {
            rng: rng.fork(),
            checker: Checker::new(PAGES * PAGE_SECTORS, true),
            trouble: None,
            requests: 0,
            answered: 0,
            open: 0,
            left: rng.u64(20..200),
            ending: false,
            orphans: Vec::new(),
            bug,
        };
        Ok(Squeezed {
            disk: Disk::new("d", crash_disk.clone(), Tracing::off()),
            lanes: (0..rng.usize(1..4)).map(|_| None).collect(),
            rng,
            log,
            bug,
            pressure,
            crash_disk,
            client: Arc::new(Mutex::new(client)),
        })
    }

    /// Runs from the first connection to the last page that is given back.
    fn drive(&mut self) -> Result<(), String> {
        let steps = self.rng.u64(100..600);
        for _ in 0..steps {
            self.step(true)?;
        }
        self.client.lock().ending = true;
        self.rest()?;
        let used = self.pressure.report().total.used_pages;
        if used > 0 {
            return Err(format!("{used} pages are in use, and nothing is in flight"));
        }
        self.log.clock.advance(Duration::from_secs(1));
        self.pressure.squeeze();
        if self.pressure.free_bytes() > 0 {
            return Err("a squeeze left something".into());
        }
        self.lanes.iter_mut().for_each(|l| *l = None);
        self.check()?;
        self.log.requests = self.client.lock().answered;
        let stalls = self.pressure.report().total.stalls;
        self.log.count("stalls", stalls);
        Ok(())
    }

    fn log(&mut self) -> &mut Log {
        &mut self.log
    }
}

impl Actors for Squeezed {
    fn dice(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// Lanes, the disk, squeezes, time, and the actor that changes limits and breaks connections.
    fn groups(&self) -> [Group; 5] {
        let lanes = self.lanes.len();
        [(lanes, 45 / lanes as u32), (1, 30), (1, 15), (1, 6), (1, 4)]
    }

    fn act(&mut self, actor: usize, fill: bool) -> Result<bool, String> {
        let lanes = self.lanes.len();
        let moved = match actor.checked_sub(lanes) {
            None => match &mut self.lanes[actor] {
                Some(lane) => lane.step(),
                None if fill => {
                    self.connect(actor)?;
                    true
                }
                None => false,
            },
            Some(0) => self.crash_disk.step(&mut self.rng),
            Some(_) if !fill => false,
            Some(1) => {
                self.squeeze();
                true
            }
            Some(2) => {
                let by = Duration::from_micros(self.rng.u64(0..8000));
                self.log.clock.advance(by);
                true
            }
            Some(_) => {
                if self.rng.bool() {
                    let pages = pick(&mut self.rng, &[0, 8, 1024]);
                    self.pressure.set_max_buffer_pages(pages);
                    self.log.add("at most # pages", [pages as u64]);
                } else {
                    let lane = self.rng.usize(..lanes);
                    self.disconnect(lane);
                }
                true
            }
        };
        self.check()?;
        Ok(moved)
    }

    fn is_settled(&self) -> bool {
        self.crash_disk.busy() == 0 && self.client.lock().open == 0
    }
}

impl Squeezed {
    fn connect(&mut self, at: usize) -> Result<(), String> {
        let limit = self.rng.usize(LONGEST as usize * 2..=96);
        let pool = BufferPool::new(&self.pressure, "d", "squeezed", None, limit);
        let connection = Connection {
            client: Arc::clone(&self.client),
            pool,
            asked: (0..DEPTH).map(|_| None).collect(),
            unsent: VecDeque::new(),
        };
        let lane = Lane::open(&self.disk, Box::new(connection)).map_err(|e| e.to_string())?;
        self.lanes[at] = Some(lane);
        self.log
            .add("# connects with # pages", [at as u64, limit as u64]);
        Ok(())
    }

    fn squeeze(&mut self) {
        let squeezed = self.pressure.squeeze();
        if !squeezed.merged {
            self.log.count("squeezes", 1);
            self.log
                .count("pages squeezed", squeezed.bytes / PAGE_SIZE as u64);
            self.log.add("# bytes are squeezed", [squeezed.bytes]);
        }
        if self.bug == Some(Bug::ReleaseInFlight)
            && let Some(buffer) = self.crash_disk.buffer_in_flight()
        {
            // The contents of a page that was released.
            buffer.write(0, &[POISON; PAGE_SIZE]);
        }
    }

    /// The client is gone, whatever is in flight: the disk still works on it.
    fn disconnect(&mut self, at: usize) {
        if self.lanes[at].take().is_none() {
            return;
        }
        self.log.count("broken connections", 1);
        self.log.add("# is gone", [at as u64]);
        if self.client.lock().orphans.is_empty() {
            return;
        }
        // Once the writes are done, their sectors may be written again. Whether they were done
        // isn't known.
        while self.crash_disk.step(&mut self.rng) {}
        let c = &mut *self.client.lock();
        for (sector, sectors) in c.orphans.drain(..) {
            c.checker.write_failed(sector, sectors);
        }
    }

    fn check(&mut self) -> Result<(), String> {
        let trouble = self.client.lock().trouble.take();
        if let Some(why) = trouble.or_else(|| self.crash_disk.take_trouble()) {
            return Err(why);
        }
        match self.pressure.report().total.claimed {
            0 => Ok(()),
            _ => Err("a page was given back while somebody had it".into()),
        }
    }
}
