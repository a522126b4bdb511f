//! Queues whose batches meet at one log, each with a stripe of its own.

use super::{Queue, next, owner};
use loom::sync::atomic::{AtomicU32, Ordering};
use pvblk_block::Buffer;
use pvblk_block::stacked::Primitives;
use pvblk_raid5::words::{
    Answer, Arrival, Claimed, Closed, Epoch, LogBatch, LogEntry, LogErrands, LogFormat, LogStep,
    LogToken, Logs, Looked, Owner, Parked, Part, Partial, Place, Room, Stop, Table, Token, Waiting,
};
use pvblk_raid5::{Geometry, Layout, STRIPE_BYTES};
use std::sync::{Arc, LazyLock, Mutex};

/// One step of a queue.
#[derive(Clone, Copy, PartialEq)]
pub enum Step {
    /// A write to its stripe.
    Write,
    /// The same; a member fails the first unit that the queue writes.
    Fail,
    /// The end of a stripe whose unit is stable when the run begins.
    Finish,
    Kick,
}

/// A rule that the queues break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// Data is written without the log.
    NoLog,
    /// The log's writer doesn't see that words are stopped.
    NoLook,
    /// A batch that is sent back is written as it was planned.
    StalePlan,
    /// A part of a unit is given back before its stripe is written.
    EarlyPart,
    /// Nobody posts the answer to the owner of a batch.
    NotAnswered,
    /// Nobody posts the log to its next writer.
    NotPosted,
    /// The kick isn't told of words that are drained.
    NotTold,
    /// Nobody is told to go on.
    NotGoneOn,
}

/// A message for a queue.
pub enum Post {
    Answer(Answer<()>),
    Log(LogToken<Claimed, ()>),
    Drained,
    GoOn,
}

type Errands = LogErrands<()>;
type Stable = (Token<Waiting, ()>, Part);

/// Partial parity of all stripes in all runs.
static PAGE: LazyLock<Buffer> = LazyLock::new(|| Buffer::anonymous(STRIPE_BYTES).expect("memory"));

/// An array whose stripes have one log.
pub struct Logged<P: Primitives> {
    stripes: Table<(), (), P>,
    logs: Logs<(), P>,
    epoch: Epoch<P>,
    /// An epoch that is never odd, for a fault.
    no_epoch: Epoch<P>,
    queues: Vec<Queue<Post>>,
    places: Mutex<Vec<Place>>,
    log_places: Mutex<Vec<Place>>,
    room: Room,
    /// Stripes of the unit that is stable when the run begins, by queue.
    parts: Mutex<Vec<Option<Stable>>>,
    /// Counts changes of members.
    members: AtomicU32,
    /// 1: the stripe, or the log behind all stripes, has I/O in flight.
    flying: Vec<AtomicU32>,
    /// Lets other threads run where nothing else is shared.
    visits: AtomicU32,
    fault: Fault,
}

