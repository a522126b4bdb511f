//! Queues, stops and failures in random order, by one thread: each batch is answered once, no log is written over early, and nobody waits for
//! ever.

use super::log_tests::{
    ALL, MEMBERS, ROW, ROWS, Stripe, Stripes, format, owner, page, parity_of, read_unit,
};
use super::*;
use crate::STRIPE_BYTES;
use pvblk_testing::seeds;
use std::collections::BTreeSet;

/// Something that a queue goes on with.
#[derive(Debug)]
enum Work {
    Claimed(Token<Claimed, Stripe>),
    /// It goes on when it was told to.
    Parked(Token<Parked, Stripe>, bool),
    Stable(Token<Waiting, Stripe>, Part),
    /// Data and parity are at the members.
    Data(Token<Closed, Stripe>, Part),
    Log(LogToken<Claimed, Stripe>),
    Held(LogToken<Parked, Stripe>, bool),
    Flushing(Flushing<Stripe>),
    Unit(Writing<Stripe>),
}

struct Queue {
    places: OwnPlaces,
    blocks: LogBlocks,
    work: Vec<Work>,
    /// Batches in logs, by log.
    waits: [usize; MEMBERS as usize],
}

impl Queue {
    /// Its batches. There is a place at logs for each: one that waited for a place would hold up a stop, which those in logs wait for.
    fn batches(&self) -> usize {
        let is_stripes = |work: &&Work| {
            matches!(
                work,
                Work::Claimed(_) | Work::Parked(..) | Work::Stable(..) | Work::Data(..)
            )
        };
        self.work.iter().filter(is_stripes).count() + self.places.in_use()
    }
}

/// A log's area, and the stripes that it protects.
#[derive(Default)]
struct Area {
    generation: u64,
    /// The unit that is being written.
    unit: BTreeSet<u64>,
    /// Stripes whose data and parity aren't at the members yet, or at some.
    open: BTreeSet<u64>,
    /// Stripes that may be in caches only.
    cached: BTreeSet<u64>,
    /// The batch that was told last that its log is stable.
    last: u64,
}

/// Queues that take random steps.
struct World {
    rng: fastrand::Rng,
    stripes: Stripes,
    logs: Logs<Stripe>,
    epoch: Epoch,
    pieces: Vec<Place>,
    places: Places,
    room: Room,
    queues: Vec<Option<Queue>>,
    areas: Vec<Area>,
    stop: Option<(Stop, InFlight, InFlight)>,
    /// Counts changes of members.
    members: u32,
    /// All members but one are gone: every list fails.
    broken: bool,
    arrivals: u64,
    duties: LogErrands<Stripe>,
    ways: Ways,
}

/// Counts things that a run is to have.
#[derive(Debug, Default, Clone, Copy)]
struct Ways {
    stable: usize,
    joined: usize,
    full: usize,
    held: usize,
    again: usize,
    failed: usize,
    flushed: usize,
    flush_failed: usize,
    handed_over: usize,
    stops: usize,
}

const EACH: usize = 4;