impl<P: Primitives> Logged<P> {
    /// `most`: stripes of a unit.
    pub fn new(queues: usize, most: usize, fault: Fault) -> Arc<Logged<P>> {
        let geometry = Geometry::new(3, 64, Layout::LeftSymmetric, 64);
        let format = LogFormat {
            geometry: geometry.expect("a geometry"),
            signature: 1,
        };
        let (stripes, places) = Table::new(queues, queues as u32, || ());
        let (logs, log_places) = Logs::new(format, 3 * queues as u32).expect("memory");
        let queue = |_| Queue::new().expect("an event");
        Arc::new(Logged {
            stripes,
            logs,
            epoch: Epoch::default(),
            no_epoch: Epoch::default(),
            queues: (0..queues).map(queue).collect(),
            places: Mutex::new(places),
            log_places: Mutex::new(log_places),
            room: Room {
                bytes: (most * STRIPE_BYTES) as u64,
                segments: 100,
            },
            parts: Mutex::new((0..queues).map(|_| None).collect()),
            members: AtomicU32::new(0),
            flying: (0..=queues).map(|_| AtomicU32::new(0)).collect(),
            visits: AtomicU32::new(0),
            fault,
        })
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn post(&self, to: usize, post: Post) {
        self.queues[to].post(|all| all.push(post));
    }

    fn tell(&self, kickers: impl IntoIterator<Item = Owner>) {
        for kicker in kickers {
            if !self.has(Fault::NotTold) {
                self.post(kicker.number() as usize - 1, Post::Drained);
            }
        }
    }

    fn take(places: &Mutex<Vec<Place>>) -> Place {
        let place = places.lock().expect("no panic").pop();
        place.expect("a place for each write")
    }

    /// Number of the log among those with I/O.
    fn log(&self) -> usize {
        self.queues.len()
    }

    fn begin_io(&self, of: usize, planned: u32) {
        self.flying[of].store(1, Ordering::Relaxed);
        self.check_members(planned);
    }

    fn end_io(&self, of: usize, planned: u32) {
        self.check_members(planned);
        self.flying[of].store(0, Ordering::Relaxed);
    }

    fn check_members(&self, planned: u32) {
        let members = self.members.load(Ordering::Relaxed);
        assert_eq!(members, planned / 2, "planned for other members");
    }

    fn check_rest(&self, context: &str) {
        for flying in &self.flying {
            assert_eq!(flying.load(Ordering::Relaxed), 0, "{context}");
        }
    }

    /// Claims a queue's stripe.
    fn claim(&self, queue: usize) -> Token<Claimed, ()> {
        let place = Self::take(&self.places);
        match self.stripes.arrive(queue, owner(queue), place, ()) {
            Arrival::Claimed(token, _) => token,
            Arrival::Joined => panic!("a queue for each stripe"),
        }
    }

    /// Plans and closes a queue's batch.
    fn close(
        &self,
        queue: usize,
        mut token: Token<Claimed, ()>,
        inbox: &mut Vec<Post>,
    ) -> Token<Waiting, ()> {
        loop {
            match self.stripes.look(token, &self.epoch) {
                Looked::Open(open) => {
                    let closed = self.stripes.close(open, &mut Vec::new());
                    let (waiting, tell) = self.stripes.wait(closed, &self.epoch);
                    self.tell(tell);
                    return waiting;
                }
                Looked::Parked(parked, tell) => {
                    self.tell(tell);
                    while !matches!(next(&self.queues[queue], inbox), Post::GoOn) {}
                    token = self.stripes.go_on(parked);
                }
            }
        }
    }

    fn send(&self, token: Token<Waiting, ()>) -> Option<LogToken<Claimed, ()>> {
        let entry = LogEntry {
            stripe: token.at() as u64,
            stripes: 1,
            first: 0,
            blocks: 1,
            partial: Some(Partial::Page(PAGE.clone())),
        };
        let place = Self::take(&self.log_places);
        self.logs.arrive(place, LogBatch { token, entry })
    }

    /// Makes a unit of these queues' stripes, before others run.
    pub fn begin(&self, queues: &[usize]) {
        let mut log = None;
        for queue in queues {
            let token = self.close(*queue, self.claim(*queue), &mut Vec::new());
            log = self.send(token).or(log);
        }
        let Some(log) = log else { return };
        let mut errands = Errands::default();
        let wide = Room {
            bytes: 1 << 20,
            segments: 100,
        };
        let LogStep::Write(writing) = self.logs.begin(log, wide, &self.epoch, &mut errands) else {
            panic!("nobody kicks");
        };
        self.logs.written(writing, &mut errands);
        let mut parts = self.parts.lock().expect("no panic");
        for answer in errands.answers {
            let Answer::Stable { token, part, .. } = answer else {
                panic!("it is stable");
            };
            self.begin_io(token.at(), token.epoch());
            let at = token.at();
            parts[at] = Some((token, part));
        }
    }

    pub fn step(&self, queue: usize, step: Step) {
        match step {
            Step::Write => self.write(queue, false),
            Step::Fail => self.write(queue, true),
            Step::Finish => {
                let part = self.parts.lock().expect("no panic")[queue].take();
                let (token, part) = part.expect("its unit is stable");
                let planned = token.epoch();
                let closed = self.stripes.resume(token);
                self.finish(queue, closed, part, planned);
            }
            Step::Kick => {
                if let Ok(stop) = self.epoch.stop(owner(queue)) {
                    self.kick(queue, stop, &mut Vec::new());
                }
            }
        }
    }

    /// A write, until its stripe is free again.
    fn write(&self, queue: usize, mut fails: bool) {
        let mut inbox = Vec::new();
        let mut token = self.claim(queue);
        loop {
            let waiting = self.close(queue, token, &mut inbox);
            let planned = waiting.epoch();
            if self.has(Fault::NoLog) {
                self.begin_io(queue, planned);
                self.end_io(queue, planned);
                return self.release(self.stripes.resume(waiting));
            }
            match self.wait_for_log(queue, waiting, &mut fails, &mut inbox) {
                Answer::Stable { token, part, .. } => {
                    let closed = self.stripes.resume(token);
                    self.begin_io(queue, planned);
                    return self.finish(queue, closed, part, planned);
                }
                Answer::Again { token: parked, .. } => {
                    if self.has(Fault::StalePlan) {
                        self.begin_io(queue, planned);
                        self.end_io(queue, planned);
                    }
                    token = self.stripes.go_on(parked);
                }
            }
        }
    }

    /// The end of a stripe's I/O.
    fn finish(&self, queue: usize, closed: Token<Closed, ()>, part: Part, planned: u32) {
        let mut errands = Errands::default();
        if !self.has(Fault::EarlyPart) {
            self.end_io(queue, planned);
        }
        self.logs.done(part, true, &self.epoch, &mut errands);
        self.visits.fetch_add(1, Ordering::Relaxed);
        let (mine, log) = self.run_errands(queue, errands);
        assert!(mine.is_none() && log.is_none(), "it has no batch");
        if self.has(Fault::EarlyPart) {
            self.end_io(queue, planned);
        }
        self.release(closed);
    }

    fn release(&self, closed: Token<Closed, ()>) {
        let tell = self.stripes.release(closed, &self.epoch);
        self.tell(tell.expect("a queue for each stripe"));
    }

    /// Waits for the answer to a batch, and writes the log if that is this queue's turn.
    fn wait_for_log(
        &self,
        queue: usize,
        batch: Token<Waiting, ()>,
        fails: &mut bool,
        inbox: &mut Vec<Post>,
    ) -> Answer<()> {
        let planned = batch.epoch();
        let mut log = self.send(batch);
        let mut held: Option<LogToken<Parked, ()>> = None;
        loop {
            if let Some(token) = log.take() {
                let mut errands = Errands::default();
                let mut stop = None;
                let epoch = match self.fault {
                    Fault::NoLook if planned == 0 => &self.no_epoch,
                    _ => &self.epoch,
                };
                let mut step = self.logs.begin(token, self.room, epoch, &mut errands);
                if let LogStep::Flush(flushing) = step {
                    self.begin_io(self.log(), planned);
                    self.end_io(self.log(), planned);
                    step = self.logs.flushed(flushing, self.room, epoch, &mut errands);
                }
                match step {
                    LogStep::Held(token) => held = Some(token),
                    LogStep::Left => {}
                    LogStep::Flush(_) => panic!("it is flushed"),
                    LogStep::Write(writing) => {
                        self.visits.fetch_add(1, Ordering::Relaxed);
                        self.check_rest("stripes of the unit before it");
                        self.begin_io(self.log(), planned);
                        self.end_io(self.log(), planned);
                        if std::mem::take(fails) {
                            stop = self.logs.failed(writing, &self.epoch, &mut errands).ok();
                        } else {
                            self.logs.written(writing, &mut errands);
                        }
                    }
                }
                let mine;
                (mine, log) = self.run_errands(queue, errands);
                if let Some(stop) = stop {
                    self.kick(queue, stop, inbox);
                }
                if let Some(answer) = mine {
                    assert!(log.is_none() && held.is_none(), "it has no batch");
                    return answer;
                }
                continue;
            }
            match next(&self.queues[queue], inbox) {
                Post::Answer(answer) => return answer,
                Post::Log(token) => log = Some(token),
                Post::GoOn => log = held.take().map(|held| self.logs.go_on(held)),
                Post::Drained => {}
            }
        }
    }

    /// Gives the queue its own answer and its own log, and posts the others'.
    fn run_errands(
        &self,
        queue: usize,
        errands: Errands,
    ) -> (Option<Answer<()>>, Option<LogToken<Claimed, ()>>) {
        let (mut mine, mut log) = (None, None);
        self.tell(errands.tell);
        for answer in errands.answers {
            let to = answer.owner().number() as usize - 1;
            if to == queue {
                mine = Some(answer);
            } else if !self.has(Fault::NotAnswered) {
                self.post(to, Post::Answer(answer));
            }
        }
        for token in errands.yours {
            let to = token.owner().number() as usize - 1;
            if to == queue {
                log = Some(token);
            } else if !self.has(Fault::NotPosted) {
                self.post(to, Post::Log(token));
            }
        }
        (mine, log)
    }

    /// A kick from its stop to its end. Messages of other kinds stay in the inbox.
    fn kick(&self, queue: usize, stop: Stop, inbox: &mut Vec<Post>) {
        let mut stripes = self.stripes.in_flight(&stop);
        let mut logs = self.logs.in_flight(&stop);
        let mut others = Vec::new();
        while self.stripes.is_in_flight(&mut stripes) | self.logs.is_in_flight(&mut logs) {
            match next(&self.queues[queue], inbox) {
                Post::Drained => {}
                other => others.push(other),
            }
        }
        others.append(inbox);
        *inbox = others;
        self.check_rest("members are changed under I/O");
        let members = self.members.load(Ordering::Relaxed);
        self.members.store(members + 1, Ordering::Relaxed);
        self.epoch.go_on(stop);
        for to in (0..self.queues.len()).filter(|_| !self.has(Fault::NotGoneOn)) {
            self.post(to, Post::GoOn);
        }
    }

    /// Checks the end of a run: nobody owns a stripe or the log.
    pub fn check_end(&self) {
        let log = self.logs.peek(2);
        assert_eq!((log.newest(), log.owner()), (None, None), "the log");
        for at in 0..self.stripes.count() {
            assert_eq!(self.stripes.peek(at).owner(), None, "stripe {at}");
        }
    }
}