impl World {
    fn new(seed: u64) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let queues = rng.usize(2..=6);
        let (stripes, pieces) = Table::new((ROW * ROWS) as usize, 1, Stripe::default);
        let (logs, places) = Logs::new(format(), (queues * EACH) as u32).expect("memory");
        let room = Room {
            bytes: rng.u64(1..=4) * STRIPE_BYTES as u64,
            segments: rng.usize(2..=6),
        };
        let mut world = World {
            rng,
            stripes,
            logs,
            epoch: Epoch::default(),
            pieces,
            places: Places::new(places),
            room,
            queues: Vec::new(),
            areas: (0..MEMBERS).map(|_| Area::default()).collect(),
            stop: None,
            members: 0,
            broken: false,
            arrivals: 0,
            duties: LogErrands::default(),
            ways: Ways::default(),
        };
        for _ in 0..queues {
            let opened = world.open();
            world.queues.push(Some(opened));
        }
        world
    }

    fn open(&self) -> Queue {
        Queue {
            places: self.places.open(EACH).expect("places for all"),
            blocks: LogBlocks::default(),
            work: Vec::new(),
            waits: [0; MEMBERS as usize],
        }
    }

    fn step(&mut self) {
        let queue = self.rng.usize(..self.queues.len());
        match self.rng.u32(..100) {
            0..25 => self.arrive(queue),
            25..92 => self.go_on(queue),
            92..94 => self.close_or_open(queue),
            94..95 if self.stop.is_none() => self.begin_stop(queue),
            _ => self.end_stop(),
        }
        self.check();
    }

    /// A queue claims a stripe that is free. Most are in the first row, so that logs have several.
    fn arrive(&mut self, queue: usize) {
        let rows = if self.rng.bool() { 1 } else { ROWS };
        let at = self.rng.usize(..(rows * ROW) as usize);
        let Some(q) = &mut self.queues[queue] else {
            return;
        };
        if self.stripes.peek(at).owner().is_some() || q.batches() >= EACH {
            return;
        }
        let place = self.pieces.pop().expect("one at a time");
        let arrival = self.stripes.arrive(at, owner(queue), place, ());
        let Arrival::Claimed(token, arrived) = arrival else {
            panic!("it was free");
        };
        self.pieces.push(arrived.place);
        q.work.push(Work::Claimed(token));
    }

    fn entry(&mut self, queue: usize, stripe: u64) -> LogEntry {
        let first = self.rng.usize(..ALL);
        let blocks = self.rng.usize(1..=ALL - first);
        let byte = self.rng.u8(..);
        let q = self.queues[queue].as_mut().expect("it has a batch");
        let partial = match (blocks == ALL, self.rng.bool()) {
            (true, _) => None,
            (false, true) => Some(page(byte)),
            (false, false) => Some(Partial::Sum(q.blocks.take().expect("memory"))),
        };
        LogEntry {
            stripe,
            stripes: 1,
            first,
            blocks,
            partial,
        }
    }

    /// The next step of something that a queue has.
    fn go_on(&mut self, queue: usize) {
        let Some(q) = &mut self.queues[queue] else {
            return;
        };
        if q.work.is_empty() {
            return;
        }
        let work = q.work.swap_remove(self.rng.usize(..q.work.len()));
        match work {
            Work::Claimed(token) => self.plan(queue, token),
            Work::Parked(token, true) => {
                let token = self.stripes.go_on(token);
                self.put(queue, Work::Claimed(token));
            }
            Work::Stable(token, part) => {
                assert_eq!(token.epoch() / 2, self.members, "for these members");
                self.areas[parity_of(token.at() as u64)]
                    .open
                    .insert(token.at() as u64);
                let closed = self.stripes.resume(token);
                self.put(queue, Work::Data(closed, part));
            }
            Work::Data(token, part) => self.data_ends(queue, token, part),
            Work::Log(token) if self.broken => {
                self.logs.refuse(token, &self.epoch, &mut self.duties);
            }
            Work::Log(token) => {
                let duties = &mut self.duties;
                let step = self.logs.begin(token, self.room, &self.epoch, duties);
                self.log_goes_on(queue, step);
            }
            Work::Held(held, true) => {
                let token = self.logs.go_on(held);
                self.put(queue, Work::Log(token));
            }
            Work::Flushing(flushing) => self.flush_ends(queue, flushing),
            Work::Unit(writing) => self.unit_ends(queue, writing),
            waits @ (Work::Parked(..) | Work::Held(..)) => self.put(queue, waits),
        }
        self.run_errands(queue);
    }

    fn put(&mut self, queue: usize, work: Work) {
        let q = self.queues[queue].as_mut().expect("it has work");
        q.work.push(work);
    }

    fn plan(&mut self, queue: usize, token: Token<Claimed, Stripe>) {
        if self.broken {
            let freed = self.stripes.release(token, &self.epoch);
            freed.expect("nobody came");
            return;
        }
        let q = self.queues[queue].as_mut().expect("it has a batch");
        let place = q.places.take().expect("one for each batch");
        let open = match self.stripes.look(token, &self.epoch) {
            Looked::Open(open) => open,
            Looked::Parked(parked, _) => {
                q.places.put(place);
                return self.put(queue, Work::Parked(parked, false));
            }
        };
        let mut closed = self.stripes.close(open, &mut Vec::new());
        self.arrivals += 1;
        closed.record_mut().arrival = self.arrivals;
        let (token, _) = self.stripes.wait(closed, &self.epoch);
        let stripe = token.at() as u64;
        q.waits[parity_of(stripe)] += 1;
        let entry = self.entry(queue, stripe);
        match self.logs.arrive(place, LogBatch { token, entry }) {
            Some(token) => self.put(queue, Work::Log(token)),
            None => self.ways.joined += 1,
        }
    }

    fn log_goes_on(&mut self, queue: usize, step: LogStep<Stripe>) {
        let work = match step {
            LogStep::Held(held) => {
                assert!(self.stop.is_some(), "held without a stop");
                self.ways.held += 1;
                // The end of a broken array's stop is never told.
                Work::Held(held, self.broken)
            }
            LogStep::Flush(flushing) => Work::Flushing(flushing),
            LogStep::Write(writing) => {
                self.unit_begins(&writing);
                Work::Unit(writing)
            }
            LogStep::Left => return,
        };
        self.put(queue, work);
    }

    fn unit_begins(&mut self, writing: &Writing<Stripe>) {
        let area = &mut self.areas[writing.at()];
        assert!(area.open.is_empty(), "stripes of the unit before it");
        assert!(area.cached.is_empty(), "they are in caches");
        assert!(area.unit.is_empty(), "two units");
        let (generation, _, stripes) = read_unit(writing.buffers(), writing.at());
        assert!(generation > area.generation && !stripes.is_empty());
        area.generation = generation;
        area.unit = stripes.iter().map(|(stripe, ..)| *stripe).collect();
        let partial = stripes.iter().filter(|(_, _, blocks)| *blocks < ALL);
        let partial = partial.count();
        assert_eq!(area.unit.len(), stripes.len(), "each once");
        assert_eq!(writing.buffers().len(), 1 + partial);
        let most = (self.room.bytes as usize / STRIPE_BYTES).min(self.room.segments - 1);
        assert!(partial <= most);
        self.ways.full += usize::from(partial == most);
    }

    fn flush_ends(&mut self, queue: usize, flushing: Flushing<Stripe>) {
        if self.rng.u32(..8) == 0 {
            let (logs, duties) = (&self.logs, &mut self.duties);
            let (step, stop) = logs.flush_failed(flushing, &self.epoch, duties);
            self.ways.flush_failed += 1;
            self.has_stopped(stop);
            return self.log_goes_on(queue, step);
        }
        self.ways.flushed += 1;
        self.areas.iter_mut().for_each(|area| area.cached.clear());
        let (logs, duties) = (&self.logs, &mut self.duties);
        let step = logs.flushed(flushing, self.room, &self.epoch, duties);
        self.log_goes_on(queue, step);
    }

    fn unit_ends(&mut self, queue: usize, writing: Writing<Stripe>) {
        let at = writing.at();
        let mut unit = std::mem::take(&mut self.areas[at].unit);
        if self.rng.u32(..8) == 0 {
            let stop = self.logs.failed(writing, &self.epoch, &mut self.duties);
            self.ways.failed += 1;
            assert_eq!(self.duties.answers.len(), unit.len());
            self.has_stopped(stop);
            return;
        }
        self.logs.written(writing, &mut self.duties);
        for answer in &self.duties.answers {
            let Answer::Stable { token, entry, .. } = answer else {
                panic!("the unit is stable");
            };
            assert!(unit.remove(&entry.stripe), "not in the unit");
            assert_eq!(token.at() as u64, entry.stripe);
            let area = &mut self.areas[at];
            assert!(area.last < token.record().arrival, "the order");
            area.last = token.record().arrival;
            // Until the stripe is written, the log is its only protection.
            area.open.insert(entry.stripe);
        }
        assert!(unit.is_empty(), "not told: {unit:?}");
        assert!(self.queues[queue].is_some());
    }

    fn data_ends(&mut self, queue: usize, token: Token<Closed, Stripe>, part: Part) {
        let stripe = token.at() as u64;
        let volatile = self.rng.u32(..3) == 0;
        let area = &mut self.areas[parity_of(stripe)];
        assert!(area.open.remove(&stripe));
        if volatile {
            area.cached.insert(stripe);
        }
        if self.rng.u32(..50) == 0 {
            self.begin_stop(queue);
        }
        let duties = &mut self.duties;
        self.logs.done(part, volatile, &self.epoch, duties);
        self.stripes
            .release(token, &self.epoch)
            .expect("nobody came");
    }

    fn run_errands(&mut self, queue: usize) {
        self.duties.tell.clear();
        for answer in std::mem::take(&mut self.duties.answers) {
            let to = answer.owner().number() as usize - 1;
            let q = self.queues[to].as_mut().expect("it has a batch");
            let (work, entry, place) = match answer {
                Answer::Stable {
                    token,
                    entry,
                    place,
                    part,
                } => {
                    self.ways.stable += 1;
                    (Work::Stable(token, part), entry, place)
                }
                Answer::Again {
                    token,
                    entry,
                    place,
                } => {
                    self.ways.again += 1;
                    // If words are stopped, the end of the stop is still to be told.
                    let told = !matches!(self.epoch.look(), Seen::Stopped(_));
                    (Work::Parked(token, told || self.broken), entry, place)
                }
            };
            q.waits[parity_of(entry.stripe)] -= 1;
            q.places.put(place);
            if let Some(Partial::Sum(block)) = entry.partial {
                q.blocks.put(block);
            }
            q.work.push(work);
        }
        for token in std::mem::take(&mut self.duties.yours) {
            let to = token.owner().number() as usize - 1;
            self.ways.handed_over += usize::from(to != queue);
            self.put(to, Work::Log(token));
        }
    }

    fn begin_stop(&mut self, queue: usize) {
        let stop = self.epoch.stop(owner(queue));
        self.has_stopped(stop);
    }

    fn has_stopped(&mut self, stop: Result<Stop, Owner>) {
        let Ok(stop) = stop else {
            assert!(self.stop.is_some());
            return;
        };
        let stripes = self.stripes.in_flight(&stop);
        let logs = self.logs.in_flight(&stop);
        self.stop = Some((stop, stripes, logs));
        self.ways.stops += 1;
    }

    /// Ends a stop if all is drained, and tells all queues to go on.
    fn end_stop(&mut self) {
        let Some((stop, mut stripes, mut logs)) = self.stop.take() else {
            return;
        };
        if self.stripes.is_in_flight(&mut stripes) | self.logs.is_in_flight(&mut logs) {
            self.stop = Some((stop, stripes, logs));
            return;
        }
        let is_flying = |work: &Work| {
            matches!(
                work,
                Work::Stable(..) | Work::Data(..) | Work::Flushing(_) | Work::Unit(_)
            )
        };
        for work in self.queues.iter_mut().flatten().flat_map(|q| &mut q.work) {
            assert!(!is_flying(work), "members change under {work:?}");
            if let Work::Parked(_, told) | Work::Held(_, told) = work {
                *told = true;
            }
        }
        // The other members were flushed before their superblocks are written.
        self.members += 1;
        self.epoch.go_on(stop);
    }

    fn close_or_open(&mut self, queue: usize) {
        let is_busy = |q: &Queue| !q.work.is_empty() || q.places.in_use() > 0;
        if self.queues[queue].as_ref().is_some_and(is_busy) {
            return;
        }
        self.queues[queue] = match self.queues[queue].take() {
            Some(closed) => {
                self.places.close(closed.places);
                None
            }
            None => Some(self.open()),
        };
    }

    /// No token of a stripe or of a log is lost, and who has a log's has a batch in it, so that its queue isn't closed.
    fn check(&self) {
        let mut stripes = 0;
        let mut logs = [false; MEMBERS as usize];
        for q in self.queues.iter().flatten() {
            stripes += q.waits.iter().sum::<usize>();
            for work in &q.work {
                let log = match work {
                    Work::Claimed(_) | Work::Parked(..) => {
                        stripes += 1;
                        continue;
                    }
                    Work::Stable(..) | Work::Data(..) => {
                        stripes += 1;
                        let at = match work {
                            Work::Stable(token, _) => token.at(),
                            Work::Data(token, _) => token.at(),
                            _ => continue,
                        };
                        logs[parity_of(at as u64)] = true;
                        continue;
                    }
                    Work::Log(token) => token.at(),
                    Work::Held(token, _) => token.at(),
                    Work::Flushing(flushing) => flushing.at(),
                    Work::Unit(writing) => writing.at(),
                };
                assert!(q.waits[log] > 0, "{work:?} of a queue without a batch");
                assert!(!logs[log], "two writers");
                logs[log] = true;
            }
        }
        let is_busy = |at: &usize| self.stripes.peek(*at).owner().is_some();
        let busy = (0..self.stripes.count()).filter(is_busy).count();
        assert_eq!(busy, stripes, "a stripe's token is lost");
        for (log, owned) in logs.into_iter().enumerate() {
            let is_busy = self.logs.peek(log).owner().is_some();
            assert_eq!(is_busy, owned, "log {log}");
        }
    }

    /// Lets all batches end, and closes all queues.
    fn finish(mut self, broken: bool) -> Ways {
        if broken && self.stop.is_none() {
            self.begin_stop(0);
        }
        self.broken = broken;
        if broken {
            for work in self.queues.iter_mut().flatten().flat_map(|q| &mut q.work) {
                if let Work::Parked(_, told) | Work::Held(_, told) = work {
                    *told = true;
                }
            }
        }
        let has_work = |q: &Queue| !q.work.is_empty() || q.places.in_use() > 0;
        for _ in 0..10_000 {
            if !self.queues.iter().flatten().any(has_work) && (broken || self.stop.is_none()) {
                break;
            }
            if !broken {
                self.end_stop();
            }
            (0..self.queues.len()).for_each(|queue| self.go_on(queue));
            self.check();
        }
        for queue in 0..self.queues.len() {
            if self.queues[queue].is_some() {
                self.close_or_open(queue);
            }
            assert!(self.queues[queue].is_none(), "queue {queue} isn't done");
        }
        assert!(self.places.open(self.queues.len() * EACH).is_some());
        self.check();
        self.ways
    }
}

#[test]
fn each_batch_is_answered_once_and_no_log_is_written_over_early() {
    let mut ways = Ways::default();
    for seed in seeds(48, 600) {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.ways = ways;
        (0..1000).for_each(|_| world.step());
        ways = world.finish(seed % 4 == 0);
    }
    println!("{ways:?}");
    if pvblk_testing::given_seed().is_none() {
        let each = [
            ways.stable,
            ways.joined,
            ways.full,
            ways.held,
            ways.again,
            ways.failed,
            ways.flushed,
            ways.flush_failed,
            ways.handed_over,
            ways.stops,
        ];
        assert!(each.into_iter().all(|n| n > 100), "{ways:?}");
    }
}
